//! The policy: which flows of a guest may leave, and for which names it may ask.

use std::net::SocketAddr;

use crate::stat::FlowStat;

/// A transport that the gateway carries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// Echo requests of ICMP and ICMPv6.
    Icmp,
}

impl Protocol {
    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Icmp => "icmp",
        }
    }
}

/// A flow that a guest begins.
#[derive(Clone, Copy, Debug)]
pub struct NewFlow<'a> {
    /// Its transport.
    pub protocol: Protocol,
    /// The guest's end.
    pub from: SocketAddr,
    /// The destination as the guest wrote it. The port of an echo request is 0.
    pub to: SocketAddr,
    /// The destination as the host knows it, after [`Mapping`](crate::mapping::Mapping).
    pub leads_to: SocketAddr,
    /// The names for which the guest's resolvers had this address, the latest first.
    pub names: &'a [String],
    /// The names for which other DNS servers had it, the latest first. The guest may have chosen the server, or run it:
    /// a reason to deny, none to allow.
    pub claimed_names: &'a [String],
}

/// Whether a flow may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// It may.
    Allow,
    /// It may not: a connection is reset, a datagram is answered by ICMP's "administratively prohibited".
    Deny,
}

/// Decides about the flows of a guest, before anything of them leaves the host.
pub trait Policy: Send {
    /// A flow begins.
    fn decide(&mut self, flow: &NewFlow<'_>) -> Decision;

    /// A DNS question for a name, in lower case, without the dot at its end. What is denied is answered by
    /// REFUSED.
    fn decide_name(&mut self, name: &str) -> Decision {
        let _ = name;
        Decision::Allow
    }

    /// A message to a DNS server whose name cannot be read: of several questions, or of another protocol. What is
    /// denied is answered by REFUSED.
    fn decide_hidden_name(&mut self) -> Decision {
        Decision::Allow
    }

    /// A flow ended.
    fn ended(&mut self, flow: &FlowStat) {
        let _ = flow;
    }
}
