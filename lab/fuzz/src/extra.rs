//! What a script does with a stack that has more than the usual: Fast Open, accurate ECN, pending connections, all
//! addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use arbitrary::Arbitrary;

use crate::frames::{our_ip, peer_ip};
use crate::script::Near;

/// What the stack has: the upper bits of the first byte of an input. The lower three choose what the device can do.
#[derive(Clone, Copy)]
pub struct Features(pub u8);

impl Features {
    /// Listeners take the data of SYNs.
    pub const FAST_OPEN: u8 = 0x08;
    /// Connections ask for accurate ECN.
    pub const ECN: u8 = 0x10;
    /// A listener decides about SYNs before they are answered.
    pub const PENDING: u8 = 0x20;
    /// Every address is the stack's.
    pub const ANY_ADDRESS: u8 = 0x40;
    /// Fast Open without a cookie.
    pub const WITHOUT_COOKIE: u8 = 0x80;
    const ALL: u8 = 0xf8;

    /// Whether the stack has it.
    pub fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }

    /// Whether it has any of them.
    pub fn any(self) -> bool {
        self.has(Self::ALL)
    }
}

/// An address.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Place {
    Own,
    Peer,
    OnLink(u8),
    OffLink(u8),
    /// One that no host has.
    Odd(u8),
}

impl Place {
    /// The address.
    pub fn address(self, v6: bool) -> IpAddr {
        match self {
            Place::Own => our_ip(v6),
            Place::Peer => peer_ip(v6, 2),
            Place::OnLink(host) => peer_ip(v6, host),
            Place::OffLink(n) if v6 => {
                Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(n)).into()
            }
            Place::OffLink(n) => Ipv4Addr::new(192, 0, 2, n).into(),
            Place::Odd(n) if v6 => match n % 6 {
                0 => Ipv6Addr::UNSPECIFIED,
                1 => Ipv6Addr::LOCALHOST,
                2 => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
                3 => Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2),
                4 => Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped(),
                _ => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1),
            }
            .into(),
            Place::Odd(n) => match n % 6 {
                0 => Ipv4Addr::UNSPECIFIED,
                1 => Ipv4Addr::LOCALHOST,
                2 => Ipv4Addr::BROADCAST,
                3 => Ipv4Addr::new(10, 0, 0, 255),
                4 => Ipv4Addr::new(224, 0, 0, 1),
                _ => Ipv4Addr::new(10, 0, 0, 0),
            }
            .into(),
        }
    }
}

/// The Fast Open option of a segment.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Cookie {
    Absent,
    Request,
    /// The cookie that the stack last sent to this address.
    Learnt,
    /// The same with flipped bits.
    Damaged(u8),
    Any {
        bytes: u8,
        filling: u8,
    },
}

/// The fields of ECN in a packet.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Ecn {
    /// Of the IP header.
    pub field: u8,
    /// Of the TCP header.
    pub ace: u8,
    /// The option.
    pub counters: Option<(bool, [u16; 3])>,
}

/// A SYN, with or without Fast Open.
#[derive(Arbitrary, Clone, Debug)]
pub struct EarlySyn {
    pub v6: bool,
    pub from: Place,
    pub to: Place,
    pub from_port: u8,
    pub to_port: u8,
    pub cookie: Cookie,
    pub is_experimental: bool,
    pub payload_bytes: u16,
    pub ecn: Ecn,
}

/// A SYN,ACK for a SYN of the stack.
#[derive(Arbitrary, Clone, Debug)]
pub struct SynAnswer {
    pub flow: u8,
    /// Near what the stack has sent.
    pub ack: Near,
    pub cookie: Cookie,
    pub is_experimental: bool,
    pub payload_bytes: u16,
    pub ecn: Ecn,
}

/// The program's decision about a pending connection.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Verdict {
    Accept,
    Refuse,
    Unreachable(u8),
    Drop,
}

/// One step.
#[derive(Arbitrary, Clone, Debug)]
pub enum Extra {
    Syn(EarlySyn),
    Answer(SynAnswer),
    /// The next segment in order, with marks.
    Marked {
        flow: u8,
        payload_bytes: u16,
        window: u16,
        ecn: Ecn,
    },
    Datagram {
        v6: bool,
        from: Place,
        to: Place,
        port: u8,
        bytes: u16,
    },
    Echo {
        v6: bool,
        from: Place,
        to: Place,
        bytes: u16,
    },
    ConnectEarly {
        v6: bool,
        port: u8,
        bytes: u16,
        without_cookie: bool,
    },
    ConnectFrom {
        v6: bool,
        from: Place,
        to: Place,
        port: u8,
    },
    SendFrom {
        v6: bool,
        from: Place,
        to: Place,
        bytes: u16,
    },
    /// The program takes what is pending.
    Pending,
    Decide {
        which: u8,
        verdict: Verdict,
    },
    /// The program answers the echo requests that came for others.
    EchoReply,
    /// It refuses them.
    EchoError {
        code: u8,
    },
}
