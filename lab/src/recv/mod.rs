//! The ways of receiving: as it was done once, by copy, on loan, into posted buffers, and as the
//! kernel does it.
//!
//! A [`Method`] is one way to take bytes from a connection. The old one ([`stock`]) is built from the
//! public pieces of the stack (`Shard::tcp_take`, the pool) on a device that hands over one packet per
//! crossing, so that everything else (TCP, IP, the device) is the same for all. A [`Rig`] is where a
//! connection is made: over which device, from whom, with or without receive aggregation. [`scenario`]
//! makes of both a [`Scenario`] of a bench.
//!
//! The receiver is the end under test: `near` in every sample, the sender `far`. Hardware that is
//! simulated inside the receiver's calls is taken off and shown apart.

pub mod account;
pub mod bench;
mod limited;
mod readers;
pub(crate) mod rig;
mod run;
mod shm;
mod sim;
pub mod stock;

use crate::cpu::Placement;
use crate::harness::Scenario;
use crate::kernel::send::Burst;
use crate::peer::Report;
use crate::transfer::{self, Cell, Side, Transfer};
use fulmar::device::Device;
use fulmar::{Stack, TcpStream};
use std::cell::RefCell;
use std::io;
use std::time::Duration;

pub use limited::Limited;
pub use shm::ROLE as SHM_ROLE;
pub(crate) use shm::serve;

/// What the reader does with what it received, and how it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// A word of every cache line is read.
    Touched,
    /// It is not read.
    Untouched,
    /// As [`Use::Touched`]; the sender pauses between bursts.
    Bursty,
}

impl Use {
    /// Every use.
    pub const ALL: [Use; 3] = [Use::Touched, Use::Untouched, Use::Bursty];

    /// The name in scenarios, options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Use::Touched => "touched",
            Use::Untouched => "untouched",
            Use::Bursty => "bursty",
        }
    }
}

/// A burst of a sender that pauses, and its pause: 2 Gb/s, and a wake-up each.
pub const BURST: Burst = Burst { bytes: 256 << 10, gap: Duration::from_millis(1) };

/// The shape of a transfer, the same for every way that is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Buffers that the reader has, which it uses in turn.
    pub buffers: usize,
    /// Bytes of each.
    pub buffer_bytes: usize,
    /// What becomes of the bytes, and how they come.
    pub usage: Use,
    /// Bytes that the sender hands to its own stack per call.
    pub write_bytes: usize,
    /// Bytes before measuring starts: past slow start, the growth of buffers, and the first time that
    /// each buffer was used.
    pub warm_bytes: u64,
}

impl Load {
    /// Two buffers of `buffer_bytes` each.
    pub fn of_buffers(buffer_bytes: usize, usage: Use) -> Load {
        let warm_bytes = if usage == Use::Bursty { 4 << 20 } else { 16 << 20 };
        Load { buffers: 2, buffer_bytes, usage, write_bytes: 128 << 10, warm_bytes }
    }

    /// One buffer, which is not looked at.
    pub fn of_one_buffer(buffer_bytes: usize) -> Load {
        Load { buffers: 1, ..Load::of_buffers(buffer_bytes, Use::Untouched) }
    }

    /// How the sender pauses, if it does.
    pub fn burst(&self) -> Option<Burst> {
        (self.usage == Use::Bursty).then_some(BURST)
    }

    /// Whether the reader looks at what it received.
    pub fn is_touched(&self) -> bool {
        self.usage != Use::Untouched
    }
}

/// How bytes are taken from a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// As it was: a packet per crossing, no aggregation, soreceive mbuf by mbuf; see [`stock`].
    Stock,
    /// `TcpStream::read`.
    Copy,
    /// `TcpStream::recv_ring`: into the program's buffers, where the device can do that.
    Posted,
    /// The same where the device does not place: copied once, but asked for ahead.
    PostedCopied,
    /// The same on the device of [`Method::Stock`].
    PostedStock,
    /// `TcpStream::recv_owned`: the buffers in which the bytes arrived, nothing copied.
    Loan,
}

impl Method {
    /// Every method; what is compared stands side by side.
    pub const ALL: [Method; 6] = [
        Method::Stock,
        Method::Copy,
        Method::Posted,
        Method::Loan,
        Method::PostedCopied,
        Method::PostedStock,
    ];

    /// One change at a time between the others: measured only if named.
    pub const fn is_variant(self) -> bool {
        matches!(self, Method::PostedCopied | Method::PostedStock)
    }

    /// What the device does for it; with aggregation unless it is the old one.
    pub const fn fits(self, offloads: Offloads) -> bool {
        let Offloads { one_per_crossing, placement, .. } = offloads;
        match self {
            Method::Stock | Method::PostedStock => one_per_crossing,
            Method::PostedCopied => !one_per_crossing && !placement,
            Method::Copy | Method::Posted | Method::Loan => !one_per_crossing && placement,
        }
    }

    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Stock => "stock",
            Method::Copy => "copy",
            Method::Posted => "posted",
            Method::PostedCopied => "posted_copied",
            Method::PostedStock => "posted_stock",
            Method::Loan => "loan",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Method::Stock => "stock: a packet per crossing, copy by mbuf",
            Method::Copy => "fulmar read, copy",
            Method::Posted => "fulmar recv_ring, posted",
            Method::PostedCopied => "recv_ring, not placed",
            Method::PostedStock => "recv_ring, a packet per crossing",
            Method::Loan => "fulmar recv_owned, on loan",
        }
    }

    /// Makes the reader that takes bytes in this way.
    ///
    /// # Errors
    /// No memory for its buffers.
    pub fn reader(self, load: &Load) -> io::Result<Box<dyn Reader>> {
        Ok(match self {
            Method::Stock => Box::new(stock::Reader::new(load)),
            Method::Copy => Box::new(readers::Reading::new(load)),
            Method::Posted | Method::PostedCopied | Method::PostedStock => {
                Box::new(readers::PostedAhead::new(load)?)
            }
            Method::Loan => Box::new(readers::Loaned::new(load)),
        })
    }
}

/// A connection and the stack that it belongs to.
pub struct Target<'a> {
    /// The stack.
    pub stack: &'a Stack,
    /// The connection.
    pub stream: &'a TcpStream,
}

/// A program that receives.
pub trait Reader: Send {
    /// Makes ready for what will come.
    ///
    /// # Errors
    /// The error of the connection.
    fn begin(&mut self, _from: &Target<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Takes what comes next, and looks at it if it is to; 0 is the end of the stream.
    ///
    /// # Errors
    /// The error of the connection.
    fn call(&mut self, from: &Target<'_>) -> io::Result<u64>;

    /// Lets go of what it still holds of the connection.
    ///
    /// # Errors
    /// The error of the connection.
    fn finish(&mut self, _from: &Target<'_>) -> io::Result<()> {
        Ok(())
    }

    /// How often the reader itself copies each byte; what the stack copies it counts by itself.
    fn copies_per_byte(&self) -> u64 {
        0
    }
}

/// What a device does for its host, as far as ways differ in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offloads {
    /// Segments in order arrive as one frame.
    pub aggregation: bool,
    /// One packet per crossing, as it was; see [`stock`].
    pub one_per_crossing: bool,
    /// Payload lands in posted buffers, where the device can do that.
    pub placement: bool,
}

impl Offloads {
    /// What there is, with or without aggregation.
    pub const fn all(aggregation: bool) -> Offloads {
        Offloads { aggregation, one_per_crossing: false, placement: true }
    }

    /// As [`Offloads::all`], but nothing is placed.
    pub const fn unplaced(aggregation: bool) -> Offloads {
        Offloads { placement: false, ..Offloads::all(aggregation) }
    }

    /// The device of the old way.
    pub const STOCK: Offloads =
        Offloads { aggregation: false, one_per_crossing: true, placement: false };

    /// Wraps the device so that it lacks the features that are switched off.
    pub(crate) fn limit(self, device: Box<dyn Device>) -> Box<dyn Device> {
        match (self.one_per_crossing, self.placement) {
            (false, true) => device,
            (one, _) => Box::new(Limited::new(device, one)),
        }
    }
}

/// The device, the placement and the offloads of a rig.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RigConfig {
    /// The device's name: `tap`, `sim`, ...
    pub device: &'static str,
    /// Where the two ends run; over a simulated device there is one.
    pub placement: Placement,
    /// What the device does here.
    pub offloads: Offloads,
}

/// Where connections are made.
pub trait Rig {
    /// Where it is.
    fn config(&self) -> RigConfig;

    /// Makes one connection from which `reader` takes what is sent for about `time` after the warm-up.
    ///
    /// # Errors
    /// The error of the connection.
    fn stream(
        &mut self,
        load: &Load,
        reader: &mut dyn Reader,
        time: Duration,
    ) -> io::Result<Transfer>;
}

/// Reads a connection to its end into one buffer without touching the bytes. Returns this end's account.
pub(crate) fn drain(
    stack: &Stack,
    stream: &TcpStream,
    buffer_bytes: usize,
    warm_bytes: u64,
) -> io::Result<Report> {
    let load = Load { warm_bytes, ..Load::of_one_buffer(buffer_bytes) };
    let mut reader = Method::Copy.reader(&load)?;
    let from = Target { stack, stream };
    let until = run::StopCondition::Sender;
    let run = run::run(&from, &load, reader.as_mut(), until, run::Asking::Not, &mut || ());
    Ok(run?.0)
}

/// `64k`, `1m`.
pub fn size_name(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{}m", b >> 20),
        b => format!("{}k", b >> 10),
    }
}

/// The name of a way: `copy.tap.2x64k.agg.touched.same_cpu`.
pub fn scenario_name(cell: &Cell, placement: Placement) -> String {
    let Cell { device, method, write_bytes, super_segments, source, .. } = *cell;
    let aggregation = if super_segments { "agg" } else { "no_agg" };
    let size = size_name(write_bytes);
    format!("{method}.{device}.2x{size}.{aggregation}.{source}.{}", placement.name())
}

/// The scenario of this method at this rig.
pub fn scenario<'a, P: Rig + ?Sized>(
    rig: &'a RefCell<Box<P>>,
    method: Method,
    load: Load,
) -> Scenario<'a> {
    let RigConfig { device, placement, offloads } = rig.borrow().config();
    let cell = Cell {
        side: Side::Receives,
        device,
        method: method.name(),
        write_bytes: load.buffer_bytes,
        super_segments: offloads.aggregation,
        source: load.usage.name(),
    };
    cell.of(transfer::scenario(
        scenario_name(&cell, placement),
        method.title(),
        placement,
        move |time| {
            let mut reader = method.reader(&load)?;
            rig.borrow_mut().stream(&load, reader.as_mut(), time)
        },
    ))
}

#[cfg(test)]
mod tests;
