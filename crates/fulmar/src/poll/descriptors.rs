//! Descriptors of the kernel in a poll set: sockets, pipes, timers of the host beside those of a stack.
//!
//! `members` is an epoll set of the descriptors; it says which are ready, and nothing else has to be
//! remembered of them. `watch` is an epoll set of that one, once: a thread of this poll set sleeps on it and
//! ends the wait of the owner. While a member is ready, or may be, the owner looks at `members` by itself with
//! every wait, and the thread sleeps.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fulmar_runtime::PollSetCore;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Event;
use crate::Ready;

/// Events taken from the kernel at a time.
const EVENTS: usize = 64;
/// What the thread wakes for.
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
    /// None yet, and a thread that waits for them.
    ///
    /// # Errors
    /// Too many descriptors or threads.
    pub fn new(core: &Arc<PollSetCore>) -> io::Result<Descriptors> {
        let members = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let watch = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        watch.add(&members.0, once())?;
        watch.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let (core, watched) = (Arc::clone(core), Arc::clone(&watch));
        let thread = thread::Builder::new().name("fulmar-poll".to_owned()).spawn(move || {
            fulmar_runtime::block_signals();
            run(&watched, &core);
        })?;
        Ok(Descriptors { members, watch, stop, thread: Some(thread) })
    }

    /// Adds a descriptor, or changes its token and interest.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`: `EPERM` for a file that is always ready.
    pub fn add(&self, fd: impl AsFd, token: usize, interest: Ready) -> io::Result<()> {
        let mut event = EpollEvent::new(flags_of(interest), token as u64);
        match self.members.add(&fd, event) {
            Err(Errno::EEXIST) => Ok(self.members.modify(&fd, &mut event)?),
            added => Ok(added?),
        }
    }

    /// # Errors
    /// `ENOENT`: it is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.members.delete(fd)?)
    }

    /// Appends the descriptors that are ready, `most` at most. False if none is: the thread waits for the
    /// next one.
    ///
    /// # Errors
    /// None is expected.
    pub fn collect(&self, events: &mut Vec<Event>, most: usize) -> io::Result<bool> {
        let mut found = [EpollEvent::empty(); EVENTS];
        let room = found.len().min(most);
        let count = match self.members.wait(&mut found[..room], EpollTimeout::ZERO) {
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

    /// In a forked child the thread does not exist, and what would stop it is the parent's.
    pub fn forget(mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let _ = self.stop.write(1);
        // If it panicked, the panic has been printed already.
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

/// The members as one member of `watch`, which is silent once it has spoken.
fn once() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, MEMBERS)
}

/// Each readiness with its flag of the kernel; errors and hang-ups are always told.
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
