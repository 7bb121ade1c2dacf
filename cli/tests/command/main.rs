//! The command as its users run it: the binary, in sandboxes and namespaces of its own.

mod foreign;
mod gateway;
mod gateway_ask;
mod gateway_doors;
mod gateway_host;
mod gateway_insight;
mod gateway_killed;
mod gateway_packet;
mod gateway_rules;
mod guest;
mod kernel;
mod nat;
mod pesto;
mod programs;
mod shm;
mod slirp;
mod support;

const FULMAR: &str = env!("CARGO_BIN_EXE_fulmar");
