//! The secret of a stack, and one key per use.
//!
//! A stack has 256 bits from the operating system. From them each use ([`KeyUse`]) has a key of its own,
//! a block of ChaCha20: who knows all keys of the other uses, or all that was ever sent by them, knows
//! nothing about this one. What is sent is the output of a keyed function ([`Key::hash`]) or of a
//! generator ([`Random`]), never a key, nor the state of a generator. `docs/secrets.md` has a row for
//! each use.

use crate::chacha::blocks;
use crate::siphash::sip;
use crate::{FlowKey, OwnerKey, Random};

macro_rules! key_uses {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// What a key is for. A new use is one line here and one row in `docs/secrets.md`.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u32)]
        pub enum KeyUse { $($(#[$doc])* $name,)+ }

        impl KeyUse {
            /// Every use.
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
    /// Offsets of TCP timestamps (RFC 7323 section 7.1).
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
    /// Identifications of IPv4 datagrams that may be fragmented (RFC 6864), of IPv6 fragments (RFC 7739).
    Identification,
    /// How far the limits on ICMP messages vary.
    IcmpLimit,
    /// How far the limit on resets varies.
    ResetLimit,
    /// How long neighbours count as reachable (RFC 4861 section 6.3.2).
    ReachableTime,
    /// Which of several next hops a flow takes.
    NextHop,
    /// Which shard owns a flow.
    Owner,
    /// Hash tables of TCP: connections, TIME-WAIT, sources.
    TcpTables,
    /// Hash tables of UDP.
    UdpTables,
    /// Where incomplete datagrams are kept, and which of them give way.
    Reassembly,
}

/// Says of whom a key is: the nonce's first word.
const STACK: u32 = 0;

/// The secret of a stack, or of one of its shards.
#[derive(Clone)]
pub struct Secrets {
    root: [u32; 8],
    /// [`STACK`], or the number of a shard plus one.
    holder: u32,
}

impl core::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secrets(secret)")
    }
}

impl Secrets {
    /// The secrets of a stack, from 256 bits that the operating system has drawn for it.
    pub fn from_entropy(entropy: [u8; 32]) -> Secrets {
        let mut root = [0; 8];
        for (word, bytes) in root.iter_mut().zip(entropy.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Secrets { root, holder: STACK }
    }

    /// Secrets that everybody can compute: for a simulation or a test that is to run the same way twice.
    /// A stack with these must not meet a network: its sequence numbers are no secret.
    pub fn for_simulation(seed: u64) -> Secrets {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        Secrets { root: [low, high, 0, 0, 0, 0, 0, 0], holder: STACK }
    }

    /// The secrets of a shard: shards draw each by itself, or two of them would send the same numbers.
    #[must_use]
    pub fn of_shard(&self, shard: u16) -> Secrets {
        Secrets { root: self.root, holder: u32::from(shard).wrapping_add(1) }
    }

    /// The key of a use.
    pub fn key(&self, for_use: KeyUse) -> Key {
        let [a, b, c, d, ..] = self.block(for_use, 0);
        let long = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Key::new(long(a, b), long(c, d))
    }

    /// A generator for a use.
    pub fn random(&self, for_use: KeyUse) -> Random {
        let [.., a, b, c, d, e, f, g, h] = self.block(for_use, 0);
        Random::new([a, b, c, d, e, f, g, h])
    }

    /// The key that decides which shard owns a flow, the same for all shards of the stack.
    pub fn owner(&self) -> OwnerKey {
        let of_stack = Secrets { root: self.root, holder: STACK };
        let mut words = [0; OwnerKey::WORDS];
        let numbers = (0..).flat_map(|n| of_stack.block(KeyUse::Owner, n));
        let halves: [u32; 2 * OwnerKey::WORDS] = collect(numbers);
        for (word, [low, high]) in words.iter_mut().zip(halves.as_chunks::<2>().0) {
            *word = u64::from(*high) << 32 | u64::from(*low);
        }
        OwnerKey::new(words)
    }

    /// Block `n` of a use: 512 bits that no other use has.
    fn block(&self, for_use: KeyUse, n: u32) -> [u32; 16] {
        blocks(&self.root, n, [self.holder, for_use as u32, 0]).map(|[first, ..]| first)
    }
}

fn collect<const N: usize>(numbers: impl Iterator<Item = u32>) -> [u32; N] {
    let mut all = [0; N];
    for (to, from) in all.iter_mut().zip(numbers) {
        *to = from;
    }
    all
}

/// A key of 128 bits.
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
    /// The key with these halves.
    pub const fn new(k0: u64, k1: u64) -> Key {
        Key { k0, k1 }
    }

    /// Both halves, for a keyed hash.
    pub const fn halves(&self) -> [u64; 2] {
        [self.k0, self.k1]
    }

    /// A pseudo-random function of words, SipHash-2-4: what is known of other inputs says nothing about
    /// this one.
    pub fn hash(&self, words: &[u64]) -> u64 {
        sip::<2, 4>(self, words)
    }

    /// The same of a flow.
    pub fn hash_flow(&self, flow: &FlowKey) -> u64 {
        match flow.ipv4_words() {
            Some(words) => self.hash(&words),
            None => self.hash(&flow.words()),
        }
    }

    /// The same of a flow and what else is said about it.
    pub fn hash_flow_and(&self, flow: &FlowKey, more: [u64; 2]) -> u64 {
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
