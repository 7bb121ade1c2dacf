//! Sockets of [fulmar] for tokio.
//!
//! A [`Net`] is a stack whose [driver](fulmar::Driver) is a task of the runtime: the worker that runs the task receives,
//! runs timers and wakes the tasks of sockets, so that a byte crosses no thread between the device and the program.
//! Its sockets have the names and the shapes of `tokio::net`.
//!
//! ```
//! use fulmar::{Stack, devices};
//! use fulmar_tokio::{Net, TcpListener, TcpStream};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> std::io::Result<()> {
//! let (a, b) = devices::link_pair()?;
//! let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?)?;
//! let client = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?)?;
//! let listener = TcpListener::bind(&server, "10.0.0.1:80").await?;
//! tokio::spawn(async move {
//!     let (mut stream, _) = listener.accept().await?;
//!     stream.write_all(b"hello").await
//! });
//! let mut stream = TcpStream::connect(&client, "10.0.0.1:80").await?;
//! let mut word = String::new();
//! stream.read_to_string(&mut word).await?;
//! assert_eq!(word, "hello");
//! # Ok(())
//! # }
//! ```
//!
//! - **Runtimes**: `current_thread` is the fastest: all tasks of the stack run on the thread that runs the stack. With
//!   several workers the driver moves between them as other tasks do. A stack of several shards has one [`Net`] for each
//!   ([`fulmar::Stack::on_shard`]).
//! - **A task that blocks** the worker of the driver delays the stack for 100 ms; then the stack's own thread runs it until
//!   the driver turns again. It also does so while no thread runs the runtime.
//! - **The end**: the driver ends with the last handle and the last socket. What a socket accepted is delivered meanwhile,
//!   for at most [`fulmar::Builder::exit_drain`]. A runtime that is shut down earlier drops the driver; then the stack
//!   runs in its own thread until it is dropped.
//! - **Not as in `tokio::net`**: names are resolved by the host. A socket has no descriptor of the host: no `into_std`, no
//!   `from_std`. [`TcpStream`] has no `ready` and no vectored `try_` calls; [`UdpSocket`] has no `try_` calls, no `peek`, and
//!   `poll_send_ready` instead of `writable`. `get_ref` leads to the blocking socket: a call that waits there stops the
//!   driver.
//! - **Features**: `hyper` (a connector for its clients), `axum` (its `Listener`), `tonic` (its `Connected`), `quinn` (its
//!   `AsyncUdpSocket`, with GSO, GRO and ECN).

// docs.rs says of each item which feature it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![warn(unreachable_pub, clippy::exhaustive_enums)]

mod forward;
mod frameworks;
pub mod guide;
mod net;
mod packets;
mod relay;
mod tcp;
mod udp;

pub use forward::{PendingConnection, UdpFlow, forward, forward_udp};
#[cfg(feature = "hyper")]
pub use frameworks::hyper::Connector;
#[cfg(feature = "quinn")]
pub use frameworks::quinn::QuinnSocket;
pub use net::Net;
pub use packets::{PacketReceiver, PacketSender, channel};
pub use relay::relay;
pub use tcp::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, TcpListener, TcpStream, WriteHalf};
pub use udp::UdpSocket;
