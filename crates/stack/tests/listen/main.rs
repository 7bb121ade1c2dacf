//! Listeners under attack: floods of SYNs, forged ACKs, full queues.

mod cookies;
mod queues;
mod rig;
