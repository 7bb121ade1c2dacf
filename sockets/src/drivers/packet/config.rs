//! The interface of a packet socket.

use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use fulmar_stack::base::EtherAddr;

use crate::drivers::OpenError;

/// The interface, and the stack's address and MTU on it.
///
/// ```no_run
/// use fulmar::device::EtherAddr;
/// use fulmar::devices::{PacketConfig, PacketSocket};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = PacketConfig {
///     interface: "eth0".to_owned(),
///     ether: Some(EtherAddr([2, 0, 0, 0, 0, 7])),
///     ..PacketConfig::default()
/// };
/// let device = PacketSocket::open(&config)?;
/// # drop(device);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PacketConfig {
    /// Name of an Ethernet interface that exists.
    pub interface: String,
    /// Ethernet address of the stack; `None`: derived from the interface's, but different.
    pub ether: Option<EtherAddr>,
    /// Largest IP packet in bytes; `None`: the interface's MTU.
    pub mtu: Option<usize>,
    /// As [`TapConfig::predict`](crate::drivers::tap::TapConfig::predict).
    pub predict: bool,
    /// Fails with `ResourceBusy` while another program of the network namespace has the interface in this way: a second
    /// stack with the same address would reset the connections of the first. [`devices::open`](crate::devices::open) sets it
    /// for a plain name.
    pub exclusive: bool,
}

impl Default for PacketConfig {
    /// An empty interface name, which is to be set; `predict` is true.
    fn default() -> PacketConfig {
        PacketConfig {
            interface: String::new(),
            ether: None,
            mtu: None,
            predict: true,
            exclusive: false,
        }
    }
}

impl PacketConfig {
    /// Marks the interface as this program's if it is to be so, by an abstract socket name: it belongs to the network
    /// namespace, and is freed with the process. `None`: others may use it, or the system has no such names.
    pub(super) fn claim(&self) -> Result<Option<UnixListener>, OpenError> {
        if !self.exclusive {
            return Ok(None);
        }
        let interface = &self.interface;
        let name = SocketAddr::from_abstract_name(format!("fulmar-interface-{interface}"));
        match name.and_then(|name| UnixListener::bind_addr(&name)) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => Err(OpenError::new(
                format!("cannot open {interface}"),
                ErrorKind::ResourceBusy.into(),
                format!(
                    "another program has a stack there; end it, or open `packet:{interface}` and give this stack an \
                     address of its own"
                ),
            )),
            claimed => Ok(claimed.ok()),
        }
    }
}
