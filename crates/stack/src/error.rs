//! Why a stack could not be built.

use std::fmt;

/// Why a stack could not be built. `Display` says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// An address or a route makes no sense.
    Ip(fulmar_ip::ConfigError),
    /// The buffers could not be obtained.
    Pool(fulmar_mbuf::PoolError),
    /// The operating system gives no random numbers.
    Random(std::io::Error),
    /// An eventfd or a thread could not be made.
    Host(std::io::Error),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Ip(e) => write!(f, "the stack's addresses cannot be used: {e}"),
            SetupError::Pool(e) => write!(f, "the stack's memory cannot be had: {e}"),
            SetupError::Random(e) => write!(
                f,
                "the stack's secrets cannot be drawn, since the system gives no random bytes: {e}; \
                 let the process call getrandom(2)"
            ),
            SetupError::Host(e) => write!(
                f,
                "the stack's service thread could not be started: {e}; \
                 see `ulimit -n` and `ulimit -u`"
            ),
        }
    }
}

impl std::error::Error for SetupError {}
