//! The driver over a socket pair that keeps the bounds of packets, as a TUN descriptor does.

use std::os::unix::net::UnixDatagram;

use fulmar_stack::base::{Counter, Counters, DropReason, Gso, GsoKind, Instant, Offload};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose};
use fulmar_stack::wire::eth;
use proptest::prelude::*;

use super::*;
use crate::drivers::tap::{MAX_IP_BYTES, MAX_SEGS};
use crate::drivers::vnet;
use fulmar_stack::device::plain_ip::HEADER_BYTES;
use fulmar_stack::device::{Burst, Interest, Packet};
use std::fs::File;

/// The driver, and the other end of its descriptor.
struct Rig {
    tun: Tun,
    kernel: UnixDatagram,
    pool: Pool,
    burst: Burst,
    counters: Counters,
}

impl Rig {
    fn new() -> Rig {
        let (ours, kernel) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        kernel.set_nonblocking(true).unwrap();
        let caps = Caps {
            tx_csum: true,
            tso: Some(MAX_IP_BYTES),
            rx_gro: true,
            max_segs: MAX_SEGS,
            ..Caps::plain_ip(1500)
        };
        let file = File::from(OwnedFd::from(ours));
        let attached = Attached { file, name: "test".to_owned(), control: None };
        Rig {
            tun: Tun(Tap::over(attached, caps)),
            kernel,
            pool: Pool::new(PoolConfig::with_budget(8 << 20)).unwrap(),
            burst: Burst::with_capacity(64),
            counters: Counters::default(),
        }
    }

    /// The device reads one packet: the frame, or `None` if it was dropped.
    fn receive(&mut self, header: [u8; vnet::HEADER_BYTES], packet: &[u8]) -> Option<Packet> {
        self.kernel.send(&[&header, packet].concat()).unwrap();
        self.poll();
        self.burst.pop_front()
    }

    fn poll(&mut self) -> usize {
        let Rig { tun, pool, burst, counters, .. } = self;
        tun.rx_burst(Instant::ZERO, pool, burst, 16, counters)
    }

    fn send(&mut self, p: Packet) -> Option<Vec<u8>> {
        self.burst.push(p).unwrap();
        let Rig { tun, pool, burst, counters, .. } = self;
        assert_eq!(tun.tx_burst(Instant::ZERO, pool, burst, counters), 1);
        let mut bytes = vec![0; 70_000];
        let n = self.kernel.recv(&mut bytes).ok()?;
        Some(bytes[..n].to_vec())
    }

    fn frame(&mut self, ethertype: u16, parts: &[&[u8]]) -> Packet {
        let mut front = vec![0; HEADER_BYTES];
        let (dst, src) = (Medium::PEER, Medium::OWN);
        eth::Header { dst, src, ethertype }.emit(&mut front).unwrap();
        front.extend(parts[0]);
        let mut chain = Chain::new();
        for bytes in [&front[..]].iter().chain(&parts[1..]) {
            let mut m = self.pool.alloc(bytes.len(), 0, Purpose::Send).unwrap();
            m.append(bytes.len()).unwrap().copy_from_slice(bytes);
            chain.push_back(m);
        }
        Packet::new(chain)
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason)
    }
}

/// An IPv4 packet of this length, as far as the driver looks.
fn packet_v4(bytes: usize) -> Vec<u8> {
    let mut packet: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
    packet[0] = 0x45;
    // TCP with a header of 20 bytes.
    if let Some(offset) = packet.get_mut(32) {
        *offset = 0x50;
    }
    packet
}

#[test]
fn packets_of_any_length_become_frames_with_the_constant_header() {
    let mut rig = Rig::new();
    let lengths = [20, 241, 242, 243, 256, 1500, 16_370, 16_371, 65_535];
    for bytes in lengths {
        let packet = packet_v4(bytes);
        let frame = rig.receive([0; 12], &packet).unwrap();
        let all = frame.chain.to_vec();
        let link = eth::Header::parse(&all).unwrap();
        let (dst, src) = (Medium::OWN, Medium::PEER);
        assert_eq!(link, eth::Header { dst, src, ethertype: eth::IPV4 });
        assert!(all[HEADER_BYTES..] == packet, "{bytes} bytes differ");
        rig.pool.free(frame.chain);
    }
    assert_eq!(rig.counters.total_drops(), 0);
    assert_eq!(rig.counters.value(Counter::RxBytes), lengths.iter().sum::<usize>() as u64);
}

#[test]
fn bad_packets_are_dropped_with_a_reason_and_the_next_one_is_received() {
    let mut rig = Rig::new();
    let bad: [(&[u8], DropReason); 6] = [
        (&[], DropReason::Truncated),
        (&[0x45; 19], DropReason::Truncated),
        (&[0x60; 39], DropReason::Truncated),
        (&[0x00; 60], DropReason::IpHeader),
        (&[0x55; 60], DropReason::IpHeader),
        (&[0xff; 60_000], DropReason::IpHeader),
    ];
    for (packet, reason) in bad {
        let before = rig.drops(reason);
        assert!(rig.receive([0; 12], packet).is_none());
        assert_eq!(rig.drops(reason), before + 1, "{reason:?}");
    }
    let frame = rig.receive([0; 12], &packet_v4(40)).unwrap();
    rig.pool.free(frame.chain);
    assert_eq!(rig.counters.total_drops(), 6);
}

#[test]
fn a_read_shorter_than_the_virtio_net_header_is_dropped() {
    let mut rig = Rig::new();
    rig.kernel.send(&[0; 5]).unwrap();
    assert_eq!((rig.poll(), rig.drops(DropReason::Truncated)), (0, 1));
}

#[test]
fn offsets_count_from_the_ip_header_on_the_wire_and_from_the_frame_in_memory() {
    let mut rig = Rig::new();
    let gso = Gso { kind: GsoKind::TcpV4, segment_bytes: 1448, header_bytes: 54, ecn: false };
    let offload = Offload {
        needs_csum: true,
        csum_start: 34,
        csum_offset: 16,
        csum_valid: false,
        gso: Some(gso),
    };
    let packet = packet_v4(5000);
    let (head, tail) = packet.split_at(60);
    let mut sent = rig.frame(eth::IPV4, &[head, tail]);
    sent.offload = offload;
    let written = rig.send(sent).unwrap();
    let (header, bytes) = written.split_first_chunk().unwrap();
    assert!(bytes == packet);
    let on_wire = vnet::parse(header, bytes.len(), bytes).unwrap();
    assert_eq!((on_wire.csum_start, on_wire.gso.unwrap().header_bytes), (20, 40));
    let frame = rig.receive(*header, bytes).unwrap();
    assert_eq!(frame.offload, offload);
    rig.pool.free(frame.chain);
    assert_eq!(rig.counters.value(Counter::TxBytes), 5000);
    assert_eq!(rig.counters.value(Counter::RxBytes), 5000);
}

#[test]
fn a_header_that_points_outside_the_packet_is_a_bad_offload() {
    let mut rig = Rig::new();
    let offload =
        Offload { needs_csum: true, csum_start: 20, csum_offset: 16, ..Offload::default() };
    let header = vnet::request(&offload);
    assert!(rig.receive(header, &packet_v4(37)).is_none());
    assert_eq!(rig.drops(DropReason::BadOffload), 1);
    let frame = rig.receive(header, &packet_v4(38)).unwrap();
    rig.pool.free(frame.chain);
}

#[test]
fn frames_other_than_ip_packets_are_not_sent() {
    let mut rig = Rig::new();
    let arp = rig.frame(eth::ARP, &[&[0; 28]]);
    assert_eq!(rig.send(arp), None);
    assert_eq!(rig.drops(DropReason::NotIp), 1);
    let v6 = rig.frame(eth::IPV6, &[&[0x60; 40]]);
    assert_eq!(rig.send(v6).unwrap().len(), vnet::HEADER_BYTES + 40);
}

#[test]
fn frames_stay_unchanged_in_the_burst_while_the_queue_is_full() {
    let mut rig = Rig::new();
    let p = rig.frame(eth::IPV4, &[&packet_v4(1000)]);
    let frame = p.chain.to_vec();
    rig.pool.free(p.chain);
    let mut sent = 0;
    loop {
        let p = rig.frame(eth::IPV4, &[&packet_v4(1000)]);
        rig.burst.push(p).unwrap();
        let Rig { tun, pool, burst, counters, .. } = &mut rig;
        if tun.tx_burst(Instant::ZERO, pool, burst, counters) == 0 {
            break;
        }
        sent += 1;
        assert!(sent < 100_000, "the queue has no bound");
    }
    assert_eq!(rig.tun.wake_fd().unwrap().interest, Interest::ReadableOrWritable);
    let kept = rig.burst.pop_front().unwrap();
    assert!(kept.chain.to_vec() == frame);
    rig.pool.free(kept.chain);
    assert_eq!(rig.counters.total_drops(), 0);
}

#[test]
fn a_descriptor_that_ends_is_lost_and_frames_are_dropped() {
    let mut rig = Rig::new();
    rig.tun.0.file = File::open("/").unwrap();
    assert_eq!((rig.poll(), rig.tun.lost()), (0, Some(libc::EISDIR)));
    let p = rig.frame(eth::IPV4, &[&packet_v4(40)]);
    assert_eq!(rig.send(p), None);
    assert_eq!(rig.drops(DropReason::DeviceGone), 1);
}

proptest! {
    #[test]
    fn any_read_is_a_whole_frame_or_a_counted_drop(
        header: [u8; 12], packet in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut rig = Rig::new();
        match rig.receive(header, &packet) {
            Some(p) => {
                prop_assert_eq!(&p.chain.to_vec()[HEADER_BYTES..], &packet[..]);
                prop_assert!(!p.offload.needs_csum || usize::from(p.offload.csum_start) >= HEADER_BYTES);
                rig.pool.free(p.chain);
                prop_assert_eq!(rig.counters.total_drops(), 0);
            }
            None => prop_assert_eq!(rig.counters.total_drops(), 1),
        }
    }
}
