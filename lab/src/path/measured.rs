//! The rounds: in each the whole path without the account, and its stages by the account.

use std::io;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fulmar::stat::ledger::Stage;
use fulmar::stat::ledger::{Account, DEFAULT_EVERY};
use fulmar_nic::thread_hardware_ns;

use super::{Options, Spread, Threads, loads};
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
    /// Adds a batch, whose packets `work` counts.
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

    /// Whether more batches are wanted: until they have taken a `slice`, or, where setting them up takes
    /// most of the time, a few slices have gone by since `start`.
    pub fn wants_more(&self, slice: Duration, start: Instant) -> bool {
        const MOST_SLICES: u32 = 4;
        self.time < slice && start.elapsed() < slice * MOST_SLICES
    }

    fn ns(&self) -> f64 {
        self.time.as_nanos() as f64
    }

    /// Without the hardware.
    pub fn ns_per_packet(&self) -> f64 {
        (self.ns() - self.hardware_ns as f64).max(0.0) / self.packets.max(1) as f64
    }

    fn hardware_ns_per_packet(&self) -> f64 {
        self.hardware_ns as f64 / self.packets.max(1) as f64
    }
}

/// The load of a thread.
pub trait Load {
    /// The stack whose account is read.
    fn stack(&self) -> &fulmar::Stack;

    /// Moves packets for about `slice`.
    ///
    /// # Errors
    /// Those of the sockets.
    fn run(&mut self, slice: Duration) -> io::Result<Timed>;
}

/// Result of one thread in one round, in ns per packet.
struct Round {
    /// Up to each stage.
    stages: Vec<f64>,
    whole: f64,
    hardware: f64,
    /// A bare system call, in turn with them.
    syscall: f64,
    /// How far the sum of the account is from the thread's CPU time, as a share of it.
    gap: f64,
}

/// Measures a path with `threads` threads at once; adds the figures of the first one to `syscall` and `gap`.
///
/// # Errors
/// Those of the sockets.
pub fn with_threads(
    options: &Options,
    threads: usize,
    (syscall, gap): (&mut Spread, &mut Vec<f64>),
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
    let first = found.first().into_iter().flatten();
    syscall.runs.extend(first.clone().map(|r| r.syscall));
    gap.extend(first.map(|r| r.gap));
    // The mean over the threads of a round: the cost of a packet to one thread.
    let over = |pick: &dyn Fn(&Round) -> f64| Spread {
        runs: (0..options.runs)
            .map(|r| found.iter().map(|t| pick(&t[r])).sum::<f64>() / threads as f64)
            .collect(),
    };
    let stages = 0..options.path.stages(options.bytes).len();
    Ok(Threads {
        threads,
        stages: stages.map(|c| over(&|r| r.stages[c])).collect(),
        whole: over(&|r| r.whole),
        hardware: over(&|r| r.hardware),
    })
}

fn rounds(options: &Options, cpu: usize, barrier: &Barrier) -> io::Result<Vec<Round>> {
    let load = cpu::pin_to(cpu).and_then(|()| loads::of(options));
    // A thread that fails still reaches the barriers, or the others would wait for ever.
    let (mut failed, mut load) = match load {
        Ok(load) => (None, Some(load)),
        Err(e) => (Some(e), None),
    };
    let mut found = Vec::new();
    // The first round warms caches and tables and is thrown away.
    for round in 0..=options.runs {
        barrier.wait();
        let whole = load.as_mut().map(|load| load.run(options.slice)).transpose();
        barrier.wait();
        let staged = load.as_mut().map(|load| accounted(load.as_mut(), options)).transpose();
        barrier.wait();
        match (whole, staged) {
            (Ok(Some(whole)), Ok(Some((stages, gap)))) if round > 0 => found.push(Round {
                stages,
                whole: whole.ns_per_packet(),
                hardware: whole.hardware_ns_per_packet(),
                syscall: bare_syscall(options.slice / 4)?,
                gap,
            }),
            (Err(e), _) | (_, Err(e)) => {
                failed.get_or_insert(e);
                load = None;
            }
            _ => {}
        }
    }
    failed.map_or(Ok(found), Err)
}

/// Runs a slice with the account on: ns per packet up to each stage, and the gap of the account.
fn accounted(load: &mut dyn Load, options: &Options) -> io::Result<(Vec<f64>, f64)> {
    load.stack().clear_account();
    load.stack().set_account(Some(DEFAULT_EVERY));
    let timed = load.run(options.slice);
    let account = load.stack().account()?.unwrap_or_default();
    load.stack().set_account(None);
    let timed = timed?;
    let gap = (account.sum_ns() / timed.ns().max(1.0) - 1.0).abs();
    Ok((up_to_stages(&account, options.path.stages(options.bytes), &timed), gap))
}

/// The sum of the stages up to each, ns per packet. Simulated hardware runs within the stage of the device.
fn up_to_stages(account: &Account, stages: &[Stage], timed: &Timed) -> Vec<f64> {
    let is_device = |stage| matches!(stage, Stage::DeviceTaken | Stage::DeviceReceived);
    let mut sum = 0.0;
    let add = |stage: &Stage| {
        let hardware = if is_device(*stage) { timed.hardware_ns as f64 } else { 0.0 };
        sum += (account.ns_of(*stage) - hardware).max(0.0);
        sum / timed.packets.max(1) as f64
    };
    stages.iter().map(add).collect()
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
