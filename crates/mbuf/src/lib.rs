//! Buffers: pools, mbufs, chains, external storage, and the send and receive queues of a stream.
//!
//! An *mbuf* is one reference to a range of one storage; a [`Chain`] is a packet or a run of
//! stream bytes made of mbufs. Storage belongs to a [`Pool`], and a pool to one shard.
//!
//! ```text
//!   Chain ──► descriptor ──► descriptor ──► …          64 bytes each, from the pool
//!                │  off,len      │  off,len
//!                ▼               ▼
//!   storage  ┌─────────┬──────────────────┬─────────┐  256 B, 2, 4, 16 or 64 KiB
//!            │headroom │ bytes            │tailroom │  reference count kept out of band
//!            └─────────┴──────────────────┴─────────┘
//! ```
//!
//! **Home.** Reference counts and free lists change only through `&mut Pool`, that is under the
//! lock of the shard which owns the pool, so nothing here is an atomic read-modify-write. An mbuf
//! that is dropped anywhere else goes to the pool's remote-free list by one lock-free push and is
//! counted when the pool drains it. Dropping is always safe; `pool.free` is the fast way.
//!
//! **Shared storage is immutable.** Bytes may be written only while one reference exists; the one
//! exception is [`Pool::append_tail`], which writes bytes that no reference covers.
//!
//! **Memory that another process writes** is never behind a reference: an mbuf over it is copied from by
//! volatile loads ([`VolatileSlice`], [`Mbuf::copy_to`]).
//!
//! **Bounds.** A pool has a byte budget that charges storage, split into shares by [`Purpose`],
//! and a bound on descriptors. Nothing is allocated from the heap per mbuf, chain or packet once
//! the pool has grown to its working size.
//!
//! **Known sums.** Storage can keep the Internet checksum of each of its units, made while a writer's
//! bytes are copied into it ([`Pool::keep_sums`], [`Chain::sum`]).
//!
//! Not here: headers, sockets, any clock and any I/O.

#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

mod chain;
mod fair;
mod home;
mod mbuf;
#[cfg(fulmar_loom)]
mod models;
mod pool;
mod posted;
mod raw;
mod recv_queue;
mod send_queue;
mod storage;
mod sums;
mod sync;
mod sys;
#[cfg(test)]
mod testkit;
mod volatile;

pub use chain::{Chain, Iter, Reader, SegMut};
pub use fair::FairShare;
#[cfg(fulmar_loom)]
pub use models::MODELS;
pub use pool::{Pool, PoolConfig, PoolError, PoolStats};
pub use posted::{BufId, Filled, Hold, Lease, NoMemory, Placed, RecvBuf, Room};
pub use raw::Mbuf;
pub use recv_queue::{Inserted, MAX_RANGES, RecvQueue};
pub use send_queue::{Claim, MAX_CLAIMS, MERGED_BYTES, QueueFull, SendQueue};
pub use storage::{
    External, Kick, Lender, MAX_MBUF_BYTES, NoBuffer, Purpose, SLAB_BYTES, SharedBytes,
};
pub use sums::Summed;
pub use sys::Backing;
pub use volatile::VolatileSlice;
