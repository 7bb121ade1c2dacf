//! Listeners under attack: floods of SYNs, forged ACKs, full queues.

mod any_port;
mod cookies;
mod fast_open;
mod inherit;
mod pending;
mod queues;
