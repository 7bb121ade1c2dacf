//! The readers of a guest's first bytes: nothing panics, the verdict does not depend on the cut, what is held is bounded,
//! and what passes of QUIC names the host.

use std::collections::BTreeMap;

use aes_gcm::aead::AeadInPlace;
use aes_gcm::aes::Aes128;
use aes_gcm::aes::cipher::{BlockEncrypt, KeyInit};
use aes_gcm::{Aes128Gcm, Nonce};
use fulmar_gateway::first::{
    Datagrams, Decision, EncryptedHello, Expected, MOST_HELD, MOST_HELD_BYTES, Stream, Verdict,
};
use hkdf::Hkdf;
use sha2::Sha256;

const NAME: &str = "allowed.example";
/// More than any reader holds.
const MOST_STREAM_HELD: u64 = 200_000;

/// A stream: the guest's bytes, the host's, and the guest's again. The first three bytes are the two lengths and the
/// options.
pub fn first_stream(input: &[u8]) {
    let [before, answer, options, rest @ ..] = input else { return };
    let (first, rest) = rest.split_at(rest.len().min(usize::from(*before)));
    let (host, last) = rest.split_at(rest.len().min(usize::from(*answer)));
    let at_once = play(*options, first, host, last, usize::MAX);
    for each in [1, 2, 7, 64] {
        assert_eq!(play(*options, first, host, last, each), at_once, "in pieces of {each}");
    }
}

/// The verdict on a stream in pieces of `each` bytes.
fn play(options: u8, first: &[u8], host: &[u8], last: &[u8], each: usize) -> Verdict {
    let mut expected = Expected::new([NAME], 80).shared(options & 2 != 0);
    if options & 1 != 0 {
        expected = expected.with_encrypted_hello(EncryptedHello::Pass);
    }
    let mut stream = Stream::new(expected);
    let mut passed = 0;
    let mut note = |stream: &Stream, verdict: &Verdict| {
        assert!(stream.held_bytes() <= MOST_STREAM_HELD);
        if let Verdict::Pass(n) = verdict {
            assert!(passed <= *n, "the number fell");
            assert!(*n == u64::MAX || *n <= (first.len() + last.len()) as u64);
            passed = *n;
        }
    };
    for piece in first.chunks(each) {
        let verdict = stream.read(piece);
        note(&stream, &verdict);
    }
    for piece in host.chunks(each) {
        let verdict = stream.answered(piece);
        note(&stream, &verdict);
    }
    for piece in last.chunks(each) {
        let verdict = stream.read(piece);
        note(&stream, &verdict);
    }
    if options & 2 != 0 { stream.end() } else { stream.read(&[]) }
}

/// Connection IDs of the flow.
const IDS: [&[u8]; 4] = [b"first-id", b"second-id", b"third-id", b"a"];

/// What was sent in Initial packets under the keys of one ID.
type Sent = BTreeMap<u64, u8>;

/// A flow: each datagram has a byte of options, two bytes of length, and its content. By the options it is raw, or the
/// frames of an Initial packet that is protected here.
pub fn first_datagrams(input: &[u8]) {
    let Some((options, mut rest)) = input.split_first() else { return };
    let mut flow = Datagrams::new(Expected::new([NAME], if options & 1 == 0 { 443 } else { 5000 }));
    let mut released: [Sent; IDS.len()] = Default::default();
    let mut held: Vec<(usize, Vec<u8>)> = Vec::new();
    while let [kind, low, high, content @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*low, high & 7])).min(content.len());
        let (content, next) = content.split_at(length);
        rest = next;
        let id = usize::from(kind >> 1 & 3);
        let (datagram, frames) = match kind & 1 {
            0 => (content.to_vec(), Vec::new()),
            _ => (seal(IDS[id], kind >> 3, content), content.to_vec()),
        };
        match flow.read(&datagram) {
            Decision::Pass => {
                held.push((id, frames));
                held.drain(..).for_each(|(id, frames)| note_crypto(&mut released[id], &frames));
                released.iter().for_each(assert_named);
            }
            Decision::Hold => held.push((id, frames)),
            Decision::Refuse(_) => held.clear(),
        }
        assert!(held.len() <= MOST_HELD);
        assert!(held.iter().map(|h| h.1.len()).sum::<usize>() <= MOST_HELD_BYTES);
    }
}

/// Adds the CRYPTO frames of a packet that went out.
fn note_crypto(sent: &mut Sent, mut frames: &[u8]) {
    while let Some(kind) = varint(&mut frames) {
        if kind != 6 {
            // PADDING and PING; no other kind has to be followed for a check that may be weaker.
            if kind > 1 {
                return;
            }
            continue;
        }
        let (Some(offset), Some(length)) = (varint(&mut frames), varint(&mut frames)) else {
            return;
        };
        let Some((data, rest)) = frames.split_at_checked(length as usize) else { return };
        frames = rest;
        for (at, byte) in (offset..).zip(data) {
            let was = sent.insert(at, *byte);
            assert!(was.is_none_or(|was| was == *byte), "two bytes for one place went out");
        }
    }
}

/// A ClientHello that went out whole is one that a stream of TLS would let out.
fn assert_named(sent: &Sent) {
    let message: Vec<u8> =
        sent.iter().zip(0..).take_while(|((at, _), n)| **at == *n).map(|((_, b), _)| *b).collect();
    let [1, a, b, c, ..] = message[..] else { return };
    let length = 4 + u32::from_be_bytes([0, a, b, c]) as usize;
    let Some(hello) = message.get(..length) else { return };
    let record = [&[22, 3, 1][..], &(length as u16).to_be_bytes(), hello].concat();
    let verdict = Stream::new(Expected::new([NAME], 443)).read(&record);
    assert!(matches!(verdict, Verdict::Pass(n) if n >= record.len() as u64), "{verdict:?}");
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let n = 1 << (bytes.first()? >> 6);
    let (number, rest) = bytes.split_at_checked(n)?;
    *bytes = rest;
    let first = u64::from(number[0] & 0x3f);
    Some(number[1..].iter().fold(first, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// An Initial packet of version 1 with these frames, under the keys of its own ID (RFC 9001 section 5).
fn seal(id: &[u8], number: u8, frames: &[u8]) -> Vec<u8> {
    const SALT: [u8; 20] = [
        0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c,
        0xad, 0xcc, 0xbb, 0x7f, 0x0a,
    ];
    let client: [u8; 32] = expand(&Hkdf::new(Some(&SALT), id), "client in");
    let client = Hkdf::from_prk(&client).expect("32 bytes are a key of SHA-256");
    let (key, mut nonce): ([u8; 16], [u8; 12]) =
        (expand(&client, "quic key"), expand(&client, "quic iv"));
    let header_key: [u8; 16] = expand(&client, "quic hp");
    nonce[11] ^= number;
    // A sample begins four bytes behind the packet number, which has one.
    let mut payload = frames.to_vec();
    payload.resize(payload.len().max(4), 0);
    let length = 0x4000 | (1 + payload.len() as u16 + 16);
    let mut packet = [&[0xc0, 0, 0, 0, 1, id.len() as u8][..], id, &[0, 0]].concat();
    packet.extend(length.to_be_bytes());
    packet.push(number);
    let tag = Aes128Gcm::new(&key.into())
        .encrypt_in_place_detached(Nonce::from_slice(&nonce), &packet, &mut payload)
        .expect("a short payload");
    payload.extend_from_slice(&tag);
    let mut mask = aes_gcm::aes::Block::clone_from_slice(&payload[3..19]);
    Aes128::new(&header_key.into()).encrypt_block(&mut mask);
    let number_at = packet.len() - 1;
    packet[0] ^= mask[0] & 0x0f;
    packet[number_at] ^= mask[1];
    packet.extend(payload);
    // A smaller datagram may not have an Initial packet.
    packet.resize(packet.len().max(1200), 0);
    packet
}

fn expand<const N: usize>(secret: &Hkdf<Sha256>, label: &str) -> [u8; N] {
    let mut out = [0; N];
    let length = [0, N as u8, 6 + label.len() as u8];
    let parts = [&length[..], b"tls13 ", label.as_bytes(), &[0]];
    secret.expand_multi_info(&parts, &mut out).expect("a short output");
    out
}
