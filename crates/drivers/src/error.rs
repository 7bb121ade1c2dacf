//! Why a device could not be opened, for a person to read.

use std::io;

/// A device could not be set up. `Display` and `Debug` are one sentence that says what to do.
pub struct OpenError {
    /// What was tried, as in "cannot open /dev/net/tun".
    pub what: String,
    /// What the kernel answered.
    pub source: io::Error,
    /// What to do next.
    pub advice: String,
}

impl OpenError {
    /// An error of these parts.
    pub fn new(what: impl Into<String>, source: io::Error, advice: impl Into<String>) -> OpenError {
        OpenError { what: what.into(), source, advice: advice.into() }
    }

    /// The error number, 0 if the failure was not the kernel's.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.source, self.advice)
    }
}

/// The sentence too: it is what `fn main() -> Result` prints.
impl std::fmt::Debug for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// With the same sentence, and the kind of what the kernel answered.
impl From<OpenError> for io::Error {
    fn from(e: OpenError) -> io::Error {
        io::Error::new(e.source.kind(), e)
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
