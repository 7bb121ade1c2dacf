//! All connections of the peer: a bounded table. One that is over stays, as in TIME-WAIT, until its
//! place is needed.

use std::collections::VecDeque;

use fulmar_stack::base::Instant;

use super::{Conn, Key};
use crate::peer::{FarEnd, Index, Out};

/// See the module's header.
pub struct Set {
    conns: Vec<Conn>,
    /// The slot of each connection.
    index: Index,
    /// The connection of the last packet.
    last: Option<(Key, usize)>,
    /// Connections that have had packets in this burst.
    touched: Vec<usize>,
    /// Connections that would send more.
    hungry: VecDeque<usize>,
    limit: usize,
    /// No timer of any connection is due earlier.
    timer: Option<Instant>,
}

impl Set {
    pub fn new(limit: usize) -> Set {
        Set {
            conns: Vec::new(),
            index: Index::new(),
            last: None,
            touched: Vec::new(),
            hungry: VecDeque::new(),
            limit: limit.max(1),
            timer: None,
        }
    }

    pub fn get_mut(&mut self, key: &Key) -> Option<&mut Conn> {
        let at = match self.last {
            Some((last, at)) if last == *key => at,
            _ => *self.index.get(key)?,
        };
        self.last = Some((*key, at));
        self.conns.get_mut(at)
    }

    /// Whether [`Set::insert`] will find a place.
    pub fn has_space(&self, key: &Key) -> bool {
        self.conns.len() < self.limit
            || self.index.contains_key(key)
            || self.conns.iter().any(Conn::is_over)
    }

    /// Puts a connection in the place of an older one with the same addresses, in a free one, or in
    /// that of one that is over; without any it is forgotten.
    pub fn insert(&mut self, key: Key, mut c: Conn) {
        let known = self.index.get(&key).copied();
        let at = if known.is_some() || self.conns.len() < self.limit {
            known.unwrap_or(self.conns.len())
        } else {
            let Some(at) = self.conns.iter().position(Conn::is_over) else { return };
            at
        };
        match self.conns.get_mut(at) {
            Some(old) => {
                // Lists that name the place go on doing so.
                (c.is_touched, c.is_listed) = (old.is_touched, old.is_listed);
                self.index.remove(&old.key());
                *old = c;
            }
            None => self.conns.push(c),
        }
        self.index.insert(key, at);
        self.last = Some((key, at));
    }

    /// The connection has had a packet, and answers at the end of the burst.
    pub fn touch(&mut self, key: &Key) {
        let Some((last, at)) = self.last else { return };
        if last == *key
            && let Some(c) = self.conns.get_mut(at)
            && !c.is_touched
        {
            c.is_touched = true;
            self.touched.push(at);
        }
    }

    /// Lets every connection answer that has had packets.
    pub fn answer(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        for i in 0..self.touched.len() {
            let at = self.touched[i];
            self.conns[at].is_touched = false;
            self.conns[at].answer(config, out);
            self.follow(at);
        }
        self.touched.clear();
    }

    /// Records the events that a connection waits for after its turn.
    fn follow(&mut self, at: usize) {
        let c = &mut self.conns[at];
        if c.is_hungry && !c.is_listed {
            c.is_listed = true;
            self.hungry.push_back(at);
        }
        if let Some(due) = c.deadline() {
            self.timer = Some(self.timer.map_or(due, |t| t.min(due)));
        }
    }

    /// Timers, and connections that have waited for space.
    pub fn run(&mut self, now: Instant, config: &FarEnd, out: &mut Out<'_>) {
        for _ in 0..self.hungry.len() {
            let Some(at) = self.hungry.pop_front() else { break };
            let c = &mut self.conns[at];
            c.is_listed = false;
            c.catch_up(now);
            c.pump(config, out);
            self.follow(at);
            if !out.has_space() {
                break;
            }
        }
        if self.timer.is_none_or(|t| t > now) {
            return;
        }
        self.timer = None;
        for at in 0..self.conns.len() {
            self.conns[at].on_timer(now, config, out);
            self.follow(at);
        }
    }

    /// When a timer may be due; it may then turn out that none is.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    pub fn is_hungry(&self) -> bool {
        !self.hungry.is_empty()
    }

    pub fn reset_all(&mut self, now: Instant, config: &FarEnd, out: &mut Out<'_>) {
        for c in self.conns.iter_mut().filter(|c| !c.is_over()) {
            c.send_reset(now, config, out);
        }
    }
}
