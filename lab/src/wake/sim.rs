//! Receiving on the simulated card: what wake-ups cost where only the card wakes a thread, and what
//! its coalescing registers are worth.
//!
//! The hardware has a thread and a CPU of its own, on which a modelled sender keeps the rate; each
//! datagram bears the time at which its last bit arrived. That thread's CPU is the card's, and is taken
//! off the figures of process and machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::Cidr;
use fulmar_nic::{Coalesce, Command, HardwareThread, SimConfig, SimHandle};

use super::Mode;
use super::program::{self, Account, END, Flow, MEASURED, QUESTION_BYTES, Socket, WARM};
use super::rig::Sample;
use crate::on_pinned_thread;
use crate::stream::build;

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 72, 7, 1));
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 7, 2)), 9);

/// The registers set by hand: what drivers of 10 Gbit/s cards are shipped with, about.
pub const REGISTERS: Coalesce = Coalesce { packets: 64, delay: Duration::from_micros(50) };

/// How long after the sender's last datagram the end is said, so that it comes last.
const PAUSE: Duration = Duration::from_millis(5);

/// Takes the flow in the given way.
pub fn run(
    mode: Mode,
    flow: &Flow,
    near_cpu: Option<usize>,
    far_cpu: Option<usize>,
) -> io::Result<Sample> {
    let mut config =
        SimConfig { hardware: HardwareThread::Own { cpu: far_cpu }, ..SimConfig::default() };
    if mode == Mode::Registers {
        config.rx_coalesce = REGISTERS;
    }
    let (device, handle) = fulmar_nic::open(config).map_err(io::Error::other)?;
    let (near, far) = on_pinned_thread(near_cpu, || {
        let stack = build(device, Cidr { address: NEAR, prefix_len: 24 }, "wake")?;
        stack.set_moderation(mode.config())?;
        let socket = Socket::fulmar(&stack, SocketAddr::new(NEAR, 0))?;
        let to = socket.local_addr()?;
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| send(&handle, to, flow));
            let near = program::receive(&socket)?;
            let sent = sending.join().unwrap_or_else(|_| Err(io::Error::other("no sender")))?;
            Ok((near, sent))
        })
    })?;
    Ok(Sample { near: without(near, far.hardware), far: far.account })
}

/// Counters of the modelled sender, and the CPU time of the card's thread.
struct Sent {
    account: Account,
    hardware: Duration,
}

/// Has the modelled peer send three flows: the warm-up, the measured one, and the end mark.
fn send(handle: &SimHandle, to: SocketAddr, flow: &Flow) -> io::Result<Sent> {
    let ask = |kind: u8, pps, bytes, time: Duration| {
        let mark = u64::from_ne_bytes([kind, 0, 0, 0, 0, 0, 0, 0]);
        handle
            .ask(Command::Flow { from: FAR, to, bytes, pps, time, mark })
            .map_err(io::Error::other)
    };
    ask(WARM, flow.pps, flow.bytes, flow.time / 4)?;
    std::thread::sleep(flow.time / 4 + PAUSE);
    let (before, cpu, start) = (handle.counts(), card_cpu()?, Instant::now());
    ask(MEASURED, flow.pps, flow.bytes, flow.time)?;
    std::thread::sleep(flow.time);
    let (after, elapsed) = (handle.counts(), start.elapsed());
    std::thread::sleep(PAUSE);
    let hardware = card_cpu()?.saturating_sub(cpu);
    ask(END, 1000, QUESTION_BYTES, PAUSE)?;
    let sent = after.peer_datagrams_out - before.peer_datagrams_out;
    Ok(Sent { account: Account { elapsed, sent, ..Account::default() }, hardware })
}

/// The CPU time of the card's thread so far; it spins where hardware would wait.
fn card_cpu() -> io::Result<Duration> {
    let tasks = std::fs::read_dir("/proc/self/task")?;
    let of = |task: io::Result<std::fs::DirEntry>| {
        let path = task.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        // "Nanoseconds on a CPU, nanoseconds waiting for one, times": Documentation/scheduler.
        let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
        let ns = times.split(' ').next()?.parse().ok()?;
        (name.trim() == "sim-nic").then_some(Duration::from_nanos(ns))
    };
    Ok(tasks.filter_map(of).sum())
}

/// The account of the receiver without the card's thread.
fn without(near: Account, hardware: Duration) -> Account {
    Account {
        cpu: near.cpu.saturating_sub(hardware).max(near.thread),
        machine: near.machine.saturating_sub(hardware).max(near.thread),
        ..near
    }
}
