//! The ways of sending: the old way, the published way, fulmar's way and the kernel's way.
//!
//! A [`Method`] is one way to hand bytes to a connection; the old ways ([`sosend`]) use only public functions of the
//! stack (`SendCalls::append`, `SendCalls::space`, the pool). So everything below them (TCP, IP, device) is the same
//! for all, and only the way differs. A [`Rig`] makes the connections: over one device, to one peer, with or without
//! super-segments. [`scenario`] combines both into a [`Scenario`] of a bench.
//!
//! Every run has two accounts: the CPU of the sending *thread* (as `time` shows it) and of the whole *process*; the
//! machine's CPU is a third figure. The cost of hardware that is simulated inside the sender's calls is subtracted and
//! shown separately.

pub mod account;
pub mod bench;
pub mod file;
pub mod rig;
pub mod shm;
pub mod sim;
pub mod sosend;

use crate::cpu::Placement;
use crate::harness::Scenario;
use crate::transfer::{self, Cell, Side, Transfer};
use fulmar::zero_copy::{OwnedBytes, ZeroCopy};
use fulmar::{Stack, TcpStream};
use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

/// The shape of a transfer, the same for every way that is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Bytes per write, or per sendfile call.
    pub write_bytes: usize,
    /// Bytes of the sender's socket buffer. `None`: 1 MiB in fulmar, the kernel's own choice there.
    pub buffer_bytes: Option<usize>,
    /// Bytes of the receiver's buffer per read.
    pub read_bytes: usize,
    /// Bytes before measuring starts: past slow start and the growth of buffers.
    pub warm_bytes: u64,
}

/// fulmar's send buffer unless the load says otherwise.
pub const BUFFER_BYTES: usize = 1 << 20;

impl Load {
    /// Writes of `write_bytes`; the rest as in the bulk bench.
    pub fn of_writes(write_bytes: usize) -> Load {
        Load { write_bytes, buffer_bytes: None, read_bytes: 256 << 10, warm_bytes: 16 << 20 }
    }
}

/// How bytes are handed to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// sosend as it was until 2006: one 2 KiB mbuf after the other, each allocated, filled and sent.
    Old,
    /// sosend as published: all 4 KiB mbufs of the write, one tight copy loop, one send.
    Published,
    /// One change at a time between the two, and beyond: see [`sosend::Builder`].
    Variant(sosend::Builder),
    /// `TcpStream::write`.
    Ours,
    /// `TcpStream::send_owned`: memory given away, nothing copied.
    Owned,
}

impl Method {
    /// Every method, single changes included; what is compared stands side by side.
    pub fn all() -> Vec<Method> {
        let variants = sosend::VARIANTS.map(Method::Variant);
        [Method::Old, Method::Ours, Method::Owned, Method::Published]
            .into_iter()
            .chain(variants)
            .collect()
    }

    /// The name in scenarios and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Method::Old => "old",
            Method::Published => "published",
            Method::Variant(builder) => builder.name(),
            Method::Ours => "ours",
            Method::Owned => "owned",
        }
    }

    /// The name in tables.
    pub fn title(self) -> String {
        match self {
            Method::Old => "old: 2 KiB mbuf, one send each".to_owned(),
            Method::Published => "published: 4 KiB mbufs, one send".to_owned(),
            Method::Variant(builder) => builder.title(),
            Method::Ours => "fulmar write".to_owned(),
            Method::Owned => "fulmar send_owned, no copy".to_owned(),
        }
    }

    /// Makes the caller that sends in this way, again and again the same bytes.
    pub fn caller(self, load: &Load) -> Box<dyn Caller> {
        let bytes = vec![0x5a; load.write_bytes];
        match self {
            Method::Old => Box::new(sosend::Writer::new(sosend::OLD, bytes)),
            Method::Published => Box::new(sosend::Writer::new(sosend::PUBLISHED, bytes)),
            Method::Variant(builder) => Box::new(sosend::Writer::new(builder, bytes)),
            Method::Ours => Box::new(Ours(bytes)),
            Method::Owned => Box::new(Owned(bytes.into())),
        }
    }
}

/// A connection and the stack that it belongs to.
pub struct Target<'a> {
    /// The stack.
    pub stack: &'a Stack,
    /// The connection.
    pub stream: &'a TcpStream,
}

/// A program that sends.
pub trait Caller: Send {
    /// Makes one call (a write, a sendfile); returns how many bytes were accepted.
    ///
    /// # Errors
    /// The error of the connection.
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64>;

    /// How often the caller itself copies each byte on its way; what the stack copies it counts by
    /// itself.
    fn copies_per_byte(&self) -> u64 {
        0
    }

    /// Checks the sent bytes at the end.
    ///
    /// # Errors
    /// The error of the stack.
    fn finish(&mut self, _to: &Target<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// The released path.
struct Ours(Vec<u8>);

impl Caller for Ours {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let mut stream = to.stream;
        stream.write_all(&self.0)?;
        Ok(self.0.len() as u64)
    }
}

/// The released path for memory that is given away. The same memory is given again and again, since
/// the connection only reads it; whose turn it is to drop it last does not matter.
struct Owned(Arc<[u8]>);

/// A share in the memory.
struct Given(Arc<[u8]>);

impl AsRef<[u8]> for Given {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Caller for Owned {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let bytes = OwnedBytes::from_owner(Given(Arc::clone(&self.0)));
        // The completion is not waited for, as in a program that never changes what it sends.
        to.stream.send_owned(bytes)?;
        Ok(self.0.len() as u64)
    }
}

/// The device, the placement and the offloads of a rig.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RigConfig {
    /// The device's name: `tap`, `sim`, ...
    pub device: &'static str,
    /// Where the two ends run; over a simulated device there is one.
    pub placement: Placement,
    /// Whether TCP makes super-segments here.
    pub super_segments: bool,
}

impl RigConfig {
    /// The cell of a way of sending at such a rig; `source` is where the bytes come from.
    pub fn cell(&self, method: &'static str, load: &Load, source: &'static str) -> Cell {
        let RigConfig { device, super_segments, .. } = *self;
        let write_bytes = load.write_bytes;
        Cell { side: Side::Sends, device, method, write_bytes, super_segments, source }
    }
}

/// Where connections are made.
pub trait Rig {
    /// Where it is.
    fn config(&self) -> RigConfig;

    /// Makes one connection and lets `caller` send for about `time` after the warm-up.
    ///
    /// # Errors
    /// The error of the connection.
    fn stream(
        &mut self,
        load: &Load,
        caller: &mut dyn Caller,
        time: Duration,
    ) -> io::Result<Transfer>;
}

/// The name of a way: `old.tap.64k.tso.same_cpu`; of one that sends a cold file,
/// `old.tap.64k.tso.cold.same_cpu`.
pub fn scenario_name(cell: &Cell, placement: Placement) -> String {
    let Cell { device, method, write_bytes, super_segments, source, .. } = *cell;
    let (tso, at) = (tso_name(super_segments), placement.name());
    let source = if source == "hot" { String::new() } else { format!("{source}.") };
    format!("{method}.{device}.{}k.{tso}.{source}{at}", write_bytes >> 10)
}

/// `tso` or `no_tso`.
pub fn tso_name(super_segments: bool) -> &'static str {
    if super_segments { "tso" } else { "no_tso" }
}

/// The scenario of this method at this rig. Its name is that of [`scenario_name`].
pub fn scenario<'a, P: Rig + ?Sized>(
    rig: &'a RefCell<Box<P>>,
    method: Method,
    load: Load,
) -> Scenario<'a> {
    let config = rig.borrow().config();
    let (cell, placement) = (config.cell(method.name(), &load, "hot"), config.placement);
    let name = scenario_name(&cell, placement);
    cell.of(transfer::scenario(name, method.title(), placement, move |time| {
        rig.borrow_mut().stream(&load, method.caller(&load).as_mut(), time)
    }))
}

#[cfg(test)]
mod tests;
