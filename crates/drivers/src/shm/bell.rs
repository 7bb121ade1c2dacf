//! Waking the other process, and learning that it is gone.
//!
//! The sleeper's word in its own memory says what it wants: `epoch << 2 | wants_room << 1 | sleeps`.
//! The epoch grows with every arming, so that the peer rings once per sleep. The sleeper
//! writes the word and then checks once more for work; a producer makes its work visible first and
//! then reads the word. With full fences between the two, one of them sees the other.
//!
//! The bell is one byte on the Unix socket that the processes met on. An eventfd would be cheaper by
//! a few hundred nanoseconds, but whether writing to it waits is a property that both processes can
//! change; on a socket each call says for itself that it must not wait. The same socket tells when
//! the other process is gone, and so does a descriptor of that process, where the kernel has them:
//! a child that inherited the socket would hold it open.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::layout::BELL;
use super::sys::{self, OwnMap, PeerMap};

const SLEEPS: u64 = 1;
const WANTS_ROOM: u64 = 2;

/// Messages that one look takes at most: there is one per sleep if the peer is honest.
const MESSAGES: usize = 4;

/// Both directions of waking.
pub struct Bell {
    socket: OwnedFd,
    process: Option<OwnedFd>,
    watch: OwnedFd,
    /// Armings of this end; written by its owner only.
    epoch: AtomicU64,
    /// The word for which the peer was rung last.
    rung: AtomicU64,
}

impl Bell {
    pub fn new(socket: OwnedFd) -> std::io::Result<Bell> {
        let process = sys::peer_process(socket.as_fd()).ok();
        let both = [Some(&socket), process.as_ref()].into_iter().flatten();
        let watch = sys::watch(&both.map(AsFd::as_fd).collect::<Vec<_>>())?;
        let (epoch, rung) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Bell { socket, process, watch, epoch, rung })
    }

    /// Readable when the other process has rung or is gone.
    pub fn fd(&self) -> RawFd {
        self.watch.as_raw_fd()
    }

    /// From now on the other process rings when it brings frames, or also when it brings room.
    pub fn arm(&self, own: &OwnMap, wants_room: bool) {
        let epoch = self.epoch.load(Ordering::Relaxed) + 1;
        self.epoch.store(epoch, Ordering::Relaxed);
        let room = if wants_room { WANTS_ROOM } else { 0 };
        own.store(BELL, epoch << 2 | room | SLEEPS, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// No ringing any more.
    pub fn disarm(&self, own: &OwnMap) {
        own.store(BELL, self.epoch.load(Ordering::Relaxed) << 2, Ordering::Relaxed);
    }

    /// Rings if the other process sleeps and wants it; answers whether it did. The frames, or the
    /// room, were made visible before.
    pub fn ring(&self, peer: &PeerMap, brings_frames: bool) -> bool {
        fence(Ordering::SeqCst);
        let word = peer.load(BELL, Ordering::Relaxed);
        let wanted = word & SLEEPS != 0 && (brings_frames || word & WANTS_ROOM != 0);
        if !wanted || self.rung.load(Ordering::Relaxed) == word {
            return false;
        }
        // In this order: of two threads that ring at once neither may rely on the other's message
        // before that is on its way. A message too many wakes once in vain.
        sys::send_message(self.socket.as_fd());
        self.rung.store(word, Ordering::Relaxed);
        true
    }

    /// Consumes the pending wake-up bytes. Only the end that they are for may: a sleeper would sleep on.
    pub fn swallow(&self) {
        let mut messages = 0;
        while messages < MESSAGES && sys::take_message(self.socket.as_fd()) {
            messages += 1;
        }
    }

    /// Whether the other process is there.
    pub fn is_alive(&self) -> bool {
        !sys::has_ended(self.socket.as_fd(), self.process.as_ref().map(AsFd::as_fd))
    }

    /// Tells the other process that it is alone now.
    pub fn hang_up(&self) {
        sys::shut(self.socket.as_fd());
    }
}
