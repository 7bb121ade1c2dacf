//! What half of the wake-ups cost: the published bound on interrupt reduction, as an experiment.
//!
//! Segments come one by one, evenly, at the rate of the published line, so that a receiver that sleeps
//! is woken for each. The same stream is then received with fewer wake-ups, in several steps, and the
//! load is read where they are half. fulmar holds: a thread that waits sleeps for a time in which frames
//! gather, as hardware does that coalesces interrupts. The kernel's reader sets a low-water mark, which
//! saves its wake-ups and not the interrupts (veth has none).

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fulmar::{ModerationConfig, Stack};

use super::workload::{self, RATE_BPS};
use crate::{cpu, sys};

/// Bytes of a write, one segment.
const SEGMENT_BYTES: usize = 1448;
/// How long a thread of fulmar holds at most, in microseconds; a segment comes every 116.
const HOLDS_US: [u64; 6] = [0, 64, 128, 256, 512, 1024];
/// Segments that must be there before the kernel wakes the reader.
const MARKS: [usize; 4] = [1, 2, 3, 4];

/// One way of receiving the stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// What was set.
    pub how: String,
    /// How often the receiving thread slept, per second.
    pub wakeups_per_s: f64,
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
                "  {:28} {:8.0} wake-ups/s {:6.2} % of one CPU",
                p.how,
                p.wakeups_per_s,
                p.load * 100.0
            )
        };
        self.points.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// fulmar, over the device of `stack`, from a kernel peer.
///
/// # Errors
/// A connection that fails.
pub fn fulmar(stack: &Stack, listener: &TcpListener, time: Duration) -> io::Result<Halved> {
    let mut points = Vec::new();
    for hold_us in HOLDS_US {
        stack.set_moderation(ModerationConfig {
            max_hold: fulmar::base::Duration::from_micros(hold_us),
            // Every stream of this rate may be held, and no looking stands in for a sleep.
            flood_pps: 1,
            ..ModerationConfig::NONE
        })?;
        let near = fulmar::TcpStream::connect(stack, listener.local_addr()?)?;
        let far = listener.accept()?.0;
        let (near, _) = receive(near, far, time / HOLDS_US.len() as u32)?;
        let how = match hold_us {
            0 => "woken by every frame".to_owned(),
            us => format!("holds for up to {us} us"),
        };
        points.push(near.point(how));
    }
    Ok(Halved { points })
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
    let mut points = Vec::new();
    for mark in MARKS {
        let near = connect()?;
        let bytes = (mark * SEGMENT_BYTES) as i32;
        sys::setsockopt(near.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, &bytes.to_ne_bytes())?;
        let far = listener.accept()?.0;
        let (near, far) = receive(near, far, time / MARKS.len() as u32)?;
        let mut point = near.point(format!("low-water mark of {mark} segment(s)"));
        point.load += far.cpu.as_secs_f64() / far.elapsed.as_secs_f64();
        points.push(point);
    }
    Ok(Halved { points })
}

/// What a thread's part took.
struct Took {
    cpu: Duration,
    elapsed: Duration,
    waits: u64,
}

impl Took {
    fn of(work: impl FnOnce() -> io::Result<()>) -> io::Result<Took> {
        let (start, cpu, waits) = (Instant::now(), cpu::thread_cpu()?, sys::voluntary_switches()?);
        work()?;
        Ok(Took {
            cpu: cpu::thread_cpu()?.saturating_sub(cpu),
            elapsed: start.elapsed(),
            waits: sys::voluntary_switches()?.saturating_sub(waits),
        })
    }

    fn point(&self, how: String) -> Point {
        let seconds = self.elapsed.as_secs_f64();
        Point {
            how,
            wakeups_per_s: self.waits as f64 / seconds,
            load: self.cpu.as_secs_f64() / seconds,
        }
    }
}

/// The stream from `far` to `near`; what each end took.
fn receive(near: impl Read + Send, far: TcpStream, time: Duration) -> io::Result<(Took, Took)> {
    far.set_nodelay(true)?;
    std::thread::scope(|scope| {
        let spawn = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let near = spawn(workload::NEAR).spawn_scoped(scope, || Took::of(|| take_all(near)))?;
        let far =
            spawn(workload::FAR).spawn_scoped(scope, || Took::of(|| send_evenly(far, time)))?;
        let panicked = |_| Err(io::Error::other("an end of the workload panicked"));
        Ok((near.join().unwrap_or_else(panicked)?, far.join().unwrap_or_else(panicked)?))
    })
}

fn send_evenly(mut stream: impl Write, time: Duration) -> io::Result<()> {
    sys::exact_timers()?;
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
    Ok(())
}

fn take_all(mut stream: impl Read) -> io::Result<()> {
    let mut room = vec![0; 64 << 10];
    while stream.read(&mut room)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halved(points: &[(f64, f64)]) -> Halved {
        let point = |&(wakeups_per_s, load)| Point { how: String::new(), wakeups_per_s, load };
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
