//! A table whose slots are named by index and generation: a handle of a removed value does not find the next value in
//! the same slot.

use alloc::vec::Vec;

use crate::base::SlotId;

use crate::shard::raw::fetch;

struct Entry<T> {
    generation: u32,
    value: Option<T>,
    next_free: u32,
}

/// Slots of `T`, reused last in, first out.
pub struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: u32,
    len: usize,
}

const NIL: u32 = u32::MAX;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: NIL, len: 0 }
    }
}

impl<T> Slab<T> {
    /// How many slots are in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a value into a free slot.
    pub fn insert(&mut self, value: T) -> SlotId {
        self.len += 1;
        if self.free == NIL {
            let index = self.entries.len() as u32;
            self.entries.push(Entry { generation: 0, value: Some(value), next_free: NIL });
            return SlotId { index, generation: 0 };
        }
        let index = self.free;
        let e = &mut self.entries[index as usize];
        self.free = e.next_free;
        e.value = Some(value);
        SlotId { index, generation: e.generation }
    }

    /// The value of a slot, `None` if it is gone.
    #[inline]
    pub fn get(&self, id: SlotId) -> Option<&T> {
        let e = self.entries.get(id.index as usize)?;
        if e.generation == id.generation { e.value.as_ref() } else { None }
    }

    /// The present value of a slot, and its name.
    pub fn at(&self, index: u32) -> Option<(SlotId, &T)> {
        let e = self.entries.get(index as usize)?;
        Some((SlotId { index, generation: e.generation }, e.value.as_ref()?))
    }

    /// Prefetches a slot.
    pub fn fetch(&self, index: u32) {
        if let Some(e) = self.entries.get(index as usize) {
            fetch(e, size_of::<Entry<T>>());
        }
    }

    /// The value of a slot, `None` if it is gone.
    pub fn get_mut(&mut self, id: SlotId) -> Option<&mut T> {
        let e = self.entries.get_mut(id.index as usize)?;
        if e.generation == id.generation { e.value.as_mut() } else { None }
    }

    /// Removes a value. The next one in the slot gets another generation.
    pub fn remove(&mut self, id: SlotId) -> Option<T> {
        let e = self.entries.get_mut(id.index as usize)?;
        if e.generation != id.generation {
            return None;
        }
        let value = e.value.take()?;
        e.generation = e.generation.wrapping_add(1);
        e.next_free = self.free;
        self.free = id.index;
        self.len -= 1;
        Some(value)
    }

    /// Every slot in use, by index.
    pub fn iter(&self) -> impl Iterator<Item = (SlotId, &T)> {
        self.entries.iter().enumerate().filter_map(|(i, e)| {
            let id = SlotId { index: i as u32, generation: e.generation };
            e.value.as_ref().map(|v| (id, v))
        })
    }

    /// The ids in use, by index; the table may change while they are walked.
    pub fn ids(&self) -> Vec<SlotId> {
        self.iter().map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_to_a_removed_value_does_not_reach_its_successor() {
        let mut s = Slab::default();
        let a = s.insert("a");
        assert_eq!(s.remove(a), Some("a"));
        let b = s.insert("b");
        assert_eq!(a.index, b.index);
        assert_eq!(s.get(a), None);
        assert_eq!(s.remove(a), None);
        assert_eq!(s.get_mut(b), Some(&mut "b"));
        assert_eq!((s.len(), s.ids()), (1, vec![b]));
    }
}
