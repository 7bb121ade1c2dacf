//! TCP Fast Open (RFC 7413) beside the engine: the options of listeners and of connections, the keys of cookies, and
//! what clients remember of servers ([`cache`]). Listeners take SYNs with data in `listen/fast_open.rs`.
//!
//! A cookie is a keyed hash of both addresses ([`FastOpenKeys::cookie`]); the server keeps nothing. It is that of
//! Linux, so that servers behind one address can share a key.
//!
//! Replay: a SYN with data that the network duplicates may reach the server again after the connection has ended, and
//! is then taken for a new one (RFC 7413 section 2.1). First data has to be idempotent.

pub mod cache;

use core::net::{IpAddr, SocketAddr};

use fulmar_base::{FlowKey, Instant, Key, Probe, Secrets, SlotId};
use fulmar_socket::{SocketError, sosend};
use fulmar_tcp::FastOpenSyn;
use fulmar_wire::tcp::FastOpenCookie;

use crate::shard::Shard;
use crate::sockets::TcpEntry;

/// How long a key of the stack's own is used; cookies of the key before it are still taken, and replaced. A cookie
/// that leaks, or whose address has moved to another host, is of no use after two days at most.
const KEY_PERIOD_SECS: u64 = 24 * 3600;

/// The keys of the cookies of a server.
#[derive(Clone, Copy, Debug)]
pub struct FastOpenKeys {
    /// Cookies are made with this one.
    pub current: Key,
    /// Cookies made with this one are still taken (RFC 7413 section 4.1.2); their peers get a new one.
    pub previous: Option<Key>,
}

impl FastOpenKeys {
    /// Keys of 16 bytes each, as TCP_FASTOPEN_KEY of Linux has them.
    pub fn from_bytes(current: [u8; 16], previous: Option<[u8; 16]>) -> FastOpenKeys {
        FastOpenKeys { current: Key::from_bytes(current), previous: previous.map(Key::from_bytes) }
    }

    /// The cookie for the peer of a flow.
    pub(crate) fn cookie(&self, flow: &FlowKey) -> FastOpenCookie {
        cookie_of(&self.current, flow)
    }

    /// Whether a cookie is one of the current key, or of the previous one. At most two hashes.
    pub(crate) fn check(&self, flow: &FlowKey, cookie: &FastOpenCookie) -> CookieAge {
        let is_of = |key: &Key| cookie_of(key, flow) == *cookie;
        match self.previous {
            _ if is_of(&self.current) => CookieAge::Current,
            Some(previous) if is_of(&previous) => CookieAge::Previous,
            _ => CookieAge::Invalid,
        }
    }
}

/// Which key a cookie was made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CookieAge {
    Current,
    Previous,
    Invalid,
}

/// SipHash-2-4 of both addresses, the peer's first.
fn cookie_of(key: &Key, flow: &FlowKey) -> FastOpenCookie {
    let hash = match (flow.remote_ip(), flow.local_ip()) {
        (IpAddr::V4(peer), IpAddr::V4(own)) => {
            let [[a, b, c, d], [e, f, g, h]] = [peer.octets(), own.octets()];
            key.hash(&[u64::from_le_bytes([a, b, c, d, e, f, g, h])])
        }
        (peer, own) => {
            let halves = |ip| {
                let n = u128::from_le_bytes(match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    IpAddr::V6(ip) => ip.octets(),
                });
                [n as u64, (n >> 64) as u64]
            };
            let [[a, b], [c, d]] = [halves(peer), halves(own)];
            key.hash(&[a, b, c, d])
        }
    };
    FastOpenCookie::new(&hash.to_le_bytes()).expect("invariant: eight bytes are a cookie")
}

/// The keys of the stack's own, which change with time.
pub(crate) struct StackKeys {
    secrets: Secrets,
    period: u32,
    keys: FastOpenKeys,
}

impl StackKeys {
    pub fn new(secrets: &Secrets) -> StackKeys {
        StackKeys { secrets: secrets.clone(), period: 0, keys: keys_in(secrets, 0) }
    }

    /// Those at `now`.
    pub fn at(&mut self, now: Instant) -> FastOpenKeys {
        let period = (now.as_nanos() / (KEY_PERIOD_SECS * 1_000_000_000)) as u32;
        if period != self.period {
            (self.period, self.keys) = (period, keys_in(&self.secrets, period));
        }
        self.keys
    }
}

fn keys_in(secrets: &Secrets, period: u32) -> FastOpenKeys {
    let previous = period.checked_sub(1).map(|p| secrets.fast_open(p));
    FastOpenKeys { current: secrets.fast_open(period), previous }
}

/// Fast Open of a listener (Linux: TCP_FASTOPEN).
#[derive(Clone, Copy, Debug)]
pub struct FastOpenOptions {
    /// Connections at most, per shard, that were accepted with their SYN and whose handshake is not complete (RFC 7413
    /// section 5.1); beyond it the data of SYNs is ignored. A connection that its peer has reset counts for a
    /// minute more. Default 256. Each takes about 2 KiB and the data of its SYN, at most one segment.
    pub backlog: usize,
    /// Takes the data of SYNs without a cookie. A SYN with a forged source then costs a connection, and its answer
    /// may be up to an initial window of data for whoever has that address: for networks where peers are known
    /// (Linux: bit 0x200 of `tcp_fastopen`). Default off.
    pub without_cookie: bool,
    /// The keys of cookies. Default: those of the stack, which change every day. Servers that share an address set the
    /// same.
    pub keys: Option<FastOpenKeys>,
}

impl Default for FastOpenOptions {
    fn default() -> Self {
        FastOpenOptions { backlog: 256, without_cookie: false, keys: None }
    }
}

/// The first data of a connection: see [`Shard::tcp_connect_fast`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FirstData<'a> {
    /// Sent with the SYN as far as a cookie and the size of a segment allow, and the rest after the handshake.
    pub bytes: &'a [u8],
    /// Sends it without a cookie (Linux: bit 4 of `tcp_fastopen`), for a server that asks for none.
    pub without_cookie: bool,
}

impl<P: Probe> Shard<P> {
    /// As [`Shard::tcp_connect_with`], with first data: it goes with the SYN if the server's cookie is known (RFC 7413),
    /// and otherwise the SYN asks for one. Returns the connection and how much of the data it has accepted: all
    /// that its send buffer and the memory for sending allow. The program may read at once; it may write once the
    /// handshake is complete.
    ///
    /// The data may reach the server twice, in two connections: see RFC 7413 section 2.1.
    ///
    /// # Errors
    /// As [`Shard::tcp_connect`].
    pub fn tcp_connect_fast(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        first: FirstData<'_>,
        set_options: impl FnOnce(&mut TcpEntry),
    ) -> Result<(SlotId, usize), SocketError> {
        let mut entry = self.new_connection(now, remote, local)?;
        set_options(&mut entry);
        let known = self.tcp.fast_opens.syn_for(now, entry.tcb.key());
        let syn = if first.without_cookie { Some(FastOpenSyn::WithoutCookie) } else { known };
        if let Some(syn) = syn {
            entry.tcb.set_fast_open(syn);
        }
        let pool = &mut self.core.net.pool;
        let accepted = sosend::append_first(&mut entry.tcb, pool, first.bytes);
        Ok((self.start_connection(now, entry), accepted))
    }

    /// Bytes of first data that the SYN to a server would carry now; `None`: its cookie is not known.
    ///
    /// # Errors
    /// As [`Shard::tcp_connect`].
    pub fn fast_open_space(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        set_options: impl FnOnce(&mut TcpEntry),
    ) -> Result<Option<usize>, SocketError> {
        let mut entry = self.new_connection(now, remote, local)?;
        set_options(&mut entry);
        let known = self.tcp.fast_opens.syn_for(now, entry.tcb.key());
        let Some(syn @ FastOpenSyn::Cookie { .. }) = known else { return Ok(None) };
        entry.tcb.set_fast_open(syn);
        Ok(Some(entry.tcb.syn_data_limit()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key as `net.ipv4.tcp_fastopen_key` shows it.
    fn keys(words: [u32; 4]) -> FastOpenKeys {
        let mut key = [0; 16];
        for (place, word) in key.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        FastOpenKeys::from_bytes(key, None)
    }

    fn flow(own: &str, peer: &str) -> FlowKey {
        FlowKey::new(own.parse().unwrap(), peer.parse().unwrap())
    }

    #[test]
    fn cookies_are_those_of_linux_with_the_same_key() {
        // From scripts of google's packetdrill suite: fastopen/server/simple1 and opt34/basic-rw.
        let first = keys([0xa0bf_63f7, 0xed80_3d81, 0xcd64_1d30, 0xcebc_4a90]);
        let second = keys([0xa1a1_a1a1, 0xb2b2_b2b2, 0xc3c3_c3c3, 0xd4d4_d4d4]);
        for (keys, own, peer, expected) in [
            (first, "192.168.0.2:8080", "10.248.0.2:5", 0x00ab_aaab_e8e9_54c2_u64),
            (first, "192.168.0.2:8080", "10.248.0.3:6", 0x1313_a2da_994a_0951),
            (second, "192.168.0.1:8080", "192.0.2.1:7", 0x3021_b9d8_8901_7eeb),
        ] {
            let flow = flow(own, peer);
            let cookie = keys.cookie(&flow);
            assert_eq!(cookie.as_slice(), expected.to_be_bytes());
            assert_eq!(keys.check(&flow, &cookie), CookieAge::Current);
        }
    }

    #[test]
    fn a_cookie_holds_for_both_addresses_and_no_port() {
        let keys = keys([1, 2, 3, 4]);
        let base = keys.cookie(&flow("[fd00::1]:80", "[fd00::2]:5"));
        assert_eq!(keys.cookie(&flow("[fd00::1]:81", "[fd00::2]:6")), base);
        for (own, peer) in [
            ("[fd00::3]:80", "[fd00::2]:5"),
            ("[fd00::1]:80", "[fd01::2]:5"),
            ("[fd00::2]:80", "[fd00::1]:5"),
        ] {
            assert_eq!(keys.check(&flow(own, peer), &base), CookieAge::Invalid);
        }
    }
}
