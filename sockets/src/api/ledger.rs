//! The account of CPU time by stage of a stack, sampled at run time.
//!
//! A stack passes named stages ([`Stage`]). With [`Builder::account`](crate::api::Builder::account) it measures the cost of
//! each by sampling. [`Stack::ledger`](crate::api::Stack::ledger) returns its [`Balance`], and
//! [`Stack::account`](crate::api::Stack::account) an [`Account`], which relates it to packets, bytes, copies, buffers and
//! crossings. `fulmar-lab path --live` prints that from another terminal.
//!
//! The environment variable `FULMAR_LEDGER=64` enables the account in all stacks of a process (one visit in 64 is
//! measured), as [`account_new_stacks`] does from within. [`Stack::set_account`](crate::api::Stack::set_account) switches it
//! in a running stack. While it is off, it costs one predictable branch per stage.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let builder = fulmar::Stack::builder();
//! let stack = builder.device(fulmar::devices::tap("fulmar0")?).account(64).build()?;
//! // ... traffic ...
//! if let Some(account) = stack.account()? {
//!     for cost in &account.balance.stages {
//!         let ns = cost.ns / account.packets as f64;
//!         println!("{:16} {ns:8.1} ns per packet  {}", cost.stage.name(), cost.stage.sentence());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fulmar_stack::base::Counter;

use crate::runtime::Ledger;
pub use crate::runtime::account::DEFAULT_EVERY;
pub use crate::runtime::{Balance, StageCost};
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

/// The sum of the accounts of all stacks of this process, closed ones included.
pub fn of_this_process() -> Balance {
    crate::runtime::account::of_this_process()
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

/// The cost of the stages of a stack, and the work done meanwhile.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Account {
    /// The stages.
    pub balance: Balance,
    /// Packets sent and received on the wire: a super-frame counts as all of its packets.
    pub packets: u64,
    /// Frames that crossed between stack and device.
    pub frames: u64,
    /// Bytes of these frames, headers included.
    pub bytes: u64,
    /// Calls into the device.
    pub crossings: u64,
    /// Bytes that the stack has copied.
    pub copied_bytes: u64,
    /// Buffers allocated from the pool.
    pub allocs: u64,
}

impl Account {
    pub(crate) fn new(balance: Balance, s: &fulmar_stack::shard::Stat) -> Account {
        let (d, count) = (&s.device, |c: Counter| s.counters.value(c));
        Account {
            balance,
            packets: count(Counter::TxPackets) + count(Counter::RxPackets),
            frames: d.tx_frames + d.rx_frames,
            bytes: d.tx_bytes + d.rx_bytes,
            crossings: d.tx_crossings + d.rx_crossings,
            copied_bytes: count(Counter::CopiedBytes),
            allocs: s.pool.allocs,
        }
    }

    /// The account with the work since `before`. The stages are not subtracted: clear the ledger at that time.
    #[must_use]
    pub fn since(self, before: &Account) -> Account {
        Account {
            packets: self.packets.saturating_sub(before.packets),
            frames: self.frames.saturating_sub(before.frames),
            bytes: self.bytes.saturating_sub(before.bytes),
            crossings: self.crossings.saturating_sub(before.crossings),
            copied_bytes: self.copied_bytes.saturating_sub(before.copied_bytes),
            allocs: self.allocs.saturating_sub(before.allocs),
            balance: self.balance,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_moved_before_the_account_are_not_in_it() {
        let before = Account { packets: 3, bytes: 100, ..Account::default() };
        let now = Account { packets: 10, bytes: 450, allocs: 4, ..Account::default() };
        let since = now.since(&before);
        assert_eq!((since.packets, since.bytes, since.allocs), (7, 350, 4));
    }

    #[test]
    fn the_document_says_what_the_sum_is_held_against_or_that_it_is_not_known() {
        let stages = vec![StageCost { stage: Stage::Locked, passes: 10.0, ns: 300.0 }];
        let balance = Balance { stages, overhead_ns: 20.0, ..Balance::default() };
        let known = Balance { total_ns: Some(400.0), ..balance.clone() };
        assert!(known.gap().is_some_and(|gap| (gap + 0.2).abs() < 1e-9));
        let told = |balance| {
            let told = crate::stat::Ledger::from(&Account { balance, ..Account::default() });
            (told.total_ns, told.sum_ns)
        };
        assert_eq!((told(balance), told(known)), ((None, 320.0), (Some(400.0), 320.0)));
    }
}
