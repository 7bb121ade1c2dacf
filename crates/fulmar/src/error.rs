//! Why a stack could not be built.

use std::{fmt, io};

/// Why a stack could not be built. `Display` is one sentence that says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// No device was given.
    NoDevice,
    /// More devices than a stack can have shards.
    TooManyDevices(usize),
    /// The devices are not queues of one interface: their station addresses or largest packets differ.
    MixedDevices,
    /// No address was given.
    NoAddress,
    /// No eventfd or thread could be made.
    Host(io::Error),
    /// Addresses, routes or memory.
    Stack(fulmar_stack::SetupError),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::NoDevice => {
                f.write_str("the stack has no device; give it one with Builder::device")
            }
            SetupError::TooManyDevices(n) => write!(
                f,
                "{n} devices are too many: a stack has at most {} shards, one for each",
                fulmar_stack::MAX_SHARDS
            ),
            SetupError::MixedDevices => f.write_str(
                "the devices differ in station address or MTU: give Builder::devices the queues of \
                 one interface, and every other interface a stack of its own",
            ),
            SetupError::NoAddress => {
                f.write_str("the stack has no address; give it one with Builder::address")
            }
            SetupError::Host(e) => {
                write!(f, "no thread or descriptor is left: {e}; see `ulimit -n` and `ulimit -u`")
            }
            SetupError::Stack(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for SetupError {}

impl From<fulmar_stack::SetupError> for SetupError {
    fn from(e: fulmar_stack::SetupError) -> Self {
        SetupError::Stack(e)
    }
}
