//! Wire formats: one checked view and one representation per header

#![cfg_attr(not(test), no_std)]
