//! An address with its prefix length, as people write it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use fulmar_stack::ip::{IfAddr, Prefix};

/// An address and the length of its prefix: `10.0.0.2/24`, `fd00::2/64`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cidr {
    /// The address, host bits included.
    pub address: IpAddr,
    /// Bits of the prefix.
    pub prefix_len: u8,
}

/// The text is not an address with a prefix length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseCidrError(String);

impl fmt::Display for ParseCidrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "invalid address `{}`: expected an address with a prefix length, such as 10.77.0.2/24",
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

/// The network of the address, without its host bits. `prefix_len` above the length of the address counts as that.
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
        let network: Prefix = "10.77.0.0/24".parse().unwrap();
        assert_eq!(Prefix::from(c), network);
        assert_eq!("10.77.0.9/24".parse(), Ok(network));
        assert!("10.77.0.0/33".parse::<Prefix>().is_err() && "a".parse::<Prefix>().is_err());
        assert_eq!("fd77::2/64".parse::<Cidr>().unwrap().prefix_len, 64);
        for wrong in ["10.77.0.2", "10.77.0.2/33", "fd77::2/129", "a/8", "1.2.3.4/", "/8", ""] {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }
}
