//! Where the nanoseconds of one write go, over the simulated device.
//!
//! A clock is read between the steps that every way of sending is made of: getting buffers, copying,
//! handing over. What handing over spends inside the device's functions is measured by a wrapper
//! around the device, and what the hardware takes in there by the hardware's own meter. Reading the
//! clock costs time as well; how much is measured first and taken off for every reading, so the
//! parts are those of an undisturbed write to within a nanosecond or two per reading.
//!
//! ```text
//!  |checks and buffers|copy|        TCP, IP, acknowledgements      |
//!                               |device, host side|hardware|  ...
//! ```
//!
//! The steps are the same calls that the ways of the bench make ([`super::sosend`] and the released
//! `TcpStream::write`); this file only reads a clock between them. It is no part of any other
//! figure.

use super::sosend::{self, Builder, Writing, to_io};
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::stats::Estimate;
use crate::stream::build;
use fulmar::base::{Counters, FlowKey};
use fulmar::devices::sim::{SimConfig, SimHandle};
use fulmar::mbuf::{BufId, Chain, External, Pool, Purpose};
use fulmar::netdev::{
    Burst, Caps, Device, DeviceStats, LinkState, PlacementHint, Rooms, Unsupported,
};
use fulmar::{Cidr, Ready, Stack, TcpStream, devices};
use fulmar_socket::{SocketError, Step};
use fulmar_stack::{Limit, Request, Reserved};
use serde_json::{Value, json};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const NEAR_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 3, 1);
/// The modelled peer answers for every address; on this port it discards (RFC 863).
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 72, 3, 2)), 9);
/// Bytes of each write.
const WRITE_BYTES: usize = 64 << 10;
/// Past slow start.
const WARM_WRITES: usize = 256;
/// Rounds; every way runs once in each.
const ROUNDS: usize = 7;
/// Writes of one way in one round.
const WRITES: usize = 400;

/// The parts, in the order of a bar.
const PARTS: [&str; 5] = [
    "checks and buffers",
    "copy",
    "TCP, IP, acknowledgements",
    "device, host side",
    "hardware (simulated)",
];
const CHECKS: usize = 0;
const COPY: usize = 1;
const PROTOCOL: usize = 2;
const DEVICE: usize = 3;
const HARDWARE: usize = 4;

/// How a write is made here.
#[derive(Clone, Copy)]
enum Kind {
    Built(Builder),
    Ours,
    Owned,
}

const KINDS: [(&str, Kind); 4] = [
    ("old: 2 KiB at a time", Kind::Built(sosend::OLD)),
    ("published: 4 KiB mbufs, one send", Kind::Built(sosend::PUBLISHED)),
    ("fulmar write", Kind::Ours),
    ("owned, no copy", Kind::Owned),
];

/// The breakdown for a report's `breakdowns`: one bar per way, with and without super-segments.
///
/// # Errors
/// Too many open descriptors, or no CPU to pin to.
pub fn breakdown() -> io::Result<Value> {
    let mut bars = Vec::new();
    for (tso, group) in [(true, "super-segments"), (false, "single segments")] {
        for (label, parts) in measured(tso, ROUNDS)? {
            let part = |(name, value): (&str, f64)| json!({"name": name, "value": value});
            let parts: Vec<Value> = PARTS.into_iter().zip(parts).map(part).collect();
            bars.push(json!({"group": group, "label": label, "parts": parts}));
        }
    }
    Ok(json!({
        "title": "One write of 64 KiB over the simulated device",
        "caption": "A clock is read between the steps of the write, around the device's functions \
                    and by the simulated hardware itself; the cost of reading it is taken off, and writes \
                    that something else interrupted are left out. The acknowledgements that a write \
                    finds waiting are in it. Taken in runs of its own, so the sums differ a little \
                    from the rows of the table.",
        "unit": "ns per KB",
        "bars": bars,
    }))
}

/// Adds the breakdown to a report.
///
/// # Errors
/// As [`breakdown`].
pub fn add_to(report: &mut Value) -> io::Result<()> {
    let found = breakdown()?;
    if let Some(object) = report.as_object_mut() {
        object.insert("breakdowns".to_owned(), json!([found]));
    }
    Ok(())
}

type Parts = [f64; PARTS.len()];

/// The median of every part for every way.
fn measured(tso: bool, count: usize) -> io::Result<Vec<(&'static str, Parts)>> {
    let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    on_pinned_thread(near_cpu, || {
        let place = Timed::place(tso)?;
        let mut rounds: Vec<Vec<Parts>> = vec![Vec::new(); KINDS.len()];
        for _ in 0..count {
            for (kind, found) in KINDS.iter().zip(&mut rounds) {
                found.push(place.run(kind.1)?);
            }
        }
        let median = |found: &Vec<Parts>| {
            let of = |i: usize| Estimate::of(&found.iter().map(|p| p[i]).collect::<Vec<_>>());
            std::array::from_fn(|i| of(i).map_or(0.0, |e| e.median))
        };
        Ok(KINDS.iter().zip(&rounds).map(|(kind, found)| (kind.0, median(found))).collect())
    })
}

/// A stack over a device whose functions are timed.
struct Place {
    stack: Stack,
    in_device: Arc<InDevice>,
    handle: SimHandle,
    /// What one reading of the clock costs, ns.
    reading_ns: f64,
}

/// What the device's functions took.
#[derive(Default)]
struct InDevice {
    ns: AtomicU64,
    calls: AtomicU64,
}

/// Memory of the program's own.
struct Lent(Arc<[u8]>);

impl External for Lent {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Place {
    fn run(&self, kind: Kind) -> io::Result<Parts> {
        let stream = TcpStream::connect(&self.stack, FAR)?;
        let writing = Writing { host: self.stack.host(), id: stream.slot_id() };
        let bytes: Arc<[u8]> = vec![0x5a; WRITE_BYTES].into();
        let mut clock = Clock::new(&self.in_device);
        let write = |clock: &mut Clock<'_>| match kind {
            Kind::Built(builder) => built(&writing, builder, &bytes, clock),
            Kind::Ours => ours(&writing, &bytes, clock),
            Kind::Owned => owned(&writing, &bytes, clock),
        };
        for _ in 0..WARM_WRITES {
            write(&mut clock).map_err(to_io)?;
        }
        let mut found = Vec::with_capacity(WRITES);
        for _ in 0..WRITES {
            let (hardware, calls) = self.hardware_and_calls();
            clock = Clock::new(&self.in_device);
            write(&mut clock).map_err(to_io)?;
            let (hardware_after, calls_after) = self.hardware_and_calls();
            found.push(self.parts(&clock, hardware_after - hardware, calls_after - calls));
        }
        Ok(mean_of_undisturbed(&found))
    }

    fn hardware_and_calls(&self) -> (u64, u64) {
        (self.handle.counts().inline_ns, self.in_device.calls.load(Relaxed))
    }

    /// ns per KB of each part of one write, without what measuring cost.
    fn parts(&self, clock: &Clock<'_>, hardware: u64, device_calls: u64) -> Parts {
        let mut ns: Parts = [0.0; PARTS.len()];
        for part in [CHECKS, COPY, PROTOCOL] {
            ns[part] = clock.ns[part] as f64 - clock.readings[part] as f64 * self.reading_ns;
        }
        // The device's wrapper reads the clock twice: one reading lies inside of what it measures,
        // the other in the step that called the device, mostly handing over.
        let readings_ns = device_calls as f64 * self.reading_ns;
        ns[DEVICE] = clock.device_ns as f64 - hardware as f64 - readings_ns;
        ns[PROTOCOL] -= readings_ns;
        ns[HARDWARE] = hardware as f64;
        ns.map(|ns| ns / (WRITE_BYTES as f64 / 1024.0))
    }
}

/// A write that took more than this many times the median was interrupted by something else.
const DISTURBED: f64 = 2.0;

/// The mean of every part over the writes that nothing interrupted: the clock does not stop when
/// the thread does.
fn mean_of_undisturbed(writes: &[Parts]) -> Parts {
    let total = |parts: &Parts| parts.iter().sum::<f64>();
    let totals: Vec<f64> = writes.iter().map(total).collect();
    let limit = Estimate::of(&totals).map_or(f64::MAX, |e| e.median * DISTURBED);
    let kept: Vec<&Parts> = writes.iter().filter(|p| total(p) <= limit).collect();
    let mean = |i: usize| kept.iter().map(|p| p[i]).sum::<f64>() / kept.len().max(1) as f64;
    std::array::from_fn(|i| mean(i).max(0.0))
}

/// Adds the time since the last reading to a part, the device's aside.
struct Clock<'a> {
    in_device: &'a InDevice,
    last: Instant,
    device_at_last: u64,
    ns: [u64; PARTS.len()],
    readings: [u64; PARTS.len()],
    device_ns: u64,
}

impl Clock<'_> {
    fn new(in_device: &InDevice) -> Clock<'_> {
        Clock {
            in_device,
            last: Instant::now(),
            device_at_last: in_device.ns.load(Relaxed),
            ns: [0; PARTS.len()],
            readings: [0; PARTS.len()],
            device_ns: 0,
        }
    }

    /// A step begins; what was before it belongs to no part.
    fn start(&mut self) {
        self.device_at_last = self.in_device.ns.load(Relaxed);
        self.last = Instant::now();
    }

    /// The step since the last reading was this part.
    fn was(&mut self, part: usize) {
        let now = Instant::now();
        let device = self.in_device.ns.load(Relaxed);
        let in_device = device - self.device_at_last;
        let ns = now.duration_since(self.last).as_nanos() as u64;
        self.ns[part] += ns.saturating_sub(in_device);
        self.readings[part] += 1;
        self.device_ns += in_device;
        (self.last, self.device_at_last) = (now, device);
    }
}

/// `sosend_generic` with a builder, as [`Writing`] does it.
fn built(
    writing: &Writing<'_>,
    builder: Builder,
    bytes: &[u8],
    clock: &mut Clock<'_>,
) -> Result<(), SocketError> {
    clock.start();
    let turn = writing.begin()?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let mut space = writing.wait_space(rest.len())?;
        while !rest.is_empty() && space > 0 {
            let n = rest.len().min(space);
            let obtained = builder.obtain(writing.host.lock()?.pool(), n);
            let mut chain = obtained.map_err(|_| SocketError::NoBuffer)?;
            clock.was(CHECKS);
            let n = chain.len();
            chain.copy_from(0, &rest[..n]);
            clock.was(COPY);
            space -= n;
            rest = &rest[n..];
            writing.send(chain, !rest.is_empty() && space > 0)?;
            clock.was(PROTOCOL);
        }
    }
    drop(turn);
    clock.was(CHECKS);
    Ok(())
}

/// `TcpStream::write`, step by step.
fn ours(writing: &Writing<'_>, bytes: &[u8], clock: &mut Clock<'_>) -> Result<(), SocketError> {
    let (host, id) = (writing.host, writing.id);
    let mut done = 0;
    let mut has_begun = false;
    clock.start();
    while done < bytes.len() {
        let mut waited = false;
        let reserved = host.wait(id, Ready::WRITABLE, Limit::Forever, |shard, now| {
            if !has_begun {
                match shard.tcp_begin_write(id, fulmar_stack::thread_number())? {
                    Step::Done(()) => has_begun = true,
                    Step::WaitSpace(n) | Step::WaitData(n) => return Ok(Step::WaitSpace(n)),
                }
            }
            let step = shard.tcp_reserve(now, id, &[], bytes.len() - done, waited);
            waited = true;
            step
        })?;
        let Reserved::Space(mut room) = reserved else { return Err(SocketError::NotSupported) };
        clock.was(CHECKS);
        let n = room.len();
        room.chain.copy_from(0, &bytes[done..done + n]);
        clock.was(COPY);
        done += n;
        let is_last = done == bytes.len();
        let commit = if is_last { Request::CommitLast } else { Request::Commit };
        host.post(commit(id, room));
        clock.was(PROTOCOL);
    }
    Ok(())
}

/// The program's memory goes down by reference.
fn owned(
    writing: &Writing<'_>,
    bytes: &Arc<[u8]>,
    clock: &mut Clock<'_>,
) -> Result<(), SocketError> {
    clock.start();
    let turn = writing.begin()?;
    // Whole or not at all: wait until it fits.
    while writing.wait_space(bytes.len())? < bytes.len() {
        writing.host.lock()?.step(fulmar_stack::now(), 64);
    }
    let lent = Box::new(Lent(Arc::clone(bytes)));
    let mbuf = writing.host.lock()?.pool().external(lent, Purpose::Send);
    let mut chain = Chain::new();
    chain.push_back(mbuf.map_err(|_| SocketError::NoBuffer)?);
    clock.was(CHECKS);
    writing.send(chain, false)?;
    clock.was(PROTOCOL);
    drop(turn);
    clock.was(CHECKS);
    Ok(())
}

/// A device whose functions are timed, in front of another.
struct Timed {
    inner: Box<dyn Device>,
    spent: Arc<InDevice>,
}

impl Timed {
    /// A stack on a timed simulated NIC without a limit of rate.
    fn place(tso: bool) -> io::Result<Place> {
        let config = SimConfig::default();
        let config = if tso { config } else { SimConfig { tso: None, ..config } };
        let (inner, handle) = devices::sim_nic(config).map_err(io::Error::other)?;
        let in_device = Arc::new(InDevice::default());
        let device = Box::new(Timed { inner, spent: Arc::clone(&in_device) });
        let address = Cidr { address: IpAddr::V4(NEAR_IP), prefix_len: 24 };
        let stack = build(device, address, "stages")?;
        Ok(Place { stack, in_device, handle, reading_ns: cost_of_a_reading() })
    }

    fn timed<R>(&mut self, call: impl FnOnce(&mut dyn Device) -> R) -> R {
        let start = Instant::now();
        let result = call(self.inner.as_mut());
        let ns = Duration::as_nanos(&start.elapsed()) as u64;
        self.spent.ns.fetch_add(ns, Relaxed);
        self.spent.calls.fetch_add(1, Relaxed);
        result
    }
}

/// The least of several means: what a reading costs when nothing interferes.
fn cost_of_a_reading() -> f64 {
    const READINGS: u32 = 1000;
    let mean = || {
        let start = Instant::now();
        for _ in 0..READINGS {
            std::hint::black_box(Instant::now());
        }
        start.elapsed().as_nanos() as f64 / f64::from(READINGS)
    };
    (0..20).map(|_| mean()).fold(f64::MAX, f64::min)
}

impl Device for Timed {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn tx_burst(
        &mut self,
        now: fulmar::base::Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.timed(|inner| inner.tx_burst(now, pool, burst, counters))
    }

    fn tx_reap(&mut self, now: fulmar::base::Instant, pool: &mut Pool) -> usize {
        self.timed(|inner| inner.tx_reap(now, pool))
    }

    fn rx_burst(
        &mut self,
        now: fulmar::base::Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.timed(|inner| inner.rx_burst(now, pool, out, budget, counters))
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }

    fn next_deadline(&self) -> Option<fulmar::base::Instant> {
        self.inner.next_deadline()
    }

    fn link_state(&self) -> LinkState {
        self.inner.link_state()
    }

    fn lost(&self) -> Option<i32> {
        self.inner.lost()
    }

    fn wants_tx_wake(&self) -> bool {
        self.inner.wants_tx_wake()
    }

    fn place(&mut self, hint: PlacementHint) -> Result<(), Unsupported> {
        self.inner.place(hint)
    }

    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        self.inner.unplace(flow)
    }

    fn register(&mut self, buffer: BufId) {
        self.inner.register(buffer);
    }

    fn release(&mut self, buffer: BufId) {
        self.inner.release(buffer);
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_has_its_parts_and_the_one_without_a_copy_has_none() {
        for tso in [true, false] {
            let found = measured(tso, 1).expect("the simulated device needs no rights");
            assert_eq!(found.len(), KINDS.len());
            for (label, parts) in found {
                // Times are not judged; that a part was passed at all is behaviour.
                let is_copied = !label.starts_with("owned");
                assert_eq!(parts[COPY] > 0.0, is_copied, "{label}: {parts:?}");
                assert!(parts[HARDWARE] > 0.0 && parts[PROTOCOL] > 0.0, "{label}: {parts:?}");
                assert!(parts.iter().all(|p| p.is_finite()), "{label}: {parts:?}");
            }
        }
    }
}
