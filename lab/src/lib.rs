//! The laboratory: workloads, CPU accounting, statistics, baselines and reports.
//!
//! A bench is a list of *ways* ([`harness::Scenario`]) measured interleaved in one run; every figure that
//! counts is a ratio of two of them. Beside the ways that use fulmar stand the kernel's own
//! ([`kernel`]) and the *floor* ([`floor`]): the least that any TCP over the same device against
//! the same kernel peer can cost, both on the same testbed ([`topology`]). Everything happens in
//! namespaces of our own (`fulmar_gateway::netns`); kernel peers are child processes ([`peer`]) that die with
//! this one.

#![deny(unsafe_code)]

pub mod account;
pub mod bulk;
pub mod child;
pub mod cpu;
pub mod egress;
pub mod embed;
pub mod file;
pub mod floor;
pub mod gateway;
pub mod harness;
#[allow(unsafe_code)]
pub mod heap;
pub mod kernel;
mod latency;
pub mod limit;
pub mod lock;
pub mod matrix;
pub mod netperf;
pub mod path;
pub mod peer;
pub mod profile;
pub mod recv;
pub mod reproduce;
pub mod scale;
pub mod send;
pub mod serve;
pub mod stats;
pub mod stream;
mod sys;
pub mod tasks;
pub mod topology;
pub mod transfer;
pub mod trust;
pub mod udp;
mod uring;
pub mod wake;
pub mod wan;
pub mod without_tso;

use std::io;

/// The shape of a bulk transfer, the same for every way of one bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bulk {
    /// Bytes per write, from a buffer that stays hot in the cache.
    pub write_bytes: usize,
    /// Bytes of the buffer into which the receiver reads.
    pub read_bytes: usize,
    /// Send buffer and receive window of the floor, and the ring through which its copy goes.
    pub window_bytes: usize,
    /// The floor as receiver acknowledges at the latest after this many frames.
    pub frames_per_ack: usize,
    /// Bytes before measuring starts: past slow start and the growth of the kernel's buffers.
    pub warm_bytes: u64,
}

impl Default for Bulk {
    /// 128 KiB writes, 256 KiB reads, a window of 1 MiB (fulmar's default buffer), 16 MiB warm-up.
    fn default() -> Self {
        Bulk {
            write_bytes: 128 << 10,
            read_bytes: 256 << 10,
            window_bytes: 1 << 20,
            frames_per_ack: 16,
            warm_bytes: 16 << 20,
        }
    }
}

/// Does `work` on a thread of its own, pinned to `cpu`, so that the pinning ends with it.
pub fn on_pinned_thread<T: Send>(
    cpu: Option<usize>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    fulmar_gateway::netns::on_own_thread(move || {
        if let Some(cpu) = cpu {
            cpu::pin_to(cpu)?;
        }
        work()
    })
}
