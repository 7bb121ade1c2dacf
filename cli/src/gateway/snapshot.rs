//! Snapshots of a gateway for other threads.
//!
//! The loop of the relay owns all flows, so the snapshot is taken there; it is made into a document by the thread
//! that asked. Threads that ask take turns, and after each snapshot the relay works for [`PAUSE_FACTOR`] times as long
//! as the snapshot took before it takes the next one, but for a second at most. The asking thread writes to its reader.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::stat::Stat;
use fulmar_gateway::{FdHandler, Gateway};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Pause after a snapshot, as a multiple of the time that it took: the relay spends a twentieth of its time on
/// snapshots.
const PAUSE_FACTOR: u32 = 19;
/// The pause at least and at most: readers wait for two seconds, so that after a snapshot of more than 50 ms the share
/// is larger.
const PAUSE_BOUNDS: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// How long the loop is waited for: one turn is much shorter.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A snapshot, and how long it took.
type Taken = (Box<Stat>, Duration);

/// The asking side; its copies take turns.
#[derive(Clone)]
pub struct Snapshots(Arc<Mutex<Asker>>);

struct Asker {
    /// Wakes the loop.
    wanted: EventFd,
    taken: Receiver<Taken>,
    /// The next snapshot is not taken before.
    not_before: Instant,
}

impl Snapshots {
    /// Has a gateway's loop take the snapshots.
    ///
    /// # Errors
    /// No descriptor.
    pub fn of(gateway: &mut Gateway) -> io::Result<Snapshots> {
        let wanted = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (give, taken) = sync_channel(1);
        let fd = std::os::fd::AsFd::as_fd(&wanted).try_clone_to_owned()?;
        gateway.on_readable(fd, handler(give))?;
        let asker = Asker { wanted, taken, not_before: Instant::now() };
        Ok(Snapshots(Arc::new(Mutex::new(asker))))
    }

    /// Takes a snapshot. `None`: the loop does not answer, because it ends.
    pub fn take(&self) -> Option<Box<Stat>> {
        let mut asker = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        thread::sleep(asker.not_before.saturating_duration_since(Instant::now()));
        // The answer to a request that has timed out.
        while asker.taken.try_recv().is_ok() {}
        asker.wanted.write(1).ok()?;
        let (stat, took) = asker.taken.recv_timeout(TIMEOUT).ok()?;
        asker.not_before = Instant::now() + pause_after(took);
        Some(stat)
    }
}

fn pause_after(took: Duration) -> Duration {
    let [least, most] = PAUSE_BOUNDS;
    took.saturating_mul(PAUSE_FACTOR).clamp(least, most)
}

fn handler(give: SyncSender<Taken>) -> FdHandler {
    Box::new(move |wanted: &OwnedFd, gateway| {
        let mut count = [0; 8];
        if nix::unistd::read(wanted, &mut count).is_ok() {
            let begun = Instant::now();
            let stat = Box::new(gateway.stat());
            // Dropped if its reader has gone.
            let _ = give.try_send((stat, begun.elapsed()));
        }
        ControlFlow::Continue(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_after_a_snapshot_is_19_times_its_time_within_bounds() {
        let took = Duration::from_millis(10);
        assert_eq!(pause_after(took), took * 19);
        // With tens of thousands of flows a reader still gets its answer.
        assert_eq!(pause_after(Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(pause_after(Duration::ZERO), PAUSE_BOUNDS[0]);
    }
}
