//! SIGINT, SIGTERM and SIGHUP. A command that reports something first asks an [`Interrupt`]; others end the process in
//! order ([`end_in_order`]): the stack delivers the accepted bytes for at most its documented time, and is removed from
//! the list of stacks.

use crate::failure::{During, Outcome};
use nix::sys::signal::{SigSet, Signal};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

/// Signals that end a command.
const ENDING_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
static ENDING: AtomicBool = AtomicBool::new(false);

/// Exit status of the last signal.
static STATUS: AtomicU8 = AtomicU8::new(0);

/// The exit status that a shell reports of a program that a signal has ended (POSIX).
pub const fn status_of(signal: Signal) -> u8 {
    128 + signal as u8
}

/// The exit status of the last signal that came; 0 without one.
pub fn last_status() -> u8 {
    STATUS.load(Ordering::SeqCst)
}

/// From now on a signal ends the process in order.
pub fn end_in_order() -> Outcome {
    handle(|status| {
        ENDING.store(true, Ordering::SeqCst);
        fulmar::stat::control::remove_own();
        std::process::exit(status.into());
    })
}

/// Waits for the exit if a signal is ending the process: errors since are a consequence of it and are not reported. To
/// be called before the main thread reports or exits.
pub fn wait_if_exiting() {
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
        handle(move |status| {
            times += 1;
            if times > 1 || tell.send(()).is_err() {
                std::process::exit(status.into());
            }
        })?;
        Ok(Interrupt(hear))
    }

    /// Whether the user has ended the command.
    pub fn came(&self) -> bool {
        self.0.try_recv().is_ok()
    }

    /// Sleeps until `due`. False: it came meanwhile.
    pub fn sleep_until(&self, due: Instant) -> bool {
        let left = due.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left) == Err(RecvTimeoutError::Timeout)
    }
}

/// From now on a signal sets the returned flag; a second one ends the process at once.
pub fn stop_flag() -> Outcome<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    handle(move |status| {
        if set.swap(true, Ordering::SeqCst) {
            std::process::exit(status.into());
        }
    })?;
    Ok(flag)
}

/// Blocks the signals, for the threads to come as well, and takes them in a thread of its own. `handler` gets the
/// exit status that belongs to the signal. Threads that run already must have blocked them.
fn handle(mut handler: impl FnMut(u8) + Send + 'static) -> Outcome {
    let set: SigSet = ENDING_SIGNALS.into_iter().collect();
    set.thread_block().map_err(io::Error::from).during("cannot catch signals")?;
    let take = move || {
        loop {
            if let Ok(signal) = set.wait() {
                STATUS.store(status_of(signal), Ordering::SeqCst);
                handler(status_of(signal));
            }
        }
    };
    let thread = thread::Builder::new().name("signals".into()).spawn(take);
    thread.map(drop).during("cannot catch signals")
}
