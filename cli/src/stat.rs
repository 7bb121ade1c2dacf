//! `fulmar stat`: the state of the running stacks.
//!
//! Every stack hands out one JSON document ([`fulmar::control`]); `--json` prints the documents as
//! they are, otherwise they are laid out as `ss -ti` would, with drops, buffers, device, neighbours
//! and routes below.

mod choice;
mod filter;
mod flows;
mod rates;

use crate::bounds;
use crate::failure::{Failure, Outcome};
use crate::format::{bytes, is_shown, printable, table, terminal_columns, time, wrapped};
pub(crate) use choice::matches;
pub(crate) use filter::Filter;
pub(crate) use flows::{bound_address, guest_of};
use fulmar::base::DropReason;
use fulmar::control;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// Show what the running stacks are doing
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar stat                                      every stack of this user
  fulmar stat --watch nc                           every second, with rates
  fulmar stat -f 'state established dport = :80'   only these sockets
  fulmar stat $(pgrep -n nginx)                    the gateway of a process

Exit status: 0 if a stack was shown, 1 if none runs, 2 on an error.")]
pub struct Args {
    /// Print an array of JSON documents, one per stack
    #[arg(long)]
    json: bool,
    /// Also print the counters that are not zero
    #[arg(long, conflicts_with = "json")]
    counters: bool,
    /// Repeat until Ctrl-C, with rates: every second, or with this interval
    #[arg(short, long, value_name = "SECONDS", conflicts_with = "json", value_parser = bounds::budget,
          num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    watch: Option<Duration>,
    /// Only flows and sockets that match, as in ss(8): 'dport = :80', 'sport < 1024', 'src 10.77.0.2',
    /// 'state established', 'tcp', 'not udp'; of several terms all must hold
    #[arg(short, long, value_name = "FILTER")]
    filter: Option<Filter>,
    /// Only the stacks of this process or of this name; of a gateway also a process of its guest, or the name or path
    /// of its network namespace
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
        escaped_json(&format!("{:#}\n", Value::Array(stacks.clone())))
    } else {
        let all = stacks.iter().map(|d| render(args, &printable_value(d)));
        fitted(&all.collect::<Vec<_>>().join("\n"))
    };
    // A closed pipe (`fulmar stat | head`) is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    match (&args.stack, stacks.is_empty()) {
        (_, false) => Ok(ExitCode::SUCCESS),
        (Some(wanted), true) => Err(Failure::new(format!(
            "no stack of process or name `{wanted}` runs; `fulmar stat` alone shows those that do"
        ))),
        (None, true) => {
            eprintln!("no stack of this user answers");
            Ok(ExitCode::from(1))
        }
    }
}

/// Prints the stacks periodically until standard output is closed.
fn watch(args: &Args, period: Duration) -> Outcome<ExitCode> {
    // Home, and everything below it erased (ECMA-48 CUP and ED).
    let clear = if io::stdout().is_terminal() { "\u{1b}[H\u{1b}[2J" } else { "" };
    let mut before: Option<(Instant, Vec<Value>)> = None;
    loop {
        let (now, stacks) = (Instant::now(), wanted_documents(args));
        let mut text = clear.to_owned();
        if stacks.is_empty() {
            text += "no stack of this user answers\n";
        }
        for document in &stacks {
            let mut shown = render(args, &printable_value(document));
            if let Some((then, old)) = &before
                && let Some(old) = old.iter().find(|d| rates::is_same(d, document))
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
fn wanted_documents(args: &Args) -> Vec<Value> {
    let is_wanted = |d: &Value| args.stack.as_ref().is_none_or(|wanted| matches(d, wanted));
    let mut stacks: Vec<Value> = documents().into_iter().filter(is_wanted).collect();
    let Some(filter) = &args.filter else { return stacks };
    for document in &mut stacks {
        for list in ["sockets", "flows"] {
            if let Some(all) = document.get_mut(list).and_then(Value::as_array_mut) {
                all.retain(|s| filter.admits(s));
            }
        }
    }
    stacks
}

/// The documents of all stacks that answer; a stack that does not is named on standard error.
pub fn documents() -> Vec<Value> {
    let (found, complaints) = ask_all();
    for complaint in complaints {
        eprintln!("fulmar: {complaint}");
    }
    found
}

/// The documents of all stacks that answer, and a sentence about each that does not.
pub(crate) fn ask_all() -> (Vec<Value>, Vec<String>) {
    let foreign = control::foreign_directories().into_iter();
    let foreign =
        foreign.map(|d| format!("{} is not this user's alone: not looked into", d.display()));
    let (mut found, mut complaints) = (Vec::new(), foreign.collect::<Vec<_>>());
    for socket in control::sockets() {
        let answer = control::ask(&socket).map(|d| d.map(|text| serde_json::from_str(&text)));
        match answer {
            Ok(Some(Ok(document))) => found.push(document),
            Ok(Some(Err(e))) => {
                complaints.push(format!("{} does not answer with JSON: {e}", socket.display()))
            }
            Ok(None) => {}
            Err(e) => complaints.push(format!("{} does not answer: {e}", socket.display())),
        }
    }
    (found, complaints)
}

/// Most shown characters of a name or text: a column is as wide as its widest cell.
const MOST_SHOWN: usize = 1024;

/// The value with its strings shortened and without control sequences for the terminal: names come from other programs.
pub(crate) fn printable_value(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(shown(text)),
        Value::Array(all) => all.iter().map(printable_value).collect(),
        Value::Object(all) => all.iter().map(|(k, v)| (shown(k), printable_value(v))).collect(),
        other => other.clone(),
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

/// Escapes what JSON does not and some terminals obey: DEL and the C1 control characters.
fn escaped_json(text: &str) -> String {
    let escape = |c: char| match is_shown(c) || c == '\n' {
        true => String::from(c),
        false => format!("\\u{:04x}", u32::from(c)),
    };
    text.chars().map(escape).collect()
}

/// The text of one stack.
fn render(args: &Args, document: &Value) -> String {
    let mut text = heading(document);
    let flows = flows::table_of(&document["flows"]);
    let mut shown = sockets(&document["sockets"]);
    if args.filter.is_some() {
        if shown.is_empty() && flows.is_empty() {
            shown.push_str("no flow or socket matches the filter");
        }
        return text + &section("flows", flows) + &section("sockets", shown);
    }
    text += &section("flows", flows);
    text += &section("published", flows::published(&document["gateway"]["published"]));
    text += &section("to the host", flows::host_ports(&document["gateway"]["host_ports"]));
    text += &section("not carried", flows::refusals(&document["gateway"]["refusals"]));
    text += &section("carried", fields(&flows::totals(&document["gateway"])));
    text += &section("sockets", shown);
    text += &section("drops", drops(&document["drops"]));
    text += &section("buffers", fields(&document["pool"]));
    text += &section("device", fields(&document["device"]));
    text += &section("waiting", fields(&document["waiting"]));
    text += &section("neighbours", rows(&document["neighbours"]));
    text += &section("routes", rows(&document["routes"]));
    if args.counters {
        text += &section("counters", fields(&non_zero(&document["counters"])));
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

fn heading(document: &Value) -> String {
    let addresses: Vec<String> = list(&document["addresses"]).iter().map(word).collect();
    let elsewhere = match (document["network_namespace"].as_u64(), own_namespace()) {
        (Some(its), Some(own)) if its != own => format!(", in another network namespace ({its})"),
        _ => String::new(),
    };
    let (name, guest) = (word(&document["name"]), guest_of(document));
    format!(
        "{}, process {}, {}, {}{elsewhere}\n",
        guest.map_or(name.clone(), |guest| format!("gateway of {name} ({guest})")),
        word(&document["pid"]),
        word(&document["device"]["name"]),
        addresses.join(" ")
    )
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

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value without quotes; absent ones are a dash.
fn word(value: &Value) -> String {
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

fn sockets(value: &Value) -> String {
    with_details(value, &SOCKET_COLUMNS)
}

/// Objects as `ss -ti` prints sockets: a line of columns, then the other fields as `name:value`.
fn with_details(value: &Value, columns: &[(&str, &str)]) -> String {
    let all = list(value);
    if all.is_empty() {
        return String::new();
    }
    let heads: Vec<&str> = columns.iter().map(|c| c.1).collect();
    let cells = |s: &Value| columns.iter().map(|c| word(&s[c.0])).collect();
    let lines: Vec<Vec<String>> = all.iter().map(cells).collect();
    let laid_out = table(&heads, &lines);
    let mut laid_out = laid_out.lines();
    let mut text = format!("{}\n", laid_out.next().unwrap_or_default());
    for (line, object) in laid_out.zip(all) {
        let _ = writeln!(text, "{line}");
        let rest = rest_of(object, columns);
        if !rest.is_empty() {
            let _ = writeln!(text, "      {rest}");
        }
    }
    text
}

fn rest_of(object: &Value, columns: &[(&str, &str)]) -> String {
    let Some(object) = object.as_object() else { return String::new() };
    let is_rest = |name: &str| columns.iter().all(|c| c.0 != name);
    // An object of its own is for `--json`.
    let rest = object.iter().filter(|(name, v)| is_rest(name) && !v.is_null() && !v.is_object());
    rest.map(|(name, v)| quantity(name, v)).collect::<Vec<_>>().join(" ")
}

/// `name:value` with the unit at the value, as in `rto:200ms`.
fn quantity(name: &str, value: &Value) -> String {
    if let (Some(name), Some(us)) = (name.strip_suffix("_us"), value.as_f64()) {
        return format!("{name}:{}", time(us));
    }
    if let (Some(name), Some(n)) = (name.strip_suffix("_bytes"), value.as_u64()) {
        return format!("{name}:{}", bytes(n).replace(' ', ""));
    }
    if let (true, Some(n)) = (is_bytes(name), value.as_u64()) {
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
fn drops(value: &Value) -> String {
    let why = |d: &Value| {
        let is_usual = USUAL.iter().any(|usual| d["reason"] == usual.name());
        let note =
            if is_usual { " Usual for broadcasts and multicasts of other hosts." } else { "" };
        word(&d["sentence"]) + note
    };
    let counted = list(value).iter().filter(|d| d["packets"].as_u64().unwrap_or(0) > 0);
    let lines: Vec<Vec<String>> = counted
        .map(|d| vec![word(&d["packets"]), word(&d["layer"]), word(&d["reason"]), why(d)])
        .collect();
    if lines.is_empty() {
        "none\n".to_owned()
    } else {
        table(&["packets", "layer", "reason", "why"], &lines)
    }
}

fn is_bytes(name: &str) -> bool {
    name.ends_with("_bytes") || name.starts_with("bytes_")
}

/// An object as lines of name and value, sizes readable.
fn fields(value: &Value) -> String {
    let Some(object) = value.as_object() else { return String::new() };
    let width = object.keys().map(String::len).max().unwrap_or(0);
    object.iter().fold(String::new(), |mut text, (name, v)| {
        let readable = match v.as_u64() {
            Some(n) if is_bytes(name) && n >= 1024 => format!("{n} ({})", bytes(n)),
            _ => word(v),
        };
        let _ = writeln!(text, "{name:<width$}  {readable}");
        text
    })
}

/// An array of objects as a table with the names of the first one's fields.
fn rows(value: &Value) -> String {
    let Some(first) = list(value).first().and_then(Value::as_object) else { return String::new() };
    let names: Vec<&str> = first.keys().map(String::as_str).collect();
    let cells = |row: &Value| names.iter().map(|n| word(&row[*n])).collect();
    table(&names, &list(value).iter().map(cells).collect::<Vec<_>>())
}

fn non_zero(counters: &Value) -> Value {
    let all = counters.as_object().into_iter().flatten();
    all.filter(|(_, v)| v.as_u64() != Some(0)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;
    use serde_json::json;

    fn args(words: &[&str]) -> Args {
        parse(["stat"].iter().chain(words)).expect("it parses")
    }

    #[test]
    fn names_of_other_programs_are_not_endless() {
        let long = "x".repeat(100_000);
        let document = json!({"name": "n", "pool": {long.clone(): 1}, "flows": [{"peer": long}]});
        let shown = printable_value(&document);
        let width = |text: &str| text.chars().count();
        let name = shown["pool"].as_object().unwrap().keys().next().unwrap();
        assert_eq!(width(name), MOST_SHOWN + 1);
        assert!(name.ends_with('…') && width(shown["flows"][0]["peer"].as_str().unwrap()) < 1100);
        assert!(fields(&shown["pool"]).len() < 4000);
    }

    #[test]
    fn a_watch_has_a_period_only_behind_an_equals_sign() {
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
        for (namespace, is_marked) in [(json!(own), false), (json!(own + 1), true)] {
            document["network_namespace"] = namespace;
            assert_eq!(heading(&document).contains("another network namespace"), is_marked);
        }
    }

    fn document() -> Value {
        json!({
            "name": "nc", "pid": 42, "addresses": ["10.77.0.2/24"],
            "sockets": [
                {"protocol": "tcp", "state": "ESTABLISHED", "recv_queue_bytes": 0,
                 "send_queue_bytes": 4096, "local": "10.77.0.2:1000", "remote": "10.77.0.1:80",
                 "rtt_us": 120, "cwnd_bytes": 14480, "error": null},
                {"protocol": "udp", "state": "UNCONNECTED", "recv_queue_bytes": 0,
                 "send_queue_bytes": 0, "local": "0.0.0.0:53", "remote": null},
            ],
            "drops": [
                {"reason": "udp_no_socket", "layer": "udp", "packets": 3, "sentence": "No socket."},
                {"reason": "tcp_paws", "layer": "tcp", "packets": 0, "sentence": "Old."},
            ],
            "pool": {"budget_bytes": 268435456, "chains": 2},
            "device": {"name": "tap:fulmar0", "tx_frames": 7},
            "neighbours": [{"address": "10.77.0.1", "state": "reachable"}],
            "routes": [],
            "counters": {"sleeps": 0, "wakeups": 9},
        })
    }

    #[test]
    fn a_stack_is_laid_out_as_ss_would() {
        let expected = "\
nc, process 42, tap:fulmar0, 10.77.0.2/24

sockets
  Netid  State        Recv-Q  Send-Q  Local Address:Port  Peer Address:Port
  tcp    ESTABLISHED       0    4096  10.77.0.2:1000      10.77.0.1:80
        cwnd:14.14KiB rtt:120us
  udp    UNCONNECTED       0       0  0.0.0.0:53          -

drops
  packets  layer  reason         why
        3  udp    udp_no_socket  No socket.

buffers
  budget_bytes  268435456 (256.00 MiB)
  chains        2

device
  name       tap:fulmar0
  tx_frames  7

neighbours
  address    state
  10.77.0.1  reachable
";
        assert_eq!(render(&args(&[]), &document()), expected);
    }

    #[test]
    fn a_filter_shows_sockets_alone_and_says_so_where_there_are_none() {
        let mut document = document();
        let filter = ["-f", "state established"];
        let text = render(&args(&filter), &document);
        assert!(text.contains("ESTABLISHED") && !text.contains("buffers"), "{text}");
        document["sockets"] = json!([]);
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
    fn a_document_of_another_version_is_still_shown() {
        let text = render(&args(&["--counters"]), &json!({}));
        assert_eq!(text, "-, process -, -, \n\ndrops\n  none\n");
    }

    #[test]
    fn control_characters_are_shown_escaped() {
        let evil = "a\u{1b}]0;x\u{7}\nb\u{9b}31m\u{202e}\u{7f}";
        let document = json!({ "name": evil, "pid": 1, "pool": { evil: evil } });
        let text = render(&args(&[]), &printable_value(&document));
        let is_plain = |text: &str| text.chars().all(|c| c == '\n' || is_shown(c));
        assert!(is_plain(&text), "{text:?}");
        // No line of its own.
        assert!(text.starts_with(r"a\u{1b}]0;x\u{7}\nb\u{9b}31m"), "{text}");
        let json = escaped_json(&format!("{document:#}"));
        assert!(is_plain(&json), "{json:?}");
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), document);
    }
}
