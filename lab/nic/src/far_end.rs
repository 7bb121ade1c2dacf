//! The configuration of the modelled peer: its addresses, services and acknowledgements.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use fulmar_stack::base::{Duration, EtherAddr};

/// What the peer does with a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Takes everything and closes when the other side does.
    Discard,
    /// As [`Service::Discard`], and sends `bytes` bytes, as fast as line and window allow; then it closes its side.
    Generate {
        /// Bytes of the stream, `u64::MAX` for no end.
        bytes: u64,
    },
    /// Sends `response` bytes for every `request` bytes that it takes.
    Respond {
        /// Bytes of a request, at least 1.
        request: u32,
        /// Bytes of the answer.
        response: u32,
    },
}

/// When the peer acknowledges. It also acknowledges at gaps, at repetitions, at the end of the stream, and at the end
/// of every burst unless it is configured to wait there for more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckRule {
    /// Acknowledge after this number of packets (0: their number does not matter).
    pub packets: u32,
    /// Acknowledge after this number of bytes (0: their number does not matter).
    pub bytes: u32,
    /// What is left at the end of a burst waits so long for more at the most, as a delayed ACK does
    /// (RFC 1122 section 4.2.3.2); zero: it is acknowledged there, so that a sender never waits.
    pub wait: Duration,
}

impl Default for AckRule {
    /// After 64 KiB, like a receiver that aggregates in hardware and reads at once.
    fn default() -> AckRule {
        AckRule { packets: 0, bytes: 64 << 10, wait: Duration::ZERO }
    }
}

/// The peer at the other end of the wire of [`super::with_peer`].
#[derive(Clone, Debug)]
pub struct FarEnd {
    /// Its station address.
    pub ether: EtherAddr,
    /// The receive window that it keeps open, in bytes; scaled as far as needed.
    pub window_bytes: u32,
    /// When it acknowledges.
    pub ack: AckRule,
    /// It offers timestamps (RFC 7323).
    pub timestamps: bool,
    /// It offers and sends SACK (RFC 2018).
    pub sack: bool,
    /// It compares all stream bytes that it takes with [`super::pattern`], and sends that pattern.
    /// Otherwise it neither reads nor writes payload, as DMA that passes the CPU's caches: what
    /// arrives is what lay in the buffer before.
    pub verify: bool,
    /// What it does with connections to these ports, the first that matches.
    pub services: Vec<(RangeInclusive<u16>, Service)>,
    /// Connections that it keeps at once; further ones are reset.
    pub max_connections: usize,
}

impl Default for FarEnd {
    /// Generates without end on port 19, as RFC 864 has it, and discards on all others; a window of
    /// 4 MiB, timestamps and SACK.
    fn default() -> FarEnd {
        let generate = Service::Generate { bytes: u64::MAX };
        FarEnd {
            ether: EtherAddr([2, 0, 0, 0, 0, 0xfe]),
            window_bytes: 4 << 20,
            ack: AckRule::default(),
            timestamps: true,
            sack: true,
            verify: false,
            services: vec![(19..=19, generate), (0..=u16::MAX, Service::Discard)],
            max_connections: 1024,
        }
    }
}

/// A request of a [`super::SimHandle`] to the peer.
#[derive(Clone, Debug)]
pub enum Command {
    /// Opens a connection to the stack.
    Connect {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where the stack listens.
        to: SocketAddr,
        /// What it does once connected.
        service: Service,
    },
    /// Sends datagrams, as fast as the line allows.
    Datagrams {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where they go.
        to: SocketAddr,
        /// Bytes of payload each.
        bytes: usize,
        /// How many.
        count: u64,
    },
    /// Sends datagrams at a rate for a while. Each begins with `mark`, followed by the time at which it
    /// arrives in nanoseconds, both in the byte order of the machine: so a receiver can tell flows apart
    /// and knows how late it is.
    Flow {
        /// Address and port that the peer takes.
        from: SocketAddr,
        /// Where they go.
        to: SocketAddr,
        /// Bytes of payload each, at least 16.
        bytes: usize,
        /// Datagrams per second; 0: as fast as the line allows.
        pps: u64,
        /// Duration of the flow.
        time: Duration,
        /// The first eight bytes of each.
        mark: u64,
    },
    /// Resets every connection.
    ResetAll,
}
