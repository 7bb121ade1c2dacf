//! The routes of one IP version: a few sorted ranges while they are few, a [`Fib`] from then on.

use alloc::vec::Vec;

use crate::{Advice, Fib, FibError, FibReader, Key, ranges};

/// Routes that are too many to find the ranges anew with every change. A [`Fib`] takes 10 MB, which few
/// routes are not worth.
pub(crate) const MANY: usize = 256;
/// Routes that are few again.
const FEW: usize = 128;

/// Prefixes with the numbers of their next hops.
pub(crate) enum Family<K: Key> {
    Few(Few<K>),
    /// With a reader of its own.
    Many(Fib<K>, FibReader<K>),
}

/// Prefixes, and what they say of every address.
pub(crate) struct Few<K> {
    /// Longest prefix first; equal lengths in the order of their addresses.
    routes: Vec<(K, u8, u32)>,
    /// Where another number begins, in the order of addresses, from the first address on; none without
    /// routes.
    ranges: Vec<(K, u32)>,
}

impl<K: Key> Few<K> {
    fn new(routes: Vec<(K, u8, u32)>) -> Few<K> {
        let mut few = Few { routes, ranges: Vec::new() };
        few.renew();
        few
    }

    #[inline]
    fn lookup(&self, address: K) -> u32 {
        let behind = self.ranges.partition_point(|(start, _)| *start <= address);
        self.ranges.get(behind.wrapping_sub(1)).map_or(0, |range| range.1)
    }

    /// Where a prefix is, or where it would have to be.
    fn position(&self, start: K, len: u8) -> Result<usize, usize> {
        self.routes.binary_search_by(|r| order(r, (start, len)))
    }

    fn change<R>(&mut self, change: impl FnOnce(&mut Vec<(K, u8, u32)>) -> R) -> R {
        let result = change(&mut self.routes);
        self.renew();
        result
    }

    fn renew(&mut self) {
        self.ranges.clear();
        let Some(any) = self.routes.first() else { return };
        let mut nested = self.routes.clone();
        nested.sort_unstable_by_key(|(start, len, _)| (*start, *len));
        ranges::fill(&mut self.ranges, any.0.block(0), 0, nested.into_iter());
    }
}

impl<K: Key> Default for Family<K> {
    fn default() -> Self {
        Family::Few(Few::new(Vec::new()))
    }
}

/// Longest first, so that the first match is the longest.
fn order<K: Key>((a, a_len, _): &(K, u8, u32), (b, b_len): (K, u8)) -> core::cmp::Ordering {
    b_len.cmp(a_len).then(a.cmp(&b))
}

impl<K: Key> Family<K> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Family::Few(few) => few.routes.len(),
            Family::Many(fib, _) => fib.len(),
        }
    }

    /// The number of the longest prefix that holds the address; 0 if none does.
    #[inline]
    pub(crate) fn lookup(&self, address: K) -> u32 {
        match self {
            Family::Few(few) => few.lookup(address),
            Family::Many(_, reader) => reader.lookup(address),
        }
    }

    /// The number of exactly this prefix.
    pub(crate) fn get(&self, address: K, len: u8) -> Option<u32> {
        let start = address.block(len).0;
        match self {
            Family::Few(few) => few.routes.get(few.position(start, len).ok()?).map(|r| r.2),
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
            Family::Few(few) => match few.position(start, len) {
                Ok(at) => Ok(few.change(|routes| {
                    routes.get_mut(at).map(|r| core::mem::replace(&mut r.2, number))
                })),
                Err(at) if few.routes.len() < MANY => {
                    few.change(|routes| routes.insert(at, (start, len, number)));
                    Ok(None)
                }
                Err(_) => {
                    let mut fib = Fib::with_advice(advice.0);
                    for (start, len, number) in &few.routes {
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
            Family::Few(few) => {
                let at = few.position(start, len).ok()?;
                Some(few.change(|routes| routes.remove(at).2))
            }
            Family::Many(fib, _) => {
                let old = fib.remove(start, len).ok()?;
                if fib.len() < FEW {
                    *self = Family::Few(Few::new(self.sorted()));
                }
                old
            }
        }
    }

    /// Every prefix with its number, longest first, then by address.
    pub(crate) fn sorted(&self) -> Vec<(K, u8, u32)> {
        match self {
            Family::Few(few) => few.routes.clone(),
            Family::Many(fib, _) => {
                let mut all: Vec<_> = fib.iter().collect();
                all.sort_unstable_by(|a, b| order(a, (b.0, b.1)));
                all
            }
        }
    }
}
