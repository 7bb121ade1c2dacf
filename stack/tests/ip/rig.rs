//! A host of engine, pool and sink, and hand-written frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fulmar_stack::base::{
    Counters, DropReason, Duration, EtherAddr, Instant, MtuDiscovery, Offload, Secrets,
};
use fulmar_stack::ip::{
    Config, Context, Delivered, Egress, FrameSink, IfAddr, Ip, Origin, Outgoing, OutputError,
    Route, SavedHeader, Traffic, Verdict,
};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol};

pub const US: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
pub const PEER: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);
pub const ALL: EtherAddr = EtherAddr::BROADCAST;

pub const OUR4: &str = "10.0.0.1";
pub const PEER4: &str = "10.0.0.2";
pub const FAR4: &str = "192.0.2.7";
pub const GATEWAY4: &str = "10.0.0.254";
pub const OUR6: &str = "2001:db8::1";
pub const PEER6: &str = "2001:db8::2";
pub const LOCAL6: &str = "fe80::ff:fe00:1";

pub fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

pub fn v4(s: &str) -> Ipv4Addr {
    s.parse().unwrap()
}

pub fn v6(s: &str) -> Ipv6Addr {
    s.parse().unwrap()
}

/// Collects sent frames, unless set to full.
#[derive(Default)]
pub struct Sink {
    pub frames: Vec<(Chain, Offload)>,
    pub looped: Vec<(Chain, Offload)>,
    pub full: bool,
}

impl FrameSink for Sink {
    fn frame(&mut self, _: &mut Pool, _: &mut Counters, c: Chain, o: Offload) -> Result<(), Chain> {
        if self.full {
            return Err(c);
        }
        self.frames.push((c, o));
        Ok(())
    }

    fn has_space(&mut self, _: &mut Pool, _: &mut Counters, _: usize, _: Egress) -> bool {
        !self.full
    }

    fn loopback(&mut self, _: &mut Counters, c: Chain, o: Offload) -> Result<(), Chain> {
        if self.full {
            return Err(c);
        }
        self.looped.push((c, o));
        Ok(())
    }
}

pub struct Host {
    pub ip: Ip,
    pub pool: Pool,
    pub counters: Counters,
    pub now: Instant,
    pub sink: Sink,
}

pub fn config() -> Config {
    let address = |a: &str, prefix_len| IfAddr { addr: ip(a), prefix_len };
    Config {
        ether: US,
        addresses: vec![address(OUR4, 24), address(OUR6, 64)],
        routes: vec![Route::default_via(ip(GATEWAY4))],
        ..Config::default()
    }
}

impl Host {
    pub fn new() -> Host {
        Host::with(config())
    }

    pub fn with(config: Config) -> Host {
        Host {
            ip: Ip::new(config, &Secrets::for_simulation(7)).unwrap(),
            pool: Pool::new(PoolConfig::with_budget(16 << 20)).unwrap(),
            counters: Counters::default(),
            now: Instant::from_millis(1000),
            sink: Sink::default(),
        }
    }

    /// A host with resolved neighbours.
    pub fn with_resolved_neighbours() -> Host {
        let mut h = Host::new();
        for n in [PEER4, GATEWAY4] {
            h.receive(&crate::ip::arp::request(PEER, v4(n), v4(OUR4)));
        }
        h.receive(&crate::ip::ndp::solicitation(PEER6, OUR6));
        h.sent();
        h
    }

    pub fn chain(&mut self, bytes: &[u8], headroom: usize) -> Chain {
        let mut c = self.pool.alloc_chain(bytes.len().max(1), headroom, Purpose::Send).unwrap();
        c.trim_back(c.len() - bytes.len(), &mut self.pool);
        c.copy_from(0, bytes).unwrap();
        c
    }

    /// Makes a call.
    pub fn call<R>(&mut self, call: impl FnOnce(&mut Ip, &mut Context<'_, Sink>) -> R) -> R {
        let Host { ip, pool, counters, sink, now } = self;
        call(ip, &mut Context { now: *now, pool, counters, out: sink })
    }

    /// Inputs a frame in a single mbuf.
    pub fn receive(&mut self, frame: &[u8]) -> Verdict {
        self.receive_with(frame, Offload::default())
    }

    pub fn receive_with(&mut self, frame: &[u8], offload: Offload) -> Verdict {
        let c = self.chain(frame, 0);
        self.receive_chain(c, offload)
    }

    pub fn receive_chain(&mut self, c: Chain, offload: Offload) -> Verdict {
        self.call(|ip, cx| ip.input(cx, Origin::Device, c, offload))
    }

    /// Inputs a looped-back frame.
    pub fn receive_looped(&mut self, c: Chain, o: Offload) -> Verdict {
        self.call(|ip, cx| ip.input(cx, Origin::Loopback, c, o))
    }

    /// Inputs a frame that must be dropped for `reason` only.
    #[track_caller]
    pub fn drops(&mut self, frame: &[u8], reason: DropReason) {
        let before = self.counters.clone();
        let verdict = self.receive(frame);
        assert!(matches!(verdict, Verdict::Consumed), "{verdict:?}");
        let count = |c: &Counters| (c.drops(reason), c.total_drops());
        let (one, all) = count(&before);
        assert_eq!(count(&self.counters), (one + 1, all + 1), "{reason:?}");
    }

    #[track_caller]
    pub fn delivers(&mut self, frame: &[u8]) -> Got {
        let verdict = self.receive(frame);
        let Verdict::Deliver(d) = verdict else { panic!("{verdict:?}") };
        self.got(d)
    }

    pub fn got(&mut self, d: Delivered) -> Got {
        let got = Got {
            src: d.src,
            dst: d.dst,
            zone: d.zone,
            bytes: d.chain.to_vec(),
            offload: d.offload,
            header: d.ip_header,
            is_group: d.is_group,
        };
        self.pool.free(d.chain);
        got
    }

    /// The frames sent to the device so far.
    pub fn sent(&mut self) -> Vec<Vec<u8>> {
        let frames = std::mem::take(&mut self.sink.frames);
        frames
            .into_iter()
            .map(|(c, _)| {
                let bytes = c.to_vec();
                self.pool.free(c);
                bytes
            })
            .collect()
    }

    #[track_caller]
    pub fn sent_one(&mut self) -> Vec<u8> {
        let mut frames = self.sent();
        assert_eq!(frames.len(), 1, "{frames:?}");
        frames.remove(0)
    }

    pub fn send(&mut self, packet: Outgoing) -> Result<(), OutputError> {
        self.call(|ip, cx| ip.output(cx, packet))
    }

    /// Sends a UDP packet with `bytes` of payload.
    pub fn send_udp(&mut self, src: &str, dst: &str, bytes: usize) -> Result<(), OutputError> {
        let packet = self.udp_to(src, dst, bytes);
        self.send(packet)
    }

    pub fn udp_to(&mut self, src: &str, dst: &str, bytes: usize) -> Outgoing {
        let packet = udp(ip(src), ip(dst), &vec![0x5a; bytes]);
        Outgoing {
            src: ip(src),
            dst: ip(dst),
            zone: 0,
            protocol: protocol::UDP,
            ttl: None,
            dscp_ecn: 0,
            chain: self.chain(&packet, 80),
            offload: Offload::default(),
            traffic: Traffic::Own,
            mtu_discovery: MtuDiscovery::On,
        }
    }

    pub fn advance(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
        self.call(|ip, cx| ip.on_timer(cx));
    }

    /// Releases the engine and checks for leaks.
    #[track_caller]
    pub fn end(mut self) {
        self.sent();
        self.ip.release(&mut self.pool);
        for (c, _) in std::mem::take(&mut self.sink.looped) {
            self.pool.free(c);
        }
        assert_eq!(self.pool.outstanding(), 0);
    }
}

pub struct Got {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub zone: u32,
    pub bytes: Vec<u8>,
    pub offload: Offload,
    pub header: SavedHeader,
    pub is_group: bool,
}

pub fn ether(dst: EtherAddr, src: EtherAddr, ethertype: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; eth::HEADER_BYTES];
    eth::Header { dst, src, ethertype }.emit(&mut frame).unwrap();
    frame.extend_from_slice(body);
    frame
}

pub fn ipv4_header(src: &str, dst: &str, protocol: u8, payload_bytes: usize) -> ipv4::Header {
    ipv4::Header {
        src: v4(src),
        dst: v4(dst),
        protocol,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: 20 + payload_bytes,
    }
}

/// An IP packet of the addresses' version.
pub fn packet(src: &str, dst: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
    packet_with(src, dst, protocol, 64, payload)
}

pub fn packet_with(src: &str, dst: &str, protocol: u8, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes;
    if ip(src).is_ipv4() {
        bytes = vec![0; 20];
        let header = ipv4_header(src, dst, protocol, payload.len());
        ipv4::Header { ttl, ..header }.emit(&mut bytes).unwrap();
    } else {
        bytes = vec![0; 40];
        let header = ipv6::Header {
            src: v6(src),
            dst: v6(dst),
            next_header: protocol,
            hop_limit: ttl,
            traffic_class: 0,
            flow_label: 0,
            payload_bytes: payload.len(),
        };
        header.emit(&mut bytes).unwrap();
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// A frame from the peer with an IP packet.
pub fn frame(packet: &[u8]) -> Vec<u8> {
    framed(US, packet)
}

pub fn framed(dst: EtherAddr, packet: &[u8]) -> Vec<u8> {
    ether(dst, PEER, if packet[0] >> 4 == 4 { eth::IPV4 } else { eth::IPV6 }, packet)
}

pub fn udp(src: IpAddr, dst: IpAddr, payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len();
    let mut bytes = vec![0x03, 0xe8, 0, 53, (length >> 8) as u8, length as u8, 0, 0];
    bytes.extend_from_slice(payload);
    let mut sum = Sum::new();
    sum.add_pseudo(src, dst, protocol::UDP, length as u32);
    sum.add_bytes(&bytes);
    let sum = sum.finish_udp().to_be_bytes();
    bytes[6..8].copy_from_slice(&sum);
    bytes
}

/// A frame with a UDP packet from the peer to `dst`.
pub fn udp_frame(src: &str, dst: &str, payload: &[u8]) -> Vec<u8> {
    frame(&packet(src, dst, protocol::UDP, &udp(ip(src), ip(dst), payload)))
}

/// An ICMP message of the addresses' version with its checksum.
pub fn icmp(src: &str, dst: &str, header: [u8; 8], body: &[u8]) -> Vec<u8> {
    let mut bytes = [&header[..], body].concat();
    bytes[2..4].fill(0);
    let mut sum = Sum::new();
    sum.add_bytes(&bytes);
    if ip(src).is_ipv6() {
        sum.add_pseudo(ip(src), ip(dst), protocol::ICMPV6, bytes.len() as u32);
    }
    let sum = sum.finish().to_be_bytes();
    bytes[2..4].copy_from_slice(&sum);
    bytes
}

pub fn icmp_protocol(like: &str) -> u8 {
    if ip(like).is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 }
}

pub fn icmp_frame(src: &str, dst: &str, header: [u8; 8], body: &[u8]) -> Vec<u8> {
    frame(&packet(src, dst, icmp_protocol(src), &icmp(src, dst, header, body)))
}

/// Parses a sent frame: Ethernet header, addresses, protocol, transport bytes. Checks lengths and
/// the IPv4 checksum.
#[track_caller]
pub fn parse_sent(frame: &[u8]) -> (eth::Header, IpAddr, IpAddr, u8, &[u8]) {
    let link = eth::Header::parse(frame).unwrap();
    let body = &frame[14..];
    if link.ethertype == eth::IPV4 {
        let h = ipv4::Header::parse(body, body.len()).unwrap();
        assert!(ipv4::checksum_ok(body, h.header_bytes));
        assert_eq!(h.total_bytes, body.len());
        (link, h.src.into(), h.dst.into(), h.protocol, &body[20..])
    } else {
        assert_eq!(link.ethertype, eth::IPV6);
        let h = ipv6::Header::parse(body, body.len()).unwrap();
        assert_eq!(h.payload_bytes + 40, body.len());
        (link, h.src.into(), h.dst.into(), h.next_header, &body[40..])
    }
}

/// The ICMP message of a sent frame. Verifies its checksum.
#[track_caller]
pub fn parse_sent_icmp(frame: &[u8]) -> (IpAddr, IpAddr, &[u8]) {
    let (_, src, dst, protocol, message) = parse_sent(frame);
    assert!(matches!(protocol, protocol::ICMP | protocol::ICMPV6));
    let mut sum = Sum::new();
    sum.add_bytes(message);
    if src.is_ipv6() {
        sum.add_pseudo(src, dst, protocol, message.len() as u32);
    }
    assert!(sum.is_valid());
    (src, dst, message)
}
