//! The cost of half of the wake-ups: the published bound on interrupt reduction, as an experiment.
//!
//! Segments come one by one, evenly, at the rate of the published line, so that a receiver that sleeps
//! is woken for each. The same stream is then received by a reader that holds: after every read it
//! sleeps for a time in which segments gather, as hardware does that coalesces interrupts, and is woken
//! once for all of them. The load is read where the wake-ups are half. The same reader runs on both
//! stacks, its end and the sender's pinned to a CPU each where there are two, so that nothing else
//! decides how often it sleeps.
//!
//! (The policy of fulmar's own threads holds floods only, and 8,600 segments per second are none: at
//! this rate it leaves the wake-ups as they are.)

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use fulmar::Stack;

use super::workload::{self, RATE_BPS};
use crate::cpu::{self, Placement};
use crate::sys;

/// Bytes of a write, one segment.
const SEGMENT_BYTES: usize = 1448;
/// How long the reader holds after every read, in microseconds; a segment comes every 116. A hold that is
/// shorter than that saves nothing: it ends with one wake-up, and the next segment brings another.
const HOLDS_US: [u64; 6] = [0, 150, 200, 250, 350, 500];

/// One way of receiving the stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The setting.
    pub how: String,
    /// How often the receiving thread slept, per second.
    pub wakeups_per_s: f64,
    /// Segments that came, per second.
    pub segments_per_s: f64,
    /// CPU of the threads that count, as a share of one CPU.
    pub load: f64,
}

/// The stream with fewer and fewer wake-ups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Halved {
    /// The first as they come, the others with fewer wake-ups.
    pub points: Vec<Point>,
}

impl Halved {
    /// How much of the load goes away with half of the wake-ups, in percent: between the two points
    /// that lie on either side of half. `None`: there are none.
    pub fn saved_pct(&self) -> Option<f64> {
        let first = self.points.first()?;
        let half = first.wakeups_per_s / 2.0;
        let above = self.points.iter().filter(|p| p.wakeups_per_s >= half);
        let below = self.points.iter().filter(|p| p.wakeups_per_s < half);
        let above = above.min_by(|a, b| a.wakeups_per_s.total_cmp(&b.wakeups_per_s))?;
        let below = below.max_by(|a, b| a.wakeups_per_s.total_cmp(&b.wakeups_per_s))?;
        let share = (above.wakeups_per_s - half) / (above.wakeups_per_s - below.wakeups_per_s);
        let load = above.load + (below.load - above.load) * share;
        (first.load > 0.0).then(|| (1.0 - load / first.load) * 100.0)
    }

    /// One line per way.
    pub fn lines(&self) -> String {
        let line = |p: &Point| {
            format!(
                "  {:28} {:8.0} wake-ups/s {:6.1} segments each {:6.2} % of one CPU",
                p.how,
                p.wakeups_per_s,
                p.segments_per_s / p.wakeups_per_s.max(1.0),
                p.load * 100.0
            )
        };
        self.points.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// fulmar, over the device of `stack`, from a kernel peer; the load is that of everything but the peer's
/// thread.
///
/// # Errors
/// A connection that fails.
pub fn fulmar(stack: &Stack, listener: &TcpListener, time: Duration) -> io::Result<Halved> {
    let to = listener.local_addr()?;
    halve(time, |hold, time| {
        let near = fulmar::TcpStream::connect(stack, to)?;
        let far = listener.accept()?.0;
        let before = cpu::process_cpu(None)?;
        let (near, far) = receive(near, far, hold, time)?;
        let all = cpu::process_cpu(None)?.saturating_sub(before);
        Ok(near.point(hold, all.saturating_sub(far.cpu).max(near.cpu)))
    })
}

/// The kernel; the load is that of both ends, since the work of one is done in the calls of the other.
///
/// # Errors
/// A connection that fails.
pub fn kernel(
    connect: impl Fn() -> io::Result<TcpStream>,
    listener: &TcpListener,
    time: Duration,
) -> io::Result<Halved> {
    halve(time, |hold, time| {
        let near = connect()?;
        let far = listener.accept()?.0;
        let (near, far) = receive(near, far, hold, time)?;
        Ok(near.point(hold, near.cpu + far.cpu))
    })
}

/// Every hold in turn, `time` for all.
fn halve(
    time: Duration,
    point: impl Fn(Duration, Duration) -> io::Result<Point>,
) -> io::Result<Halved> {
    let each = time / HOLDS_US.len() as u32;
    let points = HOLDS_US.map(|us| point(Duration::from_micros(us), each));
    Ok(Halved { points: points.into_iter().collect::<io::Result<_>>()? })
}

/// CPU time of a thread.
struct Took {
    cpu: Duration,
    elapsed: Duration,
    waits: u64,
    bytes: u64,
}

impl Took {
    fn of(on: Option<usize>, work: impl FnOnce() -> io::Result<u64>) -> io::Result<Took> {
        if let Some(on) = on {
            cpu::pin_to(on)?;
        }
        sys::exact_timers()?;
        let (start, cpu, waits) = (Instant::now(), cpu::thread_cpu()?, sys::voluntary_switches()?);
        let bytes = work()?;
        Ok(Took {
            cpu: cpu::thread_cpu()?.saturating_sub(cpu),
            elapsed: start.elapsed(),
            waits: sys::voluntary_switches()?.saturating_sub(waits),
            bytes,
        })
    }

    /// The point of a receiver, with the CPU that counts.
    fn point(&self, hold: Duration, cpu: Duration) -> Point {
        let seconds = self.elapsed.as_secs_f64();
        let how = match hold.as_micros() {
            0 => "woken by every segment".to_owned(),
            us => format!("held for {us} us"),
        };
        Point {
            how,
            wakeups_per_s: self.waits as f64 / seconds,
            segments_per_s: (self.bytes / SEGMENT_BYTES as u64) as f64 / seconds,
            load: cpu.as_secs_f64() / seconds,
        }
    }
}

/// The stream from `far` to `near`; returns the CPU time of each end.
fn receive(
    near: impl Read + Send,
    far: TcpStream,
    hold: Duration,
    time: Duration,
) -> io::Result<(Took, Took)> {
    far.set_nodelay(true)?;
    // Where there is one CPU only, both run wherever they may.
    let (near_cpu, far_cpu) =
        Placement::TwoCpus.cpus(&cpu::allowed_cpus()?).unwrap_or((None, None));
    std::thread::scope(|scope| {
        let spawn = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let take = move || Took::of(near_cpu, || take_all(near, hold));
        let send = move || Took::of(far_cpu, || send_evenly(far, time));
        let near = spawn(workload::NEAR).spawn_scoped(scope, take)?;
        let far = spawn(workload::FAR).spawn_scoped(scope, send)?;
        let panicked = |_| Err(io::Error::other("a thread of the workload panicked"));
        Ok((near.join().unwrap_or_else(panicked)?, far.join().unwrap_or_else(panicked)?))
    })
}

fn send_evenly(mut stream: impl Write, time: Duration) -> io::Result<u64> {
    let bytes = [0x5a; SEGMENT_BYTES];
    let (start, mut sent) = (Instant::now(), 0u64);
    while start.elapsed() < time {
        stream.write_all(&bytes)?;
        sent += SEGMENT_BYTES as u64;
        let due = Duration::from_nanos(sent * 8 * 1_000_000_000 / RATE_BPS);
        if let Some(wait) = due.checked_sub(start.elapsed()) {
            std::thread::sleep(wait);
        }
    }
    Ok(sent)
}

fn take_all(mut stream: impl Read, hold: Duration) -> io::Result<u64> {
    let (mut room, mut taken) = (vec![0; 64 << 10], 0);
    loop {
        match stream.read(&mut room)? {
            0 => return Ok(taken),
            n => taken += n as u64,
        }
        if !hold.is_zero() {
            std::thread::sleep(hold);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halved(points: &[(f64, f64)]) -> Halved {
        let point = |&(wakeups_per_s, load)| Point {
            how: String::new(),
            wakeups_per_s,
            segments_per_s: 8600.0,
            load,
        };
        Halved { points: points.iter().map(point).collect() }
    }

    #[test]
    fn the_load_is_read_between_the_points_on_either_side_of_half() {
        let saved = halved(&[(8000.0, 0.2), (6000.0, 0.18), (2000.0, 0.1)]).saved_pct();
        // Half lies in the middle: 0.14.
        assert!((saved.unwrap() - 30.0).abs() < 1e-9);
        let exact = halved(&[(8000.0, 0.2), (4000.0, 0.15), (1000.0, 0.1)]).saved_pct();
        assert!((exact.unwrap() - 25.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_point_below_half_there_is_no_figure() {
        assert_eq!(halved(&[(8000.0, 0.2), (6000.0, 0.18)]).saved_pct(), None);
        assert_eq!(Halved::default().saved_pct(), None);
    }
}
