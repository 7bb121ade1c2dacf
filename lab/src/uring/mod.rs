//! io_uring as a receiver of the kernel's TCP: what the fastest programs do that stay with the
//! kernel. [`PingPong`] posts one receive ahead into buffers that alternate; [`Multishot`] posts one
//! receive for ever, and the kernel takes buffers from a ring that it was given.
//!
//! Source: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register_buf_ring(3).

#[allow(unsafe_code)]
mod raw;

pub use raw::{Multishot, PingPong};
