//! Buffers: pools, mbufs, chains, external storage, and the send and receive queues of a stream.
//!
//! An *mbuf* is a reference to a range of one storage block. A [`Chain`] is a packet or a run of stream
//! bytes, made of mbufs. Storage belongs to a [`Pool`], and each shard has one pool.
//!
//! ```text
//!   Chain ──► descriptor ──► descriptor ──► …          64 bytes each, from the pool
//!                │  off,len      │  off,len
//!                ▼               ▼
//!   storage  ┌─────────┬──────────────────┬─────────┐  256 B, 2, 4, 16 or 64 KiB
//!            │headroom │ bytes            │tailroom │  reference count stored separately
//!            └─────────┴──────────────────┴─────────┘
//! ```
//!
//! **Local and remote frees.** Reference counts and free lists change only through `&mut Pool`, under the
//! lock of the shard that owns the pool, and need no atomic read-modify-write. An mbuf dropped anywhere
//! else is pushed on the pool's remote-free list, which is lock-free, and freed when the pool drains the
//! list. Dropping an mbuf is always safe; `Pool::free` is faster.
//!
//! **Shared storage is immutable.** Bytes are written only while a single reference exists. The exception
//! is [`Pool::append_tail`], which writes bytes that no reference covers.
//!
//! **Memory that another process writes** is never borrowed as `&[u8]`. Bytes are copied out of it with
//! volatile loads ([`VolatileSlice`], [`Mbuf::copy_to`]).
//!
//! **Bounds.** A pool has a byte budget to which storage is charged, divided into shares by [`Purpose`],
//! and a limit on descriptors. Once a pool has grown to its working size, no mbuf, chain or packet
//! allocates from the heap.
//!
//! **Stored checksums.** Storage can hold the Internet checksum of each unit of its bytes, computed while
//! a writer's bytes are copied in ([`Pool::keep_sums`], [`Chain::sum`]).
//!
//! This room knows no headers and no sockets, and has no clock and no I/O.

#![deny(unsafe_code)]

mod arena;
mod chain;
mod fair;
#[cfg(fulmar_loom)]
mod models;
mod pool;
mod posted;
mod range;
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
pub use posted::{BufId, Filled, NoMemory, Placed, PostedBuf, RecvBuf, WritableRange};
pub use raw::Mbuf;
pub use recv_queue::{Inserted, MAX_RANGES, RecvQueue};
pub use send_queue::{Claim, MAX_CLAIMS, MERGED_BYTES, QueueFull, SendQueue};
pub use storage::{
    External, Kick, Lender, MAX_MBUF_BYTES, NoBuffer, Purpose, SLAB_BYTES, SharedBytes,
};
pub use sums::Summed;
pub use sys::Backing;
pub use volatile::VolatileSlice;
