//! The profile of February 2001: what a network load at 100 Mbit/s was made of, and three bounds on
//! what could be saved.

use std::io;
use std::time::Duration;

use crate::harness::Progress;
use crate::harness::options::Stack;
use crate::harness::report::{Report, Table, label, number};
use crate::profile::workload::{self, Profile};
use crate::profile::{Part, Shares};
use serde_json::{Value, json};

/// As on the command line.
pub const NAME: &str = "profile";
/// One sentence.
pub const TITLE: &str =
    "what a network load of 100 Mbit/s is made of, with three bounds on savings";
/// The authors, the work and its date.
pub const SOURCE: &str = "A. Morton on the Linux kernel list, February 2001: Linux 2.4.2 with the \
                          zero-copy patch, 3c59x, two CPUs; 10 s of sending, 10 s of receiving";

/// Ticks of the published profile that were not idle.
const BUSY_TICKS: f64 = 7088.0;

/// The functions as published, with their ticks, and the part that each belongs to here.
const PUBLISHED: [(&str, f64, Part); 18] = [
    ("boomerang_interrupt", 910.0, Part::Device),
    ("__generic_copy_from_user", 733.0, Part::Copy),
    ("boomerang_start_xmit", 654.0, Part::Device),
    ("csum_partial_copy_generic", 564.0, Part::Copy),
    ("boomerang_rx", 332.0, Part::Device),
    ("schedule", 200.0, Part::WakeUps),
    ("handle_IRQ_event", 178.0, Part::System),
    ("tcp_v4_rcv", 173.0, Part::Protocol),
    ("del_timer", 163.0, Part::System),
    ("ip_queue_xmit", 154.0, Part::Protocol),
    ("__kfree_skb", 153.0, Part::Memory),
    ("__wake_up_sync", 128.0, Part::WakeUps),
    ("kmalloc", 117.0, Part::Memory),
    ("tcp_sendmsg", 113.0, Part::Protocol),
    ("skb_release_data", 113.0, Part::Memory),
    ("ip_route_input", 103.0, Part::Protocol),
    ("ip_output", 99.0, Part::Protocol),
    ("do_softirq", 97.0, Part::System),
];

/// A bound: no more than this share of the load can be saved by making the part free.
struct Bound {
    what: &'static str,
    published: f64,
    /// What is measured of a profile, in percent of its busy time.
    measure: fn(&Shares) -> f64,
}

const BOUNDS: [Bound; 2] = [
    Bound { what: "buffer memory made free", published: 5.4, measure: |s| s.percent(Part::Memory) },
    Bound { what: "the driver made free", published: 26.7, measure: |s| s.percent(Part::Device) },
];

/// The third bound is an experiment: the load that goes away with half of the interrupts.
const HALF_OF_INTERRUPTS: f64 = 8.0;

/// Runs the workload: `time` for each phase of each stack.
///
/// # Errors
/// No namespaces; no device.
pub fn run(time: Duration, stack: Stack) -> io::Result<Vec<Profile>> {
    let (mut found, progress) = (Vec::new(), Progress::new(2));
    if stack.has_kernel() {
        progress.show("the kernel, both directions", 0, 2);
        found.push(workload::kernel(time)?);
    }
    if stack.has_fulmar() {
        progress.show("fulmar, both directions", 1, 2);
        found.push(workload::fulmar(time)?);
    }
    Ok(found)
}

/// The published profile and today's profiles as one table.
pub fn report(found: &[Profile]) -> Report {
    let columns = [
        label("part", "part"),
        number("published_pct", "2001\n%", 1, ""),
        number("kernel_sampled_pct", "kernel today\nsampled, %", 1, ""),
        number("fulmar_sampled_pct", "fulmar\nsampled, %", 1, ""),
        number("fulmar_ledger_pct", "fulmar\nledger, %", 1, ""),
    ];
    let listed: f64 = Part::ALL.iter().map(|p| published(*p)).sum();
    let unlisted = json!({"part": "not listed", "published_pct": 100.0 - listed});
    let rows = Part::ALL.iter().map(|part| row(*part, found)).chain([unlisted]);
    let mut notes = loads(found);
    notes.push(LEGEND.to_owned());
    notes.extend(found.iter().flat_map(bounds));
    notes.extend(found.iter().map(half_of_wakeups));
    notes.extend(found.iter().map(tops));
    Report {
        name: NAME.to_owned(),
        title: TITLE.to_owned(),
        lead: format!(
            "Published by {SOURCE}. Shares of busy time. The kernel's column is both ends of a veth \
             pair, whose work cannot be told apart; fulmar's is its own threads over a TAP, with what \
             the kernel does in their calls. 30 % of the published ticks were not listed."
        ),
        tables: vec![Table::of("", columns, rows)],
        notes,
        ..Report::default()
    }
}

fn published(part: Part) -> f64 {
    let ticks = PUBLISHED.iter().filter(|f| f.2 == part).map(|f| f.1);
    ticks.sum::<f64>() * 100.0 / BUSY_TICKS
}

fn row(part: Part, found: &[Profile]) -> Value {
    let then = published(part);
    let mut cells = json!({
        "part": part.name(),
        "published_pct": (then > 0.0).then_some(then),
    });
    for p in found {
        let sampled = p.sampled.as_ref().ok().map(|s| s.percent(part));
        cells[format!("{}_sampled_pct", p.stack)] = sampled.into();
        if let Some(ledger) = &p.ledger {
            cells["fulmar_ledger_pct"] = ledger.percent(part).into();
        }
    }
    cells
}

fn loads(found: &[Profile]) -> Vec<String> {
    let load = |p: &Profile| {
        let seen = match &p.sampled {
            Ok(_) => format!("{} samples", p.samples),
            Err(why) => format!("no samples: {why}"),
        };
        let [sending, receiving] = p.load.map(|l| l * 100.0);
        format!(
            "{}: {sending:.1} % of one CPU while sending, {receiving:.1} % while receiving; {seen}. \
             (2001: 14.9 and 23.3 % of two.)",
            p.stack
        )
    };
    found.iter().map(load).collect()
}

/// The three bounds, each with what became of it. Without samples the ledger stands in.
fn bounds(p: &Profile) -> Vec<String> {
    let (shares, by) = match (&p.sampled, &p.ledger) {
        (Ok(sampled), _) => (sampled, "by sampling"),
        (Err(_), Some(ledger)) => (ledger, "by the ledger"),
        (Err(_), None) => return vec![format!("{}: no bound can be tested", p.stack)],
    };
    let line = |b: &Bound| {
        let now = (b.measure)(shares);
        let becomes = judge(b.published, now);
        format!(
            "{}, {}: could save up to {now:.1} % of the load {by}; the bound of 2001, {:.1} %, {becomes}",
            p.stack, b.what, b.published
        )
    };
    BOUNDS.iter().map(line).collect()
}

/// The third bound.
fn half_of_wakeups(p: &Profile) -> String {
    let told = match p.halved.saved_pct() {
        Some(saved) => format!(
            "saves {saved:.1} % of the load; the bound of 2001, {HALF_OF_INTERRUPTS:.1} %, {}",
            judge(HALF_OF_INTERRUPTS, saved)
        ),
        None => "was not reached, so that the bound cannot be tested".to_owned(),
    };
    format!(
        "{}, half of the wake-ups (for the interrupts of then), a stream received segment by segment: \
         {told}\n{}",
        p.stack,
        p.halved.lines()
    )
}

/// A bound holds if no more can be saved than was published; a profile of a few thousand samples is
/// good to about a percent of the load.
fn judge(published: f64, now: f64) -> &'static str {
    const SLACK: f64 = 1.5;
    if now > published + SLACK {
        return "does not hold here: this is a larger part of the load than it was";
    }
    if now >= published / 2.0 {
        return "holds here";
    }
    "holds here by far: this is a much smaller part of the load than it was"
}

/// What the sentences about bounds mean.
const LEGEND: &str = "A bound of 2001 is the largest share of the load that could be saved if a part cost nothing. \
    A bound that does not hold means that more could be saved here than then, because the part is a larger share of \
    the whole: room for work, not praise.";

fn tops(p: &Profile) -> String {
    let all = p.samples.max(1) as f64;
    let one = |(name, n): &(String, u64)| format!("  {:5.1} %  {name}", *n as f64 * 100.0 / all);
    let lines: Vec<String> = p.top.iter().map(one).collect();
    if lines.is_empty() {
        return String::new();
    }
    format!("{}, functions met most often:\n{}", p.stack, lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::Machine;
    use crate::profile::halved::{Halved, Point};

    #[test]
    fn the_published_sums_are_those_of_the_text() {
        assert!((published(Part::Memory) - 5.4).abs() < 0.05);
        assert!((published(Part::Device) - 26.7).abs() < 0.1);
        assert!((published(Part::Copy) - 18.3).abs() < 0.1);
        let listed: f64 = PUBLISHED.iter().map(|f| f.1).sum();
        assert_eq!(listed, 4984.0);
    }

    #[test]
    fn the_saving_by_half_of_the_wakeups_is_read_between_measured_ones() {
        let point = |wakeups_per_s, load| Point {
            how: "held".into(),
            wakeups_per_s,
            segments_per_s: 8600.0,
            load,
        };
        let profile = Profile {
            stack: "fulmar",
            sampled: Err("there is no perf".into()),
            ledger: None,
            load: [0.1, 0.2],
            samples: 0,
            top: Vec::new(),
            bytes: 1,
            halved: Halved { points: vec![point(8000.0, 0.2), point(5000.0, 0.19)] },
        };
        let text = half_of_wakeups(&profile);
        assert!(text.contains("was not reached"), "{text}");
        let halved = Halved { points: vec![point(8000.0, 0.2), point(2000.0, 0.17)] };
        let text = half_of_wakeups(&Profile { halved, ..profile });
        assert!(text.contains("saves 10.0 %") && text.contains("8000 wake-ups/s"), "{text}");
    }

    #[test]
    fn a_profile_without_samples_is_judged_by_its_ledger_or_not_at_all() {
        let mut ledger = Shares::default();
        ledger.add(Part::Memory, 2.0);
        ledger.add(Part::Device, 50.0);
        ledger.add(Part::Protocol, 48.0);
        let profile = |stack, ledger| Profile {
            stack,
            sampled: Err("there is no perf".into()),
            ledger,
            load: [0.1, 0.2],
            samples: 0,
            top: Vec::new(),
            bytes: 1,
            halved: Halved::default(),
        };
        let found = [profile("kernel", None), profile("fulmar", Some(ledger))];
        let text = report(&found).text(&Machine::here());
        assert!(text.contains("kernel: no bound can be tested"), "{text}");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("memory made free: could save up to 2.0 %"), "{text}");
        assert!(text.contains("5.4 %, holds here by far"), "{text}");
        assert!(text.contains("26.7 %, does not hold here"), "{text}");
        assert!(text.contains("not praise") && !text.contains("exceeded"), "{text}");
        assert!(text.contains("no samples: there is no perf"), "{text}");
    }
}
