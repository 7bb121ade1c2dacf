//! The threads of a gateway's queues, as one of them sees the others.
//!
//! A flow belongs to the queue that a keyed hash of its two ends names, for its whole life
//! ([`fulmar_stack::base::OwnerKey`]). Arrivals on other threads are passed on: packets of the guest by the rings of
//! the shards ([`Handoff`]), and arrivals at a published port as a [`Message`]. The first queue's thread watches all
//! published ports. A thread wakes those to which it has passed something on at the end of its own turn.
//!
//! Bound: [`MOST_MESSAGES`] wait for a thread, [`MOST_DATAGRAMS`] with datagrams, so that a flood of datagrams leaves
//! space for clients. A client beyond that waits in the host's backlog, a datagram is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar::internals::runtime::{Handoff, handoffs};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Shard;
use super::poll::{Poll, Token};
use crate::mapping::Mapping;
use crate::published::PublishedPort;
use crate::stat::Stat;

/// Most messages that wait for one thread. A datagram or run of them has up to 64 KiB.
const MOST_MESSAGES: usize = 256;
/// Messages that wait for one thread up to which datagrams are accepted.
const MOST_DATAGRAMS: usize = MOST_MESSAGES / 2;

/// A message from one thread to another.
pub(crate) enum Message {
    /// A connection from outside.
    Client(Client),
    /// A datagram from outside, or a run of them.
    Datagrams(ClientDatagrams),
    /// The first queue's thread asks for a snapshot.
    Stat(Sender<Stat>),
    /// A UDP port of the host that is to be published.
    ReleasePort(u16),
    /// The socket of a UDP port that is not published any more: its flows end.
    EndFlowsOf(RawFd),
}

/// A client that was accepted at a published port. It is reset where no thread takes it: its listener has
/// [SO_LINGER of zero](super::host_socket::set_stream_options).
pub(crate) struct Client {
    pub stream: TcpStream,
    pub from: SocketAddr,
    /// The port that accepted it.
    pub port: Arc<PublishedPort>,
}

/// A datagram, or a run of datagrams, that a client sent to a published port.
pub(crate) struct ClientDatagrams {
    pub port: Arc<PublishedPort>,
    /// The socket of the published port, and to which of its addresses it came.
    pub socket: Arc<OwnedFd>,
    pub local: Option<IpAddr>,
    pub client: SocketAddr,
    /// The flow: the guest's end, and the client as the guest sees it.
    pub guest: SocketAddr,
    pub seen: SocketAddr,
    pub bytes: Vec<u8>,
    /// Of a run: the length of each datagram but the last.
    pub segment_bytes: Option<u16>,
}

#[derive(Default)]
struct Mail {
    waiting: VecDeque<Message>,
    /// The latest mapping that its thread has not taken.
    mapping: Option<Arc<Mapping>>,
    /// The policy has new rules, about which its thread has not asked for its flows.
    has_new_rules: bool,
    /// The policy can decide about flows that wait.
    has_decided: bool,
    /// Its thread has nothing left to deliver of a guest that is gone, unless another one hands it something.
    has_delivered: bool,
    /// Its thread has ended.
    is_closed: bool,
}

struct Mailbox {
    mail: Mutex<Mail>,
    /// Edge-triggered, so it is written and never read.
    wake: EventFd,
}

impl Mailbox {
    fn new() -> io::Result<Mailbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Mailbox { mail: Mutex::default(), wake })
    }

    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full eventfd counter still wakes the thread.
        let _ = self.wake.write(1);
    }
}

/// The UDP ports of the host that the gateway has.
#[derive(Default)]
struct UdpPorts {
    /// Sockets of published ports, by the guest's port and the IP version.
    published: HashMap<(u16, bool), Arc<OwnedFd>>,
    /// Numbers of the sockets of guests' ports, and how many each has.
    own: BTreeMap<u16, usize>,
}

struct Shared {
    mailboxes: Vec<Mailbox>,
    udp_ports: Mutex<UdpPorts>,
    has_ended: AtomicBool,
    has_guest_exited: AtomicBool,
}

/// One thread's end.
pub(crate) struct Siblings {
    own: u16,
    shared: Arc<Shared>,
    /// Where there are several queues.
    handoff: Option<Handoff>,
    /// Threads to wake, a bit each.
    kicks: u32,
}

impl Siblings {
    /// The ends for the threads of `queues` queues.
    ///
    /// # Errors
    /// No descriptor.
    pub(crate) fn all(queues: usize) -> io::Result<Vec<Siblings>> {
        let mailboxes = (0..queues).map(|_| Mailbox::new()).collect::<io::Result<_>>()?;
        let shared = Arc::new(Shared {
            mailboxes,
            udp_ports: Mutex::default(),
            has_ended: AtomicBool::new(false),
            has_guest_exited: AtomicBool::new(false),
        });
        let mut rings = if queues > 1 { handoffs(queues) } else { Vec::new() }.into_iter();
        let end =
            |own| Siblings { own, shared: Arc::clone(&shared), handoff: rings.next(), kicks: 0 };
        Ok((0..queues as u16).map(end).collect())
    }

    /// Makes the shard one of several, and lets its thread be woken.
    ///
    /// # Errors
    /// The epoll set has no room.
    pub(crate) fn join(&self, stack: &mut Shard, poll: &Poll) -> io::Result<()> {
        if let Some(handoff) = &self.handoff {
            stack.siblings().join(handoff.ports());
        }
        self.own_box().map_or(Ok(()), |own| poll.add_arrivals(&own.wake, Token::Siblings))
    }

    /// Whether there is one queue only.
    pub(crate) fn is_alone(&self) -> bool {
        self.handoff.is_none()
    }

    fn own_box(&self) -> Option<&Mailbox> {
        self.shared.mailboxes.get(usize::from(self.own))
    }

    fn others(&self) -> impl Iterator<Item = (u16, &Mailbox)> {
        let all = (0..).zip(&self.shared.mailboxes);
        all.filter(|(number, _)| *number != self.own)
    }

    /// Gives the shard the hand-offs of other threads. Returns whether there were any.
    pub(crate) fn take_packets(&mut self, stack: &mut Shard) -> bool {
        self.handoff.as_mut().is_some_and(|handoff| handoff.deliver_to(stack))
    }

    /// Passes hand-offs to other threads, and wakes them.
    pub(crate) fn pass_on(&mut self, stack: &mut Shard) {
        if let Some(handoff) = &mut self.handoff {
            handoff.collect_from(stack);
            self.kicks |= handoff.take_kicks();
        }
        self.wake();
    }

    fn wake(&mut self) {
        let mut kicks = std::mem::take(&mut self.kicks);
        while kicks != 0 {
            let number = kicks.trailing_zeros();
            kicks &= kicks - 1;
            if let Some(mailbox) = self.shared.mailboxes.get(number as usize) {
                mailbox.wake();
            }
        }
    }

    /// Whether packets wait that the shard had no space for.
    pub(crate) fn has_packets(&self) -> bool {
        self.handoff.as_ref().is_some_and(|handoff| !handoff.is_empty())
    }

    /// Whether the queue of one of the other threads is full.
    pub(crate) fn is_busy(&self) -> bool {
        self.others().any(|(_, mailbox)| mailbox.mail().waiting.len() >= MOST_MESSAGES)
    }

    /// Posts a message to another thread.
    ///
    /// # Errors
    /// The message: the thread has ended, or its queue is full.
    #[allow(clippy::result_large_err, reason = "given back by value: no heap per message")]
    pub(crate) fn post(&mut self, to: u16, message: Message) -> Result<(), Message> {
        let Some(mailbox) = self.shared.mailboxes.get(usize::from(to)) else { return Err(message) };
        let most =
            if matches!(message, Message::Datagrams(_)) { MOST_DATAGRAMS } else { MOST_MESSAGES };
        let mut mail = mailbox.mail();
        if mail.is_closed || mail.waiting.len() >= most {
            return Err(message);
        }
        mail.waiting.push_back(message);
        self.kicks |= 1 << to;
        Ok(())
    }

    /// Takes the messages to this thread.
    pub(crate) fn messages(&self) -> VecDeque<Message> {
        self.own_box().map(|own| std::mem::take(&mut own.mail().waiting)).unwrap_or_default()
    }

    fn udp_ports(&self) -> MutexGuard<'_, UdpPorts> {
        self.shared.udp_ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the sockets of published UDP ports by which guests' ports leave.
    pub(crate) fn share_published(&self, sockets: HashMap<(u16, bool), Arc<OwnedFd>>) {
        self.udp_ports().published = sockets;
    }

    /// The socket of a published port that leads to a guest's port, of an IP version.
    pub(crate) fn published_socket(&self, to: (u16, bool)) -> Option<Arc<OwnedFd>> {
        self.udp_ports().published.get(&to).map(Arc::clone)
    }

    /// The socket of a guest's port was bound to a number of the host, or is closed.
    pub(crate) fn own_port(&self, number: u16, is_bound: bool) {
        let own = &mut self.udp_ports().own;
        let sockets = own.entry(number).or_insert(0);
        *sockets = if is_bound { *sockets + 1 } else { sockets.saturating_sub(1) };
        if *sockets == 0 {
            own.remove(&number);
        }
    }

    /// The numbers of the host to which sockets of guests' ports are bound.
    pub(crate) fn own_ports(&self) -> BTreeSet<u16> {
        self.udp_ports().own.keys().copied().collect()
    }

    /// Asks the other threads to close the sockets of guests' ports with a number of the host.
    pub(crate) fn release_port(&mut self, number: u16) {
        let others: Vec<u16> = self.others().map(|(other, _)| other).collect();
        for other in others {
            // One that is busy keeps its port.
            let _ = self.post(other, Message::ReleasePort(number));
        }
    }

    /// Asks the other threads to end the flows of the socket of a port that is not published any more.
    pub(crate) fn end_flows_of(&mut self, socket: RawFd) {
        let others: Vec<u16> = self.others().map(|(other, _)| other).collect();
        for other in others {
            // One that is busy keeps its flows.
            let _ = self.post(other, Message::EndFlowsOf(socket));
        }
    }

    /// Gives every thread, this one included, a new mapping. The latest one counts.
    pub(crate) fn set_mapping(&self, mapping: &Arc<Mapping>) {
        for mailbox in &self.shared.mailboxes {
            mailbox.mail().mapping = Some(Arc::clone(mapping));
            mailbox.wake();
        }
    }

    /// Takes a new mapping for this thread.
    pub(crate) fn take_mapping(&self) -> Option<Arc<Mapping>> {
        self.own_box().and_then(|own| own.mail().mapping.take())
    }

    /// Tells every thread, this one included, that the policy has new rules.
    pub(crate) fn note_new_rules(&self) {
        for mailbox in &self.shared.mailboxes {
            mailbox.mail().has_new_rules = true;
            mailbox.wake();
        }
    }

    /// Whether this thread has to ask about its flows by new rules.
    pub(crate) fn take_new_rules(&self) -> bool {
        self.own_box().is_some_and(|own| std::mem::take(&mut own.mail().has_new_rules))
    }

    /// Tells every thread, this one included, that the policy can decide about flows that wait.
    pub(crate) fn note_decided(&self) {
        for mailbox in &self.shared.mailboxes {
            mailbox.mail().has_decided = true;
            mailbox.wake();
        }
    }

    /// Whether this thread has to ask again about its flows that wait.
    pub(crate) fn take_decided(&self) -> bool {
        self.own_box().is_some_and(|own| std::mem::take(&mut own.mail().has_decided))
    }

    /// Asks every other thread for a snapshot; there will be one for each that has not ended.
    pub(crate) fn ask_for_stat(&mut self) -> Receiver<Stat> {
        let (reply, replies) = channel();
        let others: Vec<u16> = self.others().map(|(number, _)| number).collect();
        for number in others {
            // One that is busy is left out.
            let _ = self.post(number, Message::Stat(reply.clone()));
        }
        self.wake();
        replies
    }

    /// Ends every thread.
    pub(crate) fn end_all(&self) {
        self.shared.has_ended.store(true, Release);
        self.shared.mailboxes.iter().for_each(Mailbox::wake);
    }

    /// Notes that the guest has no process any more. To be called before [`Siblings::end_all`].
    pub(crate) fn note_guest_exited(&self) {
        self.shared.has_guest_exited.store(true, Release);
    }

    /// Ends the threads, and what they deliver of a guest that is gone.
    pub(crate) fn end_at_once(&self) {
        self.shared.has_guest_exited.store(false, Release);
        self.end_all();
    }

    /// Whether the guest has no process any more, and what it has sent is to be delivered.
    pub(crate) fn has_guest_exited(&self) -> bool {
        self.shared.has_guest_exited.load(Acquire)
    }

    /// Whether a thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.shared.has_ended.load(Acquire)
    }

    /// This thread has nothing left to deliver of a guest that is gone. It goes on until the others say so, too.
    pub(crate) fn note_delivered(&self) {
        let Some(own) = self.own_box() else { return };
        let had_delivered = std::mem::replace(&mut own.mail().has_delivered, true);
        if !had_delivered {
            self.others().for_each(|(_, mailbox)| mailbox.wake());
        }
    }

    /// Whether a thread that has delivered may exit: no other one still delivers, which could hand packets over to it.
    /// The first thread, which has the signals that cut a delivery short, waits for the end of the others.
    pub(crate) fn may_exit(&self) -> bool {
        let is_first = self.own == 0;
        self.others().all(|(_, mailbox)| {
            let mail = mailbox.mail();
            mail.is_closed || mail.has_delivered && !is_first
        })
    }

    /// Takes no messages any more. Clients that wait are reset, and the others hear that this thread ends.
    pub(crate) fn close(&self) {
        let Some(own) = self.own_box() else { return };
        let waiting = {
            let mut mail = own.mail();
            mail.is_closed = true;
            std::mem::take(&mut mail.waiting)
        };
        drop(waiting);
        self.others().for_each(|(_, mailbox)| mailbox.wake());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::PortSpec;
    use std::io::Read;
    use std::net::TcpListener;

    fn port() -> Arc<PublishedPort> {
        let spec: PortSpec = "80".parse().unwrap();
        Arc::new(PublishedPort::new(spec.forwards().remove(0)))
    }

    fn client(listener: &TcpListener) -> (Message, TcpStream) {
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, from) = listener.accept().unwrap();
        (Message::Client(Client { stream, from, port: port() }), far)
    }

    fn datagrams() -> Message {
        let any = SocketAddr::from(([0; 4], 0));
        let socket = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let (local, bytes, segment_bytes) = (None, vec![], None);
        let [client, guest, seen] = [any; 3];
        let port = port();
        Message::Datagrams(ClientDatagrams {
            port,
            socket,
            local,
            client,
            guest,
            seen,
            bytes,
            segment_bytes,
        })
    }

    #[test]
    fn messages_wait_for_one_thread_up_to_a_bound_which_datagrams_cannot_reach() {
        let mut all = Siblings::all(2).unwrap();
        let left = (0..2 * MOST_MESSAGES).filter(|_| all[0].post(1, datagrams()).is_ok()).count();
        assert_eq!(left, MOST_DATAGRAMS);
        assert!(!all[0].is_busy(), "clients have space");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far_ends = Vec::new();
        for _ in MOST_DATAGRAMS..MOST_MESSAGES {
            let (message, far) = client(&listener);
            assert!(all[0].post(1, message).is_ok());
            far_ends.push(far);
        }
        assert!(all[0].post(1, client(&listener).0).is_err());
        assert!(all[0].is_busy() && !all[1].is_busy());
        assert_eq!((all[0].messages().len(), all[1].messages().len()), (0, MOST_MESSAGES));
        assert!(!all[0].is_busy() && all[0].post(9, datagrams()).is_err());
    }

    #[test]
    fn the_latest_mapping_reaches_every_thread_once() {
        let all = Siblings::all(2).unwrap();
        assert_eq!(all[0].take_mapping(), None);
        for zone in [1, 2] {
            all[0].set_mapping(&Arc::new(Mapping { zone, ..Mapping::default() }));
        }
        for own in &all {
            assert_eq!(own.take_mapping().map(|mapping| mapping.zone), Some(2));
            assert_eq!(own.take_mapping(), None);
        }
    }

    #[test]
    fn a_thread_that_has_ended_takes_nothing_and_resets_its_clients() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        crate::relay::host_socket::set_stream_options(&listener);
        let mut all = Siblings::all(2).unwrap();
        let (message, mut far) = client(&listener);
        assert!(all[0].post(1, message).is_ok());
        all[1].close();
        let error = far.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(all[0].post(1, datagrams()).is_err());
    }

    #[test]
    fn a_snapshot_of_a_thread_that_has_ended_is_not_waited_for() {
        let mut all = Siblings::all(3).unwrap();
        all[1].close();
        let said = all[0].ask_for_stat();
        all[2].close();
        assert!(said.recv().is_err());
    }

    #[test]
    fn the_end_of_one_is_the_end_of_all() {
        let all = Siblings::all(2).unwrap();
        assert!(!all[0].has_ended());
        all[1].end_all();
        assert!(all[0].has_ended() && all[1].has_ended());
    }

    #[test]
    fn the_first_thread_ends_a_delivery_last() {
        let all = Siblings::all(3).unwrap();
        all[0].note_delivered();
        all[1].note_delivered();
        assert!(!all[0].may_exit() && !all[1].may_exit(), "the third one delivers");
        all[2].note_delivered();
        assert!(all[1].may_exit() && all[2].may_exit() && !all[0].may_exit());
        all[1].close();
        assert!(!all[0].may_exit(), "the third one has not ended");
        all[2].close();
        assert!(all[0].may_exit());
    }

    #[test]
    fn a_thread_that_has_ended_early_delivers_nothing() {
        let all = Siblings::all(3).unwrap();
        all[2].note_delivered();
        all[0].close();
        assert!(!all[2].may_exit());
        all[1].close();
        assert!(all[2].may_exit());
    }
}
