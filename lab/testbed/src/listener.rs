//! A server on a wire with one honest client, which is a stack too, and with whatever segments a test
//! makes. The client is also the router towards every other address, so that the answers to forged
//! sources have a way to go. Time is virtual; a tick is a millisecond.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use fulmar_stack::base::{
    Counter, DropReason, Duration, EtherAddr, Instant, Offload, Secrets, SeqNum, SlotId,
};
use fulmar_stack::device::Caps;
use fulmar_stack::ip::{IfAddr, Route};
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{ListenOptions, ListenerStat, Shard, StackConfig};
use fulmar_stack::wire::checksum::checksum;
use fulmar_stack::wire::dissect::{Headers, Transport};
use fulmar_stack::wire::tcp::{Flags, Header, Options, Timestamps};
use fulmar_stack::wire::{eth, ipv4};
use std::task::Poll;

use crate::stations::ether;
use fulmar_stack::device::memory::{Arrival, Frame, MemoryDevice, MemoryPort};

/// The server's address.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Where the server listens.
pub const PORT: u16 = 80;
const TICK: Duration = Duration::from_millis(1);

fn shard(own: Ipv4Addr, number: u8, config: StackConfig, now: Instant) -> (Shard, MemoryPort) {
    let caps = Caps { tx_csum: true, ..Caps::plain(1500, ether(number)) };
    let config = StackConfig {
        addresses: vec![IfAddr { addr: own.into(), prefix_len: 24 }],
        routes: (own != CLIENT).then(|| Route::default_via(CLIENT.into())).into_iter().collect(),
        pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(32 << 20) },
        ..config
    };
    let (device, wire) = MemoryDevice::new(caps);
    (Shard::new(config, Box::new(device), now).unwrap(), wire)
}

/// The server, the client, and the wire between them.
pub struct Rig {
    /// The virtual time.
    pub now: Instant,
    /// The server's shard.
    pub server: Shard,
    /// The honest client's shard.
    pub client: Shard,
    /// The listener of the server.
    pub listener: SlotId,
    to_server: MemoryPort,
    to_client: MemoryPort,
    /// Sources of the flood so far.
    flooded: u32,
    /// Ports from which the client has sent a SYN, one entry per SYN.
    syns: Vec<u16>,
}

/// An honest connection of [`Rig::connect_under`].
#[derive(Clone, Copy, Debug)]
pub struct Honest {
    /// The client's end.
    pub client: SlotId,
    /// The server's end, if the server has accepted it.
    pub server: Option<SlotId>,
    /// SYNs that the client had sent by then.
    pub syns: usize,
}

/// The source port of a frame that is a SYN.
fn port_of_syn(frame: &[u8]) -> Option<u16> {
    match Headers::parse(frame, frame.len())?.transport {
        Transport::Tcp(h) if h.flags == Flags::SYN => Some(h.src_port),
        _ => None,
    }
}

/// A segment that the server has sent to an address that is not the client's.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Its destination.
    pub to: SocketAddr,
    /// Its time to live.
    pub ttl: u8,
    /// Its TOS.
    pub tos: u8,
    /// Its TCP header.
    pub header: Header,
}

impl Rig {
    /// A server as configured by default.
    pub fn new(options: ListenOptions) -> Rig {
        Rig::seeded(1, options)
    }

    /// The same with secrets drawn from this seed.
    pub fn seeded(seed: u64, options: ListenOptions) -> Rig {
        let secrets = Some(Secrets::for_simulation(seed));
        Rig::with(options, StackConfig { secrets, ..StackConfig::default() })
    }

    /// A server configured otherwise; its addresses, routes and pool are the rig's, and its secrets if it has
    /// none.
    pub fn with(options: ListenOptions, config: StackConfig) -> Rig {
        let now = Instant::from_millis(64_000 * 10 + 1000);
        let secrets = config.secrets.clone().or(Some(Secrets::for_simulation(1)));
        let config = StackConfig { secrets, ..config };
        let (mut server, to_server) = shard(SERVER, 1, config, now);
        let client_config =
            StackConfig { secrets: Some(Secrets::for_simulation(9)), ..StackConfig::default() };
        let (client, to_client) = shard(CLIENT, 2, client_config, now);
        let local = SocketAddr::new(SERVER.into(), PORT);
        let listener = server.tcp_listen(local, ListenOptions::default()).unwrap();
        let mut rig = Rig {
            now,
            server,
            client,
            listener,
            to_server,
            to_client,
            flooded: 0,
            syns: Vec::new(),
        };
        // The server learns where its router is.
        let client = rig.connect();
        rig.pass(20);
        let server = rig.accept().expect("accepted");
        rig.client.close(rig.now, client);
        rig.pass(5);
        rig.server.close(rig.now, server);
        rig.server.close(rig.now, listener);
        rig.pass(5);
        rig.listener = rig.server.tcp_listen(local, options).unwrap();
        rig
    }

    /// Lets `ms` milliseconds pass.
    pub fn pass(&mut self, ms: usize) {
        self.pass_under(ms, 0);
    }

    /// The same while `syns` SYNs per millisecond come from sources that do not exist.
    pub fn pass_under(&mut self, ms: usize, syns: u32) {
        for _ in 0..ms {
            for _ in 0..syns {
                self.flood();
            }
            self.now = self.now + TICK;
            self.server.step(self.now, 100_000);
            self.client.step(self.now, 100_000);
            self.carry();
        }
    }

    /// What one has sent to the other arrives with the next tick.
    fn carry(&mut self) {
        let (mut a, mut b) = (self.to_server.lock(), self.to_client.lock());
        let (a, b) = (&mut *a, &mut *b);
        self.syns.extend(b.sent.iter().filter_map(|f| port_of_syn(&f.0)));
        a.arriving.extend(b.sent.drain(..).map(Arrival::from));
        let is_for_client = |f: &Frame| f.0[12..14] != [8, 0] || f.0[30..34] == CLIENT.octets();
        let (for_client, others): (VecDeque<_>, _) =
            std::mem::take(&mut a.sent).into_iter().partition(is_for_client);
        a.sent = others;
        b.arriving.extend(for_client.into_iter().map(Arrival::from));
    }

    /// A SYN from the next of many sources.
    fn flood(&mut self) {
        self.flooded += 1;
        let n = self.flooded;
        let [a, b, c, _] = n.to_be_bytes();
        let source = Ipv4Addr::new(198, 18 + (a & 1), b, c);
        let from = SocketAddrV4::new(source, 1024 + (n % 60_000) as u16);
        let options = syn_options(n);
        self.send_from(from, &syn(SeqNum(n.wrapping_mul(0x9e37_79b9)), options), &[]);
    }

    /// A segment from an address of the test's choice.
    pub fn send_from(&mut self, from: SocketAddrV4, header: &Header, payload: &[u8]) {
        self.send_to(from, SocketAddrV4::new(SERVER, PORT), header, payload);
    }

    /// A segment from one address of the test's choice to another.
    pub fn send_to(
        &mut self,
        from: SocketAddrV4,
        to: SocketAddrV4,
        header: &Header,
        payload: &[u8],
    ) {
        self.send_frame(frame_of(ether(2), 0, [from, to], header, payload));
    }

    /// A frame for the server, its checksums right.
    pub fn send_frame(&mut self, frame: Vec<u8>) {
        let offload = Offload { csum_valid: true, ..Offload::default() };
        self.to_server.lock().arriving.push_back((frame, offload).into());
    }

    /// The frames that the server has sent to others than the client since the last time.
    pub fn frames(&mut self) -> Vec<Vec<u8>> {
        let sent = std::mem::take(&mut self.to_server.lock().sent);
        sent.into_iter().map(|(frame, _)| frame).collect()
    }

    /// The segments that the server has sent to others than the client since the last time.
    pub fn replies(&mut self) -> Vec<Reply> {
        let sent = std::mem::take(&mut self.to_server.lock().sent);
        let segments = sent.iter().filter(|f| f.0[12..14] == [8, 0] && f.0[23] == 6);
        segments
            .map(|(frame, _)| {
                let to: [u8; 4] = frame[30..34].try_into().unwrap();
                let header = Header::parse(&frame[34..]).unwrap().0;
                assert_eq!(checksum(&frame[14..34]), 0, "the checksum of the IPv4 header");
                let to = SocketAddr::new(to.into(), header.dst_port);
                Reply { to, ttl: frame[22], tos: frame[15], header }
            })
            .collect()
    }

    /// What the server has answered to one address.
    pub fn replies_to(&mut self, who: SocketAddrV4) -> Vec<Header> {
        let all = self.replies().into_iter();
        all.filter(|r| r.to == SocketAddr::V4(who)).map(|r| r.header).collect()
    }

    /// Crossings into the server's device so far.
    pub fn bursts(&self) -> usize {
        self.to_server.lock().bursts
    }

    /// The client begins to connect.
    pub fn connect(&mut self) -> SlotId {
        let to = SocketAddr::new(SERVER.into(), PORT);
        self.client.tcp_connect(self.now, to, None).unwrap()
    }

    /// The scenario of `trust.syn_flood.connects`: `connections` honest connections, one every four milliseconds,
    /// while `syns` SYNs per millisecond come from sources that do not exist. Ends when all are accepted, or
    /// when each has had time to repeat its SYN once.
    pub fn connect_under(&mut self, connections: usize, syns: u32) -> Vec<Honest> {
        const APART_MS: usize = 4;
        // The SYN is repeated after a second, and again two seconds later (RFC 6298).
        const SECOND_SYN_MS: usize = 2_900;
        // The flood alone, until the SYN queue is full.
        self.pass_under(20, syns);
        self.syns.clear();
        let mut all = Vec::with_capacity(connections);
        for ms in 0..connections * APART_MS + SECOND_SYN_MS {
            if ms.is_multiple_of(APART_MS) && all.len() < connections {
                all.push(Honest { client: self.connect(), server: None, syns: 0 });
            }
            self.pass_under(1, syns);
            self.replies();
            self.accept_honest(&mut all);
            if all.len() == connections && all.iter().all(|h| h.server.is_some()) {
                break;
            }
        }
        all
    }

    fn accept_honest(&mut self, all: &mut [Honest]) {
        while let Some((server, from)) = self.accept_from() {
            let is_its = |h: &&mut Honest| {
                self.client.addresses(h.client).is_ok_and(|(local, _)| local == Some(from))
            };
            if let Some(honest) = all.iter_mut().find(is_its) {
                honest.server = Some(server);
                honest.syns = self.syns.iter().filter(|port| **port == from.port()).count();
            }
        }
    }

    /// The next connection of the accept queue.
    pub fn accept(&mut self) -> Option<SlotId> {
        self.accept_from().map(|(id, _)| id)
    }

    fn accept_from(&mut self) -> Option<(SlotId, SocketAddr)> {
        match self.server.tcp_accept(self.listener) {
            Ok(Poll::Ready(accepted)) => Some(accepted),
            Ok(_) => None,
            Err(e) => panic!("{e:?}"),
        }
    }

    /// The numbers of the listener.
    pub fn stat(&mut self) -> ListenerStat {
        self.server.listener(self.listener).map(|l| l.stat()).unwrap()
    }

    /// Packets that the server has dropped for this reason.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.server.counters().drops(reason)
    }

    /// A counter of the server.
    pub fn count(&self, counter: Counter) -> u64 {
        self.server.counters().value(counter)
    }

    /// Fills the SYN queue with embryos that will not be completed.
    pub fn fill_syn_queue(&mut self) {
        for _ in 0..self.stat().embryo_limit {
            self.flood();
        }
        self.pass(1);
        let stat = self.stat();
        assert_eq!(stat.embryos, stat.embryo_limit);
        self.replies();
    }

    /// The bytes that wait at the server.
    pub fn read(&mut self, id: SlotId) -> Vec<u8> {
        match self.server.tcp_take(id, usize::MAX) {
            Ok(Poll::Ready(chain)) => {
                let bytes = chain.to_vec();
                self.server.tcp_read_done(self.now, id, chain);
                bytes
            }
            _ => Vec::new(),
        }
    }
}

/// A segment to the server's station from another one, with this TOS and from one address to another.
pub fn frame_of(
    station: EtherAddr,
    tos: u8,
    [from, to]: [SocketAddrV4; 2],
    header: &Header,
    payload: &[u8],
) -> Vec<u8> {
    let header = Header { src_port: from.port(), dst_port: to.port(), ..*header };
    let bytes = header.header_bytes();
    let mut frame = vec![0; eth::HEADER_BYTES + ipv4::HEADER_BYTES + bytes];
    let link = eth::Header { dst: ether(1), src: station, ethertype: eth::IPV4 };
    link.emit(&mut frame).unwrap();
    let network = ipv4::Header {
        src: *from.ip(),
        dst: *to.ip(),
        protocol: 6,
        ttl: 64,
        dscp_ecn: tos,
        ident: 1,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + bytes + payload.len(),
    };
    network.emit(&mut frame[eth::HEADER_BYTES..]).unwrap();
    header.emit(&mut frame[eth::HEADER_BYTES + ipv4::HEADER_BYTES..]).unwrap();
    frame.extend(payload);
    frame
}

/// The options of a SYN as Linux sends it.
pub fn syn_options(clock: u32) -> Options {
    Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: clock, echo: 0 }),
        ..Options::default()
    }
}

/// A SYN with this initial sequence number.
pub fn syn(iss: SeqNum, options: Options) -> Header {
    Header { seq: iss, flags: Flags::SYN, window: 64_240, options, ..Header::default() }
}

/// The ACK that answers a SYN,ACK.
pub fn ack(syn_ack: &Header) -> Header {
    let timestamps = syn_ack
        .options
        .timestamps
        .map(|t| Timestamps { value: t.echo.wrapping_add(1), echo: t.value });
    Header {
        seq: syn_ack.ack,
        ack: SeqNum(syn_ack.seq.0.wrapping_add(1)),
        flags: Flags::ACK,
        window: 502,
        options: Options { timestamps, ..Options::default() },
        ..Header::default()
    }
}
