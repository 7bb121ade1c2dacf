//! The parts of a device of your own.
//!
//! [`Device`] documents the requirements of a stack and the ownership of frames. Start with [`Caps::plain`] and the
//! four methods that have no default: `caps`, `tx_burst`, `rx_burst` and `wake_fd`. The example `own_device` is such a
//! device. Frames of any pool may be handed over as they are; they return to their pool when they are freed. Frames are
//! Ethernet's unless [`Caps::medium`] says otherwise: a device that is fed IP packets is [`Caps::plain_ip`] and
//! converts them with [`plain_ip`]. A wrapper around another device forwards unchanged methods with
//! [`forward_device!`].

pub use fulmar_stack::base::{
    Counter, Counters, DropReason, Duration, EtherAddr, FlowKey, Gso, GsoKind, Instant, Offload,
    OwnerKey, SeqNum,
};
pub use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Interest, LinkState, Medium,
    Packet, Peek, Tally, TxTime, Unsupported, Wake, WakeFd, WritableRanges, forward_device,
    plain_ip,
};
pub use fulmar_stack::mbuf::{Backing, BufId, Chain, Mbuf, NoBuffer, Pool, Purpose, WritableRange};
