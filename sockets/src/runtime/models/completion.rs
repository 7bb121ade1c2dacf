//! Completions, tickets of posted buffers, and poll sets: one thread ends something, another waits for it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::{Wake, Waker};

use fulmar_stack::base::{SlotId, SocketHandle};
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::models::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use fulmar_stack::models::{Model, model, spawn, yield_now};
use fulmar_stack::socket::Ready;

use super::World;
use super::wire::PORTS;
use crate::runtime::completion::Completion;
use crate::runtime::limit::Limit;
use crate::runtime::poll_set::PollSetCore;
use crate::runtime::sync::AtomicUsize as Count;
use crate::runtime::sys;
use crate::runtime::ticket::{RecvTicket, SoleTicket, Tickets};
use crate::runtime::watched::WatchedShard;
use fulmar_stack::shard::{PostCompletion, RecvOutcome, Unclaimed};

pub const MODELS: &[Model] = fulmar_stack::models![
    waiters_of_a_completion_are_woken_in_the_stack_and_outside,
    a_task_that_was_told_to_wait_is_woken_once_and_sees_why,
    the_outcome_of_a_ticket_is_taken_once,
    a_thread_that_waits_for_a_poll_set_learns_of_every_member,
    the_descriptor_of_a_poll_set_is_readable_until_the_candidates_of_all_shards_are_taken,
];

fn waiters_of_a_completion_are_woken_in_the_stack_and_outside() {
    model(3, || {
        let w = World::new(true);
        let c = Arc::new(Completion::default());
        let waiting = [true, false].map(|is_inside| {
            let (host, c) = (w.host.clone(), c.clone());
            spawn(move || match is_inside {
                true => assert!(host.wait_completion(&c, Limit::Forever).unwrap()),
                false => assert!(c.wait(Limit::Forever)),
            })
        });
        c.fail(7);
        c.finish();
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(c.failure(), Some(7));
    });
}

#[derive(Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn a_task_that_was_told_to_wait_is_woken_once_and_sees_why() {
    model(3, || {
        let (c, task) = (Arc::new(Completion::default()), Arc::new(Task::default()));
        let end = c.clone();
        let ended = spawn(move || {
            end.fail(7);
            end.finish();
        });
        let is_over = c.watch(&Waker::from(task.clone()));
        if is_over {
            assert_eq!(c.failure(), Some(7));
        }
        ended.join().unwrap();
        assert_eq!(task.0.load(Relaxed), usize::from(!is_over));
    });
}

fn outcome() -> RecvOutcome {
    RecvOutcome { buf: Some(RecvBuf::with_capacity(16)), error: None }
}

fn the_outcome_of_a_ticket_is_taken_once() {
    model(3, || {
        let w = World::new(true);
        let (ticket, unclaimed) = (Arc::new(RecvTicket::default()), Arc::new(Count::default()));
        let (host, put, count) = (w.host.clone(), ticket.clone(), unclaimed.clone());
        let shard = spawn(move || {
            let mut tickets = Tickets::default();
            let token = tickets.add(&put);
            let over =
                PostCompletion { token, outcome: outcome(), unclaimed: Unclaimed::of(&count) };
            host.call(|_, _| Ok(drop(tickets.end(over)))).unwrap();
            put.completion.finish();
        });
        let early = ticket.take();
        let late = w.host.wait_outcome(&mut SoleTicket(&ticket), Limit::Forever, &mut None);
        assert!(early.is_some() != late.unwrap().is_some());
        shard.join().unwrap();
        assert_eq!(unclaimed.load(crate::runtime::sync::Ordering::Relaxed), 0);
    });
}

fn a_thread_that_waits_for_a_poll_set_learns_of_every_member() {
    model(2, || {
        let w = World::new(true);
        let set = Arc::new(PollSetCore::new().unwrap());
        for (token, socket) in w.sockets.into_iter().enumerate() {
            w.host.call(|s, _| s.join_set(socket, &set, token, Ready::READABLE)).unwrap();
        }
        let wire = w.wire.clone();
        let kernel = spawn(move || PORTS.iter().for_each(|port| wire.deliver(*port)));
        let other = w.host.clone();
        let poller = spawn(move || other.poll().unwrap());
        let mut seen = 0;
        while seen != 0b11 {
            let mut now = 0;
            let collect =
                |s: &mut WatchedShard| s.collect_set(&set, 2, |token, _| now |= 1 << token);
            assert!(w.host.wait_set(&set, Limit::Forever, collect).unwrap() > 0);
            // A program would read; this one leaves the set, so that the other has to come by itself.
            for (token, socket) in w.sockets.into_iter().enumerate() {
                if now & !seen & 1 << token != 0 {
                    w.host.call(|s, _| s.leave_set(socket, &set)).unwrap();
                }
            }
            seen |= now;
        }
        kernel.join().unwrap();
        poller.join().unwrap();
    });
}

fn the_descriptor_of_a_poll_set_is_readable_until_the_candidates_of_all_shards_are_taken() {
    model(2, || {
        let set = Arc::new(PollSetCore::new().unwrap());
        let shards = [0, 1].map(|shard| {
            let set = set.clone();
            spawn(move || {
                let slot = SlotId { index: 1, generation: 0 };
                if set.mark(SocketHandle { shard, slot }) {
                    set.signal();
                }
            })
        });
        set.expose();
        let never: RawFd = -1;
        let mut taken = [0, 0];
        while taken != [1, 1] {
            assert!(sys::sleep_on(None, set.raw_fd(), never));
            let now = [0, 1].map(|shard| set.drain(shard, 9).len());
            taken = [0, 1].map(|shard| taken[shard] + now[shard]);
            if now == [0, 0] {
                // The thread that has written the descriptor has not recorded it yet.
                yield_now();
            }
        }
        shards.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
