use proptest::prelude::*;

use super::*;

/// The model: an unordered list, scanned linearly.
fn scan<K: Key>(model: &[(K, u8, u32)], address: K) -> u32 {
    let holds = |p: &&(K, u8, u32)| address.block(p.1).0 == p.0;
    model.iter().filter(holds).max_by_key(|p| p.1).map_or(0, |p| p.2)
}

/// Checks that an emptied table has no answers.
fn assert_nothing_is_left<K: Key>(fib: &Fib<K>) {
    let is_empty =
        |c: &Chunk<K>| (c.units, c.cover.answer, c.cover.len, c.inner.len()) == (0, 0, 0, 0);
    assert!(fib.len() == 0 && fib.chunks.iter().all(is_empty));
}

/// Applies changes to table and model and compares them, also at the edges of every prefix. Returns
/// the emptied table.
fn compare<K: Key>(changes: Vec<(K, u8, u32)>, probes: &[K]) -> Fib<K> {
    let (mut fib, mut model) = (Fib::<K>::new(), Vec::new());
    for (address, len, answer) in changes {
        let start = address.block(len).0;
        let old = model.iter().position(|p: &(K, u8, u32)| (p.0, p.1) == (start, len));
        let old = old.map(|at| model.swap_remove(at).2);
        if answer == 0 {
            assert_eq!(fib.remove(start, len), old);
        } else {
            assert_eq!(fib.insert(start, len, answer), old);
            model.push((start, len, answer));
        }
        assert_eq!(
            (fib.len(), fib.get(start, len)),
            (model.len(), (answer != 0).then_some(answer))
        );
        let (first, last) = start.block(len);
        for at in [Some(first), Some(last), last.next()]
            .into_iter()
            .flatten()
            .chain(probes.iter().copied())
        {
            assert_eq!(fib.lookup(at), scan(&model, at), "{at:?} after {start:?}/{len}");
        }
    }
    for (start, len, answer) in model {
        assert_eq!(fib.remove(start, len), Some(answer));
    }
    assert_nothing_is_left(&fib);
    fib
}

/// Answers: 0 removes; those from 255 on have a record.
fn answer() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..5, 253u32..258]
}

/// Addresses from a few small ranges, so that prefixes nest.
fn v4() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..64, (0u32..64).prop_map(|n| n << 12), any::<u32>(), Just(u32::MAX)]
}

fn v6() -> impl Strategy<Value = u128> {
    let global = 0x2001_0db8u128 << 96;
    prop_oneof![
        (0u128..64).prop_map(move |n| global | n),
        (0u128..64).prop_map(move |n| global | n << 62),
        (0u128..64).prop_map(move |n| global | n << 80),
        any::<u128>(),
        Just(u128::MAX),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn ipv4_agrees_with_a_linear_scan(
        changes in prop::collection::vec((v4(), 8u8..=32, answer()), 0..120),
        short in prop::collection::vec((v4(), 0u8..=20, answer()), 0..4),
        probes in prop::collection::vec(v4(), 1..20),
    ) {
        let mut all = short.clone();
        all.extend(changes);
        all.extend(short.into_iter().map(|(a, l, _)| (a, l, 0)));
        prop_assert!(compare(all, &probes).tables.is_empty());
    }

    #[test]
    fn ipv6_agrees_with_a_linear_scan(
        changes in prop::collection::vec((v6(), 16u8..=128, answer()), 0..120),
        short in prop::collection::vec((v6(), 0u8..=24, answer()), 0..4),
        probes in prop::collection::vec(v6(), 1..20),
    ) {
        let mut all = short.clone();
        all.extend(changes);
        all.extend(short.into_iter().map(|(a, l, _)| (a, l, 0)));
        prop_assert!(compare(all, &probes).tables.is_empty());
    }

    #[test]
    fn chunks_contain_their_addresses_in_order(a: u128, b: u32) {
        let (start, len) = u128::chunk_prefix(a.chunk());
        prop_assert_eq!(a.block(len).0, start);
        let (start, len) = u32::chunk_prefix(b.chunk());
        prop_assert_eq!(b.block(len).0, start);
    }
}

#[test]
fn the_chunks_of_ipv6_cover_the_address_space_without_gaps() {
    let mut at = Some(0u128);
    for chunk in 0..u128::CHUNKS {
        let (start, len) = u128::chunk_prefix(chunk);
        assert_eq!((Some(start), start.chunk()), (at, chunk));
        at = start.block(len).1.next();
    }
    assert_eq!(at, None);
}

#[test]
fn nested_prefixes_with_one_address_are_distinguished_by_length() {
    let mut fib = Fib::<u32>::new();
    for len in 0..=32u8 {
        fib.insert(0x0a00_0000u32.block(len).0, len, u32::from(len) + 1);
    }
    assert_eq!(fib.lookup(0x0a00_0000), 33);
    for len in (0..=32u8).rev() {
        assert_eq!(fib.remove(0x0a00_0000u32.block(len).0, len), Some(u32::from(len) + 1));
        assert_eq!(fib.lookup(0x0a00_0000), u32::from(len));
    }
}

/// Pseudo-random numbers (splitmix64).
fn random(n: &mut u64) -> u64 {
    *n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*n ^ (*n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn a_million_random_updates_leak_no_memory() {
    let (mut fib, mut model) = (Fib::<u32>::new(), BTreeMap::new());
    let mut seed = 1;
    for i in 0..500_000u32 {
        let r = random(&mut seed);
        // A fiftieth of the address space, so that prefixes overlap.
        let (address, len) = ((r as u32) / 50, 16 + (r >> 32) as u8 % 17);
        let answer = 1 + (r >> 48) as u32 % 1000;
        let start = address.block(len).0;
        assert_eq!(fib.insert(start, len, answer), model.insert((start, len), answer));
        if i % 1000 == 0 {
            let found = (0..=32).rev().find_map(|l| model.get(&(address.block(l).0, l)));
            assert_eq!(fib.lookup(address), found.copied().unwrap_or(0));
        }
    }
    assert_eq!(fib.len(), model.len());
    let mut all: Vec<_> = model.into_iter().collect();
    while !all.is_empty() {
        let at = random(&mut seed) as usize % all.len();
        let ((start, len), answer) = all.swap_remove(at);
        assert_eq!(fib.remove(start, len), Some(answer));
    }
    assert_nothing_is_left(&fib);
    assert!(fib.tables.is_empty());
}
