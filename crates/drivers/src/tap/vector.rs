//! Bursts of small frames in one crossing: which frames go together, and what became of each.
//!
//! A frame that is sent is copied into a slot of the ring, with its virtio-net header in front; one
//! that was received is copied out of a slot into a buffer of its size. So no operation refers to a
//! buffer of the pool (`sys.rs`), and what a copy of so few bytes costs is far less than the system
//! call that it saves. Frames that do not fit a slot go alone, in their turn.
//!
//! When is it cheaper? Measured on Linux 6.18, the best tenth of many rounds, ns per frame of 64 bytes that the
//! kernel throws away, the null system call at 136:
//!
//! | frames at once | 1 | 2 | 3 | 4 | 8 | 16 | 32 | 64 |
//! |---|---|---|---|---|---|---|---|---|
//! | `writev` each | 492 | 503 | 505 | 497 | 502 | 495 | 498 | 503 |
//! | ring, registered slots | 634 | 514 | 473 | 452 | 406 | 381 | 379 | 364 |
//! | ring, slots not registered | 643 | 535 | 489 | 464 | 420 | 403 | 392 | 390 |
//!
//! and of 1514 bytes 545 against 404 at 64, 532 against 490 at 4. A frame of 64 KiB costs 3.8 µs, of
//! which the ring would save a tenth of a microsecond.

#[allow(unsafe_code)]
mod sys;

use std::io;
use std::os::fd::BorrowedFd;

use fulmar_base::DropReason;
use fulmar_mbuf::{Chain, Pool, Purpose};
use fulmar_netdev::{Burst, Caps, Packet, offload, uso};
use fulmar_wire::eth;

use crate::buffer_pair::{LARGE_BYTES, SMALL_BYTES};
use crate::udp_gso::UdpGso;
use crate::{sys as calls, vnet};
use sys::{Buffers, Slots};

/// Most frames of one crossing. The cost per frame hardly falls any more.
const TX_SLOTS: usize = 64;
/// Space for a packet of MTU 1500 with its headers; no multiple of a large power of two, so that slots
/// do not share the sets of a cache.
const TX_SLOT_BYTES: usize = 1600;
/// Fewer frames go one by one.
const TX_LEAST: usize = 3;
/// Most frames of one crossing to receive: their slots hold the longest frame each.
const RX_SLOTS: usize = 16;
const RX_SLOT_BYTES: usize = (vnet::HEADER_BYTES + SMALL_BYTES + LARGE_BYTES).next_multiple_of(64);
/// Fewer frames are read one by one.
const RX_LEAST: usize = 3;
/// Longer frames are worth a system call, and no copy.
const RX_SHORT_BYTES: usize = 2048;

/// The rings of one descriptor.
pub struct Vector {
    tx: Slots,
    /// Cleared for good when the interface took some frames of a burst and refused ones before them:
    /// order is worth more than crossings.
    sends: bool,
    rx: Slots,
    /// Frames that were refused, on their way back to the burst.
    refused: Burst,
}

/// Whether the interface accepted a frame; the errno if not.
pub type Written = Result<(), i32>;

impl Vector {
    /// The rings of a TAP, or the reason why there are none, as the rest of a sentence.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Vector, String> {
        // With a limit a burst might be taken in part, and its order be lost.
        if calls::tun_send_buffer(fd).is_ok_and(|bytes| bytes < i32::MAX) {
            return Err("the interface has a send buffer of its own (TUNSETSNDBUF)".into());
        }
        Vector::try_open(fd).map_err(|e| match e.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                format!("io_uring: {e}; `sysctl kernel.io_uring_disabled=0` allows it")
            }
            _ => format!("io_uring: {e}"),
        })
    }

    fn try_open(fd: BorrowedFd<'_>) -> io::Result<Vector> {
        let mut vector = Vector::rings(fd)?;
        probe(&mut vector.tx)?;
        Ok(vector)
    }

    fn rings(fd: BorrowedFd<'_>) -> io::Result<Vector> {
        let tx = Slots::open(fd, TX_SLOTS, TX_SLOT_BYTES, Buffers::Registered)?;
        // Not registered: that would keep a megabyte in memory for good.
        let rx = Slots::open(fd, RX_SLOTS, RX_SLOT_BYTES, Buffers::Unregistered)?;
        Ok(Vector { tx, sends: true, rx, refused: Burst::with_capacity(TX_SLOTS) })
    }

    /// Whether frames are sent together at all.
    pub fn sends(&self) -> bool {
        self.sends
    }

    /// How many frames from the front may cross together; 0: send the first one alone. With UDP GSO, datagrams of
    /// one flow among them are to cross as one, after those before them.
    #[inline]
    pub fn run(&self, burst: &Burst, caps: &Caps, joins: UdpGso) -> usize {
        if burst.len() < TX_LEAST || !self.sends {
            return 0;
        }
        let fits = |p: &&Packet| {
            p.chain.len() <= TX_SLOT_BYTES - vnet::HEADER_BYTES
                && !p.chain.is_kernel_only()
                && offload::check(p, caps).is_ok()
        };
        let mut run = burst.iter().take(TX_SLOTS).take_while(fits).count();
        if joins.is_on() {
            run = uso::before_join(burst.iter().take(run), caps);
        }
        if run < TX_LEAST { 0 } else { run }
    }

    /// Offers the first `run` frames to the interface in one crossing, in order. `complete` gets each
    /// with its outcome and gives back the ones to keep, which are then in front of the burst, in order.
    /// Answers how many those are.
    pub fn send(
        &mut self,
        run: usize,
        burst: &mut Burst,
        mut complete: impl FnMut(Packet, Written) -> Option<Packet>,
    ) -> usize {
        let mut lengths = [0; TX_SLOTS];
        for ((slot, length), p) in lengths.iter_mut().enumerate().zip(burst.iter()).take(run) {
            *length = fill(self.tx.slot(slot), p);
        }
        let results = self.tx.write(&lengths[..run]);
        let in_order = complete_all(results, burst, &mut self.refused, &mut complete);
        self.sends &= in_order && !self.tx.is_broken();
        put_back(&mut self.refused, burst)
    }

    /// How many frames to ask for at once where `expected` may wait; 0: read the next one alone.
    pub fn ask(&self, expected: usize, space: usize) -> usize {
        let ask = expected.min(space).min(RX_SLOTS);
        if ask < RX_LEAST || self.rx.is_broken() { 0 } else { ask }
    }

    /// Asks for `count` frames in one crossing and gives every one that came to `each`.
    pub fn receive(
        &mut self,
        count: usize,
        pool: &mut Pool,
        mut each: impl FnMut(Result<Packet, DropReason>),
    ) -> Received {
        let mut came = Received { frames: 0, all_short: true, errno: None };
        let mut bytes = [0; RX_SLOTS];
        let results = self.rx.read(count).map(|r| r.unwrap_or(-libc::EREMOTEIO));
        bytes.iter_mut().zip(results).for_each(|(to, from)| *to = from);
        if self.rx.is_broken() {
            return came;
        }
        for (slot, result) in bytes.into_iter().enumerate().take(count) {
            let Ok(bytes) = usize::try_from(result) else {
                came.errno = came.errno.or(Some(result.saturating_neg()));
                continue;
            };
            came.frames += 1;
            came.all_short &= bytes <= RX_SHORT_BYTES;
            let slot = self.rx.slot(slot);
            each(keep(slot.get(..bytes).unwrap_or(slot), pool));
        }
        came
    }

    /// In words, for a person.
    pub fn describe() -> String {
        format!(
            "io_uring for {TX_LEAST} to {TX_SLOTS} small frames at once ({RX_SLOTS} to receive), \
             writev and readv for others"
        )
    }
}

/// What a crossing brought.
pub struct Received {
    /// Frames, those that are dropped included.
    pub frames: usize,
    /// None was longer than a packet of the usual size.
    pub all_short: bool,
    /// The first error; EAGAIN: nothing more waits.
    pub errno: Option<i32>,
}

/// Whether a frame of so many bytes is one of those that are read many at a time.
pub fn is_short(bytes: usize) -> bool {
    bytes <= RX_SHORT_BYTES
}

/// Sees whether operations that must not wait are parsed: a frame of one byte is refused for its
/// length, and nothing else is wrong with it.
fn probe(tx: &mut Slots) -> io::Result<()> {
    match tx.write(&[1]).next().flatten() {
        Some(e) if e == -libc::EINVAL => Ok(()),
        Some(e) if e < 0 => Err(io::Error::from_raw_os_error(-e)),
        _ => Err(io::Error::from_raw_os_error(libc::EPROTO)),
    }
}

/// Writes header and frame into a slot, which is long enough; returns how many bytes that are.
#[inline]
fn fill(slot: &mut [u8], p: &Packet) -> u32 {
    let (header, space) = slot.split_at_mut(vnet::HEADER_BYTES);
    header.copy_from_slice(&vnet::request_for(p));
    let mut at = 0;
    for piece in p.chain.slices() {
        if let Some(to) = space.get_mut(at..at + piece.len()) {
            to.copy_from_slice(piece);
            at += piece.len();
        }
    }
    (vnet::HEADER_BYTES + at) as u32
}

/// Takes a frame from the front for every result and settles it; those to keep go to `refused`.
/// Answers whether none was sent behind one that was refused.
fn complete_all(
    results: impl Iterator<Item = Option<i32>>,
    burst: &mut Burst,
    refused: &mut Burst,
    complete: &mut impl FnMut(Packet, Written) -> Option<Packet>,
) -> bool {
    let mut in_order = true;
    for result in results {
        let Some(p) = burst.pop_front() else { break };
        // What the system does not tell of is not sent again: once is better than twice.
        let written = match result.unwrap_or(-libc::EREMOTEIO) {
            0.. => Ok(()),
            e => Err(e.saturating_neg()),
        };
        in_order &= refused.is_empty() || written.is_err();
        if let Some(p) = complete(p, written) {
            // It holds as many as there are slots.
            let _ = refused.push(p);
        }
    }
    in_order
}

/// Puts refused frames in front again, in order; returns how many.
fn put_back(refused: &mut Burst, burst: &mut Burst) -> usize {
    let count = refused.len();
    while let Some(p) = refused.pop_back() {
        // They came from there.
        let _ = burst.push_front(p);
    }
    count
}

/// A received frame in a buffer of its size.
fn keep(bytes: &[u8], pool: &mut Pool) -> Result<Packet, DropReason> {
    let (header, frame) =
        bytes.split_first_chunk::<{ vnet::HEADER_BYTES }>().ok_or(DropReason::Truncated)?;
    if frame.len() < eth::HEADER_BYTES {
        return Err(DropReason::Truncated);
    }
    let offload = vnet::parse(header, frame.len(), frame)?;
    let mut chain = pool.alloc_chain(frame.len(), 0, Purpose::Receive);
    if frame.len() <= SMALL_BYTES {
        chain = chain.or_else(|_| pool.alloc_chain(frame.len(), 0, Purpose::Control));
    }
    let mut chain: Chain = chain.map_err(|_| DropReason::NoBuffer)?;
    chain.copy_from(0, frame);
    Ok(Packet { chain, offload })
}

#[cfg(test)]
mod tests;
