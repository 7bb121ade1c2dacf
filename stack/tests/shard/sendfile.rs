//! The steps of sendfile between two shards over a simulated link with every kind of trouble, on a
//! virtual clock: whatever is lost, and in whatever order pieces are filled, the stream is the file.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::device::Rng;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::sendfile::{LowWater, Piece, Rest};
use fulmar_stack::socket::{Reservation, SocketError};
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations::config;
use std::task::Poll;

const WRITER: u64 = 1;

fn connection(seed: u64, how: &Impairments) -> Connection {
    Connection::new(seed, how, |station| config(station, 16 << 20))
}

/// Time passes to the next deadline.
fn pass(c: &mut Connection) {
    c.world.advance(Duration::from_millis(10));
}

fn rough() -> Impairments {
    Impairments {
        delay: Duration::from_millis(3),
        jitter: Duration::from_millis(2),
        loss: 0.02,
        reorder: 0.05,
        reorder_delay: Duration::from_millis(5),
        duplicate: 0.02,
        corrupt: 0.01,
        cut: 0.5,
        ..Impairments::default()
    }
}

/// The sender: a file, and pieces of it that are taken but not filled yet.
struct Sender {
    whole: Vec<u8>,
    rest: Rest,
    held: Vec<(Reservation, Piece, usize)>,
    rng: Rng,
}

impl Sender {
    fn new(seed: u64) -> Sender {
        let mut rng = Rng::new(seed);
        let (head, tail) = (rng.below(3000) as usize, rng.below(3000) as usize);
        let file = 200_000 + rng.below(800_000);
        let bytes = head + file as usize + tail;
        let whole = (0..bytes).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
        let rest = Rest { head, file_at: rng.below(10_000), file, tail };
        Sender { whole, rest, held: Vec::new(), rng }
    }

    /// Takes what has room, fills one of the pieces taken, whichever.
    fn advance(&mut self, p: &mut Connection) {
        let shard = &mut p.world.shards[0];
        let left = self.rest.bytes();
        if left > 0 && self.held.len() < 3 {
            let worth =
                if self.rng.below(2) == 0 { LowWater::HalfBuffer } else { LowWater::Writable };
            let step =
                shard.sendfile(p.client).reserve(p.world.now, &self.rest, worth).expect("open");
            if let Poll::Ready((r, piece)) = step {
                let at = self.whole.len() - left as usize;
                self.rest.head -= piece.head;
                self.rest.file -= piece.file as u64;
                self.rest.file_at += piece.file as u64;
                self.rest.tail -= piece.tail;
                self.held.push((r, piece, at));
                return;
            }
        }
        if !self.held.is_empty() {
            let which = self.rng.below(self.held.len() as u64) as usize;
            let (mut r, piece, at) = self.held.swap_remove(which);
            let bytes = &self.whole[at..at + piece.len()];
            assert_eq!(r.chain.copy_from(0, bytes), Some(bytes.len()));
            let more = MoreData::of_rest(self.rest.bytes());
            shard.sendfile(p.client).commit(p.world.now, r, piece.len(), more).expect("open");
        }
    }
}

#[test]
fn pieces_filled_in_any_order_arrive_in_order_over_a_bad_link() {
    for seed in 0..20 {
        let mut p = connection(seed, &rough());
        let mut sender = Sender::new(seed);
        p.tcb(0).set_send_buffer(128 << 10);
        let begun = p.world.shards[0].tcp_entry(p.client).and_then(|e| e.lock_send(WRITER));
        assert!(matches!(begun, Ok(Poll::Ready(()))));
        let mut got = Vec::new();
        for _ in 0..2_000_000 {
            sender.advance(&mut p);
            pass(&mut p);
            got.extend(p.take_all(1 << 20));
            if got.len() >= sender.whole.len() {
                break;
            }
        }
        assert!(got == sender.whole, "seed {seed}: {} bytes of {}", got.len(), sender.whole.len());
        p.world.shards[0].sendfile(p.client).end();
        assert_eq!(p.tcb(0).send_low_water(), None);
        let pieces = p.world.shards[0].counters().value(Counter::SendFilePieces);
        assert_eq!(p.world.shards[0].counters().value(Counter::SendOutputs), pieces);
    }
}

#[test]
fn what_was_accepted_and_cannot_be_read_resets_the_connection_with_eio() {
    let mut p = connection(1, &Impairments::default());
    let rest = Rest { file: 100_000, ..Rest::default() };
    let worth = LowWater::Writable;
    let shard = &mut p.world.shards[0];
    let Ok(Poll::Ready((first, _))) = shard.sendfile(p.client).reserve(p.world.now, &rest, worth)
    else {
        panic!("no space");
    };
    let Ok(Poll::Ready((second, piece))) =
        shard.sendfile(p.client).reserve(p.world.now, &rest, worth)
    else {
        panic!("no space");
    };
    shard
        .sendfile(p.client)
        .commit(p.world.now, second, piece.len(), MoreData::None)
        .expect("open");
    shard.sendfile(p.client).fail(p.world.now, first);
    let again = shard.sendfile(p.client).reserve(p.world.now, &rest, worth);
    assert!(matches!(again, Err(SocketError::InputOutput)));
    assert_eq!(shard.take_error(p.client), Ok(Some(SocketError::InputOutput)));
    (0..100).for_each(|_| pass(&mut p));
    let end = p.world.shards[1].tcp_take(p.server, 10);
    assert!(matches!(end, Err(SocketError::ConnectionReset)), "{end:?}");
    let (now, client, server) = (p.world.now, p.client, p.server);
    p.world.shards[0].close(now, client);
    p.world.shards[1].close(now, server);
    (0..100).for_each(|_| pass(&mut p));
    assert!(p.world.shards[0].stat().sockets.is_empty());
    for s in &mut p.world.shards {
        s.pool().drain_remote();
        assert_eq!(s.pool().outstanding(), 0);
    }
}

#[test]
fn a_piece_that_is_ready_after_the_end_of_its_connection_is_freed_and_refused() {
    let mut p = connection(2, &Impairments::default());
    let rest = Rest { file: 100_000, ..Rest::default() };
    let step = p.world.shards[0].sendfile(p.client).reserve(p.world.now, &rest, LowWater::Writable);
    let Ok(Poll::Ready((r, piece))) = step else { panic!("no space") };
    p.world.shards[1].tcp_entry(p.server).expect("open").linger = Some(Duration::ZERO);
    let (now, client, server) = (p.world.now, p.client, p.server);
    p.world.shards[1].close(now, server);
    (0..100).for_each(|_| pass(&mut p));
    let answer =
        p.world.shards[0].sendfile(client).commit(p.world.now, r, piece.len(), MoreData::None);
    assert_eq!(answer, Err(SocketError::ConnectionReset));
    let step = p.world.shards[0].sendfile(client).reserve(p.world.now, &rest, LowWater::Writable);
    assert!(matches!(step, Err(SocketError::BrokenPipe)));
    p.world.shards[0].close(p.world.now, client);
    (0..100).for_each(|_| pass(&mut p));
    p.world.shards[0].pool().drain_remote();
    assert_eq!(p.world.shards[0].pool().outstanding(), 0);
}

#[test]
fn a_piece_of_64_kib_is_one_output_of_as_many_packets() {
    let mut p = connection(3, &Impairments::default());
    let counts = [Counter::SendOutputs, Counter::SendPackets, Counter::SendFrames];
    let mut got = Vec::new();
    let mut last = [0; 3];
    // The window of a young connection is smaller than that.
    for _ in 0..20 {
        let rest = Rest { file: 64 << 10, ..Rest::default() };
        let shard = &mut p.world.shards[0];
        let before = counts.map(|c| shard.counters().value(c));
        let step = shard.sendfile(p.client).reserve(p.world.now, &rest, LowWater::HalfBuffer);
        let Ok(Poll::Ready((r, piece))) = step else { panic!("no space") };
        shard.sendfile(p.client).commit(p.world.now, r, piece.len(), MoreData::None).expect("open");
        let after = counts.map(|c| shard.counters().value(c));
        last = [0, 1, 2].map(|i| after[i] - before[i]);
        // Not so long that the congestion window starts anew.
        (0..8).for_each(|_| pass(&mut p));
        got.extend(p.take_all(1 << 20));
    }
    assert_eq!(got.len(), 20 * (64 << 10));
    // 45 packets of 1,448 bytes in one frame, and what is left of 64 KiB.
    assert_eq!(last, [1, 46, 2]);
}

/// The autotuning of the buffer, or SO_SNDBUF, makes it smaller while a call waits for half of it.
#[test]
fn a_call_that_waits_for_half_of_the_buffer_goes_on_in_one_that_became_smaller() {
    let mut p = connection(4, &Impairments::default());
    let rest = Rest { file: 1 << 20, ..Rest::default() };
    let (now, client) = (p.world.now, p.client);
    let shard = &mut p.world.shards[0];
    shard.tcp_entry(client).expect("open").tcb.set_send_buffer(256 << 10);
    let Ok(Poll::Ready((r, piece))) =
        shard.sendfile(client).reserve(now, &rest, LowWater::HalfBuffer)
    else {
        panic!("no space");
    };
    shard.sendfile(client).commit(now, r, piece.len(), MoreData::Follows).expect("open");
    let step = shard.sendfile(client).reserve(now, &rest, LowWater::HalfBuffer);
    assert!(matches!(step, Ok(Poll::Pending)));
    shard.tcp_entry(client).expect("open").tcb.set_send_buffer(16 << 10);
    for _ in 0..10_000 {
        pass(&mut p);
        p.take_all(1 << 20);
    }
    let entry = p.world.shards[0].tcp_entry(client).expect("open");
    assert_eq!(entry.tcb.write_space(), 16 << 10, "the peer has acknowledged everything");
    assert!(entry.ready().is_writable());
}
