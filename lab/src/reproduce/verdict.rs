//! What becomes of a published figure when it is measured again.

use super::SystemUnderTest;
use crate::stats::Estimate;
use std::fmt;

/// A verdict, with its reason where one is needed.
#[derive(Clone, PartialEq, Debug)]
pub enum Verdict {
    /// The published ratio, within its own uncertainty.
    Reproduced,
    /// More than published.
    Exceeded,
    /// Less than published, because of this.
    Shrunk(String),
    /// The effect is not there, because of this.
    Gone(String),
    /// Another machine's absolute figure, or another thing.
    NotComparable(String),
    /// There is no figure, because of this.
    NotMeasured(String),
}

impl Verdict {
    /// One word or two, stable in JSON.
    pub const fn word(&self) -> &'static str {
        match self {
            Verdict::Reproduced => "reproduced",
            Verdict::Exceeded => "exceeded",
            Verdict::Shrunk(_) => "shrunk",
            Verdict::Gone(_) => "gone",
            Verdict::NotComparable(_) => "not comparable",
            Verdict::NotMeasured(_) => "not measured",
        }
    }

    /// Whether there is no figure.
    pub const fn is_unmeasured(&self) -> bool {
        matches!(self, Verdict::NotMeasured(_))
    }

    /// Why, if there is something to say.
    pub fn reason(&self) -> &str {
        match self {
            Verdict::Reproduced | Verdict::Exceeded => "",
            Verdict::Shrunk(why)
            | Verdict::Gone(why)
            | Verdict::NotComparable(why)
            | Verdict::NotMeasured(why) => why,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            "" => f.write_str(self.word()),
            why => write!(f, "{} because {why}", self.word()),
        }
    }
}

/// The published figures are each known to 2.5 %, so their ratio to about 5 %; twice that is taken,
/// since the machines differ.
const TOLERANCE: f64 = 0.10;

/// Fewer pairs than this judge nothing.
const RUNS: usize = 3;

fn too_few() -> Verdict {
    Verdict::NotMeasured(
        "a verdict requires three rounds, and the time allowed fewer; use more --seconds"
            .to_owned(),
    )
}

/// An interval wider than this holds the published value, and much else.
const WIDE: f64 = 2.0;

fn too_wide() -> Verdict {
    Verdict::NotMeasured(
        "its interval is wider than a factor of two; use more --seconds, or a quieter machine"
            .to_owned(),
    )
}

/// A ratio with its interval; a dash for what too few rounds say nothing about.
pub fn between(estimate: Option<Estimate>) -> String {
    match estimate.filter(|e| e.runs >= RUNS) {
        Some(e) => format!("{:.2} ({:.2}\u{2013}{:.2})", e.median, e.low, e.high),
        None => "\u{2013}".to_owned(),
    }
}

/// What was not measured, said once for each reason.
pub fn unmeasured<'v>(verdicts: impl Iterator<Item = &'v Verdict>) -> Vec<String> {
    let (mut all, mut reasons) = (0, Vec::<(&str, usize)>::new());
    for verdict in verdicts {
        all += 1;
        let Verdict::NotMeasured(why) = verdict else { continue };
        match reasons.iter_mut().find(|(told, _)| told == why) {
            Some((_, n)) => *n += 1,
            None => reasons.push((why, 1)),
        }
    }
    let told =
        |(why, n): &(&str, usize)| format!("Not measured: {n} of {all} ratios, since {why}.");
    reasons.iter().map(told).collect()
}

/// Judges a ratio of old over new by its interval's bounds: it counts as reproduced when the
/// interval meets the published value's own band, whatever its median, and is not too wide to say so.
pub fn judge(published: f64, measured: Estimate, why_less: &str) -> Verdict {
    if measured.runs < RUNS {
        return too_few();
    }
    let (low, high) = (published * (1.0 - TOLERANCE), published * (1.0 + TOLERANCE));
    if measured.low > high {
        Verdict::Exceeded
    } else if measured.high >= low {
        if measured.high <= measured.low * WIDE { Verdict::Reproduced } else { too_wide() }
    } else if measured.high <= 1.0 {
        Verdict::Gone(why_less.to_owned())
    } else {
        Verdict::Shrunk(why_less.to_owned())
    }
}

/// Why a ratio of costs is smaller than it was: what both ways share is a larger part. Costs in ns
/// per KB, old and new; `copy` is one memcpy of the same bytes.
pub fn why_shrunk(
    (old, new): (f64, f64),
    copy: Option<f64>,
    tso: bool,
    site: SystemUnderTest,
) -> String {
    let shared = match (site, tso) {
        (SystemUnderTest::Simulated, true) => "the copy",
        (SystemUnderTest::Simulated, false) => {
            "the copy and the work for each of 45 packets per 64 KiB"
        }
        (_, true) => "the copies (ours and the kernel's) and the kernel's work for each frame",
        (_, false) => "the system call and the kernel's work for each of 45 packets per 64 KiB",
    };
    if new >= old {
        return format!("the new way is no cheaper here: {old:.0} ns/KB became {new:.0}");
    }
    let why = format!("{shared}, which both ways share, outweigh what differs");
    match copy.filter(|copy| *copy < new && *copy > new * WORTH_NAMING) {
        // Taking the copy off both is what the ratio would be were it free.
        Some(copy) => {
            let (share, rest) = (copy / new * 100.0, (old - copy) / (new - copy));
            format!(
                "{why}: one memcpy is {copy:.0} of the new way's {new:.0} ns/KB ({share:.0} %), and \
                 of the rest the ratio is {rest:.2}"
            )
        }
        None => format!("{why}: {old:.0} ns/KB became {new:.0}"),
    }
}

/// A copy below this share of a cost explains nothing.
const WORTH_NAMING: f64 = 0.15;

/// Judges whether the old way is slower with super-segments than without, which was published as
/// 2 % less throughput. `measured`: throughput with over throughput without.
pub fn of_surprise(measured: Estimate, site: SystemUnderTest) -> Verdict {
    if measured.runs < RUNS {
        return too_few();
    }
    if measured.high < 1.0 {
        return Verdict::Reproduced;
    }
    if measured.low <= 1.0 {
        return Verdict::NotComparable("the interval holds 1: this run cannot tell".to_owned());
    }
    let cause = match site {
        SystemUnderTest::Simulated => {
            "a simulated card cuts a frame of two segments at no cost to the host; a likely cause \
             then was what the card and its driver needed to set up each small TSO frame"
        }
        _ => {
            "nothing limits the rate here: each frame saved is a system call and a pass through the \
             kernel saved, and time saved is throughput. Then the wire was the limit; a likely cause \
             was what the card and its driver needed to set up each small TSO frame, since with \
             2 KiB per send there is nothing more to join"
        }
    };
    Verdict::Gone(cause.to_owned())
}
