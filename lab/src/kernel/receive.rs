//! The kernel's own ways of receiving: `read`, and io_uring with two buffers or with buffers that it
//! chooses.

use super::KernelPair;
use super::send::Sending;
use crate::cpu::{self, Placement};
use crate::harness::Scenario;
use crate::peer::{Role, Spec};
use crate::recv::{Load, Use, scenario_name};
use crate::transfer::{self, Cell, Side, Transfer};
use crate::uring::{Multishot, PingPong};
use serde_json::{Value, json};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

/// How a kernel peer receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReceiveCall {
    /// `read` into buffers in turn.
    #[default]
    Read,
    /// IORING_OP_RECV into buffers in turn, the next under way while the program has one.
    Uring,
    /// IORING_OP_RECV, multishot, with provided buffers.
    UringMultishot,
}

/// Buffers provided for each that the program says it has: the kernel stops when they are all full.
pub const PROVIDED: usize = 4;

impl ReceiveCall {
    /// Every call.
    pub const ALL: [ReceiveCall; 3] =
        [ReceiveCall::Read, ReceiveCall::Uring, ReceiveCall::UringMultishot];

    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            ReceiveCall::Read => "kernel_read",
            ReceiveCall::Uring => "kernel_uring",
            ReceiveCall::UringMultishot => "kernel_uring_multishot",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            ReceiveCall::Read => "kernel read",
            ReceiveCall::Uring => "kernel io_uring recv, one ahead",
            ReceiveCall::UringMultishot => "kernel io_uring multishot",
        }
    }
}

/// How a sink receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receiving {
    /// By which call.
    pub call: ReceiveCall,
    /// Into how many buffers, in turn.
    pub buffers: usize,
    /// The program reads a word of every cache line of what it got.
    pub touch: bool,
    /// A receive that was posted ahead waits until its buffer is full.
    pub wait_all: bool,
}

impl Default for Receiving {
    /// `read` into one buffer that is not read.
    fn default() -> Receiving {
        Receiving { call: ReceiveCall::Read, buffers: 1, touch: false, wait_all: false }
    }
}

impl Receiving {
    pub(crate) fn to_json(self) -> Value {
        json!({
            "call": self.call.name(),
            "buffers": self.buffers,
            "touch": self.touch,
            "wait_all": self.wait_all,
        })
    }

    pub(crate) fn from_json(v: &Value) -> Option<Receiving> {
        let name = v.get("call")?.as_str()?;
        Some(Receiving {
            call: ReceiveCall::ALL.into_iter().find(|c| c.name() == name)?,
            buffers: usize::try_from(v.get("buffers")?.as_u64()?).ok()?.clamp(1, 64),
            touch: v.get("touch")?.as_bool()?,
            wait_all: v.get("wait_all")?.as_bool()?,
        })
    }
}

/// Reads a word of every cache line, as a program does at the least that uses what it received.
pub fn touch(bytes: &[u8]) -> u64 {
    /// Bytes of a cache line.
    const LINE: usize = 64;
    let (lines, rest) = bytes.as_chunks::<LINE>();
    let last = rest.first().map_or(0, |b| u64::from(*b));
    std::hint::black_box(lines.iter().fold(last, |sum, line| sum.wrapping_add(u64::from(line[0]))))
}

/// A call of the kernel's under a load.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Which call.
    pub call: ReceiveCall,
    /// The receiving load.
    pub load: Load,
}

impl Work {
    fn run(
        &self,
        ends: &KernelPair<'_>,
        placement: Placement,
        time: Duration,
    ) -> io::Result<Transfer> {
        let (near_cpu, far_cpu) = placement.cpus(&cpu::allowed_cpus()?)?;
        let Load { buffers, buffer_bytes, usage, write_bytes, warm_bytes } = self.load;
        let (touch, wait_all) = (self.load.is_touched(), usage != Use::Bursty);
        let sink = Spec {
            cpu: near_cpu,
            receiving: Receiving { call: self.call, buffers, touch, wait_all },
            ..Spec::new(Role::Sink, buffer_bytes, warm_bytes, time)
        };
        let sending = Sending { burst: self.load.burst(), ..Sending::default() };
        let source = Spec { cpu: far_cpu, buffer_bytes: write_bytes, sending, ..sink };
        let [sent, received] = ends.run(sink, source)?;
        Ok(Transfer::of_ends(received, sent, warm_bytes)
            .count("reads_made", received.calls)
            .count("call_bytes", received.bytes)
            .count("waits", received.waits))
    }

    /// The scenario of this call between such ends.
    pub fn between(self, ends: KernelPair<'_>, placement: Placement) -> Scenario<'_> {
        let cell = Cell {
            side: Side::Receives,
            device: ends.device,
            method: self.call.name(),
            write_bytes: self.load.buffer_bytes,
            super_segments: ends.offloads,
            source: self.load.usage.name(),
        };
        let title = format!("{}{}", self.call.title(), ends.said);
        let run = move |time| self.run(&ends, placement, time);
        cell.of(transfer::scenario(scenario_name(&cell, placement), title, placement, run))
    }
}

/// A sink in the act of receiving.
pub(crate) struct Receiver {
    means: Means,
    touch: bool,
}

enum Means {
    Read { buffers: Vec<Vec<u8>>, next: usize },
    Uring(PingPong),
    Multishot(Multishot),
}

impl Receiver {
    pub fn new<S: AsFd>(receiving: &Receiving, bytes: usize, stream: &S) -> io::Result<Receiver> {
        let Receiving { call, buffers, touch, wait_all } = *receiving;
        let means = match call {
            ReceiveCall::Read => Means::Read { buffers: vec![vec![1; bytes]; buffers], next: 0 },
            ReceiveCall::Uring => {
                Means::Uring(PingPong::new(stream.as_fd(), buffers, bytes, wait_all)?)
            }
            ReceiveCall::UringMultishot => {
                Means::Multishot(Multishot::new(stream.as_fd(), buffers * PROVIDED, bytes)?)
            }
        };
        Ok(Receiver { means, touch })
    }

    /// One call's worth; 0 is the end.
    pub fn call<S: Read>(&mut self, stream: &mut S) -> io::Result<usize> {
        let bytes = match &mut self.means {
            Means::Read { buffers, next } => {
                *next = (*next + 1) % buffers.len();
                let n = stream.read(&mut buffers[*next])?;
                &buffers[*next][..n]
            }
            Means::Uring(ring) => ring.next()?,
            Means::Multishot(ring) => ring.next()?,
        };
        if self.touch {
            touch(bytes);
        }
        Ok(bytes.len())
    }
}
