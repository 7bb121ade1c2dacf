//! The account of a stack as bars: one for each stage of a packet's way.
//!
//! ```text
//! sim: send, connected           (an account)
//!   all stages     ████▒▒▒▒░░░▓▓▓▓▓▓▓▓   142
//!   locked         ████                  31.2 · 22 %
//!   send_reserved  ▒▒▒▒                  19.0 · 13 %
//!                  0      50      100    ns per packet
//! ```
//!
//! It is made of the entries of a report's `accounts` ([`crate::account::Figures::json`]) and of nothing
//! else. A stage has the colour of its layer; what is no cost of the stack is grey.

use super::bars::NOT_OURS;
use super::{Bar, Bars, Block, Mark, Section, short};
use serde_json::Value;

/// The layers in the order of a way down, each with its colour; the last two are not the stack's own.
const LAYERS: [(&str, usize); 12] = [
    ("lock", 2),
    ("socket", 0),
    ("memory", 3),
    ("copy", 4),
    ("transport", 5),
    ("ip", 6),
    ("ether", 1),
    ("stack", 11),
    ("device", 8),
    ("wake", 10),
    ("application", NOT_OURS),
    (HARDWARE, NOT_OURS),
];
/// What stands for the part of the device's stages in which simulated hardware runs.
const HARDWARE: &str = "simulated hardware";
/// Below this share of the sum a stage has no bar of its own.
const LEAST_PCT: f64 = 0.5;

/// The section of a report's `accounts`, if there are any.
pub fn section(report: &Value) -> Option<Section> {
    let accounts = report["accounts"].as_array().filter(|a| !a.is_empty())?;
    let mut blocks = vec![Block::Prose(HOW.to_owned())];
    if accounts.len() > 1 {
        blocks.push(Block::Bars(beside_each_other(accounts)));
    }
    blocks.extend(accounts.iter().map(|a| Block::Bars(bars(a))));
    Some(Section::new("Stage by stage", blocks))
}

const HOW: &str = "Every stage of the stack's own list, in nanoseconds of a packet. The account is kept in \
                   one short round more, by stacks that are made for it: a cycle counter is read at the stages \
                   of one visit in several, what reading costs is measured and taken off. No figure elsewhere \
                   on this page has a reading in it. A packet is one on the wire, in either direction; what \
                   the program itself does between its calls, and what hardware takes that is simulated, is \
                   grey.";

/// One account: a bar of all stages, and one for each.
pub fn bars(account: &Value) -> Bars {
    let of = |key: &str| account[key].as_f64();
    let stages = stages(account);
    let used = |layer: &str| {
        stages.iter().any(|s| s.layer == layer) || (layer == HARDWARE && hardware(account) > 0.0)
    };
    let parts: Vec<(&str, usize)> = LAYERS.into_iter().filter(|(name, _)| used(name)).collect();
    let place = |layer: &str, ns: f64| {
        parts.iter().map(|(name, _)| if *name == layer { ns } else { 0.0 }).collect::<Vec<_>>()
    };
    let group = text(account, "title");
    let all = Bar {
        label: "all stages".to_owned(),
        values: by_layer(account, &parts),
        note: of("stages_ns_per_packet").map(short),
        group: group.clone(),
        ..Bar::default()
    };
    let one = |s: &Stage| Bar {
        group: group.clone(),
        label: s.name.clone(),
        values: place(&s.layer, s.ns),
        note: Some(format!("{} \u{b7} {:.0} %", short(s.ns), s.share_pct)),
        ..Bar::default()
    };
    let (shown, small): (Vec<&Stage>, Vec<&Stage>) =
        stages.iter().filter(|s| s.ns > 0.0).partition(|s| s.share_pct >= LEAST_PCT);
    let mut bars: Vec<Bar> = std::iter::once(all).chain(shown.into_iter().map(one)).collect();
    bars.extend(hardware_bar(account, &group, &place));
    let mark = of("total_ns_per_packet").zip(of("overhead_ns_per_packet"));
    Bars {
        caption: caption(account, &small),
        unit: "ns per packet".to_owned(),
        parts: parts.iter().map(|(name, colour)| ((*name).to_owned(), *colour)).collect(),
        bars,
        marks: mark.map(|(total, own)| measured(total - own)).into_iter().collect(),
    }
}

/// The total that the kernel says, without what the account has cost.
fn measured(value: f64) -> Mark {
    Mark { value, label: "measured without stages".to_owned() }
}

/// What simulated hardware has taken lies within other stages: its bar is beside theirs.
fn hardware_bar(
    account: &Value,
    group: &str,
    place: &impl Fn(&str, f64) -> Vec<f64>,
) -> Option<Bar> {
    let ns = hardware(account);
    (ns > 0.0).then(|| Bar {
        group: group.to_owned(),
        label: "within them, hardware".to_owned(),
        values: place(HARDWARE, ns),
        note: Some(short(ns)),
        ..Bar::default()
    })
}

/// A bar for each account, stacked by layer.
fn beside_each_other(accounts: &[Value]) -> Bars {
    let is_used = |name: &str| accounts.iter().flat_map(stages).any(|s| s.layer == name);
    let has_hardware = accounts.iter().any(|a| hardware(a) > 0.0);
    let parts: Vec<(&str, usize)> = LAYERS
        .into_iter()
        .filter(|(name, _)| is_used(name) || (*name == HARDWARE && has_hardware))
        .collect();
    let bar = |a: &Value| Bar {
        group: text(a, "group"),
        label: text(a, "title"),
        values: by_layer(a, &parts),
        ..Bar::default()
    };
    Bars {
        caption: "All accounts beside each other, by layer.".to_owned(),
        unit: "ns per packet".to_owned(),
        parts: parts.iter().map(|(name, colour)| ((*name).to_owned(), *colour)).collect(),
        bars: accounts.iter().map(bar).collect(),
        marks: Vec::new(),
    }
}

/// The sum of each layer; what hardware has taken is taken off the device's.
fn by_layer(account: &Value, parts: &[(&str, usize)]) -> Vec<f64> {
    let stages = stages(account);
    let sum = |layer: &str| stages.iter().filter(|s| s.layer == layer).map(|s| s.ns).sum::<f64>();
    let hardware = hardware(account).min(sum("device"));
    let of = |layer: &str| match layer {
        HARDWARE => hardware,
        "device" => sum(layer) - hardware,
        _ => sum(layer),
    };
    parts.iter().map(|(name, _)| of(name)).collect()
}

fn hardware(account: &Value) -> f64 {
    account["hardware_ns_per_packet"].as_f64().unwrap_or(0.0)
}

/// A stage as the report has it.
struct Stage {
    name: String,
    layer: String,
    ns: f64,
    share_pct: f64,
}

/// All but sleep.
fn stages(account: &Value) -> Vec<Stage> {
    let all = account["stages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let stage = |s: &Value| Stage {
        name: text(s, "stage"),
        layer: text(s, "layer"),
        ns: s["ns_per_packet"].as_f64().unwrap_or(0.0),
        share_pct: s["share_pct"].as_f64().unwrap_or(0.0),
    };
    all.iter().map(stage).filter(|s| s.layer != "idle").collect()
}

fn text(of: &Value, key: &str) -> String {
    of[key].as_str().unwrap_or_default().to_owned()
}

fn caption(account: &Value, small: &[&Stage]) -> String {
    let of = |key: &str| account[key].as_f64();
    let mut said = format!(
        "{}: {} ns per packet and {} per byte; {} copies per byte, {} buffers and {} crossings per packet.",
        text(account, "title"),
        short(of("stages_ns_per_packet").unwrap_or(f64::NAN)),
        short(of("stages_ns_per_byte").unwrap_or(f64::NAN)),
        short(of("copies_per_byte").unwrap_or(f64::NAN)),
        short(of("allocs_per_packet").unwrap_or(f64::NAN)),
        short(of("crossings_per_packet").unwrap_or(f64::NAN)),
    );
    if let Some(gap) = of("sum_vs_total_pct") {
        said += &format!(
            " The sum, with the {} ns that the account itself takes, is {gap:+.1} % off the CPU time that \
             the kernel says.",
            short(of("overhead_ns_per_packet").unwrap_or(f64::NAN)),
        );
    }
    if !small.is_empty() {
        let names: Vec<&str> = small.iter().map(|s| s.name.as_str()).collect();
        said += &format!(" Not drawn, below half a percent each: {}.", names.join(", "));
    }
    said
}
