//! The stack in its three forms: released, keeping an account of its stages, stopping at one of them.
//!
//! The probe is a type parameter of [`fulmar_shard::Shard`] and [`Host`], so that the released path has no trace of
//! it. The types here let one program choose among the three when it creates a stack: a [`Form`] is
//! one of three values, and a call goes to the one that is there. That costs one branch per call and
//! nothing per packet.
//!
//! Whoever adds a call to [`WatchedShard`] that sockets make adds its line to the list below.

use std::net::SocketAddr;
use std::ops::{ControlFlow, DerefMut};
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};

use fulmar_base::{Counter, Counters, Duration, Instant, NoProbe, Outside, Probe, SlotId, Stage};
use fulmar_ip::Ip;
use fulmar_mbuf::{Chain, Pool, RecvBuf, SharedBytes};
use fulmar_netdev::Device;
use fulmar_netdev::moderation::ModerationConfig;
use fulmar_socket::posted::CompletionPolicy;
use fulmar_socket::sendfile::{LowWater, Piece, Rest};
use fulmar_socket::{Ready, Reservation, SocketError, Step};
use fulmar_tcp::LoanCharge;
use fulmar_udp::{BindOptions, Datagram, UdpSocket};

use crate::account::{Account, Ledger};
use crate::completion::Completion;
use crate::exit::{Exit, ExitPoint};
use crate::host::{Guard, Host, PostedRead};
use crate::inbox::Request;
use crate::limit::Limit;
use crate::poll_set::PollSetCore;
use crate::start::{Hosts, StartError, hosts};
use crate::ticket::{Post, RecvTicket, SoleTicket};
use crate::watched::WatchedShard;
use fulmar_shard::{
    Echo, ListenOptions, ListenerStat, RecvMessage, RecvOutcome, Reserved, SendMessage, SentMany,
    Siblings, StackConfig, Stat, TakenDatagram, TcpEntry,
};

/// One of three.
#[derive(Clone)]
pub enum Form<R, A, X> {
    /// The released path.
    Released(R),
    /// Keeps an account.
    Accounted(A),
    /// Stops at a stage.
    Stopping(X),
}

/// A shard in the hands of a call.
pub type AnyShard<'a> =
    Form<&'a mut WatchedShard<NoProbe>, &'a mut WatchedShard<Account>, &'a mut WatchedShard<Exit>>;

/// A locked shard.
pub type AnyGuard<'a> = Form<Guard<'a, NoProbe>, Guard<'a, Account>, Guard<'a, Exit>>;

/// A shard with its lock and its service thread; cheap to clone.
pub type AnyHost = Form<Arc<Host<NoProbe>>, Arc<Host<Account>>, Arc<Host<Exit>>>;

/// A host that may be gone.
pub type WeakHost = Form<Weak<Host<NoProbe>>, Weak<Host<Account>>, Weak<Host<Exit>>>;

/// Which form a stack is to have.
#[derive(Clone, Debug, Default)]
pub enum Probing {
    /// No trace of a probe: the released path.
    #[default]
    Off,
    /// Keeps an account of its stages in this ledger.
    Account(Arc<Ledger>),
    /// Stops at the stage that the exit point names.
    Exit(ExitPoint),
}

/// `$body` for the value that is there.
macro_rules! each {
    ($form:expr, $it:ident => $body:expr) => {
        match $form {
            Form::Released($it) => $body,
            Form::Accounted($it) => $body,
            Form::Stopping($it) => $body,
        }
    };
}

/// Hands calls on to the shard that is there.
macro_rules! calls {
    ($(fn $name:ident $(<$g:ident>)? ($($arg:ident: $t:ty),*) $(-> $r:ty)?;)*) => {
        impl<R, A, X> Form<R, A, X>
        where
            R: DerefMut<Target = WatchedShard<NoProbe>>,
            A: DerefMut<Target = WatchedShard<Account>>,
            X: DerefMut<Target = WatchedShard<Exit>>,
        {
            $(
                #[doc = concat!("`", stringify!($name), "` of the shard: see [`fulmar_shard::Shard`].")]
                #[allow(missing_docs, clippy::missing_errors_doc)]
                #[inline]
                pub fn $name $(<$g>)? (&mut self $(, $arg: $t)*) $(-> $r)? {
                    each!(self, shard => shard.$name($($arg),*))
                }
            )*
        }
    };
}

type Called<T> = Result<T, SocketError>;

calls! {
    fn step(now: Instant, budget: usize) -> usize;
    fn step_for_reader(now: Instant) -> usize;
    fn next_deadline() -> Option<Instant>;
    fn is_down() -> bool;
    fn counters() -> &Counters;
    fn count(c: Counter, n: u64);
    fn pool() -> &mut Pool;
    fn ip() -> &mut Ip;
    fn device() -> &mut dyn Device;
    fn has_backlog() -> bool;
    fn stat() -> Stat;
    fn socket_counts() -> [usize; 3];
    fn stops_at(stage: Stage) -> bool;

    fn tcp_post(now: Instant, id: SlotId, buf: RecvBuf, rule: CompletionPolicy, ticket: &Arc<RecvTicket>)
        -> Result<(), (SocketError, RecvBuf)>;
    fn tcp_cancel_post(now: Instant, id: SlotId, ticket: &Arc<RecvTicket>);

    fn tcp_begin_write(id: SlotId, writer: u64) -> Called<Step<()>>;
    fn tcp_end_write(id: SlotId);
    fn tcp_write_fails(id: SlotId) -> bool;
    fn tcp_reserve(now: Instant, id: SlotId, first: &[u8], total: usize, waited: bool)
        -> Called<Step<Reserved>>;
    fn tcp_reserve_at_once(id: SlotId, total: usize) -> Called<Step<Reservation>>;
    fn tcp_commit(now: Instant, id: SlotId, r: Reservation);
    fn tcp_abandon(id: SlotId, r: Reservation);
    fn tcp_share(now: Instant, id: SlotId, owner: &Arc<dyn SharedBytes>, part: (usize, usize), waited: bool)
        -> Called<Step<usize>>;
    fn tcp_send_space(id: SlotId) -> Called<usize>;
    fn tcp_append(now: Instant, id: SlotId, chain: &mut Chain, more: bool) -> Called<Step<()>>;

    fn sendfile_reserve(now: Instant, id: SlotId, rest: &Rest, worth: LowWater)
        -> Called<Step<(Reservation, Piece)>>;
    fn sendfile_commit(now: Instant, id: SlotId, r: Reservation, filled: usize, more: bool) -> Called<()>;
    fn sendfile_share(now: Instant, id: SlotId, pages: &Arc<dyn SharedBytes>, rest: (&Rest, usize), worth: LowWater)
        -> Called<Step<usize>>;
    fn sends_pages(id: SlotId) -> bool;
    fn sendfile_end(id: SlotId);
    fn sendfile_deferred();
    fn sendfile_fail(now: Instant, id: SlotId, r: Reservation);

    fn tcp_connect(now: Instant, remote: SocketAddr, local: Option<SocketAddr>) -> Called<SlotId>;
    fn tcp_connected(id: SlotId) -> Called<Step<()>>;
    fn tcp_entry(id: SlotId) -> Called<&mut TcpEntry>;
    fn tcp_listen(local: SocketAddr, options: ListenOptions) -> Called<SlotId>;
    fn tcp_accept(id: SlotId) -> Called<Step<(SlotId, SocketAddr)>>;
    fn tcp_take(id: SlotId, max: usize) -> Called<Step<Chain>>;
    fn tcp_read_done(now: Instant, id: SlotId, chain: Chain);
    fn tcp_peek(id: SlotId, into: &mut [u8]) -> Called<Step<usize>>;
    fn tcp_shutdown(now: Instant, id: SlotId, read: bool, write: bool) -> Called<()>;
    fn tcp_take_more(id: SlotId, max: usize, done: usize, patient: bool) -> Called<Step<Chain>>;
    fn tcp_peek_at(id: SlotId, off: usize, max: usize, least: usize) -> Called<Step<Chain>>;
    fn tcp_lend(now: Instant, id: SlotId, max: usize, patient: bool)
        -> Called<Step<(Chain, LoanCharge)>>;
    fn take_back(now: Instant, id: SlotId, chain: Chain, lent: LoanCharge);
    fn set_listener_ttl(id: SlotId, ttl: u8) -> Called<()>;
    fn listener_ttl(id: SlotId) -> Called<Option<u8>>;
    fn listener_stat(id: SlotId) -> Called<ListenerStat>;
    fn with_tcb<T>(now: Instant, id: SlotId, f: impl FnOnce(&mut TcpEntry) -> T) -> Called<T>;

    fn udp_bind(local: SocketAddr, options: BindOptions) -> Called<SlotId>;
    fn udp_open(remote: SocketAddr) -> Called<SlotId>;
    fn siblings() -> &mut Siblings;
    fn owner_of_connection(remote: SocketAddr, local: SocketAddr) -> Called<u16>;
    fn udp_connect(id: SlotId, remote: SocketAddr) -> Called<()>;
    fn udp_send(now: Instant, id: SlotId, parts: &[&[u8]], to: Option<SocketAddr>) -> Called<usize>;
    fn udp_send_step(now: Instant, id: SlotId, parts: &[&[u8]], to: Option<SocketAddr>)
        -> Called<Step<usize>>;
    fn udp_send_many(now: Instant, id: SlotId, messages: &[SendMessage<'_>], is_first: bool)
        -> Called<Step<SentMany>>;
    fn udp_receive(id: SlotId) -> Called<Step<Datagram>>;
    fn udp_receive_into(id: SlotId, into: &mut [u8]) -> Called<Step<TakenDatagram>>;
    fn udp_receive_many(id: SlotId, into: &mut [RecvMessage<'_>]) -> Called<Step<usize>>;
    fn udp_lend(id: SlotId) -> Called<Step<(Datagram, LoanCharge)>>;
    fn udp_peek(id: SlotId, into: &mut [u8]) -> Called<Step<(usize, SocketAddr)>>;
    fn with_udp<T>(id: SlotId, f: impl FnOnce(&mut UdpSocket) -> T) -> Called<T>;

    fn ping_open() -> SlotId;
    fn ping_send(now: Instant, id: SlotId, to: SocketAddr, seq: u16, bytes: &[u8]) -> Called<()>;
    fn ping_receive(id: SlotId) -> Called<Step<Echo>>;

    fn free(chain: Chain);
    fn take_error(id: SlotId) -> Called<Option<SocketError>>;
    fn close(now: Instant, id: SlotId);
    fn close_all(now: Instant);
    fn is_drained(id: Option<SlotId>) -> bool;
    fn ready(id: SlotId) -> Called<Ready>;
    fn addresses(id: SlotId) -> Called<(Option<SocketAddr>, Option<SocketAddr>)>;
    fn join_set(id: SlotId, set: &Arc<PollSetCore>, token: usize, interest: Ready) -> Called<()>;
    fn leave_set(id: SlotId, set: &Arc<PollSetCore>) -> Called<()>;
    fn collect_set(set: &Arc<PollSetCore>, limit: usize, ready: impl FnMut(usize, Ready)) -> usize;
}

impl AnyShard<'_> {
    /// See [`fulmar_shard::Shard::udp_send_connected`].
    #[allow(clippy::missing_errors_doc)]
    #[inline(always)]
    pub fn udp_send_connected(
        &mut self,
        now: Instant,
        id: SlotId,
        payload: &[u8],
    ) -> Called<Step<usize>> {
        each!(self, shard => shard.udp_send_connected(now, id, payload))
    }
}

impl<'a> AnyGuard<'a> {
    /// The shard, to be passed on.
    pub fn shard(&mut self) -> AnyShard<'_> {
        match self {
            Form::Released(g) => Form::Released(g.deref_mut()),
            Form::Accounted(g) => Form::Accounted(g.deref_mut()),
            Form::Stopping(g) => Form::Stopping(g.deref_mut()),
        }
    }
}

impl WeakHost {
    /// The host, if it is still there.
    pub fn upgrade(&self) -> Option<AnyHost> {
        match self {
            Form::Released(host) => host.upgrade().map(Form::Released),
            Form::Accounted(host) => host.upgrade().map(Form::Accounted),
            Form::Stopping(host) => host.upgrade().map(Form::Stopping),
        }
    }
}

impl AnyHost {
    /// A handle that does not keep the host.
    pub fn downgrade(&self) -> WeakHost {
        match self {
            Form::Released(host) => Form::Released(Arc::downgrade(host)),
            Form::Accounted(host) => Form::Accounted(Arc::downgrade(host)),
            Form::Stopping(host) => Form::Stopping(Arc::downgrade(host)),
        }
    }

    /// A stack of one shard for each device, in the form that `probing` asks for: each under a lock of its
    /// own, with its service thread. The devices are the queues of one interface; memory and tables are
    /// divided among the shards.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        config: &StackConfig,
        devices: Vec<Box<dyn Device>>,
        probing: Probing,
        name: &str,
    ) -> Result<Vec<AnyHost>, StartError> {
        Ok(match probing {
            Probing::Off => form(hosts(config, devices, name, || NoProbe)?, Form::Released),
            Probing::Account(ledger) => {
                let account = || Account::new(Arc::clone(&ledger));
                form(hosts(config, devices, name, account)?, Form::Accounted)
            }
            Probing::Exit(at) => {
                form(hosts(config, devices, name, || Exit::new(at.clone()))?, Form::Stopping)
            }
        })
    }

    /// The ledger, if the stack keeps one.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        match self {
            Form::Accounted(host) => Some(host.outside().ledger()),
            Form::Released(_) | Form::Stopping(_) => None,
        }
    }

    /// The caller passes a stage outside of the lock; `Break`: undo, and return as if all were done.
    #[inline]
    pub fn stage(&self, stage: Stage) -> ControlFlow<()> {
        each!(self, host => host.outside().stage(stage))
    }

    /// Whether calls end at a stage: for what begins behind it.
    #[inline]
    pub fn ends_at(&self, stage: Stage) -> bool {
        match self {
            Form::Stopping(host) => host.outside().stage(stage).is_break(),
            Form::Released(_) | Form::Accounted(_) => false,
        }
    }

    /// See [`Host::is_ours`].
    pub fn is_ours(&self) -> bool {
        each!(self, host => host.is_ours())
    }

    /// See [`Host::set_moderation`].
    ///
    /// # Errors
    /// As there.
    pub fn set_moderation(&self, config: ModerationConfig) -> Result<(), SocketError> {
        each!(self, host => host.set_moderation(config))
    }

    /// See [`Host::lock`].
    ///
    /// # Errors
    /// As there.
    pub fn lock(&self) -> Result<AnyGuard<'_>, SocketError> {
        Ok(match self {
            Form::Released(host) => Form::Released(host.lock()?),
            Form::Accounted(host) => Form::Accounted(host.lock()?),
            Form::Stopping(host) => Form::Stopping(host.lock()?),
        })
    }

    /// See [`Host::call`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn call<T>(
        &self,
        f: impl FnOnce(&mut AnyShard<'_>, Instant) -> Result<T, SocketError>,
    ) -> Result<T, SocketError> {
        match self {
            Form::Released(host) => host.call(|s, now| f(&mut Form::Released(s), now)),
            Form::Accounted(host) => host.call(|s, now| f(&mut Form::Accounted(s), now)),
            Form::Stopping(host) => host.call(|s, now| f(&mut Form::Stopping(s), now)),
        }
    }

    /// See [`Host::post`].
    pub fn post(&self, request: Request) {
        each!(self, host => host.post(request));
    }

    /// See [`Host::wait`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn wait<T>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: Limit,
        mut step: impl FnMut(&mut AnyShard<'_>, Instant) -> Result<Step<T>, SocketError>,
    ) -> Result<T, SocketError> {
        match self {
            Form::Released(host) => {
                host.wait(socket, interest, limit, |s, now| step(&mut Form::Released(s), now))
            }
            Form::Accounted(host) => {
                host.wait(socket, interest, limit, |s, now| step(&mut Form::Accounted(s), now))
            }
            Form::Stopping(host) => {
                host.wait(socket, interest, limit, |s, now| step(&mut Form::Stopping(s), now))
            }
        }
    }

    /// See [`Host::wait_recently`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn wait_recently<T>(
        &self,
        socket: SlotId,
        interest: Ready,
        limit: impl FnOnce() -> Limit,
        mut step: impl FnMut(&mut AnyShard<'_>, Instant) -> Result<Step<T>, SocketError>,
    ) -> Result<T, SocketError> {
        match self {
            Form::Released(host) => host
                .wait_recently(socket, interest, limit, |s, now| step(&mut Form::Released(s), now)),
            Form::Accounted(host) => host.wait_recently(socket, interest, limit, |s, now| {
                step(&mut Form::Accounted(s), now)
            }),
            Form::Stopping(host) => host
                .wait_recently(socket, interest, limit, |s, now| step(&mut Form::Stopping(s), now)),
        }
    }

    /// See [`Host::wait_set`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_set(
        &self,
        set: &Arc<PollSetCore>,
        limit: Limit,
        mut collect: impl FnMut(&mut AnyShard<'_>) -> usize,
    ) -> Result<usize, SocketError> {
        match self {
            Form::Released(host) => host.wait_set(set, limit, |s| collect(&mut Form::Released(s))),
            Form::Accounted(host) => {
                host.wait_set(set, limit, |s| collect(&mut Form::Accounted(s)))
            }
            Form::Stopping(host) => host.wait_set(set, limit, |s| collect(&mut Form::Stopping(s))),
        }
    }

    /// See [`Host::wait_completion`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_completion(&self, c: &Completion, limit: Limit) -> Result<bool, SocketError> {
        each!(self, host => host.wait_completion(c, limit))
    }

    /// See [`Host::wait_ticket`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_ticket(&self, ticket: &RecvTicket, limit: Limit) -> Result<bool, SocketError> {
        each!(self, host => host.wait_ticket(ticket, limit))
    }

    /// See [`Host::wait_outcome`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_outcome(
        &self,
        ticket: &mut SoleTicket<'_>,
        limit: Limit,
        post: &mut Option<Post<'_>>,
    ) -> Called<Option<RecvOutcome>> {
        each!(self, host => host.wait_outcome(ticket, limit, post))
    }

    /// See [`Host::read_or_post`].
    ///
    /// # Errors
    /// As there.
    pub fn read_or_post(
        &self,
        ticket: &mut SoleTicket<'_>,
        limit: Limit,
        post: &mut Option<Post<'_>>,
    ) -> Called<PostedRead> {
        each!(self, host => host.read_or_post(ticket, limit, post))
    }

    /// See [`Host::places_reads`]. No stage of a read would be passed by one that is placed, so a stack that
    /// stops at stages has none.
    #[inline]
    pub fn places_reads(&self) -> bool {
        match self {
            Form::Released(host) => host.places_reads(),
            Form::Accounted(host) => host.places_reads(),
            Form::Stopping(_) => false,
        }
    }

    /// See [`Host::expose_set`].
    pub fn expose_set(&self, set: &Arc<PollSetCore>) -> RawFd {
        each!(self, host => host.expose_set(set))
    }

    /// See [`Host::poll_for_sets`].
    pub fn poll_for_sets(&self) {
        each!(self, host => host.poll_for_sets());
    }

    /// See [`Host::forget_set`].
    pub fn forget_set(&self, set: &PollSetCore) {
        each!(self, host => host.forget_set(set));
    }

    /// See [`Host::poll`].
    ///
    /// # Errors
    /// As there.
    pub fn poll(&self) -> Result<usize, SocketError> {
        each!(self, host => host.poll())
    }

    /// See [`Host::failure`].
    pub fn failure(&self) -> Option<&str> {
        each!(self, host => host.failure())
    }

    /// See [`Host::in_destructor`].
    pub fn in_destructor<R: Default>(&self, f: impl FnOnce() -> R) -> R {
        each!(self, host => host.in_destructor(f))
    }

    /// See [`Host::stop`].
    pub fn stop(&self) {
        each!(self, host => host.stop());
    }

    /// See [`Host::drain`].
    pub fn drain(&self, socket: Option<SlotId>, limit: Duration) -> bool {
        each!(self, host => host.drain(socket, limit))
    }
}

fn form<P: Probe>(all: Hosts<P>, form: impl Fn(Arc<Host<P>>) -> AnyHost) -> Vec<AnyHost> {
    all.into_iter().map(form).collect()
}
