//! The reader of the guest's datagrams to a name ([`first`](crate::first)), and the datagrams that it holds.

use std::borrow::Cow;

use fulmar_stack::base::Instant;
use fulmar_stack::udp::Datagram;

use super::initials::{Initials, Owner};
use crate::first::{Datagrams, Decision, Expected};

/// The reader of a flow.
pub(super) struct FirstBytes {
    reader: Datagrams,
    /// Datagrams that wait until a ClientHello is whole.
    pub held: Vec<Vec<u8>>,
    /// Connections that are known not to be another flow's.
    claimed: usize,
    /// Bytes that are counted for all flows together.
    pub counted: usize,
}

impl FirstBytes {
    pub(super) fn new(expected: Expected) -> Box<FirstBytes> {
        let reader = Datagrams::new(expected);
        Box::new(FirstBytes { reader, held: Vec::new(), claimed: 0, counted: 0 })
    }

    /// Reads the guest's next datagram.
    pub(super) fn read(&mut self, datagram: &[u8]) -> Decision {
        self.reader.read(datagram)
    }

    /// The destination IDs of QUIC connections whose ClientHello has passed.
    pub(super) fn connection_ids(&self) -> impl Iterator<Item = &[u8]> {
        self.reader.connection_ids()
    }

    /// Whether a connection whose ClientHello has passed since the last time is another flow's.
    pub(super) fn conflicts(&mut self, initials: &Initials, owner: Owner, now: Instant) -> bool {
        let passed = self.reader.connection_ids().count();
        if passed == self.claimed {
            return false;
        }
        let is_own = initials.claim(self.reader.connection_ids(), owner, now);
        if is_own {
            self.claimed = passed;
        }
        !is_own
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.reader.memory_bytes() + self.held.iter().map(Vec::len).sum::<usize>()
    }
}

/// The payload in one piece.
pub(super) fn bytes_of(d: &Datagram) -> Cow<'_, [u8]> {
    let mut parts = d.payload.slices().filter(|slice| !slice.is_empty());
    match (parts.next(), parts.next()) {
        (None, _) => Cow::Borrowed(&[]),
        (Some(whole), None) => Cow::Borrowed(whole),
        _ => Cow::Owned(d.payload.slices().flatten().copied().collect()),
    }
}

/// The datagrams of a run. An empty one is a datagram, too.
pub(super) fn cut(bytes: &[u8], each: Option<u16>) -> impl Iterator<Item = &[u8]> {
    let each = each.map_or(usize::MAX, |each| usize::from(each.max(1)));
    let count = bytes.len().div_ceil(each).max(1);
    (0..count).map(move |nth| {
        let rest = bytes.get(nth.saturating_mul(each)..).unwrap_or_default();
        rest.get(..each).unwrap_or(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_into_its_datagrams_and_an_empty_datagram_is_one() {
        let lengths = |bytes: &[u8], each| cut(bytes, each).map(<[u8]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[7; 5], Some(2)), [2, 2, 1]);
        assert_eq!(lengths(&[7; 4], Some(2)), [2, 2]);
        assert_eq!((lengths(&[7; 5], None), lengths(&[], None)), (vec![5], vec![0]));
    }
}
