//! Shares of the busy time: copying, buffer memory, protocol, device, wake-ups, system.
//!
//! Two ways to the same question, which do not agree to the percent and should not. The *ledger*
//! ([`fulmar::stat::ledger`]) times the stages that a path passes: exact in what it counts, blind within a
//! stage. *Sampling* ([`perf`]) looks a few thousand times per second at what runs and asks the debug
//! information to which room that belongs ([`symbols`]): it sees everything, the kernel included, but
//! only as often as it looks. [`flame`] draws the samples.

pub mod flame;
pub mod halved;
pub mod perf;
pub mod symbols;
pub mod workload;

use fulmar::stat::ledger::{Account, Stage};
use serde_json::{Value, json};

macro_rules! parts {
    ($($(#[doc = $doc:literal])* $part:ident, $name:literal;)*) => {
        /// Purposes of busy time.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Part {
            $($(#[doc = $doc])* $part,)*
        }

        impl Part {
            /// All, in the order of tables.
            pub const ALL: [Part; 8] = [$(Part::$part),*];

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Part::$part => $name),* }
            }

            /// The functions that belong to it.
            pub const fn sentence(self) -> &'static str {
                match self { $(Part::$part => concat!($($doc),*)),* }
            }
        }
    };
}

parts! {
    /// Moving payload from one place to another, and checksums.
    Copy, "copy";
    /// Getting and freeing buffers.
    Memory, "buffer memory";
    /// TCP, UDP, IP, Ethernet, sockets.
    Protocol, "protocol";
    /// The driver, and the kernel's side of a device.
    Device, "device";
    /// Sleeping, waking, polling in vain, scheduling.
    WakeUps, "wake-ups";
    /// Locks of the stack, the clock.
    Locks, "locks, clock";
    /// Entry into the kernel, and its work that has no name above.
    System, "system";
    /// The program that uses the stack.
    Program, "program";
}

/// How busy time divides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    weights: [f64; Part::ALL.len()],
}

impl Shares {
    /// Adds time, in whatever unit, to a part.
    pub fn add(&mut self, part: Part, weight: f64) {
        self.weights[part as usize] += weight;
    }

    /// From the stages of an account; what the program itself did between its calls is left out, since
    /// it may have waited there for anything.
    pub fn of_account(account: &Account) -> Shares {
        let mut shares = Shares::default();
        for cost in &account.stages {
            if let Some(part) = part_of_stage(cost.stage) {
                shares.add(part, cost.ns);
            }
        }
        shares
    }

    /// The part's share of all, in percent; 0 where nothing was seen.
    pub fn percent(&self, part: Part) -> f64 {
        let all = self.total();
        if all > 0.0 { self.weights[part as usize] * 100.0 / all } else { 0.0 }
    }

    /// The sum of everything.
    pub fn total(&self) -> f64 {
        self.weights.iter().sum()
    }

    /// As JSON: percent by name.
    pub fn to_json(&self) -> Value {
        let entries = Part::ALL.iter().map(|p| (p.name().to_owned(), json!(self.percent(*p))));
        Value::Object(entries.collect())
    }
}

/// To which part a stage belongs; `None` for the program's own time and sleep.
fn part_of_stage(stage: Stage) -> Option<Part> {
    use Stage as S;
    Some(match stage {
        S::SendCall | S::Slept => return None,
        S::Locked | S::Released => Part::Locks,
        S::SendCopied | S::ReceiveCopied => Part::Copy,
        S::SendReserved | S::ReceiveFreed => Part::Memory,
        S::DeviceTaken | S::Completed | S::PolledEmpty | S::DeviceReceived => Part::Device,
        S::ReaderWoken | S::Spun => Part::WakeUps,
        _ => Part::Protocol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar::stat::ledger::StageTime;

    #[test]
    fn shares_of_an_account_leave_the_program_and_sleep_out() {
        let cost = |stage, ns| StageTime { stage, passes: 1.0, ns };
        let mut account = Account::default();
        account.stages = vec![
            cost(Stage::SendCall, 1e9),
            cost(Stage::Slept, 1e9),
            cost(Stage::SendCopied, 30.0),
            cost(Stage::TransportOutput, 60.0),
            cost(Stage::DeviceTaken, 10.0),
        ];
        let shares = Shares::of_account(&account);
        assert_eq!(shares.total(), 100.0);
        assert_eq!(shares.percent(Part::Copy), 30.0);
        assert_eq!(shares.percent(Part::Protocol), 60.0);
        assert_eq!(shares.percent(Part::Program), 0.0);
    }

    #[test]
    fn an_empty_profile_does_not_divide_by_zero() {
        assert_eq!(Shares::default().percent(Part::Copy), 0.0);
    }

    #[test]
    fn every_part_has_its_own_place_name_and_sentence() {
        for (i, part) in Part::ALL.iter().enumerate() {
            assert_eq!(*part as usize, i);
            assert!(part.sentence().trim().ends_with('.'));
        }
    }
}
