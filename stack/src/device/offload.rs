//! Transmit offloads in software, for devices that lack them: segmentation, checksums, linearization.
//!
//! [`fit`] turns a frame that may be a super-frame, or may lack its transport checksum, into frames that the device can
//! send. Payload is referenced, and copied only if a chain has too many mbufs. Each segment gets a copy of the headers,
//! in a buffer of the control share of the pool. Ethernet frames with IP are supported; VLAN tags are not.
//!
//! Cost: segmentation takes a header buffer and a reference for each packet; a checksum reads the headers and the bytes
//! whose sum is not cached ([`Chain::sum`]), counted by [`Counter::SummedBytes`]. Source of the layout: RFC 9293
//! section 3.1, RFC 768, RFC 791, RFC 8200.

use core::net::IpAddr;
use core::ops::Range;

use crate::base::{Counter, Counters, DropReason, Gso, GsoKind};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose, Summed};
use crate::wire::checksum::{Sum, checksum};
use crate::wire::{eth, ipv4, ipv6};

use crate::device::{Burst, Caps, Packet};

mod flat;

pub use flat::Packets;

const ETHER_BYTES: usize = eth::HEADER_BYTES;
/// Ethernet, IPv6 with extension headers, the largest TCP header.
const MAX_HEADER_BYTES: usize = 256;
const IDENT: usize = ETHER_BYTES + 4;
/// DF, in the byte after the identification.
const DONT_FRAGMENT: u8 = 0x40;
const FLAG_FIN_PSH: u8 = 0x09;
const FLAG_CWR: u8 = 0x80;
const TCP_CSUM: usize = 16;
const UDP_CSUM: usize = 6;

/// Why a frame did not go into the burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The burst is full. The rest of the frame can be offered again.
    NoSpace,
    /// The pool has no buffer for headers. The rest of the frame can be offered again.
    NoBuffer,
    /// The frame can never be sent; the caller counts the drop.
    Drop(DropReason),
}

/// A refused frame, or the rest of it.
#[derive(Debug)]
pub struct Unfit {
    /// A valid frame with the payload that has not been sent.
    pub packet: Packet,
    /// Why.
    pub why: Refusal,
}

fn unfit(packet: Packet, why: Refusal) -> Result<(), Unfit> {
    Err(Unfit { packet, why })
}

/// Whether a device with these capabilities can send the frame as it is.
///
/// # Errors
/// [`DropReason::FrameTooBig`]: larger than the MTU or the largest super-frame, or in too many
/// mbufs. [`DropReason::BadOffload`]: asks for an offload that the device lacks.
#[inline]
pub fn check(p: &Packet, caps: &Caps) -> Result<(), DropReason> {
    if p.offload.needs_csum && !caps.tx_csum {
        return Err(DropReason::BadOffload);
    }
    let l3_bytes = p.chain.len().saturating_sub(ETHER_BYTES);
    let limit = match p.offload.gso {
        None => caps.mtu,
        Some(gso) => largest(gso, caps).ok_or(DropReason::BadOffload)?,
    };
    if l3_bytes > limit || p.chain.segs() > caps.max_segs {
        return Err(DropReason::FrameTooBig);
    }
    Ok(())
}

/// The largest super-frame of this kind that the device segments: bytes of its IP packet.
#[inline]
pub(crate) fn largest(gso: Gso, caps: &Caps) -> Option<usize> {
    match gso.kind {
        _ if !caps.tx_csum => None,
        GsoKind::TcpV4 | GsoKind::TcpV6 => caps.tso,
        GsoKind::Udp => caps.udp_gso.then_some(caps.tso.unwrap_or(usize::from(u16::MAX))),
    }
}

/// Appends the frame to `out` in a form that the device can send: segmented, with a complete checksum, linearized, as
/// far as the device lacks the offload.
///
/// # Errors
/// [`Unfit`] with the frame, or with the rest of it if some packets were appended.
#[inline]
pub fn fit(
    p: Packet,
    caps: &Caps,
    pool: &mut Pool,
    out: &mut Burst,
    counters: &mut Counters,
) -> Result<(), Unfit> {
    if out.is_full() {
        return unfit(p, Refusal::NoSpace);
    }
    match check(&p, caps) {
        Ok(()) => out.push(p).map_err(|packet| Unfit { packet, why: Refusal::NoSpace }),
        Err(_) => fit_slow(p, caps, pool, out, counters),
    }
}

fn fit_slow(
    p: Packet,
    caps: &Caps,
    pool: &mut Pool,
    out: &mut Burst,
    counters: &mut Counters,
) -> Result<(), Unfit> {
    let Some(gso) = p.offload.gso else { return fit_single(p, caps, pool, out, counters) };
    let limit = largest(gso, caps);
    if limit.is_some_and(|l| p.chain.len() <= l.saturating_add(ETHER_BYTES)) {
        return fit_single(p, caps, pool, out, counters);
    }
    if usize::from(gso.header_bytes) + usize::from(gso.segment_bytes) > caps.mtu + ETHER_BYTES {
        return unfit(p, Refusal::Drop(DropReason::FrameTooBig));
    }
    let payload = |l: usize| (l + ETHER_BYTES).saturating_sub(usize::from(gso.header_bytes));
    let mss = usize::from(gso.segment_bytes);
    let unit = match limit {
        Some(l) if payload(l) >= 2 * mss => payload(l) / mss * mss,
        _ => mss,
    };
    cut(p, Cut { unit, checksums: Checksums::of(caps) }, pool, out, counters)
}

/// A frame that is not segmented: completes the checksum, linearizes.
fn fit_single(
    mut p: Packet,
    caps: &Caps,
    pool: &mut Pool,
    out: &mut Burst,
    counters: &mut Counters,
) -> Result<(), Unfit> {
    if !caps.tx_csum && finish_counted(&mut p, pool, counters).is_err() {
        return unfit(p, Refusal::NoBuffer);
    }
    if p.chain.segs() > caps.max_segs && make_unique(&mut p.chain, pool, Purpose::Control).is_err()
    {
        return unfit(p, Refusal::NoBuffer);
    }
    match check(&p, caps) {
        Ok(()) => out.push(p).map_err(|packet| Unfit { packet, why: Refusal::NoSpace }),
        Err(reason) => unfit(p, Refusal::Drop(reason)),
    }
}

/// Segments a super-frame into packets with complete checksums, up to the space of `out`. Any other frame gets its
/// checksum and is appended.
///
/// # Errors
/// As [`fit`].
pub fn segment(
    mut p: Packet,
    pool: &mut Pool,
    out: &mut Burst,
    counters: &mut Counters,
) -> Result<(), Unfit> {
    if let Some(gso) = p.offload.gso {
        let how = Cut { unit: usize::from(gso.segment_bytes), checksums: Checksums::Finished };
        return cut(p, how, pool, out, counters);
    }
    if out.is_full() {
        return unfit(p, Refusal::NoSpace);
    }
    if finish_counted(&mut p, pool, counters).is_err() {
        return unfit(p, Refusal::NoBuffer);
    }
    out.push(p).map_err(|packet| Unfit { packet, why: Refusal::NoSpace })
}

/// Splits a super-frame behind its first `packets` packets. Both parts are super-frames, or packets whose checksum is still
/// to be completed. The second is `None` if there are no more packets.
///
/// # Errors
/// [`Unfit`] with the frame: no buffer for headers, or its headers do not match its offload request.
pub fn split(
    p: Packet,
    packets: usize,
    pool: &mut Pool,
) -> Result<(Packet, Option<Packet>), Unfit> {
    if packets >= p.wire_packets() {
        return Ok((p, None));
    }
    let Some(template) = Template::of(&p) else {
        return Err(Unfit { packet: p, why: Refusal::Drop(DropReason::BadOffload) });
    };
    let end = packets * usize::from(template.gso.segment_bytes);
    let all = p.chain.len() - template.header_bytes;
    let Ok((front, _)) = template.piece(&p, 0..end, Checksums::Partial, pool) else {
        return Err(Unfit { packet: p, why: Refusal::NoBuffer });
    };
    match template.piece(&p, end..all, Checksums::Partial, pool) {
        Ok((rest, _)) => {
            pool.free(p.chain);
            Ok((front, Some(rest)))
        }
        Err(NoBuffer) => {
            pool.free(front.chain);
            Err(Unfit { packet: p, why: Refusal::NoBuffer })
        }
    }
}

/// How a super-frame is segmented.
#[derive(Clone, Copy)]
struct Cut {
    /// Payload bytes of a piece: a segment, or several for a device that segments up to its own limit.
    unit: usize,
    checksums: Checksums,
}

/// The transport checksums of the pieces of a super-frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checksums {
    /// Complete.
    Finished,
    /// The sum of the pseudo-header; the device completes it.
    Partial,
}

impl Checksums {
    fn of(caps: &Caps) -> Checksums {
        if caps.tx_csum { Checksums::Partial } else { Checksums::Finished }
    }
}

/// Appends pieces of `unit` payload bytes each to `out`.
fn cut(
    p: Packet,
    Cut { unit, checksums }: Cut,
    pool: &mut Pool,
    out: &mut Burst,
    counters: &mut Counters,
) -> Result<(), Unfit> {
    let Some(template) = Template::of(&p) else {
        return unfit(p, Refusal::Drop(DropReason::BadOffload));
    };
    let payload_bytes = p.chain.len() - template.header_bytes;
    let mut done = 0;
    let why = loop {
        if out.is_full() {
            break Refusal::NoSpace;
        }
        let end = payload_bytes.min(done + unit);
        let Ok((piece, read_bytes)) = template.piece(&p, done..end, checksums, pool) else {
            break Refusal::NoBuffer;
        };
        counters.add(Counter::SummedBytes, read_bytes as u64);
        let Ok(()) = out.push(piece) else { break Refusal::NoSpace };
        done = end;
        if done == payload_bytes {
            pool.free(p.chain);
            return Ok(());
        }
    };
    remainder(p, &template, done, why, pool)
}

/// The error with the payload from `done` on, as a super-frame of its own.
fn remainder(
    p: Packet,
    template: &Template,
    done: usize,
    why: Refusal,
    pool: &mut Pool,
) -> Result<(), Unfit> {
    if done == 0 {
        return unfit(p, why);
    }
    let end = p.chain.len() - template.header_bytes;
    match template.piece(&p, done..end, Checksums::Partial, pool) {
        Ok((rest, _)) => {
            pool.free(p.chain);
            unfit(rest, why)
        }
        // No buffer for the headers of the rest: it is dropped, and TCP retransmits it.
        Err(NoBuffer) => unfit(p, Refusal::Drop(DropReason::NoBuffer)),
    }
}

/// The headers of a super-frame, and the offsets of their fields.
struct Template {
    headers: [u8; MAX_HEADER_BYTES],
    header_bytes: usize,
    l4: usize,
    gso: Gso,
    source: IpAddr,
    destination: IpAddr,
}

impl Template {
    /// `None`: the headers do not match the offload request.
    fn of(p: &Packet) -> Option<Template> {
        let gso = p.offload.gso?;
        let header_bytes = usize::from(gso.header_bytes);
        let l4 = usize::from(p.offload.csum_start);
        let mut headers = [0; MAX_HEADER_BYTES];
        let known = headers.get_mut(..header_bytes)?;
        if p.chain.len() <= header_bytes || gso.segment_bytes == 0 {
            return None;
        }
        p.chain.copy_to(0, known);
        let (source, destination, l3_bytes) = addresses(known)?;
        let l4_bytes = header_bytes.checked_sub(l4)?;
        let is_v4 = l3_bytes == 20;
        let fits = match gso.kind {
            GsoKind::TcpV4 => is_v4 && l4_bytes >= 20,
            GsoKind::TcpV6 => !is_v4 && l4_bytes >= 20,
            GsoKind::Udp => l4_bytes == 8,
        };
        (fits && l4 >= ETHER_BYTES + l3_bytes).then_some(Template {
            headers,
            header_bytes,
            l4,
            gso,
            source,
            destination,
        })
    }

    /// A frame with the payload bytes `range` of `p`, and the number of bytes read for its checksum.
    fn piece(
        &self,
        p: &Packet,
        range: Range<usize>,
        checksums: Checksums,
        pool: &mut Pool,
    ) -> Result<(Packet, usize), NoBuffer> {
        let payload = pool.clone_range(&p.chain, self.header_bytes + range.start, range.len())?;
        let mut first = match pool.alloc(self.header_bytes, 0, Purpose::Control) {
            Ok(m) => m,
            Err(e) => {
                pool.free(payload);
                return Err(e);
            }
        };
        let headers = first.append(self.header_bytes).ok_or(NoBuffer)?;
        headers.copy_from_slice(&self.headers[..self.header_bytes]);
        let is_last = self.header_bytes + range.end == p.chain.len();
        self.fix(headers, &range, is_last);
        let read_bytes = match checksums {
            Checksums::Finished => self.finish(headers, &payload),
            Checksums::Partial => 0,
        };
        let mut chain = Chain::from(first);
        chain.append(payload);
        let mut offload = p.offload;
        offload.needs_csum = checksums == Checksums::Partial;
        offload.csum_valid = false;
        offload.gso = (range.len() > usize::from(self.gso.segment_bytes))
            .then_some(Gso { ecn: self.gso.ecn && range.start == 0, ..self.gso });
        if checksums == Checksums::Finished {
            (offload.csum_start, offload.csum_offset) = (0, 0);
        }
        Ok((Packet { chain, offload }, read_bytes))
    }

    /// Stores the transport checksum of a piece; returns the number of bytes read for it.
    fn finish(&self, headers: &mut [u8], payload: &Chain) -> usize {
        let transport = &headers[self.l4..];
        let Summed { sum: rest, read_bytes } = payload.sum(0..payload.len());
        let mut sum = Sum::new();
        sum.add_bytes(transport);
        sum.append(rest);
        let read_bytes = read_bytes + transport.len();
        let offset = self.checksum_offset();
        put_u16(headers, self.l4 + offset, stored(sum.finish(), offset));
        read_bytes
    }

    /// Sets the header fields of one piece; the checksum field gets the sum of the pseudo-header.
    fn fix(&self, h: &mut [u8], range: &Range<usize>, is_last: bool) {
        let l4_bytes = self.header_bytes - self.l4 + range.len();
        let index = range.start / usize::from(self.gso.segment_bytes);
        self.fix_ip(h, self.header_bytes - ETHER_BYTES + range.len(), index);
        let protocol = match self.gso.kind {
            GsoKind::Udp => {
                put_u16(h, self.l4 + 4, l4_bytes as u16);
                crate::wire::protocol::UDP
            }
            GsoKind::TcpV4 | GsoKind::TcpV6 => {
                let seq = take_u32(h, self.l4 + 4).wrapping_add(range.start as u32);
                h[self.l4 + 4..self.l4 + 8].copy_from_slice(&seq.to_be_bytes());
                if !is_last {
                    h[self.l4 + 13] &= !FLAG_FIN_PSH;
                }
                if range.start > 0 {
                    h[self.l4 + 13] &= !FLAG_CWR;
                }
                crate::wire::protocol::TCP
            }
        };
        let mut pseudo = Sum::new();
        pseudo.add_pseudo(self.source, self.destination, protocol, l4_bytes as u32);
        put_u16(h, self.l4 + self.checksum_offset(), pseudo.fold());
    }

    /// Length, and for IPv4 also identification (one more per packet, unless DF is set: then it stays, RFC 6864
    /// section 4.1) and header checksum.
    fn fix_ip(&self, h: &mut [u8], l3_bytes: usize, index: usize) {
        if self.source.is_ipv6() {
            put_u16(h, ETHER_BYTES + 4, (l3_bytes - 40) as u16);
            return;
        }
        put_u16(h, ETHER_BYTES + 2, l3_bytes as u16);
        if h[IDENT + 2] & DONT_FRAGMENT == 0 {
            let ident = u16::from_be_bytes([h[IDENT], h[IDENT + 1]]).wrapping_add(index as u16);
            put_u16(h, IDENT, ident);
        }
        put_u16(h, ETHER_BYTES + 10, 0);
        let sum = checksum(&h[ETHER_BYTES..self.l4]);
        put_u16(h, ETHER_BYTES + 10, sum);
    }

    const fn checksum_offset(&self) -> usize {
        match self.gso.kind {
            GsoKind::Udp => UDP_CSUM,
            GsoKind::TcpV4 | GsoKind::TcpV6 => TCP_CSUM,
        }
    }
}

/// A computed UDP checksum of zero is sent as all ones (RFC 768).
const fn stored(sum: u16, csum_offset: usize) -> u16 {
    if sum == 0 && csum_offset == UDP_CSUM { 0xffff } else { sum }
}

fn put_u16(b: &mut [u8], at: usize, v: u16) {
    b[at..at + 2].copy_from_slice(&v.to_be_bytes());
}

fn take_u32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Source, destination and fixed header length of the IP packet in a frame.
pub(crate) fn addresses(frame: &[u8]) -> Option<(IpAddr, IpAddr, usize)> {
    let l3 = frame.get(ETHER_BYTES..)?;
    match eth::Header::parse(frame).ok()?.ethertype {
        eth::IPV4 => {
            let h = ipv4::Header::parse(l3, usize::MAX).ok()?;
            Some((h.src.into(), h.dst.into(), ipv4::HEADER_BYTES))
        }
        eth::IPV6 => {
            let h = ipv6::Header::parse(l3, usize::MAX).ok()?;
            Some((h.src.into(), h.dst.into(), ipv6::HEADER_BYTES))
        }
        _ => None,
    }
}

/// Completes the transport checksum of a frame, if that is still to be done; shared headers are copied first. Returns
/// the number of bytes read for it.
///
/// # Errors
/// [`NoBuffer`]: no buffer for the copy; the frame is unchanged.
pub fn finish_checksum(p: &mut Packet, pool: &mut Pool) -> Result<usize, NoBuffer> {
    if !p.offload.needs_csum {
        return Ok(0);
    }
    let (start, offset) = (usize::from(p.offload.csum_start), usize::from(p.offload.csum_offset));
    let at = start + offset;
    let mut read_bytes = 0;
    if at + 2 <= p.chain.len() {
        let summed = p.chain.sum(start..p.chain.len());
        read_bytes = summed.read_bytes;
        let sum = summed.sum.finish();
        own_front(&mut p.chain, at + 2, pool)?;
        p.chain.copy_from(at, &stored(sum, offset).to_be_bytes());
    }
    p.offload.needs_csum = false;
    (p.offload.csum_start, p.offload.csum_offset) = (0, 0);
    Ok(read_bytes)
}

fn finish_counted(
    p: &mut Packet,
    pool: &mut Pool,
    counters: &mut Counters,
) -> Result<(), NoBuffer> {
    let read_bytes = finish_checksum(p, pool)?;
    counters.add(Counter::SummedBytes, read_bytes as u64);
    Ok(())
}

/// The Internet checksum sum from byte `start` on, without cached sums.
fn sum_from(chain: &Chain, start: usize) -> Sum {
    let mut sum = Sum::new();
    let mut from = chain.reader();
    from.skip(start);
    let mut part = [0; 2048];
    loop {
        match from.read(&mut part) {
            0 => return sum,
            n => sum.add_bytes(&part[..n]),
        }
    }
}

/// Makes the first `n` bytes contiguous and writable: copies them if they are shared.
pub(crate) fn own_front(chain: &mut Chain, n: usize, pool: &mut Pool) -> Result<(), NoBuffer> {
    if chain.front().is_some_and(|m| m.len() >= n && m.is_unique()) {
        return Ok(());
    }
    let mut copy = pool.alloc(n, 0, Purpose::Control)?;
    chain.copy_to(0, copy.append(n).ok_or(NoBuffer)?);
    chain.trim_front(n, pool);
    chain.push_front(copy);
    Ok(())
}

/// Replaces a chain by an unshared copy in as few mbufs as possible.
///
/// # Errors
/// [`NoBuffer`]: no buffer; the chain is unchanged.
pub fn make_unique(chain: &mut Chain, pool: &mut Pool, p: Purpose) -> Result<(), NoBuffer> {
    let mut copy = pool.alloc_chain(chain.len(), 0, p)?;
    let mut from = chain.reader();
    for to in copy.slices_mut() {
        from.read(to);
    }
    pool.free(core::mem::replace(chain, copy));
    Ok(())
}

/// Whether the IPv4 header checksum and the TCP, UDP or ICMPv6 checksum of a complete frame are correct; true for
/// frames without such checksums. For wrappers and tests; the layers verify checksums themselves.
pub fn verify(p: &Packet) -> bool {
    let mut front = [0u8; ETHER_BYTES + 60];
    let known = p.chain.copy_to(0, &mut front);
    let ethertype = eth::Header::parse(&front[..known]).map(|h| h.ethertype);
    if !matches!(ethertype, Ok(eth::IPV4 | eth::IPV6)) {
        return true;
    }
    let Some((source, destination, _)) = addresses(&front[..known]) else { return false };
    let (l4, protocol, l3_bytes) = if source.is_ipv4() {
        let header_bytes = usize::from(front[ETHER_BYTES] & 0xf) * 4;
        let end = ETHER_BYTES + header_bytes;
        if end > known || checksum(&front[ETHER_BYTES..end]) != 0 {
            return false;
        }
        let total = u16::from_be_bytes([front[ETHER_BYTES + 2], front[ETHER_BYTES + 3]]);
        (end, front[ETHER_BYTES + 9], usize::from(total))
    } else {
        let payload = u16::from_be_bytes([front[ETHER_BYTES + 4], front[ETHER_BYTES + 5]]);
        (ETHER_BYTES + 40, front[ETHER_BYTES + 6], usize::from(payload) + 40)
    };
    use crate::wire::protocol::{ICMPV6, TCP, UDP};
    if ETHER_BYTES + l3_bytes != p.chain.len() {
        return false;
    }
    if ![TCP, UDP, ICMPV6].contains(&protocol) || p.is_checksum_trusted() {
        return true;
    }
    let mut sum = sum_from(&p.chain, l4);
    sum.add_pseudo(source, destination, protocol, (p.chain.len() - l4) as u32);
    sum.finish() == 0
}

#[cfg(test)]
mod tests;
