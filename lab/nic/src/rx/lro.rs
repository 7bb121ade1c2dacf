//! Receive aggregation: TCP segments that follow each other become one frame.
//!
//! The rules are the same as for Linux's GRO, so that a stack sees no difference. Segments of a run belong to the same
//! flow, and each begins where the last one ended. They have the same acknowledgement, window and options, no flags but
//! ACK and PSH, and the length of the first, except the last one. PSH ends the run. Only consecutive frames are
//! considered, so flows that alternate are not aggregated.

use std::collections::VecDeque;

use fulmar_stack::base::{Gso, Instant, SeqNum};
use fulmar_stack::wire::checksum::{Sum, checksum};
use fulmar_stack::wire::tcp::{self, Flags};
use fulmar_stack::wire::{eth, protocol};

use crate::frame::{HEAD_BYTES, Headers, Transport, WireFrame, tcp_kind};

/// Frames in front of the lane that land as one.
pub struct Run {
    pub frames: usize,
    /// Bytes of the frame that they become.
    pub frame_bytes: usize,
    /// Bytes of headers that the frames behind the first lose.
    pub headers: usize,
    /// The request that describes the whole, if it is more than one packet.
    pub gso: Option<Gso>,
    pub partial_csum: Option<(u16, u16)>,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
}

impl Run {
    /// A frame by itself, written as it is.
    pub fn of_one(frame: &WireFrame) -> Run {
        Run {
            frames: 1,
            frame_bytes: frame.len(),
            headers: 0,
            gso: None,
            partial_csum: None,
            head: [0; HEAD_BYTES],
            head_bytes: 0,
        }
    }

    /// The fields that replace the first frame's own headers.
    pub fn head(&self) -> &[u8] {
        self.head.get(..self.head_bytes).unwrap_or(&[])
    }
}

/// A segment that may be part of a run.
fn candidate(frame: &WireFrame) -> Option<(Headers, tcp::Header)> {
    if frame.gso.is_some() || frame.partial_csum.is_some() || !frame.is_sound {
        return None;
    }
    let seen = Headers::parse(frame.front(), frame.len())?;
    let Transport::Tcp(h) = seen.transport else { return None };
    let is_plain = h.flags.without(Flags::PSH) == Flags::ACK;
    let is_exact = seen.payload_at + seen.payload_bytes == frame.len();
    let fits = seen.payload_at <= HEAD_BYTES && seen.payload_bytes > 0;
    (is_plain && is_exact && fits).then_some((seen, h))
}

/// The run of two or more segments in front of the lane that have arrived by `now`, as long as the
/// IP packet stays within `limit`.
pub fn run(lane: &VecDeque<(Instant, WireFrame)>, now: Instant, limit: usize) -> Option<Run> {
    let (_, first_frame) = lane.front()?;
    let (first, h) = candidate(first_frame)?;
    let mss = first.payload_bytes;
    let (mut frames, mut payload, mut flags) = (1, mss, h.flags);
    for (due, frame) in lane.iter().skip(1) {
        if *due > now || flags.contains(Flags::PSH) || payload % mss != 0 {
            break;
        }
        let Some((seen, next)) = candidate(frame) else { break };
        let seq = h.seq + payload as u32;
        if !continues((&first, &h), (&seen, &next), seq) || seen.payload_bytes > mss {
            break;
        }
        let total = first.payload_at - eth::HEADER_BYTES + payload + seen.payload_bytes;
        if total > limit {
            break;
        }
        frames += 1;
        payload += seen.payload_bytes;
        flags |= next.flags;
    }
    (frames > 1).then(|| whole(first_frame, &first, frames, payload, flags))
}

fn continues(first: (&Headers, &tcp::Header), next: (&Headers, &tcp::Header), seq: SeqNum) -> bool {
    let ((a, h), (b, g)) = (first, next);
    let (m, n) = (&a.network, &b.network);
    let is_same_flow = (m.ether, m.src, m.dst, m.l4, a.payload_at)
        == (n.ether, n.src, n.dst, n.l4, b.payload_at)
        && (h.src_port, h.dst_port) == (g.src_port, g.dst_port);
    is_same_flow && g.seq == seq && (g.ack, g.window, g.options) == (h.ack, h.window, h.options)
}

/// The headers of the whole: lengths, PSH, and the sum of the pseudo header.
fn whole(frame: &WireFrame, seen: &Headers, frames: usize, payload: usize, flags: Flags) -> Run {
    let mut head = [0; HEAD_BYTES];
    for (to, from) in head.iter_mut().zip(frame.front()) {
        *to = *from;
    }
    let headers = seen.payload_at;
    let l3_bytes = headers - eth::HEADER_BYTES + payload;
    let mut put = |at: usize, v: u16| {
        if let Some(field) = head.get_mut(at..at + 2) {
            field.copy_from_slice(&v.to_be_bytes());
        }
    };
    if seen.network.src.is_ipv4() {
        put(eth::HEADER_BYTES + 2, l3_bytes as u16);
        put(eth::HEADER_BYTES + 10, 0);
    } else {
        put(eth::HEADER_BYTES + 4, (l3_bytes - 40) as u16);
    }
    let mut pseudo = Sum::new();
    let l4_bytes = headers - seen.network.l4 + payload;
    pseudo.add_pseudo(seen.network.src, seen.network.dst, protocol::TCP, l4_bytes as u32);
    put(seen.network.l4 + tcp::CHECKSUM_OFFSET, pseudo.fold());
    if let Some(f) = head.get_mut(seen.network.l4 + 13) {
        *f = flags.0 as u8;
    }
    if seen.network.src.is_ipv4()
        && let Some(ip) = head.get(eth::HEADER_BYTES..seen.network.l4)
    {
        let sum = checksum(ip).to_be_bytes();
        head[eth::HEADER_BYTES + 10..eth::HEADER_BYTES + 12].copy_from_slice(&sum);
    }
    Run {
        frames,
        frame_bytes: headers + payload,
        headers,
        gso: Some(Gso {
            kind: tcp_kind(seen.network.src),
            segment_bytes: seen.payload_bytes as u16,
            header_bytes: headers as u16,
            ecn: false,
        }),
        partial_csum: Some((seen.network.l4 as u16, tcp::CHECKSUM_OFFSET as u16)),
        head,
        head_bytes: headers,
    }
}
