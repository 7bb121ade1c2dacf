//! The output is the same as an ordinary device's, and a posted range has bytes of its flow only.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use fulmar_stack::base::SeqNum;
use fulmar_stack::mbuf::{PoolConfig, PostedBuf, RecvBuf, WritableRange};
use proptest::prelude::*;

use super::*;

pub(crate) const FLOWS: usize = 4;

fn pool() -> Pool {
    Pool::new(PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) }).unwrap()
}

fn ends(flow: usize) -> (SocketAddr, SocketAddr) {
    let address = |host: u8| -> IpAddr {
        if flow % 2 == 1 {
            [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host].into()
        } else {
            [10, 9, 0, host].into()
        }
    };
    ((address(2), 80).into(), (address(1), 1000 + flow as u16).into())
}

pub(crate) fn key(flow: usize) -> FlowKey {
    let (local, remote) = ends(flow);
    FlowKey::new(local, remote)
}

/// Byte `seq` of the stream of a flow: never 0, and of another flow nearly always another.
pub(crate) fn byte(flow: usize, seq: SeqNum) -> u8 {
    (seq.0.wrapping_mul(5).wrapping_add(seq.0 >> 8).wrapping_add(flow as u32 * 77) % 255) as u8 + 1
}

/// The properties of a segment besides its payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub flags: u8,
    /// Words of TCP options, 0 to 10.
    option_words: usize,
    /// Bytes behind the IP packet.
    pub padding: usize,
    more_fragments: bool,
    is_tagged: bool,
    protocol: u8,
}

pub(crate) const PLAIN: Form = Form {
    flags: 0x10,
    option_words: 3,
    padding: 0,
    more_fragments: false,
    is_tagged: false,
    protocol: 6,
};

fn ip_header(flow: usize, form: &Form, l4_bytes: usize) -> Vec<u8> {
    let (local, remote) = ends(flow);
    let mut h = Vec::new();
    match (remote.ip(), local.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            h.extend([0x45, 0]);
            h.extend(((20 + l4_bytes) as u16).to_be_bytes());
            h.extend([0, 1, if form.more_fragments { 0x20 } else { 0x40 }, 0, 64, form.protocol]);
            h.extend([0, 0]);
            h.extend(src.octets());
            h.extend(dst.octets());
            let sum = fulmar_stack::wire::checksum::checksum(&h);
            h[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let extra = if form.more_fragments { 8 } else { 0 };
            h.extend([0x60, 0, 0, 0]);
            h.extend(((l4_bytes + extra) as u16).to_be_bytes());
            h.extend([if form.more_fragments { 44 } else { form.protocol }, 64]);
            h.extend(src.octets());
            h.extend(dst.octets());
            if form.more_fragments {
                h.extend([form.protocol, 0, 0, 1, 0, 0, 0, 9]);
            }
        }
        _ => unreachable!("both ends are of one version"),
    }
    h
}

pub(crate) fn frame(flow: usize, seq: SeqNum, payload_bytes: usize, form: Form) -> Vec<u8> {
    let (local, remote) = ends(flow);
    let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if form.is_tagged {
        f.extend([0x81, 0x00, 0x00, 0x05]);
    }
    f.extend(if local.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] });
    let header_bytes = 20 + form.option_words * 4;
    f.extend(ip_header(flow, &form, header_bytes + payload_bytes));
    f.extend(remote.port().to_be_bytes());
    f.extend(local.port().to_be_bytes());
    f.extend(seq.0.to_be_bytes());
    f.extend([0, 0, 0, 9, (header_bytes as u8 / 4) << 4, form.flags, 1, 0, 0, 0, 0, 0]);
    f.extend(std::iter::repeat_n(1, form.option_words * 4));
    f.extend((0..payload_bytes as u32).map(|i| byte(flow, seq + i)));
    f.extend(std::iter::repeat_n(0xee, form.padding));
    f
}

/// A device with a placer, and the frames that the other end sends.
struct Rig {
    pool: Pool,
    placer: Placer,
    pair: BufferPair,
    holds: Vec<VecDeque<PostedBuf>>,
}

impl Rig {
    fn new(is_predicting: bool) -> Rig {
        let holds = (0..FLOWS).map(|_| VecDeque::new()).collect();
        Rig { pool: pool(), placer: Placer::new(is_predicting), pair: BufferPair::default(), holds }
    }

    fn place(&mut self, flow: usize, next_seq: SeqNum, ranges: WritableRanges) {
        self.placer.place(key(flow), next_seq, ranges).unwrap();
    }

    /// Posts new buffers of these sizes in place of the old ones.
    fn post(&mut self, flow: usize, next: SeqNum, sizes: [usize; 2]) {
        drop(self.placer.revoke(&key(flow)));
        self.holds[flow].clear();
        let mut ranges = WritableRanges::default();
        for bytes in sizes.into_iter().filter(|b| *b > 0) {
            let mut hold = RecvBuf::with_capacity(bytes).post();
            ranges.push(hold.writable_range(0).unwrap()).unwrap();
            self.holds[flow].push_back(hold);
        }
        self.place(flow, next, ranges);
    }

    /// Lets a frame land as a scattering read does, and takes it.
    fn receive(&mut self, frame: &[u8]) -> Result<Chain, DropReason> {
        self.pair.prepare(&mut self.pool);
        let prediction = self.placer.prediction();
        let parts = self.placer.parts(prediction, &mut self.pair).unwrap();
        let mut rest = frame;
        for part in parts {
            let n = rest.len().min(part.len());
            part[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
        }
        assert!(rest.is_empty(), "the parts hold every frame");
        let mut front = [0; FRONT_BYTES];
        let n = self.placer.front(prediction, frame.len(), &mut self.pair, &mut front);
        assert_eq!(front[..n], frame[..n]);
        let (pair, pool) = (&mut self.pair, &mut self.pool);
        let packet =
            self.placer.packet(prediction, &[0; vnet::HEADER_BYTES], frame.len(), pair, pool);
        packet.map(|p| p.chain)
    }

    /// Takes all ranges back, looks for bytes in them, and puts them there again.
    fn audit(&mut self, next: &[SeqNum; FLOWS]) {
        for (flow, next) in next.iter().enumerate() {
            let mut ranges = self.placer.revoke(&key(flow));
            for space in ranges.iter_mut() {
                assert!(
                    space.bytes().iter().all(|b| *b == 0),
                    "a space of flow {flow} is not clean"
                );
            }
            if !ranges.is_empty() {
                self.place(flow, *next, ranges);
            }
        }
    }
}

fn placed_bytes(chain: &Chain) -> usize {
    chain.iter().filter(|m| m.placed().is_some()).map(fulmar_stack::mbuf::Mbuf::len).sum()
}

/// The forms that frames come in: most of them plain.
pub(crate) fn form() -> impl Strategy<Value = Form> {
    let odd = prop_oneof![
        (0usize..=10).prop_map(|option_words| Form { option_words, ..PLAIN }),
        (1usize..40).prop_map(|padding| Form { padding, ..PLAIN }),
        any::<u8>().prop_map(|flags| Form { flags, ..PLAIN }),
        Just(Form { more_fragments: true, ..PLAIN }),
        Just(Form { is_tagged: true, ..PLAIN }),
        Just(Form { protocol: 17, ..PLAIN }),
    ];
    prop_oneof![4 => Just(PLAIN), 1 => Just(Form { flags: 0x18, ..PLAIN }), 2 => odd]
}

#[derive(Clone, Debug)]
enum Op {
    Post { flow: usize, sizes: [usize; 2] },
    Take { flow: usize },
    Segment { flow: usize, payload: usize, form: Form, ahead: i32, cut: usize },
    Noise(Vec<u8>),
    Audit,
}

fn op() -> impl Strategy<Value = Op> {
    let size = || prop_oneof![1usize..300, 1000usize..5000, Just(70_000usize)];
    let payload = prop_oneof![3 => 0usize..300, 2 => 1000usize..3000, 1 => 20_000usize..65_000];
    let ahead = prop_oneof![6 => Just(0), 1 => -200i32..200];
    let cut = prop_oneof![8 => Just(0usize), 1 => 0usize..200];
    prop_oneof![
        3 => (0..FLOWS, size(), prop_oneof![Just(0usize), size()])
            .prop_map(|(flow, a, b)| Op::Post { flow, sizes: [a, b] }),
        1 => (0..FLOWS).prop_map(|flow| Op::Take { flow }),
        20 => (0..FLOWS, payload, form(), ahead, cut).prop_map(|(flow, payload, form, ahead, cut)| {
            Op::Segment { flow, payload, form, ahead, cut }
        }),
        1 => proptest::collection::vec(any::<u8>(), 14..400).prop_map(Op::Noise),
        2 => Just(Op::Audit),
    ]
}

proptest! {
    /// The model: a device that never places anything hands up the frame as it came.
    #[test]
    fn every_byte_arrives_and_posted_ranges_have_bytes_of_their_flow_only(
        is_predicting in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        let mut rig = Rig::new(is_predicting);
        // The sequence number that the device should expect next, and the sender's next one.
        let mut next: [SeqNum; FLOWS] = std::array::from_fn(|f| SeqNum(u32::MAX - 5000 * f as u32));
        for op in ops {
            match op {
                Op::Post { flow, sizes } => rig.post(flow, next[flow], sizes),
                Op::Take { flow } => drop(rig.placer.revoke(&key(flow))),
                Op::Audit => rig.audit(&next),
                Op::Noise(bytes) => {
                    let chain = rig.receive(&bytes).unwrap();
                    prop_assert_eq!(chain.to_vec(), bytes);
                    rig.pool.free(chain);
                }
                Op::Segment { flow, payload, form, ahead, cut } => {
                    let seq = SeqNum(next[flow].0.wrapping_add_signed(ahead));
                    let mut f = frame(flow, seq, payload, form);
                    f.truncate((f.len() - cut.min(f.len())).max(14));
                    let chain = rig.receive(&f).unwrap();
                    prop_assert!(chain.to_vec() == f);
                    if placed_bytes(&chain) > 0 {
                        // A cut that takes the padding and no more leaves a whole segment.
                        prop_assert!(cut == form.padding && seq == next[flow]);
                        prop_assert!(form.flags & 0x37 == 0x10 && form.protocol == 6);
                        prop_assert!(!form.more_fragments && !form.is_tagged);
                        next[flow] += payload as u32;
                    }
                    rig.pool.free(chain);
                }
            }
        }
        rig.audit(&next);
        rig.pair = BufferPair::default();
        rig.pool.drain_remote();
        prop_assert_eq!(rig.pool.outstanding(), 0);
    }
}

#[test]
fn a_frame_is_placed_only_if_it_ends_where_its_segment_ends() {
    for is_predicting in [false, true] {
        for (padding, cut) in [(0, 0), (22, 22), (22, 0), (22, 21), (22, 23), (0, 1)] {
            let mut rig = Rig::new(is_predicting);
            rig.post(2, SeqNum(0), [100, 0]);
            let mut f = frame(2, SeqNum(0), 50, Form { padding, ..PLAIN });
            f.truncate(f.len() - cut);
            let chain = rig.receive(&f).unwrap();
            assert!(chain.to_vec() == f);
            let expected = if padding == cut { 50 } else { 0 };
            assert_eq!(placed_bytes(&chain), expected, "{cut} of {padding} bytes of padding cut");
            rig.pool.free(chain);
            rig.audit(&[SeqNum(0), SeqNum(0), SeqNum(expected as u32), SeqNum(0)]);
        }
    }
}

/// Sends bytes of some flows in frames of one size, in the order that `turn` gives. Posts a new buffer whenever one is
/// full, and checks the bytes that arrive in the buffers.
fn bulk(
    rig: &mut Rig,
    frames: usize,
    payload: usize,
    buffer: usize,
    turn: impl Fn(usize) -> usize,
) {
    let mut next = [SeqNum(9); FLOWS];
    for (flow, next) in next.iter().enumerate().take(2) {
        rig.post(flow, *next, [buffer, buffer]);
    }
    for i in 0..frames {
        let flow = turn(i);
        let chain = rig.receive(&frame(flow, next[flow], payload, PLAIN)).unwrap();
        next[flow] += payload as u32;
        let placed = chain.iter().filter_map(|m| m.placed()).map(|p| p.buffer);
        assert!(placed.into_iter().all(|b| rig.holds[flow].iter().any(|h| h.id() == b)));
        rig.pool.free(chain);
        if rig.placer.take_full() {
            let mut ranges = rig.placer.revoke(&key(flow));
            let mut hold = RecvBuf::with_capacity(buffer).post();
            ranges.push(hold.writable_range(0).unwrap()).unwrap();
            rig.holds[flow].push_back(hold);
            let mut full = rig.holds[flow].pop_front().unwrap();
            let space: Option<WritableRange> = full.writable_range(buffer);
            assert!(space.is_some(), "the first buffer is full");
            rig.place(flow, next[flow], ranges);
        }
    }
}

#[test]
fn a_flow_alone_lands_in_its_buffers_from_the_first_frame_on() {
    let mut rig = Rig::new(true);
    bulk(&mut rig, 200, 60_000, 65_536, |_| 0);
    let o = rig.placer.take_outcome();
    assert_eq!((o.hits, o.misses, o.moved_bytes), (200, 0, 0));
}

#[test]
fn two_flows_that_alternate_are_both_placed_after_a_round() {
    let mut rig = Rig::new(true);
    bulk(&mut rig, 400, 3000, 65_536, |i| i % 2);
    let o = rig.placer.take_outcome();
    assert!(o.hits >= 392, "{o:?}");
    assert_eq!(o.hits + o.misses, 400);
}

#[test]
fn a_frame_of_another_posted_flow_is_copied_once_and_to_where_it_belongs() {
    let mut rig = Rig::new(true);
    rig.post(0, SeqNum(0), [10_000, 0]);
    rig.post(2, SeqNum(0), [10_000, 0]);
    assert_eq!(rig.placer.prediction().map(|a| a.slot), Some(0));
    let f = frame(2, SeqNum(0), 5000, PLAIN);
    let chain = rig.receive(&f).unwrap();
    assert!(chain.to_vec() == f && placed_bytes(&chain) == 5000);
    let o = rig.placer.take_outcome();
    assert_eq!((o.hits, o.misses, o.moved_bytes), (0, 1, 5000));
    rig.audit(&[SeqNum(0), SeqNum(0), SeqNum(5000), SeqNum(0)]);
}

#[test]
fn without_guessing_the_next_segment_is_copied_once() {
    let mut rig = Rig::new(false);
    bulk(&mut rig, 100, 60_000, 65_536, |i| i / 7 % 2);
    let o = rig.placer.take_outcome();
    assert_eq!((o.hits, o.misses, o.moved_bytes), (0, 100, 6_000_000));
}

#[test]
fn acknowledgements_between_the_segments_are_no_misses() {
    let mut rig = Rig::new(true);
    rig.post(0, SeqNum(0), [70_000, 0]);
    for i in 0..20u32 {
        let ack = rig.receive(&frame(2, SeqNum(7), 0, PLAIN)).unwrap();
        let data = rig.receive(&frame(0, SeqNum(i * 3000), 3000, PLAIN)).unwrap();
        assert_eq!(placed_bytes(&data), 3000);
        rig.pool.free(ack);
        rig.pool.free(data);
    }
    let o = rig.placer.take_outcome();
    assert_eq!((o.hits, o.misses), (20, 0));
}

#[test]
fn a_flood_of_another_flow_fills_no_range_after_its_first_frame() {
    let mut rig = Rig::new(true);
    rig.post(0, SeqNum(0), [70_000, 0]);
    let other = Form { protocol: 17, ..PLAIN };
    for _ in 0..50 {
        let chain = rig.receive(&frame(2, SeqNum(7), 3000, other)).unwrap();
        rig.pool.free(chain);
    }
    assert_eq!(rig.placer.take_outcome().misses, 1);
    for i in 0..20u32 {
        let data = rig.receive(&frame(0, SeqNum(i * 3000), 3000, PLAIN)).unwrap();
        assert_eq!(placed_bytes(&data), 3000);
        rig.pool.free(data);
    }
    let o = rig.placer.take_outcome();
    assert!(o.hits >= 15, "{o:?}");
}

#[test]
fn a_pool_without_large_buffers_still_places() {
    let mut rig = Rig::new(true);
    rig.post(0, SeqNum(0), [200_000, 0]);
    let mut held = Vec::new();
    for bytes in [65_536, 16_384, 4096, 2048, 256] {
        held.extend(std::iter::from_fn(|| rig.pool.alloc(bytes, 0, Purpose::Receive).ok()));
    }
    let chain = rig.receive(&frame(0, SeqNum(0), 60_000, PLAIN)).unwrap();
    assert_eq!(placed_bytes(&chain), 60_000);
    // A frame that cannot be kept is dropped, and leaves nothing behind.
    let lost = rig.receive(&frame(2, SeqNum(0), 3000, PLAIN));
    assert_eq!(lost.map(|c| c.len()), Err(DropReason::NoBuffer));
    rig.audit(&[SeqNum(60_000), SeqNum(0), SeqNum(0), SeqNum(0)]);
    drop(held);
}

#[test]
fn a_further_range_follows_the_last_and_is_refused_for_a_flow_with_no_range_or_two() {
    let mut rig = Rig::new(true);
    let one_more = |rig: &mut Rig, bytes: usize| {
        let mut hold = RecvBuf::with_capacity(bytes).post();
        let is_placed = rig.placer.place_next(&key(0), hold.writable_range(0).unwrap());
        if is_placed.is_ok() {
            rig.holds[0].push_back(hold);
        }
        is_placed
    };
    assert_eq!(one_more(&mut rig, 500), Err(Unsupported), "of a flow that nobody knows");
    rig.post(0, SeqNum(0), [1000, 0]);
    assert_eq!(one_more(&mut rig, 500), Ok(()));
    assert_eq!(one_more(&mut rig, 500), Err(Unsupported), "behind two");
    for (seq, bytes) in [(0, 900), (900, 600)] {
        let chain = rig.receive(&frame(0, SeqNum(seq), bytes, PLAIN)).unwrap();
        assert_eq!(placed_bytes(&chain), bytes);
        rig.pool.free(chain);
    }
    assert_eq!(one_more(&mut rig, 500), Err(Unsupported), "all are full");
    rig.audit(&[SeqNum(1500), SeqNum(0), SeqNum(0), SeqNum(0)]);
}

#[test]
fn more_flows_than_slots_are_refused_until_one_has_no_ranges() {
    let mut placer = Placer::new(true);
    let flow = |i: u16| FlowKey::new(ends(0).0, (ends(0).1.ip(), i).into());
    let place = |placer: &mut Placer, i: u16| {
        let mut ranges = WritableRanges::default();
        let mut hold = RecvBuf::with_capacity(10).post();
        ranges.push(hold.writable_range(0).unwrap()).unwrap();
        placer.place(flow(i), SeqNum(0), ranges)
    };
    for i in 0..flows::MAX_FLOWS as u16 {
        place(&mut placer, i).unwrap();
    }
    assert_eq!(place(&mut placer, 1000), Err(Unsupported));
    assert_eq!(placer.revoke(&flow(7)).bytes(), 10);
    assert_eq!(place(&mut placer, 1000), Ok(()));
    assert!(placer.revoke(&flow(7)).is_empty());
}
