//! Why a stack could not be built.

use std::{fmt, io};

use crate::runtime::StartError;
use fulmar_stack::socket::SocketError;

/// Why a stack could not be built. `Display` is one sentence that says what to do.
///
/// ```
/// # use fulmar::devices;
/// use fulmar::{SetupError, Stack};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// match Stack::builder().device(device).build() {
///     Ok(stack) => println!("{} runs", stack.name()),
///     Err(SetupError::NoAddress) => println!("which address?"),
///     Err(other) => eprintln!("error: {other}"),
/// }
/// # Ok(())
/// # }
/// ```
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
    /// The configuration cannot be used: addresses, routes, MTU or memory.
    Config(fulmar_stack::shard::SetupError),
    /// The system gives no random numbers: getrandom(2) failed.
    Random(io::Error),
    /// The system refuses a descriptor or a thread.
    Host(io::Error),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::NoDevice => {
                f.write_str("the stack has no device; give it one with Builder::device")
            }
            SetupError::TooManyDevices(n) => write!(
                f,
                "too many devices ({n}): a stack has at most {} shards, one per device",
                fulmar_stack::shard::MAX_SHARDS
            ),
            SetupError::MixedDevices => f.write_str(
                "the devices differ in Ethernet address or MTU: pass Builder::devices the queues of one interface, \
                 and build a separate stack for each interface",
            ),
            SetupError::NoAddress => {
                f.write_str("the stack has no address; give it one with Builder::address")
            }
            SetupError::Config(e) => e.fmt(f),
            SetupError::Random(e) => write!(
                f,
                "cannot read random bytes for the stack's secrets: {e}; allow the process to call getrandom(2)"
            ),
            SetupError::Host(e) => write!(
                f,
                "cannot create a thread or a descriptor: {e}; check `ulimit -n` and `ulimit -u`"
            ),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its sentence is this one.
            SetupError::Config(e) => e.source(),
            SetupError::Random(e) | SetupError::Host(e) => Some(e),
            _ => None,
        }
    }
}

/// Has the same sentence; the kind is `InvalidInput` or the system's error.
impl From<SetupError> for io::Error {
    fn from(e: SetupError) -> io::Error {
        let kind = match &e {
            SetupError::Random(e) | SetupError::Host(e) => e.kind(),
            _ => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, e)
    }
}

/// With the same sentence, as `InvalidInput`.
impl From<crate::ParseCidrError> for io::Error {
    fn from(e: crate::ParseCidrError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, e)
    }
}

impl From<StartError> for SetupError {
    fn from(e: StartError) -> Self {
        match e {
            StartError::Shard(e) => SetupError::Config(e),
            StartError::Random(e) => SetupError::Random(e),
            StartError::Host(e) => SetupError::Host(e),
        }
    }
}

/// An argument that makes no sense, and why.
pub(crate) fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why.into())
}

/// A socket's error as `std::io` has it: with the errno that the kernel would give.
pub(super) fn to_io(e: SocketError) -> io::Error {
    io::Error::from_raw_os_error(e.errno())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_of_an_error_shows_its_variant_or_type() {
        let errors: [(&str, Box<dyn std::error::Error>); 5] = [
            ("NoAddress", Box::new(SetupError::NoAddress)),
            ("TooManyDevices(99)", Box::new(SetupError::TooManyDevices(99))),
            ("ParseCidrError", Box::new("10.0.0.1".parse::<crate::Cidr>().unwrap_err())),
            ("ParseSpecError", Box::new("tun:".parse::<crate::api::devices::Spec>().unwrap_err())),
            (
                "RecvError",
                Box::new(crate::zero_copy::RecvError::from(io::Error::other("a reason"))),
            ),
        ];
        for (name, error) in errors {
            assert!(format!("{error:?}").starts_with(name), "{error:?}");
        }
    }
}
