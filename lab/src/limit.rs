//! Limits: what no stack that copies can beat, measured in the same run as the stacks.

use crate::cpu::{self, Placement};
use crate::harness::Scenario;
use crate::peer::Report;
use crate::transfer::{self, Transfer};
use crate::{Bulk, on_pinned_thread};
use std::io;
use std::time::{Duration, Instant};

pub mod ring;

/// Copies the user's hot buffer through a ring as large as the window, on one CPU.
pub fn memcpy(bulk: Bulk) -> Scenario<'static> {
    let title = "memcpy through a ring as large as the window";
    transfer::scenario("limit.memcpy", title, Placement::SameCpu, move |time| {
        let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
        on_pinned_thread(cpu, || copy_for(&bulk, time))
    })
}

fn copy_for(bulk: &Bulk, time: Duration) -> io::Result<Transfer> {
    let user = vec![0x5a; bulk.write_bytes];
    let mut ring = vec![0; bulk.window_bytes.max(bulk.write_bytes)];
    let round = |ring: &mut Vec<u8>| {
        ring.chunks_exact_mut(user.len()).for_each(|slot| slot.copy_from_slice(&user));
        std::hint::black_box(ring);
    };
    round(&mut ring); // touches every page
    let (start, cpu, mut rounds) = (Instant::now(), cpu::thread_cpu()?, 0);
    loop {
        round(&mut ring);
        rounds += 1;
        if start.elapsed() >= time {
            break;
        }
    }
    let bytes = rounds * (ring.len() / user.len() * user.len()) as u64;
    let cpu = cpu::thread_cpu()?.saturating_sub(cpu);
    let elapsed = start.elapsed();
    let near = Report { bytes, elapsed, cpu, thread: cpu, ..Report::default() };
    let absent = Report { cpu: Duration::ZERO, ..near };
    Ok(Transfer::of_ends(near, absent, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_moves_bytes_and_has_one_end() {
        let copied = copy_for(&Bulk::default(), Duration::from_millis(1)).expect("a copy");
        assert!(copied.near.bytes >= 1 << 20);
        assert_eq!(copied.far.cpu, Duration::ZERO);
    }
}
