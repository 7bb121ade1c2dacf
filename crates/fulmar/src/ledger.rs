//! The ledger: where the nanoseconds of a stack go.
//!
//! A stack that is built with [`Builder::account`](crate::Builder::account) passes named stages
//! ([`Stage`]) and notes now and then what each costs. [`Stack::ledger`](crate::Stack::ledger) gives
//! its [`Balance`]; `fulmar path --live` prints it from another terminal.
//!
//! A program that cannot be changed keeps an account in all of its stacks if the environment says
//! `FULMAR_LEDGER=64` (one visit in 64 is measured), and a program can ask for the same with
//! [`account_new_stacks`]. A stack that keeps none has no trace of the probe in its code.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let builder = fulmar::Stack::builder();
//! let stack = builder.device(fulmar::devices::tap("fulmar0")?).account(64).build()?;
//! // ... traffic ...
//! for cost in stack.ledger().unwrap_or_default().stages {
//!     println!("{:16} {:12.0} ns  {}", cost.stage.name(), cost.ns, cost.stage.sentence());
//! }
//! # Ok(())
//! # }
//! ```

use std::sync::atomic::{AtomicU32, Ordering};

pub use fulmar_base::Stage;
pub use fulmar_stack::account::DEFAULT_EVERY;
pub use fulmar_stack::{Balance, StageCost};
use fulmar_stack::{Ledger, Probing};

/// Not asked yet, so that the environment decides.
const UNDECIDED: u32 = u32::MAX;

/// 0: new stacks keep no account.
static EVERY: AtomicU32 = AtomicU32::new(UNDECIDED);

/// From now on every new stack of this process keeps an account, of one visit in `every`; `None`:
/// those keep one that ask for it.
pub fn account_new_stacks(every: Option<u32>) {
    EVERY.store(every.map_or(0, |n| n.clamp(1, UNDECIDED - 1)), Ordering::Relaxed);
}

/// The accounts of all stacks that this process has had so far, in one.
pub fn of_this_process() -> Balance {
    fulmar_stack::account::of_this_process()
}

/// The form of a stack whose builder names none.
pub(crate) fn probing_of_new_stacks() -> Probing {
    let every = match EVERY.load(Ordering::Relaxed) {
        UNDECIDED => asked_by_environment(),
        decided => decided,
    };
    if every == 0 { Probing::Off } else { Probing::Account(Ledger::new(every)) }
}

fn asked_by_environment() -> u32 {
    std::env::var("FULMAR_LEDGER").ok().and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}
