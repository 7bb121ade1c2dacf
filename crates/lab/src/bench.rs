//! stub while compiling
use crate::peer::Report;
/// One run of one way.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The end under test.
    pub near: Report,
    /// The other end.
    pub far: Report,
    /// What was counted, by name.
    pub counts: Vec<(&'static str, u64)>,
}
impl Sample {
    /// A sample of the two ends of a stream.
    pub fn of_ends(near: Report, far: Report) -> Sample {
        Sample { near, far, counts: Vec::new() }
    }
    /// Adds a count.
    #[must_use]
    pub fn count(mut self, name: &'static str, n: u64) -> Sample {
        self.counts.push((name, n));
        self
    }
}
