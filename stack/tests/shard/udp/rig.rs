//! A shard over a device that notes what is sent and hands over what a test made.

use std::net::{Ipv4Addr, SocketAddr};

use fulmar_stack::base::{DropReason, Duration, EtherAddr, Gso, Instant, Offload, Secrets, SlotId};
use fulmar_stack::device::Caps;
use fulmar_stack::device::memory::{MemoryDevice, MemoryPort};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{Shard, StackConfig};
use fulmar_stack::socket::SocketError;

pub const OURS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
pub const US: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

pub struct Rig {
    pub shard: Shard,
    pub wire: MemoryPort,
    pub now: Instant,
}

pub fn peer(port: u16) -> SocketAddr {
    SocketAddr::new(PEER.into(), port)
}

/// A device that completes checksums, and cuts runs of datagrams if `cuts`.
pub fn caps(cuts: bool) -> Caps {
    Caps { tx_csum: true, tso: cuts.then_some(65_535), udp_gso: cuts, ..Caps::plain(1500, OURS) }
}

impl Rig {
    pub fn new(caps: Caps) -> Rig {
        Rig::with(caps, false)
    }

    /// A gateway, whose guest is the peer: it answers for every address, and knows where the peer is.
    pub fn gateway(caps: Caps) -> Rig {
        let mut rig = Rig::with(caps, true);
        let id = rig.connected();
        rig.shard.close(rig.now, id);
        rig
    }

    fn with(caps: Caps, any_ip: bool) -> Rig {
        let (device, wire) = MemoryDevice::new(caps);
        let config = StackConfig {
            addresses: vec![IfAddr { addr: US.into(), prefix_len: 24 }],
            any_ip,
            pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) },
            secrets: Some(Secrets::for_simulation(1)),
            ..StackConfig::default()
        };
        let now = Instant::from_millis(1000);
        Rig { shard: Shard::new(config, Box::new(device), now).unwrap(), wire, now }
    }

    /// A socket bound to our address.
    pub fn bound(&mut self) -> SlotId {
        let local = SocketAddr::new(US.into(), 4000);
        self.shard.udp().bind(local, Default::default()).unwrap()
    }

    /// A socket connected to the peer, whose Ethernet address is known.
    pub fn connected(&mut self) -> SlotId {
        let id = self.bound();
        self.shard.udp().connect(id, peer(9)).unwrap();
        self.shard.udp().send(self.now, id, &[b"who is it"], None).unwrap();
        self.answer_arp(PEER, 2);
        self.take();
        id
    }

    /// A socket with port 4001 and no peer.
    pub fn unconnected(&mut self) -> SlotId {
        let local = SocketAddr::new(US.into(), 4001);
        self.shard.udp().bind(local, Default::default()).unwrap()
    }

    pub fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.step();
    }

    pub fn step(&mut self) {
        self.shard.step(self.now, 64);
    }

    pub fn arrive(&mut self, bytes: Vec<u8>, offload: Offload) {
        self.wire.lock().arriving.push_back((bytes, offload).into());
    }

    /// Receives an ARP reply of a neighbour, at the station with this number.
    pub fn answer_arp(&mut self, who: Ipv4Addr, station: u8) {
        let ether = station_of(station);
        let mut frame = Vec::from(OURS.0);
        frame.extend(ether.0);
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        frame.extend(ether.0);
        frame.extend(who.octets());
        frame.extend(OURS.0);
        frame.extend(US.octets());
        self.arrive(frame, Offload::default());
        self.step();
    }

    /// Another station claims the address of a neighbour that is in use.
    pub fn claim(&mut self, who: Ipv4Addr, station: u8) {
        let before = self.shard.counters().drops(DropReason::NeighbourClaim);
        self.answer_arp(who, station);
        assert_eq!(self.shard.counters().drops(DropReason::NeighbourClaim), before + 1);
    }

    /// The known station does not answer, for as long as it is asked.
    pub fn leave_unanswered(&mut self) {
        (0..2).for_each(|_| self.pass(Duration::from_millis(500)));
    }

    /// Everything that was derived from the tables is to be derived anew.
    pub fn forget(&mut self) {
        let passing = IfAddr { addr: Ipv4Addr::new(192, 0, 2, 77).into(), prefix_len: 32 };
        self.shard.ip().add_address(passing).unwrap();
        assert!(self.shard.ip().remove_address(passing.addr));
    }

    pub fn send(&mut self, id: SlotId, bytes: &[u8]) -> Result<usize, SocketError> {
        self.shard.udp().send(self.now, id, &[bytes], None)
    }

    /// What was sent since the last time.
    pub fn take(&mut self) -> Vec<(Vec<u8>, Offload)> {
        std::mem::take(&mut self.wire.lock().sent).into()
    }

    /// To which stations datagrams went since the last time.
    pub fn stations(&mut self) -> Vec<u8> {
        let is_datagram = |f: &(Vec<u8>, Offload)| f.0[12..14] == [8, 0] && f.0[23] == 17;
        self.take().into_iter().filter(is_datagram).map(|f| f.0[5]).collect()
    }
}

pub fn station_of(number: u8) -> EtherAddr {
    EtherAddr([2, 0, 0, 0, 0, number])
}

/// A frame with a datagram, or a run of them, from the peer to port 4000 of ours.
pub fn datagram(payload: &[u8], gso: Option<Gso>) -> (Vec<u8>, Offload) {
    datagram_to((PEER, 9), (US, 4000), payload, gso)
}

/// The same between other addresses and ports.
pub fn datagram_to(
    (src, src_port): (Ipv4Addr, u16),
    (dst, dst_port): (Ipv4Addr, u16),
    payload: &[u8],
    gso: Option<Gso>,
) -> (Vec<u8>, Offload) {
    let (udp, ip) = ((payload.len() + 8) as u16, (payload.len() + 28) as u16);
    let mut frame = Vec::from(OURS.0);
    frame.extend(station_of(2).0);
    frame.extend([8, 0]);
    let header = fulmar_stack::wire::ipv4::Header {
        src,
        dst,
        protocol: 17,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: ip.into(),
    };
    let mut network = [0; 20];
    header.emit(&mut network).unwrap();
    frame.extend(network);
    for word in [src_port, dst_port, udp, 0] {
        frame.extend(word.to_be_bytes());
    }
    frame.extend(payload);
    (frame, Offload { csum_valid: true, gso, ..Offload::default() })
}
