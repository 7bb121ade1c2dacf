//! The gateway: one thread that sleeps on the guest's interface and on the host's sockets together, and relays
//! between them.
//!
//! ```text
//!            frames                    events                     bytes
//!   guest ◄────────► Shard::step ──────────────► flows (relay) ◄────────► host's sockets
//!     ▲                                             ▲                        │
//!     └───────────────────── epoll ─────────────────┴────────────────────────┘
//! ```
//!
//! Each turn of the loop takes frames, lets the flows that became ready move bytes, and sleeps if nothing is
//! left. A flow moves a bounded number of bytes in its turn and then waits for its next one.
//!
//! [`Gateway::new`] does all that needs rights, files or other namespaces. [`Gateway::run`] needs only the
//! system calls that [`contain`](mod@crate::contain) allows.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use fulmar_base::{Instant, Outside, SlotId, Stage};
use fulmar_netdev::Device;
use fulmar_runtime::{Account, Ledger};
use fulmar_shard::{Event, Slab, SocketStat};
use nix::sys::epoll::EpollFlags;

use crate::config::{Config, Publish};
use crate::ports::Forward;
use crate::relay::echo::Echoes;
use crate::relay::names::Names;
use crate::relay::poll::{Events, Owner, Owners, Poll};
use crate::relay::services::{Answers, Services};
use crate::relay::tcp::Tcp;
use crate::relay::udp::Udp;
use crate::relay::{Clock, Context, Settings, Shard, canonical};
use crate::setup::{self, SetupError};
use crate::stat::{FlowStat, Stat, Summary, Totals};

/// Called when its descriptor is readable (level-triggered). `Break` ends [`Gateway::run`].
pub type Attendant = Box<dyn FnMut(&OwnedFd, &mut Handle<'_>) -> ControlFlow<()> + Send>;

/// Something beside packets that the loop attends to. Its function is out while it is called.
struct Attended {
    fd: OwnedFd,
    call: Option<Attendant>,
}

/// A gateway of one guest.
pub struct Gateway {
    core: Core,
    attendants: Slab<Attended>,
}

/// Everything but the attendants, so that these can be called with it.
struct Core {
    clock: Clock,
    /// Where the time goes: a turn of the loop is a visit.
    account: Account,
    stack: Shard,
    poll: Poll,
    owners: Owners,
    settings: Settings,
    totals: Totals,
    layers: Layers,
    /// Attendants that came while one was called.
    arrived: Vec<(OwnedFd, Attendant)>,
    /// Room for the events of the shard.
    news: Vec<Event>,
}

/// The transports.
#[derive(Default)]
struct Layers {
    tcp: Tcp,
    udp: Udp,
    echoes: Echoes,
}

/// What an attendant may do with the gateway.
pub struct Handle<'a>(&'a mut Core);

impl Handle<'_> {
    /// A snapshot.
    pub fn stat(&mut self) -> Stat {
        self.0.stat()
    }

    /// Publishes a TCP port, which is bound in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The host's kernel refused it.
    pub fn publish_tcp(&mut self, forward: &Forward) -> io::Result<()> {
        let (layers, mut cx) = self.0.layers();
        layers.tcp.publish(&mut cx, forward)
    }

    /// The same of a UDP port.
    ///
    /// # Errors
    /// As [`Handle::publish_tcp`].
    pub fn publish_udp(&mut self, forward: &Forward) -> io::Result<()> {
        let (layers, mut cx) = self.0.layers();
        layers.udp.publish(&mut cx, forward)
    }

    /// No longer publishes a TCP port; its connections stay.
    pub fn unpublish_tcp(&mut self, forward: &Forward) {
        self.0.layers.tcp.unpublish(forward);
    }

    /// No longer publishes a UDP port; what its flows have is still carried.
    pub fn unpublish_udp(&mut self, forward: &Forward) {
        self.0.layers.udp.unpublish(forward);
    }

    /// As [`Gateway::attend`].
    ///
    /// # Errors
    /// None now; a descriptor that cannot be watched is dropped with its function.
    pub fn attend(&mut self, fd: OwnedFd, call: Attendant) -> io::Result<()> {
        self.0.arrived.push((fd, call));
        Ok(())
    }
}

impl Gateway {
    /// Builds a gateway: binds the published ports in the network namespace of the calling thread, and raises
    /// the limit of descriptors (RLIMIT_NOFILE) as far as it goes.
    ///
    /// # Errors
    /// [`SetupError`], whose `Display` says what to do.
    pub fn new(config: Config) -> Result<Gateway, SetupError> {
        setup::raise_descriptor_limit();
        let clock = Clock::start();
        let stack = setup::stack_config(&config)?;
        let answers = Answers {
            dhcp: config.dhcp,
            dhcp_v6: config.dhcp_v6,
            advertisement: config.advertisement,
        };
        let device = match answers.is_empty() {
            true => config.device,
            false => Box::new(Services::new(config.device, answers)) as Box<dyn Device>,
        };
        let account = Account::new(config.account.map_or_else(Ledger::off, Ledger::new));
        let mut stack = setup::build_stack(stack, device, clock.now(), account.clone())?;
        stack.set_transmit_deferred(Some(Instant::FAR_FUTURE));
        let failed = |e| SetupError::System("cannot make an epoll set", e);
        let mut core = Core {
            clock,
            account,
            stack,
            poll: Poll::new().map_err(failed)?,
            owners: Owners::default(),
            settings: Settings {
                guest: config.network.addresses.iter().map(|(a, _)| *a).collect(),
                routers: setup::routers(&config.network).iter().map(|r| r.addr).collect(),
                stand_in_v6: setup::stand_in_v6(&config.network).map(IpAddr::V6),
                carries: config.carries,
                mapping: config.mapping,
                outbound: config.outbound,
                limits: config.limits,
                bind_addresses: config.publish.addresses,
                policy: config.policy,
                names: Names::default(),
                on_loopback: config.on_loopback,
            },
            totals: Totals::default(),
            layers: Layers::default(),
            arrived: Vec::new(),
            news: Vec::new(),
        };
        core.open(&config.publish)?;
        Ok(Gateway { core, attendants: Slab::default() })
    }

    /// Calls a function whenever a descriptor is readable: of a signalfd, a pidfd, a timerfd, a listening socket.
    ///
    /// # Errors
    /// The descriptor cannot be watched by epoll.
    pub fn attend(&mut self, fd: OwnedFd, call: Attendant) -> io::Result<()> {
        let id = self.attendants.insert(Attended { fd, call: Some(call) });
        let Some(attended) = self.attendants.get(id) else { return Ok(()) };
        let watched = self.core.poll.add_readable(&attended.fd, Owner::Attendant(id));
        if watched.is_err() {
            self.attendants.remove(id);
        }
        watched
    }

    /// Relays until an attendant ends it or the guest's interface is gone, and resets what is left of the
    /// guest's connections then.
    ///
    /// # Errors
    /// The epoll set failed.
    ///
    /// # Panics
    /// Where a policy, an attendant or the relay itself panics. The connections of both sides are reset all the
    /// same: a host that saw an end in order would take half a stream for a whole one.
    pub fn run(&mut self) -> io::Result<Summary> {
        match catch_unwind(AssertUnwindSafe(|| self.relay())) {
            Ok(relayed) => {
                self.core.end();
                relayed.map(|()| self.core.summary())
            }
            Err(fault) => {
                self.core.end_after_fault();
                resume_unwind(fault)
            }
        }
    }

    /// The loop, until an attendant or the interface ends it.
    fn relay(&mut self) -> io::Result<()> {
        let mut events = Events::default();
        let mut has_frames = true;
        loop {
            let until = self.core.turn(has_frames);
            if self.core.stack.down().is_some() {
                break;
            }
            let now = self.core.clock.now();
            let wake = self.core.stack.device().wake_fd();
            self.core.poll.watch_device(wake)?;
            self.core.stack.pass(Stage::Relayed);
            self.core.poll.wait(&mut events, now, until)?;
            self.core.stack.pass(match until {
                Some(Instant::ZERO) => Stage::Spun,
                _ => Stage::Slept,
            });
            has_frames = events.iter().any(|(owner, _)| owner == Owner::Device);
            if self.dispatch(&events).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, events: &Events) -> ControlFlow<()> {
        for (owner, flags) in events.iter() {
            match owner {
                Owner::Device => {}
                Owner::Attendant(id) => self.call(id)?,
                _ => self.core.host_ready(owner, flags),
            }
        }
        ControlFlow::Continue(())
    }

    fn call(&mut self, id: SlotId) -> ControlFlow<()> {
        let Some(attended) = self.attendants.get_mut(id) else { return ControlFlow::Continue(()) };
        let Some(mut call) = attended.call.take() else { return ControlFlow::Continue(()) };
        let outcome = call(&attended.fd, &mut Handle(&mut self.core));
        attended.call = Some(call);
        for (fd, call) in std::mem::take(&mut self.core.arrived) {
            // One that epoll refuses is dropped, as its documentation says.
            let _ = self.attend(fd, call);
        }
        outcome
    }

    /// A snapshot.
    pub fn stat(&mut self) -> Stat {
        self.core.stat()
    }
}

impl Core {
    /// The layers, and what they share.
    fn layers(&mut self) -> (&mut Layers, Context<'_>) {
        let Core { clock, stack, poll, owners, settings, totals, layers, .. } = self;
        let now = clock.now();
        (layers, Context { now, stack, poll, owners, settings, totals })
    }

    /// Opens what the guest's packets and the host's clients come to.
    fn open(&mut self, publish: &Publish) -> Result<(), SetupError> {
        let (layers, mut cx) = self.layers();
        layers.tcp.listen(&mut cx).map_err(SetupError::Listen)?;
        layers.udp.listen(&mut cx).map_err(SetupError::Listen)?;
        layers.echoes.listen(&mut cx).map_err(SetupError::Listen)?;
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

    /// One turn of everything; when the next one is due at the latest. `has_frames`: the device is readable, as
    /// far as is known.
    fn turn(&mut self, has_frames: bool) -> Option<Instant> {
        self.stack.pass(Stage::Relayed);
        self.account.enter();
        let now = self.clock.now();
        let has_held = self.stack.device().next_deadline().is_some_and(|at| at <= now);
        if has_frames || has_held {
            self.stack.step_for_reader(now);
        }
        self.take_news();
        let (Layers { tcp, udp, echoes }, mut cx) = self.layers();
        tcp.run(&mut cx);
        udp.run(&mut cx);
        echoes.expire(&mut cx);
        let has_work = tcp.has_work() || udp.has_work();
        let deadlines = [tcp.next_deadline(now), udp.next_deadline(), echoes.next_deadline()];
        self.stack.step(now, 0);
        // Frames that are left wake by themselves.
        self.stack.device().arm();
        if has_work || self.stack.has_outcome() {
            return Some(Instant::ZERO);
        }
        deadlines.into_iter().chain([self.stack.next_deadline()]).flatten().min()
    }

    /// Tells the owners of the shard's sockets what became ready.
    fn take_news(&mut self) {
        let mut news = std::mem::take(&mut self.news);
        self.stack.take_events(&mut news);
        let (layers, mut cx) = self.layers();
        for event in news.drain(..) {
            let Event::Ready(socket, ready) = event else { continue };
            match cx.owners.of(socket) {
                Some(Owner::Tcp(id)) => layers.tcp.guest_ready(&mut cx, id, ready),
                Some(Owner::TcpListener(_)) => layers.tcp.take_pending(&mut cx),
                Some(Owner::UdpListener(_)) => layers.udp.guest_ready(),
                Some(Owner::Echo(_)) => layers.echoes.take_requests(&mut cx),
                _ => {}
            }
        }
        self.news = news;
    }

    /// A socket of the host became ready.
    fn host_ready(&mut self, owner: Owner, flags: EpollFlags) {
        let (layers, mut cx) = self.layers();
        match owner {
            Owner::Tcp(id) => layers.tcp.host_ready(&mut cx, id, flags),
            Owner::TcpListener(id) => layers.tcp.accept(&mut cx, id),
            Owner::Udp(id) => layers.udp.host_ready(&mut cx, id, flags),
            Owner::UdpListener(id) => layers.udp.published_ready(id),
            Owner::Echo(id) => layers.echoes.host_ready(&mut cx, id, flags),
            Owner::Device | Owner::Attendant(_) => {}
        }
    }

    /// The guest's connections are reset, those of the host with them.
    fn end(&mut self) {
        let (layers, mut cx) = self.layers();
        layers.tcp.reset_all(&mut cx);
        let now = cx.now;
        self.stack.step(now, 64);
    }

    /// The same where a step was left halfway. The host's sockets need nothing of the stack, and come first; the
    /// guest is told as far as the stack still can.
    fn end_after_fault(&mut self) {
        self.layers.tcp.reset_hosts();
        self.settings.policy = None;
        let _ = catch_unwind(AssertUnwindSafe(|| self.end()));
    }

    fn stat(&mut self) -> Stat {
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
        flows.extend(layers.echoes.stat(cx.now));
        let ledger = self.account.ledger();
        let balance = ledger.every().map(|_| ledger.balance());
        let (totals, uptime) = (self.totals.clone(), self.clock.uptime());
        Stat { flows, totals, stack, balance, uptime }
    }

    fn summary(&self) -> Summary {
        Summary {
            totals: self.totals.clone(),
            counters: self.stack.counters().clone(),
            uptime: self.clock.uptime(),
        }
    }
}
