//! Values that must be unpredictable on the wire, and the keys of hash tables: see `docs/secrets.md`.

use core::hash::BuildHasher;

use crate::base::{
    FlowHasher, FlowKey, Instant, Key, KeyUse, OwnerKey, Random, Secrets, SeqNum, ephemeral_ports,
};
use crate::tcp::CookieInput;
use siphasher::sip::SipHasher13;

use crate::shard::fast_open::keys::{FastOpenKeys, StackKeys};

/// A keyed hash: a stranger cannot choose flows that collide.
#[derive(Clone, Copy)]
pub(crate) struct Keyed(Key);

impl BuildHasher for Keyed {
    type Hasher = SipHasher13;
    fn build_hasher(&self) -> SipHasher13 {
        self.0.table_hasher()
    }
}

/// The keys and generators of a shard.
pub(crate) struct Secret {
    tables: Key,
    initial_sequence: Key,
    timestamp: Key,
    cookie: Key,
    owner: OwnerKey,
    fast_open: StackKeys,
    tcp_ports: Random,
    echo_idents: Random,
    /// Draws the random part of the limit on resets.
    pub reset_limit: Random,
}

impl Secret {
    /// Those that follow from the secrets of a shard.
    pub(crate) fn new(secrets: &Secrets) -> Secret {
        Secret {
            tables: secrets.key(KeyUse::TcpTables),
            initial_sequence: secrets.key(KeyUse::InitialSequence),
            timestamp: secrets.key(KeyUse::TimestampOffset),
            cookie: secrets.key(KeyUse::SynCookie),
            owner: secrets.owner(),
            fast_open: StackKeys::new(secrets),
            tcp_ports: secrets.random(KeyUse::TcpPort),
            echo_idents: secrets.random(KeyUse::EchoIdentifier),
            reset_limit: secrets.random(KeyUse::ResetLimit),
        }
    }

    /// The hasher of the shard's tables.
    pub(crate) fn table_hasher(&self) -> Keyed {
        Keyed(self.tables)
    }

    /// The hash of the index of connections.
    pub(crate) fn flow_hasher(&self) -> FlowHasher {
        FlowHasher::new(self.tables)
    }

    /// The key that decides which shard owns a flow.
    #[inline]
    pub(crate) fn owner(&self) -> OwnerKey {
        self.owner
    }

    /// The initial sequence number of a connection: a clock of 4 microseconds plus a keyed hash
    /// of the flow (RFC 6528 section 3).
    pub(crate) fn initial_sequence(&self, key: &FlowKey, now: Instant) -> SeqNum {
        let clock = (now.as_nanos() / 4_000) as u32;
        SeqNum(clock.wrapping_add(self.initial_sequence.hash_flow(key) as u32))
    }

    /// The offset of a connection's timestamps, so that they do not reveal the machine's uptime
    /// (RFC 7323 section 7.1).
    pub(crate) fn timestamp_offset(&self, key: &FlowKey) -> u32 {
        self.timestamp.hash_flow(key) as u32
    }

    /// Where the initial sequence numbers of a flow begin: what [`Secret::initial_sequence`] adds to the
    /// clock.
    pub(crate) fn cookie_base(&self, key: &FlowKey) -> u32 {
        self.initial_sequence.hash_flow(key) as u32
    }

    /// The MAC of a SYN cookie.
    pub(crate) fn cookie_mac(&self, key: &FlowKey, input: &CookieInput) -> u32 {
        self.cookie.hash_flow_and(key, input.words()) as u32
    }

    /// The stack's keys of Fast Open cookies at `now`.
    pub(crate) fn fast_open_keys(&mut self, now: Instant) -> FastOpenKeys {
        self.fast_open.at(now)
    }

    /// Ephemeral ports, each once.
    pub(crate) fn tcp_ports(&mut self) -> impl Iterator<Item = u16> + use<> {
        ephemeral_ports(&mut self.tcp_ports)
    }

    /// A random identifier for the echo requests of a socket.
    pub(crate) fn echo_ident(&mut self) -> u16 {
        self.echo_idents.number() as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(seed: u64) -> Secret {
        Secret::new(&Secrets::for_simulation(seed))
    }

    #[test]
    fn sequence_numbers_advance_with_the_clock_and_differ_between_flows() {
        let s = secret(1);
        let a = FlowKey::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
        let b = FlowKey::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:3".parse().unwrap());
        let at = |ms| Instant::from_millis(ms);
        assert_eq!(s.initial_sequence(&a, at(1)).since(s.initial_sequence(&a, at(0))), 250);
        assert_ne!(s.initial_sequence(&a, at(0)), s.initial_sequence(&b, at(0)));
        let other = secret(2);
        assert_ne!(s.initial_sequence(&a, at(0)), other.initial_sequence(&a, at(0)));
        assert_ne!(s.initial_sequence(&a, at(0)).0, s.timestamp_offset(&a));
    }
}
