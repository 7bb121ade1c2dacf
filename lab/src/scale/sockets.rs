//! Datagram sockets of one shard, and frames for them or for closed ports, over a device that only hands
//! frames over.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fulmar_stack::base::{
    Counter, Counters, DropReason, EtherAddr, Instant as StackInstant, Offload, Secrets, SeqNum,
    SlotId,
};
use fulmar_stack::device::{Burst, Caps, Device, Packet, WakeFd};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};
use fulmar_stack::shard::{Shard, StackConfig};
use fulmar_stack::wire::{eth, ipv4, protocol, tcp};
use std::task::Poll;

use super::internet::Random;

/// Packets of a burst.
pub(super) const BURST: usize = 64;
/// Payload of a datagram: with its headers the shortest Ethernet frame.
const PAYLOAD_BYTES: usize = 18;
/// Sockets per address, each with a port of its own.
const PORTS: usize = 60_000;
/// The most sockets, for which there are addresses.
const MOST: usize = 1_000_000;
/// A closed port.
const CLOSED_PORT: u16 = 65_000;

const OURS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
const THEIRS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);

/// A device whose frames were put there beforehand, and which forgets what is sent.
struct Feed {
    caps: Caps,
    frames: Arc<Mutex<VecDeque<Packet>>>,
}

impl Device for Feed {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn tx_burst(
        &mut self,
        _: StackInstant,
        pool: &mut Pool,
        burst: &mut Burst,
        _: &mut Counters,
    ) -> usize {
        let mut sent = 0;
        while let Some(p) = burst.pop_front() {
            pool.free(p.chain);
            sent += 1;
        }
        sent
    }
    fn rx_burst(
        &mut self,
        _: StackInstant,
        _: &mut Pool,
        out: &mut Burst,
        budget: usize,
        _: &mut Counters,
    ) -> usize {
        let Ok(mut frames) = self.frames.lock() else { return 0 };
        let count = budget.min(out.space()).min(frames.len());
        frames.drain(..count).filter_map(|p| out.push(p).err()).for_each(drop);
        count
    }
    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}

/// A shard with many sockets.
pub(super) struct Rig {
    shard: Shard,
    frames: Arc<Mutex<VecDeque<Packet>>>,
    sockets: Vec<SlotId>,
    began: Instant,
    random: Random,
}

/// Address and port of a socket.
fn end_of(socket: usize) -> (Ipv4Addr, u16) {
    (Ipv4Addr::new(10, 1, 0, 1 + (socket / PORTS) as u8), 1 + (socket % PORTS) as u16)
}

/// A frame with an IPv4 packet of these bytes.
fn frame(to: Ipv4Addr, kind: u8, payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; eth::HEADER_BYTES + ipv4::HEADER_BYTES];
    let (link, network) = bytes.split_at_mut(eth::HEADER_BYTES);
    let ethernet = eth::Header { dst: OURS, src: THEIRS, ethertype: eth::IPV4 };
    let header = ipv4::Header {
        src: Ipv4Addr::new(10, 1, 200, 1),
        dst: to,
        protocol: kind,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + payload.len(),
    };
    let written = ethernet.emit(link).and_then(|()| header.emit(network));
    written.map_err(|e| io::Error::other(format!("cannot build a frame: {e:?}")))?;
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// A frame with a datagram for an address and port.
fn datagram((ip, port): (Ipv4Addr, u16)) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(8 + PAYLOAD_BYTES);
    for part in [4000, port, (8 + PAYLOAD_BYTES) as u16, 0] {
        bytes.extend(part.to_be_bytes());
    }
    bytes.resize(8 + PAYLOAD_BYTES, 0x5a);
    frame(ip, protocol::UDP, &bytes)
}

/// A frame with the first segment of a connection to an address and port.
fn syn((ip, port): (Ipv4Addr, u16)) -> io::Result<Vec<u8>> {
    let header = tcp::Header {
        src_port: 4000,
        dst_port: port,
        seq: SeqNum(1),
        ack: SeqNum(0),
        flags: tcp::Flags::SYN,
        window: 65_535,
        urgent: 0,
        options: tcp::Options::default(),
    };
    let mut bytes = vec![0; header.header_bytes()];
    let written = header.emit(&mut bytes);
    written.map_err(|e| io::Error::other(format!("cannot build a frame: {e:?}")))?;
    frame(ip, protocol::TCP, &bytes)
}

/// A flood of packets to a closed port.
#[derive(Clone, Copy)]
pub(super) enum Flood {
    /// Datagrams to a closed port, which ICMP errors answer.
    Udp,
    /// Segments to a closed port, which resets answer.
    Tcp,
}

impl Rig {
    /// A shard with this many sockets.
    ///
    /// # Errors
    /// What the shard refuses.
    pub(super) fn new(sockets: usize, seed: u64) -> io::Result<Rig> {
        let frames = Arc::new(Mutex::new(VecDeque::new()));
        let caps = Caps { tx_csum: true, ..Caps::plain(1500, OURS) };
        let device = Feed { caps, frames: Arc::clone(&frames) };
        let addresses = (0..=(MOST / PORTS))
            .map(|n| IfAddr { addr: IpAddr::V4(end_of(n * PORTS).0), prefix_len: 16 });
        let config = StackConfig {
            addresses: addresses.collect(),
            pool: PoolConfig::with_budget(64 << 20),
            max_sockets: sockets,
            secrets: Some(Secrets::for_simulation(seed)),
            ..StackConfig::default()
        };
        let shard = Shard::new(config, Box::new(device), StackInstant::ZERO);
        let mut shard = shard.map_err(|e| io::Error::other(e.to_string()))?;
        let sockets = (0..sockets).map(|socket| {
            let (ip, port) = end_of(socket);
            shard.udp().bind(SocketAddr::new(ip.into(), port), Default::default())
        });
        let sockets: Result<Vec<SlotId>, _> = sockets.collect();
        let sockets = sockets.map_err(|e| io::Error::other(format!("a socket: {e:?}")))?;
        Ok(Rig { shard, frames, sockets, began: Instant::now(), random: Random(seed) })
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        let chain = self.shard.pool().alloc_chain(bytes.len(), 0, Purpose::Receive);
        let mut chain =
            chain.map_err(|_| io::Error::other("the buffer pool of the benchmark is empty"))?;
        chain.fill([bytes]);
        let offload = Offload { csum_valid: true, ..Offload::default() };
        if let Ok(mut frames) = self.frames.lock() {
            frames.push_back(Packet { chain, offload });
        }
        Ok(())
    }

    /// One step for what lies in the device.
    fn step(&mut self) -> Duration {
        let now = StackInstant::ZERO + self.began.elapsed();
        let start = Instant::now();
        self.shard.step(now, BURST);
        start.elapsed()
    }

    /// ns per packet in bursts of `burst`, each packet for a socket drawn at random.
    pub(super) fn delivered(&mut self, burst: usize, slice: Duration) -> io::Result<f64> {
        let (begin, mut spent, mut packets) = (Instant::now(), Duration::ZERO, 0usize);
        while begin.elapsed() < slice {
            let drawn: Vec<usize> =
                (0..burst).map(|_| self.random.below(self.sockets.len())).collect();
            for socket in &drawn {
                self.put(&datagram(end_of(*socket))?)?;
            }
            spent += self.step();
            for socket in drawn {
                let Some(id) = self.sockets.get(socket).copied() else { continue };
                if let Ok(Poll::Ready(datagram)) = self.shard.udp().receive(id) {
                    self.shard.free(datagram.payload);
                    packets += 1;
                }
            }
        }
        Ok(spent.as_nanos() as f64 / packets.max(1) as f64)
    }

    /// ns per packet to a closed port, and replies per packet.
    pub(super) fn refused(&mut self, flood: Flood, slice: Duration) -> io::Result<(f64, f64)> {
        let closed = (end_of(0).0, CLOSED_PORT);
        let (bytes, reason, reply) = match flood {
            Flood::Udp => (datagram(closed)?, DropReason::UdpNoSocket, Counter::IcmpOut),
            Flood::Tcp => (syn(closed)?, DropReason::TcpNoSocket, Counter::TcpResetsOut),
        };
        let count = |shard: &Shard| {
            let counters = shard.counters();
            (counters.drops(reason), counters.value(reply))
        };
        let (begin, mut spent, before) = (Instant::now(), Duration::ZERO, count(&self.shard));
        while begin.elapsed() < slice {
            (0..BURST).try_for_each(|_| self.put(&bytes))?;
            spent += self.step();
        }
        let after = count(&self.shard);
        let drops = (after.0 - before.0).max(1) as f64;
        Ok((spent.as_nanos() as f64 / drops, (after.1 - before.1) as f64 / drops))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn among_many_sockets_each_packet_of_a_burst_comes_to_its_own() {
        let mut rig = Rig::new(5000, 1).unwrap();
        for round in 0..40 {
            let drawn: Vec<usize> = (0..BURST).map(|_| rig.random.below(5000)).collect();
            for socket in &drawn {
                rig.put(&datagram(end_of(*socket)).unwrap()).unwrap();
            }
            // Some go to a closed port, and the tables change between bursts.
            rig.put(&datagram((end_of(0).0, CLOSED_PORT)).unwrap()).unwrap();
            let before = rig.shard.counters().drops(DropReason::UdpNoSocket);
            rig.step();
            rig.step();
            assert_eq!(rig.shard.counters().drops(DropReason::UdpNoSocket), before + 1);
            for socket in drawn {
                let Ok(Poll::Ready(d)) = rig.shard.udp().receive(rig.sockets[socket]) else {
                    panic!("a packet of round {round} is not at socket {socket}");
                };
                let (ip, port) = end_of(socket);
                assert_eq!(d.dst, SocketAddr::new(ip.into(), port));
                rig.shard.free(d.payload);
            }
        }
    }

    #[test]
    fn floods_to_closed_ports_are_answered_now_and_then() {
        let mut rig = Rig::new(1, 1).unwrap();
        for flood in [Flood::Udp, Flood::Tcp] {
            let (ns, replies) = rig.refused(flood, Duration::from_millis(20)).unwrap();
            assert!(ns > 0.0 && replies <= 1.0);
        }
        let counters = rig.shard.counters();
        let resets = counters.value(Counter::TcpResetsOut);
        let limited = counters.value(Counter::TcpResetsLimited);
        assert_eq!(resets + limited, counters.drops(DropReason::TcpNoSocket));
    }
}
