//! The end of a guest that has no process any more: what it has left is delivered before its gateway ends. Its kernel
//! still sends what its programs wrote, and a FIN.
//!
//! ```text
//!   Busy ◄──► MayCome ──► Quiet ──► Delivered ──► the end, once no other queue delivers
//!     ▲                     │           │
//!     └──── something of the guest ─────┘
//! ```

use std::io;

use fulmar_stack::base::{Duration, Instant};

use super::{CallHandler, Layers, Worker};
use crate::relay::poll::{Events, Token};

/// How long a guest that is gone has for what it has left, as Linux gives a connection whose program is gone
/// (net.ipv4.tcp_fin_timeout).
const LONGEST: Duration = Duration::from_secs(60);

/// How far the delivery of one queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Bytes or datagrams of the guest wait for their turn.
    Busy,
    /// The guest's kernel may still send. If it is silent until this time, nothing is left.
    MayCome(Instant),
    /// Nothing is left, unless the next look at the guest brings something.
    Quiet,
    /// Nothing is left, and the other queues have been notified. They may still hand something over.
    Delivered,
}

/// The delivery of one queue for a guest that is gone.
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
    pub(super) fn deliver(&mut self, handlers: CallHandler<'_>) -> io::Result<()> {
        let mut delivery = Delivery { begun: self.clock.now(), state: State::Busy };
        self.unpublish_all();
        let mut events = Events::default();
        let mut has_frames = true;
        loop {
            let due = self.turn(has_frames);
            delivery.state = self.state_after_turn(&delivery);
            if self.is_cut_short(&delivery) {
                return Ok(());
            }
            self.sleep(&mut events, &delivery, due)?;
            has_frames = events.has(Token::Device);
            if self.dispatch(&events, handlers).is_break() {
                self.siblings.end_at_once();
            }
            delivery.state = self.conclude(delivery.state, &events);
            if delivery.state == State::Delivered && self.siblings.may_exit() {
                return Ok(());
            }
        }
    }

    fn unpublish_all(&mut self) {
        let (layers, mut cx) = self.layers();
        layers.tcp.unpublish_all();
        layers.udp.unpublish_all(&mut cx);
    }

    /// The state after a turn.
    fn state_after_turn(&mut self, delivery: &Delivery) -> State {
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

    /// Whether bytes or datagrams of the guest wait for their turn.
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
            || !self.siblings.has_guest_exited()
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
            State::Delivered if self.siblings.may_exit() => Instant::ZERO,
            State::Busy | State::Delivered => delivery.ends(),
        };
        let wake = self.stack.device().wake_fd();
        self.poll.watch_device(wake)?;
        let until = due.map_or(until, |due| due.min(until));
        self.poll.wait(events, self.clock.now(), Some(until)).map(drop)
    }

    /// The state after the events of a wait. What hosts send keeps neither the gateway running nor a port bound.
    fn conclude(&mut self, state: State, events: &Events) -> State {
        if state == State::Busy || events.has(Token::Device) || events.has(Token::Siblings) {
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
