//! A hierarchical timer wheel, lazy: a timer moves only when its deadline becomes *earlier*. One
//! that became later fires at the old time, and its owner looks and schedules again. So an ACK
//! that pushes a retransmission back costs nothing here.
//!
//! Four levels of 64 slots, one tick about a millisecond (2^20 ns), so the wheel spans 4.9 hours;
//! deadlines further away are placed again each time the hand comes by. No allocation once the
//! table of nodes has grown to the number of timers.
//! Source: Varghese and Lauck, "Hashed and hierarchical timing wheels", SOSP 1987.

use alloc::vec::Vec;

use crate::base::{Instant, SlotId};

const TICK_SHIFT: u32 = 20;
const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
const LEVELS: usize = 4;
const NIL: u32 = u32::MAX;

/// A scheduled timer. Copy, so that its owner can keep it; only valid until it fires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimerId(u32);

#[derive(Clone, Copy)]
struct Node<K> {
    key: K,
    deadline: Instant,
    prev: u32,
    next: u32,
    /// Level and slot in one number, to find the list head.
    place: u16,
}

/// Timers of one shard, each with a key that says whose it is.
pub struct Wheel<K> {
    nodes: Vec<Node<K>>,
    free: u32,
    heads: [[u32; SLOTS]; LEVELS],
    occupied: [u64; LEVELS],
    /// The tick up to which everything has fired.
    now_tick: u64,
    len: usize,
}

fn tick_of(t: Instant) -> u64 {
    t.as_nanos() >> TICK_SHIFT
}

impl<K: Copy> Wheel<K> {
    /// An empty wheel that starts at `now`.
    pub fn new(now: Instant) -> Self {
        Wheel {
            nodes: Vec::new(),
            free: NIL,
            heads: [[NIL; SLOTS]; LEVELS],
            occupied: [0; LEVELS],
            now_tick: tick_of(now),
            len: 0,
        }
    }

    /// How many timers are scheduled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no timer is scheduled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes sure that `key` fires no later than `deadline` (rounded up to a tick). `held` is the
    /// timer that the owner already has; it is moved only if `deadline` is a tick earlier.
    pub fn schedule(&mut self, held: Option<TimerId>, key: K, deadline: Instant) -> TimerId {
        if let Some(id) = held {
            let node = self.nodes[id.0 as usize];
            if tick_of(node.deadline) <= tick_of(deadline) {
                return id;
            }
            self.unlink(id.0);
            self.nodes[id.0 as usize].deadline = deadline;
            self.link(id.0);
            return id;
        }
        let n = self.obtain(key, deadline);
        self.link(n);
        TimerId(n)
    }

    /// Forgets a timer.
    pub fn cancel(&mut self, id: TimerId) {
        self.unlink(id.0);
        self.release(id.0);
    }

    /// The next timer that is due at `now`; its id is gone with this call.
    #[inline]
    pub fn expire(&mut self, now: Instant) -> Option<K> {
        let target = tick_of(now);
        // Timers due in this tick are in its slot of the lowest level, since the hand has entered it.
        let slot = (self.now_tick as usize) & (SLOTS - 1);
        if target <= self.now_tick && self.heads[0][slot] == NIL {
            return None;
        }
        self.expire_by(target)
    }

    fn expire_by(&mut self, target: u64) -> Option<K> {
        loop {
            let slot = (self.now_tick as usize) & (SLOTS - 1);
            let head = self.heads[0][slot];
            if head != NIL && self.now_tick <= target {
                let key = self.nodes[head as usize].key;
                self.unlink(head);
                self.release(head);
                return Some(key);
            }
            let next = self.next_tick()?;
            if next > target {
                self.advance_to(target.max(self.now_tick));
                return None;
            }
            self.advance_to(next);
        }
    }

    /// No timer fires before this; a wake-up at this time may find nothing due (a cascade).
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_tick().map(|t| Instant::from_nanos(t << TICK_SHIFT))
    }

    /// The first tick at which a slot has to be processed.
    fn next_tick(&self) -> Option<u64> {
        (0..LEVELS).filter_map(|level| self.next_tick_of_level(level)).min()
    }

    fn next_tick_of_level(&self, level: usize) -> Option<u64> {
        let map = self.occupied[level];
        if map == 0 {
            return None;
        }
        let shift = SLOT_BITS * level as u32;
        let here = self.now_tick >> shift;
        let ahead = map.rotate_right((here & (SLOTS as u64 - 1)) as u32).trailing_zeros();
        Some(((here + u64::from(ahead)) << shift).max(self.now_tick))
    }

    /// Moves the hand, and brings down the slots of higher levels that it enters.
    fn advance_to(&mut self, tick: u64) {
        let before = self.now_tick;
        self.now_tick = tick;
        for level in 1..LEVELS {
            let shift = SLOT_BITS * level as u32;
            if before >> shift == tick >> shift {
                break;
            }
            self.cascade(level, ((tick >> shift) as usize) & (SLOTS - 1));
        }
    }

    fn cascade(&mut self, level: usize, slot: usize) {
        let mut n = self.heads[level][slot];
        self.heads[level][slot] = NIL;
        self.occupied[level] &= !(1 << slot);
        while n != NIL {
            let next = self.nodes[n as usize].next;
            self.len -= 1;
            self.link(n);
            n = next;
        }
    }

    /// Where a deadline belongs, seen from the hand. Rounded up, so that nothing fires early.
    fn place(&self, deadline: Instant) -> (usize, usize) {
        let due = (deadline.as_nanos().saturating_add((1 << TICK_SHIFT) - 1)) >> TICK_SHIFT;
        let due = due.max(self.now_tick);
        for level in 0..LEVELS {
            let shift = SLOT_BITS * level as u32;
            if (due >> shift) - (self.now_tick >> shift) < SLOTS as u64 {
                return (level, ((due >> shift) as usize) & (SLOTS - 1));
            }
        }
        let shift = SLOT_BITS * (LEVELS as u32 - 1);
        (LEVELS - 1, ((self.now_tick >> shift) as usize + SLOTS - 1) & (SLOTS - 1))
    }

    fn obtain(&mut self, key: K, deadline: Instant) -> u32 {
        let node = Node { key, deadline, prev: NIL, next: NIL, place: 0 };
        if self.free == NIL {
            self.nodes.push(node);
            return (self.nodes.len() - 1) as u32;
        }
        let n = self.free;
        self.free = self.nodes[n as usize].next;
        self.nodes[n as usize] = node;
        n
    }

    fn release(&mut self, n: u32) {
        self.nodes[n as usize].next = self.free;
        self.free = n;
    }

    fn link(&mut self, n: u32) {
        let (level, slot) = self.place(self.nodes[n as usize].deadline);
        let head = self.heads[level][slot];
        let node = &mut self.nodes[n as usize];
        (node.prev, node.next) = (NIL, head);
        node.place = (level * SLOTS + slot) as u16;
        if head != NIL {
            self.nodes[head as usize].prev = n;
        }
        self.heads[level][slot] = n;
        self.occupied[level] |= 1 << slot;
        self.len += 1;
    }

    fn unlink(&mut self, n: u32) {
        let Node { prev, next, place, .. } = self.nodes[n as usize];
        let (level, slot) = (place as usize / SLOTS, place as usize % SLOTS);
        if prev == NIL {
            self.heads[level][slot] = next;
            if next == NIL {
                self.occupied[level] &= !(1 << slot);
            }
        } else {
            self.nodes[prev as usize].next = next;
        }
        if next != NIL {
            self.nodes[next as usize].prev = prev;
        }
        self.len -= 1;
    }
}

/// Whose timer fires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimerKey {
    /// A connection.
    Tcp(SlotId),
    /// The oldest TIME-WAIT entry.
    TimeWait,
    /// The posted buffers of a connection.
    Posted(SlotId),
    /// The oldest pending connection of a listener.
    Pending(SlotId),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn ms(n: u64) -> Instant {
        Instant::from_nanos(n << TICK_SHIFT)
    }

    #[test]
    fn a_later_deadline_does_not_move_the_timer_and_an_earlier_one_does() {
        let mut w = Wheel::new(Instant::ZERO);
        let id = w.schedule(None, 1, ms(100));
        assert_eq!(w.schedule(Some(id), 1, ms(200)), id);
        assert_eq!(w.next_deadline().map(|d| d <= ms(100)), Some(true));
        w.schedule(Some(id), 1, ms(10));
        assert_eq!(w.expire(ms(9)), None);
        assert_eq!(w.expire(ms(10)), Some(1));
        assert!(w.is_empty());
    }

    #[test]
    fn a_deadline_beyond_the_wheel_waits_for_its_time() {
        let mut w = Wheel::new(Instant::ZERO);
        let due = ms(100_000_000);
        w.schedule(None, 7, due);
        let mut at = w.next_deadline().unwrap();
        for _ in 0..20 {
            if w.expire(at).is_some() {
                assert!(at >= due);
                return;
            }
            at = w.next_deadline().unwrap();
        }
        panic!("it did not fire");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Add(u64),
        Advance(u64),
        Cancel(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0u64..20_000_000).prop_map(Op::Add),
            (0u64..100).prop_map(Op::Add),
            (0u64..3_000_000).prop_map(Op::Advance),
            (0u64..70).prop_map(Op::Advance),
            (0usize..32).prop_map(Op::Cancel),
        ]
    }

    proptest! {
        #[test]
        fn the_wheel_fires_the_timers_that_a_sorted_list_fires(start in 0u64..1 << 30, ops in prop::collection::vec(op(), 1..120)) {
            let mut now = start;
            let mut w = Wheel::new(ms(now));
            let mut model: BTreeMap<u32, (u64, TimerId)> = BTreeMap::new();
            let mut key = 0;
            for o in ops {
                match o {
                    Op::Add(d) => {
                        key += 1;
                        let id = w.schedule(None, key, ms(now + d));
                        model.insert(key, (now + d, id));
                    }
                    Op::Cancel(i) => {
                        if let Some((&k, &(_, id))) = model.iter().nth(i) {
                            w.cancel(id);
                            model.remove(&k);
                        }
                    }
                    Op::Advance(d) => {
                        now += d;
                        while let Some(k) = w.expire(ms(now)) {
                            let (due, _) = model.remove(&k).expect("fired once");
                            prop_assert!(due <= now);
                        }
                        for (k, (due, _)) in &model {
                            prop_assert!(*due > now, "timer {k} due {due} not fired at {now}");
                        }
                    }
                }
                prop_assert_eq!(w.len(), model.len());
                if let Some((due, _)) = model.values().min_by_key(|v| v.0) {
                    prop_assert!(w.next_deadline().unwrap() <= ms(*due));
                }
            }
        }
    }
}
