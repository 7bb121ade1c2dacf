//! The TCP engine: traces of one connection, and streams between two stacks over a network.

#[macro_use]
mod support;

mod accurate_ecn;
mod bbr;
mod conformance;
mod connection;
mod ecn;
mod fast_open;
mod info;
mod keepalive;
mod lies;
mod loss;
mod marking;
mod options;
mod pacing;
mod pair;
mod path_mtu;
mod plpmtud;
mod records;
mod recovery;
mod shortage;
mod spray;
mod transfer;
mod user_timeout;
mod window;
