//! Fragmentation on output (RFC 791 section 3.2, RFC 8200 section 4.5).
//!
//! ```text
//!   frame      | Ethernet | IP | transport header | payload ........................... |
//!   fragments  | Ethernet | IP | (fragment header) | bytes [0, unit)     |
//!              | Ethernet | IP | (fragment header) | bytes [unit, 2 unit)   | ...
//! ```
//!
//! Input: a frame larger than the path MTU whose sender permits fragmentation. Output: frames of a
//! header mbuf and references into the original; payload is not copied. The transport checksum is
//! completed in software first, since a device cannot compute it across fragments.
//!
//! No fragment is sent unless the sink has space for all of them. If the pool is exhausted midway,
//! the rest is not sent.

use crate::base::{Counter, DropReason, Offload};
use crate::mbuf::{Chain, Pool, Purpose};
use crate::wire::{eth, ipv4, ipv6, protocol, udp};

use crate::ip::engine::Ip;
use crate::ip::frame::{Context, pull};
use crate::ip::{Egress, FrameSink, OutputError};

/// The headers of the frame to be fragmented.
struct Template {
    link: eth::Header,
    network: Network,
    ident: u32,
    /// Bytes of headers in the original frame.
    frame_bytes: usize,
    /// Bytes of headers in a fragment.
    header_bytes: usize,
}

enum Network {
    V4(ipv4::Header),
    V6(ipv6::Header),
}

/// The payload range of one fragment.
#[derive(Clone, Copy)]
struct FragmentRange {
    start: usize,
    len: usize,
    is_last: bool,
}

impl Ip {
    /// Sends a frame whose packet exceeds `mtu` in fragments.
    ///
    /// # Errors
    /// `NoBuffer`, counted; `Full`. The frame is freed in every case.
    pub(crate) fn send_fragments<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        mut frame: Chain,
        offload: Offload,
        mtu: usize,
        egress: Egress,
    ) -> Result<(), OutputError> {
        let sent = self.send_each_fragment(cx, &mut frame, offload, mtu, egress);
        match sent {
            Err(OutputError::NoBuffer) => cx.discard(frame, DropReason::NoBuffer),
            Ok(()) | Err(_) => cx.pool.free(frame),
        }
        sent
    }

    fn send_each_fragment<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Chain,
        offload: Offload,
        mtu: usize,
        egress: Egress,
    ) -> Result<(), OutputError> {
        let template = self.template(frame, cx.pool).ok_or(OutputError::NoBuffer)?;
        let ip_bytes = template.header_bytes.saturating_sub(eth::HEADER_BYTES);
        let unit = mtu.saturating_sub(ip_bytes) & !7;
        let payload_bytes = frame.len().saturating_sub(template.frame_bytes);
        let fragments = payload_bytes.checked_div(unit).unwrap_or(0).saturating_add(1);
        if !cx.out.has_space(cx.pool, cx.counters, fragments, egress) {
            return Err(OutputError::Full);
        }
        finish_checksum(cx, frame, offload).ok_or(OutputError::NoBuffer)?;
        let mut start = 0;
        while start < payload_bytes && unit > 0 {
            let len = unit.min(payload_bytes.saturating_sub(start));
            let end = start.saturating_add(len);
            let range = FragmentRange { start, len, is_last: end == payload_bytes };
            let fragment =
                template.build_fragment(frame, range, cx.pool).ok_or(OutputError::NoBuffer)?;
            cx.send(fragment, Offload::default(), egress)?;
            cx.counters.count(Counter::FragmentsOut);
            start = end;
        }
        Ok(())
    }

    /// Parses the headers of a frame built by this room.
    fn template(&mut self, frame: &mut Chain, pool: &mut Pool) -> Option<Template> {
        let packet_bytes = frame.len().checked_sub(eth::HEADER_BYTES)?;
        let bytes = pull(frame, eth::HEADER_BYTES.saturating_add(ipv4::HEADER_BYTES), pool).ok()?;
        let link = eth::Header::parse(bytes).ok()?;
        let is_v4 = link.ethertype == eth::IPV4;
        let ip_bytes = if is_v4 { ipv4::HEADER_BYTES } else { ipv6::HEADER_BYTES };
        let frame_bytes = eth::HEADER_BYTES.saturating_add(ip_bytes);
        let bytes = pull(frame, frame_bytes, pool).ok()?.get(eth::HEADER_BYTES..)?;
        if is_v4 {
            // The identification was drawn when the frame was built without DF.
            let header = ipv4::Header::parse(bytes, packet_bytes).ok()?;
            let (ident, header_bytes) = (header.ident.into(), frame_bytes);
            let network = Network::V4(header);
            return Some(Template { link, network, ident, frame_bytes, header_bytes });
        }
        let network = Network::V6(ipv6::Header::parse(bytes, packet_bytes).ok()?);
        // RFC 7739 section 5: random, hence unpredictable.
        let ident = self.idents.number();
        let header_bytes = frame_bytes.saturating_add(ipv6::FRAGMENT_BYTES);
        Some(Template { link, network, ident, frame_bytes, header_bytes })
    }
}

impl Template {
    /// Builds one fragment.
    fn build_fragment(
        &self,
        frame: &Chain,
        range: FragmentRange,
        pool: &mut Pool,
    ) -> Option<Chain> {
        let mut headers = pool.alloc(self.header_bytes, 0, Purpose::Control).ok()?;
        let written =
            headers.append(self.header_bytes).and_then(|headers| self.emit(headers, range));
        let from = self.frame_bytes.saturating_add(range.start);
        match written.and_then(|()| pool.clone_range(frame, from, range.len).ok()) {
            Some(payload) => {
                let mut chain = Chain::from(headers);
                chain.append(payload);
                Some(chain)
            }
            None => {
                pool.free_mbuf(headers);
                None
            }
        }
    }

    fn emit(&self, headers: &mut [u8], range: FragmentRange) -> Option<()> {
        let (link, network) = headers.split_at_mut_checked(eth::HEADER_BYTES)?;
        self.link.emit(link).ok()?;
        let offset = u16::try_from(range.start).ok()?;
        match self.network {
            Network::V4(header) => {
                let fragment = ipv4::Header {
                    ident: self.ident as u16,
                    dont_fragment: false,
                    more_fragments: !range.is_last,
                    fragment_offset: offset,
                    header_bytes: ipv4::HEADER_BYTES,
                    total_bytes: range.len.saturating_add(ipv4::HEADER_BYTES),
                    ..header
                };
                fragment.emit(network).ok()
            }
            Network::V6(header) => {
                let (fixed, extension) = network.split_at_mut_checked(ipv6::HEADER_BYTES)?;
                let payload_bytes = range.len.saturating_add(ipv6::FRAGMENT_BYTES);
                let next_header = protocol::FRAGMENT;
                ipv6::Header { next_header, payload_bytes, ..header }.emit(fixed).ok()?;
                let fragment = ipv6::Fragment { offset, more: !range.is_last, ident: self.ident };
                fragment.emit(header.next_header, extension).ok()
            }
        }
    }
}

/// Computes the transport checksum in software.
fn finish_checksum<S>(cx: &mut Context<'_, S>, frame: &mut Chain, offload: Offload) -> Option<()> {
    if !offload.needs_csum {
        return Some(());
    }
    let start = usize::from(offload.csum_start);
    let summed = frame.sum(start..frame.len());
    cx.counters.add(Counter::SummedBytes, summed.read_bytes as u64);
    let is_udp = usize::from(offload.csum_offset) == udp::CHECKSUM_OFFSET;
    let sum = if is_udp { summed.sum.finish_udp() } else { summed.sum.finish() };
    let at = start.saturating_add(offload.csum_offset.into());
    frame.copy_from(at, &sum.to_be_bytes()).map(|_| ())
}
