//! Why a stack could not be built.

use core::fmt;

/// Why a stack could not be built. `Display` says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// An address or a route makes no sense.
    Ip(fulmar_ip::ConfigError),
    /// The buffers could not be obtained.
    Pool(fulmar_mbuf::PoolError),
    /// The configuration has no secrets, from which every key is derived.
    NoSecrets,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Ip(e) => write!(f, "the stack's addresses cannot be used: {e}"),
            SetupError::Pool(e) => write!(f, "the stack's memory cannot be had: {e}"),
            SetupError::NoSecrets => f.write_str(
                "the stack has no secrets; draw 32 random bytes for StackConfig::secrets",
            ),
        }
    }
}

impl core::error::Error for SetupError {}
