//! The routes of one IP version: a vector while they are few, a [`Fib`] from then on.

use alloc::vec::Vec;

use crate::{Advice, Fib, FibError, FibReader, Key};

/// Routes that are too many for a vector: a look-up among fewer costs less than a microsecond, once per
/// destination, and a [`Fib`] takes 10 MB.
pub(crate) const MANY: usize = 256;
/// Routes that are few again.
const FEW: usize = 128;

/// Prefixes with the numbers of their next hops.
pub(crate) enum Family<K: Key> {
    /// Longest prefix first; equal lengths in the order of their addresses.
    Few(Vec<(K, u8, u32)>),
    /// With a reader of its own.
    Many(Fib<K>, FibReader<K>),
}

impl<K: Key> Default for Family<K> {
    fn default() -> Self {
        Family::Few(Vec::new())
    }
}

/// Longest first, so that the first match is the longest.
fn order<K: Key>((a, a_len, _): &(K, u8, u32), (b, b_len): (K, u8)) -> core::cmp::Ordering {
    b_len.cmp(a_len).then(a.cmp(&b))
}

impl<K: Key> Family<K> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Family::Few(routes) => routes.len(),
            Family::Many(fib, _) => fib.len(),
        }
    }

    /// The number of the longest prefix that holds the address; 0 if none does.
    #[inline]
    pub(crate) fn lookup(&self, address: K) -> u32 {
        match self {
            Family::Few(routes) => {
                let holds = |(start, len, _): &&(K, u8, u32)| address.block(*len).0 == *start;
                routes.iter().find(holds).map_or(0, |r| r.2)
            }
            Family::Many(_, reader) => reader.lookup(address),
        }
    }

    /// The number of exactly this prefix.
    pub(crate) fn get(&self, address: K, len: u8) -> Option<u32> {
        let start = address.block(len).0;
        match self {
            Family::Few(routes) => {
                let at = routes.binary_search_by(|r| order(r, (start, len))).ok()?;
                routes.get(at).map(|r| r.2)
            }
            Family::Many(fib, _) => fib.get(start, len),
        }
    }

    /// Adds a prefix, whose host bits are zero, or changes its number; the number it had.
    ///
    /// # Errors
    /// [`FibError::Full`]: everything is as it was.
    pub(crate) fn insert(
        &mut self,
        start: K,
        len: u8,
        number: u32,
        advice: Advice,
    ) -> Result<Option<u32>, FibError> {
        match self {
            Family::Few(routes) => match routes.binary_search_by(|r| order(r, (start, len))) {
                Ok(at) => {
                    let old = routes.get_mut(at).map(|r| core::mem::replace(&mut r.2, number));
                    Ok(old)
                }
                Err(at) if routes.len() < MANY => {
                    routes.insert(at, (start, len, number));
                    Ok(None)
                }
                Err(_) => {
                    let mut fib = Fib::with_advice(advice.0);
                    for (start, len, number) in routes {
                        fib.insert(*start, *len, *number)?;
                    }
                    fib.insert(start, len, number)?;
                    let reader = fib.reader();
                    *self = Family::Many(fib, reader);
                    Ok(None)
                }
            },
            Family::Many(fib, _) => {
                let old = fib.get(start, len);
                fib.insert(start, len, number).inspect_err(|_| {
                    // Some chunks of a short prefix may have changed: they go back, which takes no
                    // more room than they had.
                    let _ = match old {
                        Some(old) => fib.insert(start, len, old),
                        None => fib.remove(start, len),
                    };
                })
            }
        }
    }

    /// Takes a prefix out; the number it had.
    pub(crate) fn remove(&mut self, start: K, len: u8) -> Option<u32> {
        match self {
            Family::Few(routes) => {
                let at = routes.binary_search_by(|r| order(r, (start, len))).ok()?;
                Some(routes.remove(at).2)
            }
            Family::Many(fib, _) => {
                let old = fib.remove(start, len).ok()?;
                if fib.len() < FEW {
                    *self = Family::Few(self.sorted());
                }
                old
            }
        }
    }

    /// Every prefix with its number, longest first, then by address.
    pub(crate) fn sorted(&self) -> Vec<(K, u8, u32)> {
        match self {
            Family::Few(routes) => routes.clone(),
            Family::Many(fib, _) => {
                let mut all: Vec<_> = fib.iter().collect();
                all.sort_unstable_by(|a, b| order(a, (b.0, b.1)));
                all
            }
        }
    }
}
