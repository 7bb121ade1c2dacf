use crate::base::{Counter, Counters};
use crate::mbuf::Pool;
use crate::wire::checksum::{Sum, checksum};
use crate::wire::{ipv4, tcp};
use proptest::prelude::*;

use super::*;
use crate::device::testing::{chain, headers, pool};

/// The fields of a frame that the tests change.
#[derive(Clone, Debug)]
struct Wish {
    v6: bool,
    port: u8,
    seq: u32,
    ack: u32,
    window: u16,
    bytes: usize,
    flags: u8,
    tos: u8,
    ttl: u8,
    stamp: u8,
    spoiled: bool,
    cut: usize,
}

fn wish(port: u8, seq: u32, bytes: usize) -> Wish {
    let v6 = port % 2 == 1;
    let (ack, window, flags, tos, ttl, stamp) = (9, 0x7fff, 0x10, 0, 64, 0);
    Wish { v6, port, seq, ack, window, bytes, flags, tos, ttl, stamp, spoiled: false, cut: 0 }
}

/// Bytes that tell their place in their stream.
fn byte(seq: u32) -> u8 {
    (seq ^ (seq >> 8)) as u8
}

impl Wish {
    /// The frame, with its checksums.
    fn frame(&self) -> Vec<u8> {
        let (mut f, _) = headers(self.v6, false, self.bytes, 1448, self.flags);
        let l4 = if self.v6 { V6_L4 } else { V4_L4 };
        if self.v6 {
            f[15] = self.tos << 4;
            f[21] = self.ttl;
        } else {
            f[15] = self.tos;
            f[22] = self.ttl;
            f[18] = self.seq as u8;
            f[24..26].fill(0);
            let sum = checksum(&f[14..34]);
            f[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        f[l4 + 1] = self.port;
        f[l4 + 4..l4 + 8].copy_from_slice(&self.seq.to_be_bytes());
        f[l4 + 8..l4 + 12].copy_from_slice(&self.ack.to_be_bytes());
        f[l4 + 14..l4 + 16].copy_from_slice(&self.window.to_be_bytes());
        f[l4 + 31] = self.stamp;
        f.extend((0..self.bytes as u32).map(|i| byte(self.seq.wrapping_add(i))));
        f[l4 + 16..l4 + 18].fill(0);
        let mut sum = Sum::new();
        let addresses = if self.v6 { 22..54 } else { 26..34 };
        sum.add_bytes(&f[addresses]);
        sum.add_u16(6);
        sum.add_u16((f.len() - l4) as u16);
        sum.add_bytes(&f[l4..]);
        f[l4 + 16..l4 + 18].copy_from_slice(&sum.finish().to_be_bytes());
        if self.spoiled {
            *f.last_mut().unwrap() ^= 0x10;
        }
        f
    }

    fn packet(&self, pool: &mut Pool) -> Packet {
        // Headers by themselves, in the same buffer, or with the payload in several.
        let header_bytes = self.frame().len() - self.bytes;
        let cuts = match self.cut {
            0 => vec![],
            1 => vec![header_bytes],
            n => vec![header_bytes, header_bytes + n],
        };
        Packet::new(chain(pool, &self.frame(), &cuts))
    }
}

/// Joins the frames. Returns the frames for the stack and the number of joined segments.
fn join(pool: &mut Pool, packets: Vec<Packet>) -> (Vec<Packet>, u64) {
    let (mut burst, mut counters) = (Burst::with_capacity(packets.len()), Counters::default());
    packets.into_iter().for_each(|p| burst.push(p).unwrap());
    Gro::new().coalesce(&mut burst, pool, &mut counters);
    let up = std::iter::from_fn(|| burst.pop_front()).collect();
    (up, counters.value(Counter::GroJoined))
}

fn join_wishes(wishes: &[Wish]) -> (Vec<Vec<u8>>, u64) {
    let mut pool = pool();
    let packets = wishes.iter().map(|w| w.packet(&mut pool)).collect();
    let (up, joined) = join(&mut pool, packets);
    let bytes = up.iter().map(|p| p.chain.to_vec()).collect();
    up.into_iter().for_each(|p| pool.free(p.chain));
    assert_eq!(pool.outstanding(), 0);
    (bytes, joined)
}

/// Segments of one flow that follow each other.
fn train(port: u8, n: usize, bytes: usize) -> Vec<Wish> {
    (0..n).map(|i| wish(port, (i * bytes) as u32, bytes)).collect()
}

#[test]
fn segments_that_follow_each_other_become_one_with_sound_headers() {
    for port in [0, 1] {
        let mut wishes = train(port, 10, 1448);
        for (i, w) in wishes.iter_mut().enumerate() {
            (w.ack, w.window, w.cut) = (9 + i as u32, 100 + i as u16, i % 4);
        }
        wishes[9].flags |= 0x08;
        wishes[9].bytes = 300;
        let (up, joined) = join_wishes(&wishes);
        assert_eq!((up.len(), joined), (1, 9));
        let mut whole = wish(port, 0, 9 * 1448 + 300);
        (whole.ack, whole.window, whole.flags) = (18, 109, 0x18);
        let mut expected = whole.frame();
        // The checksum was verified for each, and is that of the first one.
        let at = if port == 1 { V6_L4 } else { V4_L4 } + 16;
        expected[at..at + 2].copy_from_slice(&up[0][at..at + 2]);
        assert!(up[0] == expected);
    }
}

#[test]
fn coalesced_frames_need_no_checksum_and_invalid_frames_pass_unchanged() {
    let mut pool = pool();
    let mut wishes = train(2, 6, 1000);
    wishes[3].spoiled = true;
    let spoiled = wishes[3].frame();
    let packets = wishes.iter().map(|w| w.packet(&mut pool)).collect();
    let (up, joined) = join(&mut pool, packets);
    assert_eq!((up.len(), joined), (3, 3));
    let valid: Vec<bool> = up.iter().map(|p| p.offload.csum_valid).collect();
    assert_eq!(valid, [true, false, true]);
    assert!(up[1].chain.to_vec() == spoiled);
    let header = tcp::Header::parse(&up[2].chain.to_vec()[V4_L4..]).unwrap().0;
    assert_eq!(header.seq.0, 4000);
    up.into_iter().for_each(|p| pool.free(p.chain));
}

#[test]
fn every_other_difference_keeps_two_segments_apart() {
    type Change = (&'static str, fn(&mut Wish));
    let changes: [Change; 12] = [
        ("service", |w| w.tos = 4),
        ("congestion experienced", |w| w.tos = 3),
        ("time to live", |w| w.ttl = 63),
        ("timestamp", |w| w.stamp = 5),
        ("FIN", |w| w.flags |= 0x01),
        ("SYN", |w| w.flags |= 0x02),
        ("RST", |w| w.flags |= 0x04),
        ("URG", |w| w.flags |= 0x20),
        ("ECE", |w| w.flags |= 0x40),
        ("an older acknowledgement", |w| w.ack -= 1),
        ("a gap", |w| w.seq += 1),
        ("a tiny payload", |w| w.bytes = 256),
    ];
    for port in [0, 1] {
        for (what, change) in changes {
            let mut wishes = train(port, 2, 1448);
            change(&mut wishes[1]);
            let (up, joined) = join_wishes(&wishes);
            let frames: Vec<_> = wishes.iter().map(Wish::frame).collect();
            assert!(joined == 0 && up == frames, "{what}");
        }
    }
}

#[test]
fn push_ends_a_run_and_so_does_a_bare_ack() {
    let mut wishes = train(0, 6, 500);
    wishes[2].flags |= 0x08;
    let (up, joined) = join_wishes(&wishes);
    assert_eq!((up.len(), joined), (2, 4));
    let mut wishes = train(0, 4, 500);
    wishes.insert(2, Wish { bytes: 0, ..wish(0, 1000, 0) });
    let (up, joined) = join_wishes(&wishes);
    assert_eq!((up.len(), joined), (3, 2));
}

#[test]
fn fragments_options_and_lies_about_lengths_are_left_alone_and_end_every_run() {
    let spoil: [fn(&mut Vec<u8>); 4] =
        [|f| f[20] |= 0x20, |f| f[14] = 0x46, |f| f.extend([0; 4]), |f| f[16] = 0xff];
    for spoil in spoil {
        let mut pool = pool();
        let wishes = train(0, 3, 700);
        let mut frames: Vec<_> = wishes.iter().map(Wish::frame).collect();
        spoil(&mut frames[1]);
        frames[1][24..26].fill(0);
        let sum = checksum(&frames[1][14..34]);
        frames[1][24..26].copy_from_slice(&sum.to_be_bytes());
        let packets = frames.iter().map(|f| Packet::new(chain(&mut pool, f, &[]))).collect();
        let (up, joined) = join(&mut pool, packets);
        assert_eq!((up.len(), joined), (3, 0));
        up.into_iter().for_each(|p| pool.free(p.chain));
    }
}

#[test]
fn a_run_is_at_most_an_ip_packet_and_flows_beyond_the_table_take_turns() {
    let (up, joined) = join_wishes(&train(0, 60, 1448));
    assert_eq!((up.len(), joined), (2, 58));
    assert!(up.iter().all(|f| f.len() <= 14 + 65_535));
    let flows = RUNS as u8 + 4;
    let mut wishes = Vec::new();
    for i in 0..6 {
        wishes.extend((0..flows).map(|p| wish(2 * p, i * 600, 600)));
    }
    let (up, joined) = join_wishes(&wishes);
    assert_eq!(up.len() as u64 + joined, wishes.len() as u64);
    let fewer: Vec<Wish> = wishes.into_iter().filter(|w| w.port / 2 < RUNS as u8).collect();
    assert_eq!(join_wishes(&fewer).0.len(), RUNS);
}

#[test]
fn shared_and_super_frames_pass_as_they_are() {
    let mut pool = pool();
    let packets: Vec<Packet> = train(0, 4, 1448).iter().map(|w| w.packet(&mut pool)).collect();
    let held: Vec<_> =
        packets.iter().map(|p| pool.clone_range(&p.chain, 0, p.chain.len()).unwrap()).collect();
    let (up, joined) = join(&mut pool, packets);
    assert_eq!((up.len(), joined), (4, 0));
    let gso = crate::base::Gso {
        kind: crate::base::GsoKind::TcpV4,
        segment_bytes: 100,
        header_bytes: 66,
        ecn: false,
    };
    let mut packets: Vec<Packet> = train(0, 4, 1448).iter().map(|w| w.packet(&mut pool)).collect();
    packets[1].offload.gso = Some(gso);
    let (more, joined) = join(&mut pool, packets);
    assert_eq!((more.len(), joined), (3, 1));
    held.into_iter().for_each(|c| pool.free(c));
    up.into_iter().chain(more).for_each(|p| pool.free(p.chain));
}

/// The bytes of a flow with their numbers, and where segments say what.
fn stream(frames: &[Vec<u8>], port: u8) -> Vec<(u32, u8)> {
    let mut all = Vec::new();
    for f in frames {
        let l4 = if f[12] == 0x86 { V6_L4 } else { V4_L4 };
        if f[l4 + 1] != port {
            continue;
        }
        if l4 == V4_L4 {
            let header = ipv4::Header::parse(&f[14..], f.len() - 14).unwrap();
            assert_eq!(header.payload_bytes(), f.len() - V4_L4);
        }
        let (header, at) = tcp::Header::parse(&f[l4..]).unwrap();
        let bytes = f[l4 + at..].iter();
        all.extend(bytes.zip(header.seq.0..).map(|(b, seq)| (seq, *b)));
    }
    all
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    let one = (0u8..12, 0usize..10, 0usize..1500, 0u8..20, 0u8..20, 0usize..3, 0u32..3);
    proptest::collection::vec(one, 0..64).prop_map(|picks| {
        let mut next = [1000u32; 12];
        picks
            .into_iter()
            .map(|(port, jump, bytes, odd, flags, cut, ack)| {
                let seq = &mut next[usize::from(port)];
                *seq = seq.wrapping_add(if jump == 0 { 7 } else { 0 });
                let mut w = wish(port, *seq, bytes);
                *seq = seq.wrapping_add(bytes as u32);
                (w.cut, w.ack) = (cut, 9 + ack);
                match odd {
                    0 => w.tos = 1,
                    1 => w.ttl = 3,
                    2 => w.stamp = 9,
                    3 => w.spoiled = bytes > 0,
                    _ => {}
                }
                match flags {
                    0 => w.flags |= 0x01,
                    1..4 => w.flags |= 0x08,
                    _ => {}
                }
                w
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn every_flow_says_the_same_as_without(wishes in wishes()) {
        let before: Vec<_> = wishes.iter().map(Wish::frame).collect();
        let (after, joined) = join_wishes(&wishes);
        prop_assert_eq!(after.len() as u64 + joined, before.len() as u64);
        for port in 0..12 {
            prop_assert!(stream(&before, port) == stream(&after, port), "flow {}", port);
        }
        let flags = |frames: &[Vec<u8>], bit: u8| {
            let at = |f: &Vec<u8>| if f[12] == 0x86 { V6_L4 + 13 } else { V4_L4 + 13 };
            frames.iter().filter(|f| f[at(f)] & bit != 0).count()
        };
        for bit in [0x01, 0x08] {
            prop_assert_eq!(flags(&before, bit), flags(&after, bit), "flag {}", bit);
        }
    }
}
