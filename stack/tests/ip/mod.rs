//! The engine from outside: frames in, frames and verdicts out.

mod any;
mod any_ip;
mod arp;
mod fragments;
mod icmp;
mod idents;
mod input;
mod invoking;
mod ndp;
mod output;
mod plain_ip;
mod rig;
mod routes;
