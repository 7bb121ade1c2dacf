//! What an idle stack costs: many established connections on which nothing happens.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::base::Counter;
use fulmar::{Cidr, Stack, TcpListener, TcpStream, devices};

use crate::cpu;
use crate::stream::build;

/// Time in which what the opening left behind settles: delayed ACKs, neighbours that are confirmed.
const SETTLE: Duration = Duration::from_millis(1500);
const BATCH: usize = 100;

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// Connections, each with both ends in this process.
    pub connections: usize,
    /// For so long.
    pub time: Duration,
    /// CPU of the process, both stacks, as a share of one CPU.
    pub cpu_pct: f64,
    /// Times that a thread of either stack slept on its device.
    pub wakeups: u64,
    /// Timers that fired.
    pub timers: u64,
}

/// Opens so many connections between two stacks in this process and looks at it for `time`.
///
/// # Errors
/// No descriptors or memory left.
pub fn measure(connections: usize, time: Duration) -> io::Result<Idle> {
    let (near, far) = devices::link_pair().map_err(io::Error::other)?;
    let ip = |last| IpAddr::V4(Ipv4Addr::new(10, 72, 5, last));
    let stack = |device, last| build(device, Cidr { address: ip(last), prefix_len: 24 }, "idle");
    let (near, far) = (stack(near, 1)?, stack(far, 2)?);
    let listener = TcpListener::bind(&far, SocketAddr::new(ip(2), 80))?;
    let to = listener.local_addr()?;
    let mut held: Vec<TcpStream> = Vec::with_capacity(2 * connections);
    while held.len() < 2 * connections {
        for _ in 0..BATCH.min(connections - held.len() / 2) {
            held.push(TcpStream::connect(&near, to)?);
            held.push(listener.accept()?.0);
        }
    }
    std::thread::sleep(SETTLE);
    let idle = watch(&[&near, &far], connections, time)?;
    if held.len() != 2 * connections {
        return Err(io::Error::other("connections were lost while nothing happened"));
    }
    Ok(idle)
}

fn watch(stacks: &[&Stack], connections: usize, time: Duration) -> io::Result<Idle> {
    let count =
        |c: Counter| -> io::Result<u64> { stacks.iter().map(|s| Ok(s.stat()?.count(c))).sum() };
    let before = [count(Counter::Sleeps)?, count(Counter::TimersFired)?];
    let (cpu, start) = (cpu::process_cpu(None)?, Instant::now());
    std::thread::sleep(time);
    let (cpu, elapsed) = (cpu::process_cpu(None)?.saturating_sub(cpu), start.elapsed());
    let after = [count(Counter::Sleeps)?, count(Counter::TimersFired)?];
    Ok(Idle {
        connections,
        time: elapsed,
        cpu_pct: 100.0 * cpu.as_secs_f64() / elapsed.as_secs_f64(),
        wakeups: after[0] - before[0],
        timers: after[1] - before[1],
    })
}
