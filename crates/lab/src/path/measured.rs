//! The rounds: every stage once per round, in turn, so that what disturbs meets them alike.

use std::io;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fulmar::base::Stage;
use fulmar::devices::sim::thread_hardware_ns;

use super::{Options, Path, Spread, Threads, recv, send};
use crate::cpu;

/// Packets and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timed {
    /// Packets.
    pub packets: u64,
    /// CPU time of the thread that made their calls.
    pub time: Duration,
    /// Of that, the simulated hardware's.
    pub hardware_ns: u64,
}

impl Timed {
    /// Adds a batch of `packets` whose calls `work` makes.
    pub fn batch(&mut self, work: impl FnOnce() -> io::Result<u64>) -> io::Result<()> {
        let hardware = thread_hardware_ns();
        // The thread's own time: what else the machine does meanwhile is nobody's cost here.
        let start = cpu::thread_cpu()?;
        let packets = work()?;
        self.time += cpu::thread_cpu()?.saturating_sub(start);
        self.hardware_ns += thread_hardware_ns() - hardware;
        self.packets += packets;
        Ok(())
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

/// What one thread found: per stage and, last, the whole; ns per packet, and the hardware's.
type Rounds = Vec<Vec<(f64, f64)>>;

/// Measures a path with so many threads at once.
pub fn with_threads(
    options: &Options,
    threads: usize,
    syscall: &mut Spread,
) -> io::Result<Threads> {
    let cpus = cpu::allowed_cpus()?;
    let barrier = Barrier::new(threads);
    let found: Vec<io::Result<Rounds>> = std::thread::scope(|scope| {
        let spawn = |i: usize| {
            let (barrier, cpu) = (&barrier, cpus[i % cpus.len().max(1)]);
            scope.spawn(move || rounds(options, cpu, barrier))
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        let panicked = |_| Err(io::Error::other("a measuring thread panicked"));
        handles.into_iter().map(|h| h.join().unwrap_or_else(panicked)).collect()
    });
    let found = found.into_iter().collect::<io::Result<Vec<Rounds>>>()?;
    syscall.runs.extend((0..options.runs).map(|_| bare_syscall(options.slice / 4)));
    let stages = options.path.stages().len();
    let over = |column: usize, pick: fn(&(f64, f64)) -> f64| Spread {
        // Of the threads of a round, the mean: what a packet costs one of them.
        runs: (0..options.runs)
            .map(|r| found.iter().map(|t| pick(&t[r][column])).sum::<f64>() / threads as f64)
            .collect(),
    };
    Ok(Threads {
        threads,
        stages: (0..stages).map(|c| over(c, |p| p.0)).collect(),
        whole: over(stages, |p| p.0),
        hardware: over(stages, |p| p.1),
    })
}

fn rounds(options: &Options, cpu: usize, barrier: &Barrier) -> io::Result<Rounds> {
    let set_up = cpu::pin_to(cpu).and_then(|()| driven(options));
    // Whoever fails still meets the others, or they would wait for ever.
    let mut failed = set_up.as_ref().err().map(|e| io::Error::new(e.kind(), e.to_string()));
    let mut driven = set_up.ok();
    let ends: Vec<Option<Stage>> =
        options.path.stages().iter().copied().map(Some).chain([None]).collect();
    let mut found = Vec::new();
    // The first round warms caches and tables and is thrown away.
    for round in 0..=options.runs {
        let mut row = Vec::new();
        for end in &ends {
            barrier.wait();
            let Some(driven) = &mut driven else { continue };
            match driven.run(*end, options.slice) {
                Ok(timed) => row.push((timed.ns_per_packet(), timed.hardware_ns_per_packet())),
                Err(e) => {
                    failed.get_or_insert(e);
                    row.push((f64::NAN, f64::NAN));
                }
            }
        }
        if round > 0 {
            found.push(row);
        }
    }
    failed.map_or(Ok(found), Err)
}

/// One system call that does next to nothing.
pub fn bare_syscall(slice: Duration) -> f64 {
    let (start, mut calls) = (Instant::now(), 0u64);
    while start.elapsed() < slice || calls == 0 {
        for _ in 0..256 {
            std::hint::black_box(std::os::unix::process::parent_id());
        }
        calls += 256;
    }
    start.elapsed().as_nanos() as f64 / calls as f64
}

/// Waits until the next of `packets` is due at the rate; 0 for no rate.
pub fn keep_rate(start: Instant, packets: u64, rate_pps: u64) {
    if let Some(ns) = packets.saturating_mul(1_000_000_000).checked_div(rate_pps) {
        let due = Duration::from_nanos(ns);
        while start.elapsed() < due {
            std::hint::spin_loop();
        }
    }
}
