//! Shards on a virtual clock, over simulated links and NICs.

mod buffers;
mod deadlines;
mod fairness;
mod flow_cache;
mod gro;
mod holds;
mod listen;
mod loan;
mod memory;
mod neighbours;
mod segments;
mod sendfile;
mod sim;
mod udp;
