//! The gateway: one thread for each queue of the guest's interface, which sleeps on the queue and on its flows'
//! sockets of the host together ([`worker`](crate::worker)).
//!
//! ```text
//!   guest ──► queue 0 ◄──► worker 0 ◄──► host's sockets, published ports, attendants
//!        │                    │  ▲ packets, clients and datagrams of the other's flows
//!        │                    ▼  │
//!        └──► queue 1 ◄──► worker 1 ◄──► host's sockets
//! ```
//!
//! [`Gateway::new`] does all that needs rights, files or other namespaces. [`Gateway::run`] starts the threads, which
//! are contained as its caller is, and needs only the system calls that [`contain`](mod@crate::contain) allows.

use std::any::Any;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use fulmar_base::SlotId;
use fulmar_shard::Slab;

use crate::config::Config;
use crate::ports::Forward;
use crate::relay::judge::Judge;
use crate::relay::poll::Owner;
use crate::relay::services::{Answers, Services};
use crate::relay::siblings::Siblings;
use crate::relay::{Clock, Settings};
use crate::setup::{self, SetupError};
use crate::stat::{Stat, Summary};
use crate::worker::{Common, Worker};

/// Called when its descriptor is readable (level-triggered). `Break` ends [`Gateway::run`], and the attendant with it.
pub type Attendant = Box<dyn FnMut(&OwnedFd, &mut Handle<'_>) -> ControlFlow<()> + Send>;

/// Something beside packets that the loop of the first queue attends to. Its function is out while it is called.
struct Attended {
    fd: OwnedFd,
    call: Option<Attendant>,
}

/// A gateway of one guest.
pub struct Gateway {
    /// That of the first queue has the published ports, and calls the attendants.
    first: Worker,
    others: Vec<Worker>,
    attendants: Slab<Attended>,
}

/// What an attendant may do with the gateway.
pub struct Handle<'a> {
    first: &'a mut Worker,
    /// Attendants that come while one is called.
    arrived: Vec<(OwnedFd, Attendant)>,
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
        layers.udp.publish(&mut cx, forward)
    }

    /// No longer publishes a TCP port; its connections stay.
    pub fn unpublish_tcp(&mut self, forward: &Forward) {
        self.first.layers().0.tcp.unpublish(forward);
    }

    /// No longer publishes a UDP port; what its flows have is still carried.
    pub fn unpublish_udp(&mut self, forward: &Forward) {
        self.first.layers().0.udp.unpublish(forward);
    }

    /// The guest has no process any more. Where the attendant then ends [`Gateway::run`], what the guest has sent is
    /// delivered first: for a minute at most, and published ports are closed.
    pub fn guest_is_gone(&mut self) {
        self.first.note_guest_is_gone();
    }

    /// As [`Gateway::attend`].
    ///
    /// # Errors
    /// None now; a descriptor that cannot be watched is dropped with its function.
    pub fn attend(&mut self, fd: OwnedFd, call: Attendant) -> io::Result<()> {
        self.arrived.push((fd, call));
        Ok(())
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
        let tcp_flows = &mut config.limits.tcp_flows;
        *tcp_flows = (*tcp_flows).min(setup::most_tcp_flows(descriptors));
        let stack = setup::stack_config(&config)?;
        let devices = std::mem::take(&mut config.queues);
        let queues = setup::count_of(&devices)?;
        let judge = Judge::new(config.policy.take());
        let on_loopback = config.on_loopback.take();
        let answers = Answers {
            dhcp: config.dhcp.take(),
            dhcp_v6: config.dhcp_v6.take(),
            advertisement: config.advertisement.take(),
        };
        let siblings = Siblings::all(devices.len());
        let siblings = siblings.map_err(|e| SetupError::System("cannot make an eventfd", e))?;
        let (clock, account) = (Clock::start(), config.account);
        let common = Common { clock, stack: &stack, queues, account };
        let places = (0..queues).zip(devices).zip(siblings);
        let mut workers = places.map(|((number, device), siblings)| {
            let settings = Settings::new(&config, &judge, usize::from(queues));
            let device = Services::before(device, &answers);
            Worker::new(number, device, settings, siblings, &common)
        });
        let mut first = workers.next().unwrap_or(Err(SetupError::Queues))?;
        let others = workers.collect::<Result<_, _>>()?;
        first.publish(&config.publish, on_loopback)?;
        Ok(Gateway { first, others, attendants: Slab::default() })
    }

    /// Calls a function whenever a descriptor is readable: of a signalfd, a pidfd, a timerfd, a listening socket.
    ///
    /// # Errors
    /// The descriptor cannot be watched by epoll.
    pub fn attend(&mut self, fd: OwnedFd, call: Attendant) -> io::Result<()> {
        attend(&mut self.attendants, &self.first, fd, call)
    }

    /// Relays until an attendant ends it or the guest's interface is gone, and resets what is left of the
    /// guest's connections then. The calling thread is the first queue's.
    ///
    /// # Errors
    /// An epoll set failed, or a thread could not be started.
    ///
    /// # Panics
    /// Where a policy, an attendant or the relay itself panics, in whichever thread. All threads end, and the
    /// connections of both sides are reset all the same: a host that saw an end in order would take half a stream
    /// for a whole one.
    pub fn run(&mut self) -> io::Result<Summary> {
        let Gateway { first, others, attendants } = self;
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
            let own =
                AssertUnwindSafe(|| first.run(&mut |worker, id| call(attendants, worker, id)));
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

    /// Whether an attendant has said that the guest has no process any more, and nothing has cut its delivery short.
    pub fn has_lost_guest(&self) -> bool {
        self.first.has_lost_guest()
    }

    /// A snapshot, while it does not run.
    pub fn stat(&mut self) -> Stat {
        self.others.iter_mut().map(Worker::stat).fold(self.first.stat(), Stat::with)
    }
}

fn attend(
    attendants: &mut Slab<Attended>,
    first: &Worker,
    fd: OwnedFd,
    call: Attendant,
) -> io::Result<()> {
    let id = attendants.insert(Attended { fd, call: Some(call) });
    let Some(attended) = attendants.get(id) else { return Ok(()) };
    let watched = first.poll().add_readable(&attended.fd, Owner::Attendant(id));
    if watched.is_err() {
        attendants.remove(id);
    }
    watched
}

fn call(attendants: &mut Slab<Attended>, first: &mut Worker, id: SlotId) -> ControlFlow<()> {
    let Some(attended) = attendants.get_mut(id) else { return ControlFlow::Continue(()) };
    let Some(mut call) = attended.call.take() else { return ControlFlow::Continue(()) };
    let mut handle = Handle { first, arrived: Vec::new() };
    let outcome = call(&attended.fd, &mut handle);
    let arrived = handle.arrived;
    match outcome {
        ControlFlow::Continue(()) => attended.call = Some(call),
        // Its descriptor stays readable.
        ControlFlow::Break(()) => drop(attendants.remove(id)),
    }
    for (fd, call) in arrived {
        // One that epoll refuses is dropped, as its documentation says.
        let _ = attend(attendants, first, fd, call);
    }
    outcome
}
