//! Listeners under attack: floods of SYNs, forged ACKs, full queues.

mod cookies;
mod inherit;
mod queues;
