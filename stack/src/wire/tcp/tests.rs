use super::*;
use crate::wire::testing::{needs_exactly, refuses_every_prefix};
use proptest::prelude::*;

fn sample() -> Header {
    Header {
        src_port: 0x0102,
        dst_port: 0x0304,
        seq: SeqNum(0x0506_0708),
        ack: SeqNum(0x090a_0b0c),
        flags: Flags::PSH | Flags::ACK,
        window: 0x0d0e,
        urgent: 0x0f10,
        options: Options::default(),
    }
}

const SAMPLE: [u8; 20] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x50, 0x18, 13, 14, 0, 0, 15, 16];

const TIMESTAMPS: Timestamps = Timestamps { value: 0x0102_0304, echo: 0x0506_0708 };

fn with(options: Options) -> Header {
    Header { options, ..sample() }
}

/// `count` blocks, all bytes different.
fn sack(count: u32) -> SackBlocks {
    let mut sack = SackBlocks::default();
    for i in 0..count {
        assert!(sack.push(SeqNum(0x1000_2000 + i), SeqNum(0x3000_4000 + i)));
    }
    sack
}

fn syn() -> Options {
    Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(TIMESTAMPS),
        ..Options::default()
    }
}

/// A Fast Open option; without bytes a request.
fn fast_open(value: &[u8], is_experimental: bool) -> Option<FastOpen> {
    Some(FastOpen { cookie: FastOpenCookie::new(value), is_experimental })
}

fn emitted(options: Options) -> Vec<u8> {
    let header = with(options);
    needs_exactly(header.header_bytes(), |b| header.emit(b))
}

#[test]
fn header_round_trips() {
    assert_eq!(Header::parse(&SAMPLE), Ok((sample(), 20)));
    assert_eq!(needs_exactly(20, |b| sample().emit(b)), SAMPLE);
    let mut summed = SAMPLE;
    summed[CHECKSUM_OFFSET..18].copy_from_slice(&[0xab, 0xcd]);
    assert_eq!(Header::parse(&summed), Ok((sample(), 20)));
}

#[test]
fn peek_agrees_with_parse() {
    let bytes = emitted(syn());
    let (header, n) = Header::parse(&bytes).expect("a header");
    assert_eq!(Header::peek(&bytes), Some((header.seq, header.flags, n)));
    assert_eq!(Header::peek(&bytes[..20]), Some((header.seq, header.flags, n)));
    assert_eq!(Header::peek(&bytes[..19]), None);
    let mut short = SAMPLE;
    short[12] = 0x40;
    assert_eq!(Header::peek(&short), None);
}

#[test]
fn options_of_a_syn_are_aligned_to_words() {
    #[rustfmt::skip]
    let expected = [
        2, 4, 0x05, 0xb4,
        4, 2, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8,
        1, 3, 3, 7,
    ];
    let bytes = emitted(syn());
    assert_eq!((bytes[12], &bytes[20..]), (0xa0, &expected[..]));
    assert_eq!(Header::parse(&bytes), Ok((with(syn()), 40)));
    let bytes = emitted(Options { timestamps: None, ..syn() });
    assert_eq!(bytes[20..], [2, 4, 0x05, 0xb4, 1, 1, 4, 2, 1, 3, 3, 7]);
}

#[test]
fn timestamps_alone_have_the_layout_of_rfc_7323_appendix_a() {
    let options = Options { timestamps: Some(TIMESTAMPS), ..Options::default() };
    let bytes = emitted(options);
    assert_eq!(bytes[20..], [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(Header::parse(&bytes), Ok((with(options), 32)));
}

#[test]
fn sack_blocks_follow_the_timestamps() {
    let options = Options { timestamps: Some(TIMESTAMPS), sack: sack(1), ..Options::default() };
    let bytes = emitted(options);
    assert_eq!(bytes[32..], [1, 1, 5, 10, 0x10, 0, 0x20, 0, 0x30, 0, 0x40, 0]);
    assert_eq!(Header::parse(&bytes), Ok((with(options), 44)));
}

#[test]
fn sack_blocks_that_do_not_fit_are_omitted_from_the_end() {
    for (options, fit) in [
        (Options::default(), 4),
        (Options { timestamps: Some(TIMESTAMPS), ..Options::default() }, 3),
        (syn(), 2),
        (Options { fast_open: fast_open(&[0; 16], false), ..syn() }, 0),
    ] {
        let given = Options { sack: sack(4), ..options };
        let (parsed, header_bytes) = Header::parse(&emitted(given)).unwrap();
        assert_eq!(parsed.options, Options { sack: sack(fit), ..options });
        assert!(header_bytes <= MAX_HEADER_BYTES);
    }
}

#[test]
fn fast_open_options_are_padded_to_words_and_come_last() {
    let cookie: Vec<u8> = (1..=16).collect();
    for (value, is_experimental, expected) in [
        (&[][..], false, vec![34, 2, 1, 1]),
        (&[7, 8, 9, 10], false, vec![34, 6, 7, 8, 9, 10, 1, 1]),
        (&[7, 8, 9, 10, 11, 12], false, vec![34, 8, 7, 8, 9, 10, 11, 12]),
        (&[], true, vec![254, 4, 0xf9, 0x89]),
        (&[7, 8, 9, 10], true, vec![254, 8, 0xf9, 0x89, 7, 8, 9, 10]),
        (&cookie, false, [&[34, 18], &cookie[..], &[1, 1]].concat()),
        (&cookie, true, [&[254, 20, 0xf9, 0x89], &cookie[..]].concat()),
    ] {
        let options = Options { fast_open: fast_open(value, is_experimental), ..syn() };
        let bytes = emitted(options);
        assert_eq!(bytes[40..], expected);
        assert_eq!(Header::parse(&bytes), Ok((with(options), bytes.len())));
        assert!(bytes.len() <= MAX_HEADER_BYTES);
    }
}

#[test]
fn fast_open_cookies_of_other_lengths_are_ignored() {
    for bytes in 1..=38u8 {
        let is_valid = bytes % 2 == 0 && (4..=16).contains(&bytes);
        let mut options = vec![34, bytes + 2];
        options.resize(usize::from(bytes) + 2, 5);
        assert_eq!(Options::parse(&options).unwrap().fast_open.is_some(), is_valid, "{bytes}");
        assert_eq!(FastOpenCookie::new(&options[2..]).is_some(), is_valid);
    }
    let other_experiment = [254, 8, 0xf9, 0x88, 1, 2, 3, 4];
    assert_eq!(Options::parse(&other_experiment), Ok(Options::default()));
    assert_eq!(Options::parse(&[254, 2, 254, 3, 0xf9]), Ok(Options::default()));
}

#[test]
fn a_fifth_sack_block_is_rejected() {
    let mut blocks = sack(4);
    assert!(!blocks.push(SeqNum(1), SeqNum(2)));
    assert_eq!((blocks, blocks.len(), blocks.is_empty()), (sack(4), 4, false));
    assert_eq!(sack(2).iter().nth(1), Some((SeqNum(0x1000_2001), SeqNum(0x3000_4001))));
    assert!(SackBlocks::default().is_empty());
}

#[test]
fn truncated_header_is_rejected() {
    refuses_every_prefix(&SAMPLE, Header::parse);
    refuses_every_prefix(&emitted(syn()), Header::parse);
    refuses_every_prefix(&emitted(Options { sack: sack(4), ..Options::default() }), Header::parse);
}

#[test]
fn data_offset_below_five_is_malformed() {
    for words in 0..5 {
        let mut bytes = SAMPLE;
        bytes[12] = words << 4;
        assert_eq!(Header::parse(&bytes), Err(WireError::Malformed));
    }
}

#[test]
fn payload_is_not_read() {
    let bytes = [&SAMPLE[..], &[2, 4, 5, 0xb4]].concat();
    assert_eq!(Header::parse(&bytes), Ok((sample(), 20)));
}

#[test]
fn options_end_at_the_end_of_option_list() {
    assert_eq!(Options::parse(&[0, 2, 4, 5]), Ok(Options::default()));
    let options = Options::parse(&[3, 3, 9, 0]);
    assert_eq!(options, Ok(Options { window_scale: Some(9), ..Options::default() }));
}

#[test]
fn options_need_no_padding_or_order() {
    let bytes = [8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 3, 3, 7, 4, 2, 2, 4, 0x05, 0xb4, 1];
    assert_eq!(Options::parse(&bytes), Ok(syn()));
}

#[test]
fn unknown_options_are_skipped() {
    let signature = [[19, 18].as_slice(), &[0xee; 16], &[1, 1]].concat();
    assert_eq!(Options::parse(&signature), Ok(Options::default()));
    let bytes = [254, 2, 2, 4, 0x05, 0xb4, 30, 3, 0, 1, 1, 1];
    assert_eq!(Options::parse(&bytes), Ok(Options { mss: Some(1460), ..Options::default() }));
}

#[test]
fn known_options_of_a_wrong_length_are_skipped() {
    for bytes in [
        &[2, 3, 9, 1][..],
        &[2, 5, 9, 9, 9, 1, 1, 1],
        &[3, 2, 1, 1],
        &[3, 4, 9, 9],
        &[4, 3, 9, 1],
        &[8, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1],
        &[5, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1],
        &[5, 2, 1, 1],
        &[5, 11, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1],
    ] {
        assert_eq!(Options::parse(bytes), Ok(Options::default()), "{bytes:?}");
    }
}

#[test]
fn an_option_with_an_invalid_length_is_malformed() {
    for bytes in [
        &[2, 0, 5, 0xb4][..],
        &[2, 1, 5, 0xb4],
        &[1, 1, 1, 2],
        &[1, 1, 2, 4],
        &[1, 1, 1, 254],
        &[254, 5, 0, 0],
        &[1, 1, 8, 11, 1, 2, 3, 4, 5, 6, 7, 8],
        &[1, 1, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ] {
        assert_eq!(Options::parse(bytes), Err(WireError::Malformed), "{bytes:?}");
    }
}

#[test]
fn the_last_of_repeated_options_is_used() {
    let options = Options::parse(&[2, 4, 0, 1, 2, 4, 0, 2]).unwrap();
    assert_eq!(options.mss, Some(2));
    let twice = [&[5, 10][..], &[9; 8], &[5, 10], &[1; 8]].concat();
    let mut last = SackBlocks::default();
    last.push(SeqNum(0x0101_0101), SeqNum(0x0101_0101));
    assert_eq!(Options::parse(&twice).unwrap().sack, last);
}

#[test]
fn window_scale_above_14_is_not_limited_by_parse() {
    assert_eq!(Options::parse(&[3, 3, 255, 1]).unwrap().window_scale, Some(255));
}

#[test]
fn flags_are_displayed_as_letters() {
    let text = |f: Flags| format!("{f} {f:?}");
    assert_eq!(text(Flags::SYN | Flags::ACK), "SA SA");
    assert_eq!(text(Flags::FIN | Flags::PSH | Flags::ACK), "FPA FPA");
    assert_eq!(text(Flags(0x1ff)), "SFRPAUECe SFRPAUECe");
    assert_eq!(text(Flags::default()), "- -");
}

#[test]
fn flags_are_sets() {
    let mut flags = Flags::SYN;
    flags |= Flags::ACK;
    assert!(flags.contains(Flags::SYN) && flags.contains(Flags::SYN | Flags::ACK));
    assert!(!flags.contains(Flags::SYN | Flags::FIN) && flags.intersects(Flags::SYN | Flags::FIN));
    assert!(!flags.intersects(Flags::FIN | Flags::RST));
    assert_eq!(flags.without(Flags::SYN), Flags::ACK);
}

#[test]
fn the_field_ace_is_three_flags_across_two_octets() {
    for ace in 0..8u8 {
        let flags = Flags::ACK | Flags::of_ace(ace);
        assert_eq!((flags.ace(), flags.without(Flags::ECN)), (ace, Flags::ACK));
        let mut out = [0; HEADER_BYTES];
        Header { flags, ..Header::default() }.emit(&mut out).unwrap();
        assert_eq!((out[12], out[13]), (0x50 | ace >> 2, (ace & 3) << 6 | 0x10));
        assert_eq!(Header::parse(&out).unwrap().0.flags, flags);
        assert_eq!(Header::peek(&out).unwrap().1, flags);
    }
    assert_eq!(Flags::of_ace(5), Flags::AE | Flags::ECE);
    assert_eq!(Flags::of_ace(13), Flags::of_ace(5));
}

#[test]
fn accecn_counters_follow_sack_blocks_and_take_what_they_leave() {
    let ecn = Some(EcnCounters::full(EcnOrder::Ect0First, 0x0403_0201, 0x05, 0x0100_0001));
    let base = Options { timestamps: Some(TIMESTAMPS), ecn, ..Options::default() };
    let full = [172, 11, 3, 2, 1, 0, 0, 5, 0, 0, 1, 1];
    assert_eq!(emitted(base)[32..], full);
    let seen = Options::parse(&emitted(base)[20..]).unwrap().ecn.unwrap();
    assert_eq!((seen.ect0(), seen.ce(), seen.ect1()), (Some(0x03_0201), Some(5), Some(1)));
    // One block leaves 16 bytes, two leave 8, three leave none.
    assert_eq!(emitted(Options { sack: sack(1), ..base })[44..], full);
    assert_eq!(emitted(Options { sack: sack(2), ..base })[52..], [172, 8, 3, 2, 1, 0, 0, 5]);
    assert_eq!(emitted(Options { sack: sack(3), ..base }).len(), 60);
    assert!(!Options { sack: sack(3), ..base }.sends_ecn());
    assert_eq!(emitted(Options { ecn, ..syn() })[40..], full);
}

#[test]
fn accecn_options_of_any_length_give_their_whole_counters() {
    let bytes = [1u8, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
    for len in 0..=bytes.len() {
        for (kind, order) in [(172, EcnOrder::Ect0First), (174, EcnOrder::Ect1First)] {
            let option = [&[kind, len as u8 + 2][..], &bytes[..len]].concat();
            let ecn = Options::parse(&option).unwrap().ecn.unwrap();
            let [first, last] = match order {
                EcnOrder::Ect0First => [ecn.ect0(), ecn.ect1()],
                EcnOrder::Ect1First => [ecn.ect1(), ecn.ect0()],
            };
            assert_eq!(ecn.order, order);
            assert_eq!(first, (len >= 3).then_some(0x01_0203), "{len}");
            assert_eq!(ecn.ce(), (len >= 6).then_some(0x04_0506), "{len}");
            assert_eq!(last, (len >= 9).then_some(0x07_0809), "{len}");
        }
    }
    assert_eq!(Options::parse(&[172, 1]), Err(WireError::Malformed));
    assert_eq!(Options::parse(&[172, 5, 0]), Err(WireError::Malformed));
}

fn any_sack() -> impl Strategy<Value = SackBlocks> {
    proptest::collection::vec(any::<(u32, u32)>(), 0..=4).prop_map(|blocks| {
        let mut sack = SackBlocks::default();
        blocks.into_iter().for_each(|(l, r)| {
            sack.push(SeqNum(l), SeqNum(r));
        });
        sack
    })
}

prop_compose! {
    fn any_options()(
        mss: Option<u16>,
        window_scale: Option<u8>,
        sack_permitted: bool,
        timestamps: Option<(u32, u32)>,
        sack in any_sack(),
        fast_open in proptest::option::of((0usize..=8, any::<u8>(), any::<bool>())),
        counters: Option<(bool, u32, u32, u32)>,
    ) -> Options {
        let timestamps = timestamps.map(|(value, echo)| Timestamps { value, echo });
        let fast_open = fast_open.map(|(pairs, byte, is_experimental)| FastOpen {
            cookie: FastOpenCookie::new(&vec![byte; 2 * pairs]),
            is_experimental,
        });
        let ecn = counters.map(|(first, a, b, c)| {
            let order = if first { EcnOrder::Ect0First } else { EcnOrder::Ect1First };
            EcnCounters::full(order, a, b, c)
        });
        Options { mss, window_scale, sack_permitted, timestamps, sack, fast_open, ecn }
    }
}

proptest! {
    #[test]
    fn any_header_round_trips_except_for_omitted_sack_blocks(
        ports: (u16, u16),
        numbers: (u32, u32),
        flags in 0u16..0x200,
        rest: (u16, u16),
        options in any_options(),
    ) {
        let header = Header {
            src_port: ports.0,
            dst_port: ports.1,
            seq: SeqNum(numbers.0),
            ack: SeqNum(numbers.1),
            flags: Flags(flags),
            window: rest.0,
            urgent: rest.1,
            options,
        };
        let mut out = [0xee; MAX_HEADER_BYTES];
        let header_bytes = header.emit(&mut out).unwrap();
        prop_assert_eq!(header_bytes, header.header_bytes());
        prop_assert_eq!(header_bytes % 4, 0);
        let (parsed, parsed_bytes) = Header::parse(&out).unwrap();
        prop_assert_eq!(parsed_bytes, header_bytes);
        let sent = parsed.options.sack.len();
        prop_assert!(parsed.options.sack.iter().eq(options.sack.iter().take(sent)));
        // One more block would not have fitted.
        let sack_lead = if sent == 0 { 4 } else { 0 };
        let full = header_bytes + sack_lead + 8 > MAX_HEADER_BYTES;
        prop_assert!(sent == options.sack.len() || full);
        let sack = parsed.options.sack;
        let ecn = parsed.options.ecn;
        let counters = |o: &Options| o.ecn.and_then(|e| Some((e.order, e.ce()?)));
        prop_assert_eq!(ecn.is_some(), options.sends_ecn());
        prop_assert!(ecn.is_none() || counters(&parsed.options) == counters(&options));
        prop_assert!(ecn.is_some() || options.ecn.is_none() || header_bytes > MAX_HEADER_BYTES - 8);
        prop_assert_eq!(parsed, Header { options: Options { sack, ecn, ..options }, ..header });
    }

    /// The fast path for timestamps agrees with the general parser.
    #[test]
    fn the_fast_path_for_timestamps_agrees_with_the_general_parser(mut bytes: [u8; 12], usual: bool) {
        if usual {
            bytes[..4].copy_from_slice(&[1, 1, 8, 10]);
        }
        prop_assert_eq!(Options::parse(&bytes), Options::parse_each(&bytes));
    }

    #[test]
    fn sack_blocks_are_a_list_of_four(blocks: Vec<(u32, u32)>) {
        let blocks: Vec<_> = blocks.into_iter().map(|(l, r)| (SeqNum(l), SeqNum(r))).collect();
        let mut sack = SackBlocks::default();
        for (i, block) in blocks.iter().enumerate() {
            prop_assert_eq!(sack.push(block.0, block.1), i < 4);
        }
        prop_assert!(sack.iter().eq(blocks.iter().copied().take(4)));
        prop_assert_eq!(sack.len(), blocks.len().min(4));
        prop_assert_eq!(sack.is_empty(), blocks.is_empty());
    }
}
