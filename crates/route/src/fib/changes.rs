//! How readers notice that what they read has changed meanwhile, without a lock.

#![forbid(unsafe_code)]

use core::sync::atomic::Ordering;

use crate::sync::{AtomicU64, fence};

/// Counts changes. On a line of its own: it is the one word that every look-up reads and every change
/// writes.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Changes(AtomicU64);

impl Changes {
    /// The count before a look-up. With it comes everything that was stored before it.
    #[inline(always)]
    pub(super) fn before(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Whether nothing has changed since. To be asked after the last load of a look-up: if one of them
    /// saw what was written into memory that a change had freed, the count of that change is seen
    /// here, since it was stored before, with a fence in between.
    #[inline(always)]
    pub(super) fn is_still(&self, before: u64) -> bool {
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == before
    }

    /// To be called before anything is written into memory that was freed: readers may still look at
    /// it.
    pub(super) fn fence(&self) {
        fence(Ordering::Release);
    }

    /// Counts a change: to be called after the one store that readers take its result from, and before
    /// what it frees is used again. A reader looks again only because of this, so that a writer who
    /// stops half way stops nobody.
    pub(super) fn count(&self) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(fulmar_loom)]
pub(crate) mod models {
    use fulmar_models::sync::Arc;
    use fulmar_models::sync::atomic::AtomicU32;
    use fulmar_models::{Model, model, models, spawn};

    use super::*;

    /// The models of this room.
    pub const MODELS: &[Model] =
        models![no_reader_takes_a_block_that_is_written_again_for_an_answer];

    /// A slot and two blocks, read and written as tables read and write theirs.
    struct Table {
        changes: Changes,
        slot: AtomicU32,
        blocks: [[AtomicU64; 2]; 2],
    }

    impl Table {
        /// As `Places::set` and what is around it: the words of a block that is free, the slot, the count.
        fn change(&self, block: usize, value: u64) {
            self.changes.fence();
            self.blocks[block].iter().for_each(|word| word.store(value, Ordering::Relaxed));
            self.slot.swap(block as u32, Ordering::Release);
            self.changes.count();
        }

        /// One attempt of a look-up; `None`: it is to be done again.
        fn look_up(&self) -> Option<[u64; 2]> {
            let before = self.changes.before();
            let block = self.slot.load(Ordering::Acquire) as usize;
            let words = [0, 1].map(|i| self.blocks[block][i].load(Ordering::Relaxed));
            self.changes.is_still(before).then_some(words)
        }
    }

    fn no_reader_takes_a_block_that_is_written_again_for_an_answer() {
        model(4, || {
            let word = AtomicU64::new;
            let table = Arc::new(Table {
                changes: Changes::default(),
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
            // Into the block that the first change has freed.
            table.change(0, 3);
            reader.join().expect("a reader");
            assert_eq!(table.look_up(), Some([3, 3]));
        });
    }
}
