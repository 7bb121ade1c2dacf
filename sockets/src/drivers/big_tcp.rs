//! BIG TCP: super-frames above 64 KiB, which become super-frames of at most 64 KiB.
//!
//! Linux has them where `gso_max_size` or `gro_max_size` of an interface was raised (ip-link(8)). The length field of
//! their IP header is too short:
//!
//! | | length field | real length |
//! |---|---|---|
//! | IPv4 | total length 0 | the frame's |
//! | IPv6 | payload length 0, jumbo payload option (RFC 2675) in a hop-by-hop header of 8 bytes | in the option |
//! | IPv6 | payload length 0, no hop-by-hop header | the frame's |
//!
//! The first is copied into buffers of one piece each, so that a piece is charged for its own memory only. The next are
//! received into such buffers, as long as frames of BIG TCP arrive. A TAP needs
//! none of this: its `gso_max_size` cannot be raised.

#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use fulmar_stack::base::{Counter, Counters, DropReason, EtherAddr, Gso, GsoKind, Offload};
use fulmar_stack::device::{Burst, Caps, Packet, offload};
use fulmar_stack::mbuf::{Chain, Mbuf, Pool, Purpose};
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol};

use crate::drivers::batch::Receiving;
use crate::drivers::buffer_pair::{LARGE_BYTES, SMALL_BYTES};
use crate::drivers::placing::scatter::Landed;
use crate::drivers::placing::{FRONT_BYTES, copy};
use crate::drivers::vnet;

/// The largest IP packet of a piece.
const PIECE_BYTES: usize = 65_535;
/// The longest frame with such a packet.
const LONGEST_PLAIN: usize = eth::HEADER_BYTES + PIECE_BYTES;
/// GSO_MAX_SIZE of linux/netdevice.h and the Ethernet header.
const LONGEST: usize = 8 * 65_535 + eth::HEADER_BYTES;
/// The bytes of the longest frame that a buffer pair cannot hold.
const OVERFLOW_BYTES: usize = LONGEST - SMALL_BYTES - LARGE_BYTES;
/// Pieces of the longest frame, with one to spare for its headers.
const MOST_PIECES: usize = 10;

/// Frames that one call receives while frames of BIG TCP arrive: half a megabyte, eight times 64 KiB.
pub(super) const BATCH: usize = 3;
/// Further pieces of the longest frame.
pub(super) const TAILS: usize = 8;
/// After this number of other frames in a row BIG TCP stops being expected.
const MEMORY: u32 = 1000;

const TOTAL_LENGTH: usize = eth::HEADER_BYTES + 2;
const PAYLOAD_LENGTH: usize = eth::HEADER_BYTES + 4;
const NEXT_HEADER: usize = eth::HEADER_BYTES + 6;
const V6_END: usize = eth::HEADER_BYTES + ipv6::HEADER_BYTES;
/// A hop-by-hop header with the jumbo payload option and no other (RFC 2675 section 2).
const JUMBO_HEADER_BYTES: usize = 8;
const JUMBO_OPTION: [u8; 2] = [0xc2, 4];

/// Memory for frames of BIG TCP, and pieces that a burst had no space for.
pub(super) struct BigTcp {
    /// The end of each frame of a batch. The pages are touched only by frames that need them.
    overflows: Vec<Box<[u8]>>,
    pieces: Burst,
    /// That of the last frame of BIG TCP, unless it was long ago.
    layout: Option<Layout>,
    /// Frames received since then.
    plain_frames: u32,
    /// Buffers for the further pieces of each frame of [`BATCH`].
    tails: [[Option<Mbuf>; TAILS]; BATCH],
    /// Those of a device that takes a piece.
    caps: Caps,
}

impl BigTcp {
    /// For batches of `frames` frames.
    pub(super) fn new(frames: usize) -> BigTcp {
        let overflow = || vec![0; OVERFLOW_BYTES].into_boxed_slice();
        BigTcp {
            overflows: (0..frames).map(|_| overflow()).collect(),
            pieces: Burst::with_capacity(frames.saturating_mul(MOST_PIECES)),
            layout: None,
            plain_frames: 0,
            tails: Default::default(),
            caps: Caps {
                tx_csum: true,
                tso: Some(PIECE_BYTES),
                udp_gso: true,
                max_segs: usize::MAX,
                ..Caps::plain(PIECE_BYTES, EtherAddr([0; 6]))
            },
        }
    }

    /// Memory for the end of each frame of a batch.
    pub(super) fn overflows(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.overflows.iter_mut().map(|o| &mut **o)
    }

    /// Memory for the end of frame `at`.
    pub(super) fn overflow(&mut self, at: usize) -> &mut [u8] {
        self.overflows.get_mut(at).map_or(&mut [], |o| o)
    }

    /// The layout of the next frame. `None`: none of BIG TCP is expected, the buffers of such a layout would not hold the
    /// longest one, or the pool has none.
    pub(super) fn prepare(&mut self, pool: &mut Pool) -> Option<Layout> {
        let fits =
            |l: &Layout| l.front_bytes.saturating_add(l.unit.saturating_mul(TAILS)) >= LONGEST;
        let layout = self.layout.filter(fits)?;
        for tail in self.tails.iter_mut().flatten().filter(|t| t.is_none()) {
            *tail = Some(pool.alloc(LARGE_BYTES, 0, Purpose::Receive).ok()?);
        }
        Some(layout)
    }

    /// Memory for the further pieces of each frame.
    pub(super) fn tails(&mut self, unit: usize) -> impl Iterator<Item = [&mut [u8]; TAILS]> {
        self.tails.iter_mut().map(move |tails| {
            tails.each_mut().map(|t| {
                let space = t.as_mut().map_or(&mut [][..], |m| m.spare_mut());
                let n = unit.min(space.len());
                space.get_mut(..n).unwrap_or(&mut [])
            })
        })
    }

    /// Appends the further pieces of frame `at`, of `bytes` bytes in all.
    pub(super) fn take_tails(
        &mut self,
        at: usize,
        unit: usize,
        mut bytes: usize,
        chain: &mut Chain,
    ) {
        for tail in self.tails.get_mut(at).into_iter().flatten() {
            let Some(mut m) = (if bytes > 0 { tail.take() } else { None }) else { return };
            m.set_len(bytes.min(unit));
            bytes = bytes.saturating_sub(unit);
            chain.push_back(m);
        }
    }

    /// The packet of a frame of BIG TCP, whose layout the next ones are expected to have.
    pub(super) fn learned(
        &mut self,
        frame: Result<(Packet, Layout), DropReason>,
    ) -> Result<Packet, DropReason> {
        frame.map(|(packet, layout)| {
            self.layout = Some(layout);
            self.plain_frames = 0;
            packet
        })
    }

    /// Another frame has arrived, while ones of BIG TCP were expected.
    pub(super) fn miss(&mut self, pool: &mut Pool) {
        self.plain_frames = self.plain_frames.saturating_add(1);
        if self.plain_frames >= MEMORY {
            self.layout = None;
            let tails = self.tails.iter_mut().flatten();
            tails.filter_map(Option::take).for_each(|m| pool.free(Chain::from(m)));
        }
    }

    /// Whether frames of BIG TCP are expected.
    pub(super) fn is_expected(&self) -> bool {
        self.layout.is_some()
    }

    /// Queues a frame, in pieces if it is one of BIG TCP.
    pub(super) fn queue(
        &mut self,
        frame: Result<Packet, DropReason>,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let p = match frame {
            Ok(p) => p,
            Err(reason) => return counters.drop_packet(reason),
        };
        if is_big(p.chain.len()) {
            counters.count(Counter::BigTcpFrames);
        }
        if let Err(unfit) = offload::fit(p, &self.caps, pool, &mut self.pieces, counters) {
            let reason = match unfit.why {
                offload::Refusal::Drop(reason) => reason,
                offload::Refusal::NoBuffer | offload::Refusal::NoSpace => DropReason::NoBuffer,
            };
            unfit.packet.discard(reason, pool, counters);
        }
    }

    /// Hands up to `limit` queued frames up; returns how many.
    pub(super) fn deliver(&mut self, limit: usize, taking: &mut Receiving<'_>) -> usize {
        let count = limit.min(self.pieces.len());
        (0..count).filter_map(|_| self.pieces.pop_front()).for_each(|p| taking.deliver(Ok(p)));
        count
    }

    /// Whether no frame is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

/// Whether a frame of this length may be one of BIG TCP.
pub(super) const fn is_big(frame_bytes: usize) -> bool {
    frame_bytes > LONGEST_PLAIN
}

/// Where a frame of BIG TCP is cut, as it was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// Headers and the payload of the first piece.
    pub front_bytes: usize,
    /// Payload of each further piece.
    pub unit: usize,
}

/// The header fields of a BIG TCP frame.
struct Parsed {
    /// Bytes to strip from the front.
    stripped: usize,
    /// The offload request of the frame without them.
    offload: Offload,
    /// Length of the headers, without them.
    header_bytes: usize,
    layout: Layout,
}

/// Parses the front of a frame of BIG TCP and gives its headers a valid length field.
fn parse(
    front: &mut [u8],
    header: &[u8; vnet::HEADER_BYTES],
    bytes: usize,
) -> Result<Parsed, DropReason> {
    let offload = vnet::parse(header, bytes, front)?;
    let gso = offload.gso.filter(|g| g.kind != GsoKind::Udp).ok_or(DropReason::FrameTooBig)?;
    let stripped = plain_headers(front, bytes).ok_or(DropReason::BadOffload)?;
    let offload = without(offload, gso, stripped).ok_or(DropReason::BadOffload)?;
    let header_bytes = usize::from(gso.header_bytes).saturating_sub(stripped);
    let unit = piece_bytes(header_bytes, usize::from(gso.segment_bytes));
    let front_bytes = usize::from(gso.header_bytes).saturating_add(unit);
    Ok(Parsed { stripped, offload, header_bytes, layout: Layout { front_bytes, unit } })
}

/// A frame of BIG TCP, copied into buffers of the pool, one per piece: still one super-frame, with headers that
/// [`offload::fit`] understands.
///
/// # Errors
/// [`DropReason::FrameTooBig`]: no super-frame of TCP. [`DropReason::BadOffload`]: its headers contradict each other or
/// its length. [`DropReason::NoBuffer`].
pub(super) fn copied<const PARTS: usize>(
    landed: Landed<'_, PARTS>,
    header: &[u8; vnet::HEADER_BYTES],
    bytes: usize,
    pool: &mut Pool,
) -> Result<(Packet, Layout), DropReason> {
    let mut front = [0; FRONT_BYTES];
    let known = landed.copy(0, &mut front);
    let front = front.get_mut(..known).unwrap_or(&mut []);
    let parsed = parse(front, header, bytes)?;
    let mut at = parsed.stripped.saturating_add(parsed.header_bytes);
    let mut chain = copy(landed, parsed.stripped, parsed.header_bytes, pool)?;
    while at < bytes {
        let n = parsed.layout.unit.min(bytes.saturating_sub(at));
        match copy(landed, at, n, pool) {
            Ok(piece) => chain.append(piece),
            Err(reason) => {
                pool.free(chain);
                return Err(reason);
            }
        }
        at = at.saturating_add(n);
    }
    dressed(chain, front, &parsed, pool)
}

/// As [`copied`], for a frame that was received into buffers of the pool.
///
/// # Errors
/// As [`copied`].
pub(super) fn received(
    mut chain: Chain,
    header: &[u8; vnet::HEADER_BYTES],
    pool: &mut Pool,
) -> Result<(Packet, Layout), DropReason> {
    let mut front = [0; FRONT_BYTES];
    let (bytes, known) = (chain.len(), chain.copy_to(0, &mut front));
    let front = front.get_mut(..known).unwrap_or(&mut []);
    match parse(front, header, bytes) {
        Ok(parsed) => {
            chain.trim_front(parsed.stripped, pool);
            dressed(chain, front, &parsed, pool)
        }
        Err(reason) => {
            pool.free(chain);
            Err(reason)
        }
    }
}

/// The packet of a frame with its headers of `front`.
fn dressed(
    mut chain: Chain,
    front: &[u8],
    parsed: &Parsed,
    pool: &mut Pool,
) -> Result<(Packet, Layout), DropReason> {
    let head = front.get(parsed.stripped..).and_then(|f| f.get(..parsed.header_bytes));
    if head.and_then(|h| chain.copy_from(0, h)).is_none() {
        pool.free(chain);
        return Err(DropReason::BadOffload);
    }
    Ok((Packet { chain, offload: parsed.offload }, parsed.layout))
}

/// Payload bytes of a piece: whole segments.
fn piece_bytes(header_bytes: usize, segment_bytes: usize) -> usize {
    let space = LONGEST_PLAIN.saturating_sub(header_bytes);
    let odd = space.checked_rem(segment_bytes).unwrap_or(0);
    // One segment fills any piece that is shorter.
    space.saturating_sub(odd).max(segment_bytes).max(1)
}

/// Gives the headers of a frame of `bytes` bytes a valid length field. Returns how many bytes to strip from the front.
/// `None`: a length field is not as BIG TCP has it, or is wrong.
fn plain_headers(front: &mut [u8], bytes: usize) -> Option<usize> {
    match eth::Header::parse(front).ok()?.ethertype {
        eth::IPV4 => {
            let total = front.get_mut(TOTAL_LENGTH..)?.first_chunk_mut::<2>()?;
            let is_big = *total == [0; 2];
            // A placeholder: every piece gets a length of its own.
            *total = (ipv4::HEADER_BYTES as u16).to_be_bytes();
            is_big.then_some(0)
        }
        eth::IPV6 => {
            let payload = front.get(PAYLOAD_LENGTH..)?.first_chunk::<2>()?;
            match usize::from(u16::from_be_bytes(*payload)) {
                0 if *front.get(NEXT_HEADER)? == protocol::HOP_BY_HOP => strip_jumbo(front, bytes),
                0 => Some(0),
                // Its length is given, since the fixed header does not count.
                n => (V6_END.checked_add(n)? == bytes).then_some(0),
            }
        }
        _ => None,
    }
}

/// Moves the fixed headers over the hop-by-hop header, which may have the jumbo payload option only.
fn strip_jumbo(front: &mut [u8], bytes: usize) -> Option<usize> {
    let [next, units, kind, option_bytes, length @ ..] =
        *front.get(V6_END..)?.first_chunk::<JUMBO_HEADER_BYTES>()?;
    let told = usize::try_from(u32::from_be_bytes(length)).ok()?;
    let is_jumbo = units == 0 && [kind, option_bytes] == JUMBO_OPTION;
    if !is_jumbo || V6_END.checked_add(told)? != bytes {
        return None;
    }
    *front.get_mut(NEXT_HEADER)? = next;
    front.copy_within(..V6_END, JUMBO_HEADER_BYTES);
    Some(JUMBO_HEADER_BYTES)
}

/// The offload request of a frame from whose front `stripped` bytes are missing.
fn without(offload: Offload, gso: Gso, stripped: usize) -> Option<Offload> {
    let stripped = u16::try_from(stripped).ok()?;
    let gso = Gso { header_bytes: gso.header_bytes.checked_sub(stripped)?, ..gso };
    let csum_start = offload.csum_start.checked_sub(stripped)?;
    Some(Offload { csum_start, gso: Some(gso), ..offload })
}

#[cfg(test)]
mod tests;
