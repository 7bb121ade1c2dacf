//! TCP: flags of calls, what a connection is like, and the parts of its configuration and of a listener's options.

pub use crate::api::receive::RecvFlags;
pub use crate::api::send::SendFlags;
/// Offers each SYN to the program before it is answered:
/// [`ListenOptions::conditional_accept`](crate::ListenOptions::conditional_accept).
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{ListenOptions, Stack, TcpListener, devices};
/// use fulmar::tcp::ConditionalAccept;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let options = ConditionalAccept { timeout: Duration::from_secs(10), ..ConditionalAccept::default() };
/// let options = ListenOptions { conditional_accept: Some(options), ..ListenOptions::default() };
/// let listener = TcpListener::bind_with(&stack, "10.0.0.1:80", options)?;
/// # listener.set_nonblocking(true)?;
/// while let Ok(pending) = listener.pending() {
///     match pending.peer_addr().port() {
///         0..1024 => pending.refuse()?,
///         _ => drop(pending.accept()?),
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::ConditionalAccept;
/// Keys that servers of one address share: [`FastOpenOptions::keys`].
///
/// ```
/// use fulmar::tcp::{FastOpenKeys, FastOpenOptions};
///
/// # let (new, old) = ([1; 16], [2; 16]);
/// // Cookies of the old key are still taken.
/// let keys = FastOpenKeys::from_bytes(new, Some(old));
/// let options = FastOpenOptions { keys: Some(keys), ..FastOpenOptions::default() };
/// # assert!(options.keys.is_some());
/// ```
pub use fulmar_stack::shard::FastOpenKeys;
/// Takes the data of a SYN: [`ListenOptions::fast_open`](crate::ListenOptions::fast_open).
///
/// ```
/// # use fulmar::{ListenOptions, Stack, TcpListener, devices};
/// use fulmar::tcp::FastOpenOptions;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let fast_open = FastOpenOptions { backlog: 64, ..FastOpenOptions::default() };
/// let options = ListenOptions { fast_open: Some(fast_open), ..ListenOptions::default() };
/// let listener = TcpListener::bind_with(&stack, "10.0.0.1:80", options)?;
/// # assert_eq!(listener.stat()?.fast_open_limit, 64);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::FastOpenOptions;
/// The data of [`TcpStream::connect_first`](crate::TcpStream::connect_first).
///
/// ```
/// # use fulmar::{ConnectOptions, Stack, TcpListener, TcpStream, devices};
/// use fulmar::tcp::FirstData;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// let first = FirstData { bytes: b"hello", without_cookie: true };
/// let options = ConnectOptions::default();
/// let (stream, sent) = TcpStream::connect_first(&stack, &"10.0.0.1:80".parse()?, &options, first)?;
/// assert_eq!(sent, 5);
/// # drop(stream);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::FirstData;
/// The queues of a listener and their limits: [`TcpListener::stat`](crate::TcpListener::stat).
///
/// ```
/// # use fulmar::{Stack, TcpListener, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let listener = TcpListener::bind(&stack, "10.0.0.1:80")?;
/// let stat = listener.stat()?;
/// println!("{} of {} connections wait, {} SYNs dropped", stat.accept_queue, stat.accept_limit, stat.syns_dropped);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::ListenerStat;
/// When SYN cookies are sent: [`ListenOptions::syn_cookies`](crate::ListenOptions::syn_cookies).
///
/// ```
/// use fulmar::ListenOptions;
/// use fulmar::tcp::SynCookies;
///
/// // No cookies: a connection always has window scaling and SACK.
/// let options = ListenOptions { syn_cookies: SynCookies::Off, ..ListenOptions::default() };
/// # assert_ne!(options.syn_cookies, SynCookies::default());
/// ```
pub use fulmar_stack::shard::SynCookies;
/// The options of a SYN: [`PendingConnection::syn_options`](crate::PendingConnection::syn_options).
///
/// ```
/// # use fulmar::tcp::ConditionalAccept;
/// # use fulmar::{ConnectOptions, ListenOptions, Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let options = ListenOptions { conditional_accept: Some(ConditionalAccept::default()), ..ListenOptions::default() };
/// # let listener = TcpListener::bind_with(&server, "10.0.0.1:80", options)?;
/// # let _client = TcpStream::connect_nonblocking(&stack, &"10.0.0.1:80".parse()?, &ConnectOptions::default())?;
/// let pending = listener.pending()?;
/// let syn = pending.syn_options();
/// println!("MSS {:?}, SACK {}, ECN {}", syn.mss, syn.sack_permitted, syn.ecn);
/// # assert_eq!(syn.mss, Some(1460));
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::SynOptions;
/// The defaults of all connections of a stack: [`Builder::tcp`](crate::Builder::tcp).
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// use fulmar::tcp::TcpConfig;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let builder = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted();
/// let tcp = TcpConfig { user_timeout: Duration::from_secs(30), ..TcpConfig::default() };
/// let stack = builder.tcp(tcp).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::tcp::Config as TcpConfig;
/// Whether connections use ECN: [`TcpConfig::ecn`].
///
/// ```
/// use fulmar::tcp::{EcnPolicy, TcpConfig};
///
/// let config = TcpConfig { ecn: "ask".parse()?, ..TcpConfig::default() };
/// assert_eq!(config.ecn, EcnPolicy::Ask);
/// # Ok::<(), fulmar::tcp::UnknownEcnPolicy>(())
/// ```
pub use fulmar_stack::tcp::EcnPolicy;
/// The state of a connection: [`TcpStream::info`](crate::TcpStream::info).
///
/// ```
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// let info = stream.info()?;
/// println!("round trip {:?}, {} bytes in flight", info.rtt, info.in_flight_bytes);
/// println!("{} segments retransmitted", info.retransmits);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::tcp::Info as TcpInfo;
/// How a connection finds the size of its segments: [`TcpConfig::mtu_probing`].
///
/// ```
/// use fulmar::tcp::{MtuProbing, TcpConfig};
///
/// // A path that is known to drop large packets silently.
/// let config = TcpConfig { mtu_probing: MtuProbing::Always, ..TcpConfig::default() };
/// # assert_eq!(config.mtu_probing, MtuProbing::Always);
/// ```
pub use fulmar_stack::tcp::MtuProbing;
/// BBR's model of the path: [`TcpInfo::model`].
///
/// ```
/// # use fulmar::{CongestionControl, SocketOptions, Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// let congestion = Some(CongestionControl::Bbr);
/// stream.set_options(SocketOptions { congestion, ..stream.options()? })?;
/// if let Some(model) = stream.info()?.model {
///     println!("{}: {} bytes per second", model.phase, model.rate);
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::tcp::PathModel;
/// The time that each limit held a sender back: [`TcpInfo::send_times`].
///
/// ```
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// let times = stream.info()?.send_times;
/// if times.peer_window > times.busy / 2 {
///     println!("the peer reads slowly");
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::tcp::SendTimes;
/// The state of a connection by RFC 9293: [`TcpInfo::state`].
///
/// ```
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::tcp::TcpState;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// assert_eq!(stream.info()?.state, TcpState::Established);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::tcp::State as TcpState;
/// The error of a wrong name: its text lists the names.
///
/// ```
/// use fulmar::CongestionControl;
/// use fulmar::tcp::UnknownCongestionControl;
///
/// let error = "vegas".parse::<CongestionControl>().unwrap_err();
/// assert_eq!(error, UnknownCongestionControl);
/// assert!(error.to_string().contains("cubic"));
/// ```
pub use fulmar_stack::tcp::UnknownCongestionControl;
/// The error of a wrong name: its text lists the names.
///
/// ```
/// use fulmar::tcp::{EcnPolicy, UnknownEcnPolicy};
///
/// let error = "always".parse::<EcnPolicy>().unwrap_err();
/// assert_eq!(error, UnknownEcnPolicy);
/// assert!(error.to_string().ends_with("expected off, accept or ask"));
/// ```
pub use fulmar_stack::tcp::UnknownEcnPolicy;
