//! epoll(7): level-triggered, edge-triggered and one-shot.

/// What a descriptor is ready for, and what tells one edge from the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readiness {
    /// Events of poll(2); epoll's events have the same numbers.
    pub events: i16,
    /// Bytes received so far: more of them are another edge of EPOLLIN.
    pub received_bytes: u64,
}

/// One watched descriptor.
#[derive(Clone, Copy, Debug)]
struct Watch {
    fd: i32,
    interest: u32,
    data: u64,
    last: Readiness,
    /// Events of an edge-triggered watch that are new since the last report.
    edges: u32,
}

impl Watch {
    fn wants_edges(&self) -> bool {
        self.interest & libc::EPOLLET as u32 != 0
    }

    fn note(&mut self, now: Readiness) {
        let fresh = now.events & !self.last.events;
        self.edges |= u32::from(fresh as u16);
        if now.received_bytes != self.last.received_bytes {
            self.edges |= u32::from(now.events as u16);
        }
        self.last = now;
    }
}

/// Always reported.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;

/// An epoll set.
#[derive(Default, Debug)]
pub struct Epoll {
    watches: Vec<Watch>,
}

impl Epoll {
    /// epoll_ctl(2). The present readiness of a new watch is an edge.
    ///
    /// # Errors
    /// An errno.
    pub fn control(
        &mut self,
        op: i32,
        fd: i32,
        interest: u32,
        data: u64,
        now: Readiness,
    ) -> Result<(), i32> {
        let at = self.watches.iter().position(|w| w.fd == fd);
        let edges = u32::from(now.events as u16);
        let watch = Watch { fd, interest, data, last: now, edges };
        match (op, at) {
            (libc::EPOLL_CTL_ADD, None) => self.watches.push(watch),
            (libc::EPOLL_CTL_ADD, Some(_)) => return Err(libc::EEXIST),
            (libc::EPOLL_CTL_MOD, Some(at)) => self.watches[at] = watch,
            (libc::EPOLL_CTL_DEL, Some(at)) => drop(self.watches.remove(at)),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None) => return Err(libc::ENOENT),
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    /// Looks at the readiness of each watched descriptor.
    pub fn note_edges(&mut self, mut readiness: impl FnMut(i32) -> Option<Readiness>) {
        for watch in &mut self.watches {
            if let Some(now) = readiness(watch.fd) {
                watch.note(now);
            }
        }
    }

    /// epoll_wait(2): events with their data, at most `max`.
    pub fn take(&mut self, max: usize) -> Vec<(u32, u64)> {
        let mut told = Vec::new();
        for watch in &mut self.watches {
            let asked = watch.interest | ALWAYS;
            let ready = u32::from(watch.last.events as u16) & asked;
            let is_due = !watch.wants_edges() || watch.edges & asked != 0;
            if ready == 0 || !is_due || told.len() >= max || watch.interest == 0 {
                continue;
            }
            told.push((ready, watch.data));
            watch.edges = 0;
            if watch.interest & ONE_SHOT != 0 {
                watch.interest = 0;
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(received_bytes: u64) -> Readiness {
        Readiness { events: libc::POLLIN, received_bytes }
    }

    fn watching(interest: i32) -> Epoll {
        let mut epoll = Epoll::default();
        let added = epoll.control(libc::EPOLL_CTL_ADD, 3, interest as u32, 7, Readiness::default());
        assert_eq!(added, Ok(()));
        epoll
    }

    #[test]
    fn an_edge_is_reported_once_and_again_when_more_arrives() {
        let mut epoll = watching(libc::EPOLLIN | libc::EPOLLET);
        let mut told = |received| {
            epoll.note_edges(|_| Some(readable(received)));
            epoll.take(8).len()
        };
        assert_eq!([told(1), told(1), told(2)], [1, 0, 1]);
    }

    #[test]
    fn a_level_is_reported_each_time_and_a_one_shot_watch_once() {
        for (interest, told) in [(libc::EPOLLIN, 2), (libc::EPOLLIN | libc::EPOLLONESHOT, 1)] {
            let mut epoll = watching(interest);
            epoll.note_edges(|_| Some(readable(1)));
            assert_eq!(epoll.take(8).len() + epoll.take(8).len(), told);
        }
    }
}
