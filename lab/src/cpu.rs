//! The two accounts of CPU time, and where threads run.
//!
//! *Thread or process under test*: [`thread_cpu`], [`process_cpu`]. What a system call does for the
//! other end (the receiver's softirq inside the sender's `write`) is in the account of the thread that made
//! the call, so one end alone proves nothing: sum both.
//!
//! *Whole machine*: [`MachineClock`] reads `/proc/stat` (also readable inside a user namespace,
//! where it still shows the whole machine; it counts in ticks of 10 ms, so add up long runs), and
//! [`Soaker`] measures what is left over: a spinner of the lowest priority per CPU, calibrated while
//! the machine is idle, whose lost share is the load. A soaker keeps CPUs from sleeping and so makes
//! wake-ups cheaper: figures are taken without it, and it confirms them in runs of its own.

use crate::sys;
pub use crate::sys::{
    allowed_cpus, pin_to, process_cpu, process_user_cpu, process_waits, thread_cpu,
};
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where the two ends of a measured connection run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// Both ends pinned to one CPU.
    SameCpu,
    /// Each end pinned to a CPU of its own.
    TwoCpus,
    /// The scheduler decides.
    Unpinned,
}

impl Placement {
    /// The name in ratios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Placement::SameCpu => "same_cpu",
            Placement::TwoCpus => "two_cpus",
            Placement::Unpinned => "unpinned",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Placement::SameCpu => "same CPU",
            Placement::TwoCpus => "two CPUs",
            Placement::Unpinned => "unpinned",
        }
    }

    /// The CPUs of the near and the far end out of `allowed`; `None` where the scheduler decides.
    /// The last CPUs are taken first, because device interrupts tend to go to the first.
    ///
    /// # Errors
    /// Two CPUs are asked for and there is one.
    pub fn cpus(self, allowed: &[usize]) -> io::Result<(Option<usize>, Option<usize>)> {
        let mut last = allowed.iter().rev().copied();
        let near = last.next();
        match (self, near, last.next()) {
            (Placement::Unpinned, _, _) => Ok((None, None)),
            (Placement::SameCpu, Some(cpu), _) => Ok((Some(cpu), Some(cpu))),
            (Placement::TwoCpus, Some(near), Some(far)) => Ok((Some(near), Some(far))),
            _ => Err(io::Error::other("only one CPU is available to this process")),
        }
    }
}

/// Time that all CPUs together spent, since boot or between two readings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MachineClock {
    /// Time in programs, the kernel and interrupts.
    pub busy: Duration,
    /// Idle time.
    pub idle: Duration,
    /// Taken by the hypervisor for other guests.
    pub steal: Duration,
}

impl MachineClock {
    /// Reads `/proc/stat`.
    pub fn read() -> io::Result<MachineClock> {
        let text = fs::read_to_string("/proc/stat")?;
        Self::parse(&text, sys::ticks_per_second())
            .ok_or_else(|| io::Error::other("/proc/stat has no line for all CPUs"))
    }

    /// Reads the first line: user nice system idle iowait irq softirq steal (proc(5)).
    fn parse(text: &str, ticks_per_second: u64) -> Option<MachineClock> {
        let line = text.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line.split_ascii_whitespace().map_while(|t| t.parse().ok()).collect();
        let &[user, nice, system, idle, iowait, irq, softirq, steal, ..] = ticks.as_slice() else {
            return None;
        };
        let time = |ticks: u64| Duration::from_nanos(ticks * (1_000_000_000 / ticks_per_second));
        Some(MachineClock {
            busy: time(user + nice + system + irq + softirq),
            idle: time(idle + iowait),
            steal: time(steal),
        })
    }

    /// The time since `earlier`.
    pub fn since(self, earlier: MachineClock) -> MachineClock {
        MachineClock {
            busy: self.busy.saturating_sub(earlier.busy),
            idle: self.idle.saturating_sub(earlier.idle),
            steal: self.steal.saturating_sub(earlier.steal),
        }
    }

    /// The busy part of all time, 0 to 1.
    pub fn busy_share(self) -> f64 {
        let all = (self.busy + self.idle + self.steal).as_secs_f64();
        if all == 0.0 { 0.0 } else { self.busy.as_secs_f64() / all }
    }
}

/// VmRSS of a process (proc_pid_status(5)).
pub fn resident_bytes(pid: u32) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kb = status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next());
    let kb = kb.and_then(|kb| kb.parse::<u64>().ok());
    Ok(kb.ok_or_else(|| io::Error::other("the process has no VmRSS"))? * 1024)
}

/// Above this share of busy CPUs a machine is not free for measuring.
pub const BUSY_SHARE: f64 = 0.10;

/// How busy the machine is now, 0 to 1, looked at for `time`.
pub fn busy_share_over(time: Duration) -> io::Result<f64> {
    let before = MachineClock::read()?;
    std::thread::sleep(time);
    Ok(MachineClock::read()?.since(before).busy_share())
}

/// A counter on a cache line of its own, so that two spinners do not slow each other.
#[repr(align(128))]
#[derive(Default)]
struct Spins(AtomicU64);

/// Spinners of the lowest priority, one per CPU.
pub struct Soaker {
    spins: Arc<[Spins]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// Spins per second of each CPU when nothing else runs.
    idle_rates: Vec<f64>,
}

/// The spinners' counts at a moment.
#[derive(Clone, Debug)]
pub struct Soaked {
    at: Instant,
    spins: Vec<u64>,
}

impl Soaker {
    /// Starts the spinners on `cpus` and calibrates them for `time`, which should be idle.
    pub fn start(cpus: &[usize], time: Duration) -> io::Result<Soaker> {
        let spins: Arc<[Spins]> = cpus.iter().map(|_| Spins::default()).collect();
        let mut soaker = Soaker {
            spins,
            stop: Arc::default(),
            threads: Vec::with_capacity(cpus.len()),
            idle_rates: Vec::new(),
        };
        for (i, &cpu) in cpus.iter().enumerate() {
            let (spins, stop) = (soaker.spins.clone(), soaker.stop.clone());
            let body = move || {
                // A spinner that could not be placed stays still: the load then reads too high,
                // never too low.
                if pin_to(cpu).and_then(|()| sys::become_idle_class()).is_ok() {
                    soak(&spins[i].0, &stop);
                }
            };
            soaker.threads.push(std::thread::Builder::new().name("soaker".into()).spawn(body)?);
        }
        std::thread::sleep(Duration::from_millis(20));
        let before = soaker.read();
        std::thread::sleep(time);
        soaker.idle_rates = rates(&before, &soaker.read());
        Ok(soaker)
    }

    /// The counts now.
    pub fn read(&self) -> Soaked {
        let spins = self.spins.iter().map(|s| s.0.load(Ordering::Relaxed)).collect();
        Soaked { at: Instant::now(), spins }
    }

    /// CPU time that others took on all CPUs together between two readings.
    pub fn load_between(&self, before: &Soaked, after: &Soaked) -> Duration {
        let wall = after.at.saturating_duration_since(before.at);
        wall.mul_f64(lost_share(&self.idle_rates, &rates(before, after)))
    }
}

impl Drop for Soaker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn soak(spins: &AtomicU64, stop: &AtomicBool) {
    let mut x = 1u64;
    let mut n = 0u64;
    while !stop.load(Ordering::Relaxed) {
        // A chain of dependent multiplications: no memory, nothing for a sibling to speed up.
        for _ in 0..256 {
            x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005));
        }
        n += 1;
        spins.store(n, Ordering::Relaxed);
    }
}

fn rates(before: &Soaked, after: &Soaked) -> Vec<f64> {
    let seconds = after.at.saturating_duration_since(before.at).as_secs_f64().max(1e-9);
    let pairs = before.spins.iter().zip(&after.spins);
    pairs.map(|(b, a)| a.saturating_sub(*b) as f64 / seconds).collect()
}

/// CPUs' worth of spinning that was lost, from 0 to the number of CPUs.
fn lost_share(idle: &[f64], loaded: &[f64]) -> f64 {
    let lost = |(i, l): (&f64, &f64)| if *i > 0.0 { (1.0 - l / i).clamp(0.0, 1.0) } else { 1.0 };
    idle.iter().zip(loaded).map(lost).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_is_divided_into_busy_idle_and_steal() {
        let text = "cpu  10 1 20 300 4 2 3 5 0 0\ncpu0 1 2 3\n";
        let clock = MachineClock::parse(text, 100).expect("a good line");
        assert_eq!(clock.busy, Duration::from_millis(360));
        assert_eq!(clock.idle, Duration::from_millis(3040));
        assert_eq!(clock.steal, Duration::from_millis(50));
        assert_eq!(MachineClock::parse("cpu  1 2 3", 100), None);
        assert_eq!(MachineClock::parse("", 100), None);
    }

    #[test]
    fn a_spinner_that_lost_half_and_one_that_lost_nothing_make_half_a_cpu() {
        assert!((lost_share(&[100.0, 100.0], &[50.0, 101.0]) - 0.5).abs() < 1e-9);
        assert!((lost_share(&[0.0], &[0.0]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn thread_time_passes_while_this_thread_works() {
        let before = thread_cpu().expect("the clock exists");
        let mut x = 1u64;
        while thread_cpu().expect("the clock exists") < before + Duration::from_millis(2) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        let process = process_cpu(Some(std::process::id())).expect("our own process");
        assert!(process >= Duration::from_millis(2));
    }

    #[test]
    fn two_cpus_are_refused_on_a_machine_of_one() {
        assert!(Placement::TwoCpus.cpus(&[3]).is_err());
        assert_eq!(Placement::SameCpu.cpus(&[0, 3]).expect("one is enough"), (Some(3), Some(3)));
        assert_eq!(Placement::TwoCpus.cpus(&[0, 3]).expect("two"), (Some(3), Some(0)));
        assert_eq!(Placement::Unpinned.cpus(&[0]).expect("any"), (None, None));
    }

    #[test]
    fn a_soaker_sees_a_busy_thread() {
        let cpus = allowed_cpus().expect("affinity");
        let soaker = Soaker::start(&cpus, Duration::from_millis(50)).expect("spinners");
        let before = soaker.read();
        let give_up = Instant::now() + Duration::from_secs(60);
        // A time is not judged in tests; that busy milliseconds are seen in the end is behaviour.
        while soaker.load_between(&before, &soaker.read()) < Duration::from_millis(10) {
            assert!(Instant::now() < give_up, "a busy thread is not seen");
            let end = Instant::now() + Duration::from_millis(20);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
    }
}
