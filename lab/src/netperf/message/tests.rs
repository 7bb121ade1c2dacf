use super::*;
use proptest::prelude::*;

fn bytes_of(message: &Message, body_word: usize, n: usize) -> &[u8] {
    let at = BODY_AT + 4 * body_word;
    &message.as_bytes()[at..at + n]
}

fn padded<const N: usize>(text: &str) -> Text<N> {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    Text(bytes)
}

#[test]
fn the_words_of_an_omni_request_stand_where_netserver_reads_them() {
    let request = OmniRequest {
        send_buffer: -1,
        recv_buffer: 0x0102_0304,
        flags: flag::MEASURE_CPU | flag::NODELAY,
        length: -5,
        data_port: 40_000,
        family: FAMILY_V4,
        socket_type: 1,
        protocol: 6,
        direction: direction::RECEIVE,
        client_port: 7,
        priority: 9,
        congestion: padded("cubic"),
        fill_file: padded("/etc/hosts"),
        ..OmniRequest::default()
    };
    let message = Message::new(kind::OMNI, u32::MAX, &request);
    assert_eq!((message.kind(), message.second()), (97, u32::MAX));
    for (word, bytes) in [
        (0, [0xff; 4]),
        (6, [1, 2, 3, 4]),
        (12, [0, 0, 0, 9]),
        (14, (-5i32).to_be_bytes()),
        (20, 40_000u32.to_be_bytes()),
        (21, [0, 0, 0, 4]),
        (22, [0, 0, 0, 1]),
        (23, [0, 0, 0, 6]),
        (24, [0, 0, 0, 4]),
        (25, [0, 0, 0, 7]),
        (36, [0, 0, 0, 9]),
    ] {
        assert_eq!(bytes_of(&message, word, 4), bytes, "word {word}");
    }
    assert_eq!(bytes_of(&message, 38, 6), b"cubic\0");
    assert_eq!(bytes_of(&message, 42, 11), b"/etc/hosts\0");
    assert_eq!(bytes_of(&message, 50, 4 * 112), [0; 4 * 112]);
}

#[test]
fn the_words_of_responses_and_results_stand_where_netperf_reads_them() {
    let response =
        OmniResponse { flags: 8, data_port: 5, cpu_mhz: 6, tos: 7, ..Default::default() };
    let message = Message::new(kind::OMNI_RESPONSE, 0, &response);
    for (word, value) in [(6, 8), (11, 5), (14, 6), (17, 7)] {
        assert_eq!(bytes_of(&message, word, 4), [0, 0, 0, value]);
    }
    let results = OmniResults {
        bytes_received: 0x0102_0304_0506_0708,
        elapsed: 1.5,
        cpu_method: 8,
        retransmits: -1,
        ..Default::default()
    };
    let message = Message::new(kind::OMNI_RESULTS, 0, &results);
    assert_eq!(bytes_of(&message, 0, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bytes_of(&message, 10, 4), 1.5f32.to_be_bytes());
    assert_eq!(bytes_of(&message, 18, 4), [0, 0, 0, 8]);
    assert_eq!(bytes_of(&message, 26, 4), [0xff; 4]);
}

#[test]
fn classic_results_hold_bytes_as_one_double() {
    let results = StreamResults { bytes_received: 1e10, recv_calls: 3, ..Default::default() };
    let message = Message::new(kind::STREAM_RESULTS, 0, &results);
    assert_eq!(bytes_of(&message, 0, 8), 1e10f64.to_be_bytes());
    assert_eq!(bytes_of(&message, 2, 4), [0, 0, 0, 3]);
    let request = StreamRequest { data_port: 1, family: 4, posted: 1, ..Default::default() };
    let message = Message::new(kind::STREAM, 0, &request);
    assert_eq!(bytes_of(&message, 13, 12), [0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 1]);
    let request = ConnectRequest { length: 9, data_port: 1, family: 6, ..Default::default() };
    let message = Message::new(kind::CONNECT, 0, &request);
    assert_eq!(bytes_of(&message, 11, 4), [0, 0, 0, 9]);
    assert_eq!(bytes_of(&message, 14, 8), [0, 0, 0, 1, 0, 0, 0, 6]);
}

#[test]
fn text_is_cut_at_the_first_zero() {
    assert_eq!(Text(*b"abc\0").as_str(), Some("abc"));
    assert_eq!(Text(*b"abcd").as_str(), Some("abcd"));
    assert_eq!(Text::<4>(*b"a\0bc").as_str(), Some("a"));
    assert_eq!(Text::<4>([0xff, 0xfe, 0, 0]).as_str(), None);
    assert_eq!(Text::<4>::default().as_str(), None);
}

#[test]
fn addresses_round_trip_and_any_is_none() {
    for text in ["10.1.2.3", "fd77::1:2"] {
        let ip: std::net::IpAddr = text.parse().expect("an address");
        let (field, family) = address_field(ip);
        assert_eq!(address(&field, family), Some(ip));
    }
    assert_eq!(address_field("10.1.2.3".parse().expect("one")).0.0[..4], [10, 1, 2, 3]);
    assert_eq!(address(&Text::default(), FAMILY_V4), None);
    assert_eq!(address(&Text([1; 16]), 7), None);
}

/// Any bytes: decoding takes them, and what was decoded encodes and decodes to itself. Floats are
/// compared by what they encode to, since a NaN is not equal to itself.
fn decodes_and_encodes<B: Body>(message: &Message) {
    let body: B = message.body();
    let again = Message::new(message.kind(), message.second(), &body);
    let used = again.as_bytes();
    let twice = Message::new(message.kind(), message.second(), &again.body::<B>());
    assert_eq!(twice.as_bytes(), used);
    // What the body covers is byte for byte what arrived; the rest is zero.
    let end = used.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
    assert_eq!(used[..end], message.as_bytes()[..end]);
}

proptest! {
    #[test]
    fn any_bytes_decode_and_encode_to_themselves(
        bytes in proptest::collection::vec(any::<u8>(), MESSAGE_BYTES),
    ) {
        let mut array = [0; MESSAGE_BYTES];
        array.copy_from_slice(&bytes);
        let message = Message::from_bytes(array);
        decodes_and_encodes::<Empty>(&message);
        decodes_and_encodes::<Calibration>(&message);
        decodes_and_encodes::<OmniRequest>(&message);
        decodes_and_encodes::<OmniResponse>(&message);
        decodes_and_encodes::<OmniResults>(&message);
        decodes_and_encodes::<StreamRequest>(&message);
        decodes_and_encodes::<StreamResponse>(&message);
        decodes_and_encodes::<StreamResults>(&message);
        decodes_and_encodes::<ConnectRequest>(&message);
        decodes_and_encodes::<ConnectResponse>(&message);
        decodes_and_encodes::<ConnectResults>(&message);
    }

    #[test]
    fn a_field_behind_the_end_is_zero_and_writes_nothing(n in 0usize..8) {
        let bytes = vec![0xff; n];
        let mut rest = bytes.as_slice();
        let value = u32::take(&mut rest);
        let known = n.min(4);
        let mut model = [0; 4];
        model[..known].fill(0xff);
        prop_assert_eq!(value, u32::from_be_bytes(model));
        let mut room = vec![0; n];
        u32::MAX.put(&mut room.as_mut_slice());
        prop_assert_eq!(room, [vec![0xff; known], vec![0; n - known]].concat());
    }
}
