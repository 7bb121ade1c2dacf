//! UDP input: from a packet that ip delivered to the queue of its socket.

use core::net::SocketAddr;

use crate::base::{Counter, DropReason, GsoKind, Instant, SlotId, Stage};
use crate::ip::{Delivered, ErrorKind, QuotedError};
use crate::mbuf::{FairShare, Purpose};
use crate::udp::{Datagram, Incoming, UdpError, UdpSocket};

use crate::shard::demux::BatchLookup;
use crate::shard::dgram::layer::Udp;
use crate::shard::dgram::output::MAX_SEGMENTS;
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;

impl Udp {
    /// A packet for UDP, and for this shard.
    pub(crate) fn input(
        &mut self,
        now: Instant,
        d: Delivered,
        lookup: &BatchLookup,
        core: &mut Core,
    ) {
        let (about, group) = (d.ip_header, d.is_group);
        let segment_bytes = run_segment_bytes(&d);
        let Some((datagram, to)) = self.check(d, lookup, core) else { return };
        match to {
            Some(id) => match segment_bytes.filter(|n| *n > 0 && *n < datagram.payload.len()) {
                None => deliver(id, datagram, core),
                Some(segment_bytes) => deliver_run(id, datagram, segment_bytes, core),
            },
            None => {
                core.net.counters.drop_packet(DropReason::UdpNoSocket);
                core.net.pool.free(datagram.payload);
                if !group {
                    core.net.with_ip(now, |ip, cx| ip.port_unreachable(cx, &about));
                }
            }
        }
    }

    /// Checks a packet and finds its socket. A packet for a full queue is dropped before its checksum is
    /// computed, so that a flood costs little.
    fn check(
        &self,
        d: Delivered,
        lookup: &BatchLookup,
        core: &mut Core,
    ) -> Option<(Datagram, Option<SlotId>)> {
        let is_run = run_segment_bytes(&d).is_some();
        let Core { net, sockets, .. } = core;
        let Net { pool, counters, stages, .. } = net;
        let Delivered { src, dst, zone, chain, offload, hop_limit, dscp_ecn, .. } = d;
        let packet = Incoming { src, dst, zone, chain, offload, hop_limit, dscp_ecn };
        let share = pool.share_of(Purpose::Receive);
        let look = |from, to: SocketAddr, charge| {
            stages.pass(Stage::Demultiplexed);
            let is_port = to.port() != 0;
            let found = is_port.then(|| lookup.socket_of_datagram(&self.table, to, from)).flatten();
            let refusal = match found.and_then(|id| sockets.get(id)) {
                // Some datagrams of a run may fit.
                Some(Socket::Udp(s)) if !is_run => drop_reason(&s.socket, charge, share),
                _ => None,
            };
            refusal.map_or(Ok(found), Err)
        };
        crate::udp::input(packet, pool, counters, look).ok()
    }

    /// An ICMP error about a datagram of ours.
    pub(crate) fn icmp_error(&mut self, now: Instant, e: QuotedError, core: &mut Core) {
        let Some(id) = self.table.lookup(e.local, e.remote) else {
            return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        };
        let error = match e.kind {
            ErrorKind::PortUnreachable => UdpError::ConnectionRefused,
            ErrorKind::TooBig { mtu } => {
                if !self.may_be_too_big(id, &e, &core.sockets) {
                    return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
                }
                if !core.net.ip.lower_datagram_mtu(now, e.remote.ip(), mtu) {
                    return core.net.counters.drop_packet(DropReason::IcmpMtuKnown);
                }
                UdpError::MessageTooLong
            }
            _ => UdpError::HostUnreachable,
        };
        let Some(Socket::Udp(s)) = core.sockets.get_mut(id) else { return };
        if s.socket.on_error(e.remote, error) {
            core.notify(id);
        } else if !matches!(e.kind, ErrorKind::TooBig { .. } | ErrorKind::ResolutionFailed) {
            // Only a connected socket gets the error.
            core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        }
    }

    /// Whether a report of a too big datagram may be about the socket: it has sent to that peer lately and,
    /// for IPv4, sets DF, without which no router reports.
    fn may_be_too_big(&self, id: SlotId, e: &QuotedError, sockets: &Slab<Socket>) -> bool {
        let Some(Socket::Udp(s)) = sockets.get(id) else { return false };
        let may_say = s.socket.mtu_discovery.forbids_fragments() || e.remote.is_ipv6();
        let own = s.template.as_deref().filter(|t| t.is_to(&e.remote));
        let from = s.socket.local.filter(|l| l.port() == 0).map(|_| e.local);
        may_say && own.or_else(|| self.templates.find(id, from, &e.remote)).is_some()
    }
}

/// Payload bytes of each datagram, if the packet is a run of datagrams (UDP GSO).
fn run_segment_bytes(d: &Delivered) -> Option<usize> {
    let gso = d.offload.gso.filter(|g| g.kind == GsoKind::Udp)?;
    Some(usize::from(gso.segment_bytes))
}

/// Delivers the datagrams of a super-frame one by one, unless the socket receives runs (UDP_GRO). Each is copied: as
/// references they would be charged with 64 KiB each, and fill the receive queue.
fn deliver_run(id: SlotId, run: Datagram, segment_bytes: usize, core: &mut Core) {
    let receives_runs = matches!(core.sockets.get(id), Some(Socket::Udp(s)) if s.socket.gro);
    if let Some(segment_bytes) = u16::try_from(segment_bytes).ok().filter(|_| receives_runs) {
        return deliver(id, Datagram { segment_bytes: Some(segment_bytes), ..run }, core);
    }
    let Datagram { src, dst, payload, hop_limit, dscp_ecn, .. } = run;
    if payload.len().div_ceil(segment_bytes) > MAX_SEGMENTS {
        core.net.counters.drop_packet(DropReason::BadOffload);
        return core.net.pool.free(payload);
    }
    let mut at = 0;
    while at < payload.len() {
        let len = segment_bytes.min(payload.len() - at);
        let Ok(mut one) = core.net.pool.alloc_chain(len, 0, Purpose::Receive) else {
            core.net.counters.drop_packet(DropReason::NoBuffer);
            break;
        };
        for piece in one.slices_mut() {
            at += payload.copy_to(at, piece);
        }
        core.net.counters.add(Counter::CopiedBytes, len as u64);
        let one = Datagram { src, dst, payload: one, segment_bytes: None, hop_limit, dscp_ecn };
        deliver(id, one, core);
    }
    core.net.pool.free(payload);
}

fn deliver(id: SlotId, datagram: Datagram, core: &mut Core) {
    let Some(Socket::Udp(s)) = core.sockets.get_mut(id) else {
        return core.net.pool.free(datagram.payload);
    };
    let Net { pool, counters, .. } = &mut core.net;
    let share = pool.share_of(Purpose::Receive);
    if share.is_contended()
        && let Some(reason) = drop_reason(&s.socket, crate::udp::charge(&datagram.payload), share)
    {
        counters.drop_packet(reason);
        return pool.free(datagram.payload);
    }
    let is_news = s.socket.deliver(datagram, pool, counters);
    core.net.pass(Stage::TransportInput);
    if is_news {
        core.notify(id);
    }
    core.net.pass(Stage::ReaderWoken);
}

/// The reason for which a datagram with this charge is dropped: the limit of the socket or, once half of
/// the receive share is in use, the fair part of the socket.
#[inline]
fn drop_reason(socket: &UdpSocket, charge: usize, share: FairShare) -> Option<DropReason> {
    if share.is_contended() && charge > share.allowance(socket.truesize(), false) {
        return Some(DropReason::UdpBufferFull);
    }
    socket.drop_reason(charge)
}
