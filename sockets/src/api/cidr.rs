//! An address with its prefix length, as people write it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use fulmar_stack::ip::{IfAddr, Prefix};

/// An address and the length of its prefix: `10.0.0.2/24`, `fd00::2/64`.
///
/// ```
/// # use fulmar::Cidr;
/// let address: Cidr = "10.77.0.2/24".parse()?;
/// assert_eq!(address.prefix_len, 24);
/// assert_eq!(address.network().to_string(), "10.77.0.0/24");
/// # Ok::<(), fulmar::ParseCidrError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cidr {
    /// The address, host bits included.
    pub address: IpAddr,
    /// Bits of the prefix. More than the address has count as all of them.
    pub prefix_len: u8,
}

impl Cidr {
    /// The network of the address: its host bits are zero.
    pub fn network(self) -> Cidr {
        let prefix = Prefix::from(self);
        Cidr { address: prefix.addr, prefix_len: prefix.len }
    }
}

/// The text is not an address with a prefix length.
///
/// ```
/// use fulmar::{Cidr, ParseCidrError};
///
/// let error: ParseCidrError = "10.77.0.2".parse::<Cidr>().unwrap_err();
/// assert!(error.to_string().starts_with("invalid address `10.77.0.2`"));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseCidrError(String);

impl fmt::Display for ParseCidrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "invalid address `{}`: expected an address with a prefix length (IPv4 0-32, IPv6 0-128), such as 10.77.0.2/24",
            self.0
        )
    }
}

impl std::error::Error for ParseCidrError {}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    fn from_str(text: &str) -> Result<Cidr, ParseCidrError> {
        let parse = || {
            let (address, len) = text.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let prefix_len: u8 = len.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            (prefix_len <= most).then_some(Cidr { address, prefix_len })
        };
        parse().ok_or_else(|| ParseCidrError(text.to_owned()))
    }
}

impl From<Cidr> for IfAddr {
    fn from(cidr: Cidr) -> IfAddr {
        IfAddr { addr: cidr.address, prefix_len: cidr.prefix_len }
    }
}

/// The network of the address.
impl From<Cidr> for Prefix {
    fn from(cidr: Cidr) -> Prefix {
        let most = if cidr.address.is_ipv4() { 32 } else { 128 };
        Prefix::new(cidr.address, cidr.prefix_len.min(most))
            .expect("invariant: the length is at most the address's")
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_with_a_fitting_prefix_length_is_one() {
        let c: Cidr = "10.77.0.2/24".parse().unwrap();
        assert_eq!(c.to_string(), "10.77.0.2/24");
        assert_eq!(c.network().to_string(), "10.77.0.0/24");
        let too_long = Cidr { prefix_len: 99, ..c };
        assert_eq!(too_long.network().to_string(), "10.77.0.2/32");
        assert_eq!("fd77::2/64".parse::<Cidr>().unwrap().prefix_len, 64);
        for wrong in ["10.77.0.2", "10.77.0.2/33", "fd77::2/129", "a/8", "1.2.3.4/", "/8", ""] {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }
}
