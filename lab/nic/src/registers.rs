//! The coalescing register that the driver writes and the hardware reads, on whatever threads.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fulmar_stack::base::Duration;

use super::Coalesce;

/// Frames in the upper half, nanoseconds in the lower, so that both change at once.
#[derive(Debug)]
pub struct Register(AtomicU64);

impl Register {
    pub fn new(c: Coalesce) -> Register {
        let register = Register(AtomicU64::new(0));
        register.set(c);
        register
    }

    /// Delays above four seconds are four seconds.
    pub fn set(&self, c: Coalesce) {
        let packets = u32::try_from(c.packets).unwrap_or(u32::MAX);
        let delay_ns = u32::try_from(c.delay.as_nanos()).unwrap_or(u32::MAX);
        self.0.store(u64::from(packets) << 32 | u64::from(delay_ns), Relaxed);
    }

    pub fn get(&self) -> Coalesce {
        let word = self.0.load(Relaxed);
        let delay = Duration::from_nanos(word & u64::from(u32::MAX));
        Coalesce { packets: (word >> 32) as usize, delay }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_values_up_to_four_seconds_are_read_back() {
        let c = Coalesce { packets: 256, delay: Duration::from_micros(64) };
        let r = Register::new(c);
        assert_eq!(r.get(), c);
        r.set(Coalesce { packets: usize::MAX, delay: Duration::from_secs(3600) });
        assert_eq!(r.get().packets, u32::MAX as usize);
        assert_eq!(r.get().delay.as_secs(), 4);
    }
}
