//! The public API over devices that need no right: what a program sees that uses the crate as it
//! would use `std::net`.

#[path = "../support/mod.rs"]
mod support;

mod channel;
mod datagram;
mod device_gone;
mod driver;
mod end;
mod gateway;
mod ledger;
mod loan;
mod options;
mod panics;
mod plain;
mod poll;
mod posted;
mod receive;
mod runtime;
mod send;
mod send_owned;
mod sendfile;
mod set_up;
mod shards;
mod shared_memory;
mod shortage;
mod sim;
mod stat;
mod stream;
mod threads;
