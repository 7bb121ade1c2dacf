//! Framed streams: bodies in the buffers of their tags.

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::thread;
use std::time::Duration;

use fulmar::mbuf::RecvBuf;
use fulmar::{Body, FrameParser, Framed, TcpStream};

use crate::support::{buffers_come_home, connection, eventually, pattern, stacks, within};

/// Eight bytes: tag and length of the body, both big-endian. A tag of all ones is not understood.
struct Rpc;

impl FrameParser for Rpc {
    fn header_bytes(&self) -> usize {
        8
    }

    fn body(&self, header: &[u8]) -> Option<(usize, u64)> {
        let (tag, rest) = header.split_first_chunk::<4>()?;
        let tag = u32::from_be_bytes(*tag);
        let bytes = u32::from_be_bytes(*rest.first_chunk::<4>()?);
        (tag != u32::MAX).then_some((bytes as usize, u64::from(tag)))
    }
}

type Buffers = HashMap<u64, RecvBuf>;

fn frame(tag: u32, bytes: u32) -> Vec<u8> {
    let header = [tag.to_be_bytes(), bytes.to_be_bytes()].concat();
    [header, pattern(tag as usize, bytes as usize)].concat()
}

fn framed(s: &TcpStream) -> Framed<Rpc, Buffers> {
    s.framed(Rpc, Buffers::new()).unwrap()
}

/// Reads one frame, checks its bytes, and says how its body came.
fn expect(f: &mut Framed<Rpc, Buffers>, tag: u32, bytes: u32) -> &'static str {
    let got = f.next().unwrap().expect("a frame");
    assert_eq!((got.tag, got.header), (u64::from(tag), &frame(tag, bytes)[..8]));
    assert_eq!(got.body.len(), bytes as usize);
    let how = match &got.body {
        Body::Placed(_) => "placed",
        Body::Loan(_) => "lent",
        Body::Copied(_) => "copied",
    };
    assert!(got.body.into_vec() == pattern(tag as usize, bytes as usize), "frame {tag} differs");
    how
}

#[test]
fn bodies_land_in_the_buffers_of_their_tags_in_any_order_and_size() {
    within(|| {
        let sizes = [1, 100, 1448, 5_000, 65_536, 70_000, 400_000, 3_000_000];
        let order = [3usize, 0, 7, 5, 1, 6, 2, 4];
        for piece in [777, 100_000, usize::MAX] {
            let (a, b) = stacks();
            let (mut c, s) = connection(&a, &b, 80);
            let all: Vec<u8> = order.iter().flat_map(|i| frame(*i as u32, sizes[*i])).collect();
            let writer = thread::spawn(move || {
                for part in all.chunks(piece.min(all.len())) {
                    c.write_all(part).unwrap();
                }
            });
            let mut f = framed(&s);
            for (tag, bytes) in (0u64..).zip(sizes) {
                f.buffers().insert(tag, RecvBuf::with_capacity(bytes as usize + 3));
            }
            for i in order {
                assert_eq!(expect(&mut f, i as u32, sizes[i]), "placed");
            }
            assert!(f.next().unwrap().is_none() && f.next().unwrap().is_none());
            assert!(f.buffers().is_empty());
            writer.join().unwrap();
            drop((f, s));
            buffers_come_home(&[&a, &b]);
        }
    });
}

#[test]
fn a_body_without_a_buffer_is_lent_or_if_it_is_large_copied() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let sizes = [0u32, 1, 3_000, 100_000, 5_000_000, 0, 10];
        let writer = thread::spawn(move || {
            for (tag, bytes) in (0..).zip(sizes) {
                c.write_all(&frame(tag, bytes)).unwrap();
            }
        });
        let mut f = framed(&s);
        // Too small for the third, which leaves it where it is.
        f.buffers().insert(2, RecvBuf::with_capacity(100));
        let ways: Vec<_> = (0..).zip(sizes).map(|(tag, n)| expect(&mut f, tag, n)).collect();
        assert_eq!(ways, ["lent", "lent", "lent", "lent", "copied", "lent", "lent"]);
        assert!(f.next().unwrap().is_none());
        assert_eq!(f.buffers().len(), 1);
        writer.join().unwrap();
        drop((f, s));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_frame_that_comes_in_drops_is_kept_between_calls_that_do_not_wait() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, s) = connection(&a, &b, 80);
        let mut f = framed(&s);
        s.set_nonblocking(true).unwrap();
        // Each handle has the mode of the socket.
        f.buffers().insert(1, RecvBuf::with_capacity(20));
        assert_eq!(f.next().unwrap_err().kind(), ErrorKind::WouldBlock);
        let all = [frame(1, 20), frame(2, 20)].concat();
        for (i, byte) in all.iter().enumerate() {
            c.write_all(&[*byte]).unwrap();
            let is_whole = i + 1 == 28 || i + 1 == 56;
            if is_whole {
                let mut got = None;
                eventually("a frame is whole", || {
                    got = f.next().ok().flatten().map(|f| (f.tag, f.body.into_vec()));
                    got.is_some()
                });
                let tag = if i < 30 { 1 } else { 2 };
                assert_eq!(got.unwrap(), (tag, pattern(tag as usize, 20)));
            } else {
                eventually("it would block", || {
                    f.next().is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
                });
            }
        }
    });
}

#[test]
fn a_peer_that_lies_about_lengths_gets_one_clean_error() {
    within(|| {
        let (a, b) = stacks();
        for (port, tag, bytes) in [(80, 1, u32::MAX), (81, 1, 5001), (82, u32::MAX, 10)] {
            let (mut c, s) = connection(&a, &b, port);
            let mut f = framed(&s);
            f.set_max_body(5000);
            c.write_all(&frame(0, 5000)).unwrap();
            c.write_all(&[tag.to_be_bytes(), bytes.to_be_bytes()].concat()).unwrap();
            c.write_all(&frame(3, 3)).unwrap();
            expect(&mut f, 0, 5000);
            for _ in 0..3 {
                assert_eq!(f.next().unwrap_err().kind(), ErrorKind::InvalidData);
            }
        }
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn the_end_inside_of_a_frame_is_an_error_and_its_buffer_comes_back() {
    within(|| {
        let (a, b) = stacks();
        for (port, sent) in [(80, 3), (81, 8), (82, 9), (83, 100_007)] {
            let (mut c, s) = connection(&a, &b, port);
            c.write_all(&frame(5, 100_000)[..sent]).unwrap();
            drop(c);
            let mut f = framed(&s);
            f.buffers().insert(5, RecvBuf::with_capacity(100_000));
            let e = f.next().unwrap_err();
            assert_eq!(e.kind(), ErrorKind::UnexpectedEof, "after {sent} bytes: {e}");
            assert!(f.buffers().contains_key(&5), "after {sent} bytes");
            assert!(f.next().is_err());
        }
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_parser_without_a_header_is_refused() {
    struct Odd(usize);
    impl FrameParser for Odd {
        fn header_bytes(&self) -> usize {
            self.0
        }
        fn body(&self, _: &[u8]) -> Option<(usize, u64)> {
            Some((0, 0))
        }
    }
    within(|| {
        let (a, b) = stacks();
        let (_c, s) = connection(&a, &b, 80);
        s.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        for bytes in [0, usize::MAX] {
            let e = s.framed(Odd(bytes), Buffers::new()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidInput);
        }
    });
}
