//! The time-out of a stream.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Is over when nothing has crossed a stream for some time.
#[derive(Debug)]
pub(crate) struct Idle {
    limit: Duration,
    last: Instant,
    /// From the first wait on. It is not moved by each byte: when it ends it looks at `last`.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Idle {
    pub(crate) fn new(limit: Duration) -> Idle {
        Idle { limit, last: Instant::now(), sleep: None }
    }

    /// Something has crossed.
    pub(crate) fn touch(&mut self) {
        self.last = Instant::now();
    }

    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(end) = self.last.checked_add(self.limit) else { return Poll::Pending };
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(end)));
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= end {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(end);
        }
    }
}
