//! What a stack says about itself: snapshots ([`Stack::stat`](crate::Stack::stat)), and the account of CPU time
//! ([`ledger`]). With the feature `stat`, which is on by default, also the document that `fulmar stat`, `fulmar top` and
//! `--metrics` read, and the socket that they read it from ([`control`]).
//!
//! ```
//! # use fulmar::{Stack, devices};
//! use fulmar::stat::{Counter, DropReason};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (device, _peer) = devices::link_pair()?;
//! # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
//! let stat = stack.stat()?;
//! println!("{} sockets, {} segments sent", stat.sockets().len(), stat.count(Counter::TcpSegmentsOut));
//! for reason in DropReason::ALL {
//!     if stat.drops(*reason) > 0 {
//!         println!("{} packets dropped: {}", stat.drops(*reason), reason.sentence());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "stat")]
mod document;

#[cfg(feature = "stat")]
pub use crate::api::control;
pub use crate::api::ledger;
pub use crate::api::stack::Observer;
pub use crate::api::stat::Stat;
#[cfg(feature = "stat")]
pub use document::*;
pub use fulmar_stack::base::{Counter, DropReason};
pub use fulmar_stack::ip::NeighbourState;
pub use fulmar_stack::shard::{SocketStat, Stat as ShardStat};
