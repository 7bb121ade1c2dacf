//! The API of a program: stacks, sockets, poll sets, devices. `lib.rs` gives its items their public places.

// rustdoc shows the methods of a type in the order of these modules: first those that each program uses.
pub(crate) mod stack;

pub(crate) mod connect;
pub(crate) mod receive;
pub(crate) mod send;

pub(crate) mod listener;
pub(crate) mod tcp;
pub(crate) mod udp;

mod loan;
mod many;
mod tasks;

pub(crate) mod cidr;
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
pub(crate) mod pending;
pub(crate) mod poll;
mod posted;
mod sendfile;
mod socket;
pub(crate) mod stat;
pub mod zero_copy;
