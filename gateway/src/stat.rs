//! The counts of a gateway, and a snapshot of its flows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fulmar::internals::runtime::Account;
use fulmar_stack::base::Counters;
use fulmar_stack::tcp::Info;

use crate::policy::Protocol;
use crate::published::PublishedStat;

macro_rules! refusals {
    ($($(#[doc = $doc:literal])* $variant:ident = $name:literal;)*) => {
        /// Why something was not carried.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Refusal { $($(#[doc = $doc])* $variant,)* }

        impl Refusal {
            /// All of them.
            pub const ALL: &'static [Refusal] = &[$(Refusal::$variant,)*];

            /// The name in figures for machines.
            pub const fn name(self) -> &'static str {
                match self { $(Refusal::$variant => $name,)* }
            }

            /// The reason in a sentence.
            pub const fn sentence(self) -> &'static str {
                match self { $(Refusal::$variant => concat!($($doc),*),)* }
            }
        }
    };
}

refusals! {
    /// The policy denies the flow.
    Policy = "policy";
    /// The policy has not decided: a datagram came meanwhile, a connection waited for too long, or too many wait.
    Undecided = "undecided";
    /// A new policy denies a flow that the one before allowed; it was ended.
    PolicyChanged = "policy_changed";
    /// The destination is one that the options do not permit: the host's loopback, a group, a broadcast.
    Forbidden = "forbidden";
    /// As many flows as are allowed exist already.
    FlowLimit = "flow_limit";
    /// The host had been silent for longest when another connection needed the place.
    ConnectingLimit = "connecting_limit";
    /// The gateway has no descriptor left.
    Descriptors = "descriptors";
    /// The host's kernel refused to make a socket or to use it.
    HostSocket = "host_socket";
    /// A host refused the connection.
    Refused = "refused";
    /// The host has no route to the destination.
    Unreachable = "unreachable";
    /// A host did not answer in time.
    TimedOut = "timed_out";
    /// The guest gave up before the host had answered.
    GivenUp = "given_up";
    /// The guest did not accept a connection to a published port.
    GuestRefused = "guest_refused";
    /// A datagram was longer than the host's path takes.
    TooLong = "too_long";
    /// The host's kernel had no room for a datagram.
    HostQueueFull = "host_queue_full";
    /// No buffer was free for a datagram to the guest.
    NoBuffer = "no_buffer";
    /// The queue that owns a flow had too much from published ports waiting.
    QueueBusy = "queue_busy";
    /// A host wrote to a UDP port of the guest unasked, and the filter or the policy does not allow it.
    Unsolicited = "unsolicited";
    /// A datagram or an echo request had no hop left.
    HopLimit = "hop_limit";
    /// A datagram to a published port came from an address that the guest cannot answer.
    NoAnswerAddress = "no_answer_address";
    /// The guest asked for more names than get addresses.
    NameLimit = "name_limit";
    /// Too many names were being looked up.
    LookupLimit = "lookup_limit";
    /// The destination is in a range of names, and stands for none.
    NoName = "no_name";
    /// A name has no address or no resolver gave one, or a datagram came before it was looked up.
    NameFailed = "name_failed";
    /// The guest's first bytes ask for another name than that of the address, or cannot be read.
    FirstBytes = "first_bytes";
    /// The upstream proxy refused the connection, or the protocol does not pass through it.
    Upstream = "upstream";
    /// A rule's limit of flows, bytes or rate is reached.
    Allowance = "allowance";
    /// An answer of a DNS server is to no outstanding question.
    DnsAnswer = "dns_answer";
    /// Idle for longest when another flow needed its place.
    Displaced = "displaced";
}

/// How often each [`Refusal`] happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusals([u64; Refusal::ALL.len()]);

impl Default for Refusals {
    fn default() -> Self {
        Refusals([0; Refusal::ALL.len()])
    }
}

impl Refusals {
    /// One more.
    pub fn count(&mut self, why: Refusal) {
        self.0[why as usize] += 1;
    }

    /// Adds `count` refusals for this reason.
    pub fn add(&mut self, why: Refusal, count: u64) {
        self.0[why as usize] += count;
    }

    /// Those of another queue, too.
    fn merge(&mut self, other: &Refusals) {
        self.0.iter_mut().zip(other.0).for_each(|(n, more)| *n += more);
    }

    /// How many.
    pub fn value(&self, why: Refusal) -> u64 {
        self.0[why as usize]
    }

    /// Those that happened.
    pub fn iter(&self) -> impl Iterator<Item = (Refusal, u64)> + '_ {
        Refusal::ALL.iter().map(|why| (*why, self.value(*why))).filter(|(_, n)| *n > 0)
    }
}

/// The side that began a flow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(clippy::exhaustive_enums, reason = "a flow has two ends")]
pub enum Direction {
    /// The guest.
    Out,
    /// A client of a published port, or a host that writes to a UDP port of the guest unasked.
    In,
}

impl Direction {
    /// The name in figures for machines.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Out => "out",
            Direction::In => "in",
        }
    }
}

/// A flow.
#[derive(Clone, Debug)]
pub struct FlowStat {
    /// Its number in the gateway's life, from 1. `None`: it carries DNS; its questions are reported instead.
    pub id: Option<u64>,
    /// Its transport.
    pub protocol: Protocol,
    /// The side that began it.
    pub direction: Direction,
    /// The guest's end.
    pub guest: SocketAddr,
    /// The other end as the guest knows it.
    pub peer: SocketAddr,
    /// The other end as the host knows it.
    pub host: SocketAddr,
    /// The name that the guest's address of the other end stands for.
    pub name: Option<Arc<str>>,
    /// The rule that has allowed it.
    pub rule: Option<Arc<str>>,
    /// Its state: `connecting`, `open`, `half-closed`; of a datagram flow `open`.
    pub state: &'static str,
    /// Bytes of payload from the guest.
    pub bytes_out: u64,
    /// Bytes of payload to the guest.
    pub bytes_in: u64,
    /// Since it began.
    pub age: Duration,
    /// Since it carried something.
    pub idle: Duration,
    /// The connection with the guest.
    pub tcp: Option<Info>,
    /// The connection with the host, where there are not too many to ask the kernel for each.
    pub host_tcp: Option<HostTcp>,
}

/// A connection of the host's kernel (tcp(7), TCP_INFO).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostTcp {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Segments sent again since it began.
    pub retransmits: u32,
    /// Segments sent and not yet acknowledged.
    pub in_flight_pkts: u32,
    /// Bytes in the kernel's send buffer that were not sent yet.
    pub unsent_bytes: u32,
}

/// Totals since the start.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Totals {
    /// TCP flows that were opened.
    pub tcp_flows: u64,
    /// UDP flows.
    pub udp_flows: u64,
    /// Flows of echo requests.
    pub echo_flows: u64,
    /// Bytes of payload from the guest.
    pub bytes_out: u64,
    /// Bytes of payload to the guest.
    pub bytes_in: u64,
    /// Datagrams from the guest.
    pub datagrams_out: u64,
    /// Datagrams to the guest.
    pub datagrams_in: u64,
    /// Refused traffic, with the reasons.
    pub refusals: Refusals,
}

impl Totals {
    /// Those of another queue, too.
    pub(crate) fn add(&mut self, other: &Totals) {
        self.tcp_flows += other.tcp_flows;
        self.udp_flows += other.udp_flows;
        self.echo_flows += other.echo_flows;
        self.bytes_out += other.bytes_out;
        self.bytes_in += other.bytes_in;
        self.datagrams_out += other.datagrams_out;
        self.datagrams_in += other.datagrams_in;
        self.refusals.merge(&other.refusals);
    }
}

/// A snapshot of a gateway.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stat {
    /// Queues of the guest's interface. All else is of all of them together.
    pub queues: usize,
    /// The flows.
    pub flows: Vec<FlowStat>,
    /// The published ports, TCP first.
    pub published: Vec<PublishedStat>,
    /// Totals since the start.
    pub totals: Totals,
    /// The stack on the guest's interface: counters, drops, buffers, device, neighbours. Of its sockets those that
    /// belong to no flow.
    pub stack: fulmar_stack::shard::Stat,
    /// The account of the stack, if it is kept.
    pub account: Option<Account>,
    /// Since the start.
    pub uptime: Duration,
}

impl Stat {
    /// This and another queue together.
    pub(crate) fn with(mut self, other: Stat) -> Stat {
        self.flows.extend(other.flows);
        self.published.extend(other.published);
        self.totals.add(&other.totals);
        let account = match (self.account, &other.account) {
            (Some(own), Some(other)) => Some(own.and(other)),
            (own, _) => own,
        };
        let queues = self.queues + other.queues;
        Stat { queues, account, stack: self.stack.with(other.stack), ..self }
    }
}

/// The totals of a gateway's life.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Summary {
    /// Totals.
    pub totals: Totals,
    /// Counters and drops of the stack.
    pub counters: Counters,
    /// How long it ran.
    pub uptime: Duration,
}

impl Summary {
    /// This and another queue together.
    pub(crate) fn with(mut self, other: &Summary) -> Summary {
        self.totals.add(&other.totals);
        self.counters.merge(&other.counters);
        self
    }
}
