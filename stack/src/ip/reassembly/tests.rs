use std::collections::BTreeSet;

use crate::mbuf::PoolConfig;
use proptest::prelude::*;

use super::*;

const LIFETIME: Duration = Duration::from_secs(30);

struct Rig {
    table: Reassembly,
    pool: Pool,
    counters: Counters,
    now: Instant,
}

impl Rig {
    fn new(max_bytes: usize) -> Rig {
        Rig {
            table: Reassembly::new(max_bytes, &Secrets::for_simulation(7)),
            pool: Pool::new(PoolConfig::with_budget(32 << 20)).unwrap(),
            counters: Counters::default(),
            now: Instant::from_millis(1),
        }
    }

    /// The bytes in a separate block, as a driver receives them.
    fn received(&mut self, bytes: &[u8]) -> Chain {
        let mut m = self.pool.alloc(bytes.len(), 0, Purpose::Receive).unwrap();
        m.append(bytes.len()).unwrap().copy_from_slice(bytes);
        Chain::from(m)
    }

    fn insert(
        &mut self,
        key: Key,
        whole: &[u8],
        start: usize,
        end: usize,
        is_last: bool,
    ) -> Result<Option<Vec<u8>>, DropReason> {
        let chain = self.received(&whole[start..end]);
        let fragment = Fragment {
            key,
            start: start as u16,
            is_last,
            first: (start == 0).then_some(header()),
            ecn: 0,
            is_group: false,
            lifetime: LIFETIME,
            chain,
        };
        let done = self.table.insert(self.now, fragment, &mut self.pool, &mut self.counters)?;
        Ok(done.map(|w| {
            assert!(w.first.is_some());
            let bytes = w.chain.to_vec();
            self.pool.free(w.chain);
            bytes
        }))
    }

    /// Inserts the first (0) or the second (1) fragment of a datagram. Returns the ECN field of the
    /// datagram, if it is complete.
    fn insert_with_ecn(&mut self, n: usize, ecn: u8) -> Result<Option<u8>, DropReason> {
        let fragment = Fragment {
            key: key(2, 1),
            start: n as u16 * 8,
            is_last: n == 1,
            first: (n == 0).then_some(header()),
            ecn,
            is_group: false,
            lifetime: LIFETIME,
            chain: self.received(&[0; 8]),
        };
        let done = self.table.insert(self.now, fragment, &mut self.pool, &mut self.counters)?;
        Ok(done.map(|datagram| {
            self.pool.free(datagram.chain);
            datagram.ecn
        }))
    }

    /// Inserts a first fragment.
    fn begin(&mut self, key: Key) {
        let whole = [0; 1480];
        self.insert(key, &whole, 0, 1480, false).unwrap();
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason)
    }

    /// Checks the table's counts against its slots.
    fn check(&self) {
        let slots = || self.table.sets.iter().flatten();
        let runs =
            |s: &Slot| s.runs.iter().map(|r| r.chain.truesize().max(r.chain.len())).sum::<usize>();
        assert_eq!(self.table.truesize, slots().map(runs).sum::<usize>());
        assert!(self.table.truesize <= self.table.max_bytes);
        assert!(self.table.sets.iter().all(|set| set.len() <= WAYS));
        for slot in slots() {
            assert!(slot.pieces.len() <= MAX_FRAGMENTS);
            assert!(slot.runs.windows(2).all(|w| w[0].end() < w[1].start));
            let of_runs: usize = slot.runs.iter().map(|r| r.chain.len()).sum();
            let of_pieces: usize = slot.pieces.iter().map(|p| usize::from(p.1 - p.0)).sum();
            assert_eq!(of_runs, of_pieces);
        }
    }

    fn end(mut self) {
        self.check();
        self.table.release(&mut self.pool);
        assert_eq!(self.pool.outstanding(), 0);
    }
}

fn key(host: u32, ident: u32) -> Key {
    let ip = |n: u32| IpAddr::V4((0x0a00_0000 + n).into());
    Key { src: ip(host), dst: ip(1), protocol: 17, ident }
}

fn header() -> First {
    First::V4(ipv4::Header {
        src: [10, 0, 0, 2].into(),
        dst: [10, 0, 0, 1].into(),
        protocol: 17,
        ttl: 64,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: false,
        more_fragments: true,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: 20,
    })
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn the_largest_datagram_arrives_in_any_of_three_orders() {
    let whole = pattern(65_515);
    for order in 0..3 {
        let mut rig = Rig::new(4 << 20);
        let mut starts: Vec<usize> = (0..whole.len()).step_by(1480).collect();
        match order {
            0 => {}
            1 => starts.reverse(),
            _ => starts.sort_by_key(|s| (s / 1480 % 2, *s)),
        }
        let mut got = None;
        for start in starts {
            let end = (start + 1480).min(whole.len());
            assert_eq!(got, None);
            got = rig.insert(key(2, 1), &whole, start, end, end == whole.len()).unwrap();
            rig.check();
        }
        assert!(got.as_deref() == Some(&whole), "order {order}");
        assert_eq!((rig.table.len(), rig.table.truesize), (0, 0));
        rig.end();
    }
}

#[test]
fn an_overlap_discards_the_datagram_and_its_later_fragments() {
    for (start, end) in [(8, 24), (0, 24), (8, 16), (24, 40), (0, 48)] {
        let whole = pattern(48);
        let mut rig = Rig::new(1 << 20);
        rig.insert(key(2, 1), &whole, 0, 16, false).unwrap();
        rig.insert(key(2, 1), &whole, 32, 48, true).unwrap();
        let overlap = Err(DropReason::FragmentOverlap);
        let refused = if end == 40 { (24, 40) } else { (start, end) };
        assert_eq!(rig.insert(key(2, 1), &whole, refused.0, refused.1, false), overlap);
        assert_eq!(rig.table.truesize, 0);
        assert_eq!(rig.insert(key(2, 1), &whole, 16, 32, false), overlap);
        // Another datagram of the same source is not affected.
        rig.insert(key(2, 2), &whole, 0, 16, false).unwrap();
        assert_eq!(rig.insert(key(2, 2), &whole, 16, 48, true).unwrap(), Some(whole));
        rig.end();
    }
}

#[test]
fn an_exact_duplicate_alone_is_dropped() {
    let whole = pattern(48);
    let mut rig = Rig::new(1 << 20);
    rig.insert(key(2, 1), &whole, 0, 16, false).unwrap();
    let again = rig.insert(key(2, 1), &whole, 0, 16, false);
    assert_eq!(again, Err(DropReason::FragmentDuplicate));
    assert_eq!(rig.insert(key(2, 1), &whole, 16, 48, true).unwrap(), Some(whole));
    rig.end();
}

#[test]
fn fragments_with_inconsistent_ends_are_refused() {
    let whole = pattern(64);
    let invalid = Err(DropReason::FragmentInvalid);
    for (first, second) in [
        ((32, 40, true), (40, 48, true)),
        ((32, 40, true), (48, 56, false)),
        ((32, 40, false), (16, 24, true)),
    ] {
        let mut rig = Rig::new(1 << 20);
        rig.insert(key(2, 1), &whole, first.0, first.1, first.2).unwrap();
        assert_eq!(rig.insert(key(2, 1), &whole, second.0, second.1, second.2), invalid);
        rig.end();
    }
}

#[test]
fn tiny_fragments_share_blocks_and_are_limited_in_number() {
    let whole = pattern(8 * 400);
    let mut rig = Rig::new(1 << 20);
    for n in 0..MAX_FRAGMENTS {
        rig.insert(key(2, 1), &whole, 8 * n, 8 * n + 8, false).unwrap();
        rig.check();
    }
    assert!(rig.pool.outstanding() <= 2, "{} mbufs", rig.pool.outstanding());
    let next = 8 * MAX_FRAGMENTS;
    let refused = rig.insert(key(2, 1), &whole, next, next + 8, false);
    assert_eq!((refused, rig.table.truesize), (Err(DropReason::FragmentInvalid), 0));
    rig.end();
}

/// How many of a thousand legitimate datagrams of two fragments are reassembled, with `between`
/// datagrams of an attacker started in between. The flood has filled the table before.
fn survivors(max_bytes: usize, between: u32, attacker: impl Fn(u32) -> Key) -> usize {
    let whole = pattern(2000);
    let mut rig = Rig::new(max_bytes);
    let mut begun = 0..;
    begun.by_ref().take(8192).for_each(|n| rig.begin(attacker(n)));
    let mut arrived = 0;
    for ident in 0..1000 {
        rig.insert(key(2, ident), &whole, 0, 1480, false).unwrap();
        begun.by_ref().take(between as usize).for_each(|n| rig.begin(attacker(n)));
        let done = rig.insert(key(2, ident), &whole, 1480, 2000, true).unwrap();
        arrived += usize::from(done.is_some_and(|d| d == whole));
    }
    rig.check();
    rig.end();
    arrived
}

/// 20,000 fragments per second, 20 ms between the first and the last fragment of a legitimate
/// datagram.
const BETWEEN: u32 = 400;

#[test]
fn under_a_flood_of_spoofed_fragments_98_of_100_datagrams_survive() {
    let arrived = survivors(4 << 20, BETWEEN, |n| key(3 + n, 1));
    assert!((970..1000).contains(&arrived), "{arrived} of 1000");
}

#[test]
fn a_flood_with_the_legitimate_source_address_does_no_more() {
    let arrived = survivors(4 << 20, BETWEEN, |n| key(2, 5000 + n));
    assert!((970..1000).contains(&arrived), "{arrived} of 1000");
}

#[test]
fn a_flood_from_one_source_evicts_nothing_of_another() {
    for max_bytes in [512 << 10, 4 << 20] {
        assert!(survivors(max_bytes, 2 * BETWEEN, |n| key(3, n)) >= 998);
    }
}

#[test]
fn when_storage_is_short_the_oldest_of_a_random_sample_is_evicted() {
    // Storage for 256 fragments.
    let arrived = survivors(512 << 10, 100, |n| key(3 + n, 1));
    assert!(arrived >= 980, "{arrived} of 1000");
}

#[test]
fn the_set_of_a_datagram_depends_on_a_secret() {
    let sets_of = |seed| {
        let mut table = Reassembly::new(1 << 20, &Secrets::for_simulation(seed));
        (0..1000).map(|n| table.set_of(&key(2, n))).collect::<Vec<_>>()
    };
    let (one, other) = (sets_of(1), sets_of(2));
    assert_eq!(one, sets_of(1));
    assert_eq!(one.iter().collect::<BTreeSet<_>>().len(), SETS);
    let alike = one.iter().zip(&other).filter(|(a, b)| a == b).count();
    assert!(alike < 30, "{alike} of 1000");
}

#[test]
fn a_datagram_refused_in_a_full_table_is_counted_once() {
    let mut rig = Rig::new(4 << 20);
    let flood = 4 * (SETS * WAYS) as u32;
    (0..flood).for_each(|n| rig.begin(key(3 + n, 1)));
    rig.check();
    let kept = rig.table.len() as u64;
    assert_eq!(rig.drops(DropReason::FragmentTableFull) + kept, u64::from(flood));
    assert_eq!(kept, (SETS * WAYS) as u64);
    rig.end();
}

#[test]
fn a_flood_of_spoofed_first_fragments_stays_within_the_bounds() {
    let whole = pattern(60_000);
    let mut rig = Rig::new(1 << 20);
    for host in 2..2000 {
        rig.insert(key(host, 1), &whole, 0, 59_992, false).unwrap();
        rig.check();
    }
    assert!(rig.drops(DropReason::FragmentTableFull) > 1900);
    rig.end();
}

#[test]
fn an_expired_datagram_is_returned_once() {
    let whole = pattern(4000);
    let mut rig = Rig::new(1 << 20);
    assert_eq!(rig.table.next_deadline(), None);
    rig.insert(key(2, 1), &whole, 0, 1480, false).unwrap();
    rig.insert(key(2, 2), &whole, 1480, 2960, false).unwrap();
    rig.insert(key(2, 3), &whole, 0, 1480, false).unwrap();
    rig.insert(key(2, 3), &whole, 8, 1488, false).unwrap_err();
    assert_eq!(rig.table.next_deadline(), Some(rig.now + LIFETIME));
    rig.now = rig.now + LIFETIME;
    let mut expired = Vec::new();
    while let Some(w) = rig.table.pop_expired(rig.now, &mut rig.pool) {
        expired.push((w.key.ident, w.first.is_some(), w.first_bytes));
        rig.pool.free(w.chain);
    }
    expired.sort_unstable();
    // The one that overlapped is freed silently.
    assert_eq!(expired, [(1, true, 1480), (2, false, 2960)]);
    assert_eq!((rig.table.len(), rig.table.next_deadline()), (0, None));
    assert_eq!(rig.pool.outstanding(), 0);
    rig.end();
}

#[test]
fn a_wrapped_identification_starts_a_new_datagram() {
    let (old, new) = (vec![1; 32], vec![2; 32]);
    let mut rig = Rig::new(1 << 20);
    rig.insert(key(2, 7), &old, 0, 16, false).unwrap();
    let pass = |rig: &mut Rig, host, n| {
        rig.insert(key(host, n), &old, 0, 16, false).unwrap();
        rig.insert(key(host, n), &old, 16, 32, true).unwrap().unwrap();
    };
    let many = 4 * u32::from(MAX_SUCCESSORS) * SETS as u32;
    // Datagrams of other sources do not count.
    (100..many).for_each(|n| pass(&mut rig, 3, n));
    rig.insert(key(2, 7), &[1; 32], 24, 32, true).unwrap();
    assert_eq!(rig.drops(DropReason::FragmentTimeout), 0);
    (100..many).for_each(|n| pass(&mut rig, 2, n));
    rig.insert(key(2, 7), &new, 16, 32, true).unwrap();
    assert_eq!(rig.drops(DropReason::FragmentTimeout), 1);
    assert_eq!(rig.insert(key(2, 7), &new, 0, 16, false).unwrap(), Some(new));
    rig.end();
}

#[test]
fn ce_on_any_fragment_marks_the_datagram() {
    for (ecns, expected) in [([2, 2], 2), ([2, 3], 3), ([3, 2], 3), ([1, 3], 3), ([1, 0], 1)] {
        let mut rig = Rig::new(1 << 20);
        assert_eq!(rig.insert_with_ecn(0, ecns[0]), Ok(None));
        assert_eq!(rig.insert_with_ecn(1, ecns[1]), Ok(Some(expected)), "{ecns:?}");
        rig.end();
    }
}

#[test]
fn a_datagram_with_ce_and_not_ect_is_dropped() {
    for ecns in [[0, 3], [3, 0]] {
        for order in [[0, 1], [1, 0]] {
            let mut rig = Rig::new(1 << 20);
            assert_eq!(rig.insert_with_ecn(order[0], ecns[order[0]]), Ok(None));
            let invalid = Err(DropReason::FragmentInvalid);
            assert_eq!(
                rig.insert_with_ecn(order[1], ecns[order[1]]),
                invalid,
                "{ecns:?} {order:?}"
            );
            assert_eq!(rig.table.truesize, 0);
            rig.end();
        }
    }
}

/// Fragment boundaries of a payload of `len` bytes.
fn cuts(len: usize, wishes: &[usize]) -> Vec<(usize, usize)> {
    let inner = wishes.iter().map(|w| w % len / 8 * 8).filter(|&c| c > 0);
    let mut at: BTreeSet<usize> = inner.collect();
    at.extend([0, len]);
    let at: Vec<usize> = at.into_iter().collect();
    at.windows(2).map(|w| (w[0], w[1])).collect()
}

proptest! {
    #[test]
    fn any_split_order_and_duplication_yields_the_datagram(
        len in 16_usize..65_515,
        wishes in prop::collection::vec(any::<usize>(), 1..60),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..200),
    ) {
        let whole = pattern(len);
        let pieces = cuts(len, &wishes);
        let mut rig = Rig::new(4 << 20);
        let (mut seen, mut got) = (BTreeSet::new(), None);
        let picks = order.iter().map(|i| i.index(pieces.len())).chain(0..pieces.len());
        for i in picks {
            if got.is_some() {
                break;
            }
            let (start, end) = pieces[i];
            let is_new = seen.insert(i);
            let outcome = rig.insert(key(2, 1), &whole, start, end, end == len);
            match outcome {
                Ok(done) => {
                    prop_assert!(is_new);
                    got = done;
                }
                Err(reason) => prop_assert_eq!((is_new, reason), (false, DropReason::FragmentDuplicate)),
            }
            rig.check();
        }
        prop_assert_eq!(seen.len(), pieces.len());
        prop_assert!(got.as_deref() == Some(&whole[..]));
        rig.end();
    }

    /// Random ranges: the table against a list.
    #[test]
    fn any_ranges_yield_the_datagram_or_nothing(
        ranges in prop::collection::vec((0_usize..12, 1_usize..6, any::<bool>()), 1..30),
    ) {
        let whole = pattern(8 * 20);
        let mut rig = Rig::new(1 << 20);
        let (mut model, mut is_refused) = (Vec::<(usize, usize, bool)>::new(), false);
        for (start, len, is_last) in ranges {
            let (start, end) = (8 * start, 8 * (start + len));
            let outcome = rig.insert(key(2, 1), &whole, start, end, is_last);
            rig.check();
            let is_known = model.iter().any(|p| (p.0, p.1) == (start, end));
            let overlaps = model.iter().any(|p| p.0 < end && start < p.1);
            if is_refused || !is_known && overlaps {
                is_refused = true;
                prop_assert!(outcome.is_err());
                continue;
            }
            match outcome {
                Err(reason) if is_known => prop_assert_eq!(reason, DropReason::FragmentDuplicate),
                Err(reason) => {
                    prop_assert_eq!(reason, DropReason::FragmentInvalid);
                    is_refused = true;
                }
                Ok(done) => {
                    prop_assert!(!is_known);
                    model.push((start, end, is_last));
                    let covered: usize = model.iter().map(|p| p.1 - p.0).sum();
                    let total = model.iter().find(|p| p.2).map(|p| p.1);
                    prop_assert_eq!(done.is_some(), total == Some(covered));
                    if let Some(bytes) = done {
                        prop_assert!(bytes == whole[..covered]);
                        model.clear();
                    }
                }
            }
        }
        rig.end();
    }
}
