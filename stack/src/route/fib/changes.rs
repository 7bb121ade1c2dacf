//! The sequence count by which readers detect concurrent updates without a lock.

#![forbid(unsafe_code)]

use core::sync::atomic::Ordering;

use crate::route::sync::{AtomicU64, fence};

/// The count of updates. It has its own cache line: it is the only word that every look-up reads
/// and every update writes.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct SeqCount(AtomicU64);

impl SeqCount {
    /// Starts a look-up: the acquire load synchronizes with all stores before the count.
    #[inline(always)]
    pub(super) fn begin(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Ends a look-up: whether no update occurred since `before`. Called after the last load of the
    /// look-up. If a load saw a store into memory freed by an update, the count of that update is
    /// visible here, since it was stored earlier, with a fence in between.
    #[inline(always)]
    pub(super) fn is_unchanged(&self, before: u64) -> bool {
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == before
    }

    /// Called before freed memory is written: readers may still read it.
    pub(super) fn fence_before_write(&self) {
        fence(Ordering::Release);
    }

    /// Counts an update: called after the store that publishes it, and before the memory that it
    /// freed is reused. Readers retry only when the count changes, so a writer that stalls midway
    /// does not block readers.
    pub(super) fn advance(&self) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(fulmar_loom)]
pub(crate) mod models {
    use crate::models::sync::Arc;
    use crate::models::sync::atomic::AtomicU32;
    use crate::models::{Model, model, spawn};

    use super::*;

    /// The models of this room.
    pub const MODELS: &[Model] = crate::models![readers_never_use_a_reused_block];

    /// A slot and two blocks, accessed as in the tables.
    struct Table {
        seq: SeqCount,
        slot: AtomicU32,
        blocks: [[AtomicU64; 2]; 2],
    }

    impl Table {
        /// As `publish` and `BlockSlots::set`: writes the words of a free block, the slot, the count.
        fn change(&self, block: usize, value: u64) {
            self.seq.fence_before_write();
            self.blocks[block].iter().for_each(|word| word.store(value, Ordering::Relaxed));
            self.slot.swap(block as u32, Ordering::Release);
            self.seq.advance();
        }

        /// One attempt of a look-up; `None`: retry.
        fn look_up(&self) -> Option<[u64; 2]> {
            let before = self.seq.begin();
            let block = self.slot.load(Ordering::Acquire) as usize;
            let words = [0, 1].map(|i| self.blocks[block][i].load(Ordering::Relaxed));
            self.seq.is_unchanged(before).then_some(words)
        }
    }

    fn readers_never_use_a_reused_block() {
        model(4, || {
            let word = AtomicU64::new;
            let table = Arc::new(Table {
                seq: SeqCount::default(),
                slot: AtomicU32::new(0),
                blocks: [[word(1), word(1)], [word(0), word(0)]],
            });
            let readers = Arc::clone(&table);
            let reader = spawn(move || {
                if let Some([a, b]) = readers.look_up() {
                    assert!(a == b && (1..=3).contains(&a), "{a} {b}");
                }
            });
            table.change(1, 2);
            // Reuses the block freed by the first update.
            table.change(0, 3);
            reader.join().expect("a reader");
            assert_eq!(table.look_up(), Some([3, 3]));
        });
    }
}
