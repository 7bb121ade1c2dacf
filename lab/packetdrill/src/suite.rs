//! The public suites: each script is played by stock packetdrill against `libfulmar_packetdrill.so`, and the
//! result is compared with `verdicts.txt`, which tells of each script that does not pass why.
//!
//! Scripts are played from a copy, which `prepare.rs` changes where they touch the machine or compare what is no
//! matter of the protocol. Nothing of a suite is kept.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

mod play;
mod prepare;
mod verdict;

use play::{Outcome, Stage};
use verdict::{Class, Verdicts};

/// A suite.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// Its name on the command line and in `verdicts.txt`.
    pub name: &'static str,
    /// Its title in the table.
    pub title: &'static str,
    /// Where its scripts are, below the directory given.
    scripts: &'static str,
    /// What of a line is changed.
    adapt: fn(&str) -> String,
    /// Settings that its scripts start with.
    settings: &'static str,
    /// Written by others: it counts for `wan.packetdrill.applicable`.
    is_public: bool,
}

const SUITES: [Suite; 3] = [
    Suite {
        name: "google",
        title: "google/packetdrill, gtests/net/tcp",
        scripts: "tcp",
        adapt: prepare::google,
        settings: "fulmar.push=0\n",
        is_public: true,
    },
    Suite {
        name: "freebsd",
        title: "freebsd-net/tcp-testsuite",
        scripts: ".",
        adapt: prepare::freebsd,
        settings: "",
        is_public: true,
    },
    Suite {
        name: "own",
        title: "lab/packetdrill/scripts",
        scripts: ".",
        adapt: str::to_owned,
        settings: "",
        is_public: false,
    },
];

/// The suite of a name.
pub fn by_name(name: &str) -> Option<Suite> {
    SUITES.into_iter().find(|s| s.name == name)
}

/// What a run needs.
pub struct Place {
    /// packetdrill.
    pub program: PathBuf,
    /// `libfulmar_packetdrill.so`.
    pub library: PathBuf,
    /// Only scripts whose path contains this.
    pub only: String,
}

/// The counts of a group of scripts.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    scripts: usize,
    passed: usize,
    failed: usize,
    choices: usize,
    absent: usize,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.scripts += other.scripts;
        self.passed += other.passed;
        self.failed += other.failed;
        self.choices += other.choices;
        self.absent += other.absent;
    }

    fn ratio(&self) -> String {
        match self.passed + self.failed {
            0 => "–".to_owned(),
            all => format!("{:.3}", self.passed as f64 / all as f64),
        }
    }

    fn row(&self, name: &str) -> String {
        let Counts { scripts, passed, failed, choices, absent } = self;
        let ratio = self.ratio();
        format!("| {name} | {scripts} | {absent} | {choices} | {passed} | {failed} | {ratio} |")
    }
}

const HEAD: &str = "| group | scripts | feature absent | other system's own choice | pass | fail | \
                    pass ÷ applicable |\n|---|---|---|---|---|---|---|";

/// Plays the suites and prints their tables. True if every script did what `verdicts.txt` says.
///
/// # Errors
/// What is missing.
pub fn run_all(place: &Place, suites: &[(Suite, PathBuf)]) -> Result<bool, String> {
    let verdicts = Verdicts::of_the_repository()?;
    let (mut all, mut is_as_told) = (Counts::default(), true);
    for (suite, from) in suites {
        let (counts, surprises) = run_suite(place, suite, from, &verdicts)?;
        for line in &surprises {
            println!("{line}");
        }
        is_as_told &= surprises.is_empty();
        if suite.is_public {
            all.add(counts);
        }
    }
    println!("\n`wan.packetdrill.applicable` {}", all.ratio());
    Ok(is_as_told)
}

fn run_suite(
    place: &Place,
    suite: &Suite,
    from: &Path,
    verdicts: &Verdicts,
) -> Result<(Counts, Vec<String>), String> {
    let stage = Stage::new(place, suite, from)?;
    let outcomes = stage.play_all(&place.only)?;
    let mut groups: BTreeMap<String, Counts> = BTreeMap::new();
    let mut surprises = Vec::new();
    for (script, outcome) in &outcomes {
        let class = verdicts.class_of(suite.name, script);
        let group = group_of(script);
        groups.entry(group).or_default().add(counts_of(outcome, class, script, &mut surprises));
    }
    println!("\n{} ({} scripts)\n\n{HEAD}", suite.title, outcomes.len());
    let mut total = Counts::default();
    for (group, counts) in &groups {
        println!("{}", counts.row(group));
        total.add(*counts);
    }
    println!("{}", total.row("**all**"));
    Ok((total, surprises))
}

/// The first two directories of a script's path.
fn group_of(script: &str) -> String {
    let parts: Vec<&str> = script.split('/').collect();
    let directories = &parts[..parts.len().saturating_sub(1).min(2)];
    if directories.is_empty() { "scripts".to_owned() } else { directories.join("/") }
}

fn counts_of(
    outcome: &Outcome,
    class: Option<Class>,
    script: &str,
    surprises: &mut Vec<String>,
) -> Counts {
    let mut counts = Counts { scripts: 1, ..Counts::default() };
    match (outcome, class) {
        // A script of an absent feature may pass by not using it; it proves nothing.
        (_, Some(Class::Absent)) => counts.absent = 1,
        (Outcome::Passed, class) => {
            counts.passed = 1;
            if class.is_some() {
                surprises.push(format!("passes although verdicts.txt lists it: {script}"));
            }
        }
        (Outcome::Failed(_), Some(Class::Choice)) => counts.choices = 1,
        (Outcome::Failed(_), Some(Class::Fails)) => counts.failed = 1,
        (Outcome::Failed(why), None) => {
            counts.failed = 1;
            surprises.push(format!("fails: {script}: {why}"));
        }
    }
    counts
}
