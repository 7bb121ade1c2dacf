//! The cost of an idle stack: many established connections without traffic.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fulmar::stat::Counter;
use fulmar::{Cidr, Stack, TcpListener, TcpStream, devices};

use crate::cpu;
use crate::harness::{Ratio, Sample, Scenario};
use crate::stream::build;

/// Time in which what the opening left behind settles: delayed ACKs, neighbours that are confirmed.
const SETTLE: Duration = Duration::from_millis(1500);
const BATCH: usize = 100;

/// CPU of the process, both stacks, as a share of one CPU.
pub const CPU: &str = "idle_cpu_pct";
const NAME: &str = "idle";

/// An idle stack with `connections`, watched for `time`, once.
pub fn scenario(connections: usize, time: Duration) -> Scenario<'static> {
    Scenario::new(NAME, "two idle stacks", move |_| measure(connections, time))
        .in_table("Idle, both ends in one process")
        .label("connections", connections)
        .at_most(1)
}

/// The figure.
pub fn ratio() -> Ratio {
    let sentence = "CPU of two idle stacks with many connections, %";
    Ratio::value("wake.idle.cpu_pct", sentence, CPU, NAME).goals(0.1, 0.0)
}

/// Opens `connections` connections between two stacks in this process and watches them for `time`.
///
/// # Errors
/// No descriptors or memory left.
fn measure(connections: usize, time: Duration) -> io::Result<Sample> {
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
    let idle = watch(&[&near, &far], time)?;
    if held.len() != 2 * connections {
        return Err(io::Error::other("idle connections were lost"));
    }
    Ok(idle)
}

fn watch(stacks: &[&Stack], time: Duration) -> io::Result<Sample> {
    let count =
        |c: Counter| -> io::Result<u64> { stacks.iter().map(|s| Ok(s.stat()?.count(c))).sum() };
    let before = [count(Counter::Sleeps)?, count(Counter::TimersFired)?];
    let (cpu, start) = (cpu::process_cpu(None)?, Instant::now());
    std::thread::sleep(time);
    let (cpu, elapsed) = (cpu::process_cpu(None)?.saturating_sub(cpu), start.elapsed());
    let after = [count(Counter::Sleeps)?, count(Counter::TimersFired)?];
    let cpu_pct = 100.0 * cpu.as_secs_f64() / elapsed.as_secs_f64();
    Ok(Sample::of(CPU, cpu_pct)
        .with("wakeups", (after[0] - before[0]) as f64)
        .with("timers", (after[1] - before[1]) as f64))
}
