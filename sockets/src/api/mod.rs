//! The API of a program: stacks, sockets, poll sets, devices. `lib.rs` gives its items their public places.

pub(crate) mod cidr;
pub(crate) mod connect;
pub mod control;
pub mod device;
pub mod devices;
pub(crate) mod driver;
pub(crate) mod echo;
pub(crate) mod error;
mod exit;
mod faults;
mod inner;
pub mod ledger;
pub(crate) mod listener;
mod loan;
pub(crate) mod pending;
pub(crate) mod poll;
mod posted;
pub(crate) mod receive;
pub(crate) mod send;
mod sendfile;
mod socket;
pub(crate) mod stack;
pub(crate) mod stat;
mod tasks;
pub(crate) mod tcp;
pub(crate) mod udp;
pub mod zero_copy;
