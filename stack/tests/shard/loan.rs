//! Loans between two shards on simulated NICs, on a virtual clock: a reader who keeps what it got
//! closes its own window, and no other.

use std::task::Poll;

use fulmar_nic::{SimConfig, pair, pattern};
use fulmar_stack::base::{Counter, DropReason, Duration, SlotId};
use fulmar_stack::mbuf::{Chain, Purpose};
use fulmar_stack::socket::Least;
use fulmar_stack::tcp::LoanCharge;
use fulmar_testbed::stations::{self, ether};
use fulmar_testbed::world::{START, World};

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

/// Two stations on NICs with a line of 10 Gb/s.
fn line(config: &SimConfig) -> World {
    let with =
        |last| SimConfig { ether: ether(last), line_rate_bps: 10_000_000_000, ..config.clone() };
    let [(near, _), (far, _)] = pair(with(1), with(2)).unwrap();
    World::new([Box::new(near), Box::new(far)], |n| stations::config(n, 256 << 20))
}

fn tick(w: &mut World) {
    // A NIC that has not been polled since the last frame was sent does not know when the frame arrives.
    w.step(Duration::ZERO);
    w.advance(Duration::from_millis(1));
    assert!(w.now < START + Duration::from_secs(60), "stuck");
}

fn open(w: &mut World, port: u16) -> Flow {
    let listener = w.listen(port);
    let [client, server] = w.connect(listener);
    Flow { client, server, written: 0, read: 0 }
}

fn write(w: &mut World, f: &mut Flow) {
    while f.written < TOTAL {
        let n = (64 << 10).min(TOTAL - f.written);
        let mut bytes = vec![0; n];
        pattern::fill(f.written as u64, &mut bytes);
        match stations::write(&mut w.shards[0], w.now, f.client, &bytes) {
            Some(n) => f.written += n,
            None => return,
        }
    }
}

fn read(w: &mut World, f: &mut Flow) {
    while let Ok(Poll::Ready(chain)) = w.shards[1].tcp_take(f.server, usize::MAX) {
        check(f, &chain);
        w.shards[1].tcp_read_done(w.now, f.server, chain);
    }
}

fn lend(w: &mut World, f: &mut Flow, kept: &mut Vec<(Chain, LoanCharge)>) {
    while let Ok(Poll::Ready((chain, lent))) =
        w.shards[1].tcp_lend(w.now, f.server, usize::MAX, Least::OneByte)
    {
        check(f, &chain);
        kept.push((chain, lent));
    }
}

fn drops(w: &World) -> u64 {
    [DropReason::NoBuffer, DropReason::TcpReassemblyFull]
        .into_iter()
        .map(|r| w.shards[1].counters().drops(r))
        .sum()
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
    let mut w = line(config);
    let mut honest = open(&mut w, HONEST);
    let mut hoarder = with_hoarder.then(|| open(&mut w, HOARDER));
    let mut kept = Vec::new();
    let start = w.now;
    while honest.read < TOTAL {
        write(&mut w, &mut honest);
        if let Some(f) = &mut hoarder {
            write(&mut w, f);
        }
        tick(&mut w);
        read(&mut w, &mut honest);
        if let Some(f) = &mut hoarder {
            lend(&mut w, f, &mut kept);
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
        tick(w);
        lend(w, &mut f, &mut kept);
    }
    let info = w.shards[1].tcp_entry(f.server).unwrap().tcb.info();
    let buffer = info.recv_buffer_bytes;
    let lent: usize = kept.iter().map(|(chain, _)| chain.len()).sum();
    assert_eq!((info.loaned_bytes, f.read), (lent, lent));
    // Each window field may round up by a step of its scale.
    assert!(lent >= buffer / 2 && lent <= buffer / 4 * 5, "{lent} bytes of {buffer}");
    assert!(info.rcv_wnd_bytes <= 2 * 1448, "{} bytes are offered", info.rcv_wnd_bytes);
    assert_eq!(drops(w), 0, "something was dropped for want of buffers");
    for (chain, lent) in kept.drain(..) {
        w.shards[1].take_back(w.now, f.server, chain, lent);
    }
    while f.read < TOTAL {
        write(w, &mut f);
        tick(w);
        read(w, &mut f);
    }
    assert_eq!(w.shards[1].tcp_entry(f.server).unwrap().tcb.lent(), LoanCharge::default());
    assert_eq!(drops(w), 0, "something was dropped for want of buffers");
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
    let mut w = line(&SimConfig::default());
    let mut f = open(&mut w, HOARDER);
    let mut kept = Vec::new();
    for _ in 0..3000 {
        write(&mut w, &mut f);
        tick(&mut w);
        lend(&mut w, &mut f, &mut kept);
    }
    let storage: usize = kept.iter().map(|(_, lent)| lent.storage_bytes).sum();
    let charged = w.shards[1].stat().window.granted_bytes;
    assert!(storage > 1 << 19 && charged >= storage, "{charged} of {storage}");
    w.shards[1].close(w.now, f.server);
    for _ in 0..100 {
        tick(&mut w);
    }
    assert_eq!(w.shards[1].stat().window.granted_bytes, storage);
    for (chain, lent) in kept {
        w.shards[1].take_back(w.now, f.server, chain, lent);
    }
    assert_eq!(w.shards[1].stat().window.granted_bytes, 0);
    w.shards[1].pool().drain_remote();
    let stats = w.shards[1].pool().stats();
    assert_eq!(stats.used_bytes[Purpose::Control as usize], 0);
}

#[test]
fn window_updates_ride_on_the_acks_that_go_anyway() {
    let mut w = line(&SimConfig::default());
    let mut f = open(&mut w, HONEST);
    while f.read < TOTAL {
        write(&mut w, &mut f);
        tick(&mut w);
        read(&mut w, &mut f);
    }
    let c = w.shards[1].counters();
    let (out, packets) = (c.value(Counter::TcpSegmentsOut), c.value(Counter::RxPackets));
    // One for two packets (RFC 9293 section 3.8.6.3), but for a young connection.
    assert!(out <= packets / 2 + 20, "{out} ACKs for {packets} packets");
}

#[test]
fn a_reader_who_is_late_opens_the_window_with_one_packet() {
    let mut w = line(&SimConfig::default());
    let mut f = open(&mut w, HONEST);
    let mut updates = 0;
    while f.read < TOTAL {
        // Until the window is full.
        for _ in 0..3000 {
            write(&mut w, &mut f);
            tick(&mut w);
        }
        let sent = |w: &World| w.shards[1].counters().value(Counter::TcpSegmentsOut);
        let before = sent(&w);
        read(&mut w, &mut f);
        updates = updates.max(sent(&w) - before);
    }
    assert_eq!(updates, 1, "window updates for a read of everything");
}
