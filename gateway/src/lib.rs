//! A network for a namespace without root: the packets of a guest onto the sockets of the host.

#![deny(unsafe_code)]
#![warn(unreachable_pub, clippy::exhaustive_enums)]

pub mod absent;
pub mod allowance;
pub mod attach;
pub mod config;
pub mod contain;
pub mod dhcp;
pub mod first;
pub mod follow;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gateway;
pub mod guest;
pub mod hidden;
pub mod host;
pub mod keep;
pub mod mapping;
pub mod names;
pub mod netns;
pub mod outside;
pub mod pesto;
pub mod policy;
pub mod ports;
pub mod program;
pub mod published;
pub mod ra;
mod relay;
pub mod resolv;
pub mod rules;
mod setup;
pub mod splice;
pub mod stat;
pub mod strict;
pub mod upstream;
mod worker;

pub use config::Config;
pub use gateway::{FdHandler, Gateway, Handle};
pub use policy::Policy;
pub use setup::SetupError;
