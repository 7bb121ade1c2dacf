//! Who owns which port.
//!
//! Every binding has one key, and a datagram finds its owner by asking for at most four keys, the
//! most specific first:
//!
//! ```text
//!   1. connected          local address : port   remote address : port
//!   2. bound to address   local address : port   *
//!   3. wildcard           *             : port   *      (of the datagram's own IP version)
//!   4. dual stack         [::]          : port   *      (IPv4 datagrams, unless v6-only)
//! ```
//!
//! A look-up is O(1): each key is one probe of a chained hash table, and keys that nobody can have
//! bound are not asked for. The table's chains hold only bindings that this host made, so that no
//! stranger can choose what collides. Binding costs a scan of the bindings of one port.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fulmar_base::FlowKey;

/// First and last ephemeral port: Linux's default range, which leaves the rest to servers.
const EPHEMERAL: core::ops::RangeInclusive<u16> = 32768..=60999;

/// End of a chain of bindings.
const NONE: u32 = u32::MAX;

/// How a socket binds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BindOptions {
    /// Share the address with others that say so too (SO_REUSEADDR); the last one gets what
    /// arrives.
    pub reuse_address: bool,
    /// A binding to `[::]` does not take IPv4 datagrams (IPV6_V6ONLY).
    pub v6_only: bool,
}

/// A binding that was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bound {
    /// Its name in the table.
    pub slot: u32,
    /// Address and port, an ephemeral one if 0 was asked for.
    pub local: SocketAddr,
}

/// Why a binding was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BindError {
    /// Another socket has the address and port (EADDRINUSE).
    InUse,
    /// No ephemeral port is free (EADDRINUSE on bind, EAGAIN on connect).
    NoPorts,
    /// No such binding.
    NotBound,
}

#[derive(Clone, Debug)]
struct Binding<H> {
    key: FlowKey,
    /// What was bound: where a disconnect goes back to.
    local: SocketAddr,
    is_connected: bool,
    options: BindOptions,
    handle: H,
    /// Next in the chain of the same bucket.
    next: u32,
}

/// The bindings of one shard. `H` names a socket.
#[derive(Clone, Debug)]
pub struct UdpTable<H> {
    bindings: Vec<Option<Binding<H>>>,
    free: Vec<u32>,
    /// Heads of the chains; a power of two, at least as many as bindings.
    buckets: Vec<u32>,
    /// Bindings by port, for the questions that bind asks.
    ports: BTreeMap<u16, Vec<u32>>,
    /// How many bindings are connected: without any, the first probe is skipped.
    connected: usize,
    random: u64,
}

impl<H: Copy> UdpTable<H> {
    /// An empty table; `seed` decides the ephemeral ports and should not be guessable (RFC 6056).
    pub fn new(seed: u64) -> UdpTable<H> {
        UdpTable {
            bindings: Vec::new(),
            free: Vec::new(),
            buckets: vec![NONE; 16],
            ports: BTreeMap::new(),
            connected: 0,
            random: seed,
        }
    }

    /// Binds a socket. With port 0 it gets an ephemeral port for which `fits` is true (a shard asks
    /// for ports whose replies come home to it).
    ///
    /// # Errors
    /// [`BindError::InUse`], [`BindError::NoPorts`].
    pub fn bind(
        &mut self,
        handle: H,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
    ) -> Result<Bound, BindError> {
        let mut local = local;
        if local.port() == 0 {
            local.set_port(self.ephemeral_port(local, options, fits)?);
        } else if self.is_taken(local, options) {
            return Err(BindError::InUse);
        }
        let key = FlowKey::new(local, anyone(local.ip()));
        let binding = Binding { key, local, is_connected: false, options, handle, next: NONE };
        let slot = self.store(binding);
        self.ports.entry(local.port()).or_default().push(slot);
        self.link(slot);
        Ok(Bound { slot, local })
    }

    /// Connects a binding: from now on it takes datagrams from `remote` to `local` and no others.
    /// `local` has the binding's port and, if that was a wildcard, the address that was chosen for
    /// `remote`. A connected binding may be connected again.
    ///
    /// # Errors
    /// [`BindError::NotBound`]; [`BindError::InUse`] if another socket has the same pair and either
    /// of them does not share addresses.
    pub fn connect(
        &mut self,
        slot: u32,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), BindError> {
        let options = self.binding(slot).ok_or(BindError::NotBound)?.options;
        let key = FlowKey::new(local, remote);
        let other = self.slot_of(&key).filter(|&s| s != slot).and_then(|s| self.binding(s));
        if other.is_some_and(|o| !(o.options.reuse_address && options.reuse_address)) {
            return Err(BindError::InUse);
        }
        self.rekey(slot, key, true);
        Ok(())
    }

    /// Undoes [`UdpTable::connect`].
    pub fn disconnect(&mut self, slot: u32) {
        if let Some(local) = self.binding(slot).map(|b| b.local) {
            self.rekey(slot, FlowKey::new(local, anyone(local.ip())), false);
        }
    }

    /// Gives the port back.
    pub fn unbind(&mut self, slot: u32) -> Option<H> {
        self.binding(slot)?;
        self.unlink(slot);
        let binding = self.bindings.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.connected = self.connected.saturating_sub(usize::from(binding.is_connected));
        let port = binding.local.port();
        let slots = self.ports.get_mut(&port)?;
        slots.retain(|&s| s != slot);
        if slots.is_empty() {
            self.ports.remove(&port);
        }
        Some(binding.handle)
    }

    /// Whose datagram it is that went from `remote` to `local`: the most specific binding.
    #[inline]
    pub fn lookup(&self, local: SocketAddr, remote: SocketAddr) -> Option<H> {
        if self.connected != 0
            && let Some(h) = self.find(&FlowKey::new(local, remote))
        {
            return Some(h);
        }
        let ip = local.ip();
        let port = local.port();
        let unconnected = |ip: IpAddr| FlowKey::new(SocketAddr::new(ip, port), anyone(ip));
        let own = self.find(&unconnected(ip));
        let own_version = own.or_else(|| self.find(&unconnected(wildcard_of(ip))));
        own_version.or_else(|| {
            // Several may share the key, and only those that are not v6-only want this.
            let dual = unconnected(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
            let wants = |b: &Binding<H>| b.key == dual && !b.options.v6_only;
            let found = self.chain_of(&dual).find(|(_, b)| ip.is_ipv4() && wants(b));
            found.map(|(_, b)| b.handle)
        })
    }

    /// How many bindings there are.
    pub fn len(&self) -> usize {
        self.bindings.len().saturating_sub(self.free.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn binding(&self, slot: u32) -> Option<&Binding<H>> {
        self.bindings.get(slot as usize)?.as_ref()
    }

    /// Whether a binding to `local` would meet one that does not share with it.
    fn is_taken(&self, local: SocketAddr, options: BindOptions) -> bool {
        let slots = self.ports.get(&local.port()).into_iter().flatten();
        slots.filter_map(|&s| self.binding(s)).any(|b| {
            let both_share = b.options.reuse_address && options.reuse_address;
            !both_share && overlaps(b.local.ip(), b.options, local.ip(), options)
        })
    }

    /// A random free port, and the ones behind it if that is taken (RFC 6056 section 3.3.1).
    fn ephemeral_port(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
    ) -> Result<u16, BindError> {
        // An ephemeral port is never shared: nobody asked for this one.
        let options = BindOptions { reuse_address: false, ..options };
        let count = u32::from(EPHEMERAL.end().abs_diff(*EPHEMERAL.start())).saturating_add(1);
        let start = (self.next_random() as u32).checked_rem(count).unwrap_or(0);
        let is_free = |port: &u16| {
            let mut candidate = local;
            candidate.set_port(*port);
            fits(*port) && !self.is_taken(candidate, options)
        };
        let (from, to) = (*EPHEMERAL.start(), *EPHEMERAL.end());
        let first = from.saturating_add(start as u16);
        (first..=to).chain(from..first).find(is_free).ok_or(BindError::NoPorts)
    }

    /// splitmix64: spreads the caller's seed.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) >> 16
    }

    fn store(&mut self, binding: Binding<H>) -> u32 {
        if let Some(slot) = self.free.pop()
            && let Some(place) = self.bindings.get_mut(slot as usize)
        {
            *place = Some(binding);
            return slot;
        }
        let slot = self.bindings.len() as u32;
        self.bindings.push(Some(binding));
        if self.bindings.len() > self.buckets.len() {
            self.grow();
        }
        slot
    }

    /// Doubles the buckets. Each old chain is linked again from its end, so that of several with the
    /// same key the last one bound stays in front. The newest binding is not linked yet.
    fn grow(&mut self) {
        let buckets = vec![NONE; self.buckets.len().saturating_mul(2)];
        let old = core::mem::replace(&mut self.buckets, buckets);
        let mut chain = Vec::new();
        for head in old {
            let mut at = head;
            while let Some(b) = self.binding(at) {
                chain.push(at);
                at = b.next;
            }
            while let Some(slot) = chain.pop() {
                self.link(slot);
            }
        }
    }

    fn rekey(&mut self, slot: u32, key: FlowKey, connected: bool) {
        self.unlink(slot);
        let Some(binding) = self.bindings.get_mut(slot as usize).and_then(Option::as_mut) else {
            return;
        };
        let was = usize::from(binding.is_connected);
        binding.key = key;
        binding.is_connected = connected;
        self.connected = self.connected.saturating_add(usize::from(connected)).saturating_sub(was);
        self.link(slot);
    }

    /// Puts a binding at the head of its chain: the last one bound is found first.
    fn link(&mut self, slot: u32) {
        let Some(key) = self.binding(slot).map(|b| b.key) else { return };
        let bucket = self.bucket_of(&key);
        let Some(head) = self.buckets.get_mut(bucket) else { return };
        let next = core::mem::replace(head, slot);
        if let Some(b) = self.bindings.get_mut(slot as usize).and_then(Option::as_mut) {
            b.next = next;
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Some((key, next)) = self.binding(slot).map(|b| (b.key, b.next)) else { return };
        let bucket = self.bucket_of(&key);
        let Some(head) = self.buckets.get_mut(bucket) else { return };
        if *head == slot {
            *head = next;
            return;
        }
        let mut at = *head;
        while let Some(b) = self.bindings.get_mut(at as usize).and_then(Option::as_mut) {
            if b.next == slot {
                b.next = next;
                return;
            }
            at = b.next;
        }
    }

    fn find(&self, key: &FlowKey) -> Option<H> {
        self.chain_of(key).find(|(_, b)| b.key == *key).map(|(_, b)| b.handle)
    }

    fn slot_of(&self, key: &FlowKey) -> Option<u32> {
        self.chain_of(key).find(|(_, b)| b.key == *key).map(|(slot, _)| slot)
    }

    /// The bindings in the bucket of a key, the last one linked first.
    fn chain_of(&self, key: &FlowKey) -> impl Iterator<Item = (u32, &Binding<H>)> {
        let head = self.buckets.get(self.bucket_of(key)).copied().unwrap_or(NONE);
        let first = self.binding(head).map(|b| (head, b));
        core::iter::successors(first, |(_, b)| Some((b.next, self.binding(b.next)?)))
    }

    /// The owner hash decides the shard, so that within a shard some of its bits are always alike:
    /// they are mixed once more.
    fn bucket_of(&self, key: &FlowKey) -> usize {
        let h = key.owner_hash().wrapping_mul(0x9e37_79b1);
        (h >> 8) as usize & self.buckets.len().wrapping_sub(1)
    }
}

/// The unspecified address of the same version.
fn wildcard_of(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The remote end of a binding that is not connected.
fn anyone(like: IpAddr) -> SocketAddr {
    SocketAddr::new(wildcard_of(like), 0)
}

/// Whether some datagram could go to either of two bindings of one port.
fn overlaps(a: IpAddr, a_options: BindOptions, b: IpAddr, b_options: BindOptions) -> bool {
    if a.is_ipv4() == b.is_ipv4() {
        return a == b || a.is_unspecified() || b.is_unspecified();
    }
    let takes_both = |ip: IpAddr, o: BindOptions| ip.is_ipv6() && ip.is_unspecified() && !o.v6_only;
    takes_both(a, a_options) || takes_both(b, b_options)
}

#[cfg(test)]
mod tests;
