//! Several small frames with one call of io_uring.
//!
//! A sent frame is copied into a slot, behind its virtio-net header; a received frame is copied from a slot into a
//! buffer of its size. So no operation refers to a buffer of the pool (`sys.rs`), and the copy of a small frame costs
//! far less than the system call that it saves. A frame that does not fit a slot is sent with a call of its own, in
//! order. `docs/bursts.md` has the cost per frame of both ways.

#[allow(unsafe_code)]
mod sys;

use std::io;
use std::os::fd::BorrowedFd;

use fulmar_stack::base::DropReason;
use fulmar_stack::device::{Burst, Caps, Packet, offload, uso};
use fulmar_stack::mbuf::{Chain, Pool, Purpose};
use fulmar_stack::wire::eth;

use crate::drivers::buffer_pair::{LARGE_BYTES, SMALL_BYTES};
use crate::drivers::udp_gso::UdpGso;
use crate::drivers::{sys as calls, vnet};
use sys::{Buffers, Slots};

/// Frames at most per call. With more the cost per frame hardly falls.
const TX_SLOTS: usize = 64;
/// A packet of MTU 1500 with its headers; no multiple of a large power of two, so that slots are in different cache
/// sets.
const TX_SLOT_BYTES: usize = 1600;
/// Fewer frames are sent one by one.
const TX_LEAST: usize = 3;
/// Frames at most per call to receive. Each slot holds the longest frame.
const RX_SLOTS: usize = 16;
const RX_SLOT_BYTES: usize = (vnet::HEADER_BYTES + SMALL_BYTES + LARGE_BYTES).next_multiple_of(64);
/// Fewer frames are read one by one.
const RX_LEAST: usize = 3;
/// Longer frames are received with a call of their own, without the copy.
const RX_SHORT_BYTES: usize = 2048;

/// The rings of one descriptor.
pub(super) struct Vector {
    tx: Slots,
    /// False for good once the interface has refused a frame and accepted a later one of the same call, which reorders
    /// them.
    sends: bool,
    rx: Slots,
    /// Refused frames, to be returned to the burst.
    refused: Burst,
}

/// Whether the interface accepted a frame; the errno if not.
pub(super) type Written = Result<(), i32>;

impl Vector {
    /// Opens the rings of a TAP.
    ///
    /// # Errors
    /// Why there are none, as the rest of a sentence.
    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<Vector, String> {
        // With a limit some frames of a call may be refused and later ones accepted, which reorders them.
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
        // Registered buffers would pin a megabyte.
        let rx = Slots::open(fd, RX_SLOTS, RX_SLOT_BYTES, Buffers::Unregistered)?;
        Ok(Vector { tx, sends: true, rx, refused: Burst::with_capacity(TX_SLOTS) })
    }

    /// Whether several frames are sent with one call.
    pub(super) fn sends(&self) -> bool {
        self.sends
    }

    /// How many frames at the front to send with one call; 0: send the first one alone. With UDP GSO it ends before
    /// datagrams of one flow, which are sent as one super-frame.
    #[inline]
    pub(super) fn run(&self, burst: &Burst, caps: &Caps, joins: UdpGso) -> usize {
        if burst.len() < TX_LEAST || !self.sends {
            return 0;
        }
        let fits = |p: &&Packet| {
            p.chain.len() <= TX_SLOT_BYTES - vnet::HEADER_BYTES && offload::check(p, caps).is_ok()
        };
        let mut run = burst.iter().take(TX_SLOTS).take_while(fits).count();
        if joins.is_on() {
            run = uso::before_join(burst.iter().take(run), caps);
        }
        if run < TX_LEAST { 0 } else { run }
    }

    /// Sends the first `run` frames with one call, in order. `complete` gets each frame with its result, and returns it
    /// if it is to stay in the burst. Returns how many stay; they are at the front, in order.
    pub(super) fn send(
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

    /// How many frames to read with one call if `expected` may be queued; 0: read the next one alone.
    pub(super) fn read_count(&self, expected: usize, space: usize) -> usize {
        let count = expected.min(space).min(RX_SLOTS);
        if count < RX_LEAST || self.rx.is_broken() { 0 } else { count }
    }

    /// Reads up to `count` frames with one call; `each` gets every received frame.
    pub(super) fn receive(
        &mut self,
        count: usize,
        pool: &mut Pool,
        mut each: impl FnMut(Result<Packet, DropReason>),
    ) -> Received {
        let mut received = Received { frames: 0, all_short: true, errno: None };
        let mut bytes = [0; RX_SLOTS];
        let results = self.rx.read(count).map(|r| r.unwrap_or(-libc::EREMOTEIO));
        bytes.iter_mut().zip(results).for_each(|(to, from)| *to = from);
        if self.rx.is_broken() {
            return received;
        }
        for (slot, result) in bytes.into_iter().enumerate().take(count) {
            let Ok(bytes) = usize::try_from(result) else {
                received.errno = received.errno.or(Some(result.saturating_neg()));
                continue;
            };
            received.frames += 1;
            received.all_short &= bytes <= RX_SHORT_BYTES;
            let slot = self.rx.slot(slot);
            each(to_packet(slot.get(..bytes).unwrap_or(slot), pool));
        }
        received
    }

    /// For [`DeviceStats::path`](fulmar_stack::device::DeviceStats::path).
    pub(super) fn describe() -> String {
        format!(
            "io_uring for {TX_LEAST} to {TX_SLOTS} small frames at once ({RX_SLOTS} to receive), \
             writev and readv for others"
        )
    }
}

/// The result of [`Vector::receive`].
pub(super) struct Received {
    /// Received frames, dropped ones included.
    pub frames: usize,
    /// No frame was longer than [`is_short`] allows.
    pub all_short: bool,
    /// The first errno; EAGAIN: the queue is empty.
    pub errno: Option<i32>,
}

/// Whether one call reads several frames of this length.
pub(super) fn is_short(bytes: usize) -> bool {
    bytes <= RX_SHORT_BYTES
}

/// Checks that the kernel supports writes with RWF_NOWAIT: it refuses a frame of one byte for its length (EINVAL).
fn probe(tx: &mut Slots) -> io::Result<()> {
    match tx.write(&[1]).next().flatten() {
        Some(e) if e == -libc::EINVAL => Ok(()),
        Some(e) if e < 0 => Err(io::Error::from_raw_os_error(-e)),
        _ => Err(io::Error::from_raw_os_error(libc::EPROTO)),
    }
}

/// Writes the virtio-net header and the frame into a slot; returns their bytes. The frame fits.
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

/// Takes a frame from the front for every result and completes it; those that stay are moved to `refused`. Returns
/// false if a frame was sent after a refused one.
fn complete_all(
    results: impl Iterator<Item = Option<i32>>,
    burst: &mut Burst,
    refused: &mut Burst,
    complete: &mut impl FnMut(Packet, Written) -> Option<Packet>,
) -> bool {
    let mut in_order = true;
    for result in results {
        let Some(p) = burst.pop_front() else { break };
        // A frame without a result is dropped: sent again, it might arrive twice.
        let written = match result.unwrap_or(-libc::EREMOTEIO) {
            0.. => Ok(()),
            e => Err(e.saturating_neg()),
        };
        in_order &= refused.is_empty() || written.is_err();
        if let Some(p) = complete(p, written) {
            // Cannot fail: the burst has space for one frame from each slot.
            let _ = refused.push(p);
        }
    }
    in_order
}

/// Returns refused frames to the front of the burst, in order; returns how many.
fn put_back(refused: &mut Burst, burst: &mut Burst) -> usize {
    let count = refused.len();
    while let Some(p) = refused.pop_back() {
        // Cannot fail: they were taken from this burst.
        let _ = burst.push_front(p);
    }
    count
}

/// Copies a received frame into a buffer of its size.
fn to_packet(bytes: &[u8], pool: &mut Pool) -> Result<Packet, DropReason> {
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
