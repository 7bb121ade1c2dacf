//! No input makes a parser panic, and the lengths and offsets that it returns are inside the input.

use fulmar_stack::wire::{arp, eth, icmpv4, icmpv6, ipv4, ipv6, tcp, udp, virtio_net};
use proptest::prelude::*;

/// Passes the bytes to every parser of the crate.
fn parse_all(bytes: &[u8], packet_bytes: usize) {
    let _ = (eth::Header::parse(bytes), arp::Packet::parse(bytes));
    let _ = (udp::Header::parse(bytes), virtio_net::Header::parse(bytes));
    let _ = icmpv4::Message::parse(bytes);
    if let Ok(message) = icmpv6::Message::parse(bytes) {
        assert!(message.header_bytes() <= bytes.len());
    }
    assert!(icmpv6::ndp_options(bytes).count() <= bytes.len() / 8 + 1);
    parse_ipv4(bytes, packet_bytes);
    parse_ipv6(bytes, packet_bytes);
    parse_tcp(bytes);
}

fn parse_ipv4(bytes: &[u8], packet_bytes: usize) {
    if let Ok(header) = ipv4::Header::parse(bytes, packet_bytes) {
        assert!(header.header_bytes <= bytes.len().min(header.total_bytes));
        assert!(header.total_bytes <= packet_bytes);
        assert_eq!(header.payload_bytes() + header.header_bytes, header.total_bytes);
        ipv4::checksum_ok(bytes, header.header_bytes);
    }
    ipv4::checksum_ok(bytes, packet_bytes);
}

fn parse_ipv6(bytes: &[u8], packet_bytes: usize) {
    if let Ok(header) = ipv6::Header::parse(bytes, packet_bytes) {
        assert!(header.payload_bytes + ipv6::HEADER_BYTES <= packet_bytes);
        if let Ok(upper) = ipv6::walk_extensions(bytes, &header) {
            assert!(upper.offset <= bytes.len() && upper.offset <= packet_bytes);
        }
    }
}

fn parse_tcp(bytes: &[u8]) {
    if let Ok((header, header_bytes)) = tcp::Header::parse(bytes) {
        assert!((20..=60).contains(&header_bytes) && header_bytes <= bytes.len());
        // A representation that was read can be written, and reads the same again: repeated
        // options became one, so it is never longer than a header may be.
        let mut out = [0; tcp::MAX_HEADER_BYTES];
        let written_bytes = header.emit(&mut out).expect("60 bytes are enough");
        let (again, again_bytes) = tcp::Header::parse(&out).expect("what is written can be read");
        assert_eq!(again_bytes, written_bytes);
        assert_eq!(again.options.timestamps, header.options.timestamps);
        assert_eq!(again.options.mss, header.options.mss);
    }
}

/// Headers that are right, to be damaged.
fn good_packets() -> Vec<Vec<u8>> {
    let v4 = "4500 003c 0001 4000 4006 0000 0a00 0001 0a00 0002";
    let tcp = "1234 0050 0000 0001 0000 0002 a010 ffff 0000 0000 \
               0204 05b4 0402 080a 0000 0001 0000 0002 0103 0307";
    let sack = "1234 0050 0000 0001 0000 0002 b010 ffff 0000 0000 \
                0101 0512 0000 0001 0000 0002 0000 0003 0000 0004 0101 0000";
    let v6 = "6000 0000 0028 0040 fe80 0000 0000 0000 0000 0000 0000 0001 \
              fe80 0000 0000 0000 0000 0000 0000 0002 \
              2b00 0104 0000 0000 2c00 0000 0000 0000 3c00 0001 0000 0007 1100 0502 0000 0000 \
              0035 0035 0008 0000";
    let advertisement = "8800 0000 6000 0000 fe80 0000 0000 0000 0000 0000 0000 0001 \
                         0201 0203 0405 0607 0304 4080 0000 0001 0000 0002 0000 0000 \
                         2001 0db8 0000 0000 0000 0000 0000 0000";
    let arp = "0001 0800 0604 0001 0200 0000 0001 0a00 0001 0000 0000 0000 0a00 0002";
    [v4, tcp, sack, v6, advertisement, arp].into_iter().map(unhex).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[test]
fn valid_packets_are_accepted() {
    let p = good_packets();
    assert!(ipv4::Header::parse(&p[0], 60).is_ok());
    assert!(tcp::Header::parse(&p[1]).is_ok_and(|(h, _)| h.options.window_scale == Some(7)));
    assert!(tcp::Header::parse(&p[2]).is_ok_and(|(h, _)| h.options.sack.len() == 2));
    let v6 = ipv6::Header::parse(&p[3], p[3].len()).expect("a good header");
    let upper = ipv6::walk_extensions(&p[3], &v6).expect("good extension headers");
    assert_eq!((upper.protocol, upper.offset), (17, 72));
    assert!(icmpv6::Message::parse(&p[4]).is_ok());
    assert_eq!(icmpv6::ndp_options(&p[4][24..]).filter(|o| o.is_ok()).count(), 2);
    assert!(arp::Packet::parse(&p[5]).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_do_not_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        packet_bytes in prop_oneof![0..300usize, Just(usize::MAX)],
    ) {
        parse_all(&bytes, packet_bytes);
    }

    #[test]
    fn corrupted_packets_do_not_panic(
        which in 0..6usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        kept in any::<prop::sample::Index>(),
        cut: bool,
    ) {
        let mut bytes = good_packets().swap_remove(which);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut {
            bytes.truncate(kept.index(bytes.len() + 1));
        }
        parse_all(&bytes, bytes.len());
        parse_all(&bytes, usize::MAX);
    }
}
