//! The tables that are compared, behind one trait; each loop is compiled for its table.

use fulmar_stack::route::{Fib, FibReader, Key};
use ip_network_table_deps_treebitmap::IpLookupTable;
use prefix_trie::PrefixMap;
use std::hint::black_box;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Mutex;

use super::internet::Prefix;

/// Look-ups of one burst.
pub const BURST: usize = 64;

/// A forwarding table that is looked up in.
pub trait Rival<A>: Sync {
    /// The answer of the longest prefix that holds the address; 0 if none does.
    fn lookup(&self, address: A) -> u32;
    /// Looks all addresses up, one after the other.
    fn scalar(&self, addresses: &[A]);
    /// Looks all addresses up in bursts of [`BURST`].
    fn bursts(&self, addresses: &[A]) {
        self.scalar(addresses);
    }
}

/// The loop over single look-ups; written once, compiled for each table.
macro_rules! scalar {
    ($address:ty) => {
        fn scalar(&self, addresses: &[$address]) {
            for address in addresses {
                black_box(self.lookup(*address));
            }
        }
    };
}

impl<K: Key + Send + Sync> Rival<K> for FibReader<K> {
    #[inline]
    fn lookup(&self, address: K) -> u32 {
        FibReader::lookup(self, address)
    }
    scalar!(K);
    fn bursts(&self, addresses: &[K]) {
        let mut answers = [0; BURST];
        for burst in addresses.chunks(BURST) {
            self.lookup_burst(burst, &mut answers);
            black_box(&mut answers);
        }
    }
}

/// The baseline: the same table behind one lock for all.
pub struct Locked<K: Key>(pub Mutex<FibReader<K>>);

impl<K: Key + Send + Sync> Rival<K> for Locked<K> {
    #[inline]
    fn lookup(&self, address: K) -> u32 {
        self.0.lock().map_or(0, |table| table.lookup(address))
    }
    scalar!(K);
    fn bursts(&self, addresses: &[K]) {
        let mut answers = [0; BURST];
        for burst in addresses.chunks(BURST) {
            if let Ok(table) = self.0.lock() {
                table.lookup_burst(burst, &mut answers);
            }
            black_box(&mut answers);
        }
    }
}

impl Rival<u32> for PrefixMap<(u32, u8), u32> {
    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        self.get_lpm(&(address, 32)).map_or(0, |(_, answer)| *answer)
    }
    scalar!(u32);
}

impl Rival<u128> for PrefixMap<(u128, u8), u32> {
    #[inline]
    fn lookup(&self, address: u128) -> u32 {
        self.get_lpm(&(address, 128)).map_or(0, |(_, answer)| *answer)
    }
    scalar!(u128);
}

impl Rival<u32> for IpLookupTable<Ipv4Addr, u32> {
    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        self.longest_match(Ipv4Addr::from_bits(address)).map_or(0, |(_, _, answer)| *answer)
    }
    scalar!(u32);
}

impl Rival<u128> for IpLookupTable<Ipv6Addr, u32> {
    #[inline]
    fn lookup(&self, address: u128) -> u32 {
        self.longest_match(Ipv6Addr::from_bits(address)).map_or(0, |(_, _, answer)| *answer)
    }
    scalar!(u128);
}

/// A fulmar table with these prefixes.
pub fn fib<K: Key>(prefixes: &[Prefix<K>]) -> Fib<K> {
    // As a stack makes it.
    let mut fib = Fib::with_memory_hook(fulmar::runtime::advise_huge_pages);
    for (start, len, answer) in prefixes {
        let inserted = fib.insert(*start, *len, *answer);
        assert!(inserted.is_ok(), "a made-up table has room");
    }
    fib
}

/// `prefix-trie`'s table with these prefixes of IPv4.
pub fn trie_v4(prefixes: &[Prefix<u32>]) -> PrefixMap<(u32, u8), u32> {
    prefixes.iter().map(|(start, len, answer)| ((*start, *len), *answer)).collect()
}

/// `prefix-trie`'s table with these prefixes of IPv6.
pub fn trie_v6(prefixes: &[Prefix<u128>]) -> PrefixMap<(u128, u8), u32> {
    prefixes.iter().map(|(start, len, answer)| ((*start, *len), *answer)).collect()
}

/// `treebitmap`'s table with these prefixes of IPv4.
pub fn bitmap_v4(prefixes: &[Prefix<u32>]) -> IpLookupTable<Ipv4Addr, u32> {
    let mut table = IpLookupTable::new();
    for (start, len, answer) in prefixes {
        table.insert(Ipv4Addr::from_bits(*start), u32::from(*len), *answer);
    }
    table
}

/// `treebitmap`'s table with these prefixes of IPv6.
pub fn bitmap_v6(prefixes: &[Prefix<u128>]) -> IpLookupTable<Ipv6Addr, u32> {
    let mut table = IpLookupTable::new();
    for (start, len, answer) in prefixes {
        table.insert(Ipv6Addr::from_bits(*start), u32::from(*len), *answer);
    }
    table
}
