//! Pure tables: forwarding table, next hops, neighbour states

#![cfg_attr(not(test), no_std)]
