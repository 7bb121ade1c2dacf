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
pub use crate::api::stat::{Observer, Stat};
#[cfg(feature = "stat")]
pub use document::*;
/// A count of a stack: [`Stat::count`].
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::stat::Counter;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let stat = stack.stat()?;
/// for counter in Counter::ALL.iter().filter(|counter| stat.count(**counter) > 0) {
///     println!("{:24} {}", counter.name(), stat.count(*counter));
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::Counter;
/// A reason for which packets are dropped: [`Stat::drops`].
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::stat::DropReason;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let stat = stack.stat()?;
/// if stat.drops(DropReason::NoBuffer) > 0 {
///     println!("the stack needs more memory: {}", DropReason::NoBuffer.sentence());
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::DropReason;
/// A socket in a snapshot: [`Stat::sockets`].
///
/// ```
/// # use fulmar::{Stack, TcpListener, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let listener = TcpListener::bind(&stack, "10.0.0.1:80")?;
/// for socket in stack.stat()?.sockets() {
///     println!("{} {} {:?}", socket.protocol, socket.state, socket.local);
/// }
/// # drop(listener);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::SocketStat;
