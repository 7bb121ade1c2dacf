//! Header lists of HPACK.

use super::fixtures::bytes;
use crate::first::hpack::Decoder;
use crate::first::{Reason, Refusal};
use proptest::prelude::*;

type Fields = Vec<(String, String)>;

fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Fields, Refusal> {
    let mut fields = Vec::new();
    decoder.decode(block, |name, value| {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        fields.push((text(name), text(value)));
        Ok(())
    })?;
    Ok(fields)
}

fn fields(of: &[(&str, &str)]) -> Fields {
    of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn the_requests_of_the_appendix_are_decoded() {
    // RFC 7541 appendix C.3 and C.4: the same, plain and in the Huffman code.
    let plain = [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ];
    let huffman = [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ];
    let host = (":authority", "www.example.com");
    let expected = [
        fields(&[(":method", "GET"), (":scheme", "http"), (":path", "/"), host]),
        fields(&[
            (":method", "GET"),
            (":scheme", "http"),
            (":path", "/"),
            host,
            ("cache-control", "no-cache"),
        ]),
        fields(&[
            (":method", "GET"),
            (":scheme", "https"),
            (":path", "/index.html"),
            host,
            ("custom-key", "custom-value"),
        ]),
    ];
    for blocks in [plain, huffman] {
        let mut decoder = Decoder::new();
        for (block, expected) in blocks.iter().zip(&expected) {
            assert_eq!(decode(&mut decoder, &bytes(block)).as_ref(), Ok(expected));
        }
    }
}

#[test]
fn blocks_that_are_cut_off_are_refused() {
    let block = bytes("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf");
    let mut decoder = Decoder::new();
    decode(&mut decoder, &bytes("828684418cf1e3c2e5f23a6ba0ab90f4ff")).unwrap();
    for cut in [5, 6, 10, 14, 15, block.len() - 1] {
        let mut fresh = Decoder::new();
        decode(&mut fresh, &bytes("828684418cf1e3c2e5f23a6ba0ab90f4ff")).unwrap();
        assert!(decode(&mut fresh, &block[..cut]).is_err(), "{cut} bytes");
    }
    for wrong in
        ["80", "ff", "be", "ffffffffff7f", "3f", "3fff", "3fffffff7f", "7f", "40", "00", "0081"]
    {
        assert!(decode(&mut Decoder::new(), &bytes(wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn the_table_is_the_one_of_its_size() {
    let entry = |n: u8| vec![0x40, 1, b'a' + n, 1, b'0' + n];
    let mut decoder = Decoder::new();
    // Two entries of 34 bytes fit into 70.
    decode(&mut decoder, &[0x3f, 39]).unwrap();
    for n in 0..3 {
        decode(&mut decoder, &entry(n)).unwrap();
    }
    assert_eq!(decode(&mut decoder, &[0xbe, 0xbf]), Ok(fields(&[("c", "2"), ("b", "1")])));
    assert!(decode(&mut decoder, &[0xc0]).is_err());
    // An entry of 71 bytes empties the table.
    let large = [&[0x40, 1, b'x', 38][..], &[b'y'; 38]].concat();
    decode(&mut decoder, &large).unwrap();
    assert!(decode(&mut decoder, &[0xbe]).is_err());
}

#[test]
fn size_updates_stand_at_the_begin_and_are_bounded() {
    let of = |block: &[u8]| decode(&mut Decoder::new(), block).map_err(|r| r.reason);
    assert_eq!(of(&[0x20, 0x3f, 0xe1, 0x1f, 0x82]), Ok(fields(&[(":method", "GET")])));
    assert_eq!(of(&[0x82, 0x20]), Err(Reason::Http2Unreadable));
    assert_eq!(of(&[0x20, 0x20, 0x20]), Err(Reason::Http2Unreadable));
    assert_eq!(of(&[0x3f, 0xe1, 0xff, 0x03]), Ok(vec![]));
    assert_eq!(of(&[0x3f, 0xe2, 0xff, 0x03]), Err(Reason::Http2Unreadable));
}

/// A field and how it is encoded.
fn any_field() -> impl Strategy<Value = (String, String, u8)> {
    let flags = (0..4_u8, 0..3_u8, 0..2_u8);
    let flags = flags.prop_map(|(huffman, indexing, best)| huffman | indexing << 2 | best << 4);
    ("[a-z-]{0,20}", "[ -~]{0,60}", flags)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_another_encoder_writes_is_read(
        lists in prop::collection::vec(prop::collection::vec(any_field(), 0..12), 1..12),
    ) {
        let mut encoder = httlib_hpack::Encoder::default();
        let mut decoder = Decoder::new();
        for list in lists {
            let mut block = Vec::new();
            for (name, value, flags) in &list {
                let field = (name.as_bytes().to_vec(), value.as_bytes().to_vec(), *flags);
                encoder.encode(field, &mut block).unwrap();
            }
            let expected: Fields = list.into_iter().map(|(name, value, _)| (name, value)).collect();
            prop_assert_eq!(decode(&mut decoder, &block), Ok(expected));
        }
    }

    #[test]
    fn arbitrary_blocks_leave_a_bounded_table(
        blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
    ) {
        let mut decoder = Decoder::new();
        for block in blocks {
            let _ = decode(&mut decoder, &block);
        }
    }
}
