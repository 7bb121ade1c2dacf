//! The four programs of the bench, each over a datagram socket of the kernel's or of fulmar's: one sends requests and
//! waits, one replies, one sends at a rate, one receives.
//!
//! A datagram begins with a byte for its type. At byte 8 it has the time at which it was sent, in nanoseconds of the
//! clock that all processes of a machine share. Warming up is not measured: the replying and the receiving end measure
//! from the first to the last datagram of the measured type.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fulmar::Stack;
use fulmar::stat::Counter;
use fulmar_nic::thread_hardware_ns;
use serde_json::{Value, json};

use super::tally::Tally;
use crate::cpu::{self, MachineClock};
use crate::sys;

/// Types of datagrams.
pub const WARM: u8 = 0;
pub const MEASURED: u8 = 1;
pub const END: u8 = 2;
/// Bytes of a request, as in the published work.
pub const QUESTION_BYTES: usize = 18;
/// The last datagram is sent several times: it may be lost in a flood.
const ENDINGS: u32 = 5;
/// A datagram that is answered later than this was lost.
const LOST: Duration = Duration::from_millis(200);
/// How long an end waits for the other one to begin, or to go on.
const PATIENCE: Duration = Duration::from_secs(6);
/// Above this rate a sender with a CPU of its own does not sleep between datagrams.
const SPIN_PPS: u64 = 20_000;

/// A bound datagram socket.
pub enum Socket {
    /// The kernel's.
    Kernel(std::net::UdpSocket),
    /// fulmar's, and whose counters to read.
    Fulmar(fulmar::UdpSocket, Stack),
}

impl Socket {
    /// Binds one of fulmar's, with room for a flood.
    pub fn fulmar(stack: &Stack, at: SocketAddr) -> io::Result<Socket> {
        let socket = fulmar::UdpSocket::bind(stack, at)?;
        socket.set_recv_buffer(8 << 20)?;
        Ok(Socket::Fulmar(socket, stack.clone()))
    }

    /// Binds one of the kernel's, with as much room as that allows.
    pub fn kernel(at: SocketAddr) -> io::Result<Socket> {
        use std::os::fd::AsFd;
        let socket = std::net::UdpSocket::bind(at)?;
        let bytes = (8i32 << 20).to_ne_bytes();
        if sys::setsockopt(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes).is_err()
        {
            // Then losses show.
            let _ = sys::setsockopt(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &bytes);
        }
        Ok(Socket::Kernel(socket))
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Socket::Kernel(s) => s.local_addr(),
            Socket::Fulmar(s, _) => s.local_addr(),
        }
    }

    fn connect(&self, to: SocketAddr) -> io::Result<()> {
        match self {
            Socket::Kernel(s) => s.connect(to),
            Socket::Fulmar(s, _) => s.connect(to),
        }
    }

    fn patience(&self, limit: Duration) -> io::Result<()> {
        match self {
            Socket::Kernel(s) => s.set_read_timeout(Some(limit)),
            Socket::Fulmar(s, _) => s.set_read_timeout(Some(limit)),
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Kernel(s) => s.send(bytes),
            Socket::Fulmar(s, _) => s.send(bytes),
        }
    }

    fn send_to(&self, bytes: &[u8], to: SocketAddr) -> io::Result<usize> {
        match self {
            Socket::Kernel(s) => s.send_to(bytes, to),
            Socket::Fulmar(s, _) => s.send_to(bytes, to),
        }
    }

    fn recv_from(&self, bytes: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        match self {
            Socket::Kernel(s) => s.recv_from(bytes),
            Socket::Fulmar(s, _) => s.recv_from(bytes),
        }
    }

    fn stack(&self) -> Option<&Stack> {
        match self {
            Socket::Kernel(_) => None,
            Socket::Fulmar(_, stack) => Some(stack),
        }
    }
}

/// The account of one end of a run, from the first measured datagram to the last.
#[derive(Clone, Debug, Default)]
pub struct Account {
    pub elapsed: Duration,
    /// The whole process.
    pub cpu: Duration,
    /// The thread alone, without simulated hardware.
    pub thread: Duration,
    /// All CPUs.
    pub machine: Duration,
    /// Datagrams that it took, or that were answered.
    pub packets: u64,
    /// Datagrams that it sent.
    pub sent: u64,
    /// Frames that its device brought.
    pub frames: u64,
    pub wakeups: u64,
    pub holds: u64,
    pub looked: Duration,
    /// 50, 99 and 99.9 % of the latencies, in ns.
    pub latency_ns: Option<[u64; 3]>,
    /// The median over the stretches of a flow of the 99th percentile of their latencies, ns.
    pub stretch_p99_ns: Option<u64>,
}

impl Account {
    pub fn to_json(&self) -> Value {
        json!({
            "elapsed_ns": self.elapsed.as_nanos() as u64,
            "cpu_ns": self.cpu.as_nanos() as u64,
            "thread_ns": self.thread.as_nanos() as u64,
            "machine_ns": self.machine.as_nanos() as u64,
            "packets": self.packets,
            "sent": self.sent,
            "frames": self.frames,
            "wakeups": self.wakeups,
            "holds": self.holds,
            "looked_ns": self.looked.as_nanos() as u64,
            "latency_ns": self.latency_ns,
            "stretch_p99_ns": self.stretch_p99_ns,
        })
    }

    pub fn from_json(v: &Value) -> Account {
        let n = |key: &str| v[key].as_u64().unwrap_or(0);
        let time = |key: &str| Duration::from_nanos(n(key));
        let quantile = |i: usize| v["latency_ns"][i].as_u64();
        let latency_ns = match (quantile(0), quantile(1), quantile(2)) {
            (Some(a), Some(b), Some(c)) => Some([a, b, c]),
            _ => None,
        };
        Account {
            elapsed: time("elapsed_ns"),
            cpu: time("cpu_ns"),
            thread: time("thread_ns"),
            machine: time("machine_ns"),
            packets: n("packets"),
            sent: n("sent"),
            frames: n("frames"),
            wakeups: n("wakeups"),
            holds: n("holds"),
            looked: time("looked_ns"),
            latency_ns,
            stretch_p99_ns: v["stretch_p99_ns"].as_u64(),
        }
    }
}

/// The clocks and counters when measuring began.
pub struct Start {
    at: Instant,
    cpu: Duration,
    thread: Duration,
    hardware_ns: u64,
    machine: MachineClock,
    counts: [u64; 4],
}

impl Start {
    pub fn now(stack: Option<&Stack>) -> io::Result<Start> {
        Ok(Start {
            counts: counts(stack)?,
            machine: MachineClock::read()?,
            cpu: cpu::process_cpu(None)?,
            hardware_ns: thread_hardware_ns(),
            thread: cpu::thread_cpu()?,
            at: Instant::now(),
        })
    }

    pub fn account(&self, stack: Option<&Stack>, tally: Tally) -> io::Result<Account> {
        let elapsed = self.at.elapsed();
        let hardware = Duration::from_nanos(thread_hardware_ns() - self.hardware_ns);
        let thread = cpu::thread_cpu()?.saturating_sub(self.thread).saturating_sub(hardware);
        let cpu = cpu::process_cpu(None)?.saturating_sub(self.cpu);
        let machine = MachineClock::read()?.since(self.machine).busy;
        let after = counts(stack)?;
        let [frames, wakeups, holds, looked_ns] =
            std::array::from_fn(|i| after[i].saturating_sub(self.counts[i]));
        Ok(Account {
            elapsed,
            cpu,
            thread,
            machine,
            packets: tally.packets,
            sent: tally.sent,
            frames: if stack.is_some() { frames } else { tally.packets },
            wakeups,
            holds,
            looked: Duration::from_nanos(looked_ns),
            latency_ns: tally.quantiles(),
            stretch_p99_ns: tally.stretch_p99(),
        })
    }
}

/// Frames, wake-ups, holds, nanoseconds of looking. The kernel wakes a thread that had gone to sleep
/// by itself.
fn counts(stack: Option<&Stack>) -> io::Result<[u64; 4]> {
    let Some(stack) = stack else { return Ok([0, sys::voluntary_switches()?, 0, 0]) };
    let stat = stack.stat()?;
    let all = [Counter::RxFrames, Counter::Sleeps, Counter::Holds, Counter::BusyPollNs];
    Ok(all.map(|c| stat.count(c)))
}

fn stamp(datagram: &mut [u8], kind: u8) {
    datagram[0] = kind;
    datagram[8..16].copy_from_slice(&sys::monotonic_ns().to_ne_bytes());
}

/// Notes how old a datagram is now.
fn record_age(tally: &mut Tally, datagram: &[u8]) {
    let stamp = datagram.get(8..16).and_then(|s| s.try_into().ok()).map_or(0, u64::from_ne_bytes);
    let now = sys::monotonic_ns();
    tally.record(now, now.saturating_sub(stamp));
}

fn finish(socket: &Socket) {
    let mut datagram = [0; QUESTION_BYTES];
    for _ in 0..ENDINGS {
        stamp(&mut datagram, END);
        // The other end may be gone after the first.
        let _ = socket.send(&datagram);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Asks and waits for the answer, again and again: for a quarter of the time to warm up, then
/// measured.
pub fn ask(socket: &Socket, to: SocketAddr, time: Duration) -> io::Result<Account> {
    socket.connect(to)?;
    socket.patience(LOST)?;
    let mut tally = Tally::new(true)?;
    let warm = Instant::now();
    while warm.elapsed() < time / 4 {
        question(socket, WARM, &mut tally)?;
    }
    tally = Tally::new(true)?;
    let start = Start::now(socket.stack())?;
    while start.at.elapsed() < time {
        question(socket, MEASURED, &mut tally)?;
    }
    let account = start.account(socket.stack(), tally);
    finish(socket);
    account
}

fn question(socket: &Socket, kind: u8, tally: &mut Tally) -> io::Result<()> {
    let mut datagram = [0; QUESTION_BYTES];
    stamp(&mut datagram, kind);
    match socket.send(&datagram) {
        Ok(_) => tally.sent += 1,
        Err(e) if is_lost(&e) => return Ok(()),
        Err(e) => return Err(e),
    }
    match socket.recv_from(&mut datagram) {
        Ok(_) => {
            tally.packets += 1;
            record_age(tally, &datagram);
            Ok(())
        }
        Err(e) if is_lost(&e) => Ok(()),
        Err(e) => Err(e),
    }
}

/// No answer came in time, or the other end is not there yet.
fn is_lost(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, TimedOut, WouldBlock};
    matches!(e.kind(), WouldBlock | TimedOut | ConnectionRefused)
}

/// Answers until the end is said.
pub fn answer(socket: &Socket) -> io::Result<Account> {
    take(socket, true)
}

/// Takes until the end is said, and measures how old every datagram is.
pub fn receive(socket: &Socket) -> io::Result<Account> {
    take(socket, false)
}

fn take(socket: &Socket, answers: bool) -> io::Result<Account> {
    socket.patience(PATIENCE)?;
    let mut datagram = [0; 2048];
    let mut tally = Tally::new(!answers)?;
    let mut start = None;
    loop {
        let (n, from) = socket.recv_from(&mut datagram)?;
        match (datagram[0], &start) {
            (END, Some(_)) => break,
            (END, None) => return Err(io::Error::other("the stream ended without data")),
            (MEASURED, None) => start = Some(Start::now(socket.stack())?),
            _ => {}
        }
        if start.is_some() {
            tally.packets += 1;
            if !answers {
                record_age(&mut tally, &datagram);
            }
        }
        if answers {
            socket.send_to(&datagram[..n], from)?;
            tally.sent += u64::from(start.is_some());
        }
    }
    match start {
        Some(start) => start.account(socket.stack(), tally),
        None => Err(io::Error::other("the stream ended without data")),
    }
}

/// The traffic of a sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// Datagrams per second; 0: the full rate.
    pub pps: u64,
    /// Bytes of each.
    pub bytes: usize,
    /// How long.
    pub time: Duration,
    /// No other thread needs the CPU.
    pub may_spin: bool,
}

/// Sends at a rate, whatever becomes of it: a quarter of the time to warm up, then measured.
pub fn send(socket: &Socket, to: SocketAddr, flow: &Flow) -> io::Result<Account> {
    socket.connect(to)?;
    let mut tally = Tally::new(false)?;
    // A first one alone: it asks for the neighbour's address.
    pour(socket, WARM, &Flow { pps: 100, time: Duration::from_millis(25), ..*flow }, &mut tally)?;
    pour(socket, WARM, &Flow { time: flow.time / 4, ..*flow }, &mut tally)?;
    tally = Tally::new(false)?;
    let start = Start::now(socket.stack())?;
    pour(socket, MEASURED, flow, &mut tally)?;
    let account = start.account(socket.stack(), tally);
    std::thread::sleep(Duration::from_millis(5));
    finish(socket);
    account
}

fn pour(socket: &Socket, kind: u8, flow: &Flow, tally: &mut Tally) -> io::Result<()> {
    let mut datagram = vec![0; flow.bytes.max(QUESTION_BYTES)];
    let start = Instant::now();
    for n in 0u64.. {
        let due = match flow.pps {
            0 => Duration::ZERO,
            pps => Duration::from_nanos(n.saturating_mul(1_000_000_000) / pps),
        };
        if due >= flow.time || start.elapsed() >= flow.time {
            break;
        }
        wait_until(start + due, flow);
        stamp(&mut datagram, kind);
        match socket.send(&datagram) {
            Ok(_) => tally.sent += 1,
            // A queue on the way is full, or a port was closed: the load goes on.
            Err(e) if is_lost(&e) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => tally.sent += 1,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn wait_until(due: Instant, flow: &Flow) {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if flow.may_spin && flow.pps > SPIN_PPS {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound() -> Socket {
        Socket::kernel("127.0.0.1:0".parse().expect("an address")).expect("bound")
    }

    #[test]
    fn every_question_is_answered_and_both_ends_count_alike() {
        let (client, server) = (bound(), bound());
        let to = server.local_addr().expect("bound");
        let answering = std::thread::spawn(move || answer(&server));
        let asked = ask(&client, to, Duration::from_millis(20)).expect("asked");
        let answered = answering.join().expect("no panic").expect("answered");
        assert!(asked.packets > 0 && asked.latency_ns.is_some());
        assert!(asked.packets.abs_diff(answered.packets) <= 1, "{asked:?} {answered:?}");
    }

    #[test]
    fn a_flow_is_as_fast_as_it_was_asked_to_be_at_most() {
        let (sender, receiver) = (bound(), bound());
        let to = receiver.local_addr().expect("bound");
        let taking = std::thread::spawn(move || receive(&receiver));
        let time = Duration::from_millis(50);
        let flow = Flow { pps: 2_000, bytes: 100, time, may_spin: false };
        let sent = send(&sender, to, &flow).expect("sent");
        let taken = taking.join().expect("no panic").expect("taken");
        assert!((1..=100).contains(&sent.sent), "{}", sent.sent);
        assert!(taken.packets <= sent.sent && taken.packets > 0);
        let back = Account::from_json(&taken.to_json());
        assert_eq!((back.packets, back.latency_ns), (taken.packets, taken.latency_ns));
    }
}
