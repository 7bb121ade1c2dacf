//! sosend as its user sees it: how a write is cut, what its flags do, room lent by the stack.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::task::Poll;
use std::thread;

use fulmar::device::{Chain, Purpose};
use fulmar::internals::runtime::WatchedShard;
use fulmar::internals::socket::SocketError;
use fulmar::stat::Counter;
use fulmar::tcp::SendFlags;
use fulmar::zero_copy::ZeroCopy;
use fulmar::{Stack, TcpStream};
use fulmar_stack::shard::MoreData;

use crate::support::{
    buffers_come_home, change, connection, eventually, fill, pattern, stacks, stacks_with,
    stacks_without_timeouts, within,
};

/// What `work` adds to some counters of a stack.
fn counted<const N: usize>(s: &Stack, what: [Counter; N], work: impl FnOnce()) -> [u64; N] {
    let before = s.stat().unwrap();
    work();
    let after = s.stat().unwrap();
    what.map(|c| after.count(c) - before.count(c))
}

fn read_exactly(s: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    s.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_write_of_64_kib_is_one_output_and_its_frames_carry_many_packets() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (mut c, mut s) = connection(&a, &b, 80);
        let bytes = pattern(0, 64 << 10);
        // Opens the congestion window.
        for _ in 0..20 {
            c.write_all(&bytes).unwrap();
            assert_eq!(read_exactly(&mut s, bytes.len()), bytes);
        }
        eventually("all is acknowledged", || c.info().unwrap().send_queue_bytes == 0);
        use Counter as C;
        let what = [C::Sends, C::SendOutputs, C::SendFrames, C::SendPackets, C::SendMbufs];
        let [sends, outputs, frames, packets, mbufs] = counted(&a, what, || {
            assert_eq!(c.write(&bytes).unwrap(), bytes.len());
        });
        assert_eq!((sends, outputs, mbufs), (1, 1, 1));
        assert!((1..=2).contains(&frames), "{frames} frames");
        assert!(packets >= frames, "{packets} packets");
        assert_eq!(read_exactly(&mut s, bytes.len()), bytes);
    });
}

#[test]
fn two_thousand_tiny_pieces_are_one_chain_and_one_output() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (c, mut s) = connection(&a, &b, 80);
        let bytes = pattern(7, 20_000);
        let pieces: Vec<_> = bytes.chunks(10).map(IoSlice::new).collect();
        assert_eq!(pieces.len(), 2000);
        let counts = [Counter::Sends, Counter::SendOutputs, Counter::CopiedBytes];
        let got = counted(&a, counts, || {
            assert_eq!(c.send_with(&pieces, SendFlags::NONE).unwrap(), bytes.len());
        });
        assert_eq!(got, [1, 1, 20_000]);
        assert_eq!(read_exactly(&mut s, bytes.len()), bytes);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn small_writes_behind_each_other_share_their_buffers() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (mut c, mut s) = connection(&a, &b, 80);
        change(&c, |o| o.cork = true);
        let [mbufs] = counted(&a, [Counter::SendMbufs], || {
            for i in 0..100u8 {
                c.write_all(&[i; 10]).unwrap();
            }
        });
        assert!(mbufs <= 10, "{mbufs} mbufs for 1000 bytes");
        change(&c, |o| o.cork = false);
        let got = read_exactly(&mut s, 1000);
        assert!(got.chunks(10).zip(0..).all(|(ten, i)| ten == [i; 10]));
    });
}

#[test]
fn more_holds_a_partial_segment_until_a_write_without_it() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (c, mut s) = connection(&a, &b, 80);
        let [segments] = counted(&a, [Counter::TcpSegmentsOut], || {
            for part in [&b"one "[..], b"two "] {
                c.send_with(&[IoSlice::new(part)], SendFlags::MORE).unwrap();
            }
            c.send_with(&[IoSlice::new(b"three")], SendFlags::NONE).unwrap();
        });
        assert_eq!(segments, 1);
        assert_eq!(read_exactly(&mut s, 13), b"one two three");
    });
}

#[test]
fn a_record_ends_its_segment() {
    within(|| {
        let (a, b) = stacks_without_timeouts();
        let (c, mut s) = connection(&a, &b, 80);
        change(&c, |o| o.cork = true);
        let [segments] = counted(&a, [Counter::TcpSegmentsOut], || {
            for part in [&b"one "[..], b"two ", b"three"] {
                c.send_with(&[IoSlice::new(part)], SendFlags::END_OF_RECORD).unwrap();
            }
            change(&c, |o| o.cork = false);
            // The last waits for the ACK of those before it (Nagle).
            assert_eq!(read_exactly(&mut s, 13), b"one two three");
        });
        assert_eq!(segments, 3);
    });
}

#[test]
fn bytes_held_by_more_are_sent_in_the_end() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        c.send_with(&[IoSlice::new(b"alone")], SendFlags::MORE).unwrap();
        assert_eq!(read_exactly(&mut s, 5), b"alone");
        // A write that waits for space pushes the buffered bytes, so a small buffer does not deadlock.
        change(&c, |o| o.send_buffer = Some(2048));
        let bytes = pattern(0, 300_000);
        let reader = thread::spawn(move || read_exactly(&mut s, 300_000));
        assert_eq!(c.send_with(&[IoSlice::new(&bytes)], SendFlags::MORE).unwrap(), 300_000);
        assert!(reader.join().unwrap() == bytes);
    });
}

#[test]
fn a_write_that_must_not_wait_does_not_on_a_blocking_socket() {
    within(|| {
        let (a, b) = stacks();
        let (c, _s) = connection(&a, &b, 80);
        fill(&c);
        c.set_nonblocking(false).unwrap();
        let bytes = [1; 1 << 20];
        let all = [IoSlice::new(&bytes)];
        eventually("the buffer is full", || match c.send_with(&all, SendFlags::DONT_WAIT) {
            Err(e) => e.kind() == ErrorKind::WouldBlock,
            Ok(_) => false,
        });
    });
}

#[test]
fn a_reservation_is_sent_as_far_as_it_was_filled() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let bytes = pattern(3, 100_000);
        let [copied] = counted(&a, [Counter::SendBytes], || {
            let mut room = c.send_reserve(200_000).unwrap();
            assert_eq!(room.capacity(), 200_000);
            let mut at = 0;
            for part in room.slices_mut() {
                let n = part.len().min(bytes.len() - at);
                part[..n].copy_from_slice(&bytes[at..at + n]);
                at += n;
            }
            room.commit(bytes.len());
        });
        assert_eq!(copied, 100_000);
        assert_eq!(read_exactly(&mut s, bytes.len()), bytes);
        let mut room = c.send_reserve(10).unwrap();
        assert_eq!(room.write(b"hello, world").unwrap(), 10);
        assert_eq!((room.write(b"!").unwrap(), room.written()), (0, 10));
        room.commit_written();
        assert_eq!(read_exactly(&mut s, 10), b"hello, wor");
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_dropped_reservation_releases_its_space_and_sends_nothing() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        for _ in 0..100 {
            drop(c.send_reserve(1 << 20).unwrap());
            c.send_reserve(1000).unwrap().commit(0);
        }
        c.write_all(b"here").unwrap();
        assert_eq!(read_exactly(&mut s, 4), b"here");
        assert_eq!(c.send_reserve(0).unwrap_err().kind(), ErrorKind::InvalidInput);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_held_reservation_delays_other_writers_and_refuses_its_own() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let mut room = c.send_reserve(5).unwrap();
        assert_eq!((&c).write(b"mine").unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut other = c.try_clone().unwrap();
        let writer = thread::spawn(move || other.write_all(b"second").unwrap());
        room.write_all(b"first").unwrap();
        room.commit_written();
        assert_eq!(read_exactly(&mut s, 11), b"firstsecond");
        writer.join().unwrap();
    });
}

fn chain_of(shard: &mut WatchedShard, bytes: &[u8]) -> Chain {
    let mut chain = shard.pool().alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
    chain.copy_from(0, bytes).unwrap();
    chain
}

#[test]
fn a_finished_chain_is_taken_whole_or_stays_with_its_owner() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let (id, bytes) = (c.slot_id(), pattern(0, 5000));
        change(&c, |o| o.send_buffer = Some(8000));
        let [outputs] = counted(&a, [Counter::SendOutputs], || {
            a.host()
                .call(|shard, now| {
                    let mut chain = chain_of(shard, &bytes);
                    assert!(matches!(
                        shard.sosend(id).append(now, &mut chain, MoreData::None)?,
                        Poll::Ready(())
                    ));
                    assert!(chain.is_empty());
                    let mut large = chain_of(shard, &pattern(0, 8001));
                    let step = shard.sosend(id).append(now, &mut large, MoreData::None)?;
                    assert!(matches!(step, Poll::Pending));
                    assert_eq!(large.len(), 8001);
                    shard.pool().free(large);
                    Ok(())
                })
                .unwrap();
        });
        assert_eq!(outputs, 1);
        assert_eq!(read_exactly(&mut s, 5000), bytes);
        eventually("all is acknowledged", || {
            a.host().call(|shard, _| shard.sosend(id).space()).unwrap() == 8000
        });
        c.shutdown(std::net::Shutdown::Write).unwrap();
        let refused = a.host().call(|shard, now| {
            let mut chain = chain_of(shard, &bytes);
            let answer = shard.sosend(id).append(now, &mut chain, MoreData::None).map(drop);
            assert_eq!(chain.len(), 5000);
            shard.pool().free(chain);
            answer
        });
        assert_eq!(refused, Err(SocketError::BrokenPipe));
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_pool_that_runs_dry_in_the_middle_of_a_write_loses_and_keeps_nothing() {
    within(|| {
        let (a, b) = stacks_with(|s| s.budget_bytes(1 << 20));
        let (mut c, mut s) = connection(&a, &b, 80);
        // All that the send share has is in other hands while the write begins.
        let mut held = Vec::new();
        let _ = a.host().call(|shard, _| {
            while let Ok(m) = shard.pool().alloc(2000, 0, Purpose::Send) {
                held.push(m);
            }
            Ok::<_, SocketError>(())
        });
        assert!(!held.is_empty());
        let bytes = pattern(1, 2 << 20);
        let expected = bytes.clone();
        let writer = thread::spawn(move || c.write_all(&bytes).unwrap());
        thread::spawn(move || {
            while held.pop().is_some() {
                thread::yield_now();
            }
        });
        assert!(read_exactly(&mut s, expected.len()) == expected);
        writer.join().unwrap();
        buffers_come_home(&[&a, &b]);
    });
}
