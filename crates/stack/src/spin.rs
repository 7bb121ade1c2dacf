//! Looking at a device for a short while before a sleep, where a look costs next to nothing.
//!
//! A wake-up across CPUs costs 24 µs, a look at shared memory 2 ns. So whoever waits on such a device
//! ([`Device::peek`](fulmar_netdev::Device::peek)) looks first, outside of the lock, for a time that
//! [`moderation`](fulmar_netdev::moderation) adapts: it grows while sleeps turn out short, and
//! shrinks to almost nothing when they are long. An idle stack sleeps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fulmar_base::{Duration, Instant};
use fulmar_netdev::Peek;
use fulmar_netdev::moderation::{Moderation, ModerationConfig};

use crate::host::lock;
use crate::sys;

/// What the policy counts as one empty poll.
const POLL: Duration = Duration::from_micros(1);

/// Looks between two looks at the clock.
const LOOKS: u32 = 64;

/// Looks at the clock between two yields, for a peer that has no other CPU.
const CLOCKS: u32 = 8;

/// The spin of one device.
pub struct Spin {
    peek: Arc<dyn Peek>,
    policy: Mutex<Moderation>,
}

impl Spin {
    /// For a device that can be looked at.
    pub fn new(peek: Arc<dyn Peek>) -> Spin {
        Spin { peek, policy: Mutex::new(Moderation::new(ModerationConfig::default())) }
    }

    /// Looks until there is work, another thread calls the stack (it may have taken the work), a
    /// deadline has come, or the time is over. True: there is work.
    pub fn run(&self, calls: &AtomicU64, until: Option<Instant>) -> bool {
        let limit = POLL * lock(&self.policy).limit();
        let seen = calls.load(Ordering::Relaxed);
        let end = sys::now() + limit;
        let end = until.map_or(end, |at| at.min(end));
        let mut round = 0u32;
        loop {
            round = round.wrapping_add(1);
            for _ in 0..LOOKS {
                if self.peek.is_pending() {
                    return true;
                }
                if calls.load(Ordering::Relaxed) != seen {
                    return false;
                }
                std::hint::spin_loop();
            }
            if sys::now() >= end {
                return false;
            }
            if round.is_multiple_of(CLOCKS) {
                std::thread::yield_now();
            }
        }
    }

    /// Notes how long a sleep lasted.
    pub fn after_sleep(&self, slept: Duration) {
        lock(&self.policy).after_sleep(slept);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Has work at the n-th look.
    struct Nth(AtomicUsize, usize);

    impl Peek for Nth {
        fn is_pending(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) + 1 >= self.1
        }
    }

    fn looks(nth: usize, until: Option<Instant>) -> usize {
        let peek = Arc::new(Nth(AtomicUsize::new(0), nth));
        let spin = Spin::new(Arc::clone(&peek) as Arc<dyn Peek>);
        spin.run(&AtomicU64::new(0), until);
        peek.0.load(Ordering::Relaxed)
    }

    #[test]
    fn a_spin_ends_with_the_work_the_deadline_or_its_time() {
        assert_eq!(looks(1, None), 1);
        assert_eq!(looks(20, None), 20);
        assert_eq!(looks(usize::MAX, Some(Instant::ZERO)), LOOKS as usize);
        assert!(looks(usize::MAX, None) >= LOOKS as usize);
    }
}
