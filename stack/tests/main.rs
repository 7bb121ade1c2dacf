//! The engines from outside.

mod ip;
mod shard;
mod tcp;
mod wire;
