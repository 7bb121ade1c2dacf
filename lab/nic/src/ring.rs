//! A descriptor ring between a host and its hardware.
//!
//! ```text
//!   reaped ──────► done ──────► fetched ──────► posted          counts since the start
//!     │ the host's    │ in the      │ posted, not   │
//!     │ to take back  │ hardware    │ looked at yet │
//!     └───────────────┴─────────────┴───────────────┘
//!         at most `capacity` descriptors in all; slots are used in order, round and round
//! ```
//!
//! The host posts and reaps, the hardware fetches and completes, each in order. What lies in a slot
//! moves with its ownership, so neither can touch what the other has.

/// See the module's header. `reaped <= done <= fetched <= posted <= reaped + capacity`.
pub struct Ring<T> {
    slots: Box<[Option<T>]>,
    mask: u64,
    reaped: u64,
    done: u64,
    fetched: u64,
    posted: u64,
}

impl<T> Ring<T> {
    /// A ring of at least `capacity` slots: the next power of two.
    pub fn new(capacity: usize) -> Ring<T> {
        let capacity = capacity.max(1).next_power_of_two();
        Ring {
            slots: std::iter::repeat_with(|| None).take(capacity).collect(),
            mask: capacity as u64 - 1,
            reaped: 0,
            done: 0,
            fetched: 0,
            posted: 0,
        }
    }

    #[inline(always)]
    fn slot(&mut self, count: u64) -> &mut Option<T> {
        // The mask keeps the index inside.
        &mut self.slots[(count & self.mask) as usize]
    }

    /// Descriptors that may still be posted.
    #[inline]
    pub fn space(&self) -> usize {
        self.slots.len() - (self.posted - self.reaped) as usize
    }

    /// Descriptors in all.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The host writes a descriptor; it comes back if the ring is full.
    ///
    /// # Errors
    /// No space.
    #[inline]
    pub fn post(&mut self, t: T) -> Result<(), T> {
        if self.space() == 0 {
            return Err(t);
        }
        *self.slot(self.posted) = Some(t);
        self.posted += 1;
        Ok(())
    }

    /// As [`Ring::post`] of what `make` answers, which is written into its slot at once and nowhere else
    /// before; false if the ring is full.
    #[inline(always)]
    pub fn post_with(&mut self, make: impl FnOnce() -> T) -> bool {
        self.place().map(|place| place.post(make())).is_some()
    }

    /// The place of the next descriptor; `None` if the ring is full.
    #[inline(always)]
    pub fn place(&mut self) -> Option<Place<'_, T>> {
        if self.space() == 0 {
            return None;
        }
        // The mask keeps the index inside.
        let slot = &mut self.slots[(self.posted & self.mask) as usize];
        Some(Place { slot, posted: &mut self.posted })
    }

    /// The next posted descriptor, for hardware that has fetched and completed all before it: works on it
    /// where it lies, then calls [`Ring::complete_front`].
    #[inline]
    pub fn front(&mut self) -> Option<&mut T> {
        if self.fetched == self.posted || self.done != self.fetched {
            return None;
        }
        self.slot(self.fetched).as_mut()
    }

    /// The hardware fetches and gives back what [`Ring::front`] answers.
    #[inline]
    pub fn complete_front(&mut self) {
        if self.front().is_some() {
            self.fetched += 1;
            self.done += 1;
        }
    }

    /// The hardware takes the next posted descriptor.
    #[inline]
    pub fn fetch(&mut self) -> Option<T> {
        if self.fetched == self.posted {
            return None;
        }
        let t = self.slot(self.fetched).take();
        self.fetched += 1;
        t
    }

    /// The hardware gives back the oldest descriptor that it has fetched.
    ///
    /// # Panics
    /// If it has none.
    #[inline]
    pub fn complete(&mut self, t: T) {
        assert!(self.done < self.fetched, "a completion of what was not fetched");
        *self.slot(self.done) = Some(t);
        self.done += 1;
    }

    /// The oldest completed descriptor, still in its slot.
    #[inline]
    pub fn oldest_done(&self) -> Option<&T> {
        if self.reaped == self.done {
            return None;
        }
        self.slots[(self.reaped & self.mask) as usize].as_ref()
    }

    /// The host takes back the oldest completed descriptor.
    #[inline]
    pub fn reap(&mut self) -> Option<T> {
        self.reap_if(|_| true)
    }

    /// The same if it is one that is wanted.
    #[inline(always)]
    pub fn reap_if(&mut self, is_wanted: impl FnOnce(&T) -> bool) -> Option<T> {
        if self.reaped == self.done {
            return None;
        }
        let t = self.slot(self.reaped).take_if(|t| is_wanted(t))?;
        self.reaped += 1;
        Some(t)
    }

    /// Moves what was posted to another ring into this one, as far as there is space.
    pub fn take_posted(&mut self, from: &mut Ring<T>) {
        while self.space() > 0
            && let Some(t) = from.fetch()
        {
            // There is space, as just checked.
            let _ = self.post(t);
        }
    }

    /// Gives back to another ring what was completed in this one.
    pub fn give_done(&mut self, to: &mut Ring<T>) {
        while let Some(t) = self.reap() {
            to.complete(t);
        }
    }

    /// Posted and not fetched yet.
    #[inline]
    pub fn waiting(&self) -> usize {
        (self.posted - self.fetched) as usize
    }

    /// Completed and not reaped yet.
    #[inline]
    pub fn done(&self) -> usize {
        (self.done - self.reaped) as usize
    }
}

/// The place of a descriptor that is about to be posted.
pub struct Place<'a, T> {
    slot: &'a mut Option<T>,
    posted: &'a mut u64,
}

impl<T> Place<'_, T> {
    /// The host writes the descriptor there.
    #[inline(always)]
    pub fn post(self, t: T) {
        // What is not posted holds nothing, so that nothing is forgotten.
        std::mem::forget(self.slot.replace(t));
        *self.posted += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// The model: three queues, between which things move in order.
        #[test]
        fn the_ring_agrees_with_three_queues(
            capacity in 1usize..9,
            ops in proptest::collection::vec(0u8..6, 1..300),
        ) {
            let mut ring = Ring::new(capacity);
            let capacity = capacity.next_power_of_two();
            prop_assert_eq!(ring.capacity(), capacity);
            let (mut waiting, mut inside, mut done) =
                (VecDeque::new(), VecDeque::new(), VecDeque::new());
            let mut held = VecDeque::new();
            for (serial, op) in ops.into_iter().enumerate() {
                match op {
                    0 => {
                        let fits = waiting.len() + inside.len() + done.len() < capacity;
                        prop_assert_eq!(ring.post(serial).is_ok(), fits);
                        if fits {
                            waiting.push_back(serial);
                        }
                    }
                    1 => {
                        let t = ring.fetch();
                        prop_assert_eq!(t, waiting.pop_front());
                        inside.extend(t);
                        held.extend(t);
                    }
                    2 => if let Some(t) = held.pop_front() {
                        ring.complete(t);
                        done.extend(inside.pop_front());
                    },
                    3 => {
                        let fits = waiting.len() + inside.len() + done.len() < capacity;
                        prop_assert_eq!(ring.post_with(|| serial), fits);
                        waiting.extend(fits.then_some(serial));
                    }
                    4 => {
                        let front = waiting.front().copied().filter(|_| inside.is_empty());
                        prop_assert_eq!(ring.front().copied(), front);
                        ring.complete_front();
                        if front.is_some() {
                            done.extend(waiting.pop_front());
                        }
                    }
                    _ => {
                        prop_assert_eq!(ring.oldest_done(), done.front());
                        prop_assert_eq!(ring.reap_if(|_| false), None);
                        prop_assert_eq!(ring.reap(), done.pop_front());
                    }
                }
                prop_assert_eq!(ring.waiting(), waiting.len());
                prop_assert_eq!(ring.done(), done.len());
                let used = waiting.len() + inside.len() + done.len();
                prop_assert_eq!(ring.space(), capacity - used);
            }
        }
    }

    #[test]
    #[should_panic(expected = "not fetched")]
    fn only_fetched_frames_are_completed() {
        let mut ring = Ring::new(4);
        ring.post(1).unwrap();
        ring.complete(1);
    }
}
