//! The registration cache: at most two buffers are registered with the device.

use crate::mbuf::BufId;

use super::Placer;

/// The buffers registered with the device, most recently used first. A buffer is identified by address,
/// length and generation.
#[derive(Default, Debug)]
pub(super) struct Registrations {
    known: [Option<BufId>; 2],
}

impl Registrations {
    /// Registers the buffers to be used, the first of them the most recent, and deregisters the least
    /// recently used ones.
    #[inline]
    pub(super) fn use_buffers(&mut self, buffers: [Option<BufId>; 2], placer: &mut dyn Placer) {
        let [a, b] = self.known;
        if buffers == [b, a] {
            // Two buffers used alternately.
            self.known = buffers;
        } else if buffers != [a, b] {
            self.replace_known(buffers, placer);
        }
    }

    #[inline(never)]
    fn replace_known(&mut self, buffers: [Option<BufId>; 2], placer: &mut dyn Placer) {
        let is_needed = |known: &Option<BufId>| buffers.contains(known);
        // A buffer that is not needed is deregistered only to make room for another.
        for id in buffers.iter().flatten() {
            if self.known.contains(&Some(*id)) {
                continue;
            }
            let free = self.known.iter().position(Option::is_none);
            let victim = self.known.iter().rposition(|k| !is_needed(k));
            let Some(at) = free.or(victim) else { continue };
            if let Some(old) = self.known[at].replace(*id) {
                placer.release(old);
            }
            placer.register(*id);
        }
        if buffers[0].is_some() && self.known[1] == buffers[0] {
            self.known.swap(0, 1);
        }
    }

    /// Deregisters all buffers.
    pub(super) fn clear(&mut self, placer: &mut dyn Placer) {
        for old in &mut self.known {
            if let Some(old) = old.take() {
                placer.release(old);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mbuf::WritableRange;

    #[derive(Default)]
    struct Log(Vec<(char, usize)>);

    impl Placer for Log {
        fn place(&mut self, _: u64, _: WritableRange, _: Option<WritableRange>) -> bool {
            false
        }
        fn place_next(&mut self, _: WritableRange) -> bool {
            false
        }
        fn revoke(&mut self) {}
        fn register(&mut self, b: BufId) {
            self.0.push(('+', b.address));
        }
        fn release(&mut self, b: BufId) {
            self.0.push(('-', b.address));
        }
        fn has_syscall_per_frame(&self) -> bool {
            false
        }
    }

    fn id(address: usize) -> BufId {
        BufId { address, bytes: 10, generation: 1 }
    }

    #[test]
    fn two_buffers_used_alternately_are_registered_once_each() {
        let (mut r, mut log) = (Registrations::default(), Log::default());
        for _ in 0..5 {
            r.use_buffers([Some(id(1)), Some(id(2))], &mut log);
            r.use_buffers([Some(id(2)), Some(id(1))], &mut log);
            r.use_buffers([Some(id(2)), None], &mut log);
        }
        assert_eq!(log.0, [('+', 1), ('+', 2)]);
    }

    #[test]
    fn the_least_recently_used_buffer_is_deregistered() {
        let (mut r, mut log) = (Registrations::default(), Log::default());
        r.use_buffers([Some(id(1)), Some(id(2))], &mut log);
        r.use_buffers([Some(id(2)), None], &mut log);
        r.use_buffers([Some(id(2)), Some(id(3))], &mut log);
        assert_eq!(log.0.split_off(2), [('-', 1), ('+', 3)]);
        r.use_buffers([Some(id(4)), Some(id(5))], &mut log);
        assert_eq!(log.0.len(), 6);
        r.clear(&mut log);
        assert_eq!(log.0.iter().map(|(c, _)| if *c == '+' { 1 } else { -1 }).sum::<i32>(), 0);
    }

    #[test]
    fn another_length_or_generation_at_the_same_address_is_another_buffer() {
        let (mut r, mut log) = (Registrations::default(), Log::default());
        r.use_buffers([Some(id(1)), None], &mut log);
        r.use_buffers([Some(BufId { bytes: 11, ..id(1) }), None], &mut log);
        r.use_buffers([Some(BufId { generation: 2, ..id(1) }), None], &mut log);
        assert_eq!(log.0.iter().filter(|(c, _)| *c == '+').count(), 3);
    }
}
