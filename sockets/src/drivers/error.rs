//! Why a device could not be opened, for a person to read.

use std::io;

/// A device could not be set up. `Display` is one sentence that says what to do.
///
/// ```
/// use fulmar::devices;
///
/// // Longer than the name of an interface.
/// let error = devices::open("tap:sixteen-letters-").err().expect("it is refused");
/// assert_eq!(error.source.kind(), std::io::ErrorKind::InvalidInput);
/// eprintln!("error: {error}");
/// ```
#[derive(Debug)]
pub struct OpenError {
    /// The operation that failed, as in "cannot open /dev/net/tun".
    pub what: String,
    /// The kernel's error.
    pub source: io::Error,
    /// Advice for the user.
    pub advice: String,
    step: Step,
}

/// The object that could not be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// A device node.
    Node,
    /// A device node that is another device's.
    OtherDevice,
    /// Anything else.
    Other,
}

impl OpenError {
    /// An error of these parts.
    pub fn new(what: impl Into<String>, source: io::Error, advice: impl Into<String>) -> OpenError {
        OpenError { what: what.into(), source, advice: advice.into(), step: Step::Other }
    }

    /// The same error, of opening a device node.
    pub(crate) fn of_node(self) -> OpenError {
        OpenError { step: Step::Node, ..self }
    }

    /// The same error, of a device node that belongs to another device.
    pub(crate) fn of_other_device(self) -> OpenError {
        OpenError { step: Step::OtherDevice, ..self }
    }

    /// Whether there is no device node, it may not be opened, the kernel has no driver for it, or it is another device's:
    /// a device that needs no node (`packet`) may serve instead.
    pub fn is_without_node(&self) -> bool {
        const OF_NODE: [i32; 7] = [
            libc::ENOENT,
            libc::ENOTDIR,
            libc::EISDIR,
            libc::EACCES,
            libc::EPERM,
            libc::ENODEV,
            libc::ENXIO,
        ];
        match self.step {
            Step::Node => OF_NODE.contains(&self.errno()),
            Step::OtherDevice => true,
            Step::Other => false,
        }
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

/// Has the same sentence, and the kind of the kernel's error.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_cannot_be_opened_is_missing() {
        let error = |errno| OpenError::new("x", io::Error::from_raw_os_error(errno), "y");
        for errno in [libc::ENOENT, libc::EACCES, libc::EPERM, libc::ENXIO] {
            assert!(error(errno).of_node().is_without_node(), "{errno}");
            assert!(!error(errno).is_without_node(), "{errno} of another step");
        }
        assert!(!error(libc::EMFILE).of_node().is_without_node());
    }
}
