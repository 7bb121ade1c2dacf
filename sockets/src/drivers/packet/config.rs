//! The interface of a packet socket.

use fulmar_stack::base::EtherAddr;

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
}

impl Default for PacketConfig {
    /// An empty interface name, which is to be set; `predict` is true.
    fn default() -> PacketConfig {
        PacketConfig { interface: String::new(), ether: None, mtu: None, predict: true }
    }
}
