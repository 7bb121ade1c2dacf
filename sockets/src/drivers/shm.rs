//! Shared memory: two processes on one host, joined without a kernel network.
//!
//! Each process has a memory file that only it can write (sealed against writes of others and
//! against changes of its length) and that the other one maps for reading. The stack's pool lives in
//! it. So a sent frame is a record of the offsets of its bytes, and the reader in the other process copies
//! them from there: between `write` and `read` every byte is copied twice, once in `write` and once in
//! `read`.
//!
//! ```text
//!      process A                                                         process B
//!   ┌─ file of A: A writes, B reads ────────┐      ┌─ file of B: B writes, A reads ────────┐
//!   │ words │ frames │ returns │ A's pool   │      │ words │ frames │ returns │ B's pool   │
//!   └───────────────────────────────────────┘      └───────────────────────────────────────┘
//! ```
//!
//! **Ownership.** The sender keeps a frame in the ring, unchanged, until the receiver has returned its slot
//! or has died. The receiver copies small frames and the headers of large ones into its own pool before it
//! parses them, and refers to the payload in place ([`fulmar_stack::mbuf::Lender`]); dropping the last reference
//! returns the slot. Payload for a posted buffer is copied there, and the slot is returned.
//!
//! **The other process is not trusted** (`docs/shm.md` says what it can do). What it writes is read once
//! into private memory and validated there; a violation of the protocol ends the link (`EPROTO`), and nothing
//! more is read. Payload that is not copied yet is behind no Rust reference
//! ([`fulmar_stack::mbuf::VolatileSlice`]) and is neither parsed nor summed; any other frame is copied as a whole. The
//! file is sealed against shrinking, so reading the mapping cannot fault.
//!
//! **Death.** The Unix socket of the rendezvous is closed with the last of its owners; a pidfd reports the
//! end of the process even if a child keeps the socket. Frames sent before the end are still received; then
//! the device is lost with `EPIPE` (the peer dropped its device) or `ECONNRESET` (the peer died).
//!
//! Not supported: more than two ends, more than one queue, reconnecting. Cost: one fence per burst, no
//! system call unless the other end sleeps.

use std::time::Duration;

use fulmar_stack::base::EtherAddr;

mod bell;
mod device;
mod layout;
mod loans;
mod meet;
mod places;
#[allow(unsafe_code)]
mod sys;
#[cfg(test)]
mod tests;

pub use device::Shm;

/// The rendezvous of two processes, and the memory that they share.
///
/// ```
/// use std::time::Duration;
/// use fulmar::devices::{Shm, ShmConfig, Side};
///
/// let config = ShmConfig {
///     name: "fulmar-example".to_owned(),
///     wait: Some(Duration::from_millis(10)),
///     wants: Some(Side::First),
///     ..ShmConfig::default()
/// };
/// let timed_out = Shm::open(&config).unwrap_err();
/// eprintln!("error: {timed_out}");
/// ```
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// The rendezvous: a path (with a slash) or an abstract name of the network namespace. The first
    /// process listens, the second connects. By an abstract name, and by a path in a world-writable
    /// directory, only processes of one user and root connect.
    pub name: String,
    /// How long to wait for the other process. `None`: until it comes.
    pub wait: Option<Duration>,
    /// Which end this would rather be. Without a wish, or with two that are the same, it is decided
    /// by who came first.
    pub wants: Option<Side>,
    /// Largest IP packet that is not a super-frame, in bytes. The smaller of both ends' counts.
    pub mtu: usize,
    /// Station addresses of the first end and of the second.
    pub ether: [EtherAddr; 2],
    /// Memory that the stack's pool may have in the shared region, in bytes. Only what is used is
    /// ever touched.
    pub pool_bytes: usize,
    /// Called with the name when this end came first and is about to wait: for a word to the user.
    pub on_wait: fn(&str),
}

impl Default for ShmConfig {
    /// MTU 1500, 256 MiB, and as long as it takes.
    fn default() -> ShmConfig {
        ShmConfig {
            name: String::new(),
            wait: None,
            wants: None,
            mtu: 1500,
            ether: [EtherAddr([2, 0, 0, 0, 0, 1]), EtherAddr([2, 0, 0, 0, 0, 2])],
            pool_bytes: 256 << 20,
            on_wait: |_| {},
        }
    }
}

/// Which end a process has: [`shm`](crate::devices::shm) returns it.
///
/// ```
/// use fulmar::devices::{Shm, ShmConfig, Side};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (one, other) = Shm::pair(&ShmConfig::default())?;
/// assert_eq!((one.side(), other.side()), (Side::First, Side::First.other()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "a segment has two ends")]
pub enum Side {
    /// The listener, unless the configuration says otherwise.
    First,
    /// The client, unless the configuration says otherwise.
    Second,
}

impl Side {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Side {
        match self {
            Side::First => Side::Second,
            Side::Second => Side::First,
        }
    }
}
