//! Ctrl-C and SIGTERM, for commands that have something to finish first.

use crate::failure::{Failure, Outcome};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

/// Tells whether the user wants the command to end. A second Ctrl-C ends it at once.
pub struct Interrupt(Receiver<()>);

impl Interrupt {
    /// Catches the signals from now on. Once per process.
    pub fn catch() -> Outcome<Interrupt> {
        let (tell, hear) = channel();
        let mut times = 0u32;
        ctrlc::set_handler(move || {
            times += 1;
            if times > 1 || tell.send(()).is_err() {
                std::process::exit(130);
            }
        })
        .map_err(|e| Failure::new(format!("cannot catch Ctrl-C: {e}")))?;
        Ok(Interrupt(hear))
    }

    /// Whether it came.
    pub fn came(&self) -> bool {
        self.0.try_recv().is_ok()
    }

    /// Sleeps until `due`. False: it came meanwhile.
    pub fn sleep_until(&self, due: Instant) -> bool {
        let left = due.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left) == Err(RecvTimeoutError::Timeout)
    }
}
