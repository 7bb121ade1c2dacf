//! The driver: the program's own thread runs the stack.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use crate::api::error::{invalid, to_io};
use crate::api::stack::Stack;
use crate::runtime::Driving;

/// Runs a stack in the program's own thread: a call to [`Driver::turn`] receives, runs timers, and wakes tasks that wait
/// in a poll function ([`TcpStream::poll_read`](crate::TcpStream::poll_read) and others). It serves every async runtime,
/// and event loops of a program.
///
/// While it lives the service thread of the stack is parked. [`AsFd`] gives a descriptor that covers device, timers and
/// other threads: once [`Driver::rest`] has returned true, it is readable when the next turn has something to do. Between
/// two turns the calls of the driver's thread leave their frames to the next turn, which sends them as one burst, for two
/// milliseconds at most.
///
/// The poll functions work without a driver, too: the service thread runs the stack then, in a thread of its own, which
/// costs two switches of threads for each answer.
///
/// If the driver is not turned for 100 ms after its descriptor became readable, since its thread is busy or its event loop
/// does not run, the service thread runs the stack until the next turn. Dropping the driver gives the stack back to it.
///
/// With several shards each has a driver of its own: see [`Stack::on_shard`].
///
/// ```
/// # use std::os::fd::AsFd;
/// # use fulmar::{Stack, devices};
/// # use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
/// # fn main() -> std::io::Result<()> {
/// # let (device, _peer) = devices::link_pair()?;
/// let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).build()?;
/// let mut driver = stack.driver()?;
/// for _ in 0..3 {
///     while driver.turn()? || !driver.rest()? {
///         // Tasks that were woken run here.
///     }
///     let mut ready = [PollFd::new(driver.as_fd(), PollFlags::POLLIN)];
///     poll(&mut ready, PollTimeout::from(10u8))?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Driver {
    driving: Driving,
    stack: Stack,
}

impl Stack {
    /// The driver of this stack, or of one of its shards ([`Stack::on_shard`]).
    ///
    /// # Errors
    /// `ResourceBusy`: there is one. `InvalidInput`: a handle to all of several shards. Too many descriptors.
    pub fn driver(&self) -> io::Result<Driver> {
        if self.home.is_none() && self.shards() > 1 {
            return Err(invalid(
                "a stack of several shards needs a driver for each: Stack::on_shard",
            ));
        }
        let host = self.inner.host(self.home.unwrap_or(0));
        let device = host.call(|shard, _| Ok(shard.device().wake_fd())).map_err(to_io)?;
        let busy = || io::Error::new(io::ErrorKind::ResourceBusy, "the stack has a driver already");
        let driving = Driving::new(host, device)?.ok_or_else(busy)?;
        Ok(Driver { driving, stack: self.clone() })
    }
}

impl Driver {
    /// Runs the stack once: sends, receives at most 128 frames, runs timers, and wakes tasks. True: something came, or a
    /// task was woken.
    ///
    /// # Errors
    /// `EBADF` in a forked child; `ENETDOWN` after a panic in the stack ([`Stack::failure`]).
    pub fn turn(&mut self) -> io::Result<bool> {
        self.driving.turn().map_err(to_io)
    }

    /// Prepares a sleep on the descriptor, when no task has anything to do. False: turn again, since something has come
    /// meanwhile, or since the policy of waiting ([`ModerationConfig`](crate::config::ModerationConfig)) busy-polls for some
    /// microseconds more.
    ///
    /// # Errors
    /// As [`Driver::turn`].
    pub fn rest(&mut self) -> io::Result<bool> {
        self.driving.rest().map_err(to_io)
    }

    /// The stack that it runs.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }
}

impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driving.as_fd()
    }
}

impl AsRawFd for Driver {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("stack", &self.stack).finish_non_exhaustive()
    }
}
