//! The UDP layer of a shard.

use crate::base::{Secrets, SlotId};
use crate::udp::UdpTable;

use crate::shard::link::templates::UdpTemplates;

/// Bindings of datagram sockets, and the headers of their datagrams.
pub(crate) struct Udp {
    pub table: UdpTable<SlotId>,
    /// Headers for destinations of sockets that are not connected.
    pub templates: UdpTemplates,
}

impl Udp {
    pub(crate) fn new(secrets: &Secrets) -> Udp {
        Udp { table: UdpTable::new(secrets), templates: UdpTemplates::default() }
    }
}
