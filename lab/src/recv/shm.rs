//! Two processes on one host over shared memory: a child sends, this one reads, each with a stack of
//! its own and no kernel network between.
//!
//! The child lives as long as the place. For each connection it is told in the first bytes of the
//! stream how it is to send, and it tells afterwards what its end cost. Its account is its whole
//! process, spinning included.

use super::run::{Asking, Ends, run};
use super::{Load, Offloads, Place, Reader, Target};
use crate::bench::Sample;
use crate::child::Handle;
use crate::cpu::{self, Placement};
use crate::kernel_calls::{Burst, Pauses};
use crate::on_pinned_thread;
use crate::peer::{Report, print_line};
use crate::send::shm::{PATIENCE, PORT, open};
use crate::stream::Start;
use fulmar::{Stack, TcpListener, TcpStream};
use fulmar_netns::Netns;
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The role of the child.
pub const ROLE: &str = "shm_source";

/// Our end, and the child with the other one.
pub(super) struct Shared {
    placement: Placement,
    offloads: Offloads,
    /// Before the stack, so that it is gone first: it would call a link that goes down a failure.
    child: Handle,
    stack: Stack,
    far: SocketAddr,
}

impl Shared {
    /// Starts the child and joins it. Without aggregation the child's stack cuts its segments.
    ///
    /// # Errors
    /// The child did not come, or there is no memory to share; the error says what to do.
    pub fn new(placement: Placement, offloads: Offloads) -> io::Result<Shared> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fulmar-bench-recv-{}-{number}", std::process::id());
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let spec = json!({
            "role": ROLE,
            "name": name,
            "cpu": far_cpu,
            "super_segments": offloads.aggregation,
        });
        let mut child = Handle::spawn(&spec, &Netns::current()?)?;
        let limit = |device| offloads.limit(device);
        let (stack, _) = on_pinned_thread(near_cpu, || open(&name, offloads.aggregation, limit))?;
        let hello = child.report(PATIENCE)?;
        let far = hello.get("address").and_then(Value::as_str).and_then(|a| a.parse().ok());
        let far = far.ok_or_else(|| io::Error::other("the child has no address"))?;
        Ok(Shared { placement, offloads, stack, far, child })
    }
}

/// What the child is told in the first bytes of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Order {
    write_bytes: u64,
    warm_bytes: u64,
    time_ns: u64,
    /// 0: without pauses.
    burst_bytes: u64,
    gap_ns: u64,
}

impl Order {
    const BYTES: usize = 40;

    fn new(load: &Load, time: Duration) -> Order {
        let ns = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let burst = load.burst();
        Order {
            write_bytes: load.write_bytes as u64,
            warm_bytes: load.warm_bytes,
            time_ns: ns(time),
            burst_bytes: burst.map_or(0, |b| b.bytes),
            gap_ns: burst.map_or(0, |b| ns(b.gap)),
        }
    }

    fn to_bytes(self) -> [u8; Order::BYTES] {
        let Order { write_bytes, warm_bytes, time_ns, burst_bytes, gap_ns } = self;
        let mut bytes = [0; Order::BYTES];
        let words = [write_bytes, warm_bytes, time_ns, burst_bytes, gap_ns];
        for (at, word) in bytes.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; Order::BYTES]) -> Order {
        let mut words = bytes.chunks_exact(8).map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(at);
            u64::from_le_bytes(word)
        });
        let mut next = || words.next().unwrap_or(0);
        Order {
            write_bytes: next(),
            warm_bytes: next(),
            time_ns: next(),
            burst_bytes: next(),
            gap_ns: next(),
        }
    }
}

impl Place for Shared {
    fn device(&self) -> &'static str {
        "shm"
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn offloads(&self) -> Offloads {
        self.offloads
    }

    fn stream(
        &mut self,
        load: &Load,
        reader: &mut dyn Reader,
        time: Duration,
    ) -> io::Result<Sample> {
        let (near_cpu, _) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let (stack, to) = (&self.stack, self.far);
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let mut stream = TcpStream::connect_timeout(stack, &to, PATIENCE)?;
            stream.write_all(&Order::new(load, time).to_bytes())?;
            let from = Target { stack, stream: &stream };
            run(&from, load, reader, Ends::Sender, Asking::Not, &mut || ())
        })?;
        let far = Report::from_json(&self.child.report(time + PATIENCE)?);
        let sample = Sample::of_ends(near, far, load.warm_bytes);
        Ok(Sample { counts, ..sample })
    }
}

/// The child's side: takes connections, sends as it is told, and prints a report of each.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    if let Some(cpu) = spec.get("cpu").and_then(Value::as_u64) {
        cpu::pin_to(cpu as usize)?;
    }
    let name = spec.get("name").and_then(Value::as_str).unwrap_or_default();
    let super_segments = spec.get("super_segments").and_then(Value::as_bool).unwrap_or(true);
    let (stack, address) = open(name, true, |device| match super_segments {
        true => device,
        false => Box::new(crate::without_tso::WithoutTso::new(device)),
    })?;
    let at = SocketAddr::new(address, PORT);
    let listener = TcpListener::bind(&stack, at)?;
    print_line(&json!({ "address": at.to_string() }))?;
    loop {
        let (stream, _) = listener.accept()?;
        print_line(&send(&stack, stream)?.to_json())?;
    }
}

/// Sends on one connection until its time is over and the other end has everything.
fn send(stack: &Stack, mut stream: TcpStream) -> io::Result<Report> {
    let mut order = [0; Order::BYTES];
    stream.read_exact(&mut order)?;
    let order = Order::from_bytes(&order);
    let buffer = vec![0x5a; order.write_bytes.clamp(1, 1 << 24) as usize];
    let gap = Duration::from_nanos(order.gap_ns);
    let mut pauses =
        (order.burst_bytes > 0).then(|| Pauses::new(Burst { bytes: order.burst_bytes, gap }));
    let mut put = |stream: &mut TcpStream, bytes: &[u8]| -> io::Result<u64> {
        stream.write_all(bytes)?;
        if let Some(pauses) = &mut pauses {
            pauses.sent(bytes.len() as u64);
        }
        Ok(bytes.len() as u64)
    };
    let mut warm = 0;
    while warm < order.warm_bytes {
        let n = buffer.len().min((order.warm_bytes - warm) as usize);
        warm += put(&mut stream, &buffer[..n])?;
    }
    let start = Start::now(stack)?;
    let (mut bytes, mut calls) = (0, 0);
    while start.at.elapsed() < Duration::from_nanos(order.time_ns) {
        bytes += put(&mut stream, &buffer)?;
        calls += 1;
    }
    stream.shutdown(Shutdown::Write)?;
    // The reader closes when it has everything: only then is the cost of these bytes complete.
    while stream.read(&mut [0; 512])? > 0 {}
    Ok(start.report(stack, bytes, calls)?.0)
}

#[cfg(test)]
mod tests {
    use super::super::Use;
    use super::*;

    #[test]
    fn an_order_survives_the_wire() {
        for usage in Use::ALL {
            let order = Order::new(&Load::of_buffers(65_536, usage), Duration::from_millis(7));
            assert_eq!(Order::from_bytes(&order.to_bytes()), order);
            assert_eq!(order.burst_bytes > 0, usage == Use::Bursty);
        }
    }
}
