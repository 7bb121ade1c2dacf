//! Counts of the streams that a guest has not ended: whether a guest that has exited has anything undelivered, without
//! a walk over all flows.

/// The state of the guest's stream of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Stream {
    /// Its end was passed on, or its connection is not established yet.
    #[default]
    Ended,
    /// More may come.
    Open,
    /// The gateway holds bytes of it, for which the other side has no space.
    Held,
}

/// The bytes of all streams that may be undelivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Undelivered {
    /// Nothing: all streams have ended.
    Nothing,
    /// Bytes that the guest's kernel may still send.
    MayCome,
    /// Bytes that the gateway holds.
    Held,
}

/// The streams that have not ended.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Streams {
    open: usize,
    held: usize,
}

impl Streams {
    /// Counts a stream under its new state instead of `counted`.
    pub(crate) fn recount(&mut self, state: Stream, counted: &mut Stream) {
        if let Some(count) = self.count_of(*counted) {
            *count -= 1;
        }
        if let Some(count) = self.count_of(state) {
            *count += 1;
        }
        *counted = state;
    }

    fn count_of(&mut self, stream: Stream) -> Option<&mut usize> {
        match stream {
            Stream::Ended => None,
            Stream::Open => Some(&mut self.open),
            Stream::Held => Some(&mut self.held),
        }
    }

    /// The state of undelivered bytes.
    pub(crate) fn undelivered(&self) -> Undelivered {
        match (self.open, self.held) {
            (0, 0) => Undelivered::Nothing,
            (_, 0) => Undelivered::MayCome,
            _ => Undelivered::Held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_stream_is_waited_for_independently_of_the_others() {
        let (mut streams, mut counted) = (Streams::default(), [Stream::Ended; 3]);
        let mut all = |kinds: [Stream; 3]| {
            counted.iter_mut().zip(kinds).for_each(|(c, is)| streams.recount(is, c));
            streams.undelivered()
        };
        assert_eq!(all([Stream::Ended; 3]), Undelivered::Nothing);
        assert_eq!(all([Stream::Open, Stream::Ended, Stream::Open]), Undelivered::MayCome);
        assert_eq!(all([Stream::Open, Stream::Held, Stream::Ended]), Undelivered::Held);
        assert_eq!(all([Stream::Held, Stream::Held, Stream::Open]), Undelivered::Held);
        assert_eq!(all([Stream::Open; 3]), Undelivered::MayCome);
        assert_eq!(all([Stream::Ended; 3]), Undelivered::Nothing);
        assert_eq!(streams, Streams::default());
    }
}
