//! The streams that a guest has not ended, counted. The counts say whether a guest that is gone has anything left,
//! without a walk over all flows.

/// How far the guest's stream of one connection is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Stream {
    /// Its end was passed on, or it is no stream yet.
    #[default]
    Ended,
    /// More may come.
    Open,
    /// Bytes wait here, for which the other side has no space.
    Held,
}

/// What is left of all streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rest {
    /// Nothing.
    Nothing,
    /// What may still come.
    MayCome,
    /// Bytes that wait here.
    Waits,
}

/// The streams that have not ended.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Streams {
    open: usize,
    held: usize,
}

impl Streams {
    /// A stream that was counted as one kind is another one from now on.
    pub fn recount(&mut self, is: Stream, counted: &mut Stream) {
        if let Some(count) = self.count_of(*counted) {
            *count -= 1;
        }
        if let Some(count) = self.count_of(is) {
            *count += 1;
        }
        *counted = is;
    }

    fn count_of(&mut self, stream: Stream) -> Option<&mut usize> {
        match stream {
            Stream::Ended => None,
            Stream::Open => Some(&mut self.open),
            Stream::Held => Some(&mut self.held),
        }
    }

    /// What is left.
    pub fn rest(&self) -> Rest {
        match (self.open, self.held) {
            (0, 0) => Rest::Nothing,
            (_, 0) => Rest::MayCome,
            _ => Rest::Waits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stream_that_is_held_is_waited_for_whatever_the_others_do() {
        let (mut streams, mut counted) = (Streams::default(), [Stream::Ended; 3]);
        let mut all = |kinds: [Stream; 3]| {
            counted.iter_mut().zip(kinds).for_each(|(c, is)| streams.recount(is, c));
            streams.rest()
        };
        assert_eq!(all([Stream::Ended; 3]), Rest::Nothing);
        assert_eq!(all([Stream::Open, Stream::Ended, Stream::Open]), Rest::MayCome);
        assert_eq!(all([Stream::Open, Stream::Held, Stream::Ended]), Rest::Waits);
        assert_eq!(all([Stream::Held, Stream::Held, Stream::Open]), Rest::Waits);
        assert_eq!(all([Stream::Open; 3]), Rest::MayCome);
        assert_eq!(all([Stream::Ended; 3]), Rest::Nothing);
        assert_eq!(streams, Streams::default());
    }
}
