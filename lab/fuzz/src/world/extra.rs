//! What is played only with a stack that has more than the usual.

use std::net::{IpAddr, SocketAddr};

use fulmar_stack::base::{SeqNum, SlotId};
use fulmar_stack::ip::{EchoId, InvokingPacket, SentError};
use fulmar_stack::shard::{
    ConditionalAccept, Decision, FastOpenOptions, FirstData, ListenOptions, PendingError,
    SendMessage, Shard,
};
use fulmar_stack::wire::protocol;
use fulmar_stack::wire::tcp::{
    EcnCounters, EcnOrder, FastOpen, FastOpenCookie, Flags, Header, Options,
};
use std::task::Poll;

use super::calls::MAX_CONNECTIONS;
use super::{PORT, UDP_PORT, World, build};
use crate::extra::{Cookie, EarlySyn, Ecn, Extra, Features, Place, SynAnswer, Verdict};
use crate::frames::{marked_ip_frame, our_ip, tcp_segment, udp_datagram};
use crate::peer::Flow;
use fulmar_stack::device::memory::Arrival;

/// The port of the listener that decides.
const DECIDED_PORT: u16 = 81;
/// The port of the datagram socket with every address.
const ANY_UDP_PORT: u16 = 54;
/// Pending connections that the program knows of at most.
const MAX_TAKEN: usize = 16;

/// Fast Open of every listener, if the stack has it.
pub(super) fn fast_open(features: Features) -> Option<FastOpenOptions> {
    let without_cookie = features.has(Features::WITHOUT_COOKIE);
    let options = FastOpenOptions { backlog: 4, without_cookie, keys: None };
    features.has(Features::FAST_OPEN).then_some(options)
}

/// Listeners beside those on [`PORT`].
pub(super) fn listeners(shard: &mut Shard, features: Features) -> Vec<SlotId> {
    let mut listeners = Vec::new();
    let limits = ConditionalAccept { backlog: 6, per_source: 4, ..ConditionalAccept::default() };
    let conditional_accept = features.has(Features::PENDING).then_some(limits);
    let decided = ListenOptions { backlog: 8, conditional_accept, ..ListenOptions::default() };
    for v6 in [false, true] {
        if features.has(Features::PENDING) {
            let at = SocketAddr::new(our_ip(v6), DECIDED_PORT);
            listeners.push(shard.tcp_listen(at, decided).expect("a listener that decides"));
        }
        if features.has(Features::ANY_ADDRESS) {
            let at = SocketAddr::new(Place::Odd(0).address(v6), 0);
            let fast_open = fast_open(features);
            let any = ListenOptions { any_port: true, only_v6: v6, fast_open, ..decided };
            listeners.push(shard.tcp_listen(at, any).expect("a listener on every port"));
        }
    }
    listeners
}

/// Datagram sockets with every address, and the socket of echo requests to others.
pub(super) fn any_address_sockets(shard: &mut Shard, features: Features) -> Option<[SlotId; 3]> {
    if !features.has(Features::ANY_ADDRESS) {
        return None;
    }
    let mut bind = |v6| {
        let at = SocketAddr::new(Place::Odd(0).address(v6), ANY_UDP_PORT + u16::from(v6));
        shard.udp().bind(at, Default::default()).expect("a datagram socket")
    };
    let bound = [bind(false), bind(true)];
    Some([bound[0], bound[1], shard.icmp().listen().expect("an echo listener")])
}

impl World {
    /// Plays a step.
    pub(super) fn extra(&mut self, step: Extra) {
        match step {
            Extra::Syn(s) => self.early_syn(&s),
            Extra::Answer(a) => self.syn_answer(&a),
            Extra::Marked { flow, payload_bytes, window, ecn } => {
                self.marked(flow, payload_bytes % 1449, window, ecn);
            }
            Extra::Datagram { v6, from, to, port, bytes } => {
                let from = SocketAddr::new(from.address(v6), 53);
                let to = SocketAddr::new(to.address(v6), UDP_PORT + u16::from(port % 4));
                let datagram = udp_datagram(from, to, &vec![3; usize::from(bytes % 1472)]);
                self.arrive_from((from.ip(), to.ip()), protocol::UDP, &datagram, 0);
            }
            Extra::Echo { v6, from, to, bytes } => {
                let ends = (from.address(v6), to.address(v6));
                let (proto, message) = build::echo_message(ends, false, 7, bytes);
                self.arrive_from(ends, proto, &message, 0);
            }
            Extra::ConnectEarly { v6, port, bytes, without_cookie } => {
                self.connect_early(v6, port, bytes, without_cookie);
            }
            Extra::ConnectFrom { v6, from, to, port } => self.connect_from(v6, from, to, port),
            Extra::SendFrom { v6, from, to, bytes } => self.send_from(v6, from, to, bytes),
            Extra::Pending => self.take_pending(),
            Extra::Decide { which, verdict } => self.decide(which, verdict),
            Extra::EchoReply => self.answer_echo(None),
            Extra::EchoError { code } => self.answer_echo(Some(code)),
        }
    }

    fn arrive_from(&mut self, ends: (IpAddr, IpAddr), proto: u8, payload: &[u8], ecn: u8) {
        let bytes = marked_ip_frame(ends, proto, payload, ecn);
        self.arrive(Arrival { bytes, offload: Default::default(), pieces: Vec::new() });
    }

    fn cookie(&self, of: IpAddr, cookie: Cookie, is_experimental: bool) -> Option<FastOpen> {
        let learnt = || self.observer.cookie(of);
        let value = match cookie {
            Cookie::Absent => return None,
            Cookie::Request => None,
            Cookie::Learnt => learnt(),
            Cookie::Damaged(bits) => learnt().and_then(|c| {
                let flipped: Vec<u8> = c.as_slice().iter().map(|b| b ^ bits).collect();
                FastOpenCookie::new(&flipped)
            }),
            Cookie::Any { bytes, filling } => {
                FastOpenCookie::new(&[filling; 16][..usize::from(bytes % 17)])
            }
        };
        Some(FastOpen { cookie: value, is_experimental })
    }

    fn early_syn(&mut self, s: &EarlySyn) {
        let port = match s.to_port % 4 {
            0 | 1 => PORT,
            2 => DECIDED_PORT,
            _ => 2000 + u16::from(s.to_port),
        };
        let from = SocketAddr::new(s.from.address(s.v6), 4000 + u16::from(s.from_port));
        let to = SocketAddr::new(s.to.address(s.v6), port);
        let header = Header {
            src_port: from.port(),
            dst_port: to.port(),
            seq: SeqNum(1_000_000 * u32::from(from.port())),
            flags: Flags::SYN | Flags::of_ace(s.ecn.ace),
            window: 60_000,
            options: Options {
                fast_open: self.cookie(from.ip(), s.cookie, s.is_experimental),
                ..build::usual_options(self.now)
            },
            ..Header::default()
        };
        let data = vec![1; usize::from(s.payload_bytes % 1420)];
        let segment = tcp_segment(from, to, &header, &data);
        self.arrive_from((from.ip(), to.ip()), protocol::TCP, &segment, s.ecn.field);
    }

    /// A segment of a flow with its fields of ECN.
    fn arrive_on(&mut self, f: &Flow, header: Header, payload_bytes: u16, ecn: Ecn) {
        let counters = ecn.counters.map(|(is_ect1_first, [ect0, ce, ect1])| {
            let order = if is_ect1_first { EcnOrder::Ect1First } else { EcnOrder::Ect0First };
            EcnCounters::full(order, ect0.into(), ce.into(), ect1.into())
        });
        let header = Header {
            flags: header.flags | Flags::of_ace(ecn.ace),
            options: Options { ecn: counters, ..header.options },
            ..header
        };
        let data = vec![1; usize::from(payload_bytes)];
        let segment = tcp_segment(f.remote, f.local, &header, &data);
        self.arrive_from((f.remote.ip(), f.local.ip()), protocol::TCP, &segment, ecn.field);
    }

    fn syn_answer(&mut self, a: &SynAnswer) {
        let Some(f) = self.observer.flow(a.flow) else { return };
        let mut options = build::usual_options(self.now);
        if let Some(ts) = &mut options.timestamps {
            ts.echo = f.stamp;
        }
        options.fast_open = self.cookie(f.remote.ip(), a.cookie, a.is_experimental);
        let header = Header {
            seq: SeqNum(77_000),
            ack: SeqNum(a.ack.to(f.stack_next.0)),
            options,
            ..self.in_order(&f, Flags::SYN | Flags::ACK)
        };
        self.arrive_on(&f, header, a.payload_bytes % 1400, a.ecn);
    }

    fn marked(&mut self, flow: u8, payload_bytes: u16, window: u16, ecn: Ecn) {
        let Some(f) = self.observer.flow(flow) else { return };
        let header = Header { window, ..self.in_order(&f, Flags::ACK) };
        self.arrive_on(&f, header, payload_bytes.min(1400), ecn);
    }

    fn connect_early(&mut self, v6: bool, port: u8, bytes: u16, without_cookie: bool) {
        if self.connections.len() >= MAX_CONNECTIONS {
            return;
        }
        let to = build::peer(v6, 2, 3000 + u16::from(port));
        let data = vec![9; usize::from(bytes)];
        let first = FirstData { bytes: &data, without_cookie };
        let _ = self.shard.fast_open_space(self.now, to, None, first, |_| ());
        if let Ok((id, accepted)) = self.shard.tcp_connect_fast(self.now, to, None, first, |_| ()) {
            assert!(accepted <= data.len());
            self.connections.push(id);
        }
    }

    fn connect_from(&mut self, v6: bool, from: Place, to: Place, port: u8) {
        if self.connections.len() >= MAX_CONNECTIONS {
            return;
        }
        let from = SocketAddr::new(from.address(v6), 0);
        let to = SocketAddr::new(to.address(v6), 3000 + u16::from(port));
        if let Ok(id) = self.shard.tcp_connect(self.now, to, Some(from)) {
            self.connections.push(id);
        }
    }

    fn send_from(&mut self, v6: bool, from: Place, to: Place, bytes: u16) {
        let Some(sockets) = self.any_address else { return };
        let data = vec![5; usize::from(bytes)];
        let to = SocketAddr::new(to.address(v6), 53);
        let from = SocketAddr::new(from.address(v6), 0);
        let message = SendMessage::new(&data).to(to).from(from);
        let _ = self.shard.udp().send_many(
            self.now,
            sockets[usize::from(v6)],
            &[message],
            PendingError::Return,
        );
    }

    fn take_pending(&mut self) {
        for listener in self.listeners.clone() {
            while self.taken.len() < MAX_TAKEN
                && let Ok(Poll::Ready(pending)) = self.shard.tcp_pending(listener)
            {
                self.taken.push(pending.id);
            }
        }
    }

    fn decide(&mut self, which: u8, verdict: Verdict) {
        let Some(i) = usize::from(which).checked_rem(self.taken.len()) else { return };
        let id = self.taken.remove(i);
        let decision = match verdict {
            Verdict::Accept => Decision::Accept,
            Verdict::Refuse => Decision::Refuse,
            Verdict::Unreachable(code) => Decision::Unreachable(code),
            Verdict::Drop => Decision::Drop,
        };
        if let Ok(Some(id)) = self.shard.tcp_decide(self.now, id, decision) {
            self.connections.push(id);
        }
    }

    /// Answers echo requests to others with a reply, or with an error of a code.
    fn answer_echo(&mut self, refused: Option<u8>) {
        let Some([_, _, echo]) = self.any_address else { return };
        while let Ok(Poll::Ready(r)) = self.shard.icmp().receive_request(echo) {
            let id = EchoId { ident: r.ident, seq: r.seq };
            let payload = r.payload.to_vec();
            self.shard.free(r.payload);
            match refused {
                None => {
                    let (now, from, to) = (self.now, r.dst, r.src);
                    let _ = self.shard.icmp().send_reply(now, echo, from, to, id, &payload);
                }
                Some(code) => {
                    let n = payload.len();
                    let about = InvokingPacket::echo_request(r.src, r.dst, id, &payload, n);
                    let error = SentError::Unreachable { code };
                    self.shard.icmp().send_error(self.now, &about, error, None);
                }
            }
        }
    }
}
