//! A network for a namespace without root: the packets of a guest onto the sockets of the host.

#![forbid(unsafe_code)]

pub mod attach;
pub mod contain;
pub mod dhcp;
pub mod guest;
pub mod host;
pub mod ports;
pub mod program;
pub mod ra;
pub mod rules;
pub mod splice;
