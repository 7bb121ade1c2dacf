//! The account of CPU time by stage of a stack, sampled at run time.
//!
//! A stack passes named stages ([`Stage`]). With [`Builder::account`](crate::Builder::account) it measures the cost of
//! each by sampling. [`Stack::account`](crate::Stack::account) returns an [`Account`]: the times, and the packets,
//! bytes, copies, buffers and crossings of the same time. `fulmar-lab path --live` prints it from another terminal.
//!
//! The environment variable `FULMAR_LEDGER=64` enables the account in all stacks of a process (one visit in 64 is
//! measured), as [`account_new_stacks`] does from within. [`Stack::set_account`](crate::Stack::set_account) switches it
//! in a running stack. While it is off, it costs one predictable branch per stage.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let builder = fulmar::Stack::builder();
//! let stack = builder.device(fulmar::devices::tap("fulmar0")?).account(64).build()?;
//! // ... traffic ...
//! if let Some(account) = stack.account()? {
//!     for time in &account.stages {
//!         let ns = time.ns / account.packets as f64;
//!         println!("{:16} {ns:8.1} ns per packet  {}", time.stage.name(), time.stage.sentence());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::runtime::Ledger;
pub use crate::runtime::account::{Account, DEFAULT_EVERY, StageTime, of_this_process};
/// A stage of the path of a packet: [`Account::ns_of`].
///
/// ```
/// use fulmar::stat::ledger::Stage;
///
/// for stage in Stage::ALL.iter().filter(|stage| stage.layer() == "copy") {
///     println!("{}: {}", stage.name(), stage.sentence());
/// }
/// ```
pub use fulmar_stack::base::Stage;

/// The environment variable is not read yet.
const UNDECIDED: u32 = u32::MAX;

/// 0: new stacks keep no account.
static EVERY: AtomicU32 = AtomicU32::new(UNDECIDED);

/// Enables the account in every new stack of this process, with one visit in `every` measured; `None`: only in stacks
/// whose builder asks for it. Returns the previous setting.
pub fn account_new_stacks(every: Option<u32>) -> Option<u32> {
    let new = every.map_or(0, |n| n.clamp(1, UNDECIDED - 1));
    let before = match EVERY.swap(new, Ordering::Relaxed) {
        UNDECIDED => asked_by_environment(),
        decided => decided,
    };
    (before > 0).then_some(before)
}

/// The ledger of a stack whose builder asks for none.
pub(crate) fn of_new_stack() -> Arc<Ledger> {
    let every = match EVERY.load(Ordering::Relaxed) {
        UNDECIDED => asked_by_environment(),
        decided => decided,
    };
    if every == 0 { Ledger::off() } else { Ledger::new(every) }
}

fn asked_by_environment() -> u32 {
    std::env::var("FULMAR_LEDGER").ok().and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}
