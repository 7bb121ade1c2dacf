//! `bench scale`: what a packet costs among few sockets and among a million.
//!
//! Datagrams of 18 bytes lie in a device that only hands them over; what is timed is one step of a
//! shard for a burst of them, up to the socket's queue. Making the frames and reading the sockets is
//! not. Every way runs once per round, so that what is compared is measured moments apart. The flows of
//! a burst are drawn at random, so that among many sockets each packet meets memory that is cold.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fulmar_base::{
    Counter, Counters, DropReason, EtherAddr, Instant as StackInstant, Offload, SlotId,
};
use fulmar_ip::IfAddr;
use fulmar_mbuf::{Pool, PoolConfig, Purpose};
use fulmar_netdev::{Burst, Caps, Device, LinkState, Packet};
use fulmar_socket::Step;
use fulmar_stack::{Shard, StackConfig};
use fulmar_wire::{eth, ipv4, protocol};
use serde_json::{Value, json};

use crate::bench::{Figure, Outcome, Ratio, Stop};
use crate::report::{self, Machine};
use crate::routes::internet::Random;
use crate::stats::Estimate;

/// Packets of a burst.
const BURST: usize = 64;
/// Payload of a datagram: with its headers the shortest Ethernet frame.
const PAYLOAD_BYTES: usize = 18;
/// A run of one way.
const SLICE: Duration = Duration::from_millis(20);
/// Sockets per address, each with a port of its own.
const PORTS: usize = 60_000;
/// Numbers of sockets that are measured, as far as asked for.
const COUNTS: [usize; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];
/// A port that nobody has.
const CLOSED_PORT: u16 = 65_000;

const OURS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
const THEIRS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time for the rounds; opening the sockets comes on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// The most sockets.
    pub sockets: usize,
    /// What flows are drawn from.
    pub seed: u64,
}

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
        let count = budget.min(out.room()).min(frames.len());
        frames.drain(..count).filter_map(|p| out.push(p).err()).for_each(drop);
        count
    }
    fn arm(&mut self) -> bool {
        true
    }
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }
    fn next_deadline(&self) -> Option<StackInstant> {
        None
    }
    fn link_state(&self) -> LinkState {
        LinkState::Up
    }
}

/// A shard with so many sockets.
struct Rig {
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

/// A frame with a datagram for an address and port.
fn frame(to: (Ipv4Addr, u16)) -> io::Result<Vec<u8>> {
    let from = Ipv4Addr::new(10, 1, 200, 1);
    let length = (8 + PAYLOAD_BYTES) as u16;
    let mut bytes = vec![0; eth::HEADER_BYTES + ipv4::HEADER_BYTES];
    let (link, network) = bytes.split_at_mut(eth::HEADER_BYTES);
    let ethernet = eth::Header { dst: OURS, src: THEIRS, ethertype: eth::IPV4 };
    let header = ipv4::Header {
        src: from,
        dst: to.0,
        protocol: protocol::UDP,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + usize::from(length),
    };
    let written = ethernet.emit(link).and_then(|()| header.emit(network));
    written.map_err(|e| io::Error::other(format!("a frame for the bench: {e:?}")))?;
    for part in [4000u16, to.1, length, 0] {
        bytes.extend(part.to_be_bytes());
    }
    bytes.resize(bytes.len() + PAYLOAD_BYTES, 0x5a);
    Ok(bytes)
}

impl Rig {
    fn new(sockets: usize, seed: u64) -> io::Result<Rig> {
        let frames = Arc::new(Mutex::new(VecDeque::new()));
        let caps = Caps { tx_csum: true, ..Caps::plain(1500, OURS) };
        let device = Feed { caps, frames: Arc::clone(&frames) };
        let addresses = (0..=(COUNTS[COUNTS.len() - 1] / PORTS))
            .map(|n| IfAddr { addr: IpAddr::V4(end_of(n * PORTS).0), prefix_len: 16 });
        let config = StackConfig {
            addresses: addresses.collect(),
            pool: PoolConfig::with_budget(64 << 20),
            max_sockets: sockets,
            seed,
            ..StackConfig::default()
        };
        let shard = Shard::new(config, Box::new(device), StackInstant::ZERO);
        let mut shard = shard.map_err(|e| io::Error::other(e.to_string()))?;
        let sockets = (0..sockets).map(|socket| {
            let (ip, port) = end_of(socket);
            shard.udp_bind(SocketAddr::new(ip.into(), port), Default::default())
        });
        let sockets: Result<Vec<SlotId>, _> = sockets.collect();
        let sockets = sockets.map_err(|e| io::Error::other(format!("a socket: {e:?}")))?;
        Ok(Rig { shard, frames, sockets, began: Instant::now(), random: Random(seed) })
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        let chain = self.shard.pool().alloc_chain(bytes.len(), 0, Purpose::Receive);
        let mut chain = chain.map_err(|_| io::Error::other("the pool of the bench is empty"))?;
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
    fn delivered(&mut self, burst: usize) -> io::Result<f64> {
        let (begin, mut spent, mut packets) = (Instant::now(), Duration::ZERO, 0usize);
        while begin.elapsed() < SLICE {
            let drawn: Vec<usize> =
                (0..burst).map(|_| self.random.below(self.sockets.len())).collect();
            for socket in &drawn {
                self.put(&frame(end_of(*socket))?)?;
            }
            spent += self.step();
            for socket in drawn {
                let Some(id) = self.sockets.get(socket).copied() else { continue };
                if let Ok(Step::Done(datagram)) = self.shard.udp_receive(id) {
                    self.shard.free(datagram.payload);
                    packets += 1;
                }
            }
        }
        Ok(spent.as_nanos() as f64 / packets.max(1) as f64)
    }

    /// ns per packet to a port that nobody has, and replies per packet.
    fn refused(&mut self) -> io::Result<(f64, f64)> {
        let bytes = frame((end_of(0).0, CLOSED_PORT))?;
        let count = |shard: &Shard| {
            let counters = shard.counters();
            (counters.drops(DropReason::UdpNoSocket), counters.value(Counter::IcmpOut))
        };
        let (begin, mut spent, before) = (Instant::now(), Duration::ZERO, count(&self.shard));
        while begin.elapsed() < SLICE {
            (0..BURST).try_for_each(|_| self.put(&bytes))?;
            spent += self.step();
        }
        let after = count(&self.shard);
        let drops = (after.0 - before.0).max(1) as f64;
        Ok((spent.as_nanos() as f64 / drops, (after.1 - before.1) as f64 / drops))
    }
}

/// One way, and what it cost in each round.
pub struct Way {
    /// Stable dotted name: `demux.1000000.burst64`.
    pub name: String,
    values: Vec<f64>,
}

/// What was found.
pub struct Found {
    /// ns per packet.
    pub ways: Vec<Way>,
    /// The figures asked for, as every bench reports them.
    pub outcome: Outcome,
    /// Bytes by which the process grew for the most sockets, per socket.
    pub bytes_per_socket: f64,
}

#[derive(Default)]
struct Costs(Vec<Way>);

impl Costs {
    fn add(&mut self, name: String, value: f64) {
        match self.0.iter_mut().find(|w| w.name == name) {
            Some(way) => way.values.push(value),
            None => self.0.push(Way { name, values: vec![value] }),
        }
    }

    fn values(&self, name: &str) -> &[f64] {
        self.0.iter().find(|w| w.name == name).map_or(&[], |w| &w.values)
    }

    fn ratio(&self, above: &str, below: &str) -> Option<Estimate> {
        let pairs = self.values(above).iter().zip(self.values(below));
        Estimate::of(&pairs.map(|(a, b)| a / b).collect::<Vec<_>>())
    }
}

/// Measures.
///
/// # Errors
/// What the system refuses.
pub fn run(options: &Options) -> io::Result<Found> {
    let start = Instant::now();
    let counts = COUNTS.into_iter().filter(|n| *n <= options.sockets);
    let (mut rigs, mut bytes_per_socket) = (Vec::new(), 0.0);
    for count in counts {
        let before = resident_bytes()?;
        rigs.push((count, Rig::new(count, options.seed)?));
        bytes_per_socket = resident_bytes()?.saturating_sub(before) as f64 / count as f64;
    }
    let (mut costs, began, mut rounds) = (Costs::default(), Instant::now(), 0);
    while rounds < options.runs && (rounds < 3 || began.elapsed() < options.budget) {
        for (count, rig) in &mut rigs {
            for burst in [BURST, 1] {
                costs.add(format!("demux.{count}.burst{burst}"), rig.delivered(burst)?);
            }
        }
        if let Some((_, rig)) = rigs.last_mut() {
            let (ns, replies) = rig.refused()?;
            costs.add("closed_port.ns_per_drop".into(), ns);
            costs.add("closed_port.replies_per_drop".into(), replies);
        }
        rounds += 1;
    }
    let stop = if rounds == options.runs { Stop::Runs } else { Stop::Budget };
    let outcome =
        Outcome { rows: Vec::new(), figures: figures(&costs), stop, elapsed: start.elapsed() };
    Ok(Found { ways: costs.0, outcome, bytes_per_socket })
}

/// Bytes of memory that the process has.
fn resident_bytes() -> io::Result<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    Ok(pages.unwrap_or(0) * 4096)
}

fn figures(costs: &Costs) -> Vec<Figure> {
    let among_many = costs.ratio("demux.1000000.burst64", "demux.1.burst64");
    let together = costs.ratio("demux.1000000.burst64", "demux.1000000.burst1");
    let all = [
        (
            "demux.1m_vs_1",
            "ns per packet in bursts of 64, 1,000,000 sockets and random flows over one socket",
            among_many,
            Some((8.0, 4.0)),
        ),
        (
            "demux.1m.burst64_vs_1",
            "ns per packet among 1,000,000 sockets, bursts of 64 over packets one by one",
            together,
            None,
        ),
    ];
    let figure = |(name, sentence, estimate, reach_and_aim): (&str, &str, _, _)| Figure {
        ratio: Ratio {
            name: name.into(),
            sentence: sentence.into(),
            way: String::new(),
            over: None,
            measure: |_| f64::NAN,
            reach_and_aim,
            more_is_better: false,
            published: None,
        },
        estimate,
    };
    all.into_iter().filter(|f| f.2.is_some()).map(figure).collect()
}

impl Found {
    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        let ways = self.ways.iter().map(|way| {
            let e = Estimate::of(&way.values);
            json!({
                "name": way.name,
                "median": e.map(|e| e.median),
                "low": e.map(|e| e.low),
                "high": e.map(|e| e.high),
                "runs": e.map(|e| e.runs),
            })
        });
        json["ways"] = ways.collect::<Vec<_>>().into();
        json["resident_bytes_per_socket"] = self.bytes_per_socket.into();
        json
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let Machine { cpu, cpus, kernel, fulmar } = machine;
        let head = format!("fulmar {fulmar} on {cpus} CPUs, {cpu}, Linux {kernel}");
        let memory = format!("{:.0} bytes of memory per idle socket", self.bytes_per_socket);
        let figures = report::figures_table(&self.outcome.figures);
        [head, self.table(), memory, figures, LEGEND.into()].join("\n\n")
    }

    fn table(&self) -> String {
        let mut table = report::new_table(["way", "ns per\npacket", "95 %", "runs"], 1);
        for way in &self.ways {
            let Some(e) = Estimate::of(&way.values) else { continue };
            let digits = if way.name.ends_with("replies_per_drop") { 4 } else { 1 };
            table.add_row([
                way.name.clone(),
                format!("{:.digits$}", e.median),
                format!("{:.digits$}–{:.digits$}", e.low, e.high),
                e.runs.to_string(),
            ]);
        }
        table.to_string()
    }
}

const LEGEND: &str = "\
demux       datagram sockets of one shard, packets that come together; ns of the stack per packet,
            from the device's burst to the socket's queue, by the clock.
closed_port a flood of datagrams to a port that nobody has: ns per drop, and ICMP errors per drop,
            which are limited to 1,000 a second.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_bench_delivers_every_packet_and_measures_every_way() {
        let options = Options { budget: Duration::ZERO, runs: 1, sockets: 10_000, seed: 3 };
        let found = run(&options).unwrap();
        let costs = found.ways.iter().filter(|w| !w.name.ends_with("replies_per_drop"));
        assert!(costs.clone().all(|w| w.values.iter().all(|ns| *ns > 0.0)));
        assert_eq!(costs.count(), 2 * 5 + 1);
        let machine = Machine::here();
        assert!(found.text(&machine).contains("demux.10000.burst64"));
        assert!(found.json(&machine, &[])["ways"][0]["median"].is_number());
    }

    #[test]
    fn among_many_sockets_each_packet_of_a_burst_comes_to_its_own() {
        let mut rig = Rig::new(5000, 1).unwrap();
        for round in 0..40 {
            let drawn: Vec<usize> = (0..BURST).map(|_| rig.random.below(5000)).collect();
            for socket in &drawn {
                rig.put(&frame(end_of(*socket)).unwrap()).unwrap();
            }
            // Some go to nobody, and the tables change between bursts.
            rig.put(&frame((end_of(0).0, CLOSED_PORT)).unwrap()).unwrap();
            let before = rig.shard.counters().drops(DropReason::UdpNoSocket);
            rig.step();
            rig.step();
            assert_eq!(rig.shard.counters().drops(DropReason::UdpNoSocket), before + 1);
            for socket in drawn {
                let Ok(Step::Done(d)) = rig.shard.udp_receive(rig.sockets[socket]) else {
                    panic!("a packet of round {round} is not at socket {socket}");
                };
                let (ip, port) = end_of(socket);
                assert_eq!(d.dst, SocketAddr::new(ip.into(), port));
                rig.shard.free(d.payload);
            }
        }
    }
}
