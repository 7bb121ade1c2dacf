//! The thread of one queue of a guest's interface: its shard, its flows and their sockets of the host, and the loop
//! that relays between them.
//!
//! ```text
//!            frames                    events                     bytes
//!   guest ◄────────► Shard::step ──────────────► flows (relay) ◄────────► host's sockets
//!     ▲                                             ▲                        │
//!     └───────────────────── epoll ─────────────────┴────────────────────────┘
//! ```
//!
//! Each turn of the loop takes frames, lets the flows that became ready move bytes, and sleeps if nothing is
//! left. A flow moves a bounded number of bytes in its turn and then waits for its next one. The end of a guest is
//! [`delivery`]'s.

mod delivery;

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use fulmar::internals::runtime::{Ledger, shard_config};
use fulmar_stack::base::{Instant, SlotId, Stage};
use fulmar_stack::device::Device;
use fulmar_stack::shard::{Event, SocketStat, StackConfig};
use fulmar_stack::socket::SocketError;
use nix::sys::epoll::EpollFlags;

use crate::config::{OnLoopback, Publish};
use crate::mapping::Mapping;
use crate::policy::Protocol;
use crate::ports::Forward;
use crate::published;
use crate::relay::datagrams::Batch;
use crate::relay::echo::Echoes;
use crate::relay::poll::{Events, Poll, Token, Tokens};
use crate::relay::shared_policy::SharedPolicy;
use crate::relay::siblings::{Message, Siblings};
use crate::relay::tcp::Tcp;
use crate::relay::udp::Udp;
use crate::relay::wait::Waits;
use crate::relay::{Clock, Context, Settings, Shard, canonical};
use crate::rules::Rules;
use crate::setup::{self, SetupError};
use crate::stat::{FlowStat, Stat, Summary, Totals};

/// The parameters that the workers of a gateway share when they are built.
pub(crate) struct Common<'a> {
    pub clock: Clock,
    /// Of the whole gateway.
    pub stack: &'a StackConfig,
    pub queues: u16,
    /// One turn of the loop in this many is measured; `None`: none is.
    pub account: Option<u32>,
}

/// A queue and all that is its own.
pub(crate) struct Worker {
    clock: Clock,
    /// Where the time goes: a turn of the loop is a visit.
    account: Arc<Ledger>,
    stack: Shard,
    poll: Poll,
    tokens: Tokens,
    settings: Settings,
    totals: Totals,
    layers: Layers,
    siblings: Siblings,
    waits: Waits,
    /// The device was readable at the turn before, too.
    had_frames: bool,
    /// Events of the shard; kept for its memory.
    events: Vec<Event>,
    /// Names that connections wait for.
    wanted: Vec<Arc<str>>,
    to_dns: Vec<(SlotId, SocketAddr, SocketAddr)>,
}

/// The transports.
#[derive(Default)]
pub(crate) struct Layers {
    pub tcp: Tcp,
    pub udp: Udp,
    pub echoes: Echoes,
    /// Memory for the datagrams of a host's socket.
    pub batch: Batch,
}

/// Calls the handler of a descriptor.
pub(crate) type CallHandler<'a> = &'a mut dyn FnMut(&mut Worker, SlotId) -> ControlFlow<()>;

impl Worker {
    /// The worker of one queue.
    ///
    /// # Errors
    /// [`SetupError`].
    pub(crate) fn new(
        number: u16,
        device: Box<dyn Device>,
        settings: Settings,
        siblings: Siblings,
        common: &Common<'_>,
    ) -> Result<Worker, SetupError> {
        let Common { clock, stack, queues, account } = common;
        let account = account.map_or_else(Ledger::off, Ledger::new);
        let config = shard_config(stack, usize::from(*queues));
        let mut stack = setup::build_stack(config, device, clock.now(), number, *queues)?;
        stack.stages().set_observer(account.clone());
        stack.set_transmit_deferred(Some(Instant::FAR_FUTURE));
        let failed = |e| SetupError::System("cannot create an epoll instance", e);
        let poll = Poll::new().map_err(failed)?;
        siblings.join(&mut stack, &poll).map_err(failed)?;
        let mut worker = Worker {
            clock: *clock,
            account,
            stack,
            poll,
            tokens: Tokens::default(),
            settings,
            totals: Totals::default(),
            layers: Layers::default(),
            siblings,
            waits: Waits::default(),
            had_frames: false,
            events: Vec::new(),
            wanted: Vec::new(),
            to_dns: Vec::new(),
        };
        worker.listen().map_err(SetupError::Listen)?;
        Ok(worker)
    }

    /// The set that the loop sleeps on.
    pub(crate) fn poll(&self) -> &Poll {
        &self.poll
    }

    /// Relays until a handler ends it, the guest's interface is gone, or another worker has ended. What is left
    /// of the guest's connections is reset then.
    ///
    /// # Errors
    /// The epoll set failed.
    ///
    /// # Panics
    /// Where a policy, a handler or the relay itself panics. The connections of both sides are reset all the
    /// same: a host that saw an end in order would take half a stream for a whole one.
    pub(crate) fn run(&mut self, handlers: CallHandler<'_>) -> io::Result<()> {
        let relayed = catch_unwind(AssertUnwindSafe(|| {
            self.relay(handlers)?;
            self.siblings.end_all();
            if self.siblings.has_guest_exited() { self.deliver(handlers) } else { Ok(()) }
        }));
        self.siblings.end_all();
        self.siblings.close();
        match relayed {
            Ok(relayed) => {
                self.end();
                relayed
            }
            Err(fault) => {
                self.end_after_fault();
                resume_unwind(fault)
            }
        }
    }

    /// Notes that the guest has no process any more: what it has sent is delivered before the end.
    pub(crate) fn note_guest_exited(&self) {
        self.siblings.note_guest_exited();
    }

    /// Whether that was noted.
    pub(crate) fn has_guest_exited(&self) -> bool {
        self.siblings.has_guest_exited()
    }

    /// Gives all workers a new mapping.
    pub(crate) fn set_mapping(&self, mapping: Mapping) {
        self.siblings.set_mapping(&Arc::new(mapping));
    }

    /// Gives the policy other rules, and lets all workers ask it about their flows.
    pub(crate) fn set_rules(&self, rules: Rules) {
        self.settings.policy.set_rules(rules);
        self.siblings.note_new_rules();
    }

    /// Lets all workers ask the policy about the flows that wait.
    pub(crate) fn decide_again(&self) {
        self.siblings.note_decided();
    }

    /// Ends the other workers.
    pub(crate) fn end_others(&self) {
        self.siblings.end_all();
    }

    /// The loop.
    fn relay(&mut self, handlers: CallHandler<'_>) -> io::Result<()> {
        let mut events = Events::default();
        let mut has_frames = true;
        loop {
            let until = self.turn(has_frames);
            if self.stack.down().is_some() {
                break;
            }
            let wake = self.stack.device().wake_fd();
            self.poll.watch_device(wake)?;
            self.stack.pass(Stage::Relayed);
            let how = self.waits.wait(&self.poll, &mut events, self.clock, until)?;
            self.stack.pass(how);
            has_frames = events.has(Token::Device);
            if self.dispatch(&events, handlers).is_break() || self.siblings.has_ended() {
                break;
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, events: &Events, handlers: CallHandler<'_>) -> ControlFlow<()> {
        for (token, flags) in events.iter() {
            match token {
                Token::Device => {}
                Token::Handler(id) => handlers(self, id)?,
                Token::Siblings => self.take_messages(),
                _ => self.host_ready(token, flags),
            }
        }
        ControlFlow::Continue(())
    }

    /// The layers, and what they share.
    pub(crate) fn layers(&mut self) -> (&mut Layers, Context<'_>) {
        let Worker {
            clock,
            stack,
            poll,
            tokens,
            settings,
            totals,
            layers,
            siblings,
            wanted,
            to_dns,
            ..
        } = self;
        let now = clock.now();
        let cx = Context { now, stack, poll, tokens, settings, totals, siblings, wanted, to_dns };
        (layers, cx)
    }

    /// Opens the sockets of the shard to which the guest's packets come.
    fn listen(&mut self) -> Result<(), SocketError> {
        let (layers, mut cx) = self.layers();
        layers.tcp.listen(&mut cx)?;
        layers.udp.listen(&mut cx)?;
        // Those of all queues come to the first one.
        if cx.stack.siblings().id() == 0 {
            layers.echoes.listen(&mut cx)?;
        }
        Ok(())
    }

    /// Publishes the ports. `on_loopback` takes their connections from the host's loopback.
    pub(crate) fn publish(
        &mut self,
        publish: &Publish,
        on_loopback: Option<OnLoopback>,
    ) -> Result<(), SetupError> {
        self.settings.on_loopback = on_loopback;
        let (layers, mut cx) = self.layers();
        let checked = |forward: &Forward, done: io::Result<()>| match done {
            Err(e) if !forward.is_optional => {
                Err(SetupError::Publish(Box::new(forward.clone()), e))
            }
            _ => Ok(()),
        };
        for forward in &publish.tcp {
            checked(forward, layers.tcp.publish(&mut cx, forward))?;
        }
        for forward in &publish.udp {
            checked(forward, layers.udp.publish(&mut cx, forward))?;
        }
        Ok(())
    }

    /// One turn of the loop. Returns when the next one is due at the latest. `has_frames`: the device was readable at
    /// the last wait.
    fn turn(&mut self, has_frames: bool) -> Option<Instant> {
        self.stack.pass(Stage::Relayed);
        self.account.enter();
        self.stack.stages().observe(self.account.is_measuring());
        let now = self.clock.now();
        let is_device_due = self.stack.device().next_deadline().is_some_and(|at| at <= now);
        let has_handoffs = self.siblings.take_packets(&mut self.stack);
        let is_first = has_frames && !self.had_frames;
        self.had_frames = has_frames;
        if is_device_due || has_handoffs || has_frames && !is_first {
            self.stack.step_for_reader(now);
        } else if is_first {
            // Between a request and its answer there is one frame: a second read would find nothing. Where there are
            // more, the next turn takes them.
            self.stack.step(now, 1);
        }
        self.take_events();
        let (Layers { tcp, udp, echoes, batch }, mut cx) = self.layers();
        tcp.run(&mut cx);
        udp.run(&mut cx, batch);
        for (socket, guest, resolver) in std::mem::take(cx.to_dns) {
            udp.dns.accept(&mut cx, socket, guest, resolver);
        }
        udp.dns.expire(&mut cx);
        for name in std::mem::take(cx.wanted) {
            udp.dns.look_up(&mut cx, &name);
        }
        for name in udp.dns.take_known() {
            tcp.name_known(&mut cx, &name);
        }
        echoes.expire(&mut cx);
        let has_work = tcp.has_work() || udp.has_work() || !cx.wanted.is_empty();
        let deadlines = [
            tcp.next_deadline(),
            udp.next_deadline(),
            udp.dns.next_deadline(),
            echoes.next_deadline(),
        ];
        self.stack.step(now, 0);
        self.siblings.pass_on(&mut self.stack);
        // Frames that are left wake by themselves.
        self.stack.device().arm();
        if has_work || self.stack.has_outcome() || self.siblings.has_packets() {
            return Some(Instant::ZERO);
        }
        deadlines.into_iter().chain([self.stack.next_deadline()]).flatten().min()
    }

    /// Passes the shard's events to the layers.
    fn take_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.stack.take_events(&mut events);
        let (layers, mut cx) = self.layers();
        for event in events.drain(..) {
            let Event::Ready(socket, ready) = event else { continue };
            match cx.tokens.of(socket) {
                Some(Token::Tcp(id)) => layers.tcp.guest_ready(&mut cx, id, ready),
                Some(Token::TcpListener(_)) => layers.tcp.take_pending(&mut cx),
                Some(Token::UdpListener(_)) => layers.udp.guest_ready(),
                Some(Token::Echo(_)) => layers.echoes.take_requests(&mut cx),
                Some(Token::DnsStream(id)) => layers.udp.dns.stream_ready(&mut cx, id),
                _ => {}
            }
        }
        self.events = events;
    }

    /// Takes the messages of other workers.
    fn take_messages(&mut self) {
        if let Some(mapping) = self.siblings.take_mapping() {
            self.settings.mapping = mapping;
            let (layers, mut cx) = self.layers();
            layers.udp.end_moved(&mut cx);
        }
        if self.siblings.take_new_rules() {
            let (layers, mut cx) = self.layers();
            layers.tcp.review(&mut cx);
            layers.udp.review(&mut cx);
            layers.echoes.review(&mut cx);
            layers.tcp.decide_again(&mut cx);
        }
        if self.siblings.take_decided() {
            let (layers, mut cx) = self.layers();
            layers.tcp.decide_again(&mut cx);
        }
        for message in self.siblings.messages() {
            match message {
                Message::Client(client) => {
                    let (layers, mut cx) = self.layers();
                    layers.tcp.take_client(&mut cx, client);
                }
                Message::Datagrams(arrival) => {
                    let (layers, mut cx) = self.layers();
                    layers.udp.take_client_datagrams(&mut cx, &arrival);
                }
                Message::ReleasePort(number) => {
                    let (layers, mut cx) = self.layers();
                    layers.udp.release_port(&mut cx, number);
                }
                Message::EndFlowsOf(socket) => {
                    let (layers, mut cx) = self.layers();
                    layers.udp.end_flows_of(&mut cx, socket);
                }
                Message::Stat(say) => {
                    // The thread that asked may have ended.
                    let _ = say.send(self.stat());
                }
            }
        }
    }

    /// A socket of the host became ready.
    fn host_ready(&mut self, token: Token, flags: EpollFlags) {
        let (Layers { tcp, udp, echoes, batch }, mut cx) = self.layers();
        match token {
            Token::Tcp(id) => tcp.host_ready(&mut cx, id, flags),
            Token::TcpListener(id) => tcp.accept(&mut cx, id),
            Token::Udp(id) => udp.host_ready(&mut cx, batch, id, flags),
            Token::UdpListener(id) => udp.published_ready(&mut cx, batch, id, flags),
            Token::Echo(id) => echoes.host_ready(&mut cx, batch, id, flags),
            Token::Dns(id) => udp.dns.host_ready(&mut cx, batch, id, flags),
            Token::DnsServer(id) => udp.dns.server_ready(&mut cx, id, flags),
            Token::Device | Token::Handler(_) | Token::Siblings | Token::DnsStream(_) => {}
        }
    }

    /// Resets the guest's connections, and the host's with them.
    fn end(&mut self) {
        let (layers, mut cx) = self.layers();
        layers.tcp.reset_all(&mut cx);
        let now = cx.now;
        self.stack.step(now, 64);
    }

    /// As [`Worker::end`] after a panic. The host's sockets are reset by their close; the guest's connections are reset
    /// if the stack is still able to.
    fn end_after_fault(&mut self) {
        self.settings.policy = SharedPolicy::default();
        let _ = catch_unwind(AssertUnwindSafe(|| self.end()));
    }

    /// A snapshot of this queue.
    pub(crate) fn stat(&mut self) -> Stat {
        let mut stack = self.stack.stat();
        let (layers, mut cx) = self.layers();
        let mut flows = layers.tcp.stat(&mut cx);
        let ends = |flow: &FlowStat| (flow.peer, flow.guest);
        let of_flows: HashSet<_> = flows.iter().map(ends).collect();
        let is_of_flow = |s: &SocketStat| {
            s.local.zip(s.remote).is_some_and(|(local, remote)| {
                of_flows.contains(&(canonical(local), canonical(remote)))
            })
        };
        stack.sockets.retain(|s| s.tcp.is_none() || !is_of_flow(s));
        flows.extend(layers.udp.stat(cx.now));
        flows.extend(layers.udp.dns.stat(cx.now));
        flows.extend(layers.echoes.stat(cx.now));
        let mut published = published::stat(Protocol::Tcp, layers.tcp.ports());
        published.extend(published::stat(Protocol::Udp, layers.udp.ports()));
        let account = self.account.account().map(|times| times.with_work(&stack));
        let (totals, uptime) = (self.totals.clone(), self.clock.uptime());
        Stat { queues: 1, flows, published, totals, stack, account, uptime }
    }

    /// A snapshot of all queues, while their workers run.
    pub(crate) fn stat_of_all(&mut self) -> Stat {
        let said = self.siblings.ask_for_stat();
        said.iter().fold(self.stat(), Stat::with)
    }

    /// The counts of this queue's worker.
    pub(crate) fn summary(&self) -> Summary {
        Summary {
            totals: self.totals.clone(),
            counters: self.stack.counters().clone(),
            uptime: self.clock.uptime(),
        }
    }
}
