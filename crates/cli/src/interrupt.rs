//! Ctrl-C and SIGTERM. A command that has something to say first ([`Interrupt`]) decides itself;
//! the others end the process in order ([`end_in_order`]): what was accepted is delivered, for at
//! most the stack's documented time, and the stack is no longer listed.

use crate::failure::{Failure, Outcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

/// What a shell expects of a program that ended by SIGINT.
pub const INTERRUPTED: i32 = 130;
static ENDING: AtomicBool = AtomicBool::new(false);
/// Nothing has begun that must end in order.
static IDLE: AtomicBool = AtomicBool::new(false);

/// From now on a signal ends the process in order.
pub fn end_in_order() -> Outcome {
    handle(|| {
        ENDING.store(true, Ordering::SeqCst);
        fulmar::control::remove_own();
        std::process::exit(INTERRUPTED);
    })
}

/// Called before the main thread reports or ends: if a signal is ending the process, what went
/// wrong since is its doing, so this waits for the end instead.
pub fn yield_to_end() {
    while ENDING.load(Ordering::SeqCst) {
        thread::park();
    }
}

/// Tells whether the user wants the command to end. A second signal ends it at once.
pub struct Interrupt(Receiver<()>);

impl Interrupt {
    /// Catches the signals from now on. Once per process.
    pub fn catch() -> Outcome<Interrupt> {
        let (tell, hear) = channel();
        let mut times = 0u32;
        handle(move || {
            times += 1;
            if times > 1 || tell.send(()).is_err() {
                std::process::exit(INTERRUPTED);
            }
        })?;
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

/// From now on a signal sets what this returns, which whatever runs looks at; a second one ends the
/// process at once.
pub fn stop_flag() -> Outcome<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    handle(move || {
        if set.swap(true, Ordering::SeqCst) || IDLE.load(Ordering::SeqCst) {
            std::process::exit(INTERRUPTED);
        }
    })?;
    Ok(flag)
}

/// Runs what may wait for somebody else and looks at no flag: a signal meanwhile ends the process.
pub fn at_once_during<R>(wait: impl FnOnce() -> R) -> R {
    IDLE.store(true, Ordering::SeqCst);
    let result = wait();
    IDLE.store(false, Ordering::SeqCst);
    result
}

fn handle(handler: impl FnMut() + Send + 'static) -> Outcome {
    ctrlc::set_handler(handler).map_err(|e| Failure::new(format!("cannot catch Ctrl-C: {e}")))
}
