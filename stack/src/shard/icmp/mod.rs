//! Echo requests and their answers: ping sockets, and a gateway that answers in the name of other hosts.

pub(in crate::shard) mod echo;
pub(in crate::shard) mod ping;
