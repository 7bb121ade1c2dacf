//! Look-ups of names: the two questions about each to the host's resolvers, and the guest's questions that wait for the
//! answers.
//!
//! Bounds: [`MOST_LOOKUPS`] names at a time, [`MOST_WAITING`] questions for each, [`PATIENCE`] for both answers. What
//! comes beyond is answered as a failure of the resolver, and the guest asks again.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant};

use crate::names::pins::{Half, Known, Lookup};

/// Names that are looked up at a time: their questions are half of the outstanding ones that a flow may have.
const MOST_LOOKUPS: usize = 64;
/// Questions of the guest that wait for one name.
const MOST_WAITING: usize = 64;
/// How long both answers may take: all servers of resolv.conf, each with its time.
const PATIENCE: Duration = Duration::from_secs(10);

/// A question of the guest that waits.
pub(super) struct Waiting {
    /// The guest's end and the resolver as the guest knows it.
    pub key: (SocketAddr, SocketAddr),
    pub message: Box<[u8]>,
    pub is_v4: bool,
}

struct Running {
    lookup: Lookup,
    waiting: Vec<Waiting>,
    ends: Instant,
}

/// A look-up that has ended.
pub(super) struct Finished {
    pub name: Arc<str>,
    pub known: Known,
    pub lifetime: Duration,
    pub waiting: Vec<Waiting>,
}

/// What becomes of a wish to look a name up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Begun {
    /// The questions are to be asked.
    Now,
    /// They have been asked.
    Already,
    /// Too many look-ups are under way.
    Refused,
}

/// The look-ups under way.
#[derive(Default)]
pub(super) struct Lookups {
    running: HashMap<Arc<str>, Running>,
}

impl Lookups {
    pub(super) fn begin(&mut self, name: &Arc<str>, now: Instant) -> Begun {
        if self.running.contains_key(name) {
            return Begun::Already;
        }
        if self.running.len() >= MOST_LOOKUPS {
            return Begun::Refused;
        }
        let running =
            Running { lookup: Lookup::default(), waiting: Vec::new(), ends: now + PATIENCE };
        self.running.insert(Arc::clone(name), running);
        Begun::Now
    }

    /// Lets a question wait. Gives it back if too many wait.
    pub(super) fn wait(&mut self, name: &str, waiting: Waiting) -> Result<(), Waiting> {
        match self.running.get_mut(name) {
            Some(running) if running.waiting.len() < MOST_WAITING => {
                running.waiting.push(waiting);
                Ok(())
            }
            _ => Err(waiting),
        }
    }

    /// Forgets the questions of a connection that has ended.
    pub(super) fn forget(&mut self, key: (SocketAddr, SocketAddr)) {
        self.running.values_mut().for_each(|running| running.waiting.retain(|w| w.key != key));
    }

    /// Enters the answer of one type. `None`: the other one is missing, or the name is not looked up.
    pub(super) fn enter(&mut self, name: &str, is_v4: bool, half: Half) -> Option<Finished> {
        let running = self.running.get_mut(name)?;
        running.lookup.enter(is_v4, half);
        let (known, lifetime) = running.lookup.outcome()?;
        let (name, running) = self.running.remove_entry(name)?;
        Some(Finished { name, known, lifetime, waiting: running.waiting })
    }

    /// A look-up whose time is over. One answer that came counts.
    pub(super) fn expired(&mut self, now: Instant) -> Option<Finished> {
        let over = self.running.iter().find(|(_, running)| running.ends <= now);
        let name = Arc::clone(over?.0);
        self.enter(&name, true, Half::Failed).or_else(|| self.enter(&name, false, Half::Failed))
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.running.values().map(|running| running.ends).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting() -> Waiting {
        let at = SocketAddr::from(([10, 0, 0, 2], 9));
        Waiting { key: (at, at), message: Box::default(), is_v4: true }
    }

    #[test]
    fn a_name_is_looked_up_once_and_all_that_wait_get_the_outcome() {
        let (mut lookups, name) = (Lookups::default(), Arc::<str>::from("example.org"));
        assert_eq!(lookups.begin(&name, Instant::ZERO), Begun::Now);
        assert_eq!(lookups.begin(&name, Instant::ZERO), Begun::Already);
        for _ in 0..MOST_WAITING {
            assert!(lookups.wait(&name, waiting()).is_ok());
        }
        assert!(lookups.wait(&name, waiting()).is_err(), "too many");
        assert!(lookups.enter(&name, false, Half::NoAddress).is_none());
        let finished = lookups.enter(&name, true, Half::NoName).unwrap();
        assert_eq!((finished.known, finished.waiting.len()), (Known::NoAddress, MOST_WAITING));
        assert!(lookups.enter(&name, true, Half::NoName).is_none(), "it is over");
        assert_eq!(lookups.next_deadline(), None);
    }

    #[test]
    fn lookups_are_bounded_in_number_and_time() {
        let mut lookups = Lookups::default();
        let name = |n: usize| Arc::<str>::from(format!("n{n}.example"));
        for n in 0..MOST_LOOKUPS {
            assert_eq!(lookups.begin(&name(n), Instant::ZERO), Begun::Now);
        }
        assert_eq!(lookups.begin(&name(MOST_LOOKUPS), Instant::ZERO), Begun::Refused);
        let late = Instant::ZERO + PATIENCE;
        assert_eq!(lookups.next_deadline(), Some(late));
        let half = Half::Addresses([[192, 0, 2, 1].into()].into_iter().collect(), 60);
        lookups.enter("n7.example", true, half);
        let ended: Vec<_> = std::iter::from_fn(|| lookups.expired(late)).collect();
        assert_eq!(ended.len(), MOST_LOOKUPS);
        let with_address = |f: &&Finished| matches!(f.known, Known::Addresses(_));
        assert_eq!(ended.iter().filter(with_address).count(), 1, "the answer of one type counts");
        assert!(lookups.expired(late).is_none());
    }
}
