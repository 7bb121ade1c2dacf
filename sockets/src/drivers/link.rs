//! Two stacks joined directly in one process.
//!
//! Frames pass to the other side by ownership, without a copy. The mbufs return to the sender's pool when
//! the receiver frees them. [`pair`] joins two threads; [`sim_pair`] runs on a virtual clock and can impair
//! the traffic, reproducibly.

mod port;
mod ring;
mod sim;

use fulmar_stack::base::EtherAddr;
use fulmar_stack::device::{Caps, TxTime};

pub use fulmar_stack::device::impair::Impairments;
pub use port::{PacketDevice, PacketReceiver, PacketSender, channel};
pub use ring::{Link, pair};
pub use sim::{SentPath, SimLink, sim_pair, sim_pair_each_way};

/// Properties of a link, equal at both ends.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Largest IP packet that is not a super-frame, in bytes.
    pub mtu: usize,
    /// Largest super-frame in bytes of IP packet, both TCP and UDP. `None`: no super-frames.
    pub tso: Option<usize>,
    /// Leave transport checksums out, since the frames cross no wire. Required for super-frames: without it
    /// `tso` has no effect.
    pub csum: bool,
    /// Most frames in flight in one direction (real time only).
    pub ring_pkts: usize,
    /// Most bytes in flight in one direction; one frame always fits (real time only).
    pub ring_bytes: usize,
    /// Ethernet addresses of the two ends.
    pub ether: [EtherAddr; 2],
}

impl Default for LinkConfig {
    /// MTU 1500, 64 KiB super-frames, checksums left out, 512 frames or 4 MiB each way.
    fn default() -> LinkConfig {
        LinkConfig {
            mtu: 1500,
            tso: Some(65_535),
            csum: true,
            ring_pkts: 512,
            ring_bytes: 4 << 20,
            ether: [EtherAddr([2, 0, 0, 0, 0, 1]), EtherAddr([2, 0, 0, 0, 0, 2])],
        }
    }
}

impl LinkConfig {
    fn caps(&self, side: usize) -> Caps {
        let tso = self.tso.filter(|_| self.csum);
        Caps {
            tx_csum: self.csum,
            tso,
            udp_gso: tso.is_some(),
            rx_gro: tso.is_some(),
            // The other stack reads the memory in place.
            // A frame is sent when it is queued.
            tx_time: TxTime::Coarse,
            ..Caps::plain(self.mtu, self.ether[side])
        }
    }
}

#[cfg(test)]
mod tests;
