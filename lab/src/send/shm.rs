//! Two processes on one host over shared memory: this one sends, a child reads and discards, each
//! with a stack of its own and no kernel network between.
//!
//! The child lives as long as the place; it takes one connection after the other, and tells of each
//! what its end cost. Its account is its whole process, spinning included.

use super::place::run;
use super::{Caller, Load, Place};
use crate::bench::Sample;
use crate::child::Handle;
use crate::cpu::{self, Placement};
use crate::peer::Report;
use crate::stream::{build_with, receive};
use crate::without_tso::WithoutTso;
use crate::{Bulk, on_pinned_thread};
use fulmar::devices::shm_device::{Shm, ShmConfig, Side};
use fulmar::{Cidr, Device, Stack, TcpListener, TcpStream};
use fulmar_netns::Netns;
use serde_json::{Value, json};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The role of the child.
pub(crate) const ROLE: &str = "shm_sink";
/// How long the two wait for each other, and how long the child may be silent beyond a run.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
pub(crate) const PORT: u16 = 9;

/// Our end, and the child with the other one.
pub struct Shared {
    placement: Placement,
    super_segments: bool,
    /// Before the stack, so that it is gone first: it would call a link that goes down a failure.
    child: Handle,
    stack: Stack,
    far: SocketAddr,
    load: Load,
}

impl Shared {
    /// Starts the child and joins it. Every run must have the load's warm-up and read size.
    ///
    /// # Errors
    /// The child did not come, or there is no memory to share; the error says what to do.
    pub fn new(placement: Placement, super_segments: bool) -> io::Result<Shared> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fulmar-bench-{}-{number}", std::process::id());
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let load = Load::of_writes(0);
        let spec = json!({
            "role": ROLE,
            "name": name,
            "cpu": far_cpu,
            "read_bytes": load.read_bytes,
            "warm_bytes": load.warm_bytes,
        });
        let mut child = Handle::spawn(&spec, &Netns::current()?)?;
        let wrap = |device| -> Box<dyn Device> {
            if super_segments { device } else { Box::new(WithoutTso::new(device)) }
        };
        let (stack, _) = on_pinned_thread(near_cpu, || open(&name, true, wrap))?;
        let hello = child.report(PATIENCE)?;
        let far = hello.get("address").and_then(Value::as_str).and_then(|a| a.parse().ok());
        let far = far.ok_or_else(|| io::Error::other("the child has no address"))?;
        Ok(Shared { placement, super_segments, stack, far, child, load })
    }
}

/// Joins the other process and puts a stack on what both share; also returns its address.
///
/// `wrap` may put something in front of the device.
/// `gro`: whether the stack joins segments that come one by one.
pub(crate) fn open(
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

impl Place for Shared {
    fn device(&self) -> &'static str {
        "shm"
    }

    fn device_title(&self) -> &'static str {
        "shared memory"
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn super_segments(&self) -> bool {
        self.super_segments
    }

    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Sample> {
        let same =
            (load.read_bytes, load.warm_bytes) == (self.load.read_bytes, self.load.warm_bytes);
        if !same {
            return Err(io::Error::other("the child reads and warms up as it was told to"));
        }
        let (near_cpu, _) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        let (stack, to) = (&self.stack, self.far);
        let (near, counts) = on_pinned_thread(near_cpu, || {
            let stream = TcpStream::connect_timeout(stack, &to, PATIENCE)?;
            run(stack, &stream, load, caller, time, &mut || ())
        })?;
        let far = Report::from_json(&self.child.report(time + PATIENCE)?);
        let sample = Sample::of_ends(near, far, load.warm_bytes);
        Ok(Sample { counts, ..sample })
    }
}

/// The child's side: takes connections, reads and discards, and prints a report of each.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    let number = |name: &str| spec.get(name).and_then(Value::as_u64);
    if let Some(cpu) = number("cpu") {
        cpu::pin_to(cpu as usize)?;
    }
    let bulk = Bulk {
        read_bytes: number("read_bytes").unwrap_or(1 << 18) as usize,
        warm_bytes: number("warm_bytes").unwrap_or(0),
        ..Bulk::default()
    };
    let name = spec.get("name").and_then(Value::as_str).unwrap_or_default();
    let (stack, address) = open(name, true, |device| device)?;
    let at = SocketAddr::new(address, PORT);
    let listener = TcpListener::bind(&stack, at)?;
    crate::peer::print_line(&json!({ "address": at.to_string() }))?;
    loop {
        let (stream, _) = listener.accept()?;
        let (report, _) = receive(&stack, stream, &bulk)?;
        crate::peer::print_line(&report.to_json())?;
    }
}
