//! The meaning of the bytes of an input: a list of steps. Every input has a meaning, so that the fuzzer never wastes an
//! input on a syntax error.

use arbitrary::{Arbitrary, Result, Unstructured};

use crate::extra::{Extra, Features};

/// A number near one that the stack knows, or far from it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Near {
    Exact,
    Above(u8),
    Below(u8),
    /// Up to a large window away.
    Ahead(u16),
    Behind(u16),
    Half,
    Any(u32),
}

impl Near {
    /// The number beside `base`.
    pub fn to(self, base: u32) -> u32 {
        match self {
            Near::Exact => base,
            Near::Above(n) => base.wrapping_add(u32::from(n)),
            Near::Below(n) => base.wrapping_sub(u32::from(n)),
            Near::Ahead(n) => base.wrapping_add(u32::from(n) * 16),
            Near::Behind(n) => base.wrapping_sub(u32::from(n) * 16),
            Near::Half => base.wrapping_add(1 << 31),
            Near::Any(n) => n,
        }
    }
}

/// The options of a segment.
#[derive(Arbitrary, Clone, Debug)]
pub struct Options {
    pub stamp: Option<(Near, Near)>,
    pub sack: Vec<(Near, Near)>,
    pub mss: Option<u16>,
    pub scale: Option<u8>,
    pub sack_permitted: bool,
}

/// Control bits: usual ones more often than any others.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Bits {
    Ack,
    Push,
    Fin,
    Reset,
    ResetAck,
    Syn,
    SynAck,
    Urgent,
    Any(u8),
}

impl Bits {
    pub fn value(self) -> u8 {
        match self {
            Bits::Ack => 0x10,
            Bits::Push => 0x18,
            Bits::Fin => 0x11,
            Bits::Reset => 0x04,
            Bits::ResetAck => 0x14,
            Bits::Syn => 0x02,
            Bits::SynAck => 0x12,
            Bits::Urgent => 0x30,
            Bits::Any(bits) => bits,
        }
    }
}

/// A segment from the peer of a connection.
#[derive(Arbitrary, Clone, Debug)]
pub struct Segment {
    pub flow: u8,
    pub seq: Near,
    pub ack: Near,
    pub bits: Bits,
    pub window: u16,
    pub payload_bytes: u16,
    pub options: Option<Options>,
    pub urgent: u16,
    pub landing: Landing,
}

/// How a frame lands in memory, and what the device says of it.
#[derive(Arbitrary, Clone, Debug)]
pub struct Landing {
    pub pieces: Vec<u8>,
    pub damage: Option<(u16, u8)>,
    pub cut_short: Option<u8>,
    pub is_verified: bool,
    pub segment_bytes: Option<u16>,
}

/// An ICMP message about a packet of the stack, real or not.
#[derive(Arbitrary, Clone, Debug)]
pub struct Icmp {
    pub flow: u8,
    pub kind: u8,
    pub code: u8,
    pub word: u32,
    pub seq: Near,
    pub quoted_bytes: u8,
    pub is_of_udp: bool,
    /// Quotes the other version of IP.
    pub crosses: bool,
    pub landing: Landing,
}

/// The program's calls on its sockets.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Call {
    Accept,
    Connect { v6: bool, port: u8 },
    Read { socket: u8, bytes: u16 },
    Lend { socket: u8, bytes: u16 },
    GiveBack,
    Write { socket: u8, bytes: u16 },
    Shutdown { socket: u8, read: bool, write: bool },
    Close { socket: u8 },
    Abort { socket: u8 },
    NoDelay { socket: u8, on: bool },
    Cork { socket: u8, on: bool },
    SendBuffer { socket: u8, bytes: u16 },
    RecvBuffer { socket: u8, bytes: u16 },
    UdpSend { v6: bool, bytes: u16, is_connected: bool },
    UdpReceive,
    Ping { v6: bool, bytes: u8 },
    PingReceive,
}

/// One step.
#[derive(Arbitrary, Clone, Debug)]
pub enum Step {
    Segment(Segment),
    /// The next segment in order, as an honest peer sends it.
    Honest {
        flow: u8,
        payload_bytes: u16,
        window: u16,
    },
    Syn {
        v6: bool,
        host: u8,
        port: u8,
        options: Option<Options>,
        bits: u8,
    },
    /// The peer completes or refuses a connection that the stack opens.
    Answer {
        flow: u8,
        options: Option<Options>,
        resets: bool,
    },
    Udp {
        v6: bool,
        host: u8,
        port: u8,
        bytes: u16,
        landing: Landing,
    },
    Icmp(Icmp),
    Echo {
        v6: bool,
        reply: bool,
        ident: u16,
        bytes: u16,
    },
    Arp {
        request: bool,
        sender: u8,
        target: u8,
        ether: u8,
    },
    Neighbour {
        kind: u8,
        flags: u8,
        target: u8,
        option: u8,
        ether: u8,
    },
    Fragment {
        v6: bool,
        ident: u8,
        offset: u16,
        more: bool,
        bytes: u16,
        proto: u8,
    },
    Extensions {
        chain: Vec<u8>,
        options: Vec<u8>,
        proto: u8,
    },
    Raw {
        ethertype: u16,
        bytes: Vec<u8>,
        landing: Landing,
    },
    Wait {
        ms: u16,
    },
    LongWait {
        s: u8,
    },
    Device {
        is_full: bool,
    },
    Call(Call),
    /// Only with a stack that has more than the usual, so that other inputs keep their meaning.
    #[arbitrary(skip)]
    Extra(Extra),
}

/// Steps of one input at most: the fuzzer finds more with many short inputs than with few long ones.
const MAX_STEPS: usize = 96;

/// The steps that an input stands for.
pub fn decode(u: &mut Unstructured, features: Features) -> Vec<Step> {
    let mut steps = Vec::new();
    while !u.is_empty() && steps.len() < MAX_STEPS {
        let is_extra = features.any() && u.ratio(2, 5).unwrap_or(false);
        let step: Result<Step> =
            if is_extra { u.arbitrary().map(Step::Extra) } else { u.arbitrary() };
        let Ok(step) = step else { break };
        steps.push(step);
    }
    steps
}
