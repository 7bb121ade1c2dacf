//! The NIC as a device: what comes out at the other end of the wire, when, and what it costs.

use std::net::IpAddr;

use fulmar_stack::base::{
    Counter, Counters, Duration, EtherAddr, Gso, GsoKind, Instant, Offload, SeqNum,
};
use fulmar_stack::device::{Burst, Device, Packet, TxTime, offload};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, protocol, tcp, udp};
use proptest::prelude::*;

use super::cut::{Spare, cut, is_sound};
use super::frame::Headers;
use super::*;

const START: Instant = Instant::from_millis(1000);
const A: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0x51]);
const B: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0x52]);

/// Everything around a device, as far as a device is concerned.
pub(super) struct Host {
    pub pool: Pool,
    pub burst: Burst,
    pub counters: Counters,
    pub nic: SimNic,
}

impl Host {
    pub fn new(nic: SimNic) -> Host {
        Host {
            pool: Pool::new(PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) })
                .unwrap(),
            burst: Burst::with_capacity(4096),
            counters: Counters::default(),
            nic,
        }
    }

    /// Sends one frame; true if the device took it.
    pub fn send(&mut self, now: Instant, p: Packet) -> bool {
        self.burst.push(p).unwrap();
        let taken = self.nic.tx_burst(now, &mut self.pool, &mut self.burst, &mut self.counters);
        self.burst.clear(&mut self.pool);
        taken == 1
    }

    pub fn receive(&mut self, now: Instant) -> Vec<Packet> {
        let Host { pool, burst, counters, nic } = self;
        nic.rx_burst(now, pool, burst, 4096, counters);
        std::iter::from_fn(|| self.burst.pop_front()).collect()
    }

    pub fn free(&mut self, packets: Vec<Packet>) {
        packets.into_iter().for_each(|p| self.pool.free(p.chain));
    }

    /// Whether all its mbufs are at home once the device has gone.
    pub fn comes_home(mut self) -> bool {
        drop(self.nic);
        self.pool.drain_remote();
        self.pool.outstanding() == 0
    }
}

fn address(v6: bool, host: u8) -> IpAddr {
    if v6 {
        [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host].into()
    } else {
        [10, 9, 0, host].into()
    }
}

/// A segment or datagram to be made.
#[derive(Clone, Copy)]
pub(super) struct Spec {
    pub v6: bool,
    pub udp: bool,
    pub seq: u32,
    pub ack: SeqNum,
    pub flags: u8,
    pub dst: EtherAddr,
    pub ports: (u16, u16),
}

impl Spec {
    pub fn tcp(seq: u32) -> Spec {
        Spec { v6: false, udp: false, seq, ack: SeqNum(5), flags: 0x10, dst: B, ports: (1000, 80) }
    }

    /// Headers in front of `payload` bytes, the checksum that of the pseudo header.
    fn headers(&self, payload: usize) -> (Vec<u8>, usize, usize) {
        let options = tcp::Options {
            timestamps: Some(tcp::Timestamps { value: 7, echo: 9 }),
            sack_permitted: self.flags & 2 != 0,
            ..tcp::Options::default()
        };
        let t = tcp::Header {
            src_port: self.ports.0,
            dst_port: self.ports.1,
            seq: SeqNum(self.seq),
            ack: self.ack,
            flags: tcp::Flags(self.flags.into()),
            window: 500,
            urgent: 0,
            options,
        };
        let l4_bytes = if self.udp { udp::HEADER_BYTES } else { t.header_bytes() };
        let ends = frame::Addresses {
            ether_src: A,
            ether_dst: self.dst,
            src: address(self.v6, 1),
            dst: address(self.v6, 2),
        };
        let kind = if self.udp { protocol::UDP } else { protocol::TCP };
        let mut buf = frame::HeaderBuf::ip(&ends, kind, l4_bytes + payload).unwrap();
        let mut sum = Sum::new();
        sum.add_pseudo(ends.src, ends.dst, kind, (l4_bytes + payload) as u32);
        if self.udp {
            let length = (l4_bytes + payload) as u16;
            let (src_port, dst_port) = self.ports;
            let h = udp::Header { src_port, dst_port, length, checksum: sum.fold() };
            h.emit(buf.l4_mut()).unwrap();
        } else {
            t.emit(buf.l4_mut()).unwrap();
            buf.l4_mut()[16..18].copy_from_slice(&sum.fold().to_be_bytes());
        }
        (buf.with_l4(l4_bytes).to_vec(), buf.l4(), l4_bytes)
    }

    /// A frame with its checksum still partial, a super-frame if the payload is longer than `mss`;
    /// the payload in several mbufs.
    pub fn packet(&self, pool: &mut Pool, payload: &[u8], mss: usize) -> Packet {
        let (headers, l4, l4_bytes) = self.headers(payload.len());
        let mut m = pool.alloc(headers.len(), 0, Purpose::Control).unwrap();
        m.append(headers.len()).unwrap().copy_from_slice(&headers);
        let mut chain = Chain::from(m);
        for part in payload.chunks(payload.len().div_ceil(3).max(1)) {
            let mut c = pool.alloc_chain(part.len(), 0, Purpose::Send).unwrap();
            c.copy_from(0, part).unwrap();
            chain.append(c);
        }
        let kind = match (self.udp, self.v6) {
            (true, _) => GsoKind::Udp,
            (_, true) => GsoKind::TcpV6,
            (_, false) => GsoKind::TcpV4,
        };
        let gso = Gso {
            kind,
            segment_bytes: mss as u16,
            header_bytes: (l4 + l4_bytes) as u16,
            ecn: false,
        };
        let offload = Offload {
            needs_csum: true,
            csum_start: l4 as u16,
            csum_offset: if self.udp { 6 } else { 16 },
            csum_valid: false,
            gso: (payload.len() > mss).then_some(gso),
        };
        Packet { chain, offload }
    }

    /// A whole packet, checksum and all.
    pub fn bytes(&self, pool: &mut Pool, payload: &[u8]) -> Vec<u8> {
        let mut p = self.packet(pool, payload, usize::from(u16::MAX));
        offload::finish_checksum(&mut p, pool).unwrap();
        let bytes = p.chain.to_vec();
        pool.free(p.chain);
        bytes
    }
}

fn stream(from: u64, bytes: usize) -> Vec<u8> {
    let mut v = vec![0; bytes];
    pattern::fill(from, &mut v);
    v
}

fn hosts(change: impl Fn(SimConfig) -> SimConfig) -> (Host, Host) {
    let config = |ether| change(SimConfig { ether, ..SimConfig::default() });
    let [(a, _), (b, _)] = pair(config(A), config(B)).unwrap();
    (Host::new(a), Host::new(b))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The software of `device` is the oracle of the hardware.
    #[test]
    fn the_hardware_cuts_as_the_software_does(
        v6 in any::<bool>(),
        udp in any::<bool>(),
        flags in any::<u8>(),
        payload in 1usize..20_000,
        mss in 100usize..3000,
    ) {
        let mut pool = Pool::new(PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) }).unwrap();
        // SYN and RST are never in super-frames.
        let spec = Spec { v6, udp, flags: flags & !6, ..Spec::tcp(u32::MAX - 3000) };
        let p = spec.packet(&mut pool, &stream(3, payload), mss);
        let mut hardware = Vec::new();
        let is_cut = cut(&p, &mut Spare::default(), |f| {
            assert!(f.is_sound);
            hardware.push(f.front().to_vec());
        });
        prop_assert!(is_cut);
        let mut software = Burst::with_capacity(256);
        offload::segment(p, &mut pool, &mut software, &mut Counters::default()).unwrap();
        prop_assert_eq!(hardware.len(), software.len());
        for (h, s) in hardware.iter().zip(&software) {
            prop_assert!(*h == s.chain.to_vec());
            prop_assert!(is_sound(h) && offload::verify(s));
        }
    }

    /// What is cut and put together again is the frame that was sent, to the byte, wherever the
    /// buffers end.
    #[test]
    fn segmented_frames_are_aggregated_again(
        v6 in any::<bool>(),
        is_pushed in any::<bool>(),
        payload in 1usize..60_000,
        mss in 200usize..1448,
        rx_buffer_bytes in 1514usize..65_536,
    ) {
        let (mut a, mut b) = hosts(|c| SimConfig { rx_buffer_bytes, ..c });
        let flags = if is_pushed { 0x18 } else { 0x10 };
        let spec = Spec { v6, flags, ..Spec::tcp(9) };
        let p = spec.packet(&mut a.pool, &stream(0, payload), mss);
        let sent = p.chain.to_vec();
        prop_assert!(a.send(START, p));
        let mut got = b.receive(START);
        prop_assert_eq!(got.len(), 1);
        let mut p = got.remove(0);
        prop_assert_eq!(p.offload.gso.map(|g| usize::from(g.segment_bytes)), (payload > mss).then_some(mss));
        prop_assert!(p.is_checksum_trusted());
        if payload <= mss {
            // Nothing was cut, so the checksum is whole.
            prop_assert!(offload::verify(&p) && p.offload.csum_valid);
        } else {
            prop_assert!(p.chain.to_vec() == sent);
        }
        p.chain.trim_front(sent.len() - payload, &mut b.pool);
        prop_assert!(p.chain.to_vec() == stream(0, payload));
        b.pool.free(p.chain);
        prop_assert!(a.comes_home() && b.comes_home());
    }

    /// Aggregation never changes a stream: the model is the list of payloads that went in.
    #[test]
    fn aggregation_keeps_every_byte_and_its_place(
        segments in proptest::collection::vec((1usize..800, 0u8..8), 1..60),
    ) {
        let (mut a, mut b) = hosts(|c| SimConfig { tso: None, ..c });
        let (mut seq, mut model) = (0u32, Vec::new());
        for (bytes, odd) in segments {
            // Now and then a gap, PSH, or another flow.
            seq += if odd == 0 { 10 } else { 0 };
            let flags = if odd == 1 { 0x18 } else { 0x10 };
            let ports = if odd == 2 { (1001, 80) } else { (1000, 80) };
            let spec = Spec { flags, ports, ..Spec::tcp(seq) };
            let p = spec.packet(&mut a.pool, &stream(u64::from(seq), bytes), 2000);
            a.send(START, p);
            model.push((ports.0, seq, bytes));
            seq += bytes as u32;
        }
        let mut found = Vec::new();
        for p in b.receive(START) {
            let bytes = p.chain.to_vec();
            let seen = Headers::parse(&bytes, bytes.len()).unwrap();
            let frame::Transport::Tcp(h) = seen.transport else { panic!("not TCP") };
            prop_assert_eq!(seen.payload_at + seen.payload_bytes, bytes.len());
            prop_assert_eq!(pattern::wrong_bytes(u64::from(h.seq.0), &bytes[seen.payload_at..]), 0);
            let each = p.offload.gso.map_or(seen.payload_bytes, |g| usize::from(g.segment_bytes));
            let mut at = 0;
            while at < seen.payload_bytes {
                let n = each.min(seen.payload_bytes - at);
                found.push((h.src_port, h.seq.0 + at as u32, n));
                at += n;
            }
            b.pool.free(p.chain);
        }
        prop_assert_eq!(found, model);
        prop_assert!(a.comes_home() && b.comes_home());
    }
}

#[test]
fn a_burst_rings_one_doorbell_and_completions_are_reaped_lazily() {
    let config = SimConfig {
        tx_coalesce: Coalesce { packets: 8, delay: Duration::from_millis(1) },
        ..SimConfig::default()
    };
    let (nic, handle) = with_peer(config).unwrap();
    let mut a = Host::new(nic);
    for i in 0..7 {
        let p = Spec::tcp(i).packet(&mut a.pool, &[0; 100], 1448);
        a.burst.push(p).unwrap();
    }
    assert_eq!(a.nic.tx_burst(START, &mut a.pool, &mut a.burst, &mut a.counters), 7);
    assert_eq!(a.nic.tx_reap(START, &mut a.pool), 0, "not worth it yet");
    let c = handle.counts();
    assert_eq!((c.doorbells, c.tx_frames, c.completions), (1, 7, 0));
    assert!(a.nic.next_deadline().unwrap() <= START + Duration::from_millis(1));
    assert_eq!(a.nic.tx_reap(START + Duration::from_millis(1), &mut a.pool), 7);
    for i in 0..8 {
        let p = Spec::tcp(i).packet(&mut a.pool, &[0; 100], 1448);
        a.burst.push(p).unwrap();
    }
    a.nic.tx_burst(START, &mut a.pool, &mut a.burst, &mut a.counters);
    assert_eq!(a.nic.tx_reap(START, &mut a.pool), 8);
    let c = handle.counts();
    // One descriptor for the headers and three for the payload.
    assert_eq!((c.doorbells, c.completions, c.reaps, c.descriptors), (2, 15, 2, 60));
    assert_eq!(a.counters.value(Counter::TxFrames), 15);
    assert!(a.comes_home());
}

#[test]
fn a_full_ring_refuses_and_takes_more_when_frames_have_left() {
    let config =
        SimConfig { tx_descriptors: 128, line_rate_bps: 1_000_000_000, ..SimConfig::default() };
    let mut a = Host::new(with_peer(config).unwrap().0);
    let mut taken = 0;
    let frame = |a: &mut Host| Spec::tcp(0).packet(&mut a.pool, &[0; 1000], 1448);
    for _ in 0..40 {
        let p = frame(&mut a);
        a.burst.push(p).unwrap();
    }
    taken += a.nic.tx_burst(START, &mut a.pool, &mut a.burst, &mut a.counters);
    // Four descriptors each.
    assert_eq!((taken, a.burst.len(), a.nic.stats().tx_refusals), (32, 8, 1));
    let free_at = a.nic.next_deadline().unwrap();
    // 1066 + 24 bytes at a gigabit.
    assert_eq!(free_at, START + Duration::from_nanos(8720));
    assert_eq!(a.nic.tx_burst(free_at, &mut a.pool, &mut a.burst, &mut a.counters), 1);
    let later = START + Duration::from_millis(1);
    assert_eq!(a.nic.tx_burst(later, &mut a.pool, &mut a.burst, &mut a.counters), 7);
    assert!(a.comes_home());
}

#[test]
fn frames_arrive_when_the_line_has_carried_them() {
    let (mut a, mut b) = hosts(|c| SimConfig {
        line_rate_bps: 10_000_000_000,
        delay: Duration::from_micros(5),
        lro: None,
        ..c
    });
    let p = Spec::tcp(0).packet(&mut a.pool, &[0; 2896], 1448);
    a.send(START, p);
    // 1514 + 24 bytes at 0.8 ns each, and the way.
    let first = START + Duration::from_nanos(1230 + 5000);
    assert!(b.receive(START + Duration::from_nanos(6229)).is_empty());
    assert_eq!(b.nic.next_deadline(), Some(first));
    let got = b.receive(first);
    assert_eq!(got.len(), 1);
    b.free(got);
    let got = b.receive(first + Duration::from_nanos(1230));
    assert_eq!(got.len(), 1);
    b.free(got);
    assert!(a.comes_home() && b.comes_home());
}

/// Lets frames of a megabit line arrive at a host that sleeps until it is asked for attention.
/// Returns how often it was.
fn interrupts(coalesce: Coalesce, frames: usize) -> (u64, usize) {
    let slow =
        |ether| SimConfig { ether, line_rate_bps: 8_000_000, lro: None, ..SimConfig::default() };
    let b = SimConfig { rx_coalesce: coalesce, ..slow(B) };
    let [(a, _), (b, handle)] = pair(slow(A), b).unwrap();
    let (mut a, mut b) = (Host::new(a), Host::new(b));
    for i in 0..frames {
        // 66 + 910 + 24 bytes: a millisecond each.
        let p = Spec::tcp(1000 * i as u32).packet(&mut a.pool, &[0; 910], 1448);
        assert!(a.send(START, p));
    }
    let (mut now, mut got) = (START, 0);
    while got < frames {
        let arrived = b.receive(now);
        got += arrived.len();
        b.free(arrived);
        if b.nic.arm()
            && let Some(at) = b.nic.next_deadline()
        {
            now = now.max(at);
        }
        b.nic.disarm();
    }
    (handle.counts().interrupts, got)
}

#[test]
fn interrupts_come_after_so_many_frames_or_so_much_time() {
    let ms = Duration::from_millis;
    assert_eq!(interrupts(Coalesce { packets: 1, delay: ms(0) }, 24), (24, 24));
    assert_eq!(interrupts(Coalesce { packets: 4, delay: ms(1000) }, 24), (6, 24));
    // The first frame and the frames of the next two and a half milliseconds.
    assert_eq!(
        interrupts(Coalesce { packets: 100, delay: Duration::from_micros(2500) }, 24),
        (8, 24)
    );
}

#[test]
fn without_buffers_the_wire_pauses_or_frames_are_lost_as_configured() {
    for flow_control in [true, false] {
        let (mut a, mut b) = hosts(|c| SimConfig {
            flow_control,
            rx_buffers: 4,
            rx_small_buffers: 4,
            lro: None,
            ..c
        });
        // Posts its buffers.
        assert!(b.receive(START).is_empty());
        for i in 0..20 {
            let p = Spec::tcp(i).packet(&mut a.pool, &[i as u8; 1000], 1448);
            assert!(a.send(START, p));
        }
        let mut got = 0;
        for _ in 0..20 {
            let packets = b.receive(START);
            assert!(packets.len() <= 8);
            got += packets.len();
            b.free(packets);
        }
        let missed = b.nic.stats().rx_missed;
        assert_eq!((got, missed), if flow_control { (20, 0) } else { (8, 12) });
        assert!(a.comes_home() && b.comes_home());
    }
}

#[test]
fn a_host_without_memory_drops_large_frames_and_still_receives_small_ones() {
    let (mut a, b) = hosts(|c| SimConfig { lro: None, ..c });
    let mut b = Host { pool: Pool::new(PoolConfig::with_budget(1 << 20)).unwrap(), ..b };
    let mut kept = Vec::new();
    for i in 0..2000 {
        let p = Spec::tcp(i).packet(&mut a.pool, &[0; 1400], 1448);
        a.send(START, p);
        kept.extend(b.receive(START));
    }
    assert!(b.counters.drops(fulmar_stack::base::DropReason::NoBuffer) > 0);
    let held = kept.len();
    assert!(held > 100, "{held}");
    let p = Spec::tcp(0).packet(&mut a.pool, &[], 1448);
    a.send(START, p);
    let small = b.receive(START);
    assert_eq!(small.len(), 1);
    b.free(small);
    b.free(kept);
    let p = Spec::tcp(0).packet(&mut a.pool, &[0; 1400], 1448);
    a.send(START, p);
    let again = b.receive(START);
    assert_eq!(again.len(), 1, "the ring has run dry");
    b.free(again);
    assert!(a.comes_home() && b.comes_home());
}

#[test]
fn a_checksum_that_is_wrong_is_left_for_the_host_to_find() {
    let (mut a, mut b) = hosts(|c| c);
    let mut bytes = Spec::tcp(0).bytes(&mut a.pool, &[0; 500]);
    for is_right in [true, false] {
        let mut chain = a.pool.alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
        chain.copy_from(0, &bytes).unwrap();
        a.send(START, Packet::new(chain));
        let got = b.receive(START);
        assert_eq!((got.len(), got[0].offload.csum_valid), (1, is_right));
        b.free(got);
        bytes[300] ^= 4;
    }
}

#[test]
fn a_nic_whose_other_end_is_gone_says_so() {
    let (mut a, b) = hosts(|c| c);
    assert_eq!(a.nic.lost(), None);
    drop(b);
    assert_eq!(a.nic.lost(), Some(nix::libc::EPIPE));
    let p = Spec::tcp(0).packet(&mut a.pool, &[0; 1400], 1448);
    assert!(a.send(START, p));
    assert!(a.comes_home());
}

#[test]
fn the_hardware_s_time_is_counted_for_the_thread_that_it_ran_on() {
    let (nic, handle) = with_peer(SimConfig::default()).unwrap();
    let mut a = Host::new(nic);
    let before = thread_hardware_ns();
    let p = Spec::tcp(0).packet(&mut a.pool, &[0; 1400], 1448);
    a.send(START, p);
    let ns = handle.hardware_ns();
    assert!(ns > 0 && handle.counts().sections == 1);
    assert_eq!(thread_hardware_ns() - before, ns);
    let elsewhere = std::thread::spawn(thread_hardware_ns);
    assert_eq!(elsewhere.join().unwrap(), 0);
}

/// Datagrams from an address that no station has, so that nothing comes back.
fn small_frame(a: &mut Host) -> Packet {
    Spec { udp: true, ..Spec::tcp(0) }.packet(&mut a.pool, &[0; 18], 1448)
}

#[test]
fn every_small_frame_is_counted_once_though_only_samples_are_measured() {
    const FRAMES: u64 = 1000;
    let (nic, handle) = with_peer(SimConfig::default()).unwrap();
    let mut a = Host::new(nic);
    for i in 0..FRAMES {
        let now = START + Duration::from_micros(i);
        let p = small_frame(&mut a);
        assert!(a.send(now, p));
        a.nic.tx_reap(now, &mut a.pool);
    }
    let counted = handle.counts().sections;
    // Those since the last measured one are still to come.
    assert!(counted <= FRAMES && counted + 16 > FRAMES, "{counted} sections");
}

#[test]
fn a_nic_with_a_clock_of_its_own_needs_no_exact_time_from_its_host() {
    use std::cell::Cell;
    thread_local!(static CLOCK: Cell<Instant> = const { Cell::new(START) });
    // A frame is on the line for half a millisecond.
    let tx_coalesce = Coalesce { packets: 1, delay: Duration::ZERO };
    let clock: Option<fn() -> Instant> = Some(|| CLOCK.get());
    let config = SimConfig { line_rate_bps: 1_000_000, tx_coalesce, clock, ..SimConfig::default() };
    let mut a = Host::new(with_peer(config).unwrap().0);
    assert_eq!(a.nic.caps().tx_time, TxTime::Coarse);
    for (seconds, done) in [(1, 0), (2, 1), (3, 1)] {
        CLOCK.set(START + Duration::from_secs(seconds));
        let p = small_frame(&mut a);
        assert!(a.send(START, p));
        assert_eq!(a.nic.tx_reap(START, &mut a.pool), done, "after {seconds} s of its clock");
    }
}

/// The same in one mbuf.
fn linear_frame(a: &mut Host) -> Packet {
    let Packet { chain, offload } = small_frame(a);
    let mut m = a.pool.alloc(chain.len(), 0, Purpose::Send).unwrap();
    chain.copy_to(0, m.append(chain.len()).unwrap());
    a.pool.free(chain);
    Packet { chain: m.into(), offload }
}

#[test]
fn a_linear_frame_arrives_as_it_was_sent_and_is_counted_once() {
    let (mut a, mut b) = hosts(|c| c);
    let p = linear_frame(&mut a);
    let sent = p.chain.to_vec();
    assert!(a.send(START, p));
    let got = b.receive(START + Duration::from_millis(1));
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].chain.len(), sent.len());
    b.free(got);
    let stats = a.nic.stats();
    assert_eq!((stats.tx_frames, stats.tx_bytes, stats.tx_crossings), (1, sent.len() as u64, 1));
    assert_eq!(a.counters.value(Counter::TxFrames), 1);
    assert_eq!(a.counters.value(Counter::TxBytes), sent.len() as u64);
    assert_eq!(a.nic.tx_reap(START + Duration::from_secs(1), &mut a.pool), 1);
    assert!(a.comes_home() && b.comes_home());
}

#[test]
fn a_linear_frame_that_finds_no_descriptor_stays_in_the_burst() {
    let config =
        SimConfig { tx_descriptors: 128, line_rate_bps: 1_000_000, ..SimConfig::default() };
    let mut a = Host::new(with_peer(config).unwrap().0);
    let mut taken = 0;
    while a.burst.is_empty() {
        let p = linear_frame(&mut a);
        a.burst.push(p).unwrap();
        taken += a.nic.tx_burst(START, &mut a.pool, &mut a.burst, &mut a.counters);
    }
    assert_eq!(taken, 128);
    assert_eq!(a.nic.tx_burst(START, &mut a.pool, &mut a.burst, &mut a.counters), 0);
    let later = START + Duration::from_secs(1);
    a.nic.tx_reap(later, &mut a.pool);
    assert_eq!(a.nic.tx_burst(later, &mut a.pool, &mut a.burst, &mut a.counters), 1);
    let p = linear_frame(&mut a);
    assert!(a.send(later, p));
    assert!(a.comes_home());
}

#[test]
fn hardware_that_fetches_frames_in_batches_waits_for_a_full_batch_or_a_poll() {
    let config = SimConfig { tx_fetch_frames: 4, ..SimConfig::default() };
    let (nic, handle) = with_peer(config).unwrap();
    let mut a = Host::new(nic);
    let sent = || handle.counts().tx_packets;
    for i in 1..=9 {
        let p = linear_frame(&mut a);
        assert!(a.send(START, p));
        assert_eq!(sent(), i / 4 * 4);
    }
    assert_eq!(handle.counts().sections, 2);
    assert!(a.nic.next_deadline().is_some_and(|at| at <= START), "somebody is to look");
    a.receive(START);
    assert_eq!(sent(), 9);
    // Who waits for an answer looks before it sleeps, and is not kept waiting from then on.
    let p = linear_frame(&mut a);
    assert!(a.send(START, p));
    assert!(!a.nic.arm());
    a.receive(START);
    assert_eq!(sent(), 10);
    let p = linear_frame(&mut a);
    assert!(a.send(START, p));
    assert_eq!(sent(), 11);
    a.nic.disarm();
    let p = linear_frame(&mut a);
    assert!(a.send(START, p));
    assert_eq!(sent(), 11, "it is awake");
    assert!(a.comes_home());
}

#[test]
fn odd_configurations_are_brought_inside_their_bounds() {
    let odd = SimConfig {
        mtu: 1 << 20,
        tso: Some(0),
        lro: Some(1 << 20),
        tx_descriptors: 0,
        tx_fetch_frames: 0,
        rx_buffers: 0,
        rx_small_buffers: 0,
        rx_buffer_bytes: 0,
        ..SimConfig::default()
    };
    let (nic, _) = with_peer(odd).unwrap();
    let caps = *nic.caps();
    assert!(caps.mtu + eth::HEADER_BYTES <= 65_536 && caps.tso == Some(caps.mtu));
    let mut a = Host::new(nic);
    assert!(a.receive(START).is_empty());
    assert!(a.comes_home());
}
