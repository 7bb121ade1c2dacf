//! One transfer: the reader takes what comes, first the warm-up, then measured.

use super::{Load, Reader, Target};
use crate::kernel::send::Burst;
use crate::peer::Report;
use crate::stream::{Counts, Start, counted, difference};
use fulmar::TcpStream;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Calls between two looks at the clock, where the reader decides when to stop.
const CALLS_PER_LOOK: u64 = 4;

/// Who ends the transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StopCondition {
    /// The sender closes when it has sent for long enough.
    Sender,
    /// The reader goes away after this much time.
    After(Duration),
}

/// How the reader requests data: one byte to the sender for each part, so that the reader has posted its buffers before
/// the first byte comes.
pub(super) enum Asking {
    /// Not at all: the sender begins by itself.
    Not,
    /// Once, for this many parts: all that it will send.
    Once(usize),
    /// For a burst, and for the next when that is over; the reader keeps the pauses.
    Bursts {
        /// What a part is.
        burst: Burst,
        /// Bytes left of this burst.
        left: u64,
    },
}

impl Asking {
    /// Requests data if none is outstanding.
    fn before_call(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        match self {
            Asking::Not => {}
            Asking::Once(parts) => {
                stream.write_all(&vec![1; *parts])?;
                *self = Asking::Not;
            }
            Asking::Bursts { burst, left: left @ 0 } => {
                std::thread::sleep(burst.gap);
                stream.write_all(&[1])?;
                *left = burst.bytes;
            }
            Asking::Bursts { .. } => {}
        }
        Ok(())
    }

    fn note(&mut self, bytes: u64) {
        if let Asking::Bursts { left, .. } = self {
            *left = left.saturating_sub(bytes);
        }
    }
}

/// Lets `reader` take the warm-up, and then, after a word to `at_start`, all that comes. Returns this
/// end's account, and what was counted: over the measured stretch, or (`whole_...`) over all of the
/// connection from its first byte on.
pub(super) fn run(
    from: &Target<'_>,
    load: &Load,
    reader: &mut dyn Reader,
    until: StopCondition,
    mut asking: Asking,
    at_start: &mut dyn FnMut(),
) -> io::Result<(Report, Counts)> {
    let mut take = |reader: &mut dyn Reader| -> io::Result<u64> {
        asking.before_call(from.stream)?;
        let n = reader.call(from)?;
        asking.note(n);
        Ok(n)
    };
    let before = counted(from.stack)?;
    reader.begin(from)?;
    let mut warm = 0;
    while warm < load.warm_bytes {
        match take(reader)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => warm += n,
        }
    }
    at_start();
    let start = Start::now(from.stack)?;
    let (mut bytes, mut calls) = (0, 0);
    loop {
        if is_over(until, start.at, calls) {
            break;
        }
        match take(reader)? {
            0 => break,
            n => bytes += n,
        }
        calls += 1;
    }
    let (report, mut counts) = start.report(from.stack, bytes, calls)?;
    let whole = difference(&before, &counted(from.stack)?);
    reader.finish(from)?;
    note(&mut counts, &whole, &report, warm, reader.copies_per_byte());
    Ok((report, counts))
}

fn is_over(until: StopCondition, start: Instant, calls: u64) -> bool {
    match until {
        StopCondition::Sender => false,
        // A run of no call would say nothing, however late it begins.
        StopCondition::After(time) => {
            calls > 0 && calls.is_multiple_of(CALLS_PER_LOOK) && start.elapsed() >= time
        }
    }
}

/// Adds what tables want beside the counters themselves.
fn note(counts: &mut Counts, whole: &Counts, report: &Report, warm: u64, own_copies: u64) {
    let of = |counts: &Counts, name: &str| {
        counts.iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
    };
    let whole_bytes = warm + report.bytes;
    let copied = of(counts, "copied_bytes") + report.bytes * own_copies;
    let whole_copied = of(whole, "copied_bytes") + whole_bytes * own_copies;
    counts.extend([
        ("reads_made", report.calls),
        ("call_bytes", report.bytes),
        ("call_mb", report.bytes >> 20),
        ("waits", report.waits),
        ("all_copied_bytes", copied),
        ("whole_bytes", whole_bytes),
        ("whole_copied_bytes", whole_copied),
        ("whole_placed_bytes", of(whole, "placed_bytes")),
    ]);
}
