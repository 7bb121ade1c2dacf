use proptest::prelude::*;

use super::*;
use crate::route::fib::key::Sealed;

/// The model: an unordered list, scanned linearly.
fn scan<K: Key>(model: &[(K, u8, u32)], address: K) -> u32 {
    let holds = |p: &&(K, u8, u32)| address.block(p.1).0 == p.0;
    model.iter().filter(holds).max_by_key(|p| p.1).map_or(0, |p| p.2)
}

/// Checks that all memory of an emptied table is free.
fn assert_nothing_is_left<K: Key>(fib: &Fib<K>) {
    assert!(fib.chunks.iter().all(|c| c.units == 0 && c.inner.is_empty()));
    let (bytes, empty) = (fib.bytes(), Fib::<K>::new().bytes());
    assert_eq!(bytes.lookup - bytes.free, empty.lookup - empty.free, "a block leaked");
}

/// Applies changes to table and model and compares them, also at the edges of every prefix.
fn compare<K: Key>(changes: Vec<(K, u8, u32)>, probes: &[K]) {
    let (mut fib, mut model) = (Fib::<K>::new(), Vec::new());
    let reader = fib.reader();
    for (address, len, answer) in changes {
        let start = address.block(len).0;
        let old = model.iter().position(|p: &(K, u8, u32)| (p.0, p.1) == (start, len));
        let old = old.map(|at| model.swap_remove(at).2);
        if answer == 0 {
            assert_eq!(fib.remove(address, len), Ok(old));
        } else {
            assert_eq!(fib.insert(address, len, answer), Ok(old));
            model.push((start, len, answer));
        }
        assert_eq!(fib.len(), model.len());
        let (first, last) = start.block(len);
        for at in [Some(first), Some(last), last.next()]
            .into_iter()
            .flatten()
            .chain(probes.iter().copied())
        {
            assert_eq!(reader.lookup(at), scan(&model, at), "{at:?} after {start:?}/{len}");
        }
    }
    for (start, len, answer) in model {
        assert_eq!(fib.remove(start, len), Ok(Some(answer)));
    }
    assert_nothing_is_left(&fib);
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
        changes in prop::collection::vec((v4(), 8u8..=32, 0u32..5), 0..120),
        short in prop::collection::vec((v4(), 0u8..=20, 0u32..5), 0..4),
        probes in prop::collection::vec(v4(), 1..20),
    ) {
        let mut all = short.clone();
        all.extend(changes);
        all.extend(short.into_iter().map(|(a, l, _)| (a, l, 0)));
        compare(all, &probes);
    }

    #[test]
    fn ipv6_agrees_with_a_linear_scan(
        changes in prop::collection::vec((v6(), 16u8..=128, 0u32..5), 0..120),
        short in prop::collection::vec((v6(), 0u8..=24, 0u32..5), 0..4),
        probes in prop::collection::vec(v6(), 1..20),
    ) {
        let mut all = short.clone();
        all.extend(changes);
        all.extend(short.into_iter().map(|(a, l, _)| (a, l, 0)));
        compare(all, &probes);
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
fn invalid_prefixes_and_answers_are_refused() {
    let mut fib = Fib::<u32>::new();
    assert_eq!(fib.insert(0, 33, 1), Err(FibError::PrefixLength));
    assert_eq!(fib.remove(0, 33), Err(FibError::PrefixLength));
    assert_eq!(fib.insert(0, 8, 0), Err(FibError::Answer));
    assert_eq!(fib.insert(0, 8, MAX_ANSWER + 1), Err(FibError::Answer));
    assert!(fib.is_empty());
}

#[test]
fn nested_prefixes_with_one_address_are_distinguished_by_length() {
    let mut fib = Fib::<u32>::new();
    let reader = fib.reader();
    for len in 0..=32u8 {
        fib.insert(0x0a00_0000, len, u32::from(len) + 1).unwrap();
    }
    assert_eq!(reader.lookup(0x0a00_0000), 33);
    for len in (0..=32u8).rev() {
        assert_eq!(fib.remove(0x0a00_0000, len), Ok(Some(u32::from(len) + 1)));
        assert_eq!(reader.lookup(0x0a00_0000), u32::from(len));
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
    let reader = fib.reader();
    let mut seed = 1;
    for i in 0..500_000u32 {
        let r = random(&mut seed);
        // A fiftieth of the address space, so that prefixes overlap.
        let (address, len) = ((r as u32) / 50, 16 + (r >> 32) as u8 % 17);
        let answer = 1 + (r >> 48) as u32 % 1000;
        let start = address.block(len).0;
        assert_eq!(fib.insert(address, len, answer), Ok(model.insert((start, len), answer)));
        if i % 1000 == 0 {
            let found = (0..=32).rev().find_map(|l| model.get(&(address.block(l).0, l)));
            assert_eq!(reader.lookup(address), found.copied().unwrap_or(0));
        }
    }
    assert_eq!(fib.len(), model.len());
    let mut all: Vec<_> = model.into_iter().collect();
    while !all.is_empty() {
        let at = random(&mut seed) as usize % all.len();
        let ((start, len), answer) = all.swap_remove(at);
        assert_eq!(fib.remove(start, len), Ok(Some(answer)));
    }
    assert_nothing_is_left(&fib);
}

#[test]
fn readers_never_see_an_answer_that_was_never_installed() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut fib = Fib::<u32>::new();
    // Chunk n has two answers, computed from n and the half. Updates give it more or fewer prefixes
    // with the same two answers. A block of another chunk would give other answers.
    let answer = |chunk: u32, half: u32| 1 + (chunk * 2 + half) % MAX_ANSWER;
    for chunk in 0..64u32 {
        fib.insert(chunk << 14, 18, answer(chunk, 0)).unwrap();
        fib.insert(chunk << 14 | 1 << 13, 19, answer(chunk, 1)).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        for t in 0..2u64 {
            let (reader, stop) = (fib.reader(), &stop);
            s.spawn(move || {
                let mut seed = t;
                while !stop.load(Ordering::Relaxed) {
                    let r = random(&mut seed) as u32;
                    let (chunk, low) = (r % 64, r >> 18);
                    let got = reader.lookup(chunk << 14 | low);
                    let (own, other) = (low >> 13, 1 - (low >> 13));
                    assert!(got == answer(chunk, own) || got == answer(chunk, other));
                }
            });
        }
        let mut seed = 9;
        for _ in 0..30_000 {
            let r = random(&mut seed) as u32;
            let (chunk, low, len) = (r % 64, r >> 18, 20 + (r >> 8) as u8 % 13);
            let address = chunk << 14 | low;
            if r & 1 << 7 == 0 {
                fib.insert(address, len, answer(chunk, r >> 6 & 1)).unwrap();
            } else if let Some(last) = fib.chunks[chunk as usize].inner.last().copied()
                && last.len > 19
            {
                fib.remove(last.start, last.len).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
