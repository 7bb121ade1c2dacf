//! Loans between two shards on simulated NICs, on a virtual clock: a reader who keeps what it got
//! closes its own window, and no other.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar_nic::{SimConfig, pair, pattern};
use fulmar_stack::base::{Counter, DropReason, Duration, EtherAddr, Instant, Secrets, SlotId};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{Chain, Purpose};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::socket::Least;
use fulmar_stack::tcp::LoanCharge;
use fulmar_testbed::stations;

const START: Instant = Instant::from_millis(1000);
const TOTAL: usize = 4 << 20;
const HONEST: u16 = 9;
const HOARDER: u16 = 10;

/// One connection: its two ends, and how far it is.
struct Flow {
    client: SlotId,
    server: SlotId,
    written: usize,
    read: usize,
}

struct World {
    now: Instant,
    a: Shard,
    b: Shard,
}

fn shard(device: Box<dyn fulmar_stack::device::Device>, host: u8) -> Shard {
    let config = StackConfig {
        addresses: vec![IfAddr { addr: [10, 0, 0, host].into(), prefix_len: 24 }],
        secrets: Some(Secrets::for_simulation(u64::from(host))),
        ..StackConfig::default()
    };
    Shard::new(config, device, START).unwrap()
}

fn to(port: u16) -> SocketAddr {
    ([10, 0, 0, 2], port).into()
}

impl World {
    fn new(config: &SimConfig) -> World {
        let with = |last| SimConfig {
            ether: EtherAddr([2, 0, 0, 0, 0, last]),
            line_rate_bps: 10_000_000_000,
            ..config.clone()
        };
        let [(p, _), (q, _)] = pair(with(1), with(2)).unwrap();
        World { now: START, a: shard(Box::new(p), 1), b: shard(Box::new(q), 2) }
    }

    fn tick(&mut self) {
        self.a.step(self.now, 1000);
        self.b.step(self.now, 1000);
        let due = [&self.a, &self.b].into_iter().filter_map(|s| s.next_deadline()).min();
        let soonest = self.now + Duration::from_micros(1);
        let latest = self.now + Duration::from_millis(1);
        self.now = due.unwrap_or(latest).max(soonest).min(latest);
        assert!(self.now < START + Duration::from_secs(60), "stuck");
    }

    fn open(&mut self, port: u16) -> Flow {
        let listener = self.b.tcp_listen(to(port), ListenOptions::default()).unwrap();
        let client = self.a.tcp_connect(self.now, to(port), None).unwrap();
        loop {
            self.tick();
            if let Poll::Ready((server, _)) = self.b.tcp_accept(listener).unwrap() {
                return Flow { client, server, written: 0, read: 0 };
            }
        }
    }

    fn write(&mut self, f: &mut Flow) {
        while f.written < TOTAL {
            let n = (64 << 10).min(TOTAL - f.written);
            let mut bytes = vec![0; n];
            pattern::fill(f.written as u64, &mut bytes);
            match stations::write(&mut self.a, self.now, f.client, &bytes) {
                Some(n) => f.written += n,
                None => return,
            }
        }
    }

    fn read(&mut self, f: &mut Flow) {
        while let Ok(Poll::Ready(chain)) = self.b.tcp_take(f.server, usize::MAX) {
            check(f, &chain);
            self.b.tcp_read_done(self.now, f.server, chain);
        }
    }

    fn lend(&mut self, f: &mut Flow, kept: &mut Vec<(Chain, LoanCharge)>) {
        while let Ok(Poll::Ready((chain, lent))) =
            self.b.tcp_lend(self.now, f.server, usize::MAX, Least::OneByte)
        {
            check(f, &chain);
            kept.push((chain, lent));
        }
    }

    fn drops(&self) -> u64 {
        [DropReason::NoBuffer, DropReason::TcpReassemblyFull]
            .into_iter()
            .map(|r| self.b.counters().drops(r))
            .sum()
    }
}

fn check(f: &mut Flow, chain: &Chain) {
    for part in chain.slices() {
        assert_eq!(pattern::wrong_bytes(f.read as u64, part), 0, "after {}", f.read);
        f.read += part.len();
    }
}

/// Every way in which bytes land: super-frames in large buffers, packets in small ones.
fn kinds() -> [(&'static str, SimConfig); 2] {
    let whole = SimConfig::default();
    let packets = SimConfig::default().without_offloads();
    [("super-frames", whole), ("packets", packets)]
}

/// How long a reader needs for a stream, while another one hoards or is not there.
fn honest_time(config: &SimConfig, with_hoarder: bool) -> Duration {
    let mut w = World::new(config);
    let mut honest = w.open(HONEST);
    let mut hoarder = with_hoarder.then(|| w.open(HOARDER));
    let mut kept = Vec::new();
    let start = w.now;
    while honest.read < TOTAL {
        w.write(&mut honest);
        if let Some(f) = &mut hoarder {
            w.write(f);
        }
        w.tick();
        w.read(&mut honest);
        if let Some(f) = &mut hoarder {
            w.lend(f, &mut kept);
        }
    }
    let took = w.now.since(start);
    if let Some(f) = hoarder {
        hoarder_is_stopped_and_goes_on(&mut w, f, kept);
    }
    took
}

fn hoarder_is_stopped_and_goes_on(w: &mut World, mut f: Flow, mut kept: Vec<(Chain, LoanCharge)>) {
    for _ in 0..300 {
        w.tick();
        w.lend(&mut f, &mut kept);
    }
    let info = w.b.tcp_entry(f.server).unwrap().tcb.info();
    let buffer = info.recv_buffer_bytes;
    let lent: usize = kept.iter().map(|(chain, _)| chain.len()).sum();
    assert_eq!((info.loaned_bytes, f.read), (lent, lent));
    // Each window field may round up by a step of its scale.
    assert!(lent >= buffer / 2 && lent <= buffer / 4 * 5, "{lent} bytes of {buffer}");
    assert!(info.rcv_wnd_bytes <= 2 * 1448, "{} bytes are offered", info.rcv_wnd_bytes);
    assert_eq!(w.drops(), 0, "something was dropped for want of buffers");
    for (chain, lent) in kept.drain(..) {
        w.b.take_back(w.now, f.server, chain, lent);
    }
    while f.read < TOTAL {
        w.write(&mut f);
        w.tick();
        w.read(&mut f);
    }
    assert_eq!(w.b.tcp_entry(f.server).unwrap().tcb.lent(), LoanCharge::default());
    assert_eq!(w.drops(), 0, "something was dropped for want of buffers");
}

#[test]
fn a_hoarder_closes_its_own_window_and_another_connection_keeps_its_speed() {
    for (name, config) in kinds() {
        let (alone, beside) = (honest_time(&config, false), honest_time(&config, true));
        // What the hoarder's buffer holds shares the line.
        assert!(beside < alone * 3 / 2, "{name}: {beside:?} instead of {alone:?}");
    }
}

#[test]
fn what_a_closed_connection_has_lent_stays_charged_until_it_comes_home() {
    let mut w = World::new(&SimConfig::default());
    let mut f = w.open(HOARDER);
    let mut kept = Vec::new();
    for _ in 0..3000 {
        w.write(&mut f);
        w.tick();
        w.lend(&mut f, &mut kept);
    }
    let storage: usize = kept.iter().map(|(_, lent)| lent.storage_bytes).sum();
    let charged = w.b.stat().window.granted_bytes;
    assert!(storage > 1 << 19 && charged >= storage, "{charged} of {storage}");
    w.b.close(w.now, f.server);
    for _ in 0..100 {
        w.tick();
    }
    assert_eq!(w.b.stat().window.granted_bytes, storage);
    for (chain, lent) in kept {
        w.b.take_back(w.now, f.server, chain, lent);
    }
    assert_eq!(w.b.stat().window.granted_bytes, 0);
    w.b.pool().drain_remote();
    let stats = w.b.pool().stats();
    assert_eq!(stats.used_bytes[Purpose::Control as usize], 0);
}

#[test]
fn window_updates_ride_on_the_acks_that_go_anyway() {
    let mut w = World::new(&SimConfig::default());
    let mut f = w.open(HONEST);
    while f.read < TOTAL {
        w.write(&mut f);
        w.tick();
        w.read(&mut f);
    }
    let c = w.b.counters();
    let (out, packets) = (c.value(Counter::TcpSegmentsOut), c.value(Counter::RxPackets));
    // One for two packets (RFC 9293 section 3.8.6.3), but for a young connection.
    assert!(out <= packets / 2 + 20, "{out} ACKs for {packets} packets");
}

#[test]
fn a_reader_who_is_late_opens_the_window_with_one_packet() {
    let mut w = World::new(&SimConfig::default());
    let mut f = w.open(HONEST);
    let mut updates = 0;
    while f.read < TOTAL {
        // Until the window is full.
        for _ in 0..3000 {
            w.write(&mut f);
            w.tick();
        }
        let sent = |w: &World| w.b.counters().value(Counter::TcpSegmentsOut);
        let before = sent(&w);
        w.read(&mut f);
        updates = updates.max(sent(&w) - before);
    }
    assert_eq!(updates, 1, "window updates for a read of everything");
}
