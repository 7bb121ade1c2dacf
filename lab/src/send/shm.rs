//! Two processes on one host over shared memory: this one sends, a child reads and discards, each
//! with a stack of its own and no kernel network between.
//!
//! The child lives as long as the rig; it takes one connection after the other, and tells of each
//! what its end cost. Its account is its whole process, spinning included.

use super::rig::run;
use super::{Caller, Load, Rig, RigConfig};
use crate::child::Handle;
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::peer::{Report, print_line};
use crate::recv::drain;
use crate::stream::build_with;
use crate::transfer::Transfer;
use crate::without_tso::WithoutTso;
use fulmar::device::Device;
use fulmar::devices::{Shm, ShmConfig, Side};
use fulmar::{Cidr, Stack, TcpListener, TcpStream};
use fulmar_gateway::netns::Netns;
use serde_json::{Value, json};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The role of the child.
pub(crate) const ROLE: &str = "shm_sink";
/// How long the two wait for each other, and how long the child may be silent beyond a run.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
const PORT: u16 = 9;

/// Our end, and the child with the other one.
pub(crate) struct Linked {
    /// Declared before the stack, to be dropped first: the child would report a link that goes down as a failure.
    pub child: Handle,
    pub stack: Stack,
    /// Where the child listens.
    pub far: SocketAddr,
}

impl Linked {
    /// Starts a child of this role and joins it; `wrap` as in [`open`]. Without aggregation the child's stack
    /// cuts its segments, and ours does not join them.
    ///
    /// # Errors
    /// The child did not connect, or there is no memory to share; the error has the remedy.
    pub fn new(
        role: &str,
        placement: Placement,
        aggregation: bool,
        wrap: impl FnOnce(Box<dyn Device>) -> Box<dyn Device> + Send,
    ) -> io::Result<Linked> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fulmar-bench-{}-{number}", std::process::id());
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let spec =
            json!({"role": role, "name": name, "cpu": far_cpu, "super_segments": aggregation});
        let mut child = Handle::spawn(&spec, &Netns::current()?)?;
        let (stack, _) = on_pinned_thread(near_cpu, || open(&name, aggregation, wrap))?;
        let hello = child.report(PATIENCE)?;
        let far = hello.get("address").and_then(Value::as_str).and_then(|a| a.parse().ok());
        let far = far.ok_or_else(|| io::Error::other("the child has no address"))?;
        Ok(Linked { child, stack, far })
    }

    /// The cost of the child's end of a connection, which takes about `time`.
    pub fn far_report(&mut self, time: Duration) -> io::Result<Report> {
        Ok(Report::from_json(&self.child.report(time + PATIENCE)?))
    }
}

/// The child's end: pins itself, joins the other process, says where it listens, and reports each connection
/// as `serve` does it.
pub(crate) fn serve_each(
    spec: &Value,
    mut serve: impl FnMut(&Stack, TcpStream) -> io::Result<Report>,
) -> io::Result<()> {
    if let Some(cpu) = spec.get("cpu").and_then(Value::as_u64) {
        cpu::pin_to(cpu as usize)?;
    }
    let name = spec.get("name").and_then(Value::as_str).unwrap_or_default();
    let super_segments = spec.get("super_segments").and_then(Value::as_bool).unwrap_or(true);
    let (stack, address) = open(name, true, |device| with_super_segments(device, super_segments))?;
    let at = SocketAddr::new(address, PORT);
    let listener = TcpListener::bind(&stack, at)?;
    print_line(&json!({ "address": at.to_string() }))?;
    loop {
        let (stream, _) = listener.accept()?;
        print_line(&serve(&stack, stream)?.to_json())?;
    }
}

fn with_super_segments(device: Box<dyn Device>, super_segments: bool) -> Box<dyn Device> {
    if super_segments { device } else { Box::new(WithoutTso::new(device)) }
}

/// Two processes as a rig.
pub struct Shared {
    placement: Placement,
    super_segments: bool,
    link: Linked,
}

impl Shared {
    /// Starts the child and joins it. Every run must have the load's warm-up and read size.
    ///
    /// # Errors
    /// The child did not connect, or there is no memory to share; the error has the remedy.
    pub fn new(placement: Placement, super_segments: bool) -> io::Result<Shared> {
        let wrap = |device| with_super_segments(device, super_segments);
        let link = Linked::new(ROLE, placement, true, wrap)?;
        Ok(Shared { placement, super_segments, link })
    }
}

/// Joins the other process and builds a stack on the shared memory; also returns its address.
///
/// `wrap` may put something in front of the device.
/// `gro`: whether the stack joins segments that come one by one.
fn open(
    name: &str,
    gro: bool,
    wrap: impl FnOnce(Box<dyn Device>) -> Box<dyn Device>,
) -> io::Result<(Stack, IpAddr)> {
    let config = ShmConfig { name: name.to_owned(), wait: Some(PATIENCE), ..ShmConfig::default() };
    let end = Shm::open(&config).map_err(io::Error::other)?;
    let last = if end.side() == Side::First { 1 } else { 2 };
    let address = IpAddr::V4(Ipv4Addr::new(10, 72, 3, last));
    let stack = build_with(wrap(Box::new(end)), Cidr { address, prefix_len: 24 }, "shm", gro)?;
    Ok((stack, address))
}

impl Rig for Shared {
    fn config(&self) -> RigConfig {
        RigConfig { device: "shm", placement: self.placement, super_segments: self.super_segments }
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Transfer> {
        let known = Load::of_writes(0);
        if (load.read_bytes, load.warm_bytes) != (known.read_bytes, known.warm_bytes) {
            return Err(io::Error::other("the child supports no other read size or warm-up"));
        }
        let (near_cpu, _) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let (stack, to) = (&self.link.stack, self.link.far);
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect_timeout(stack, &to, PATIENCE)?;
            run(stack, &stream, load, caller, time, &mut || ())
        })?;
        let far = self.link.far_report(time)?;
        let sample = Transfer::of_ends(near, far, load.warm_bytes);
        Ok(Transfer { counts, ..sample })
    }
}

/// The child's side: reads and discards.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    let Load { read_bytes, warm_bytes, .. } = Load::of_writes(0);
    serve_each(spec, |stack, stream| drain(stack, &stream, read_bytes, warm_bytes))
}
