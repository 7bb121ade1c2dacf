//! The headers of a connection that are ready-made are those that asking every layer gives, whatever
//! becomes of neighbours, routes and addresses while segments go.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Poll;

use fulmar_stack::base::{Duration, Offload, SeqNum, SlotId};
use fulmar_stack::ip::{IfAddr, Prefix, Route};
use fulmar_stack::shard::Reserved;
use fulmar_stack::socket::{Attempt, SocketError};
use fulmar_stack::wire::tcp::{self, Flags};
use proptest::prelude::*;

use crate::shard::udp::rig::{OURS, PEER, Rig, US, caps, station_of};

/// A host behind routers, and its network.
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
/// An address of ours beside the one of the connection.
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 99);
const ETHER_IP: usize = 34;

fn far_net() -> Prefix {
    Prefix { addr: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 0)), len: 24 }
}

fn via(number: u8, mtu: Option<usize>) -> Route {
    let router = Ipv4Addr::new(10, 0, 0, number);
    Route { dst: far_net(), via: Some(router.into()), src: None, mtu }
}

/// One end of a connection in a rig; the test is the other one.
struct Line {
    rig: Rig,
    id: SlotId,
    peer: Ipv4Addr,
    /// What follows the last byte that came from us.
    next: SeqNum,
}

/// A segment that left: the station it went to, its source address, its header and its payload.
type Left = (u8, [u8; 4], tcp::Header, Vec<u8>);

fn segment(frame: &[u8]) -> Option<Left> {
    if frame[12..14] != [8, 0] || frame[23] != 6 {
        return None;
    }
    let (header, header_bytes) = tcp::Header::parse(&frame[ETHER_IP..]).expect("a header");
    let payload = frame[ETHER_IP + header_bytes..].to_vec();
    Some((frame[5], frame[26..30].try_into().expect("four bytes"), header, payload))
}

impl Line {
    /// A connection to a host, which is behind router 3 or at station 2 itself.
    fn to(peer: Ipv4Addr) -> Line {
        let mut rig = Rig::new(caps(false));
        rig.shard.ip().add_address(IfAddr { addr: OTHER.into(), prefix_len: 24 }).unwrap();
        rig.shard.ip().add_route(via(3, None)).unwrap();
        let (hop, station) = if peer == FAR { (Ipv4Addr::new(10, 0, 0, 3), 3) } else { (peer, 2) };
        let local = SocketAddr::new(US.into(), 4000);
        let remote = SocketAddr::new(peer.into(), 9);
        let id = rig.shard.tcp_connect(rig.now, remote, Some(local)).unwrap();
        rig.step();
        rig.answer_arp(hop, station);
        rig.step();
        let syn = rig.take().iter().find_map(|f| segment(&f.0)).expect("a SYN").2;
        // Every write is a segment, whatever is on its way.
        rig.shard.with_tcb(rig.now, id, |t| t.tcb.set_nodelay(true)).unwrap();
        let mut line = Line { rig, id, peer, next: syn.seq + 1 };
        line.answer(Flags::SYN.with(Flags::ACK), 0);
        assert!(matches!(line.rig.shard.tcp_connected(id), Ok(Poll::Ready(()))));
        line.take();
        line
    }

    /// A segment from the peer that acknowledges everything.
    fn answer(&mut self, flags: Flags, seq: u32) {
        let mss = flags.contains(Flags::SYN).then_some(1460);
        let options = tcp::Options { mss, ..Default::default() };
        let header = tcp::Header {
            src_port: 9,
            dst_port: 4000,
            seq: SeqNum(7_000) + seq,
            ack: self.next,
            flags,
            window: 65_535,
            urgent: 0,
            options,
        };
        let mut bytes = [0; tcp::MAX_HEADER_BYTES];
        let n = header.emit(&mut bytes).unwrap();
        let ip = fulmar_stack::wire::ipv4::Header {
            src: self.peer,
            dst: US,
            protocol: 6,
            ttl: 64,
            dscp_ecn: 0,
            ident: 1,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            header_bytes: 20,
            total_bytes: 20 + n,
        };
        let mut network = [0; 20];
        ip.emit(&mut network).unwrap();
        let frame = [&OURS.0[..], &station_of(2).0, &[8, 0], &network, &bytes[..n]].concat();
        self.rig.arrive(frame, Offload { csum_valid: true, ..Offload::default() });
        self.rig.step();
    }

    fn write(&mut self, bytes: usize) -> Result<usize, SocketError> {
        let Line { rig, id, .. } = self;
        let bytes = vec![0xa5; bytes];
        let n = match rig.shard.sosend(*id).reserve(rig.now, &bytes, bytes.len(), Attempt::First)? {
            Poll::Ready(Reserved::Sent(n)) => n,
            Poll::Ready(Reserved::Space(mut r)) => {
                let n = r.len();
                r.chain.copy_from(0, &bytes[..n]);
                rig.shard.sosend(*id).commit(rig.now, r);
                n
            }
            _ => 0,
        };
        // What a large write leaves for the next one goes too.
        rig.pass(Duration::from_millis(2));
        Ok(n)
    }

    /// The frames sent since the last call, frames other than segments included.
    fn take(&mut self) -> Vec<(Vec<u8>, Offload)> {
        let frames = self.rig.take();
        for (_, _, header, payload) in frames.iter().filter_map(|f| segment(&f.0)) {
            let end = header.seq + payload.len() as u32;
            if end.distance(self.next) > 0 || header.flags.contains(Flags::SYN) {
                self.next = end;
            }
        }
        frames
    }

    /// Sends a little: the stations and source addresses of what leaves for it; all is acknowledged.
    fn sent(&mut self) -> Vec<(u8, Ipv4Addr)> {
        self.write(10).expect("it is open");
        let left: Vec<_> = self.take().iter().filter_map(|f| segment(&f.0)).collect();
        self.answer(Flags::ACK, 1);
        left.into_iter().map(|s| (s.0, s.1.into())).collect()
    }
}

#[test]
fn the_next_segment_goes_where_the_neighbour_has_moved_to() {
    let mut line = Line::to(PEER);
    assert_eq!(line.sent(), [(2, US)]);
    assert_eq!(line.sent(), [(2, US)]);
    line.rig.claim(PEER, 77);
    assert_eq!(line.sent(), [(2, US)]);
    line.rig.leave_unanswered();
    assert_eq!(line.sent(), [(77, US)]);
}

#[test]
fn the_next_segment_takes_the_new_route_and_without_one_it_waits() {
    let mut line = Line::to(FAR);
    line.rig.shard.ip().add_route(via(4, None)).unwrap();
    assert_eq!(line.sent(), [], "router 4 is asked for first");
    line.rig.answer_arp(Ipv4Addr::new(10, 0, 0, 4), 4);
    assert_eq!(line.sent().last(), Some(&(4, US)));
    assert_eq!(line.sent(), [(4, US)]);
    line.rig.shard.ip().remove_route(far_net());
    assert_eq!(line.sent(), []);
    line.rig.shard.ip().add_route(via(3, None)).unwrap();
    // Its timer sends it again.
    line.rig.pass(Duration::from_secs(5));
    let again: Vec<_> = line.take().iter().filter_map(|f| segment(&f.0)).collect();
    assert!(!again.is_empty() && again.iter().all(|s| s.0 == 3), "{again:?}");
}

#[test]
fn no_segment_leaves_from_an_address_that_is_no_longer_ours() {
    let mut line = Line::to(PEER);
    assert_eq!(line.sent(), [(2, US)]);
    assert!(line.rig.shard.ip().remove_address(US.into()));
    line.write(10).expect("the connection is still there");
    line.rig.pass(Duration::from_secs(1));
    assert_eq!(line.take().iter().filter_map(|f| segment(&f.0)).count(), 0);
    line.rig.shard.ip().add_address(IfAddr { addr: US.into(), prefix_len: 24 }).unwrap();
    line.rig.pass(Duration::from_secs(5));
    let again: Vec<_> = line.take().iter().filter_map(|f| segment(&f.0)).collect();
    assert!(!again.is_empty() && again.iter().all(|s| s.1 == US.octets()), "{again:?}");
}

/// Something that happens to a host with a connection.
#[derive(Clone, Debug)]
enum Event {
    Write(usize),
    Acknowledged,
    Told(u8, u8),
    AddRoute(u8, Option<usize>),
    RemoveRoute,
    AddAddress,
    RemoveAddress,
    NarrowPath(usize),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let bytes = prop_oneof![Just(1usize), Just(1460), Just(1461), 1..6000usize];
    prop_oneof![
        6 => bytes.prop_map(Event::Write),
        6 => Just(Event::Acknowledged),
        4 => (2..5u8, 2..9u8).prop_map(|(who, station)| Event::Told(who, station)),
        2 => (2..5u8, prop_oneof![Just(None), Just(Some(1400))])
            .prop_map(|(router, mtu)| Event::AddRoute(router, mtu)),
        1 => Just(Event::RemoveRoute),
        1 => Just(Event::AddAddress),
        1 => Just(Event::RemoveAddress),
        1 => (600..1500usize).prop_map(Event::NarrowPath),
        3 => prop_oneof![0..10u64, 200..6000u64, 20_000..60_000u64].prop_map(Event::Pass),
    ]
}

/// What a host did about an event, as far as anybody can see.
fn happen(line: &mut Line, event: &Event, forgets: bool) -> String {
    if forgets {
        line.rig.forget();
    }
    let mut done = String::new();
    match event {
        Event::Write(n) => done = format!("{:?}", line.write(*n)),
        Event::Acknowledged => line.answer(Flags::ACK, 1),
        Event::Told(who, station) => line.rig.answer_arp(Ipv4Addr::new(10, 0, 0, *who), *station),
        Event::AddRoute(router, mtu) => {
            done = format!("{:?}", line.rig.shard.ip().add_route(via(*router, *mtu)));
        }
        Event::RemoveRoute => done = format!("{:?}", line.rig.shard.ip().remove_route(far_net())),
        Event::AddAddress => {
            let own = IfAddr { addr: US.into(), prefix_len: 24 };
            done = format!("{:?}", line.rig.shard.ip().add_address(own));
        }
        Event::RemoveAddress => {
            done = format!("{:?}", line.rig.shard.ip().remove_address(US.into()));
        }
        Event::NarrowPath(mtu) => {
            line.rig.shard.ip().lower_path_mtu(line.rig.now, FAR.into(), *mtu);
        }
        Event::Pass(ms) => line.rig.pass(Duration::from_millis(*ms)),
    }
    format!("{done} {:?}", line.take())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn segments_by_a_template_equal_those_of_the_slow_path(
        is_far in any::<bool>(),
        events in prop::collection::vec(event(), 1..60),
    ) {
        // The second host derives everything anew before each event.
        let peer = if is_far { FAR } else { PEER };
        let mut lines = [Line::to(peer), Line::to(peer)];
        for event in &events {
            let quick = happen(&mut lines[0], event, false);
            let long = happen(&mut lines[1], event, true);
            prop_assert_eq!(quick, long, "after {:?}", event);
        }
    }
}
