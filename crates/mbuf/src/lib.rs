//! Buffers: pools, mbufs, chains, send and receive queues

#![cfg_attr(not(test), no_std)]
