//! Fast Open cookies (RFC 7413 section 4.1.2): a keyed hash of both addresses. The server keeps nothing. The hash is that
//! of Linux, so that servers behind one address can share a key.

use core::net::IpAddr;

use crate::base::{FlowKey, Instant, Key, Secrets};
use crate::wire::tcp::FastOpenCookie;

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
    pub(crate) fn new(secrets: &Secrets) -> StackKeys {
        StackKeys { secrets: secrets.clone(), period: 0, keys: keys_in(secrets, 0) }
    }

    /// Those at `now`.
    pub(crate) fn at(&mut self, now: Instant) -> FastOpenKeys {
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
