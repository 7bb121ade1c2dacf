//! What benches share whose ways are cells of a matrix of devices, methods and sizes.

use crate::bench::{Figure, Ratio, Sample, Way};
use std::io;

/// Over which device fulmar is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// The simulated NIC with its modelled peer.
    Sim,
    /// TAP to a kernel peer.
    Tap,
    /// AF_PACKET on veth to a kernel peer.
    Packet,
    /// Shared memory, to another process.
    Shm,
    /// To another stack in this process.
    Link,
}

impl Device {
    /// Every device, in the order of the tables.
    pub const ALL: [Device; 5] =
        [Device::Sim, Device::Tap, Device::Packet, Device::Shm, Device::Link];

    /// The name in ways and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Sim => "sim",
            Device::Tap => "tap",
            Device::Packet => "packet",
            Device::Shm => "shm",
            Device::Link => "link",
        }
    }
}

/// The kernel has two ways between processes of one host, and the better one counts: of each pair of
/// figures that ends in `vs_loopback` and `vs_unix` the one that is worse for us becomes the last
/// figure, `vs_kernel`.
pub fn choose_better(figures: &mut Vec<Figure>) {
    let ends_in = |end: &'static str| move |f: &&Figure| f.ratio.name.ends_with(end);
    let mut chosen = Vec::new();
    for loopback in figures.iter().filter(ends_in("vs_loopback")) {
        let stem = loopback.ratio.name.trim_end_matches("loopback");
        let unix = figures.iter().find(|f| f.ratio.name == format!("{stem}unix"));
        let (Some(unix), Some(a)) = (unix, loopback.estimate) else { continue };
        let Some(b) = unix.estimate else { continue };
        let loopback_is_better = (a.median > b.median) != loopback.ratio.more_is_better;
        let better = if loopback_is_better { loopback } else { unix };
        let mut figure = better.clone();
        figure.ratio.name = format!("{stem}kernel");
        figure.ratio.sentence += " (the better of the kernel's two)";
        chosen.push(figure);
    }
    figures.extend(chosen);
}

/// Whether its ways are there.
pub fn is_measured(ratio: &Ratio, ways: &[Way<'_>]) -> bool {
    let has = |name: &String| ways.iter().any(|w| w.name == *name);
    has(&ratio.way) && ratio.over.as_ref().is_none_or(has)
}

/// What the ways are called in options, each once.
pub fn method_names(ways: &[Way<'_>]) -> Vec<&'static str> {
    let mut names: Vec<_> = ways.iter().filter_map(|w| Some(w.cell?.method)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Every way that is asked for by name is there.
///
/// # Errors
/// One is not: those that are, by name.
pub fn check_names(asked: &[String], names: &[&str]) -> io::Result<()> {
    let Some(unknown) = asked.iter().find(|a| !names.contains(&a.as_str())) else { return Ok(()) };
    let there = names.join(", ");
    let sentence = format!("there is no way `{unknown}` on these devices; there are {there}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, sentence))
}

/// One way over another, or what one way has.
pub struct Asked {
    /// A stable dotted name.
    pub name: &'static str,
    /// One sentence for a person.
    pub sentence: &'static str,
    /// The way above the line.
    pub way: String,
    /// The way below it, if there is one.
    pub over: Option<String>,
    /// What is taken of each sample.
    pub measure: fn(&Sample) -> f64,
    /// What the published work found.
    pub published: Option<f64>,
    /// What is good enough, and what we want.
    pub goals: (f64, f64),
    /// A larger value is a better one.
    pub more_is_better: bool,
}

impl From<Asked> for Ratio {
    fn from(a: Asked) -> Ratio {
        Ratio {
            name: a.name.to_owned(),
            sentence: a.sentence.to_owned(),
            way: a.way,
            over: a.over,
            measure: a.measure,
            reach_and_aim: Some(a.goals),
            more_is_better: a.more_is_better,
            published: a.published,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_does_not_exist_is_named_beside_those_that_do() {
        let asked = ["ours".to_owned(), "our".to_owned()];
        let sentence = check_names(&asked, &["old", "ours"]).unwrap_err().to_string();
        assert_eq!(sentence, "there is no way `our` on these devices; there are old, ours");
        assert!(check_names(&asked[..1], &["old", "ours"]).is_ok());
    }
}
