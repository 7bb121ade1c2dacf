//! Wakes a thread that waits in a poll set.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

use crate::runtime::PollSetCore;

/// The tokens of wakers that were used since the last wait.
pub(super) struct Woken {
    core: Arc<PollSetCore>,
    tokens: Mutex<Vec<usize>>,
}

impl Woken {
    pub(super) fn new(core: &Arc<PollSetCore>) -> Woken {
        Woken { core: Arc::clone(core), tokens: Mutex::default() }
    }

    /// The tokens, each once.
    pub(super) fn take(&self) -> Vec<usize> {
        std::mem::take(&mut *self.tokens.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Ends a wait of a [`PollSet`](super::PollSet) from any thread: see [`PollSet::waker`](super::PollSet::waker).
///
/// As a [`std::task::Waker`] (`Waker::into`) it can be passed to a completion or a future, whose end the poll set then
/// reports. Not for signal handlers: it takes a lock.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let set = stack.poll_set()?;
/// let waker = set.waker(9);
/// std::thread::spawn(move || waker.wake());
/// let mut events = Vec::new();
/// set.wait(&mut events, None)?;
/// assert_eq!(events[0].token, 9);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Waker {
    woken: Arc<Woken>,
    token: usize,
}

impl Waker {
    pub(super) fn new(woken: &Arc<Woken>, token: usize) -> Waker {
        Waker { woken: Arc::clone(woken), token }
    }

    /// Ends the current wait of the set, else the next one, which reports the token as readable: once for any number of
    /// calls before it.
    pub fn wake(&self) {
        let mut tokens = self.woken.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if !tokens.contains(&self.token) {
            tokens.push(self.token);
        }
        drop(tokens);
        self.woken.core.signal_others();
    }
}

impl Wake for Waker {
    fn wake(self: Arc<Self>) {
        Waker::wake(&self);
    }
}

impl From<Waker> for std::task::Waker {
    fn from(waker: Waker) -> std::task::Waker {
        Arc::new(waker).into()
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("token", &self.token).finish_non_exhaustive()
    }
}
