//! SYN cookies (RFC 4987 section 3.6): the state of an embryonic connection, encoded in the SYN,ACK
//! instead of stored.
//!
//! ```text
//! ISS    base of the flow (RFC 6528) +  | period, 8 bits | (MAC + MSS index), 24 bits |
//! TSval  | clock, 26 bits | ECN | SACK permitted | window scale, 4 bits; 15: none |
//! ```
//!
//! Inputs: a SYN, or an ACK that matches no connection, and two keyed hashes of its flow; the
//! caller holds the keys. Outputs: the SYN,ACK, or the options of the SYN. The MAC covers the flow,
//! the peer's initial sequence number, the period and the low bits of the timestamp. A random
//! acknowledgement number is accepted with probability 2^-29: two of 256 periods are valid, and in
//! each four of 2^24 tags.
//!
//! The period replaces the upper bits of the 4 microsecond clock of RFC 6528, so the initial sequence numbers of a flow
//! still increase with time. Window scale, SACK permitted and ECN are encoded in the timestamp; a peer without
//! timestamps gets none of them, as on Linux. Accurate ECN is not encoded: the ACK itself indicates it (RFC 9768
//! section 3.2.2.1, note 3). The timestamp sent is the latest value with the required low bits, at most 64 ms in the
//! past, so it never runs ahead of the connection's timestamp clock.
//!
//! Cost: two hashes. No memory.

use crate::base::{Duration, Instant, IpVersion, SeqNum};
use crate::tcp::Config;
use crate::tcp::contract::{PathInfo, Syn, WindowBudget};
use crate::tcp::ecn::{EcnMode, EcnPolicy, answer_to_syn, reflected};
use crate::wire::tcp::{Flags, Header, Options, Timestamps};

/// Length of a period, seconds: close to 2^24 ticks of 4 microseconds (67 s).
const PERIOD_SECS: u64 = 64;

/// Longest validity of a cookie: to the end of the period after its own.
pub(crate) const COOKIE_LIFETIME: Duration = Duration::from_secs(2 * PERIOD_SECS);

/// MSS values that a cookie can encode; the largest one not above the peer's is used. IPv4: the
/// default, tunnels and mobile networks, PPPoE and Ethernet with encapsulation, Ethernet.
const MSS_V4: [u16; 4] = [536, 1300, 1440, 1460];
/// IPv6: the minimum MTU, tunnels, 6in4 and PPPoE, Ethernet.
const MSS_V6: [u16; 4] = [1220, 1360, 1420, 1440];

/// Bits of the timestamp that encode options.
const TS_MASK: u32 = 0x3f;
const TS_SCALE: u32 = 0xf;
const TS_SACK: u32 = 0x10;
const TS_ECN: u32 = 0x20;
/// Bits of the cookie below the period: the tag.
const TAG_MASK: u32 = 0x00ff_ffff;
const PERIOD_SHIFT: u32 = 24;

/// Input of the cookie's MAC, besides the flow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CookieInput {
    /// The peer's initial sequence number.
    pub peer_iss: SeqNum,
    /// Period in which the cookie was made.
    pub period: u32,
    /// The option bits of the timestamp, and a bit for its presence.
    pub options: u32,
}

impl CookieInput {
    /// The input as words for the MAC.
    pub(crate) fn words(&self) -> [u64; 2] {
        let CookieInput { peer_iss, period, options } = *self;
        [u64::from(peer_iss.0) << 32 | u64::from(period), u64::from(options)]
    }
}

/// Keyed hashes of a flow, the same for every cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CookieHashes {
    /// Base of the flow's initial sequence numbers (RFC 6528).
    pub base: u32,
    /// The flow's timestamp offset.
    pub ts_offset: u32,
}

/// Result of checking the cookie in an ACK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CookieVerdict {
    /// The cookie is valid. Holds the SYN as reconstructed.
    Valid(Header),
    /// The period is valid, the tag is not. The segment may follow the ACK that completes the
    /// handshake, which was lost.
    NotHandshake,
    /// Not a cookie of this host, or expired.
    Forged,
}

fn period_of(now: Instant) -> u32 {
    (now.as_nanos() / (PERIOD_SECS * 1_000_000_000)) as u32
}

fn mss_table(version: IpVersion) -> [u16; 4] {
    match version {
        IpVersion::V4 => MSS_V4,
        IpVersion::V6 => MSS_V6,
    }
}

/// The options of a SYN that its SYN,ACK accepts and a cookie can encode.
fn accepted(cfg: &Config, syn: &Options) -> Options {
    match syn.timestamps.filter(|_| cfg.timestamps) {
        Some(t) => Options {
            window_scale: syn.window_scale.map(|shift| shift.min(14)),
            sack_permitted: syn.sack_permitted && cfg.sack,
            timestamps: Some(t),
            ..Options::default()
        },
        None => Options::default(),
    }
}

/// The option bits of the timestamp.
fn timestamp_bits(o: &Options, ecn: EcnMode) -> u32 {
    let scale = o.window_scale.map_or(TS_SCALE, u32::from);
    let sack = if o.sack_permitted { TS_SACK } else { 0 };
    scale | sack | if ecn == EcnMode::Classic { TS_ECN } else { 0 }
}

/// The option bits as MAC input: 0 without timestamps.
fn mac_bits(timestamp_bits: Option<u32>) -> u32 {
    timestamp_bits.map_or(0, |bits| bits | (TS_MASK + 1))
}

/// Builds the SYN,ACK that answers a SYN with a cookie. No state is kept. `mac` is the keyed hash of
/// the flow and of its argument.
pub(crate) fn cookie_syn_ack(
    cfg: &Config,
    path: &PathInfo,
    budget: &WindowBudget,
    syn: Syn,
    now: Instant,
    hashes: CookieHashes,
    mac: impl Fn(&CookieInput) -> u32,
) -> Header {
    let CookieHashes { base, ts_offset } = hashes;
    let Syn { header: syn, ecn: field } = syn;
    let version = path.ip_version();
    let accepted = accepted(cfg, &syn.options);
    let ecn = match answer_to_syn(cfg.ecn, syn.flags) {
        EcnMode::Classic if accepted.timestamps.is_none() => EcnMode::Off,
        mode => mode,
    };
    let bits = accepted.timestamps.map(|_| timestamp_bits(&accepted, ecn));
    let timestamps = accepted.timestamps.zip(bits).map(|(theirs, bits)| {
        let clock = now.as_millis_u32().wrapping_add(ts_offset);
        let back = clock.wrapping_sub(bits) & TS_MASK;
        Timestamps { value: clock.wrapping_sub(back), echo: theirs.value }
    });
    let period = period_of(now);
    let input = CookieInput { peer_iss: syn.seq, period, options: mac_bits(bits) };
    let tag = mac(&input).wrapping_add(mss_index(&syn.options, version)) & TAG_MASK;
    Header {
        src_port: syn.dst_port,
        dst_port: syn.src_port,
        seq: SeqNum(base.wrapping_add(period << PERIOD_SHIFT).wrapping_add(tag)),
        ack: SeqNum(syn.seq.0.wrapping_add(1)),
        flags: Flags::SYN
            | Flags::ACK
            | match ecn {
                EcnMode::Off => Flags::default(),
                EcnMode::Classic => Flags::ECE,
                EcnMode::Accurate => reflected(field),
            },
        window: window_in_syn(cfg, path, budget),
        urgent: 0,
        options: Options {
            mss: u16::try_from(path.own_mss()).ok(),
            window_scale: accepted.window_scale.map(|_| cfg.window_scale()),
            sack_permitted: accepted.sack_permitted,
            timestamps,
            ..Options::default()
        },
    }
}

/// The window that [`Tcb::passive`](crate::tcp::Tcb::passive) would offer. Nothing is charged to the
/// budget.
fn window_in_syn(cfg: &Config, path: &PathInfo, budget: &WindowBudget) -> u16 {
    let limit = cfg.recv_buffer_bytes.min(cfg.max_buffer_bytes);
    limit.min(budget.syn_ack_window(path.own_mss())).min(usize::from(u16::MAX)) as u16
}

/// Index of the largest MSS in the table that is not above the peer's.
fn mss_index(syn: &Options, version: IpVersion) -> u32 {
    let theirs = syn.mss.unwrap_or(0);
    mss_table(version).iter().skip(1).filter(|mss| **mss <= theirs).count() as u32
}

/// Checks the cookie in an ACK that matches no connection. `base` and `mac` are as in
/// [`cookie_syn_ack`].
pub(crate) fn check_cookie(
    cfg: &Config,
    version: IpVersion,
    ack: &Header,
    now: Instant,
    base: u32,
    mac: impl Fn(&CookieInput) -> u32,
) -> CookieVerdict {
    let offset = ack.ack.0.wrapping_sub(1).wrapping_sub(base);
    let age = period_of(now).wrapping_sub(offset >> PERIOD_SHIFT) & 0xff;
    if age > 1 {
        return CookieVerdict::Forged;
    }
    let timestamps = ack.options.timestamps.filter(|_| cfg.timestamps);
    let bits = timestamps.map(|t| t.echo & TS_MASK);
    let peer_iss = SeqNum(ack.seq.0.wrapping_sub(1));
    let period = period_of(now).wrapping_sub(age);
    let tag = mac(&CookieInput { peer_iss, period, options: mac_bits(bits) });
    let index = offset.wrapping_sub(tag) & TAG_MASK;
    let Some(mss) = mss_table(version).get(index as usize).copied() else {
        return CookieVerdict::NotHandshake;
    };
    let scale = bits.map(|b| b & TS_SCALE).filter(|scale| *scale != TS_SCALE);
    CookieVerdict::Valid(Header {
        seq: peer_iss,
        flags: Flags::SYN | requested_ecn(cfg, ack.flags, bits),
        window: ack.window,
        options: Options {
            mss: Some(mss),
            window_scale: scale.map(|s| s as u8),
            sack_permitted: bits.is_some_and(|b| b & TS_SACK != 0),
            timestamps,
            ..Options::default()
        },
        ..Header::default()
    })
}

/// The ECN flags of the SYN. The first ACK of a client with accurate feedback has ACE 2, 3, 4 or 6; without, ACE is
/// 0 or 1.
fn requested_ecn(cfg: &Config, ack: Flags, bits: Option<u32>) -> Flags {
    if bits.is_some_and(|b| b & TS_ECN != 0) {
        return Flags::ECE | Flags::CWR;
    }
    let is_accurate = cfg.ecn != EcnPolicy::Off && ack.ace() > 1;
    if is_accurate { Flags::ECN } else { Flags::default() }
}

#[cfg(test)]
mod tests;
