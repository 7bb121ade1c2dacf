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

/// The ways of a bench by their names in options: fulmar's, and the kernel's, which need namespaces
/// of one's own.
pub struct Names {
    /// Over any device; tap and packet need namespaces of one's own as well.
    pub fulmar: Vec<&'static str>,
    /// On veth, and between processes of one host.
    pub kernel: Vec<&'static str>,
}

fn unknown(sentence: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, sentence)
}

impl Names {
    /// Every way that is asked for by name exists. To be asked before anything is opened.
    ///
    /// # Errors
    /// One does not: those that do, with what they need.
    pub fn check_exist(&self, asked: &[String]) -> io::Result<()> {
        let exists = |name: &String| self.fulmar.iter().chain(&self.kernel).any(|n| n == name);
        let Some(wrong) = asked.iter().find(|a| !exists(a)) else { return Ok(()) };
        Err(unknown(format!(
            "there is no way `{wrong}`; there are {} (fulmar; over tap and packet they need \
             namespaces of your own, over sim and shm nothing) and {} (the kernel; need namespaces \
             of your own)",
            self.fulmar.join(", "),
            self.kernel.join(", ")
        )))
    }

    /// Every way that is asked for by name is among those that were opened.
    ///
    /// # Errors
    /// One is not: those that are.
    pub fn check_opened(asked: &[String], opened: &[&str]) -> io::Result<()> {
        let Some(missing) = asked.iter().find(|a| !opened.contains(&a.as_str())) else {
            return Ok(());
        };
        let rest = match opened.join(", ") {
            none if none.is_empty() => "nothing can be measured with these options".to_owned(),
            there => format!("with them there are {there}"),
        };
        Err(unknown(format!(
            "the way `{missing}` cannot be measured with these --device, --stack and other options \
             here; {rest}"
        )))
    }
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
    fn a_way_that_does_not_exist_is_named_beside_all_that_do_and_what_they_need() {
        let names = Names { fulmar: vec!["old", "ours"], kernel: vec!["kernel_write"] };
        let asked = ["kernel_write".to_owned(), "ours".to_owned(), "our".to_owned()];
        let sentence = names.check_exist(&asked).unwrap_err().to_string();
        assert!(sentence.starts_with("there is no way `our`; there are old, ours ("), "{sentence}");
        assert!(sentence.contains("kernel_write (the kernel; need namespaces"), "{sentence}");
        assert!(names.check_exist(&asked[..2]).is_ok());
    }

    #[test]
    fn a_way_that_could_not_be_opened_is_named_beside_those_that_were() {
        let asked = ["ours".to_owned()];
        let sentence = Names::check_opened(&asked, &["old"]).unwrap_err().to_string();
        assert!(sentence.contains("`ours`") && sentence.ends_with("there are old"), "{sentence}");
        assert!(Names::check_opened(&asked, &["old", "ours"]).is_ok());
    }
}
