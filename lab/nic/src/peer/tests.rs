//! The modelled peer by itself: what it answers, and that nothing makes it fail.

use fulmar_stack::base::{Duration, EtherAddr, Instant, SeqNum};
use fulmar_stack::device::Device;
use fulmar_stack::wire::tcp::{Flags, Header};
use fulmar_stack::wire::{arp, eth};
use proptest::prelude::*;

use super::*;
use crate::AckRule;
use crate::frame::{Headers, Transport};
use crate::tests::{Host, Spec};
use crate::{SimConfig, SimHandle, with_peer};

const START: Instant = Instant::from_millis(1000);
/// The station of the peer.
const PEER: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0xfe]);

/// A host that speaks TCP by hand.
struct Script {
    host: Host,
    handle: SimHandle,
    now: Instant,
}

/// What came back: the header, and bytes of payload.
type Reply = (Header, usize);

impl Script {
    fn new(far_end: FarEnd) -> Script {
        let (nic, handle) = with_peer(SimConfig { far_end, ..SimConfig::default() }).unwrap();
        Script { host: Host::new(nic), handle, now: START }
    }

    fn send_bytes(&mut self, bytes: &[u8]) {
        let mut chain =
            self.host.pool.alloc_chain(bytes.len(), 0, fulmar_stack::mbuf::Purpose::Send).unwrap();
        chain.copy_from(0, bytes).unwrap();
        self.host.send(self.now, fulmar_stack::device::Packet::new(chain));
    }

    fn replies(&mut self) -> Vec<Reply> {
        let packets = self.host.receive(self.now);
        let read = |p: &fulmar_stack::device::Packet| {
            let bytes = p.chain.to_vec();
            let seen = Headers::parse(&bytes, bytes.len())?;
            let Transport::Tcp(h) = seen.transport else { return None };
            assert!(p.offload.needs_csum || crate::cut::is_sound(&bytes));
            Some((h, seen.payload_bytes))
        };
        let replies = packets.iter().filter_map(read).collect();
        self.host.free(packets);
        replies
    }

    /// Sends a segment; `payload` is the pattern from `offset` on.
    fn segment(
        &mut self,
        seq: u32,
        ack: SeqNum,
        flags: Flags,
        offset: u64,
        payload: usize,
    ) -> Vec<Reply> {
        let spec = Spec { seq, ack, flags: flags.0 as u8, dst: PEER, ..Spec::tcp(seq) };
        let mut bytes = vec![0; payload];
        pattern::fill(offset, &mut bytes);
        let frame = spec.bytes(&mut self.host.pool, &bytes);
        self.send_bytes(&frame);
        self.replies()
    }

    /// Opens a connection whose first byte is number 100; returns the peer's next number.
    fn open(&mut self) -> SeqNum {
        let replies = self.segment(99, SeqNum(0), Flags::SYN, 0, 0);
        let (h, _) = replies[0];
        assert_eq!((h.flags, h.ack), (Flags::SYN | Flags::ACK, SeqNum(100)));
        let mine = h.seq + 1;
        assert!(self.segment(100, mine, Flags::ACK, 0, 0).iter().all(|(_, n)| *n > 0));
        mine
    }
}

fn discarding() -> FarEnd {
    FarEnd { verify: true, ..FarEnd::default() }
}

#[test]
fn a_connection_opens_carries_data_and_closes() {
    let mut s = Script::new(discarding());
    let mine = s.open();
    let replies = s.segment(100, mine, Flags::ACK, 0, 500);
    assert_eq!((replies.len(), replies[0].0.ack), (1, SeqNum(600)));
    let replies = s.segment(600, mine, Flags::ACK | Flags::FIN, 0, 0);
    assert_eq!(replies[0].0.ack, SeqNum(601));
    assert!(replies[0].0.flags.contains(Flags::FIN));
    assert!(s.segment(601, mine + 1, Flags::ACK, 0, 0).is_empty());
    let c = s.handle.counts();
    assert_eq!((c.peer_bytes_in, c.peer_wrong_bytes, c.peer_connections), (500, 0, 1));
    assert_eq!(c.peer_resets_out, 0);
    assert!(s.host.comes_home());
}

#[test]
fn a_gap_is_reported_immediately_by_sack_and_filled_by_later_segments() {
    let mut s = Script::new(discarding());
    let mine = s.open();
    let data = Flags::ACK;
    let a = s.segment(200, mine, data, 100, 100)[0].0;
    let b = s.segment(400, mine, data, 300, 100)[0].0;
    assert_eq!((a.ack, b.ack), (SeqNum(100), SeqNum(100)));
    let blocks: Vec<_> = b.options.sack.iter().collect();
    // The latest first.
    let (early, late) = ((SeqNum(200), SeqNum(300)), (SeqNum(400), SeqNum(500)));
    assert_eq!(blocks, [late, early]);
    let c = s.segment(100, mine, data, 0, 100)[0].0;
    assert_eq!(c.ack, SeqNum(300));
    assert_eq!(c.options.sack.iter().collect::<Vec<_>>(), [late]);
    let d = s.segment(300, mine, data, 200, 100)[0].0;
    assert_eq!((d.ack, d.options.sack.len()), (SeqNum(500), 0));
    assert_eq!(s.segment(100, mine, data, 0, 100)[0].0.ack, SeqNum(500));
    let c = s.handle.counts();
    assert_eq!((c.peer_bytes_in, c.peer_wrong_bytes, c.peer_repeated_bytes_in), (400, 0, 100));
}

#[test]
fn acknowledgements_follow_the_rule() {
    for (packets, bytes, expected) in [(0, 0, 1), (2, 0, 5), (0, 3000, 4), (1, 0, 10)] {
        let ack = AckRule { packets, bytes, wait: Duration::ZERO };
        let mut s = Script::new(FarEnd { ack, ..discarding() });
        let mine = s.open();
        for i in 0..10 {
            let seq = 100 + 1000 * i;
            let spec = Spec { ack: mine, flags: Flags::ACK.0 as u8, dst: PEER, ..Spec::tcp(seq) };
            let p = spec.packet(&mut s.host.pool, &[0; 1000], 2000);
            s.host.burst.push(p).unwrap();
        }
        let Host { nic, pool, burst, counters, .. } = &mut s.host;
        use fulmar_stack::device::Device;
        nic.tx_burst(s.now, pool, burst, counters);
        let replies = s.replies();
        assert_eq!(replies.len(), expected, "{packets} packets, {bytes} bytes");
        assert_eq!(replies.last().unwrap().0.ack, SeqNum(10_100));
    }
}

#[test]
fn a_delayed_acknowledgement_is_sent_after_a_while() {
    let wait = Duration::from_millis(2);
    let ack = AckRule { packets: 0, bytes: 1000, wait };
    let mut s = Script::new(FarEnd { ack, ..discarding() });
    let mine = s.open();
    let data = Flags::ACK;
    assert!(s.segment(100, mine, data, 0, 400).is_empty());
    assert_eq!(s.segment(500, mine, data, 400, 600)[0].0.ack, SeqNum(1100), "enough bytes");
    assert!(s.segment(1100, mine, data, 1000, 100).is_empty());
    s.now = s.now + Duration::from_millis(1);
    assert!(s.replies().is_empty());
    s.now = s.now + Duration::from_millis(1);
    let replies = s.replies();
    assert_eq!((replies.len(), replies[0].0.ack), (1, SeqNum(1200)), "long enough");
    s.now = s.now + wait;
    assert!(s.replies().is_empty(), "once");
    let replies = s.segment(1200, mine, data | Flags::FIN, 0, 0);
    assert_eq!(replies[0].0.ack, SeqNum(1201), "the end does not wait");
}

#[test]
fn a_generator_keeps_to_the_window_and_sends_again_only_what_is_lost() {
    let services = vec![(0..=u16::MAX, Service::Generate { bytes: 10_000 })];
    let mut s = Script::new(FarEnd { services, ..discarding() });
    let mut got: Vec<Reply> = s.segment(99, SeqNum(0), Flags::SYN, 0, 0);
    let mine = got[0].0.seq + 1;
    got = s.segment(100, mine, Flags::ACK, 0, 0);
    // The window of the script's segments is 500 bytes, unscaled.
    assert_eq!(got.iter().map(|(_, n)| n).sum::<usize>(), 500);
    assert!(s.segment(100, mine, Flags::ACK, 0, 0).is_empty(), "one duplicate is no loss");
    s.segment(100, mine, Flags::ACK, 0, 0);
    let again = s.segment(100, mine, Flags::ACK, 0, 0);
    assert_eq!((again.len(), again[0].0.seq, again[0].1), (1, mine, 500));
    assert_eq!(s.handle.counts().peer_resent_bytes, 500);
    let (mut at, mut is_closed) = (mine + 500, false);
    while !is_closed {
        for (h, n) in s.segment(100, at, Flags::ACK, 0, 0) {
            assert_eq!(h.seq, at);
            at += n as u32;
            is_closed |= h.flags.contains(Flags::FIN);
        }
    }
    assert_eq!(at, mine + 10_000);
    // All but the FIN is acknowledged: it comes again.
    assert!(s.segment(100, at, Flags::ACK, 0, 0).is_empty());
    s.now = s.now + Duration::from_millis(300);
    let fin = s.replies();
    assert!(fin.len() == 1 && fin[0].0.flags.contains(Flags::FIN), "{fin:?}");
    assert_eq!(s.handle.counts().peer_bytes_out, 10_000);
}

/// The marks and stamps of the datagrams that have arrived, in milliseconds since the start.
fn stamps(script: &mut Script) -> Vec<(u64, f64)> {
    let packets = script.host.receive(script.now);
    let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    let read = |p: &fulmar_stack::device::Packet| {
        let bytes = p.chain.to_vec();
        let seen = Headers::parse(&bytes, bytes.len()).unwrap();
        assert_eq!(seen.payload_bytes, 100);
        let payload = &bytes[seen.payload_at..];
        assert!((16..100).all(|i| payload[i] == crate::pattern::byte(i as u64)));
        let at = Instant::from_nanos(word(payload, 8)).since(START);
        (word(payload, 0), at.as_nanos() as f64 / 1e6)
    };
    let found = packets.iter().map(read).collect();
    script.host.free(packets);
    found
}

fn flow(pps: u64, time_ms: u64) -> Command {
    Command::Flow {
        from: ([10, 9, 0, 2], 7).into(),
        to: ([10, 9, 0, 1], 53).into(),
        bytes: 100,
        pps,
        time: Duration::from_millis(time_ms),
        mark: 0x1234,
    }
}

#[test]
fn a_flow_keeps_its_rate_however_late_the_host_polls() {
    let mut script = Script::new(FarEnd { verify: true, ..FarEnd::default() });
    script.handle.ask(flow(1000, 5)).unwrap();
    assert_eq!(stamps(&mut script), [(0x1234, 0.0)]);
    assert_eq!(script.host.nic.next_deadline(), Some(START + Duration::from_millis(1)));
    script.now = START + Duration::from_micros(2_500);
    assert_eq!(stamps(&mut script), [(0x1234, 1.0), (0x1234, 2.0)]);
    script.now = START + Duration::from_millis(500);
    assert_eq!(stamps(&mut script), [(0x1234, 3.0), (0x1234, 4.0)]);
    assert_eq!(script.host.nic.next_deadline(), None, "it is over");
    assert_eq!(script.handle.counts().peer_datagrams_out, 5);
}

#[test]
fn a_flow_without_a_rate_lasts_as_long_as_it_was_asked_to() {
    let mut script = Script::new(FarEnd { verify: true, ..FarEnd::default() });
    script.handle.ask(flow(0, 5)).unwrap();
    assert!(stamps(&mut script).len() > 1);
    script.now = START + Duration::from_millis(6);
    // What lay on the wire comes still.
    while !stamps(&mut script).is_empty() {}
    let sent = script.handle.counts().peer_datagrams_out;
    script.now = START + Duration::from_millis(7);
    assert!(stamps(&mut script).is_empty());
    assert_eq!(script.handle.counts().peer_datagrams_out, sent);
}

#[test]
fn the_peer_resets_segments_without_a_connection() {
    let mut s = Script::new(FarEnd { services: vec![(9..=9, Service::Discard)], ..discarding() });
    let refused = s.segment(99, SeqNum(0), Flags::SYN, 0, 0);
    assert_eq!((refused[0].0.flags, refused[0].0.ack), (Flags::RST | Flags::ACK, SeqNum(100)));
    let refused = s.segment(99, SeqNum(77), Flags::ACK, 0, 10);
    assert_eq!((refused[0].0.flags, refused[0].0.seq), (Flags::RST, SeqNum(77)));
    assert!(s.segment(99, SeqNum(0), Flags::RST, 0, 0).is_empty());
}

#[test]
fn the_table_of_connections_is_bounded_and_places_of_old_ones_are_used_again() {
    let mut s = Script::new(FarEnd { max_connections: 2, ..discarding() });
    let mut syn = |port: u16| {
        let spec = Spec { flags: Flags::SYN.0 as u8, dst: PEER, ports: (port, 9), ..Spec::tcp(99) };
        let frame = spec.bytes(&mut s.host.pool, &[]);
        s.send_bytes(&frame);
        s.replies()[0].0.flags
    };
    assert!(!syn(1).contains(Flags::RST) && !syn(2).contains(Flags::RST));
    assert!(syn(3).contains(Flags::RST), "a third place");
    s.handle.ask(Command::ResetAll).unwrap();
    let resets = s.replies();
    assert!(resets.len() == 2 && resets.iter().all(|(h, _)| h.flags.contains(Flags::RST)));
    let mut syn = |port: u16| {
        let spec = Spec { flags: Flags::SYN.0 as u8, dst: PEER, ports: (port, 9), ..Spec::tcp(99) };
        let frame = spec.bytes(&mut s.host.pool, &[]);
        s.send_bytes(&frame);
        s.replies()[0].0.flags
    };
    assert!(!syn(3).contains(Flags::RST) && !syn(4).contains(Flags::RST));
}

#[test]
fn every_requested_address_answers_but_not_to_a_probe() {
    let mut s = Script::new(FarEnd::default());
    let mut ask = |sender: [u8; 4], target: [u8; 4]| {
        let q = arp::Packet {
            operation: arp::Operation::Request,
            sender_ether: EtherAddr([2, 0, 0, 0, 0, 0x51]),
            sender_ip: sender.into(),
            target_ether: EtherAddr([0; 6]),
            target_ip: target.into(),
        };
        let mut bytes = [0; 42];
        let src = EtherAddr([2, 0, 0, 0, 0, 0x51]);
        let h = eth::Header { dst: EtherAddr::BROADCAST, src, ethertype: eth::ARP };
        h.emit(&mut bytes).unwrap();
        q.emit(&mut bytes[14..]).unwrap();
        s.send_bytes(&bytes);
        let got = s.host.receive(s.now);
        let answers: Vec<_> = got.iter().map(|p| p.chain.to_vec()).collect();
        s.host.free(got);
        answers
    };
    let answer = arp::Packet::parse(&ask([10, 9, 0, 1], [10, 9, 0, 77])[0][14..]).unwrap();
    assert_eq!((answer.sender_ether, answer.sender_ip), (PEER, [10, 9, 0, 77].into()));
    assert!(ask([0, 0, 0, 0], [10, 9, 0, 1]).is_empty(), "a probe");
    assert!(ask([10, 9, 0, 1], [10, 9, 0, 1]).is_empty(), "an announcement");
}

/// Kind, number, how near to what is expected, flags, bytes of payload, where damage is done, noise.
type Oddity = (u8, u32, u32, u8, u16, u8, Vec<u8>);

/// Anything that a host could hand over: noise, segments of one connection with every field
/// arbitrary, and damage done to them.
fn frames() -> impl Strategy<Value = Vec<Oddity>> {
    let noise = proptest::collection::vec(any::<u8>(), 0..200);
    let one = (0u8..8, any::<u32>(), 0u32..6, any::<u8>(), 0u16..3000, any::<u8>(), noise);
    proptest::collection::vec(one, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_peer_withstands_arbitrary_frames_and_keeps_its_buffers(frames in frames()) {
        let services = vec![
            (0..=79, Service::Generate { bytes: u64::MAX }),
            (80..=80, Service::Respond { request: 7, response: 100 }),
        ];
        let mut s = Script::new(FarEnd { services, max_connections: 3, ..discarding() });
        s.now = START;
        let mut mine = SeqNum(0);
        for (kind, seq, near, flags, payload, at, noise) in frames {
            s.now = s.now + Duration::from_millis(u64::from(near) * 60);
            let frame = if kind == 0 {
                noise
            } else {
                // Near the numbers of the connection most of the time.
                let seq = if kind < 6 { 100 + near * 700 } else { seq };
                let ack = if kind < 7 { mine + near * 50 } else { SeqNum(seq) };
                let ports = (1, if kind == 2 { 79 } else { 80 });
                let spec = Spec { seq, ack, flags, dst: PEER, ports, ..Spec::tcp(seq) };
                let mut bytes = spec.bytes(&mut s.host.pool, &vec![at; usize::from(payload)]);
                if kind == 5 && let Some(b) = bytes.get_mut(usize::from(at)) {
                    *b ^= 1 << (near & 7);
                }
                bytes
            };
            s.send_bytes(&frame);
            if let Some((h, _)) = s.replies().last() {
                mine = h.seq;
            }
        }
        s.now = s.now + Duration::from_secs(100);
        s.replies();
        prop_assert!(s.host.comes_home());
    }
}
