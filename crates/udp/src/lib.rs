//! The UDP engine

#![cfg_attr(not(test), no_std)]
