//! Two processes on one host over shared memory: a child sends, this one reads, each with a stack of
//! its own and no kernel network between.
//!
//! The child lives as long as the rig. The first bytes of each connection carry its order to send, and afterwards the
//! child reports the cost of its end. Its account is its whole process, spinning included.

use super::run::{Asking, StopCondition, run};
use super::{Load, Offloads, Reader, Rig, RigConfig, Target};
use crate::cpu::{self, Placement};
use crate::kernel::send::{Burst, Pauses};
use crate::on_pinned_thread;
use crate::peer::Report;
use crate::send::shm::{Linked, PATIENCE, serve_each};
use crate::stream::Start;
use crate::transfer::Transfer;
use fulmar::{Stack, TcpStream};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

/// The role of the child.
pub const ROLE: &str = "shm_source";

/// Two processes as a rig.
pub(super) struct Shared {
    placement: Placement,
    offloads: Offloads,
    link: Linked,
}

impl Shared {
    /// Starts the child and joins it. Without aggregation the child's stack cuts its segments.
    ///
    /// # Errors
    /// The child did not connect, or there is no memory to share; the error has the remedy.
    pub fn new(placement: Placement, offloads: Offloads) -> io::Result<Shared> {
        let limit = |device| offloads.limit(device);
        let link = Linked::new(ROLE, placement, offloads.aggregation, limit)?;
        Ok(Shared { placement, offloads, link })
    }
}

/// The order to the child in the first bytes of a connection.
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

impl Rig for Shared {
    fn config(&self) -> RigConfig {
        RigConfig { device: "shm", placement: self.placement, offloads: self.offloads }
    }

    fn stream(
        &mut self,
        load: &Load,
        reader: &mut dyn Reader,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, _) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let (stack, to) = (&self.link.stack, self.link.far);
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let mut stream = TcpStream::connect_timeout(stack, &to, PATIENCE)?;
            stream.write_all(&Order::new(load, time).to_bytes())?;
            let from = Target { stack, stream: &stream };
            run(&from, load, reader, StopCondition::Sender, Asking::Not, &mut || ())
        })?;
        let far = self.link.far_report(time)?;
        let sample = Transfer::of_ends(near, far, load.warm_bytes);
        Ok(Transfer { counts, ..sample })
    }
}

/// The child's side: sends as ordered.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    serve_each(spec, send)
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
