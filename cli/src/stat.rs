//! `fulmar stat`: the state of the running stacks.
//!
//! Every stack hands out one document ([`fulmar::stat`]); `--json` prints the documents, otherwise they are laid out as
//! `ss -ti` would, with drops, buffers, device, neighbours and routes below.

mod choice;
mod filter;
mod flows;
mod rates;

use crate::bounds;
use crate::failure::{Failure, Outcome};
use crate::format::{bytes, printable, table, terminal_columns, time, wrapped};
pub(crate) use choice::matches;
pub(crate) use filter::{Ends, Filter};
pub(crate) use flows::{bound_address, guest_of};
use fulmar::stat::DropReason;
use fulmar::stat::control;
use fulmar::stat::{Document, DropCount, VERSION};
pub(crate) use rates::is_same;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Show the state of the running stacks and gateways
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar stat                                      every stack of this user
  fulmar stat --watch nc                           every second, with rates
  fulmar stat -f 'state established dport = :80'   only these sockets
  fulmar stat $(pgrep -n nginx)                    the gateway of a process

Exit status: 0 if a stack was shown, 1 if none is running, 2 on an error.")]
pub struct Args {
    /// Print an array of JSON documents, one per stack
    #[arg(long)]
    json: bool,
    /// Also print the nonzero counters
    #[arg(long, conflicts_with = "json")]
    counters: bool,
    /// Repeat until Ctrl-C, with rates: every second, or with this interval
    #[arg(short, long, value_name = "SECONDS", conflicts_with = "json", value_parser = bounds::budget,
          num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    watch: Option<Duration>,
    /// Show only matching flows and sockets, as in ss(8): 'dport = :80', 'sport < 1024', 'src 10.77.0.2',
    /// 'state established', 'tcp', 'not udp'; several terms must all match
    #[arg(short, long, value_name = "FILTER")]
    filter: Option<Filter>,
    /// Process or name of a stack; for a gateway, also a process of its guest, or the name or path of its network
    /// namespace
    #[arg(value_name = "PID|NAME")]
    stack: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    match args.watch {
        Some(period) => watch(args, period),
        None => show_once(args),
    }
}

fn show_once(args: &Args) -> Outcome<ExitCode> {
    let stacks = wanted_documents(args);
    let text = if args.json {
        serde_json::to_string_pretty(&stacks).unwrap_or_default() + "\n"
    } else {
        let all = stacks.iter().map(|d| render(args, d));
        fitted(&all.collect::<Vec<_>>().join("\n"))
    };
    // A closed pipe (`fulmar stat | head`) is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    match (&args.stack, stacks.is_empty()) {
        (_, false) => Ok(ExitCode::SUCCESS),
        (Some(wanted), true) => Err(Failure::new(format!(
            "no running stack has the process id or name `{wanted}`; `fulmar stat` without arguments lists the \
             running stacks"
        ))),
        (None, true) => {
            eprintln!("no stack of this user is running");
            Ok(ExitCode::from(1))
        }
    }
}

/// Prints the stacks periodically until standard output is closed.
fn watch(args: &Args, period: Duration) -> Outcome<ExitCode> {
    // Home, and everything below it erased (ECMA-48 CUP and ED).
    let clear = if io::stdout().is_terminal() { "\u{1b}[H\u{1b}[2J" } else { "" };
    let mut before: Option<(Instant, Vec<Document>)> = None;
    loop {
        let (now, stacks) = (Instant::now(), wanted_documents(args));
        let mut text = clear.to_owned();
        if stacks.is_empty() {
            text += "no stack of this user is running\n";
        }
        for document in &stacks {
            let mut shown = render(args, document);
            if let Some((then, old)) = &before
                && let Some(old) = old.iter().find(|d| is_same(d, document))
            {
                shown += &section("rates", rates::between(old, document, now - *then));
            }
            text += &fitted(&shown);
            text.push('\n');
        }
        let mut out = io::stdout().lock();
        if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
            return Ok(ExitCode::SUCCESS);
        }
        drop(out);
        before = Some((now, stacks));
        thread::sleep(period);
    }
}

/// The documents of the stacks that the options name, with the flows and sockets that the filter admits.
fn wanted_documents(args: &Args) -> Vec<Document> {
    let mut stacks = documents();
    stacks.retain(|d| args.stack.as_ref().is_none_or(|wanted| matches(d, wanted)));
    let Some(filter) = &args.filter else { return stacks };
    for document in &mut stacks {
        document.sockets.retain(|s| filter.admits(s.into()));
        document.flows.retain(|f| filter.admits(f.into()));
    }
    stacks
}

/// The documents of all stacks that answer; a stack that does not is named on standard error.
pub fn documents() -> Vec<Document> {
    let (found, complaints) = ask_all();
    for complaint in complaints {
        eprintln!("fulmar: {complaint}");
    }
    found
}

/// The documents of all stacks that answer, and a sentence about each that does not.
pub(crate) fn ask_all() -> (Vec<Document>, Vec<String>) {
    let foreign = control::foreign_directories().into_iter();
    let foreign =
        foreign.map(|d| format!("ignored {}: other users have access to it", d.display()));
    let (mut found, mut complaints) = (Vec::new(), foreign.collect::<Vec<_>>());
    for socket in control::sockets() {
        match control::ask(&socket).map(|d| d.map(|text| read(&text))) {
            Ok(Some(Ok(document))) => {
                complaints.extend(of_newer(&document));
                found.push(document);
            }
            Ok(Some(Err(e))) => {
                complaints.push(format!("invalid answer from {}: {e}", socket.display()))
            }
            Ok(None) => {}
            Err(e) => complaints.push(format!("no answer from {}: {e}", socket.display())),
        }
    }
    (found, complaints)
}

/// Reads a document. Its strings contain no control sequences for the terminal and are not endless: names come from
/// other programs.
fn read(text: &str) -> serde_json::Result<Document> {
    serde_json::from_value(printable_value(serde_json::from_str(text)?))
}

/// A sentence about the first document of a version that this program does not know.
fn of_newer(document: &Document) -> Option<String> {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    let is_news = document.version > VERSION && !IS_SAID.swap(true, Ordering::Relaxed);
    is_news.then(|| {
        format!(
            "process {} runs a newer fulmar (document version {}); unknown fields are omitted",
            document.pid, document.version
        )
    })
}

/// Characters of a name or text that are shown at most: a column is as wide as its widest cell.
const MOST_SHOWN: usize = 1024;

fn printable_value(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(shown(&text)),
        Value::Array(all) => all.into_iter().map(printable_value).collect(),
        Value::Object(all) => {
            all.into_iter().map(|(name, v)| (shown(&name), printable_value(v))).collect()
        }
        other => other,
    }
}

fn shown(text: &str) -> String {
    let mut text = printable(text);
    if let Some((end, _)) = text.char_indices().nth(MOST_SHOWN) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// The text of one stack.
fn render(args: &Args, document: &Document) -> String {
    let mut text = heading(document);
    let flows = flows::table_of(&document.flows);
    let mut shown = with_details(&document.sockets, &SOCKET_COLUMNS);
    if args.filter.is_some() {
        if shown.is_empty() && flows.is_empty() {
            shown.push_str("no flow or socket matches the filter");
        }
        return text + &section("flows", flows) + &section("sockets", shown);
    }
    text += &section("flows", flows);
    if let Some(gateway) = &document.gateway {
        text += &section("published", flows::published(&gateway.published));
        text += &section("to the host", flows::host_ports(&gateway.host_ports));
        text += &section("not carried", flows::refusals(&gateway.refusals));
        text += &section("carried", fields(&flows::totals(gateway)));
    }
    text += &section("sockets", shown);
    text += &section("drops", drops(&document.drops));
    text += &section("buffers", fields(&document.pool));
    text += &section("device", fields(&document.device));
    text += &section("waiting", fields(&document.waiting));
    text += &section("neighbours", rows(&document.neighbours));
    text += &section("routes", rows(&document.routes));
    if args.counters {
        let counted: BTreeMap<_, _> = document.counters.iter().filter(|(_, n)| **n > 0).collect();
        text += &section("counters", fields(&counted));
    }
    text
}

/// Wraps lines to the width of the terminal. Further lines of a drop are below its sentence; other lines hang by their
/// own indentation.
fn fitted(text: &str) -> String {
    let Some(columns) = terminal_columns() else { return text.to_owned() };
    let mut sentences_at = None;
    text.lines().fold(String::new(), |mut fitted, line| {
        let indent = line.len() - line.trim_start().len();
        if line.trim_start().starts_with("packets  ") {
            sentences_at = line.find("why");
        } else if indent == 0 {
            sentences_at = None;
        }
        let hang = sentences_at.filter(|at| *at < columns / 2).unwrap_or(indent + 2);
        fitted += &wrapped(line, columns, hang);
        fitted.push('\n');
        fitted
    })
}

fn heading(document: &Document) -> String {
    let elsewhere = match (document.network_namespace, own_namespace()) {
        (Some(its), Some(own)) if its != own => format!(", in another network namespace ({its})"),
        _ => String::new(),
    };
    let Document { name, pid, addresses, device, .. } = document;
    let whose = guest_of(document).map(|guest| format!("gateway of {name} ({guest})"));
    let whose = whose.as_ref().unwrap_or(name);
    let interface = [device.name.clone(), addresses.join(" ")];
    let interface = interface.into_iter().filter(|part| !part.is_empty());
    let parts: Vec<String> =
        [whose.clone(), format!("process {pid}")].into_iter().chain(interface).collect();
    format!("{}{elsewhere}\n", parts.join(", "))
}

/// Inode of the network namespace of this process.
fn own_namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/net").ok().map(|m| m.ino())
}

/// A titled block, indented; empty ones are left out.
fn section(title: &str, body: String) -> String {
    if body.is_empty() {
        return String::new();
    }
    body.lines().fold(format!("\n{title}\n"), |mut text, line| {
        let _ = writeln!(text, "  {line}");
        text
    })
}

/// The fields of a part of a document by their names.
pub(crate) fn named<T: Serialize>(part: &T) -> Map<String, Value> {
    match serde_json::to_value(part) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

/// A value without quotes; absent ones are a dash.
pub(crate) fn word(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The fields with columns of their own; the other fields follow below the line of the socket.
const SOCKET_COLUMNS: [(&str, &str); 6] = [
    ("protocol", "Netid"),
    ("state", "State"),
    ("recv_queue_bytes", "Recv-Q"),
    ("send_queue_bytes", "Send-Q"),
    ("local", "Local Address:Port"),
    ("remote", "Peer Address:Port"),
];

/// Parts as `ss -ti` prints sockets: a line of columns, then the other fields as `name:value`.
fn with_details<T: Serialize>(all: &[T], columns: &[(&str, &str)]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let all: Vec<Map<String, Value>> = all.iter().map(named).collect();
    let heads: Vec<&str> = columns.iter().map(|c| c.1).collect();
    let cells = |part: &Map<String, Value>| columns.iter().map(|c| word(&part[c.0])).collect();
    let laid_out = table(&heads, &all.iter().map(cells).collect::<Vec<_>>());
    let mut laid_out = laid_out.lines();
    let mut text = format!("{}\n", laid_out.next().unwrap_or_default());
    for (line, part) in laid_out.zip(&all) {
        let _ = writeln!(text, "{line}");
        let is_rest = |name: &str| columns.iter().all(|c| c.0 != name);
        // An object of its own is for `--json`.
        let rest = part.iter().filter(|(name, v)| is_rest(name) && !v.is_null() && !v.is_object());
        let rest: Vec<String> = rest.map(|(name, v)| quantity(name, v)).collect();
        if !rest.is_empty() {
            let _ = writeln!(text, "      {}", rest.join(" "));
        }
    }
    text
}

/// `name:value` with the unit at the value, as in `rto:200ms`.
fn quantity(name: &str, value: &Value) -> String {
    if let (Some(name), Some(us)) = (name.strip_suffix("_us"), value.as_f64()) {
        return format!("{name}:{}", time(us));
    }
    if let (true, Some(n)) = (is_bytes(name), value.as_u64()) {
        let name = name.strip_suffix("_bytes").unwrap_or(name);
        return format!("{name}:{}", bytes(n).replace(' ', ""));
    }
    format!("{name}:{}", word(value))
}

/// Reasons that count on an idle stack too, because other hosts send such packets to all stations.
const USUAL: [DropReason; 4] = [
    DropReason::IpDestination,
    DropReason::UnknownEtherType,
    DropReason::ArpInvalid,
    DropReason::IcmpIgnored,
];

/// The reasons for which packets were dropped, with their sentences.
fn drops(all: &[DropCount]) -> String {
    let why = |d: &DropCount| {
        let is_usual = USUAL.iter().any(|usual| d.reason == usual.name());
        let note =
            if is_usual { " Normal: other hosts send such broadcasts and multicasts." } else { "" };
        format!("{}{note}", d.sentence)
    };
    let counted = all.iter().filter(|d| d.packets > 0);
    let cells = |d: &DropCount| {
        vec![d.packets.to_string(), d.layer.to_string(), d.reason.to_string(), why(d)]
    };
    let lines: Vec<Vec<String>> = counted.map(cells).collect();
    if lines.is_empty() {
        "none\n".to_owned()
    } else {
        table(&["packets", "layer", "reason", "why"], &lines)
    }
}

fn is_bytes(name: &str) -> bool {
    name.ends_with("_bytes") || name.starts_with("bytes_")
}

/// A part as lines of name and value, sizes readable.
fn fields<T: Serialize>(part: &T) -> String {
    let part = named(part);
    let width = part.keys().map(String::len).max().unwrap_or(0);
    part.iter().fold(String::new(), |mut text, (name, v)| {
        let readable = match v.as_u64() {
            Some(n) if is_bytes(name) && n >= 1024 => format!("{n} ({})", bytes(n)),
            _ => word(v),
        };
        let _ = writeln!(text, "{name:<width$}  {readable}");
        text
    })
}

/// Parts of one kind as a table with the names of their fields.
fn rows<T: Serialize>(all: &[T]) -> String {
    let all: Vec<Map<String, Value>> = all.iter().map(named).collect();
    let Some(first) = all.first() else { return String::new() };
    let names: Vec<&str> = first.keys().map(String::as_str).collect();
    let cells = all.iter().map(|row| row.values().map(word).collect());
    table(&names, &cells.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::is_shown;
    use crate::options::parse;
    use serde_json::json;

    fn args(words: &[&str]) -> Args {
        parse(["stat"].iter().chain(words)).expect("it parses")
    }

    #[test]
    fn names_of_other_programs_are_not_endless() {
        let long = "x".repeat(100_000);
        let written = json!({"name": long, "counters": {long.clone(): 1}});
        let document = read(&written.to_string()).unwrap();
        let counter = document.counters.keys().next().unwrap();
        assert_eq!(counter.chars().count(), MOST_SHOWN + 1);
        assert!(counter.ends_with('…') && document.name.ends_with('…'));
        assert!(render(&args(&["--counters"]), &document).len() < 8000);
    }

    #[test]
    fn a_period_of_watch_requires_an_equals_sign() {
        let second = Duration::from_secs(1);
        assert_eq!(args(&[]).watch, None);
        assert_eq!(args(&["--watch"]).watch, Some(second));
        let named = args(&["-w", "5"]);
        assert_eq!((named.watch, named.stack.as_deref()), (Some(second), Some("5")));
        assert_eq!(args(&["-w=0.5"]).watch, Some(second / 2));
        assert!(parse::<Args>(["stat", "--watch=0"]).is_err());
    }

    #[test]
    fn a_stack_of_another_network_namespace_is_marked() {
        let mut document = document();
        let own = own_namespace().expect("a namespace");
        for (namespace, is_marked) in [(own, false), (own + 1, true)] {
            document.network_namespace = Some(namespace);
            assert_eq!(heading(&document).contains("another network namespace"), is_marked);
        }
    }

    fn document() -> Document {
        let written = json!({
            "name": "nc", "pid": 42, "addresses": ["10.77.0.2/24"],
            "sockets": [
                {"protocol": "tcp", "state": "ESTABLISHED", "recv_queue_bytes": 0,
                 "send_queue_bytes": 4096, "local": "10.77.0.2:1000", "remote": "10.77.0.1:80",
                 "rtt_us": 120, "cwnd_bytes": 14480},
                {"protocol": "udp", "state": "UNCONNECTED", "recv_queue_bytes": 0,
                 "send_queue_bytes": 0, "local": "0.0.0.0:53", "remote": null},
            ],
            "drops": [
                {"reason": "udp_no_socket", "layer": "udp", "packets": 3, "sentence": "No socket."},
                {"reason": "tcp_paws", "layer": "tcp", "packets": 0, "sentence": "Old."},
            ],
            "pool": {"budget_bytes": 268435456},
            "device": {"name": "tap:fulmar0", "tx_frames": 7},
            "neighbours": [{"address": "10.77.0.1", "state": "reachable"}],
            "counters": {"sleeps": 0, "wakeups": 9},
        });
        read(&written.to_string()).unwrap()
    }

    #[test]
    fn a_stack_is_laid_out_as_ss_would() {
        let text = render(&args(&[]), &document());
        for part in [
            "nc, process 42, tap:fulmar0, 10.77.0.2/24\n\nsockets\n",
            "
  Netid  State        Recv-Q  Send-Q  Local Address:Port  Peer Address:Port
  tcp    ESTABLISHED       0    4096  10.77.0.2:1000      10.77.0.1:80
        accurate_ecn:false acked:0B ce_received:0 congestion: cwnd:14.14KiB ecn:false ",
            " rtt:120us ",
            "
  udp    UNCONNECTED       0       0  0.0.0.0:53          -

drops
  packets  layer  reason         why
        3  udp    udp_no_socket  No socket.

buffers
",
            "\n  budget_bytes          268435456 (256.00 MiB)\n",
            "\n  rx_missed         0\n",
            "\n  tx_frames         7\n  tx_held           0\n",
            "
neighbours
  address    ether  state
  10.77.0.1         reachable
",
        ] {
            assert!(text.contains(part), "{part}\n---\n{text}");
        }
    }

    #[test]
    fn a_filter_shows_sockets_alone_and_says_so_where_there_are_none() {
        let mut document = document();
        let filter = ["-f", "state established"];
        let text = render(&args(&filter), &document);
        assert!(text.contains("ESTABLISHED") && !text.contains("buffers"), "{text}");
        document.sockets.clear();
        assert!(
            render(&args(&filter), &document)
                .ends_with("sockets\n  no flow or socket matches the filter\n")
        );
    }

    #[test]
    fn counters_are_shown_on_demand_and_only_those_that_counted() {
        let text = render(&args(&["--counters"]), &document());
        assert!(text.ends_with("counters\n  wakeups  9\n"), "{text}");
    }

    #[test]
    fn a_document_of_a_newer_version_is_shown_and_said_to_be_one_once() {
        let newer = read(r#"{"version": 2, "name": "nc", "colour": "blue"}"#).unwrap();
        assert!(render(&args(&["--counters"]), &newer).starts_with("nc, process 0\n"));
        assert_eq!(of_newer(&document()), None);
        assert!(
            of_newer(&newer).is_some_and(|said| said.contains("newer fulmar (document version 2)"))
        );
        assert_eq!(of_newer(&newer), None);
        assert!(read("3").is_err() && read("").is_err());
    }

    #[test]
    fn control_characters_are_shown_escaped() {
        let evil = "a\u{1b}]0;x\u{7}\nb\u{9b}31m\u{202e}\u{7f}";
        let written =
            json!({ "name": evil, "pid": 1, "device": {"path": evil}, "counters": {evil: 1} });
        let document = read(&written.to_string()).unwrap();
        let text = render(&args(&["--counters"]), &document);
        let is_plain = |text: &str| text.chars().all(|c| c == '\n' || is_shown(c));
        assert!(is_plain(&text), "{text:?}");
        // No line of its own.
        assert!(text.starts_with(r"a\u{1b}]0;x\u{7}\nb\u{9b}31m"), "{text}");
        assert!(is_plain(&serde_json::to_string_pretty(&document).unwrap()));
    }
}
