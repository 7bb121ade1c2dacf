//! Why a stack could not be built.

use core::fmt;

use crate::ip::ConfigError;

use crate::shard::config::MIN_BUDGET_BYTES;

/// Why a stack could not be built. `Display` says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// The largest packet asked for exceeds the device's.
    Mtu {
        /// [`StackConfig::mtu`](crate::shard::StackConfig::mtu), bytes.
        asked: usize,
        /// The device's, bytes.
        device: usize,
    },
    /// A shard's part of the byte budget is below [`MIN_BUDGET_BYTES`](crate::shard::MIN_BUDGET_BYTES).
    Budget {
        /// The shard's part, bytes.
        bytes: usize,
    },
    /// An address or a route makes no sense.
    Ip(crate::ip::ConfigError),
    /// The buffers could not be obtained.
    Pool(crate::mbuf::PoolError),
    /// The configuration has no secrets, from which every key is derived.
    NoSecrets,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Mtu { asked, device } => write!(
                f,
                "an MTU of {asked} bytes exceeds the device's MTU of {device}: raise the device's MTU first"
            ),
            SetupError::Budget { bytes } => write!(
                f,
                "a budget of {bytes} bytes is too small: each shard needs at least {MIN_BUDGET_BYTES}"
            ),
            SetupError::Ip(e) => write!(f, "{} cannot be used: {e}", subject(e)),
            SetupError::Pool(e) => write!(f, "cannot allocate the stack's memory: {e}"),
            SetupError::NoSecrets => {
                f.write_str("the stack has no secrets; set StackConfig::secrets to 32 random bytes")
            }
        }
    }
}

/// What of the configuration an error of the IP layer is about.
fn subject(e: &ConfigError) -> &'static str {
    match e {
        ConfigError::EtherAddr => "the device",
        ConfigError::Mtu { .. } => "the stack's MTU",
        ConfigError::Address(_) | ConfigError::PrefixLength(_) => "the stack's addresses",
        _ => "the stack's routes",
    }
}

impl core::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            SetupError::Ip(e) => Some(e),
            SetupError::Pool(e) => Some(e),
            _ => None,
        }
    }
}
