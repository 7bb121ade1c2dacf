//! The Internet checksum of a chain, from partial sums stored when its bytes were copied in.
//!
//! ```text
//!   storage  │ unit 0 │ unit 1 │ unit 2 │ unit 3 │ ...      UNIT_BYTES each
//!   entries  │ sum    │ sum    │ none   │ sum    │          two bytes each, separate from the slab
//!                 ├──── a segment ───────────┤
//!             read    known     read      unit minus the rest
//! ```
//!
//! [`write`] copies and sums in one pass. A unit has a known sum from the write that reaches its end until
//! one of its bytes changes. [`Chain::sum`] adds the known sums and reads the rest: units without a sum, and
//! the smaller part of a unit that the segment covers partly. A segment, retransmitted or not, reads half a
//! unit on average.
//!
//! Source: RFC 1071 section 2 (the sum is associative, and the sum at an odd offset is byte-swapped).

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use core::ops::Range;

use crate::wire::checksum::{Sum, UNIT_BYTES, UnitSum, copy_and_sum_units};

use crate::mbuf::chain::copy;
use crate::mbuf::{Chain, Mbuf};

/// A sum and its cost.
#[derive(Clone, Copy, Default, Debug)]
pub struct Summed {
    /// The sum of the bytes. The sum of zeroes may be 0xffff: see `Sum::without_back`.
    pub sum: Sum,
    /// Bytes that were read to compute it.
    pub read_bytes: usize,
}

impl Summed {
    fn read(&mut self, bytes: &[u8]) {
        self.sum.add_bytes(bytes);
        self.read_bytes += bytes.len();
    }

    /// Adds the bytes `part` of a unit with a known sum.
    fn add_part(&mut self, known: UnitSum, unit: &[u8; UNIT_BYTES], part: Range<usize>) {
        if part.len() == UNIT_BYTES {
            return self.sum.append(known.into());
        }
        let (front, rest) = unit.split_at(part.start.min(UNIT_BYTES));
        let (part, back) = rest.split_at(part.len().min(rest.len()));
        if part.len() <= UNIT_BYTES / 2 {
            return self.read(part);
        }
        let (mut before, mut behind) = (Summed::default(), Summed::default());
        before.read(front);
        behind.read(back);
        self.sum.append(Sum::from(known).without_back(behind.sum).without_front(before.sum));
        self.read_bytes += before.read_bytes + behind.read_bytes;
    }

    /// Adds volatile bytes, which are copied to a local buffer part by part.
    #[cold]
    fn add_volatile(&mut self, m: &Mbuf, range: Range<usize>) {
        let mut part = [0; 1024];
        let mut at = range.start;
        while at < range.end {
            let most = part.len().min(range.end - at);
            let n = m.copy_to(at, part.get_mut(..most).unwrap_or_default());
            if n == 0 {
                return;
            }
            self.read(part.get(..n).unwrap_or_default());
            at += n;
        }
    }

    /// Adds the bytes `range` of a segment.
    fn add(&mut self, m: &Mbuf, range: Range<usize>) {
        if m.is_volatile() {
            return self.add_volatile(m, range);
        }
        let bytes = m.as_slice();
        if !m.keeps_sums() {
            return self.read(bytes.get(range).unwrap_or_default());
        }
        let start = m.headroom();
        let mut at = range.start;
        while at < range.end {
            let (index, within) = ((start + at) / UNIT_BYTES, (start + at) % UNIT_BYTES);
            let n = (UNIT_BYTES - within).min(range.end - at);
            match m.known_unit(index) {
                Some((known, unit)) => self.add_part(known, unit, within..within + n),
                None => self.read(bytes.get(at..at + n).unwrap_or_default()),
            }
            at += n;
        }
    }
}

impl Chain {
    /// The one's complement sum of the bytes `range`, limited to the chain. Units whose sums were stored
    /// when they were copied in ([`Pool::keep_sums`](crate::mbuf::Pool::keep_sums)) are not read again.
    pub fn sum(&self, range: Range<usize>) -> Summed {
        let mut summed = Summed::default();
        let mut at = 0;
        for m in self.iter() {
            let from = range.start.saturating_sub(at).min(m.len());
            let to = range.end.saturating_sub(at).min(m.len());
            if from < to {
                summed.add(m, from..to);
            }
            at += m.len();
            if at >= range.end {
                break;
            }
        }
        summed
    }
}

/// Overwrites bytes of a segment at `from`, updates its sums, and returns how many bytes fitted. `None` if
/// the segment is shared or external.
pub(crate) fn write(m: &mut Mbuf, from: usize, bytes: &[u8]) -> Option<usize> {
    if !m.keeps_sums() {
        return Some(copy(bytes, m.as_mut_slice()?.get_mut(from..)?));
    }
    let n = bytes.len().min(m.len().saturating_sub(from));
    let at = m.headroom() + from;
    let (storage, entries) = m.summed_mut()?;
    write_units(storage, entries, at, bytes.get(..n)?)?;
    Some(n)
}

/// Copies `bytes` to `at`: whole units with their sums in one pass, and a partial unit at each end.
fn write_units(
    storage: &mut [u8],
    entries: &mut [Option<UnitSum>],
    at: usize,
    bytes: &[u8],
) -> Option<()> {
    let lead_bytes = (at.next_multiple_of(UNIT_BYTES) - at).min(bytes.len());
    let (lead, rest) = bytes.split_at(lead_bytes);
    let (whole, tail) = rest.split_at(rest.len() / UNIT_BYTES * UNIT_BYTES);
    write_part(storage, entries, at, lead)?;
    let at = at + lead_bytes;
    let (first, end) = (at / UNIT_BYTES, at + whole.len());
    copy_and_sum_units(storage.get_mut(at..end)?, whole, entries.get_mut(first..)?);
    write_part(storage, entries, end, tail)
}

/// Copies bytes within one unit. Its sum is computed if they reach its end, and cleared otherwise.
fn write_part(
    storage: &mut [u8],
    entries: &mut [Option<UnitSum>],
    at: usize,
    bytes: &[u8],
) -> Option<()> {
    if bytes.is_empty() {
        return Some(());
    }
    let (index, within) = (at / UNIT_BYTES, at % UNIT_BYTES);
    let unit = storage.as_chunks_mut::<UNIT_BYTES>().0.get_mut(index)?;
    let space = unit.get_mut(within..within + bytes.len())?;
    space.copy_from_slice(bytes);
    let is_complete = within + bytes.len() == UNIT_BYTES;
    *entries.get_mut(index)? = is_complete.then(|| UnitSum::of(unit));
    Some(())
}

#[cfg(test)]
mod tests;
