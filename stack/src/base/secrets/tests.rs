use super::*;
use std::collections::BTreeSet;

/// The key material of all uses, as 32-bit words.
fn material(secrets: &Secrets) -> Vec<u32> {
    KeyUse::ALL.iter().flat_map(|u| secrets.block(*u, 0)).collect()
}

#[test]
fn uses_shards_and_stacks_have_no_key_material_in_common() {
    let stack = Secrets::from_entropy(std::array::from_fn(|n| n as u8));
    let other = Secrets::from_entropy(std::array::from_fn(|n| if n == 31 { 0 } else { n as u8 }));
    let secrets = [stack.clone(), stack.for_shard(0), stack.for_shard(1), other];
    let words: Vec<u32> = secrets.iter().flat_map(material).collect();
    // The birthday bound of this many 32-bit words is one collision in some 10,000 keys; this key is fixed.
    assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len());
}

#[test]
fn the_key_and_the_generator_of_a_use_have_no_word_in_common() {
    let secrets = Secrets::for_simulation(1);
    for u in KeyUse::ALL {
        let block = secrets.block(*u, 0);
        let (of_key, of_generator) = block.split_at(8);
        let words = secrets.key(*u).halves().into_iter().flat_map(|k| [k as u32, (k >> 32) as u32]);
        assert!(words.into_iter().all(|word| of_key.contains(&word)), "{}", u.name());
        let (mut expected, mut random) =
            (Random::new(of_generator.try_into().unwrap()), secrets.random(*u));
        assert!((0..112).all(|_| random.number() == expected.number()), "{}", u.name());
        assert_eq!(format!("{random:?}"), "Random(secret)");
    }
}

#[test]
fn every_bit_of_entropy_changes_the_keys() {
    let keys: BTreeSet<[u64; 2]> = (0..256)
        .map(|bit| {
            let mut entropy = [0; 32];
            entropy[bit / 8] = 1 << (bit % 8);
            Secrets::from_entropy(entropy).key(KeyUse::InitialSequence).halves()
        })
        .collect();
    assert_eq!(keys.len(), 256);
}

#[test]
fn shards_of_a_stack_share_the_keys_of_owners_and_fast_open_cookies_and_no_other() {
    let stack = Secrets::for_simulation(5);
    let [a, b] = [stack.for_shard(0), stack.for_shard(1)];
    assert_eq!(a.owner(), b.owner());
    assert_eq!(a.owner(), stack.owner());
    let cookies = |s: &Secrets, period| s.fast_open(period).halves();
    assert_eq!(cookies(&a, 7), cookies(&b, 7));
    assert_ne!(cookies(&a, 7), cookies(&a, 8));
    assert_ne!(cookies(&a, 0), a.key(KeyUse::FastOpenCookie).halves());
    for u in KeyUse::ALL {
        assert_ne!(a.key(*u).halves(), b.key(*u).halves(), "{}", u.name());
    }
}

#[test]
fn secrets_are_not_printed() {
    let secrets = Secrets::for_simulation(0x1234_5678);
    let printed = format!("{secrets:?} {:?} {:?}", secrets.key(KeyUse::SynCookie), secrets.owner());
    assert_eq!(printed, "Secrets(secret) Key(secret) OwnerKey(secret)");
}

#[test]
fn the_documentation_has_a_row_for_each_use() {
    let page = include_str!("../../../../docs/secrets.md");
    for u in KeyUse::ALL {
        let name = format!("`{}`", u.name());
        let has_row = page.lines().any(|l| l.starts_with('|') && l.contains(&name));
        assert!(has_row, "docs/secrets.md has no row for {name}");
    }
}

#[test]
fn the_hash_of_words_is_siphash_2_4_of_their_little_endian_bytes() {
    // Key 00 01 .. 0f; the inputs of 0 and 8 bytes 00 01 .. (`vectors.h` of the reference code).
    let key = Key::new(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
    assert_eq!(key.hash(&[]), 0x726f_db47_dd0e_0e31);
    assert_eq!(key.hash(&[0x0706_0504_0302_0100]), 0x93f5_f579_9a93_2462);
}
