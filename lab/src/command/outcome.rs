//! Exit status and messages of a command.

use nix::sys::signal::{SigSet, Signal};
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The result of a command or of one of its steps; an error is a sentence.
pub type Outcome<T = ()> = Result<T, String>;

/// Adds the failed operation to an I/O error.
pub trait During<T> {
    /// `what` completes the sentence "fulmar-lab: ".
    fn during(self, what: impl fmt::Display) -> Outcome<T>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|e| format!("{what}: {e}"))
    }
}

/// Prints a line.
///
/// # Errors
/// Standard output is closed, or its disk is full.
pub fn say(line: impl fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).during("cannot print")
}

/// From now on a signal to end sets the flag; a second one ends the process.
///
/// # Errors
/// There is no thread to take signals.
pub fn stop_flag() -> Outcome<Arc<AtomicBool>> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().map_err(io::Error::from).during("cannot catch signals")?;
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    let take = move || {
        while let Ok(signal) = signals.wait() {
            if set.swap(true, Ordering::SeqCst) {
                fulmar::stat::control::remove_own();
                std::process::exit(128 + signal as i32);
            }
        }
    };
    let thread = thread::Builder::new().name("signals".into()).spawn(take);
    thread.map(|_| flag).during("cannot catch signals")
}

/// Options as a command line gives them, for tests.
#[cfg(test)]
pub fn parse<'w, A: clap::Args>(
    words: impl IntoIterator<Item = &'w str>,
) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("command"));
    A::from_arg_matches(&command.try_get_matches_from(words)?)
}
