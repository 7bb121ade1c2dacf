//! ICMP: the answer to a ping, echo requests to addresses of other hosts, and errors that a gateway sends.

pub use crate::api::echo::{EchoRequest, EchoSocket};
pub use crate::api::stack::Echo;
/// Why a packet cannot be carried: [`EchoSocket::send_icmp_error`],
/// [`UdpSocket::send_icmp_error`](crate::UdpSocket::send_icmp_error).
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// use fulmar::icmp::{EchoSocket, IcmpError};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let gateway = Stack::builder().device(a).address("10.0.0.1/24".parse()?).any_ip(true).unlisted().build()?;
/// # let guest = Stack::builder().device(b).address("10.0.0.2/24".parse()?).gateway("10.0.0.1".parse()?).unlisted().build()?;
/// let echo = EchoSocket::open(&gateway)?;
/// # let guest = std::thread::spawn(move || guest.ping("192.0.2.1".parse().unwrap(), 56, Duration::from_secs(5)));
/// let request = echo.recv()?;
/// // Code 1: the host is unreachable. In the name of the gateway.
/// echo.send_icmp_error(&request, IcmpError::Unreachable { code: 1 }, Some("10.0.0.1".parse()?))?;
/// # assert_eq!(guest.join().unwrap().unwrap_err().kind(), std::io::ErrorKind::HostUnreachable);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::ip::SentError as IcmpError;
