//! Datagram sockets: opening, sending, receiving.

pub(in crate::shard) mod calls;
pub(in crate::shard) mod input;
pub(in crate::shard) mod layer;
pub(in crate::shard) mod many;
pub(in crate::shard) mod output;
