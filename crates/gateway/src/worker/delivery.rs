//! The end of a guest that has no process any more: what it has left is delivered before its gateway ends. Its kernel
//! still sends what its programs wrote, and a FIN.
//!
//! ```text
//!   Busy ◄──► MayCome ──► Quiet ──► Delivered ──► the end, once no other queue delivers
//!     ▲                     │           │
//!     └──── something of the guest ─────┘
//! ```

use std::io;

use fulmar_base::{Duration, Instant};

use super::{Attends, Layers, Worker};
use crate::relay::poll::{Events, Owner};

/// How long a guest that is gone has for what it has left, as Linux gives a connection whose program is gone
/// (net.ipv4.tcp_fin_timeout).
const LONGEST: Duration = Duration::from_secs(60);

/// How far one queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Something that the guest has sent waits for its turn.
    Busy,
    /// The guest's kernel may have something left, and nothing if it is silent until then.
    MayCome(Instant),
    /// Nothing is left, unless the next look at the guest brings something.
    Quiet,
    /// Nothing is left, as the other queues were told. They may still hand something over.
    Delivered,
}

/// What one queue delivers of a guest that is gone.
struct Delivery {
    begun: Instant,
    state: State,
}

impl Delivery {
    /// When it is given up.
    fn ends(&self) -> Instant {
        self.begun + LONGEST
    }
}

impl Worker {
    /// Delivers what is left, for a while at most.
    pub(super) fn deliver(&mut self, attends: Attends<'_>) -> io::Result<()> {
        let mut delivery = Delivery { begun: self.clock.now(), state: State::Busy };
        self.unpublish_all();
        let mut events = Events::default();
        let mut has_frames = true;
        loop {
            let due = self.turn(has_frames);
            delivery.state = self.look_at(&delivery);
            if self.is_cut_short(&delivery) {
                return Ok(());
            }
            self.sleep(&mut events, &delivery, due)?;
            has_frames = events.has(Owner::Device);
            if self.dispatch(&events, attends).is_break() {
                self.siblings.end_at_once();
            }
            delivery.state = self.conclude(delivery.state, &events);
            if delivery.state == State::Delivered && self.siblings.may_leave() {
                return Ok(());
            }
        }
    }

    fn unpublish_all(&mut self) {
        let (layers, _) = self.layers();
        layers.tcp.unpublish_all();
        layers.udp.unpublish_all();
    }

    /// How far it is after a turn.
    fn look_at(&mut self, delivery: &Delivery) -> State {
        if self.has_of_guest() {
            return State::Busy;
        }
        let (layers, cx) = self.layers();
        let delivered_at = layers.tcp.delivered_at(delivery.begun);
        match delivery.state {
            _ if delivered_at > cx.now => State::MayCome(delivered_at),
            State::Delivered => State::Delivered,
            _ => State::Quiet,
        }
    }

    /// Whether something that the guest has sent waits for its turn.
    fn has_of_guest(&self) -> bool {
        let Layers { tcp, udp, .. } = &self.layers;
        tcp.has_work()
            || udp.has_datagrams()
            || self.stack.has_outcome()
            || self.siblings.has_packets()
    }

    /// Whether it takes too long, a signal has come, or the guest's interface is gone.
    fn is_cut_short(&self, delivery: &Delivery) -> bool {
        self.clock.now() > delivery.ends()
            || !self.siblings.is_guest_gone()
            || self.stack.down().is_some()
    }

    /// Waits for events; `due`: until the next turn is.
    fn sleep(
        &mut self,
        events: &mut Events,
        delivery: &Delivery,
        due: Option<Instant>,
    ) -> io::Result<()> {
        let until = match delivery.state {
            State::MayCome(until) => until.min(delivery.ends()),
            State::Quiet => Instant::ZERO,
            State::Delivered if self.siblings.may_leave() => Instant::ZERO,
            State::Busy | State::Delivered => delivery.ends(),
        };
        let wake = self.stack.device().wake_fd();
        self.poll.watch_device(wake)?;
        let until = due.map_or(until, |due| due.min(until));
        self.poll.wait(events, self.clock.now(), Some(until)).map(drop)
    }

    /// What the events of a wait leave of a state. What a host goes on sending keeps neither the gateway nor a port.
    fn conclude(&mut self, state: State, events: &Events) -> State {
        if state == State::Busy || events.has(Owner::Device) || events.has(Owner::Siblings) {
            return State::Busy;
        }
        let (layers, mut cx) = self.layers();
        layers.udp.end_published(&mut cx);
        if let State::MayCome(_) = state {
            return state;
        }
        self.siblings.note_delivered();
        State::Delivered
    }
}
