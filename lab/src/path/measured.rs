//! The rounds: every stage once per round, in turn, so that what disturbs meets them alike.

use std::io;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fulmar::base::Stage;
use fulmar_nic::thread_hardware_ns;

use super::{Options, Path, Spread, Threads, recv, send};
use crate::cpu;

/// Packets and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timed {
    /// Packets.
    pub packets: u64,
    /// CPU time of the thread that made their calls.
    pub time: Duration,
    /// The simulated hardware's part of `time`.
    pub hardware_ns: u64,
}

impl Timed {
    /// Adds a batch of `packets` whose calls `work` makes.
    pub fn batch(&mut self, work: impl FnOnce() -> io::Result<u64>) -> io::Result<()> {
        let hardware = thread_hardware_ns();
        // The thread's own time: other work of the machine is not charged here.
        let start = cpu::thread_cpu()?;
        let packets = work()?;
        self.time += cpu::thread_cpu()?.saturating_sub(start);
        self.hardware_ns += thread_hardware_ns() - hardware;
        self.packets += packets;
        Ok(())
    }

    /// What a batch of nothing takes: its readings of the clock.
    pub fn of_nothing() -> io::Result<Duration> {
        const TRIALS: usize = 65;
        let trial = || {
            let mut timed = Timed::default();
            timed.batch(|| Ok(0)).map(|()| timed.time)
        };
        let mut all = (0..TRIALS).map(|_| trial()).collect::<io::Result<Vec<Duration>>>()?;
        all.sort_unstable();
        Ok(all[TRIALS / 2])
    }

    /// Takes the time of the readings themselves off the last batch.
    pub fn take_off(&mut self, own: Duration) {
        self.time = self.time.saturating_sub(own);
    }

    /// Whether more batches are wanted: until they have taken a `slice`, or, where setting them up takes
    /// most of the time, a few slices have gone by since `start`.
    pub fn wants_more(&self, slice: Duration, start: Instant) -> bool {
        const MOST_SLICES: u32 = 4;
        self.time < slice && (self.packets == 0 || start.elapsed() < slice * MOST_SLICES)
    }

    /// Waits until the next packet since `start` is due at the rate, but not beyond the end of the slice.
    /// A method, so that no wait falls within a batch, which has the account to itself.
    pub fn keep_rate(&self, start: Instant, rate_pps: u64, slice: Duration) {
        let due = self.packets.saturating_mul(1_000_000_000).checked_div(rate_pps);
        let due = due.map_or(Duration::ZERO, Duration::from_nanos).min(slice);
        while start.elapsed() < due {
            std::hint::spin_loop();
        }
    }

    fn ns_per_packet(&self) -> f64 {
        let ns = self.time.as_nanos() as f64 - self.hardware_ns as f64;
        ns.max(0.0) / self.packets.max(1) as f64
    }

    fn hardware_ns_per_packet(&self) -> f64 {
        self.hardware_ns as f64 / self.packets.max(1) as f64
    }
}

/// What a thread drives.
pub trait Driven {
    /// Runs packets for about `slice` that end at `stage`; `None`: they go all the way.
    fn run(&mut self, stage: Option<Stage>, slice: Duration) -> io::Result<Timed>;
}

fn driven(options: &Options) -> io::Result<Box<dyn Driven>> {
    Ok(match options.path {
        Path::UdpSend => Box::new(send::Datagrams::new(options)?),
        Path::TcpSend => Box::new(send::Writes::new(options)?),
        Path::UdpRecv => Box::new(recv::Datagrams::new(options)?),
        Path::TcpRecv => Box::new(recv::Segments::new(options)?),
    })
}

/// What one thread found in one round.
struct Round {
    /// Per stage and, last, the whole; ns per packet, and the hardware's.
    columns: Vec<(f64, f64)>,
    /// ns per bare system call, in turn with them.
    syscall: f64,
}

/// Measures a path with `threads` threads at once.
pub fn with_threads(
    options: &Options,
    threads: usize,
    syscall: &mut Spread,
) -> io::Result<Threads> {
    let cpus = cpu::allowed_cpus()?;
    let barrier = Barrier::new(threads);
    let found: Vec<io::Result<Vec<Round>>> = std::thread::scope(|scope| {
        let spawn = |i: usize| {
            let (barrier, cpu) = (&barrier, cpus[i % cpus.len().max(1)]);
            scope.spawn(move || rounds(options, cpu, barrier))
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        let panicked = |_| Err(io::Error::other("a measuring thread panicked"));
        handles.into_iter().map(|h| h.join().unwrap_or_else(panicked)).collect()
    });
    let found = found.into_iter().collect::<io::Result<Vec<Vec<Round>>>>()?;
    syscall.runs.extend(found.first().into_iter().flatten().map(|r| r.syscall));
    let stages = options.path.stages(options.bytes).len();
    let over = |column: usize, pick: fn(&(f64, f64)) -> f64| Spread {
        // Of the threads of a round, the mean: what a packet costs one of them.
        runs: (0..options.runs)
            .map(|r| {
                found.iter().map(|t| pick(&t[r].columns[column])).sum::<f64>() / threads as f64
            })
            .collect(),
    };
    Ok(Threads {
        threads,
        stages: (0..stages).map(|c| over(c, |p| p.0)).collect(),
        whole: over(stages, |p| p.0),
        hardware: over(stages, |p| p.1),
    })
}

fn rounds(options: &Options, cpu: usize, barrier: &Barrier) -> io::Result<Vec<Round>> {
    let set_up = cpu::pin_to(cpu).and_then(|()| driven(options));
    // A thread that fails still reaches the barrier, or the others would wait for ever.
    let mut failed = set_up.as_ref().err().map(|e| io::Error::new(e.kind(), e.to_string()));
    let mut driven = set_up.ok();
    let ends: Vec<Option<Stage>> =
        options.path.stages(options.bytes).iter().copied().map(Some).chain([None]).collect();
    let mut found = Vec::new();
    // The first round warms caches and tables and is thrown away.
    for round in 0..=options.runs {
        let mut columns = Vec::new();
        for end in &ends {
            barrier.wait();
            let Some(driven) = &mut driven else { continue };
            match driven.run(*end, options.slice) {
                Ok(timed) => columns.push((timed.ns_per_packet(), timed.hardware_ns_per_packet())),
                Err(e) => {
                    failed.get_or_insert(e);
                    columns.push((f64::NAN, f64::NAN));
                }
            }
        }
        barrier.wait();
        let syscall = bare_syscall(options.slice / 4)?;
        if round > 0 {
            found.push(Round { columns, syscall });
        }
    }
    failed.map_or(Ok(found), Err)
}

/// One system call that does next to nothing; ns of the thread's own time.
pub fn bare_syscall(slice: Duration) -> io::Result<f64> {
    const BATCH: u64 = 256;
    timed_calls(slice, BATCH, || {
        std::hint::black_box(std::os::unix::process::parent_id());
        Ok(())
    })
}

/// ns of the thread's own time per call, over about `slice`; `batch` calls between looks at the clock.
pub fn timed_calls(
    slice: Duration,
    batch: u64,
    mut call: impl FnMut() -> io::Result<()>,
) -> io::Result<f64> {
    let (start, mut calls) = (cpu::thread_cpu()?, 0u64);
    loop {
        for _ in 0..batch {
            call()?;
        }
        calls += batch;
        let spent = cpu::thread_cpu()?.saturating_sub(start);
        if spent >= slice {
            return Ok(spent.as_nanos() as f64 / calls as f64);
        }
    }
}
