//! One transfer: the reader takes what comes, first the warm-up, then measured.

use super::{Load, Reader, Target};
use crate::kernel_calls::Burst;
use crate::peer::Report;
use crate::stream::{Counts, Start, counted, difference};
use fulmar::TcpStream;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Calls between two looks at the clock, where the reader decides when to stop.
const CALLS_PER_LOOK: u64 = 4;

/// Who ends the transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ends {
    /// The sender closes when it has sent for long enough.
    Sender,
    /// The reader goes away after this much time.
    After(Duration),
}

/// A sender that sends a burst when it is asked to, for readers that keep the pauses themselves.
pub(super) struct Asking {
    pub burst: Burst,
    /// Bytes left of this burst.
    left: u64,
}

impl Asking {
    pub fn new(burst: Burst) -> Asking {
        Asking { burst, left: 0 }
    }

    /// Asks for the next burst, after the pause, when this one is over.
    fn before_call(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        if self.left == 0 {
            std::thread::sleep(self.burst.gap);
            stream.write_all(&[1])?;
            self.left = self.burst.bytes;
        }
        Ok(())
    }
}

/// Lets `reader` take the warm-up, and then, after a word to `at_start`, all that comes. Returns this
/// end's account, and what was counted: over the measured stretch, or (`whole_...`) over all of the
/// connection from its first byte on.
pub(super) fn run(
    from: &Target<'_>,
    load: &Load,
    reader: &mut dyn Reader,
    ends: Ends,
    mut asking: Option<Asking>,
    at_start: &mut dyn FnMut(),
) -> io::Result<(Report, Counts)> {
    let mut take = |reader: &mut dyn Reader| -> io::Result<u64> {
        if let Some(asking) = &mut asking {
            asking.before_call(from.stream)?;
        }
        let n = reader.call(from)?;
        if let Some(asking) = &mut asking {
            asking.left = asking.left.saturating_sub(n);
        }
        Ok(n)
    };
    let before = counted(from.stack)?;
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
        if is_over(ends, start.at, calls) {
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

fn is_over(ends: Ends, start: Instant, calls: u64) -> bool {
    match ends {
        Ends::Sender => false,
        Ends::After(time) => calls.is_multiple_of(CALLS_PER_LOOK) && start.elapsed() >= time,
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
