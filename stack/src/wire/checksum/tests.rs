use super::*;
use proptest::prelude::*;

/// The definition in RFC 1071 section 1.
fn model(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Bytes that produce many carries: half of them 0xff.
fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xff)], 0..most)
}

#[test]
fn the_example_of_rfc_1071_section_3_has_its_published_sum() {
    let words = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    let mut sum = Sum::new();
    sum.add_bytes(&words);
    assert_eq!((sum.fold(), sum.finish()), (0xddf2, 0x220d));
    assert_eq!(checksum(&words), 0x220d);
}

#[test]
fn the_sum_of_no_bytes_is_zero() {
    assert_eq!((Sum::new().fold(), Sum::new().finish()), (0, 0xffff));
    assert_eq!(checksum(&[]), 0xffff);
    assert_eq!(checksum(&[0; 77]), 0xffff);
}

#[test]
fn carries_of_all_ones_are_not_lost() {
    for len in 0..200 {
        assert_eq!(!checksum(&vec![0xff; len]), model(&vec![0xff; len]), "{len} bytes");
    }
    assert_eq!(!checksum(&vec![0xff; 1 << 20]), 0xffff);
}

#[test]
fn udp_checksum_is_never_zero() {
    let mut sum = Sum::new();
    sum.add_u16(0xffff);
    assert_eq!((sum.finish(), sum.finish_udp()), (0, 0xffff));
    sum.add_u16(1);
    assert_eq!((sum.finish(), sum.finish_udp()), (0xfffe, 0xfffe));
}

#[test]
fn pseudo_headers_are_those_of_the_rfcs() {
    // RFC 9293 section 3.1: source, destination, zero, protocol, length.
    let v4 = [10, 0, 0, 1, 10, 0, 0, 2, 0, 6, 0x01, 0x02];
    let mut sum = Sum::new();
    sum.add_pseudo([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, 0x0102);
    assert_eq!(sum.fold(), model(&v4));
    // RFC 8200 section 8.1: source, destination, length in 32 bits, three zeros, next header.
    let (src, dst) = ([0xfe80, 0, 0, 0, 1, 2, 3, 4], [0x2001, 0xdb8, 0, 0, 0xffff, 0, 0, 0xfffe]);
    let (src, dst) = (core::net::Ipv6Addr::from(src), core::net::Ipv6Addr::from(dst));
    let rest = [0x00, 0x01, 0x02, 0x03, 0, 0, 0, 58];
    let v6 = [&src.octets()[..], &dst.octets(), &rest].concat();
    let mut sum = Sum::new();
    sum.add_pseudo(src.into(), dst.into(), 58, 0x0001_0203);
    assert_eq!(sum.fold(), model(&v6));
}

#[test]
fn the_sum_of_words_agrees_with_the_sum_of_their_bytes() {
    let words = [0x4500_05dc, 0x0007_4000, 0x4006_0000, 0x0a00_0001, 0xffff_ffff];
    let bytes: Vec<u8> = words.iter().flat_map(|w: &u32| w.to_be_bytes()).collect();
    assert_eq!(of_words(&words), checksum(&bytes));
}

#[test]
fn added_agrees_with_the_sum_of_the_bytes() {
    for numbers in
        [[0, 0, 0], [0xffff, 0xffff, 0xffff], [1, 0xfffe, 0], [0x8000, 0x8000, 1], [7, 0, 0]]
    {
        let mut sum = Sum::new();
        numbers.iter().for_each(|n| sum.add_u16(*n));
        assert_eq!(added(numbers), sum.fold(), "{numbers:x?}");
    }
}

proptest! {
    #[test]
    fn the_sum_of_any_bytes_agrees_with_the_model(bytes in bytes(600)) {
        prop_assert_eq!(!checksum(&bytes), model(&bytes));
    }

    #[test]
    fn the_sum_is_independent_of_the_division_into_parts(pieces in proptest::collection::vec(bytes(80), 0..12)) {
        let mut sum = Sum::new();
        for piece in &pieces {
            sum.add_bytes(piece);
        }
        prop_assert_eq!(sum.fold(), model(&pieces.concat()));
    }

    #[test]
    fn add_u16_agrees_with_two_bytes_at_any_offset(before in bytes(9), word: u16, after in bytes(9)) {
        let mut sum = Sum::new();
        sum.add_bytes(&before);
        sum.add_u16(word);
        sum.add_bytes(&after);
        let whole = [&before[..], &word.to_be_bytes(), &after].concat();
        prop_assert_eq!(sum.fold(), model(&whole));
    }

    #[test]
    fn append_agrees_with_the_sum_of_concatenated_bytes(a in bytes(70), b in bytes(70), c in bytes(70)) {
        let mut tail = Sum::new();
        tail.add_bytes(&b);
        tail.add_bytes(&c);
        let mut sum = Sum::new();
        sum.add_bytes(&a);
        sum.append(tail);
        prop_assert_eq!(sum.fold(), model(&[&a[..], &b, &c].concat()));
    }

    #[test]
    fn the_pseudo_header_may_be_added_at_any_time(a in bytes(9), b in bytes(9), src: u32, dst: u32) {
        let add_pseudo = |sum: &mut Sum| {
            let (src, dst) = (core::net::Ipv4Addr::from(src), core::net::Ipv4Addr::from(dst));
            sum.add_pseudo(src.into(), dst.into(), 17, 18);
        };
        let [mut first, mut between] = [Sum::new(); 2];
        add_pseudo(&mut first);
        first.add_bytes(&a);
        first.add_bytes(&b);
        between.add_bytes(&a);
        add_pseudo(&mut between);
        between.add_bytes(&b);
        prop_assert_eq!(first.fold(), between.fold());
    }

    #[test]
    fn a_sum_without_a_part_is_the_sum_of_the_rest(
        all in bytes(UNIT_BYTES * 2), cut in any::<(usize, usize)>(), odd_start: bool,
    ) {
        let (a, b) = (cut.0 % (all.len() + 1), cut.1 % (all.len() + 1));
        let (front, back) = (a.min(b), a.max(b));
        let sum_of = |bytes: &[u8]| {
            let mut sum = Sum::new();
            sum.add_bytes(bytes);
            sum
        };
        let left = sum_of(&all)
            .without_back(sum_of(&all[back..]))
            .without_front(sum_of(&all[..front]));
        // Surrounded by non-zero words, like headers: zero has two representations.
        let mut got = Sum::new();
        got.add_bytes(if odd_start { &[1, 2, 3] } else { &[1, 2] });
        let mut want = got;
        got.append(left);
        got.add_bytes(&[9]);
        want.add_bytes(&all[front..back]);
        want.add_bytes(&[9]);
        prop_assert_eq!(got.fold(), want.fold());
    }

    #[test]
    fn copy_and_sum_units_copies_whole_units_with_their_sums(
        src in bytes(UNIT_BYTES * 5), room in 0..UNIT_BYTES * 5, entries in 0usize..5,
    ) {
        let mut dst = vec![0xa5; room];
        let mut sums = vec![None; entries];
        copy_and_sum_units(&mut dst, &src, &mut sums);
        let units = (src.len() / UNIT_BYTES).min(room / UNIT_BYTES).min(entries);
        for (i, sum) in sums.iter().enumerate() {
            prop_assert_eq!(sum.is_some(), i < units);
            let Some(sum) = sum else { continue };
            let at = i * UNIT_BYTES;
            let folded = Sum::from(*sum).fold();
            let right = model(&src[at..][..UNIT_BYTES]);
            prop_assert!(folded == right || (right, folded) == (0, 0xffff));
        }
        prop_assert_eq!(&dst[..units * UNIT_BYTES], &src[..units * UNIT_BYTES]);
        prop_assert!(dst[units * UNIT_BYTES..].iter().all(|b| *b == 0xa5));
    }

    #[test]
    fn a_correct_checksum_validates_and_a_flipped_bit_does_not(
        mut bytes in proptest::collection::vec(any::<u8>(), 2..100),
        bit: prop::sample::Index,
    ) {
        bytes[0..2].copy_from_slice(&[0, 0]);
        let right = checksum(&bytes);
        bytes[0..2].copy_from_slice(&right.to_be_bytes());
        let valid = |bytes: &[u8]| {
            let mut sum = Sum::new();
            sum.add_bytes(bytes);
            sum.is_valid()
        };
        prop_assert!(valid(&bytes));
        let bit = bit.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!valid(&bytes));
    }
}
