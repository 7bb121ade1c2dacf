//! Threads around shards.

mod calls;
mod panics;
mod posted;
mod queues;
mod shards;
