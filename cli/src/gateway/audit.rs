//! `--audit`: what a guest asked for and reached, as JSON lines.
//!
//! ```text
//!   policy (the relay's threads) ──► queue, bounded ──► writer's thread ──► file
//!                                       └─ full: counted as lost
//! ```
//!
//! The relay never waits for the file. The writer takes what has gathered for [`GATHERING`] and writes it with one call,
//! so that a kill loses the lines of the last moment only. A line that could not be written is counted.

mod document;
pub(super) mod receipt;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use fulmar::stat::ledger::Account;
use fulmar_gateway::policy::NewFlow;
use fulmar_gateway::stat::{FlowStat, Refusal};

use super::log::Log;
use super::output;
use crate::failure::{Failure, Outcome};
use crate::format;
use document::{Event, Line};
use receipt::Work;

/// Lines that wait for the writer at most: some megabytes.
const MOST_WAITING: usize = 16_384;
/// The part of them that questions and refusals may have, which a program makes at will.
const MOST_REFUSALS: usize = MOST_WAITING / 4 * 3;
/// Lines of the receipt that have a place besides.
const MOST_RECEIPTS: usize = MOST_WAITING / 4;
/// How long the writer lets lines gather.
const GATHERING: Duration = Duration::from_millis(5);
/// How long the end waits for the writer: a reader of the pipe may be dead.
const LONGEST_END: Duration = Duration::from_secs(2);

/// Where the lines go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// To the end of a file.
    File(PathBuf),
    /// To a descriptor that the caller has opened.
    Fd(RawFd),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let Some(number) = text.strip_prefix("fd:") else {
            return Ok(Target::File(text.into()));
        };
        match number.parse() {
            Ok(fd) if fd > libc::STDERR_FILENO => Ok(Target::Fd(fd)),
            _ => Err("expected fd:N with the number of a descriptor from 3 on".into()),
        }
    }
}

impl Target {
    /// The descriptor that this and other processes of the gateway have from their caller.
    pub(crate) fn inherited(&self) -> Option<RawFd> {
        if let Target::Fd(fd) = self { Some(*fd) } else { None }
    }

    /// Makes the file, and returns its path if a program could write to it by that.
    ///
    /// # Errors
    /// A sentence: it cannot be opened.
    pub(crate) fn prepare(&self) -> Outcome<Option<PathBuf>> {
        let Target::File(path) = self else { return Ok(None) };
        let file = self.open()?;
        let is_file = file.metadata().is_ok_and(|about| about.is_file());
        Ok(path.canonicalize().ok().filter(|_| is_file))
    }

    fn open(&self) -> Outcome<File> {
        match self {
            Target::File(path) => output::open(path, 0o600, true)
                .map_err(|e| Failure::file("cannot write the audit to", path, &e)),
            Target::Fd(fd) => inherited(*fd)
                .map_err(|e| Failure::io(format_args!("cannot write the audit to fd:{fd}"), &e)),
        }
    }
}

/// The file of an inherited descriptor, which is closed: the number may be another's later.
fn inherited(fd: RawFd) -> io::Result<File> {
    let file = File::options().append(true).open(format!("/proc/self/fd/{fd}"));
    let _ = nix::unistd::close(fd);
    file
}

/// What waits for the writer.
#[derive(Default)]
struct Queue {
    lines: Vec<Line>,
    lost: u64,
    /// Why lines could not be written, the first time.
    failed: Option<String>,
    /// CPU time of the writer.
    cpu: Duration,
    is_closed: bool,
    is_finished: bool,
}

/// The queue and its alarm.
#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: Event) {
        let mut queue = self.lock();
        let most = match event {
            Event::Question { .. } | Event::Refuse { .. } | Event::Contradicted(..) => {
                MOST_REFUSALS
            }
            Event::Begin(_) | Event::End(_) => MOST_WAITING,
            Event::Receipt(..) | Event::Total(_) => MOST_WAITING + MOST_RECEIPTS,
        };
        if queue.lines.len() >= most {
            queue.lost += 1;
            return;
        }
        queue.lines.push(Line { time: SystemTime::now(), event });
        if queue.lines.len() == 1 {
            self.changed.notify_all();
        }
    }
}

/// The side of the policy.
pub(super) struct Audit {
    shared: Arc<Shared>,
}

impl Audit {
    /// The guest has asked for records of a name. `rule`: what has decided.
    pub(super) fn asked(&self, name: &str, record_type: u16, is_allowed: bool, rule: Arc<str>) {
        let name = name.to_owned();
        self.shared.push(Event::Question { name, record_type, is_allowed, rule });
    }

    pub(super) fn began(&self, flow: &FlowStat) {
        self.add(flow, Event::Begin);
    }

    pub(super) fn ended(&self, flow: &FlowStat) {
        self.add(flow, Event::End);
    }

    /// The first bytes of a flow have ended it.
    pub(super) fn contradicted(&self, flow: &FlowStat, why: String) {
        self.add(flow, |flow| Event::Contradicted(flow, why));
    }

    /// Adds an event of a flow that has a number.
    fn add(&self, flow: &FlowStat, event: impl FnOnce(document::Flow) -> Event) {
        if let Some(id) = flow.id {
            self.shared.push(event(document::Flow::of(flow, id)));
        }
    }

    /// A flow is not carried. `rule`: what has allowed or refused it.
    pub(super) fn refused(&self, flow: &NewFlow<'_>, why: Refusal, rule: Option<Arc<str>>) {
        self.shared.push(Event::Refuse { flow: document::Refused::of(flow, rule), why });
    }
}

/// The writer of a gateway that is to be.
pub(super) struct Writer {
    shared: Arc<Shared>,
    file: File,
}

/// The thread that writes.
pub(super) struct Written {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The CPU time of the process before.
    since: Duration,
}

/// Opens the file. The side of the policy may write at once.
///
/// # Errors
/// A sentence: the file cannot be opened.
pub(super) fn open(target: &Target) -> Outcome<(Audit, Writer)> {
    let (file, shared) = (target.open()?, Arc::<Shared>::default());
    let writer = Writer { shared: Arc::clone(&shared), file };
    Ok((Audit { shared }, writer))
}

impl Writer {
    /// Starts the thread, which is contained as its caller is.
    ///
    /// # Errors
    /// There is no thread.
    pub(super) fn start(self, log: &Log) -> io::Result<Written> {
        let (shared, log) = (Arc::clone(&self.shared), log.clone());
        let thread = thread::Builder::new().name("audit".into()).spawn(move || self.run(&log))?;
        Ok(Written { shared, thread: Some(thread), since: receipt::of_process() })
    }

    fn run(mut self, log: &Log) {
        let mut broken = false;
        loop {
            let (lines, is_closed) = self.next();
            if lines.is_empty() && is_closed {
                break;
            }
            let (texts, count) = (document::texts(&lines, broken), lines.len() as u64);
            let mut left = texts.as_slice();
            let failed = loop {
                match self.file.write(left) {
                    Ok(n) if n == left.len() => break None,
                    Ok(0) => break Some(io::ErrorKind::WriteZero.into()),
                    Ok(n) => left = &left[n..],
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => break Some(e),
                }
            };
            // The next line begins a new one if this one has no end.
            let written = &texts[..texts.len() - left.len()];
            broken = failed.is_some() && !written.is_empty() && !written.ends_with(b"\n");
            if let Some(e) = failed {
                let whole = written.iter().filter(|byte| **byte == b'\n').count() as u64;
                self.lose(count.saturating_sub(whole), &e, log);
            }
            self.shared.lock().cpu = receipt::of_thread();
        }
        self.shared.lock().is_finished = true;
        self.shared.changed.notify_all();
    }

    /// Waits for lines, and lets more gather.
    fn next(&self) -> (Vec<Line>, bool) {
        let is_idle = |queue: &mut Queue| queue.lines.is_empty() && !queue.is_closed;
        let waited = self.shared.changed.wait_while(self.shared.lock(), is_idle);
        let queue = waited.unwrap_or_else(PoisonError::into_inner);
        let is_gathering = |queue: &mut Queue| !queue.is_closed;
        let waited = self.shared.changed.wait_timeout_while(queue, GATHERING, is_gathering);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut queue.lines), queue.is_closed)
    }

    /// Counts lines that could not be written, and says so the first time.
    fn lose(&self, count: u64, why: &io::Error, log: &Log) {
        let mut queue = self.shared.lock();
        queue.lost += count;
        if queue.failed.is_none() {
            queue.failed = Some(why.to_string());
            log.fail(&format!("cannot write the audit: {why}; the traffic is not affected"));
        }
    }
}

impl Written {
    /// Adds the receipt.
    pub(super) fn add_receipt(&self, work: Vec<Work>, account: Option<&Account>) {
        let all = receipt::of_process().saturating_sub(self.since);
        let writer = self.shared.lock().cpu;
        let stages = receipt::stages(account, all, writer);
        let shares = receipt::shares(&work, &stages);
        for (work, stages) in work.into_iter().zip(shares) {
            self.shared.push(Event::Receipt(work, stages));
        }
        self.shared.push(Event::Total(stages));
    }

    /// Lets the writer finish. Returns a sentence if lines are missing.
    pub(super) fn finish(mut self) -> Option<String> {
        let begun = Instant::now();
        let mut queue = self.shared.lock();
        queue.is_closed = true;
        self.shared.changed.notify_all();
        let is_busy = |queue: &mut Queue| !queue.is_finished;
        let waited = self.shared.changed.wait_timeout_while(queue, LONGEST_END, is_busy);
        queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        let (lost, is_finished) = (queue.lost + queue.lines.len() as u64, queue.is_finished);
        let why = queue.failed.take();
        drop(queue);
        if let Some(thread) = self.thread.take_if(|_| is_finished) {
            let _ = thread.join();
        }
        let why = why.unwrap_or_else(|| {
            let late = begun.elapsed() >= LONGEST_END;
            (if late { "its reader does not read" } else { "it was written too slowly" }).into()
        });
        let least = if is_finished { "" } else { "at least " };
        let is_whole = lost == 0 && is_finished;
        (!is_whole)
            .then(|| format!("the audit lacks {least}{}: {why}", format::count(lost, "line")))
    }
}

#[cfg(test)]
mod tests;
