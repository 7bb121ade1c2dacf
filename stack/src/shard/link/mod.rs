//! Between the layers and the device: frames in bursts, up and down.

pub(in crate::shard) mod completion_polls;
pub(in crate::shard) mod input;
pub(in crate::shard) mod net;
pub(in crate::shard) mod rx;
pub(in crate::shard) mod siblings;
pub(in crate::shard) mod templates;
pub(in crate::shard) mod wait;
