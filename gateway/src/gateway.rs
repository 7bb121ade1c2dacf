//! The gateway: one thread for each queue of the guest's interface, which sleeps on the queue and on its flows'
//! sockets of the host together ([`worker`](crate::worker)).
//!
//! ```text
//!   guest ──► queue 0 ◄──► worker 0 ◄──► host's sockets, published ports, handlers
//!        │                    │  ▲ packets, clients and datagrams of the other's flows
//!        │                    ▼  │
//!        └──► queue 1 ◄──► worker 1 ◄──► host's sockets
//! ```
//!
//! [`Gateway::new`] does all that needs rights, files or other namespaces. [`Gateway::run`] starts the threads, which
//! are contained as its caller is, and needs only the system calls that [`contain`](mod@crate::contain) allows.

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use fulmar_stack::base::SlotId;
use fulmar_stack::shard::Slab;

use crate::config::Config;
use crate::mapping::Mapping;
use crate::ports::Forward;
use crate::relay::poll::Token;
use crate::relay::services::{Answers, Services, SharedAnswers};
use crate::relay::shared_names::SharedNames;
use crate::relay::shared_policy::SharedPolicy;
use crate::relay::siblings::Siblings;
use crate::relay::{Clock, Settings};
use crate::rules::Rules;
use crate::setup::{self, SetupError};
use crate::stat::{Stat, Summary};
use crate::worker::{Common, Worker};
use crate::{dhcp, ra};

/// The handler of a descriptor: called when it is readable (level-triggered). `Break` ends [`Gateway::run`], and the
/// handler with it.
pub type FdHandler = Box<dyn FnMut(&OwnedFd, &mut Handle<'_>) -> ControlFlow<()> + Send>;

/// A descriptor of the first queue's loop with its handler, which is taken out while it is called.
struct Watched {
    fd: OwnedFd,
    handler: Option<FdHandler>,
}

/// A gateway of one guest.
pub struct Gateway {
    /// The worker of the first queue, which has the published ports and calls the handlers.
    first: Worker,
    others: Vec<Worker>,
    watched: Slab<Watched>,
    answers: SharedAnswers,
}

/// The operations on the gateway that a handler has.
pub struct Handle<'a> {
    first: &'a mut Worker,
    answers: &'a SharedAnswers,
    is_done: bool,
}

impl Handle<'_> {
    /// A snapshot.
    pub fn stat(&mut self) -> Stat {
        self.first.stat_of_all()
    }

    /// Publishes a TCP port, which is bound in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The host's kernel refused it.
    pub fn publish_tcp(&mut self, forward: &Forward) -> io::Result<()> {
        let (layers, mut cx) = self.first.layers();
        layers.tcp.publish(&mut cx, forward)
    }

    /// The same of a UDP port.
    ///
    /// # Errors
    /// As [`Handle::publish_tcp`].
    pub fn publish_udp(&mut self, forward: &Forward) -> io::Result<()> {
        let (layers, mut cx) = self.first.layers();
        cx.siblings.release_port(forward.from);
        layers.udp.publish(&mut cx, forward)
    }

    /// The UDP ports of the host at which ports of the guest leave.
    pub fn own_udp_ports(&mut self) -> BTreeSet<u16> {
        self.first.layers().1.siblings.own_ports()
    }

    /// No longer publishes a TCP port; its connections stay.
    pub fn unpublish_tcp(&mut self, forward: &Forward) {
        self.first.layers().0.tcp.unpublish(forward);
    }

    /// Stops publishing a UDP port, and ends its flows.
    pub fn unpublish_udp(&mut self, forward: &Forward) {
        let (layers, mut cx) = self.first.layers();
        layers.udp.unpublish(&mut cx, forward);
    }

    /// Replaces the mapping in the threads of all queues. Connections stay as they are; a UDP flow whose destination
    /// leads elsewhere by the new mapping begins anew with the next datagram.
    pub fn set_mapping(&mut self, mapping: Mapping) {
        self.first.set_mapping(mapping);
    }

    /// Gives the policy other rules ([`Policy::set_rules`](crate::Policy::set_rules)), and asks it anew about all flows, in
    /// the threads of all queues: those that it denies now are reset.
    pub fn set_rules(&mut self, rules: Rules) {
        self.first.set_rules(rules);
    }

    /// Asks the policy again about the flows that wait for its decision
    /// ([`Decision::Wait`](crate::policy::Decision::Wait)), in the threads of all queues.
    pub fn decide_again(&mut self) {
        self.first.decide_again();
    }

    /// Replaces what the guest is given by DHCP and DHCPv6 when it asks, and by router advertisements: a new one is sent
    /// to it at once.
    pub fn set_answers(
        &mut self,
        dhcp: Option<dhcp::Lease>,
        dhcp_v6: Option<dhcp::LeaseV6>,
        advertisement: Option<ra::Link>,
    ) {
        self.answers.set(Answers { dhcp, dhcp_v6, advertisement });
    }

    /// Closes the descriptor of this handler, which is not called any more.
    pub fn forget(&mut self) {
        self.is_done = true;
    }

    /// Notes that the guest has no process any more. Where the handler then ends [`Gateway::run`], what the guest has
    /// sent is delivered first, for a minute at most; published ports are closed at once.
    pub fn note_guest_exited(&mut self) {
        self.first.note_guest_exited();
    }
}

impl Gateway {
    /// Builds a gateway: binds the published ports in the network namespace of the calling thread, and raises
    /// the limit of descriptors (RLIMIT_NOFILE) as far as it goes.
    ///
    /// # Errors
    /// [`SetupError`], whose `Display` says what to do.
    pub fn new(mut config: Config) -> Result<Gateway, SetupError> {
        let descriptors = setup::raise_descriptor_limit();
        setup::divide_descriptors(&mut config.limits, descriptors);
        let stack = setup::stack_config(&config)?;
        let devices = std::mem::take(&mut config.queues);
        let queues = setup::queue_count(&devices)?;
        let policy = SharedPolicy::new(config.policy.take());
        let names = SharedNames::new(config.names);
        let on_loopback = config.on_loopback.take();
        let answers = SharedAnswers::new(Answers {
            dhcp: config.dhcp.take(),
            dhcp_v6: config.dhcp_v6.take(),
            advertisement: config.advertisement.take(),
        });
        let siblings = Siblings::all(devices.len());
        let siblings = siblings.map_err(|e| SetupError::System("cannot create an eventfd", e))?;
        let (clock, account) = (Clock::start(), config.account);
        let common = Common { clock, stack: &stack, queues, account };
        let places = (0..queues).zip(devices).zip(siblings);
        let mut workers = places.map(|((number, device), siblings)| {
            let settings = Settings::new(&config, &policy, &names, usize::from(queues));
            let device = Box::new(Services::before(device, answers.clone()));
            Worker::new(number, device, settings, siblings, &common)
        });
        let mut first = workers.next().unwrap_or(Err(SetupError::Queues))?;
        let others = workers.collect::<Result<_, _>>()?;
        first.publish(&config.publish, on_loopback)?;
        Ok(Gateway { first, others, watched: Slab::default(), answers })
    }

    /// Calls a function whenever a descriptor is readable: of a signalfd, a pidfd, a timerfd, a listening socket.
    ///
    /// # Errors
    /// The descriptor cannot be watched by epoll.
    pub fn on_readable(&mut self, fd: OwnedFd, handler: FdHandler) -> io::Result<()> {
        let id = self.watched.insert(Watched { fd, handler: Some(handler) });
        let Some(Watched { fd, .. }) = self.watched.get(id) else { return Ok(()) };
        let added = self.first.poll().add_readable(fd, Token::Handler(id));
        if added.is_err() {
            self.watched.remove(id);
        }
        added
    }

    /// Relays until a handler ends it or the guest's interface is gone, and resets what is left of the
    /// guest's connections then. The calling thread is the first queue's.
    ///
    /// # Errors
    /// An epoll set failed, or a thread could not be started.
    ///
    /// # Panics
    /// Where a policy, a handler or the relay itself panics, in whichever thread. All threads end, and the
    /// connections of both sides are reset all the same: a host that saw an end in order would take half a stream
    /// for a whole one.
    pub fn run(&mut self) -> io::Result<Summary> {
        let Gateway { first, others, watched, answers } = self;
        let ends = thread::scope(|scope| {
            let mut threads = Vec::with_capacity(others.len());
            for (number, worker) in (1..).zip(others) {
                let thread = thread::Builder::new().name(format!("queue {number}"));
                let run = || worker.run(&mut |_, _| ControlFlow::Continue(()));
                match thread.spawn_scoped(scope, run) {
                    Ok(thread) => threads.push(thread),
                    Err(e) => {
                        first.end_others();
                        return vec![Ok(Err(e))];
                    }
                }
            }
            let own = AssertUnwindSafe(|| {
                first.run(&mut |worker, id| call(watched, answers, worker, id))
            });
            let mut ends = vec![catch_unwind(own)];
            ends.extend(threads.into_iter().map(|thread| thread.join()));
            ends
        });
        let ends: Result<Vec<io::Result<()>>, Box<dyn Any + Send>> = ends.into_iter().collect();
        ends.unwrap_or_else(|fault| resume_unwind(fault))
            .into_iter()
            .collect::<io::Result<()>>()?;
        let others = self.others.iter().map(Worker::summary);
        Ok(others.fold(self.first.summary(), |all, other| all.with(&other)))
    }

    /// Whether [`Handle::note_guest_exited`] was called, and no signal has cut the delivery short.
    pub fn has_guest_exited(&self) -> bool {
        self.first.has_guest_exited()
    }

    /// A snapshot, while it does not run.
    pub fn stat(&mut self) -> Stat {
        self.others.iter_mut().map(Worker::stat).fold(self.first.stat(), Stat::with)
    }
}

fn call(
    watched: &mut Slab<Watched>,
    answers: &SharedAnswers,
    first: &mut Worker,
    id: SlotId,
) -> ControlFlow<()> {
    let Some(entry) = watched.get_mut(id) else { return ControlFlow::Continue(()) };
    let Some(mut handler) = entry.handler.take() else { return ControlFlow::Continue(()) };
    let mut handle = Handle { first, answers, is_done: false };
    let outcome = handler(&entry.fd, &mut handle);
    // A descriptor whose handler ends the loop stays readable.
    if outcome.is_break() || handle.is_done {
        watched.remove(id);
    } else {
        entry.handler = Some(handler);
    }
    outcome
}
