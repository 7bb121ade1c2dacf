//! The ledger of a stack per packet, for `fulmar-lab path --live` and for the pages of benches.
//!
//! A bench measures stacks that keep no account. What its page shows of stages comes from one short round
//! more, over stacks of the same kind that do ([`Keeping`]), so that no figure of the table has a reading in
//! it.

use fulmar::Stack;
use fulmar::stat::ledger;
use fulmar::stat::ledger::Account;
use fulmar::stat::{Ledger, StageCost};
use serde_json::{Value, json};
use std::io;
use std::time::Duration;

/// One visit in this many is measured in such a round: more often than in a stack at work, since it is short.
pub const EVERY: u32 = 8;
/// How long it takes for each way.
pub const ROUND: Duration = Duration::from_millis(150);

/// Costs charged to neither end.
const SLEEP: &str = "slept";

/// One stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name.
    pub stage: String,
    /// The layer it belongs to.
    pub layer: String,
    /// The work between the previous stage and this one.
    pub sentence: String,
    /// Number of passes.
    pub passes: f64,
    /// Nanoseconds of a pass.
    pub ns_each: f64,
    /// Nanoseconds per packet.
    pub ns_per_packet: f64,
    /// Nanoseconds per byte.
    pub ns_per_byte: f64,
    /// Percent of the time without sleep; zero for sleep itself.
    pub share_pct: f64,
}

/// An account, per packet and per byte.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// The group: charts of the same group stand together.
    pub group: String,
    /// The work done.
    pub title: String,
    /// The stages, in the order in which a path passes them.
    pub parts: Vec<Part>,
    /// Packets that went or came.
    pub packets: f64,
    /// Bytes of their frames.
    pub bytes: f64,
    /// All visits.
    pub visits: f64,
    /// Visits that were measured.
    pub measured: f64,
    /// Intervals that were left out because the thread was preempted.
    pub preempted: f64,
    /// Cost of one reading in nanoseconds.
    pub pass_ns: f64,
    /// Cost of the account itself, in nanoseconds.
    pub overhead_ns: f64,
    /// The stages but sleep, and that, in nanoseconds.
    pub sum_ns: f64,
    /// CPU time of the threads by the kernel, in nanoseconds, if it is known.
    pub total_ns: Option<f64>,
    /// Copies of each byte.
    pub copies_per_byte: f64,
    /// Buffers of each packet.
    pub allocs_per_packet: f64,
    /// Calls into the device for each packet.
    pub crossings_per_packet: f64,
    /// Time of simulated hardware within the device's stages, in nanoseconds.
    pub hardware_ns: Option<f64>,
}

impl Figures {
    /// From the ledger of a stack's document.
    pub fn of_document(ledger: &Ledger) -> Figures {
        let (packets, bytes) = (ledger.packets as f64, ledger.bytes as f64);
        let busy = ledger.stages.iter().filter(|s| s.stage != SLEEP).map(|s| s.ns).sum();
        let over = |what: f64, of: f64| what / of.max(1.0);
        let part = |s: &StageCost| Part {
            stage: s.stage.to_string(),
            layer: s.layer.to_string(),
            sentence: s.sentence.to_string(),
            passes: s.passes,
            ns_each: over(s.ns, s.passes),
            ns_per_packet: over(s.ns, packets),
            ns_per_byte: over(s.ns, bytes),
            share_pct: if s.stage == SLEEP { 0.0 } else { over(s.ns * 100.0, busy) },
        };
        Figures {
            parts: ledger.stages.iter().map(part).collect(),
            packets,
            bytes,
            visits: ledger.visits as f64,
            measured: ledger.measured as f64,
            preempted: ledger.preempted as f64,
            pass_ns: ledger.pass_ns,
            overhead_ns: ledger.overhead_ns,
            sum_ns: busy + ledger.overhead_ns,
            total_ns: ledger.total_ns,
            copies_per_byte: over(ledger.copied_bytes as f64, bytes),
            allocs_per_packet: over(ledger.allocs as f64, packets),
            crossings_per_packet: over(ledger.crossings as f64, packets),
            ..Figures::default()
        }
    }

    /// The figures of a stack's account; `None` if it keeps none, or if nothing
    /// was measured.
    pub fn of(account: &Account, group: &str, title: &str) -> Option<Figures> {
        let found = Figures::of_document(&account.into());
        let found = Figures { group: group.to_owned(), title: title.to_owned(), ..found };
        (found.measured > 0.0 && found.packets > 0.0).then_some(found)
    }

    /// The sum of the stages but sleep, per packet.
    pub fn ns_per_packet(&self) -> f64 {
        (self.sum_ns - self.overhead_ns) / self.packets.max(1.0)
    }

    /// How far the sum is from the total, in percent.
    pub fn gap_pct(&self) -> Option<f64> {
        self.total_ns.filter(|t| *t > 0.0).map(|total| (self.sum_ns / total - 1.0) * 100.0)
    }

    /// For a report's `accounts`, of which the page makes bars.
    pub fn json(&self) -> Value {
        let per = |ns: f64| ns / self.packets.max(1.0);
        let stage = |p: &Part| {
            json!({"stage": p.stage, "layer": p.layer, "sentence": p.sentence,
                   "passes_per_packet": per(p.passes), "ns_each": p.ns_each,
                   "ns_per_packet": p.ns_per_packet, "ns_per_byte": p.ns_per_byte,
                   "share_pct": p.share_pct})
        };
        json!({
            "group": self.group,
            "title": self.title,
            "packets": self.packets,
            "bytes": self.bytes,
            "visits": self.visits,
            "measured_visits": self.measured,
            "preempted": self.preempted,
            "pass_ns": self.pass_ns,
            "stages_ns_per_packet": self.ns_per_packet(),
            "stages_ns_per_byte": (self.sum_ns - self.overhead_ns) / self.bytes.max(1.0),
            "overhead_ns_per_packet": per(self.overhead_ns),
            "total_ns_per_packet": self.total_ns.map(per),
            "sum_vs_total_pct": self.gap_pct(),
            "hardware_ns_per_packet": self.hardware_ns.map(per),
            "copies_per_byte": self.copies_per_byte,
            "allocs_per_packet": self.allocs_per_packet,
            "crossings_per_packet": self.crossings_per_packet,
            "stages": self.parts.iter().map(stage).collect::<Vec<_>>(),
        })
    }

    /// The account's check: its sum against the total, and its own cost.
    pub fn sentences(&self) -> [String; 3] {
        let per = |ns: f64| ns / self.packets.max(1.0);
        let (stages, own) = (self.ns_per_packet(), per(self.overhead_ns));
        let sum = match (self.total_ns, self.gap_pct()) {
            (Some(total), Some(gap)) => format!(
                "Per packet, all stages except sleep take {stages:.1} ns and the measurement itself {own:.1} ns: \
                 {:.1} ns in all. By the kernel's CPU time of the threads, measured without stages, it is {:.1} ns: \
                 the sum is {gap:+.1} % off.",
                per(self.sum_ns),
                per(total)
            ),
            _ => format!(
                "Per packet, all stages except sleep take {stages:.1} ns and the measurement itself {own:.1} ns. \
                 The kernel's CPU time of the threads is not known yet: too few calls were measured."
            ),
        };
        [sum, self.own_cost(), self.moved()]
    }

    fn own_cost(&self) -> String {
        format!(
            "{} calls of {} were timed. Reading the clock costs {:.1} ns ({:.2} ms in all, {:.2} % of the sum), \
             which is subtracted. {} intervals were excluded because the thread was preempted.",
            self.measured,
            self.visits,
            self.pass_ns,
            self.overhead_ns / 1e6,
            self.overhead_ns * 100.0 / self.sum_ns.max(1.0),
            self.preempted
        )
    }

    fn moved(&self) -> String {
        format!(
            "{:.3} bytes copied per byte, {:.2} buffers and {:.2} crossings per packet ({} packets, {} bytes \
             in both directions).",
            self.copies_per_byte,
            self.allocs_per_packet,
            self.crossings_per_packet,
            self.packets,
            self.bytes
        )
    }
}

/// While it lives, every new stack of this process keeps an account.
#[derive(Debug)]
pub struct Keeping(Option<u32>);

impl Keeping {
    /// From now on, of one visit in [`EVERY`].
    pub fn new() -> Keeping {
        Keeping(ledger::account_new_stacks(Some(EVERY)))
    }
}

impl Default for Keeping {
    fn default() -> Keeping {
        Keeping::new()
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        ledger::account_new_stacks(self.0);
    }
}

/// Restarts the account of a stack; returns its totals so far.
///
/// # Errors
/// The stack is another process's.
pub fn begin(stack: &Stack) -> io::Result<Account> {
    let before = stack.account()?.unwrap_or_default();
    stack.clear_account();
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn document() -> Ledger {
        let written = json!({"visits": 200, "measured": 20, "preempted": 0, "pass_ns": 30.0, "overhead_ns": 1000.0,
        "total_ns": 10_000.0, "packets": 100, "bytes": 5000, "crossings": 100,
        "copied_bytes": 1800, "allocs": 100,
        "stages": [
            {"stage": "locked", "layer": "lock", "passes": 100.0, "ns": 3000.0, "sentence": "A."},
            {"stage": "device_taken", "layer": "device", "passes": 50.0, "ns": 5000.0, "sentence": "B."},
            {"stage": "slept", "layer": "idle", "passes": 1.0, "ns": 9e9, "sentence": "C."},
        ]});
        serde_json::from_value(written).expect("a ledger")
    }

    #[test]
    fn stages_are_per_packet_and_per_byte_and_sleep_is_in_no_sum() {
        let found = Figures::of_document(&document());
        let [locked, taken, slept] = &found.parts[..] else { panic!("{found:?}") };
        assert_eq!((locked.ns_each, locked.ns_per_packet, locked.ns_per_byte), (30.0, 30.0, 0.6));
        assert_eq!((taken.ns_each, taken.share_pct), (100.0, 62.5));
        assert_eq!((slept.share_pct, found.ns_per_packet()), (0.0, 80.0));
        assert_eq!((found.copies_per_byte, found.allocs_per_packet), (0.36, 1.0));
    }

    #[test]
    fn the_sum_with_the_cost_of_the_account_is_held_against_the_total() {
        let found = Figures::of_document(&document());
        assert!((found.gap_pct().expect("a total") + 10.0).abs() < 1e-9);
        assert!(found.sentences()[0].contains("-10.0 % off"), "{}", found.sentences()[0]);
        let mut unknown = document();
        unknown.total_ns = None;
        let unknown = Figures::of_document(&unknown);
        assert!(unknown.sentences()[0].contains("not known yet"));
        assert!(unknown.json()["sum_vs_total_pct"].is_null());
    }

    #[test]
    fn a_stack_that_moved_nothing_has_no_bars() {
        assert_eq!(Figures::of(&Account::default(), "sim", "send"), None);
    }
}
