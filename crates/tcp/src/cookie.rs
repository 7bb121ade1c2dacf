//! SYN cookies (RFC 4987 section 3.6): the state of an embryo, kept by the peer instead of by us.
//!
//! ```text
//! ISS    base of the flow (RFC 6528) +  | period, 8 bits | (MAC + MSS index), 24 bits |
//! TSval  | clock, 26 bits | 0, for ECN | SACK permitted | window scale, 4 bits; 15: none |
//! ```
//!
//! Enters: a SYN, or the ACK of a SYN,ACK that nobody remembers, with two keyed hashes of its flow,
//! whose keys are the caller's. Leaves: the SYN,ACK, or the options of the SYN. The MAC covers the flow,
//! the peer's initial sequence number, the period and the low bits of the timestamp. A guessed
//! acknowledgement is right once in 2^29: one of 256 periods and four of 2^24 remainders count, for
//! two periods.
//!
//! The period takes the place of the upper bits of the 4 microsecond clock, so that the initial sequence
//! numbers of a flow still grow with time. Window scale and SACK need the peer's timestamps; a peer
//! without them gets neither, as on Linux. Our timestamp is set back to the last value with these low
//! bits, at most 64 ms, and so never runs ahead of the connection's clock.
//!
//! Cost: two hashes; no memory.

use crate::Config;
use crate::contract::{PathInfo, WindowBudget};
use fulmar_base::{Duration, Instant, SeqNum};
use fulmar_wire::tcp::{Flags, Header, Options, Timestamps};

/// Seconds of a period: 2^24 ticks of 4 microseconds are 67 s.
const PERIOD_SECS: u64 = 64;

/// How long a cookie may be good: until the end of the period after its own.
pub const COOKIE_LIFETIME: Duration = Duration::from_secs(2 * PERIOD_SECS);

/// Segment sizes that a cookie can name; the largest one up to the peer's is taken. IPv4: the default,
/// tunnels and mobile networks, PPPoE and Ethernet with options in front, Ethernet.
const MSS_V4: [u16; 4] = [536, 1300, 1440, 1460];
/// IPv6: the least MTU, tunnels, 6in4 and PPPoE, Ethernet.
const MSS_V6: [u16; 4] = [1220, 1360, 1420, 1440];

/// Bits of our timestamp that carry options.
const TS_MASK: u32 = 0x3f;
const TS_SCALE: u32 = 0xf;
const TS_SACK: u32 = 0x10;
/// Bits of the cookie below the period.
const TAG_MASK: u32 = 0x00ff_ffff;
const PERIOD_SHIFT: u32 = 24;

/// What the MAC of a cookie covers beside the flow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CookieInput {
    /// The peer's initial sequence number.
    pub peer_iss: SeqNum,
    /// When the cookie was made.
    pub period: u32,
    /// Options in the timestamp, and whether there is one.
    pub options: u32,
}

impl CookieInput {
    /// As words for the MAC.
    pub fn words(&self) -> [u64; 2] {
        let CookieInput { peer_iss, period, options } = *self;
        [u64::from(peer_iss.0) << 32 | u64::from(period), u64::from(options)]
    }
}

/// What an ACK says about the cookie that it should bring back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CookieVerdict {
    /// The SYN that the cookie answered, as far as it counts.
    Valid(Header),
    /// The acknowledgement is of this time, the rest is not of this segment: perhaps one that follows
    /// the first, which was lost.
    NotFirst,
    /// Not a cookie of ours, or too old.
    Forged,
}

fn period_of(now: Instant) -> u32 {
    (now.as_nanos() / (PERIOD_SECS * 1_000_000_000)) as u32
}

fn mss_table(is_v6: bool) -> [u16; 4] {
    if is_v6 { MSS_V6 } else { MSS_V4 }
}

/// The options of a SYN that its SYN,ACK agrees to, as far as a cookie can carry them.
fn agreed(cfg: &Config, syn: &Options) -> Options {
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

/// The low bits of our timestamp.
fn timestamp_bits(o: &Options) -> u32 {
    let scale = o.window_scale.map_or(TS_SCALE, u32::from);
    scale | if o.sack_permitted { TS_SACK } else { 0 }
}

/// The options as the MAC takes them: 0 without timestamps.
fn mac_bits(timestamp_bits: Option<u32>) -> u32 {
    timestamp_bits.map_or(0, |bits| bits | (TS_MASK + 1))
}

/// The SYN,ACK that answers a SYN with a cookie and leaves nothing behind. `base` and `mac` are the keyed
/// hashes of the flow, `ts_offset` what its connection adds to the timestamp clock.
pub fn cookie_syn_ack(
    cfg: &Config,
    path: &PathInfo,
    budget: &WindowBudget,
    syn: &Header,
    now: Instant,
    (base, ts_offset): (u32, u32),
    mac: impl Fn(&CookieInput) -> u32,
) -> Header {
    let is_v6 = path.ip_header_bytes != 20;
    let agreed = agreed(cfg, &syn.options);
    let bits = agreed.timestamps.map(|_| timestamp_bits(&agreed));
    let timestamps = agreed.timestamps.zip(bits).map(|(theirs, bits)| {
        let clock = now.as_millis_u32().wrapping_add(ts_offset);
        let back = clock.wrapping_sub(bits) & TS_MASK;
        Timestamps { value: clock.wrapping_sub(back), echo: theirs.value }
    });
    let period = period_of(now);
    let input = CookieInput { peer_iss: syn.seq, period, options: mac_bits(bits) };
    let tag = mac(&input).wrapping_add(mss_index(&syn.options, is_v6)) & TAG_MASK;
    Header {
        src_port: syn.dst_port,
        dst_port: syn.src_port,
        seq: SeqNum(base.wrapping_add(period << PERIOD_SHIFT).wrapping_add(tag)),
        ack: SeqNum(syn.seq.0.wrapping_add(1)),
        flags: Flags::SYN | Flags::ACK,
        window: window_in_syn(cfg, path, budget),
        urgent: 0,
        options: Options {
            mss: u16::try_from(path.own_mss()).ok(),
            window_scale: agreed.window_scale.map(|_| cfg.window_scale()),
            sack_permitted: agreed.sack_permitted,
            timestamps,
            ..Options::default()
        },
    }
}

/// What the embryo of an ordinary SYN would offer, without charging the budget for it.
fn window_in_syn(cfg: &Config, path: &PathInfo, budget: &WindowBudget) -> u16 {
    let limit = cfg.recv_buffer_bytes.min(cfg.max_buffer_bytes);
    limit.min(budget.for_embryo(path.own_mss())).min(usize::from(u16::MAX)) as u16
}

/// Place of the largest size in the table that the peer takes.
fn mss_index(syn: &Options, is_v6: bool) -> u32 {
    let theirs = syn.mss.unwrap_or(0);
    mss_table(is_v6).iter().skip(1).filter(|mss| **mss <= theirs).count() as u32
}

/// Judges an ACK that belongs to no connection. `base` and `mac` are as in [`cookie_syn_ack`].
pub fn check_cookie(
    cfg: &Config,
    is_v6: bool,
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
    let Some(mss) = mss_table(is_v6).get(index as usize).copied() else {
        return CookieVerdict::NotFirst;
    };
    let scale = bits.map(|b| b & TS_SCALE).filter(|scale| *scale != TS_SCALE);
    CookieVerdict::Valid(Header {
        seq: peer_iss,
        flags: Flags::SYN,
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

#[cfg(test)]
mod tests;
