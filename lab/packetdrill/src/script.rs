//! Our own runner: a part of packetdrill's language, played against the same machine as `libfulmar_packetdrill.so`
//! drives. It needs nothing but this crate, so the scripts of `scripts/` are a test that always runs.
//!
//! ```text
//! --ip_version=ipv6                         `sysctl -q net.ipv4.tcp_sack=0`
//! 0 socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
//! +.1 < S 0:0(0) win 1000 <mss 1000,sackOK,TS val 100 ecr 0,nop,wscale 7>
//! +0~+.01 > . 1:1001(1000) ack 1 <nop,nop,sack 1:2>
//! +0 < icmp unreachable frag_needed mtu 1200 [1:1001(1000)]
//! +.1...0.3 write(4, ..., 5000) = 5000      (a call that blocks, and when it returns)
//! +0 %{ assert tcpi_snd_cwnd == 10 }%       (==, !=, <, <=, >, >= of one field and a number)
//! ```
//!
//! [`parse`] reads events, [`play`] plays them in order: an injected packet and a call wait for their time, an expected
//! packet moves the clock until one is sent and compares its time. As in packetdrill, a script that ends leaves what
//! it did not expect unseen.

mod call;
mod packet;
mod parse;
mod play;

use std::time::Duration;

pub use parse::parse;
pub use play::play;

/// How far the time of an expected packet may be off: packetdrill's default.
const TOLERANCE: Duration = Duration::from_millis(4);

/// When an event happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// This long after the script's start.
    At(Duration),
    /// This long after the event before it.
    After(Duration),
    /// Within this range after the event before it.
    Within(Duration, Duration),
    /// At any time.
    Any,
}

/// What happens.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// A packet arrives.
    Inject(packet::Packet),
    /// A packet is expected.
    Expect(packet::Packet),
    /// A call, and when it returns if it blocks.
    Call(call::Call, Option<Duration>),
    /// Sysctls are set: names and values.
    Sysctls(Vec<(String, String)>),
    /// An assertion on TCP_INFO.
    Assert(Assertion),
}

/// `field operator number`.
#[derive(Clone, PartialEq, Debug)]
pub struct Assertion {
    /// The field, such as `tcpi_snd_cwnd`.
    pub field: String,
    /// The comparison.
    pub operator: String,
    /// The number.
    pub number: u64,
}

/// One event of a script.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    /// Its line, for messages.
    pub line: usize,
    /// When.
    pub when: When,
    /// What.
    pub action: Action,
}

/// A script.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Script {
    /// Played over IPv6.
    pub is_v6: bool,
    /// How far times may be off.
    pub tolerance: Option<Duration>,
    /// Its events in order.
    pub events: Vec<Event>,
}
