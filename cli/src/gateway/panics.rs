//! A panic of the gateway itself, in any thread: it is logged, and ends the process with its connections reset.
//!
//! The relay's own thread unwinds, and [`Gateway::run`] resets what is open on its way. A panic of another thread
//! wakes the relay, which then ends in order.

use std::any::Any;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use fulmar_gateway::Gateway;
use fulmar_gateway::stat::Summary;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::log::Log;

/// Exit status of a gateway that has panicked: that of any panic in Rust.
pub const STATUS: i32 = 101;

/// Whether a thread has panicked.
pub struct Panics {
    has_panicked: Arc<AtomicBool>,
    wake: Arc<EventFd>,
}

impl Panics {
    /// Logs every panic from now on. To be called by the relay's thread.
    ///
    /// # Errors
    /// No descriptor.
    pub fn watch(log: &Log) -> io::Result<Panics> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let panics = Panics { has_panicked: Arc::default(), wake: Arc::new(wake) };
        let (relay, log) = (thread::current().id(), log.clone());
        let (has_panicked, wake) = (Arc::clone(&panics.has_panicked), Arc::clone(&panics.wake));
        panic::set_hook(Box::new(move |what| {
            log.fail(&format!("the gateway is ending because of an internal error: {what}"));
            has_panicked.store(true, Relaxed);
            if thread::current().id() != relay {
                // Where it cannot be woken the relay is on its way out already.
                let _ = wake.write(1);
            }
        }));
        Ok(panics)
    }

    /// Has a panic of another thread end the relay.
    ///
    /// # Errors
    /// No descriptor, or that of the epoll set.
    pub fn end_relay(&self, gateway: &mut Gateway) -> io::Result<()> {
        let fd = self.wake.as_fd().try_clone_to_owned()?;
        gateway.on_readable(fd, Box::new(|_, _| ControlFlow::Break(())))
    }

    /// Whether there was one.
    pub fn has_panicked(&self) -> bool {
        self.has_panicked.load(Relaxed)
    }
}

/// Relays until the end. `None`: a panic has ended it.
pub fn run(gateway: &mut Gateway, panics: &Panics) -> Option<io::Result<Summary>> {
    let relayed: Result<_, Box<dyn Any + Send>> = catch_unwind(AssertUnwindSafe(|| gateway.run()));
    relayed.ok().filter(|_| !panics.has_panicked())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const INSIDE: &str = "FULMAR_TEST_FAULT";

    /// A process of its own: the hook is the whole process's.
    #[test]
    fn a_panic_of_any_thread_is_logged_and_wakes_the_relay() {
        let name = "gateway::panics::tests::a_panic_of_any_thread_is_logged_and_wakes_the_relay";
        if std::env::var_os(INSIDE).is_some() {
            let panics = Panics::watch(&Log::to_stderr("pasta", true)).unwrap();
            assert!(!panics.has_panicked());
            let own: Result<(), _> = catch_unwind(|| panic!("of the relay"));
            assert!(own.is_err() && panics.has_panicked());
            let woken = || panics.wake.read().map_err(io::Error::from).map(drop);
            assert_eq!(woken().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let other = thread::spawn(|| panic!("of another thread"));
            assert!(other.join().is_err());
            return woken().unwrap();
        }
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
        let output = test.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        for fault in ["of the relay", "of another thread"] {
            assert!(said.contains(fault), "{said}");
        }
        assert_eq!(
            said.matches("pasta: the gateway is ending because of an internal error").count(),
            2,
            "{said}"
        );
    }
}
