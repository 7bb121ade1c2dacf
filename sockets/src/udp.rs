//! UDP: many datagrams in one call, and path MTUs.

/// The treatment of datagrams that are too long for the path:
/// [`UdpSocket::set_mtu_discovery`](crate::UdpSocket::set_mtu_discovery).
///
/// ```
/// # use fulmar::{Stack, UdpSocket, devices};
/// use fulmar::udp::MtuDiscovery;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let socket = UdpSocket::bind(&stack, "10.0.0.1:4433")?;
/// socket.set_mtu_discovery(MtuDiscovery::Probe)?;
/// let too_long = socket.send_to(&[0; 1473], "10.0.0.2:4433").unwrap_err();
/// assert_eq!(too_long.raw_os_error(), Some(90)); // EMSGSIZE
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::MtuDiscovery;
/// Space for a datagram: [`UdpSocket::recv_many`](crate::UdpSocket::recv_many).
///
/// ```
/// # use fulmar::{Stack, UdpSocket, devices};
/// use fulmar::udp::RecvMessage;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let socket = UdpSocket::bind(&one, "10.0.0.1:53")?;
/// # UdpSocket::connected(&other, "10.0.0.1:53")?.send(b"question")?;
/// let mut buffers = [[0; 1500]; 8];
/// let mut messages = buffers.each_mut().map(|buffer| RecvMessage::new(buffer));
/// let count = socket.recv_many(&mut messages)?;
/// for message in &messages[..count] {
///     println!("{} bytes from {:?}", message.payload().len(), message.from());
/// }
/// # assert_eq!(messages[0].payload(), b"question");
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::RecvMessage;
/// A datagram, or a run of them: [`UdpSocket::send_many`](crate::UdpSocket::send_many).
///
/// ```
/// # use fulmar::{Stack, UdpSocket, devices};
/// use fulmar::udp::SendMessage;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let socket = UdpSocket::bind(&stack, "10.0.0.1:4433")?;
/// let to = "10.0.0.2:4433".parse()?;
/// let run = [7; 12_000];
/// // One datagram with a DSCP of its own, and ten of 1200 bytes each.
/// let messages = [SendMessage::new(b"first").to(to).tos(46 << 2), SendMessage::new(&run).to(to).segmented(1200)];
/// assert_eq!(socket.send_many(&messages)?, 2);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::SendMessage;
/// Finds the longest datagram that a path takes, over a socket with [`MtuDiscovery::Probe`] (RFC 8899).
pub use fulmar_stack::udp::Plpmtud;
/// The phase of a search: [`Plpmtud::state`].
///
/// ```
/// use std::time::Duration;
/// use fulmar::udp::{Plpmtud, PlpmtudState};
///
/// let mut search = Plpmtud::new(1472);
/// assert_eq!(search.state(), PlpmtudState::Base);
/// let probe = search.poll_probe(Duration::ZERO).expect("the base size is probed for");
/// search.on_probe_acked(probe, Duration::from_millis(20));
/// assert_eq!(search.state(), PlpmtudState::Searching);
/// ```
pub use fulmar_stack::udp::PlpmtudState;
