//! Two ends and a ring of memory, no stack: what a transfer between two processes of one host cannot
//! cost less than, on loan and by copy.
//!
//! The sending end copies its hot buffer into the ring, the receiving end reads a word of every cache
//! line: where it lies (on loan), or of a copy that it made. Nothing else is done for the bytes, so
//! what the two ways have in common is what caches and memory take. On two CPUs an end that has
//! nothing to do looks for more, as two stacks do whose ends keep pace; on one CPU the ends take turns
//! with a full ring, as two programs do that sleep.

use crate::cpu::{self, Placement};
use crate::harness::Scenario;
use crate::kernel::receive::touch;
use crate::peer::Report;
use crate::transfer::{self, Transfer};
use crate::{Bulk, on_pinned_thread};
use std::io;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Bytes that change hands at a time: a super-frame's.
const SLOT_BYTES: usize = 64 << 10;

/// Use of the bytes by the receiving end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taking {
    /// Reads them where they lie.
    Loan,
    /// Copies them into buffers of its own, and reads those.
    Copy,
}

impl Taking {
    /// Both, as they are compared.
    pub const ALL: [Taking; 2] = [Taking::Copy, Taking::Loan];

    const fn name(self) -> &'static str {
        match self {
            Taking::Loan => "loan",
            Taking::Copy => "copy",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Taking::Loan => "no stack: a ring, read where it lies",
            Taking::Copy => "no stack: a ring, copied and read",
        }
    }
}

/// The name of the way.
pub fn name(taking: Taking, placement: Placement) -> String {
    format!("limit.ring.{}.{}", taking.name(), placement.name())
}

/// Moves bytes through a ring as large as the window.
pub fn scenario(bulk: Bulk, taking: Taking, placement: Placement) -> Scenario<'static> {
    transfer::scenario(name(taking, placement), taking.title(), placement, move |time| {
        let (near, far) = placement.cpus(&cpu::allowed_cpus()?)?;
        match placement {
            Placement::SameCpu => on_pinned_thread(near, || take_turns(&bulk, taking, time)),
            _ => side_by_side(&bulk, taking, time, [near, far]),
        }
    })
}

/// The receiving end's work on one slot.
struct SlotReader {
    taking: Taking,
    buffers: [Vec<u8>; 2],
}

impl SlotReader {
    fn new(taking: Taking) -> SlotReader {
        SlotReader { taking, buffers: [vec![1; SLOT_BYTES], vec![1; SLOT_BYTES]] }
    }

    fn take(&mut self, slot: &[u8]) {
        match self.taking {
            Taking::Loan => touch(slot),
            Taking::Copy => {
                self.buffers.swap(0, 1);
                self.buffers[0].copy_from_slice(slot);
                touch(&self.buffers[0])
            }
        };
    }
}

/// The sending end's work: its next bytes into a slot.
struct SlotWriter {
    user: Vec<u8>,
    at: usize,
}

impl SlotWriter {
    fn new(bulk: &Bulk) -> SlotWriter {
        SlotWriter { user: vec![0x5a; bulk.write_bytes.next_multiple_of(SLOT_BYTES)], at: 0 }
    }

    fn put(&mut self, slot: &mut [u8]) {
        slot.copy_from_slice(&self.user[self.at..self.at + SLOT_BYTES]);
        self.at = (self.at + SLOT_BYTES) % self.user.len();
    }
}

fn ring(bulk: &Bulk) -> Vec<u8> {
    vec![1; bulk.window_bytes.next_multiple_of(SLOT_BYTES).max(SLOT_BYTES)]
}

/// Both ends on this thread, a full ring at a time.
fn take_turns(bulk: &Bulk, taking: Taking, time: Duration) -> io::Result<Transfer> {
    let (mut ring, mut putter, mut taker) =
        (ring(bulk), SlotWriter::new(bulk), SlotReader::new(taking));
    let start = Instant::now();
    let (mut far, mut near) = (Duration::ZERO, Duration::ZERO);
    let mut bytes = 0;
    while start.elapsed() < time {
        let before = cpu::thread_cpu()?;
        ring.chunks_exact_mut(SLOT_BYTES).for_each(|slot| putter.put(slot));
        let between = cpu::thread_cpu()?;
        ring.chunks_exact(SLOT_BYTES).for_each(|slot| taker.take(slot));
        let after = cpu::thread_cpu()?;
        far += between.saturating_sub(before);
        near += after.saturating_sub(between);
        bytes += ring.len() as u64;
    }
    let report = |cpu| Report { bytes, elapsed: start.elapsed(), cpu, ..Report::default() };
    Ok(Transfer::of_ends(Report { thread: near, ..report(near) }, report(far), 0))
}

/// Each end on a thread of its own; slots change hands full and come back empty, in order.
fn side_by_side(
    bulk: &Bulk,
    taking: Taking,
    time: Duration,
    [near_cpu, far_cpu]: [Option<usize>; 2],
) -> io::Result<Transfer> {
    let mut ring = ring(bulk);
    let (fill, filled) = channel();
    let (empty, emptied) = channel();
    for slot in ring.chunks_exact_mut(SLOT_BYTES) {
        // The other end of the channel is in this function.
        let _ = empty.send(slot);
    }
    std::thread::scope(|scope| {
        let putter = SlotWriter::new(bulk);
        let far = scope
            .spawn(move || on_pinned_thread(far_cpu, move || send(putter, &emptied, &fill, time)));
        // However it ends, its ends of the channels go with it, and so the sending end stops.
        let taker = SlotReader::new(taking);
        let near = on_pinned_thread(near_cpu, move || receive(taker, &filled, &empty));
        let far = far.join().map_err(|_| io::Error::other("the sending end panicked"))??;
        Ok(Transfer::of_ends(near?, far, 0))
    })
}

/// Fills slots for `time`.
fn send<'a>(
    mut putter: SlotWriter,
    empty: &Receiver<&'a mut [u8]>,
    full: &Sender<&'a mut [u8]>,
    time: Duration,
) -> io::Result<Report> {
    let (start, cpu, mut bytes) = (Instant::now(), cpu::thread_cpu()?, 0);
    while start.elapsed() < time
        && let Some(slot) = next(empty)
    {
        putter.put(slot);
        bytes += slot.len() as u64;
        if full.send(slot).is_err() {
            break;
        }
    }
    report(bytes, start, cpu)
}

/// Takes slots until the sending end is done.
fn receive<'a>(
    mut taker: SlotReader,
    full: &Receiver<&'a mut [u8]>,
    empty: &Sender<&'a mut [u8]>,
) -> io::Result<Report> {
    let (start, cpu, mut bytes) = (Instant::now(), cpu::thread_cpu()?, 0);
    while let Some(slot) = next(full) {
        taker.take(slot);
        bytes += slot.len() as u64;
        // The sending end may be done before its last slots come back.
        let _ = empty.send(slot);
    }
    report(bytes, start, cpu)
}

/// The next slot, looked for without sleeping; none from an end that is done.
fn next<'a>(from: &Receiver<&'a mut [u8]>) -> Option<&'a mut [u8]> {
    loop {
        match from.try_recv() {
            Ok(slot) => return Some(slot),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
}

fn report(bytes: u64, start: Instant, cpu: Duration) -> io::Result<Report> {
    let cpu = cpu::thread_cpu()?.saturating_sub(cpu);
    Ok(Report { bytes, elapsed: start.elapsed(), cpu, thread: cpu, ..Report::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_see_every_byte_on_one_cpu_and_on_two_threads() {
        let (bulk, time) = (Bulk::default(), Duration::from_millis(2));
        for taking in Taking::ALL {
            let turns = take_turns(&bulk, taking, time).expect("one thread");
            let threads = side_by_side(&bulk, taking, time, [None, None]).expect("two threads");
            for sample in [turns, threads] {
                assert!(sample.near.bytes >= SLOT_BYTES as u64);
                assert_eq!(sample.near.bytes, sample.far.bytes);
                assert!(sample.near.cpu > Duration::ZERO && sample.far.cpu > Duration::ZERO);
            }
        }
    }

    #[test]
    fn a_copy_has_the_bytes_of_the_slot() {
        let mut taker = SlotReader::new(Taking::Copy);
        let slot: Vec<u8> = (0..SLOT_BYTES).map(|i| i as u8).collect();
        taker.take(&slot);
        assert_eq!(taker.buffers[0], slot);
    }
}
