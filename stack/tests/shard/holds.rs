//! Holds in a flood (docs/waiting.md): acknowledgements are not answers.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::device::moderation::{BusyPoll, Next};
use fulmar_stack::shard::Reserved;
use fulmar_stack::socket::Attempt;
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations::config;
use std::task::Poll;

/// Two segments of the largest size: a reader that finds them acknowledges them at once.
const WRITE: [u8; 3000] = [0; 3000];

#[test]
fn a_reader_that_acknowledges_each_frame_of_a_bulk_transfer_holds() {
    let mut p = Connection::new(1, &Impairments::default(), |i| config(i, 16 << 20));
    for _ in 0..10_000 {
        let (now, client) = (p.world.now, p.client);
        let written =
            p.world.shards[0].sosend(client).reserve(now, &WRITE, WRITE.len(), Attempt::First);
        if let Ok(Poll::Ready(Reserved::Space(mut r))) = written {
            r.chain.copy_from(0, &WRITE);
            p.world.shards[0].sosend(client).commit(now, r);
        }
        let reader = &mut p.world.shards[1];
        reader.moderation().start_waiting(now);
        while reader.step_for_reader(now) > 0 {}
        p.take_all(1 << 20);
        p.world.shards[0].step(now, 64);
        p.world.now = p.world.now + Duration::from_micros(40);
        let reader = &mut p.world.shards[1];
        if let Next::Hold { .. } = reader.next_wait(p.world.now, BusyPoll::Forbidden) {
            let count = |c| reader.counters().value(c);
            let (frames, acks) = (count(Counter::RxFrames), count(Counter::TcpAcksOut));
            assert!(2 * frames < 3 * acks, "{frames} frames, {acks} ACKs");
            return;
        }
        reader.moderation().slept();
    }
    panic!("no hold in a bulk transfer");
}
