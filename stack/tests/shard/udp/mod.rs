//! Datagrams of a shard, one by one and many at a time, and segments of a connection: what leaves, what
//! comes, and what happens when the ways change while they go.

mod any_port;
mod errors;
mod many;
mod rig;
mod segments;
mod templates;
