//! Descriptors of the kernel in a poll set: sockets, pipes, timers.
//!
//! `members` is an epoll set of the descriptors, and the only state about them. `watch` is an epoll set whose member is
//! `members`, with EPOLLONESHOT: a thread sleeps on it and ends a wait of the owner. While a member may be ready, every
//! wait of the owner polls `members`, and the thread sleeps.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::runtime::PollSetCore;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Event;
use crate::Ready;

/// Events taken from the kernel at a time.
const EVENTS: usize = 64;
/// The data of the events for which the thread wakes.
const MEMBERS: u64 = 0;
const STOP: u64 = 1;

/// See the module's header.
pub(super) struct Descriptors {
    members: Arc<Epoll>,
    watch: Arc<Epoll>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Descriptors {
    /// An empty set, and its thread.
    ///
    /// # Errors
    /// Too many descriptors or threads.
    pub(super) fn new(core: &Arc<PollSetCore>) -> io::Result<Descriptors> {
        let members = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let watch = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        watch.add(&members.0, once())?;
        watch.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let (core, watched) = (Arc::clone(core), Arc::clone(&watch));
        let thread = thread::Builder::new().name("fulmar-poll".to_owned()).spawn(move || {
            crate::runtime::block_signals();
            run(&watched, &core);
        })?;
        Ok(Descriptors { members, watch, stop, thread: Some(thread) })
    }

    /// Adds a descriptor, or changes its token and interest.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`: `EPERM` for a file that is always ready.
    pub(super) fn add(&self, fd: impl AsFd, token: usize, interest: Ready) -> io::Result<()> {
        let mut event = EpollEvent::new(flags_of(interest), token as u64);
        match self.members.add(&fd, event) {
            Err(Errno::EEXIST) => Ok(self.members.modify(&fd, &mut event)?),
            added => Ok(added?),
        }
    }

    /// # Errors
    /// `ENOENT`: it is not in the set.
    pub(super) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.members.delete(fd)?)
    }

    /// Appends the ready descriptors, at most `most`. False if there is none: the thread waits for the next one.
    ///
    /// # Errors
    /// None is expected.
    pub(super) fn collect(&self, events: &mut Vec<Event>, most: usize) -> io::Result<bool> {
        let mut found = [EpollEvent::empty(); EVENTS];
        let space = found.len().min(most);
        let count = match self.members.wait(&mut found[..space], EpollTimeout::ZERO) {
            Err(Errno::EINTR) => 0,
            waited => waited?,
        };
        let token = |e: &EpollEvent| e.data() as usize;
        events.extend(
            found[..count].iter().map(|e| Event { token: token(e), ready: ready_of(e.events()) }),
        );
        if count == 0 {
            self.watch.modify(&self.members.0, &mut once())?;
        }
        Ok(count > 0)
    }

    /// For a forked child, in which the thread does not exist; the eventfd that would stop it is the parent's.
    pub(super) fn forget(mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let _ = self.stop.write(1);
        // A panic of the thread was reported by the panic hook.
        let _ = thread.join();
    }
}

/// Ends a wait of the set's owner whenever a member became ready.
fn run(watch: &Epoll, core: &PollSetCore) {
    let mut found = [EpollEvent::empty(); 2];
    loop {
        let count = match watch.wait(&mut found, EpollTimeout::NONE) {
            Err(Errno::EINTR) => 0,
            Err(_) => return,
            Ok(count) => count,
        };
        if found[..count].iter().any(|e| e.data() == STOP) {
            return;
        }
        if count > 0 {
            core.signal_others();
        }
    }
}

/// The event of `members` in `watch`: disabled after one report.
fn once() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, MEMBERS)
}

/// Each readiness with its flag of epoll, which always reports errors and hang-ups.
const FLAGS: [(Ready, EpollFlags); 5] = [
    (Ready::READABLE, EpollFlags::EPOLLIN),
    (Ready::WRITABLE, EpollFlags::EPOLLOUT),
    (Ready::PEER_CLOSED, EpollFlags::EPOLLRDHUP),
    (Ready::ERROR, EpollFlags::EPOLLERR),
    (Ready::CLOSED, EpollFlags::EPOLLHUP),
];

fn flags_of(interest: Ready) -> EpollFlags {
    let wanted = FLAGS.iter().filter(|(ready, _)| interest.contains(*ready)).map(|(_, flag)| *flag);
    let edge =
        if interest.contains(Ready::EDGE) { EpollFlags::EPOLLET } else { EpollFlags::empty() };
    wanted.fold(edge, |all, flag| all | flag)
}

fn ready_of(flags: EpollFlags) -> Ready {
    let found = FLAGS.iter().filter(|(_, flag)| flags.contains(*flag)).map(|(ready, _)| *ready);
    found.fold(Ready::NONE, |all, ready| all | ready)
}
