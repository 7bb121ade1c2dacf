//! The TCP engine

#![cfg_attr(not(test), no_std)]
