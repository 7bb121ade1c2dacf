//! The exit-point table of April 2012: what a datagram costs up to each point of a kernel's send path.

use std::io;
use std::time::Duration;

use fulmar::stat::ledger::Stage;

use super::verdict::Verdict;
use crate::harness::options::Stack;
use crate::harness::report::{Report, Table, label, number, words};
use crate::path::kernel::{self, Depth};
use crate::path::{self, Found, Options, Path, Spread};
use serde_json::{Value, json};

/// As on the command line.
pub const NAME: &str = "path";
/// One sentence.
pub const TITLE: &str = "what a datagram of 18 bytes costs up to each point of the send path";
/// The authors, the work and its date.
pub const SOURCE: &str = "L. Rizzo on the FreeBSD network list, April 2012: FreeBSD HEAD, i7-870 at \
                          2.93 GHz, ixgbe; netsend, 18 bytes, 1 and 4 tasks, least and most of 5 runs";

/// Payload of the published datagrams.
const BYTES: usize = 18;

/// A published row.
struct Row {
    position: &'static str,
    exit: &'static str,
    /// Least and most with one CPU, and with four; `None` where the table is blank.
    one: Option<(u32, u32)>,
    four: Option<(u32, u32)>,
    /// The stage of fulmar's that lies as deep.
    stage: Option<At>,
    /// The depth of today's kernel that lies as deep.
    kernel: Option<&'static str>,
}

/// Where fulmar is then.
#[derive(Clone, Copy)]
enum At {
    Stage(Stage),
    Whole,
}

const fn row(
    position: &'static str,
    exit: &'static str,
    one: (u32, u32),
    four: Option<(u32, u32)>,
    stage: Option<At>,
    kernel: Option<&'static str>,
) -> Row {
    Row { position, exit, one: Some(one), four, stage, kernel }
}

use At::{Stage as S, Whole};
use Stage as T;

const TABLE: [Row; 21] = [
    row("U", "user space, before send()", (8, 8), None, Some(S(T::SendCall)), None),
    row(
        "20",
        "sys_sendto begin",
        (103, 107),
        Some((104, 107)),
        Some(S(T::Locked)),
        Some("bare_syscall"),
    ),
    row("21", "sendit begin", (110, 113), Some((111, 116)), None, None),
    row("22", "sendit after getsockaddr", (110, 114), Some((111, 124)), None, None),
    row("23", "sendit before kern_sendit", (111, 115), Some((112, 120)), None, None),
    row("24", "kern_sendit after audit", (117, 120), Some((117, 121)), None, None),
    row(
        "25",
        "kern_sendit before sosend",
        (134, 140),
        Some((134, 146)),
        None,
        Some("socket_found"),
    ),
    row("40", "sosend_dgram start", (144, 149), Some((144, 151)), Some(S(T::SendChecked)), None),
    row("41", "before m_uiotombuf", (157, 166), Some((157, 168)), None, Some("length_checked")),
    row("42", "after m_uiotombuf", (264, 268), Some((265, 269)), Some(S(T::SendCopied)), None),
    row("30", "udp_send begin", (273, 276), Some((274, 278)), None, None),
    row(
        "31",
        "udp_output before ip_output",
        (323, 324),
        Some((344, 348)),
        Some(S(T::TransportOutput)),
        None,
    ),
    row("50", "ip_output begin", (326, 331), Some((356, 367)), None, None),
    row("51", "before option handling", (343, 349), Some((366, 373)), None, None),
    row(
        "56",
        "after rtalloc",
        (470, 480),
        Some((1310, 1378)),
        Some(S(T::RouteFound)),
        Some("route_looked_up"),
    ),
    row("52", "at sendit label", (472, 488), Some((1252, 1286)), None, None),
    Row {
        position: "53",
        exit: "before pfil hooks",
        one: None,
        four: None,
        stage: None,
        kernel: None,
    },
    row("54", "at passout", (476, 477), Some((1249, 1286)), None, None),
    row("55", "before if_output", (509, 526), Some((1268, 1278)), Some(S(T::IpOutput)), None),
    Row {
        position: "–",
        exit: "to the device (not published)",
        one: None,
        four: None,
        stage: Some(S(T::DeviceTaken)),
        kernel: None,
    },
    row("–", "whole packet", (1300, 1300), None, Some(Whole), Some("whole_connected")),
];

/// What was measured.
pub struct Measured {
    /// fulmar, if it was wanted.
    pub fulmar: Option<Found>,
    /// The kernel's depths, if they were.
    pub kernel: Option<Vec<Depth>>,
}

/// Default number of rounds.
pub const RUNS: usize = 7;

/// Measures `runs` rounds within about `budget`, with one thread per CPU, up to four.
///
/// # Errors
/// No namespaces for the kernel's part; no descriptors.
pub fn run((budget, runs): (Duration, usize), cpus: usize, stack: Stack) -> io::Result<Measured> {
    let threads = cpus.clamp(1, 4);
    let slots = (runs + 1) * (2 * threads + 6);
    let slice = (budget / slots as u32).clamp(Duration::from_millis(2), Duration::from_millis(100));
    let options = Options { threads, bytes: BYTES, runs, slice, ..Options::default() };
    Ok(Measured {
        fulmar: stack.has_fulmar().then(|| path::run(&options)).transpose()?,
        kernel: stack.has_kernel().then(|| kernel::run(options.bytes, runs, slice)).transpose()?,
    })
}

/// Every published row beside today's.
pub fn report(measured: &Measured) -> Report {
    let columns = [
        label("position", "pos"),
        label("exit", "exit point"),
        words("published_one_cpu", "published\n1 CPU"),
        words("published_four_cpus", "published\n4 CPUs"),
        words("kernel_ns", "kernel\ntoday"),
        words("fulmar_stage", "fulmar's\nstage"),
        words("fulmar_one_thread_ns", "1\nthread"),
        words("fulmar_most_threads_ns", "on all\nCPUs"),
        number("published_over_fulmar", "÷\nfulmar", 1, ""),
        words("verdict", "verdict"),
    ];
    Report {
        name: NAME.to_owned(),
        title: TITLE.to_owned(),
        lead: format!(
            "Published by {SOURCE}. ns per packet from the call up to the point, least to most. fulmar \
             over a simulated device whose hardware is taken off; the kernel by calls that fail at a \
             known depth. fulmar has no system call: its second row is the lock and the clock. On all CPUs: \
             each thread has a stack of its own; ÷ fulmar: published, 1 CPU, over 1 thread."
        ),
        tables: vec![Table::of("", columns, TABLE.iter().map(|r| cells(r, measured)))],
        notes: notes(measured),
        figures: measured.fulmar.as_ref().map(path::show::figures).unwrap_or_default(),
        ..Report::default()
    }
}

fn cells(row: &Row, measured: &Measured) -> Value {
    let range = |r: Option<(u32, u32)>| r.map(|(a, b)| format!("{a}–{b}"));
    let kernel =
        row.kernel.and_then(|name| measured.kernel.as_ref()?.iter().find(|d| d.name == name));
    let (first, last) = (of_threads(row, measured, false), of_threads(row, measured, true));
    let stage = row.stage.map(|at| match at {
        At::Stage(stage) => stage.name(),
        At::Whole => "whole",
    });
    let ratio = row.one.zip(first).map(|(one, now)| f64::from(one.0) / now.min());
    json!({
        "position": row.position,
        "exit": row.exit,
        "published_one_cpu": range(row.one),
        "published_four_cpus": range(row.four),
        "kernel_ns": kernel.map(|d| spread(&d.ns)),
        "fulmar_stage": stage,
        "fulmar_one_thread_ns": first.map(spread),
        "fulmar_most_threads_ns": last.map(spread),
        "published_over_fulmar": ratio,
        "verdict": verdict(row, ratio).word(),
    })
}

fn spread(s: &Spread) -> String {
    format!("{:.0}–{:.0}", s.min(), s.max())
}

fn of_threads<'m>(row: &Row, measured: &'m Measured, most: bool) -> Option<&'m Spread> {
    let all = &measured.fulmar.as_ref()?.by_threads;
    let threads = if most { all.last().filter(|_| all.len() > 1)? } else { all.first()? };
    match row.stage? {
        At::Whole => Some(&threads.whole),
        At::Stage(stage) => {
            let at = Path::UdpSend.stages(BYTES).iter().position(|s| *s == stage)?;
            threads.stages.get(at)
        }
    }
}

/// Whether fulmar is an order of magnitude below what was published, which was the point of looking.
fn verdict(row: &Row, ratio: Option<f64>) -> Verdict {
    match (row.one, ratio) {
        (None, _) => Verdict::NotComparable("the published cell is blank".into()),
        (_, None) => Verdict::NotComparable("no stage lies there".into()),
        (_, Some(r)) if r >= 1.0 => Verdict::Exceeded,
        (_, Some(_)) => Verdict::Shrunk("fulmar costs more up to there".into()),
    }
}

fn notes(measured: &Measured) -> Vec<String> {
    let mut notes = vec![
        "The four-CPU column is not reproducible on fewer CPUs: it shows the contention on the lock and reference \
         count of one route (944 ns for the look-up instead of 127). fulmar's threads share no route, so compare it \
         with the next column, which has a thread on every CPU."
            .to_owned(),
        "Verdicts: `exceeded` means that fulmar is quicker up to that point than was published, on a \
         machine that is not the published one."
            .to_owned(),
    ];
    if let Some(found) = &measured.fulmar {
        let call = found.syscall.median();
        notes
            .push(format!("A bare system call costs {call:.0} ns here; it cost about 95 ns then."));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::{Machine, WIDTH};

    #[test]
    fn every_published_row_is_there_and_every_stage_it_names_is_one_of_the_path() {
        assert_eq!(TABLE.len(), 21);
        for row in &TABLE {
            if let Some(At::Stage(stage)) = row.stage {
                assert!(Path::UdpSend.stages(BYTES).contains(&stage), "{stage:?}");
            }
            for (low, high) in [row.one, row.four].into_iter().flatten() {
                assert!(low <= high);
            }
        }
    }

    #[test]
    fn a_table_without_measurements_has_the_published_rows() {
        let text = report(&Measured { fulmar: None, kernel: None }).text(&Machine::here());
        assert!(text.contains("rtalloc") && text.contains("1310–1378"), "{text}");
        let widest = text.lines().skip(1).map(|l| l.trim_end().chars().count()).max();
        assert!(widest <= Some(WIDTH), "{widest:?} columns:\n{text}");
        assert!(text.contains("not reproducible"), "{text}");
    }
}
