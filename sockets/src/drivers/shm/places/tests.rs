//! The received bytes equal the sent bytes, and a posted buffer has bytes of its flow only.

use fulmar_stack::base::SeqNum;
use fulmar_stack::device::Device;
use fulmar_stack::mbuf::{PostedBuf, RecvBuf};
use proptest::prelude::*;

use super::*;
use crate::drivers::placing::tests::{FLOWS, Form, PLAIN, form, frame, key};
use crate::drivers::shm::tests::Host;

fn post(b: &mut Host, flow: usize, next_seq: SeqNum, sizes: [usize; 2]) -> Vec<PostedBuf> {
    let mut ranges = WritableRanges::default();
    let mut holds = Vec::new();
    for bytes in sizes {
        let mut hold = RecvBuf::with_capacity(bytes).post();
        ranges.push(hold.writable_range(0).unwrap()).unwrap();
        holds.push(hold);
    }
    let placement = b.device.placement().unwrap();
    drop(placement.revoke(&key(flow)));
    placement.place(key(flow), next_seq, ranges).unwrap();
    holds
}

fn placed_bytes(chain: &Chain) -> usize {
    chain.iter().filter(|m| m.placed().is_some()).map(|m| m.len()).sum()
}

#[test]
fn payload_is_copied_into_the_posted_buffer_and_the_frame_is_its_senders_again() {
    let (mut a, mut b) = Host::pair();
    let holds = post(&mut b, 0, SeqNum(0), [70_000, 20_000]);
    let (mut seq, mut got) = (0, 0);
    for bytes in [1, 200, 1448, 40_000, 60_000] {
        let f = frame(0, SeqNum(seq), bytes, PLAIN);
        assert!(a.send(&f));
        let packets = b.receive();
        assert!(packets.len() == 1 && packets[0].chain.to_vec() == f);
        got += placed_bytes(&packets[0].chain);
        seq += bytes as u32;
        a.receive();
        assert_eq!(a.pool.outstanding(), 0, "nothing is lent");
        b.drop_all(packets);
    }
    // The rest of the last frame came in buffers of the pool.
    assert_eq!(got, 90_000);
    let stats = b.device.stats();
    assert_eq!((stats.place_hits, stats.placed_bytes, stats.place_misses), (5, 90_000, 0));
    assert_eq!(b.counters.value(Counter::CopiedBytes), 90_000);
    assert!(holds.into_iter().all(|h| h.release(0).is_ok()));
    assert_eq!(b.pool.outstanding(), 0);
}

#[test]
fn a_burst_ends_where_a_buffer_became_full() {
    let (mut a, mut b) = Host::pair();
    let _holds = post(&mut b, 0, SeqNum(0), [6000, 6000]);
    for i in 0..4 {
        assert!(a.send(&frame(0, SeqNum(3000 * i), 3000, PLAIN)));
    }
    for expected in [2, 2, 0] {
        let packets = b.receive();
        assert_eq!(packets.len(), expected);
        b.drop_all(packets);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_range_only_gets_bytes_of_its_flow(
        segments in proptest::collection::vec(
            (0..FLOWS, 0usize..5000, form(), prop_oneof![6 => Just(0), 1 => -99i32..99]), 1..60,
        ),
        sizes in proptest::array::uniform2(1usize..9000),
    ) {
        let (mut a, mut b) = Host::pair();
        let mut next = [SeqNum(7); FLOWS];
        let mut holds: Vec<_> =
            (0..FLOWS).map(|flow| post(&mut b, flow, next[flow], sizes)).collect();
        for (i, (flow, payload, form, ahead)) in segments.into_iter().enumerate() {
            let form: Form = form;
            let seq = SeqNum(next[flow].0.wrapping_add_signed(ahead));
            let f = frame(flow, seq, payload, form);
            prop_assert!(a.send(&f));
            let packets = b.receive();
            prop_assert!(packets.len() == 1 && packets[0].chain.to_vec() == f);
            if placed_bytes(&packets[0].chain) > 0 {
                prop_assert!(seq == next[flow] && form.padding == 0 && form.flags & 0x37 == 0x10);
                next[flow] += payload as u32;
            }
            b.drop_all(packets);
            if i % 8 == 7 {
                let mut ranges = b.device.placement().unwrap().revoke(&key(flow));
                prop_assert!(ranges.iter_mut().all(|r| r.bytes().iter().all(|b| *b == 0)));
                holds[flow] = post(&mut b, flow, next[flow], sizes);
            }
        }
        a.receive();
        prop_assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
    }
}
