//! The whole stack in a simulation: two shards on a virtual clock, joined by a bad wire.
//!
//! ```text
//!   seed ─► Scenario ─► World { 2 × Shard over Gate over SimLink, applications, script }
//!                          │  one event after the other, no clock, no thread, no descriptor read
//!                          ▼
//!                       Report, or Failure { seed, scenario, what was violated, last events }
//! ```
//!
//! Everything that happens follows from one number. [`run`] makes a [`Scenario`] of it and plays it:
//! connections of every kind, datagrams and pings over a wire that loses, reorders, doubles, flips
//! bits, is slow, narrow, full, silent or dead. While it plays and when it is over the oracle asks:
//!
//! - Every byte that the stack accepted from a writer arrives in order, exactly once, or the connection reports an
//!   error. An error needs a cause in the scenario; loss alone is not a cause.
//! - So does every byte that comes in posted buffers, whichever layer placed it there, and with posts, reads,
//!   cancels and handles dropped in between.
//! - The end of the stream is seen only after the last byte, and stays.
//! - Time never runs out of events while something is pending, and never stands still.
//! - When all is closed and TIME-WAIT is over, both stacks hold no socket, no timer of one, no
//!   mbuf, no byte of receive window.
//! - What is counted has a reason.
//!
//! The swarm ([`Case::swarm`]) adds hostile and short-handed features to a bad network: an attacker on the
//! wire, peers that never read, small budgets, many connections, a clock that jumps. The oracle asks more:
//!
//! - Honest connections are through within a bound that follows from the scenario.
//! - No forged frame ends a connection or changes a byte.
//! - Storage in use stays within the budget, and a stack that waits takes few steps.
//!
//! A failing seed is played a second time to print its last events; the digest over all frames and
//! calls must be the same, so that a failure can always be looked at again.
//!
//! Not here: threads, sleeping, wake-ups of threads (the room `runtime` tests its host on real time),
//! and the kernel's TCP as a peer.

mod app;
mod attack;
mod batch;
mod black_hole;
mod case;
mod clamp;
mod deciding;
mod describe;
pub mod dumbbell;
mod fast_open;
mod filing;
mod gate;
mod handshakes;
mod hostile;
mod idents;
mod mangling;
mod middlebox;
mod moves;
mod opening;
mod options;
mod oracle;
mod pattern;
mod placing;
mod posting;
mod scenario;
mod script;
mod service;
mod side_traffic;
mod swarm;
mod urgency;
mod waiting;
mod world;

pub use attack::{Attack, AttackKind};
pub use batch::{Summary, run_many};
pub use case::{Case, Feature, Features};
pub use deciding::DecidePlan;
pub use fast_open::FirstPlan;
pub use filing::FilePlan;
pub use middlebox::{Action, Middlebox, Segments};
pub use options::SocketPlan;
pub use oracle::{Failure, Report, Violation};
pub use scenario::{
    EndPlan, FlowKind, FlowPlan, Leave, PostPlan, RouteChange, Scenario, Station, Trouble,
};
pub use swarm::Swarm;
pub use waiting::WaitPlan;

use std::panic::{AssertUnwindSafe, catch_unwind};

use world::World;

/// Events kept for a failure's trace.
const TRACE_EVENTS: usize = 80;

/// Plays a case.
///
/// # Errors
/// The violation, with the last events of a second playing of the same case.
pub fn run(case: Case) -> Result<Report, Box<Failure>> {
    let (result, digest) = play(case, 0);
    match result {
        Ok((report, _)) => Ok(report),
        Err((violation, _)) => {
            let (again, second) = play(case, TRACE_EVENTS);
            let trace = again.err().map(|(_, trace)| trace).unwrap_or_default();
            Err(Box::new(Failure { case, violation, trace, replays: digest == second }))
        }
    }
}

/// Plays a case and returns every event as a line, whatever comes of it.
pub fn run_with_trace(case: Case) -> (Result<Report, Box<Failure>>, Vec<String>) {
    match play(case, usize::MAX).0 {
        Ok((report, trace)) => (Ok(report), trace),
        Err((violation, trace)) => {
            let failure = Failure { case, violation, trace: Vec::new(), replays: true };
            (Err(Box::new(failure)), trace)
        }
    }
}

/// Leaves out features of a failing case as long as it fails in the same way.
pub fn reduce(failure: Failure) -> Failure {
    let mut best = failure;
    for feature in Scenario::of(best.case).swarm.features.iter() {
        let case = Case { without: best.case.without.with(feature), ..best.case };
        if let Err(f) = run(case)
            && std::mem::discriminant(&f.violation) == std::mem::discriminant(&best.violation)
        {
            best = *f;
        }
    }
    best
}

type Played = Result<(Report, Vec<String>), (Violation, Vec<String>)>;

/// One playing, keeping the last `events` events; the digest says what happened, to the byte.
fn play(case: Case, events: usize) -> (Played, u64) {
    let mut world = match catch_unwind(|| World::new(Scenario::of(case), events)) {
        Ok(world) => world,
        Err(panic) => return (Err((Violation::Panic(message(&*panic)), Vec::new())), 0),
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| world.play()))
        .unwrap_or_else(|panic| Err(Violation::Panic(message(&*panic))));
    if !matches!(outcome, Err(Violation::Panic(_))) {
        world.note_counters();
    }
    let (digest, trace) = world.take_log();
    let played = match outcome {
        Ok(report) => Ok((report, trace)),
        Err(violation) => {
            if matches!(violation, Violation::Panic(_)) {
                // The shard may be in any state; its memory goes with the process.
                std::mem::forget(world);
            }
            Err((violation, trace))
        }
    };
    (played, digest)
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
