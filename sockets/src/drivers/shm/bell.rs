//! Wakes the other process, and detects its end.
//!
//! The sleeper's word in its own memory has its request: `epoch << 2 | wants_space << 1 | sleeps`.
//! The epoch grows with every arming, so that the peer rings once per sleep. The sleeper writes the word and then polls
//! once more; a producer publishes its work and then reads the word. With full fences in between, one of them sees the
//! other.
//!
//! The bell is one byte on the Unix socket of the rendezvous. An eventfd would be cheaper by a few hundred
//! nanoseconds, but either process could make it blocking (O_NONBLOCK belongs to the open file); on a socket
//! each call has MSG_DONTWAIT. The socket also reports the end of the other process, and so does its pidfd,
//! where the kernel has them: a child that inherited the socket would keep it open.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use fulmar_stack::device::Interest;

use super::layout::BELL;
use super::sys::{self, OwnMap, PeerMap};

const SLEEPS: u64 = 1;
const WANTS_SPACE: u64 = 2;

/// Most messages read per poll: an honest peer sends one per sleep.
const MESSAGES: usize = 4;

/// The kind of index that a producer has published: sent frames, or returned space.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    Frames,
    Space,
}

/// Both directions of waking.
pub(super) struct Bell {
    socket: OwnedFd,
    process: Option<OwnedFd>,
    watch: OwnedFd,
    /// Armings of this end; written by its owner only.
    epoch: AtomicU64,
    /// The peer's word at the last ring.
    rung: AtomicU64,
}

impl Bell {
    pub(super) fn new(socket: OwnedFd) -> std::io::Result<Bell> {
        let process = sys::peer_process(socket.as_fd()).ok();
        let both = [Some(&socket), process.as_ref()].into_iter().flatten();
        let watch = sys::watch(&both.map(AsFd::as_fd).collect::<Vec<_>>())?;
        let (epoch, rung) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Bell { socket, process, watch, epoch, rung })
    }

    /// Readable when the other process has rung or is gone.
    pub(super) fn fd(&self) -> RawFd {
        self.watch.as_raw_fd()
    }

    /// Asks the other process to ring for frames, or for freed slots, too.
    pub(super) fn arm(&self, own: &OwnMap, interest: Interest) {
        let epoch = self.epoch.load(Ordering::Relaxed) + 1;
        self.epoch.store(epoch, Ordering::Relaxed);
        let space = match interest {
            Interest::Readable => 0,
            Interest::ReadableOrWritable => WANTS_SPACE,
        };
        own.store(BELL, epoch << 2 | space | SLEEPS, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the request.
    pub(super) fn disarm(&self, own: &OwnMap) {
        own.store(BELL, self.epoch.load(Ordering::Relaxed) << 2, Ordering::Relaxed);
    }

    /// Rings if the other process sleeps and has asked for it. Returns whether it did. The caller has
    /// published the frames, or the space, before.
    pub(super) fn ring(&self, peer: &PeerMap, news: News) -> bool {
        fence(Ordering::SeqCst);
        let word = peer.load(BELL, Ordering::Relaxed);
        let wanted = word & SLEEPS != 0 && (news == News::Frames || word & WANTS_SPACE != 0);
        if !wanted || self.rung.load(Ordering::Relaxed) == word {
            return false;
        }
        // Send, then note: of two threads that ring, neither may rely on a message that is not sent yet.
        // A surplus message is one spurious wake-up.
        sys::send_message(self.socket.as_fd());
        self.rung.store(word, Ordering::Relaxed);
        true
    }

    /// Consumes pending wake-up bytes. Called by the woken end only.
    pub(super) fn swallow(&self) {
        let mut messages = 0;
        while messages < MESSAGES && sys::take_message(self.socket.as_fd()) {
            messages += 1;
        }
    }

    /// Whether the other process lives and has the device open.
    pub(super) fn is_alive(&self) -> bool {
        !sys::has_ended(self.socket.as_fd(), self.process.as_ref().map(AsFd::as_fd))
    }

    /// Closes the connection to the other process.
    pub(super) fn hang_up(&self) {
        sys::shut(self.socket.as_fd());
    }
}
