//! Packets on their way up: from the burst of the device to the layer, and the shard of the stack, that owns
//! their flow.
//!
//! A TCP flow belongs to the shard that the hash of its two ends names ([`OwnerKey`](crate::base::OwnerKey)), whatever
//! queue its packets come on; flows never move. A datagram belongs to a shard that has a socket on its port. If several
//! shards have one, the hash decides between them, so that a peer always meets the same socket. Ping sockets live on
//! the first shard. The answers of neighbours are copied to every shard.

use crate::base::{Counter, DropReason, Instant, Stage};
use crate::device::Packet;
use crate::ip::{Delivered, EchoReply, EchoRequest, Origin, QuotedError, Verdict};
use crate::mbuf::{Chain, Purpose};
use crate::wire::protocol;

use crate::shard::demux::{Tables, ports_of};
use crate::shard::link::net::Net;
use crate::shard::link::siblings::{HandOff, PING_SHARD, Siblings};
use crate::shard::world::Shard;

/// A copy of a packet of this length may use the control reserve.
const SMALL_FRAME_BYTES: usize = 256;

impl Shard {
    /// Hand-offs to and from the other shards of the stack.
    pub fn siblings(&mut self) -> &mut Siblings {
        &mut self.core.siblings
    }

    /// Drops a hand-off for which the other shard has no space.
    pub fn drop_hand_off(&mut self, what: HandOff) {
        self.core.drop_hand_off(what);
    }

    /// Receives one burst from the device: frames and bytes.
    pub(crate) fn receive(&mut self, now: Instant, limit: usize) -> (usize, usize) {
        let Net { pool, counters, link, .. } = &mut self.core.net;
        counters.count(Counter::RxPolls);
        link.device().rx_burst(now, pool, &mut self.rx.burst, limit, counters);
        let n = self.rx.burst.len();
        let answers = self.answers();
        if n == 0 {
            self.core.net.counters.count(Counter::RxEmptyPolls);
            self.rx.moderation.polled(now, 0, 0, answers);
            self.core.net.pass(Stage::PolledEmpty);
            return (0, 0);
        }
        self.core.net.pass(Stage::DeviceReceived);
        if n > 1
            && let Some(gro) = &mut self.rx.gro
        {
            let Net { pool, counters, .. } = &mut self.core.net;
            gro.coalesce(&mut self.rx.burst, pool, counters);
        }
        let mut bytes = 0;
        let tables =
            Tables { flows: &self.tcp.flows, udp: &self.udp.table, sockets: &self.core.sockets };
        self.rx.lookup.look_up(&self.rx.burst, &tables);
        while let Some(p) = self.rx.burst.pop_front() {
            bytes += p.chain.len();
            self.rx.lookup.advance();
            if !self.core.siblings.is_alone() {
                let lost = self.core.siblings.share_answer(&p);
                (0..lost).for_each(|_| {
                    self.core.net.counters.drop_packet(DropReason::HandOffFull);
                });
            }
            self.input(now, p);
        }
        self.rx.lookup.clear();
        self.rx.frame_bytes = if n > 1 { bytes / n } else { bytes };
        self.rx.moderation.polled(now, n, bytes, answers);
        self.rx.count_poll(&mut self.core.net.counters);
        (n, bytes)
    }

    /// Packets sent that a peer may wait for: all but TCP segments that only acknowledge. Those over loopback count on
    /// both sides, since their ACKs are counted with the others.
    #[inline]
    pub(crate) fn answers(&self) -> u64 {
        let Net { link, counters, .. } = &self.core.net;
        let sent = link.sent_frames() + counters.value(Counter::Loopback);
        sent.saturating_sub(counters.value(Counter::TcpAcksOut))
    }

    /// Receives the packets of the loopback queue; packets sent meanwhile wait for the next round.
    #[inline(never)]
    pub(crate) fn input_loopback(&mut self, now: Instant) -> usize {
        let n = self.core.net.link.loopback.len();
        for _ in 0..n {
            if let Some(p) = self.core.net.link.loopback.pop_front()
                && let Some(p) = self.core.net.release_send_share(p)
                && let Some(p) = self.tcp.input_predicted(now, Origin::Loopback, p, &mut self.core)
            {
                self.ip_input(now, Origin::Loopback, p);
            }
        }
        n
    }

    /// A frame of the device.
    #[inline]
    fn input(&mut self, now: Instant, p: Packet) {
        if let Some(p) = self.tcp.input_predicted(now, Origin::Device, p, &mut self.core) {
            self.ip_input(now, Origin::Device, p);
        }
    }

    #[inline(never)]
    fn ip_input(&mut self, now: Instant, origin: Origin, Packet { chain, offload }: Packet) {
        let verdict = self.core.net.with_ip(now, |ip, cx| ip.input(cx, origin, chain, offload));
        self.on_verdict(now, verdict);
    }

    /// Passes a packet on to its transport.
    #[inline]
    fn on_verdict(&mut self, now: Instant, verdict: Verdict) {
        let Shard { core, tcp, udp, ping, rx } = self;
        if let Verdict::Deliver(_) = verdict {
            core.net.pass(Stage::IpInput);
        }
        match verdict {
            Verdict::Deliver(d) if d.protocol == protocol::TCP => {
                tcp.input(now, d, &rx.lookup, core);
            }
            Verdict::Deliver(d) => {
                match ports_of(&d).and_then(|key| core.siblings.bound_elsewhere(&key)) {
                    Some(owner) => core.hand_over(owner, HandOff::Packet(d)),
                    None => udp.input(now, d, &rx.lookup, core),
                }
            }
            Verdict::IcmpError(e) => self.icmp_error(now, e),
            Verdict::EchoReply(r) => match core.siblings.id() {
                PING_SHARD => ping.input(r, core),
                _ => core.hand_over(PING_SHARD, HandOff::Echo(r)),
            },
            Verdict::EchoRequest(r) => match core.siblings.id() {
                PING_SHARD => ping.input_request(r, core),
                _ => core.hand_over(PING_SHARD, HandOff::EchoRequest(r)),
            },
            Verdict::Consumed => {}
        }
        self.tcp.flow_cache.forget_headers();
    }

    /// Receives the hand-offs of other shards.
    #[inline(never)]
    pub(crate) fn input_hand_offs(&mut self, now: Instant) -> usize {
        let mut taken = 0;
        while let Some(what) = self.core.siblings.take() {
            taken += 1;
            let Shard { core, tcp, udp, ping, rx } = self;
            match what {
                // Unread bytes in a buffer of the other shard would be charged to no queue there.
                HandOff::Packet(d) => {
                    let Some(chain) = core.net.own_copy(d.chain) else { continue };
                    let d = Delivered { chain, ..d };
                    match d.protocol {
                        protocol::TCP => tcp.input(now, d, &rx.lookup, core),
                        _ => udp.input(now, d, &rx.lookup, core),
                    }
                }
                HandOff::Echo(r) => {
                    let Some(payload) = core.net.own_copy(r.payload) else { continue };
                    ping.input(EchoReply { payload, ..r }, core);
                }
                HandOff::EchoRequest(r) => {
                    let Some(payload) = core.net.own_copy(r.payload) else { continue };
                    ping.input_request(EchoRequest { payload, ..r }, core);
                }
                HandOff::Error(e) => self.icmp_error_here(now, e),
                HandOff::NeighbourUpdate(update) => {
                    if let Some(chain) = core.net.copy_of(update.as_slice()) {
                        self.input(now, Packet::new(chain));
                    }
                }
            }
        }
        taken
    }

    /// An ICMP error, or the failure of a neighbour, for the shard that owns the quoted flow.
    pub(crate) fn icmp_error(&mut self, now: Instant, e: QuotedError) {
        let siblings = &self.core.siblings;
        let elsewhere = match e.protocol {
            _ if siblings.is_alone() => None,
            protocol::TCP => siblings.owner_elsewhere(&e.flow()),
            protocol::UDP => siblings.bound_elsewhere(&e.flow()),
            _ => Some(PING_SHARD).filter(|s| *s != siblings.id()),
        };
        match elsewhere {
            Some(owner) => self.core.hand_over(owner, HandOff::Error(e)),
            None => self.icmp_error_here(now, e),
        }
    }

    /// An ICMP error about something that this shard sent.
    fn icmp_error_here(&mut self, now: Instant, e: QuotedError) {
        match e.protocol {
            protocol::TCP => self.tcp.icmp_error(now, e, &mut self.core),
            protocol::UDP => self.udp.icmp_error(now, e, &mut self.core),
            _ => self.ping.icmp_error(now, e, &mut self.core),
        }
    }
}

impl Net {
    /// A packet with these bytes; `None` if there is no buffer.
    fn copy_of(&mut self, bytes: &[u8]) -> Option<Chain> {
        let Ok(mut chain) = self.pool.alloc_chain(bytes.len(), 0, Purpose::Control) else {
            self.counters.drop_packet(DropReason::NoBuffer);
            return None;
        };
        chain.fill([bytes]);
        Some(chain)
    }

    /// A packet that another shard has received, in memory of this pool: a small one in that of the control reserve if
    /// need be, as drivers do. `None`: there is no buffer.
    fn own_copy(&mut self, chain: Chain) -> Option<Chain> {
        let bytes = chain.len();
        let copy = self.pool.alloc_chain(bytes, 0, Purpose::Receive).or_else(|e| match bytes {
            0..=SMALL_FRAME_BYTES => self.pool.alloc_chain(bytes, 0, Purpose::Control),
            _ => Err(e),
        });
        let Ok(mut copy) = copy else {
            self.drop_chain(chain, DropReason::NoBuffer);
            return None;
        };
        let mut from = chain.reader();
        copy.slices_mut().for_each(|to| _ = from.read(to));
        self.pool.free(chain);
        Some(copy)
    }
}
