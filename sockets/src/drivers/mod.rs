//! Devices: [`link`] joins two stacks in one process, [`shm`] two processes, [`tap`], [`tun`] and
//! [`packet`] reach the kernel, [`plain`] whatever carries packets, [`queues`] splits a device into queues for tests.
//!
//! All system calls that std lacks are in files named `sys.rs`, the only ones here with unsafe code.

#![deny(unsafe_code)]

mod batch;
mod big_tcp;
mod buffer_pair;
mod error;
pub mod link;
pub mod packet;
pub mod placing;
pub mod plain;
pub mod queues;
pub mod shm;
mod steering;
#[allow(unsafe_code)]
mod sys;
pub mod tap;
pub mod tun;
mod udp_gso;
mod vnet;
pub mod wake;

#[cfg(fulmar_loom)]
pub use wake::models::MODELS;

pub use error::OpenError;
