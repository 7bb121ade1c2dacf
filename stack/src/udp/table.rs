//! The port table: from the addresses and ports of a datagram to its socket.
//!
//! Every binding has one key. A look-up tries at most four keys, the most specific first:
//!
//! ```text
//!   1. connected          local address : port   remote address : port
//!   2. bound to address   local address : port   *
//!   3. wildcard           *             : port   *      (of the datagram's own IP version)
//!   4. dual stack         [::]          : port   *      (IPv4 datagrams, unless v6-only)
//! ```
//!
//! Where a socket is bound to every port, 2 to 4 are tried again with port 0.
//!
//! A look-up is O(1): each key is one search in a [`FlowIndex`] with a keyed hash. Keys that cannot
//! be bound are skipped. Binding costs a scan of the bindings of one port.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::base::{FlowHasher, FlowIndex, FlowKey, KeyUse, Random, Secrets, ephemeral_ports};

/// End of a list of bindings.
const NONE: u32 = u32::MAX;

/// Socket options that apply to binding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BindOptions {
    /// Share the address with other sockets that set it too (SO_REUSEADDR). The latest binding
    /// receives.
    pub reuse_address: bool,
    /// A binding to `[::]` does not receive IPv4 datagrams (IPV6_V6ONLY).
    pub only_v6: bool,
    /// Binds to every port of the address that no other socket is bound to. The port of the address
    /// is 0.
    pub any_port: bool,
}

/// The result of a bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bound {
    /// Index of the binding in the table.
    pub slot: u32,
    /// Address and port; an ephemeral port if 0 was requested.
    pub local: SocketAddr,
}

/// A prepared look-up, for prefetching: see [`UdpTable::prefetch`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct PreparedLookup {
    local: SocketAddr,
    remote: SocketAddr,
    /// Hash of the connected key; `None` if no binding is connected.
    connected: Option<u32>,
    /// Hash of the key of a binding to the address.
    own: u32,
}

/// Why a binding was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BindError {
    /// The address and port are in use (EADDRINUSE).
    InUse,
    /// No ephemeral port is free (EADDRINUSE on bind, EAGAIN on connect).
    NoPorts,
    /// No such binding.
    NotBound,
}

#[derive(Clone, Debug)]
struct Binding<H> {
    key: FlowKey,
    /// The address as bound, which a disconnect restores.
    local: SocketAddr,
    is_connected: bool,
    options: BindOptions,
    handle: H,
    /// The previous binding of the same key.
    next: u32,
}

/// The bindings of one shard. `H` is a socket handle.
#[derive(Clone, Debug)]
pub(crate) struct UdpTable<H> {
    bindings: Vec<Option<Binding<H>>>,
    free: Vec<u32>,
    /// The last binding of each key.
    index: FlowIndex,
    hasher: FlowHasher,
    /// Bindings by port, for conflict checks at bind.
    ports: BTreeMap<u16, Vec<u32>>,
    /// Number of connected bindings: at 0, the first key is skipped.
    connected: usize,
    /// Number of bindings to every port: at 0, port 0 is not tried.
    any_port: usize,
    /// Draws ephemeral ports.
    random: Random,
}

impl<H: Copy> UdpTable<H> {
    /// An empty table. Derives the keys of the flow hash and of ephemeral ports from `secrets`.
    pub(crate) fn new(secrets: &Secrets) -> UdpTable<H> {
        UdpTable {
            bindings: Vec::new(),
            free: Vec::new(),
            index: FlowIndex::new(),
            hasher: FlowHasher::new(secrets.key(KeyUse::UdpTables)),
            ports: BTreeMap::new(),
            connected: 0,
            any_port: 0,
            random: secrets.random(KeyUse::UdpPort),
        }
    }

    /// Binds a socket. For port 0 it draws an ephemeral port for which `fits` is true: a shard
    /// accepts only ports whose replies are steered to it. With [`BindOptions::any_port`] the port
    /// stays 0.
    ///
    /// # Errors
    /// [`BindError::InUse`], [`BindError::NoPorts`].
    pub(crate) fn bind(
        &mut self,
        handle: H,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
    ) -> Result<Bound, BindError> {
        let mut local = local;
        if local.port() == 0 && !options.any_port {
            local.set_port(self.ephemeral_port(local, options, fits)?);
        } else if self.conflicts(local, options) {
            return Err(BindError::InUse);
        }
        let key = FlowKey::new(local, any_remote(local.ip()));
        let binding = Binding { key, local, is_connected: false, options, handle, next: NONE };
        let slot = self.store(binding);
        self.any_port = self.any_port.saturating_add(usize::from(local.port() == 0));
        self.ports.entry(local.port()).or_default().push(slot);
        self.link(slot);
        Ok(Bound { slot, local })
    }

    /// Connects a binding: it then receives only datagrams from `remote` to `local`. `local` has
    /// the binding's port and, if the binding is a wildcard, the source address selected for
    /// `remote`. A connected binding may be connected again.
    ///
    /// # Errors
    /// [`BindError::NotBound`]; [`BindError::InUse`] if another socket has the same pair and not
    /// both set `reuse_address`.
    pub(crate) fn connect(
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

    /// Releases the port. Returns the socket's handle.
    pub(crate) fn unbind(&mut self, slot: u32) -> Option<H> {
        self.binding(slot)?;
        self.unlink(slot);
        let binding = self.bindings.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.connected = self.connected.saturating_sub(usize::from(binding.is_connected));
        let port = binding.local.port();
        self.any_port = self.any_port.saturating_sub(usize::from(port == 0));
        let slots = self.ports.get_mut(&port)?;
        slots.retain(|&s| s != slot);
        if slots.is_empty() {
            self.ports.remove(&port);
        }
        Some(binding.handle)
    }

    /// Whether any socket is bound to the port, on any address.
    pub(crate) fn is_port_bound(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }

    /// The socket that receives datagrams from `remote` to `local`: the most specific binding.
    #[inline]
    pub(crate) fn lookup(&self, local: SocketAddr, remote: SocketAddr) -> Option<H> {
        if self.connected != 0
            && let Some(h) = self.find(&FlowKey::new(local, remote))
        {
            return Some(h);
        }
        let own = self.find(&FlowKey::new(local, any_remote(local.ip())));
        own.or_else(|| self.lookup_wildcard(local))
    }

    /// Prepares a look-up (computes its hashes), so that a burst can be prefetched: see
    /// [`UdpTable::prefetch`].
    #[inline]
    pub(crate) fn prepare_lookup(&self, local: SocketAddr, remote: SocketAddr) -> PreparedLookup {
        let hash = |remote| self.hasher.hash(&FlowKey::new(local, remote));
        let connected = (self.connected != 0).then(|| hash(remote));
        PreparedLookup { local, remote, connected, own: hash(any_remote(local.ip())) }
    }

    /// Prefetches the index entries of a look-up: see [`FlowIndex::prefetch`].
    #[inline]
    pub(crate) fn prefetch(&self, probe: &PreparedLookup) -> u32 {
        self.index.prefetch(probe.own) ^ probe.connected.map_or(0, |hash| self.index.prefetch(hash))
    }

    /// Prefetches the binding of a look-up, after [`UdpTable::prefetch`].
    #[inline]
    pub(crate) fn prefetch_binding(&self, probe: &PreparedLookup) -> u32 {
        let connected = probe.connected.and_then(|hash| self.index.candidate(hash));
        let slot = connected.or_else(|| self.index.candidate(probe.own));
        slot.and_then(|slot| self.binding(slot)).map_or(0, |b| b.next)
    }

    /// As [`UdpTable::lookup`], with a prepared look-up. The table must not have changed since.
    #[inline]
    pub(crate) fn lookup_prepared(&self, probe: &PreparedLookup) -> Option<H> {
        let PreparedLookup { local, remote, connected, own } = *probe;
        let find = |hash: u32, key: FlowKey| self.slot_at(hash, &key).and_then(|s| self.binding(s));
        let pair = connected.and_then(|hash| find(hash, FlowKey::new(local, remote)));
        let bound = pair.or_else(|| find(own, FlowKey::new(local, any_remote(local.ip()))));
        bound.map(|b| b.handle).or_else(|| self.lookup_wildcard(local))
    }

    /// The wildcard binding that receives datagrams to `local`.
    fn lookup_wildcard(&self, local: SocketAddr) -> Option<H> {
        let ip = local.ip();
        let bound = self.wildcard_of_port(ip, local.port());
        if bound.is_some() || self.any_port == 0 {
            return bound;
        }
        let own = self.find(&FlowKey::new(SocketAddr::new(ip, 0), any_remote(ip)));
        own.or_else(|| self.wildcard_of_port(ip, 0))
    }

    /// The binding to a port of every address.
    fn wildcard_of_port(&self, ip: IpAddr, port: u16) -> Option<H> {
        let wildcard = |ip: IpAddr| FlowKey::new(SocketAddr::new(ip, port), any_remote(ip));
        self.find(&wildcard(wildcard_of(ip))).or_else(|| {
            if !ip.is_ipv4() {
                return None;
            }
            // Several bindings may share the key; v6-only ones do not receive IPv4.
            let first = self.slot_of(&wildcard(IpAddr::V6(Ipv6Addr::UNSPECIFIED)))?;
            self.bindings_of_key(first).find(|(_, b)| !b.options.only_v6).map(|(_, b)| b.handle)
        })
    }

    /// Generation of the table: a cached look-up is valid while it is unchanged.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.index.generation()
    }

    /// Number of bindings.
    pub(crate) fn len(&self) -> usize {
        self.bindings.len().saturating_sub(self.free.len())
    }

    fn binding(&self, slot: u32) -> Option<&Binding<H>> {
        self.bindings.get(slot as usize)?.as_ref()
    }

    /// Whether a binding to `local` conflicts with an existing one.
    fn conflicts(&self, local: SocketAddr, options: BindOptions) -> bool {
        let slots = self.ports.get(&local.port()).into_iter().flatten();
        slots.filter_map(|&s| self.binding(s)).any(|b| {
            let both_share = b.options.reuse_address && options.reuse_address;
            !both_share && overlaps(b.local.ip(), b.options, local.ip(), options)
        })
    }

    /// A random free port.
    fn ephemeral_port(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
    ) -> Result<u16, BindError> {
        // An ephemeral port is never shared.
        let options = BindOptions { reuse_address: false, ..options };
        let mut ports = ephemeral_ports(&mut self.random);
        let is_free = |port: &u16| {
            let mut candidate = local;
            candidate.set_port(*port);
            fits(*port) && !self.conflicts(candidate, options)
        };
        ports.find(is_free).ok_or(BindError::NoPorts)
    }

    fn store(&mut self, binding: Binding<H>) -> u32 {
        if let Some(slot) = self.free.pop()
            && let Some(entry) = self.bindings.get_mut(slot as usize)
        {
            *entry = Some(binding);
            return slot;
        }
        let slot = self.bindings.len() as u32;
        self.bindings.push(Some(binding));
        slot
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

    /// Makes a binding the first of its key: a look-up returns the latest binding.
    fn link(&mut self, slot: u32) {
        let Some(key) = self.binding(slot).map(|b| b.key) else { return };
        let (hash, before) = (self.hasher.hash(&key), self.slot_of(&key));
        match before {
            Some(before) => self.index.replace(hash, before, slot),
            None => {
                self.index.insert(hash, slot);
                true
            }
        };
        self.set_next(slot, before.unwrap_or(NONE));
    }

    fn unlink(&mut self, slot: u32) {
        let Some((key, next)) = self.binding(slot).map(|b| (b.key, b.next)) else { return };
        let Some(first) = self.slot_of(&key) else { return };
        if first == slot {
            let hash = self.hasher.hash(&key);
            let _was_indexed = match next {
                NONE => self.index.remove(hash, slot),
                _ => self.index.replace(hash, slot, next),
            };
            return;
        }
        let before =
            self.bindings_of_key(first).find(|(_, b)| b.next == slot).map(|(before, _)| before);
        if let Some(before) = before {
            self.set_next(before, next);
        }
    }

    fn set_next(&mut self, slot: u32, next: u32) {
        if let Some(b) = self.bindings.get_mut(slot as usize).and_then(Option::as_mut) {
            b.next = next;
        }
    }

    #[inline]
    fn find(&self, key: &FlowKey) -> Option<H> {
        self.binding(self.slot_of(key)?).map(|b| b.handle)
    }

    /// The latest binding of a key.
    #[inline]
    fn slot_of(&self, key: &FlowKey) -> Option<u32> {
        self.slot_at(self.hasher.hash(key), key)
    }

    #[inline]
    fn slot_at(&self, hash: u32, key: &FlowKey) -> Option<u32> {
        self.index.find(hash, |slot| self.binding(slot).is_some_and(|b| b.key == *key))
    }

    /// Iterates the bindings of one key from `slot` on, latest first.
    fn bindings_of_key(&self, slot: u32) -> impl Iterator<Item = (u32, &Binding<H>)> {
        let first = self.binding(slot).map(|b| (slot, b));
        core::iter::successors(first, |(_, b)| Some((b.next, self.binding(b.next)?)))
    }
}

/// The unspecified address of the same version.
fn wildcard_of(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The remote address of an unconnected binding.
fn any_remote(like: IpAddr) -> SocketAddr {
    SocketAddr::new(wildcard_of(like), 0)
}

/// Whether two bindings of one port could receive the same datagram.
fn overlaps(a: IpAddr, a_options: BindOptions, b: IpAddr, b_options: BindOptions) -> bool {
    if a.is_ipv4() == b.is_ipv4() {
        return a == b || a.is_unspecified() || b.is_unspecified();
    }
    let is_dual_stack =
        |ip: IpAddr, o: BindOptions| ip.is_ipv6() && ip.is_unspecified() && !o.only_v6;
    is_dual_stack(a, a_options) || is_dual_stack(b, b_options)
}

#[cfg(test)]
mod tests;
