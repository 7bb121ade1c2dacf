//! The secret of a stack, and the keys derived from it.
//!
//! A stack has a secret of 256 bits from the operating system. The key of each use ([`KeyUse`]) is derived
//! from it as a block of ChaCha20, so the keys and outputs of other uses reveal nothing about it. Only
//! outputs of a keyed hash ([`Key::hash`]) or a generator ([`Random`]) are sent, never a key or the state
//! of a generator. `docs/secrets.md` has a row for each use.

use core::hash::Hasher;

use siphasher::sip::{SipHasher13, SipHasher24};

use crate::base::chacha::blocks;
use crate::base::{FlowKey, OwnerKey, Random};

macro_rules! key_uses {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// The use of a key. A new use is one line here and one row in `docs/secrets.md`.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u32)]
        pub enum KeyUse { $($(#[$doc])* $name,)+ }

        impl KeyUse {
            /// All uses.
            pub const ALL: &[KeyUse] = &[$(KeyUse::$name,)+];

            /// The name in the code and in `docs/secrets.md`.
            pub const fn name(self) -> &'static str {
                match self { $(KeyUse::$name => stringify!($name),)+ }
            }
        }
    };
}

key_uses! {
    /// Initial sequence numbers (RFC 6528).
    InitialSequence,
    /// Timestamp offsets (RFC 7323 section 7.1).
    TimestampOffset,
    /// SYN cookies (RFC 4987 section 3.6).
    SynCookie,
    /// Fast Open cookies (RFC 7413 section 4.1.2).
    FastOpenCookie,
    /// Ephemeral ports of TCP (RFC 6056).
    TcpPort,
    /// Ephemeral ports of UDP (RFC 6056).
    UdpPort,
    /// Identifiers of echo requests.
    EchoIdentifier,
    /// Identification of IPv4 datagrams that may be fragmented (RFC 6864) and of IPv6 fragments (RFC 7739).
    Identification,
    /// Random variation of the ICMP rate limits.
    IcmpLimit,
    /// Random variation of the rate limit on resets.
    ResetLimit,
    /// ReachableTime of neighbours (RFC 4861 section 6.3.2).
    ReachableTime,
    /// Next hop of a flow among several (ECMP).
    NextHop,
    /// Owner of a flow among the shards.
    Owner,
    /// Hash tables of TCP: connections, TIME-WAIT, sources.
    TcpTables,
    /// Hash tables of UDP.
    UdpTables,
    /// Hash table and eviction of the reassembly table.
    Reassembly,
}

/// The first nonce word of keys that all shards share.
const STACK: u32 = 0;

/// The secrets of a stack, or of one of its shards.
#[derive(Clone)]
pub struct Secrets {
    root: [u32; 8],
    /// The first nonce word: [`STACK`], or the index of a shard plus one.
    domain: u32,
}

impl core::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secrets(secret)")
    }
}

impl Secrets {
    /// The secrets of a stack, from 256 random bits of the operating system.
    pub fn from_entropy(entropy: [u8; 32]) -> Secrets {
        let mut root = [0; 8];
        for (word, bytes) in root.iter_mut().zip(entropy.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Secrets { root, domain: STACK }
    }

    /// Predictable secrets, for a simulation or a test that has to be repeatable. A stack with these
    /// secrets must not be attached to a network.
    pub fn for_simulation(seed: u64) -> Secrets {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        Secrets { root: [low, high, 0, 0, 0, 0, 0, 0], domain: STACK }
    }

    /// The secrets of a shard. Each shard has its own, so that no two shards generate the same numbers.
    #[must_use]
    pub(crate) fn for_shard(&self, shard: u16) -> Secrets {
        Secrets { root: self.root, domain: u32::from(shard).wrapping_add(1) }
    }

    /// The key of a use.
    pub fn key(&self, for_use: KeyUse) -> Key {
        self.key_of(for_use, 0)
    }

    fn key_of(&self, for_use: KeyUse, n: u32) -> Key {
        let [a, b, c, d, ..] = self.block(for_use, n);
        let long = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Key::new(long(a, b), long(c, d))
    }

    /// A generator for a use.
    pub fn random(&self, for_use: KeyUse) -> Random {
        let [.., a, b, c, d, e, f, g, h] = self.block(for_use, 0);
        Random::new([a, b, c, d, e, f, g, h])
    }

    /// The key of Fast Open cookies in a period, the same for all shards of a stack: a cookie holds for the address
    /// of a peer, whose flows may belong to any shard.
    pub fn fast_open(&self, period: u32) -> Key {
        let of_stack = Secrets { root: self.root, domain: STACK };
        of_stack.key_of(KeyUse::FastOpenCookie, period)
    }

    /// The key that assigns flows to shards, the same for all shards of a stack.
    pub fn owner(&self) -> OwnerKey {
        let of_stack = Secrets { root: self.root, domain: STACK };
        let mut words = [0; OwnerKey::WORDS];
        let mut halves = (0..).flat_map(|n| of_stack.block(KeyUse::Owner, n));
        let mut half = || u64::from(halves.next().unwrap_or(0));
        for word in &mut words {
            *word = half() | half() << 32;
        }
        OwnerKey::new(words)
    }

    /// Block `n` of the key stream of a use, 512 bits.
    fn block(&self, for_use: KeyUse, n: u32) -> [u32; 16] {
        blocks(&self.root, n, [self.domain, for_use as u32, 0]).map(|[first, ..]| first)
    }
}

/// A 128-bit key of SipHash.
#[derive(Clone, Copy)]
pub struct Key {
    k0: u64,
    k1: u64,
}

impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Key(secret)")
    }
}

impl Key {
    /// Creates a key from its halves.
    pub const fn new(k0: u64, k1: u64) -> Key {
        Key { k0, k1 }
    }

    /// The key of 16 bytes, as SipHash reads them.
    pub fn from_bytes(bytes: [u8; 16]) -> Key {
        let n = u128::from_le_bytes(bytes);
        Key::new(n as u64, (n >> 64) as u64)
    }

    /// Both halves.
    pub const fn halves(&self) -> [u64; 2] {
        [self.k0, self.k1]
    }

    /// SipHash-2-4 of `words`: a pseudo-random function, whose outputs can be sent.
    pub fn hash(&self, words: &[u64]) -> u64 {
        let mut hasher = SipHasher24::new_with_keys(self.k0, self.k1);
        words.iter().for_each(|word| hasher.write_u64(*word));
        hasher.finish()
    }

    /// SipHash-1-3, for hash tables, whose hashes are never sent.
    pub(crate) fn table_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.k0, self.k1)
    }

    /// [`Key::hash`] of a flow key.
    pub(crate) fn hash_flow(&self, flow: &FlowKey) -> u64 {
        match flow.ipv4_words() {
            Some(words) => self.hash(&words),
            None => self.hash(&flow.words()),
        }
    }

    /// [`Key::hash`] of a flow key and two more words.
    pub(crate) fn hash_flow_and(&self, flow: &FlowKey, more: [u64; 2]) -> u64 {
        let [x, y] = more;
        if let Some([a, b]) = flow.ipv4_words() {
            return self.hash(&[a, b, x, y]);
        }
        let [a, b, c, d, e] = flow.words();
        self.hash(&[a, b, c, d, e, x, y])
    }
}

#[cfg(test)]
mod tests;
