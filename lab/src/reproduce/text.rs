//! A reproduction for the terminal.

use super::netperf::COLUMNS;
use super::verdict::{between, unmeasured};
use super::{Judged, Published, Reproduction, Surprise};
use crate::report::new_table;

/// Characters of a line of text at most.
pub(crate) const WIDTH: usize = 110;

/// The reproduction as text.
pub fn text(found: &Reproduction) -> String {
    let table = found.published;
    let mut parts = vec![
        wrapped(&format!("{}: {}", table.name, table.title)),
        wrapped(&format!("Published: {}.", table.source)),
        wrapped(&format!("Then: {}.", table.setup)),
        wrapped(&format!("Now: {}", table.differs)),
        ways(table),
        lines_table(found),
        pairs_table(found),
    ];
    let reasons = reasons(found);
    parts.extend(reasons.iter().map(|r| wrapped(r)));
    parts.extend(surprise_text(found));
    let cost = |(bytes, ns): &(usize, f64)| format!("{} KiB {ns:.0} ns/KB", bytes >> 10);
    if !found.limits.is_empty() {
        let costs = found.limits.iter().map(cost).collect::<Vec<_>>().join(", ");
        parts.push(format!("The limit, one memcpy through a ring of that size: {costs}."));
    }
    parts.push(LEGEND.to_owned());
    parts.join("\n\n")
}

/// What the letters of rows stand for.
pub fn ways(table: &Published) -> String {
    let [old, new, third] = table.methods.map(|m| m.title);
    format!("Rows: a {old}; b {new}; c {third}. The kernel has its own way only.")
}

const LEGEND: &str = "\
util, SD      as netperf defines them: % of the whole machine, and CPU time per KB (1024 bytes). Then
              each end was a machine; here each end is its process.
user, sys     of the sending process (here its thread), for ten seconds of sending; time % is their sum.
              The kernel tells user from sys by sampling, coarsely in short runs.
machine       busy time of all CPUs; then of the sending machine, here of the one that holds both ends.
hardware      time of the simulated device, which is not the host's and in no other column.
verdict       by the interval's bounds: reproduced within 10 % of the published ratio.";

/// Cut into lines of at most [`WIDTH`] characters, between words.
pub(crate) fn wrapped(text: &str) -> String {
    wrapped_to(WIDTH, text)
}

fn wrapped_to(most: usize, text: &str) -> String {
    let mut out = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        let n = word.chars().count();
        if width > 0 && width + 1 + n > most {
            out.push('\n');
            width = 0;
        } else if width > 0 {
            out.push(' ');
            width += 1;
        }
        out += word;
        width += n;
    }
    out
}

/// The same of a text of several lines, each by itself. One that is indented goes on with two columns more,
/// or, if it has columns itself, in the last of them.
pub(crate) fn wrapped_lines(text: &str) -> String {
    let line = |line: &str| match line.chars().count() {
        n if n <= WIDTH => line.to_owned(),
        _ if line.starts_with(' ') => hung(line),
        _ => wrapped(line),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn hung(line: &str) -> String {
    let indent = line.len() - line.trim_start().len();
    let column = line.rfind("  ").map_or(0, |at| at + 2);
    let (head, margin) = match line.get(..column) {
        Some(head) if column > indent && head.chars().count() <= WIDTH / 2 => {
            (head.to_owned(), head.chars().count())
        }
        _ => (" ".repeat(indent), indent + 2),
    };
    let rest = line.get(head.len()..).unwrap_or_default();
    let cut = wrapped_to(WIDTH.saturating_sub(margin), rest);
    format!("{head}{}", cut.replace('\n', &format!("\n{}", " ".repeat(margin))))
}

fn lines_table(found: &Reproduction) -> String {
    let mut head = vec!["row", "bytes", "TSO", "where"];
    head.extend(COLUMNS.iter().map(|c| c.head));
    head.push("verdict");
    let mut table = new_table(head, 4);
    for line in &found.lines {
        let (bytes, tso) = found.shape_of(line.pair);
        let mut cells = vec![line.row(), bytes, tso.to_owned(), line.place().to_owned()];
        cells.extend(COLUMNS.iter().map(|c| plain((c.of)(&line.netperf), c.decimals)));
        cells.push(found.verdict_of(line).to_owned());
        table.add_row(cells);
    }
    table.to_string()
}

fn plain(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { "\u{2013}".to_owned() }
}

fn pairs_table(found: &Reproduction) -> String {
    let head = vec![
        "pair",
        "bytes",
        "TSO",
        "where",
        "process, a/b\npublished",
        "\nhere (95 %)",
        "machine, a/b\npublished",
        "\nhere (95 %)",
        "process, a/c\nhere (95 %)",
        "verdict",
    ];
    let mut table = new_table(head, 4);
    for judged in &found.judged {
        let (bytes, tso) = found.shape_of(judged.pair);
        let pair = found.pair_of(judged.pair);
        let published = |ratio: Option<f64>| plain(ratio.unwrap_or(f64::NAN), 2);
        table.add_row([
            judged.pair.to_string(),
            bytes,
            tso.to_owned(),
            judged.site.title().to_owned(),
            published(pair.map(|p| p.cpu_ratio)),
            between(judged.cpu),
            published(pair.and_then(|p| p.machine_ratio)),
            between(judged.machine),
            between(judged.third),
            judged.verdict.word().to_owned(),
        ]);
    }
    table.to_string()
}

/// One sentence for each verdict that has a reason; what was not measured is said once.
pub fn reasons(found: &Reproduction) -> Vec<String> {
    let reason = |j: &&Judged| match j.verdict.reason() {
        "" => None,
        why => {
            let word = j.verdict.word();
            Some(format!("{} on {}: {word} because {why}.", j.pair, j.site.title()))
        }
    };
    let measured: Vec<&Judged> =
        found.judged.iter().filter(|j| !j.verdict.is_unmeasured()).collect();
    let told = measured.iter().filter_map(reason);
    told.chain(unmeasured(found.judged.iter().map(|j| &j.verdict))).collect()
}

/// What became of the published surprise at one size and site.
pub fn surprise_of(s: &Surprise) -> String {
    format!(
        "Old way, {} KiB, {}: throughput with TSO \u{f7} without was {:.3}, is {} here: {}.",
        s.bytes >> 10,
        s.site.title(),
        s.published,
        between(Some(s.measured)),
        s.verdict.word()
    )
}

/// What was found odd then.
pub const SURPRISE: &str = "The published surprise: with TSO the old way was slower than without.";

fn surprise_text(found: &Reproduction) -> Option<String> {
    if found.surprises.is_empty() {
        return None;
    }
    let mut lines = vec![SURPRISE.to_owned()];
    lines.extend(found.surprises.iter().map(surprise_of));
    lines.extend(surprise_reasons(found).into_iter().map(|r| wrapped(&r)));
    Some(lines.join("\n"))
}

/// The reasons, each once, with where they hold.
pub fn surprise_reasons(found: &Reproduction) -> Vec<String> {
    let mut told: Vec<String> = Vec::new();
    for s in found.surprises.iter().filter(|s| !s.verdict.reason().is_empty()) {
        let reason = format!("On {} because {}.", s.site.title(), s.verdict.reason());
        if !told.contains(&reason) {
            told.push(reason);
        }
    }
    told
}
