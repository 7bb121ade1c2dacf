//! Calls of TCP sockets. Every call is a step: it does what can be done now and returns what it would wait
//! for.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::task::Poll;

use crate::base::{Counter, Duration, FlowKey, Instant, SlotId, Stage, with_zone, zone_of};
use crate::mbuf::Chain;
use crate::socket::{Least, Ready, Shutdown, SocketError, soreceive};
use crate::tcp::{State, Tcb};

use crate::shard::conn::Conn;
use crate::shard::conn::layer::Tcp;
use crate::shard::dgram::calls::unmap;
use crate::shard::layers::Core;
use crate::shard::listen::syn_queue::{ListenOptions, SynQueue};
use crate::shard::secret::Secret;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Listener, Socket, TcpEntry};
use crate::shard::world::Shard;

impl Shard {
    /// Starts a connection: sends its SYN, with transmit deferred at the end of the turn.
    ///
    /// # Errors
    /// No route, no free port, a device that is gone, too many sockets.
    pub fn tcp_connect(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
    ) -> Result<SlotId, SocketError> {
        self.tcp_connect_with(now, remote, local, |_| ())
    }

    /// As [`Shard::tcp_connect`], with options that are set before the SYN is sent: the receive buffer
    /// decides the window scale.
    ///
    /// # Errors
    /// As [`Shard::tcp_connect`].
    pub fn tcp_connect_with(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        set_options: impl FnOnce(&mut TcpEntry),
    ) -> Result<SlotId, SocketError> {
        let mut entry = self.new_connection(now, remote, local)?;
        set_options(&mut entry);
        Ok(self.start_connection(now, entry))
    }

    /// A connection in SYN-SENT that is in no table yet.
    pub(crate) fn new_connection(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
    ) -> Result<TcpEntry, SocketError> {
        self.core.check_usable()?;
        let remote = unmap(remote);
        if remote.ip().is_unspecified() {
            return Err(SocketError::Invalid);
        }
        // RFC 9293 section 3.9.2.3 (MUST-46): no OPEN to a multicast or broadcast address.
        if remote.ip().is_multicast() || self.core.net.ip.is_broadcast(remote.ip()) {
            return Err(SocketError::NetworkUnreachable);
        }
        let zone = zone_of(remote);
        let own = local.map(|l| l.ip()).filter(|ip| !ip.is_unspecified());
        let (src, path) = self.core.net.path_to(own, remote.ip(), zone)?;
        let key = self.tcp.choose_local(src, local, remote, &mut self.core)?;
        let iss = self.core.secret.initial_sequence(&key, now);
        let offset = self.core.secret.timestamp_offset(&key);
        let tcb = Tcb::connect(&self.core.config.tcp, key, iss, offset, path.info, now);
        let mut entry = TcpEntry::new(tcb, path);
        entry.is_open = true;
        Ok(entry)
    }

    /// Enters a connection into the tables and sends its SYN.
    pub(crate) fn start_connection(&mut self, now: Instant, entry: TcpEntry) -> SlotId {
        let id = self.tcp.insert(entry, &mut self.core.sockets);
        self.tcp.output_now(now, id, &mut self.core);
        self.finish_call(now);
        id
    }

    /// The shard that would own a connection from a local port of the caller's choice: there it must be
    /// opened.
    ///
    /// # Errors
    /// No route, or an address that is not ours.
    pub fn owner_of_connection(
        &mut self,
        remote: SocketAddr,
        local: SocketAddr,
    ) -> Result<u16, SocketError> {
        let remote = unmap(remote);
        let own = Some(local.ip()).filter(|ip| !ip.is_unspecified());
        let (src, _) = self.core.net.path_to(own, remote.ip(), zone_of(remote))?;
        // An address of the caller's choice stays (`choose_local`), whatever the route would take.
        let src = own.unwrap_or(src);
        let key = FlowKey::new(with_zone(src, local.port(), zone_of(remote)), remote);
        Ok(self.core.siblings.owner_of(&key))
    }

    /// The state of a connection attempt.
    ///
    /// # Errors
    /// Why it failed.
    pub fn tcp_connected(&mut self, id: SlotId) -> Result<Poll<()>, SocketError> {
        let conn = self.core.conn(id)?;
        conn.check()?;
        match conn.entry.tcb.state() {
            State::SynSent | State::SynReceived => Ok(Poll::Pending),
            State::Closed => {
                Err(conn.entry.tcb.take_error().map_or(SocketError::ConnectionAborted, Into::into))
            }
            _ => Ok(Poll::Ready(())),
        }
    }

    /// The entry of a connection, for its options.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NotSupported`].
    pub fn tcp_entry(&mut self, id: SlotId) -> Result<&mut TcpEntry, SocketError> {
        self.core.sockets.tcp(id)
    }

    /// A listener, for its options and statistics.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::Invalid`].
    pub fn listener(&mut self, id: SlotId) -> Result<&mut Listener, SocketError> {
        self.core.sockets.listener(id)
    }

    /// Closes every socket, as the end of the process does. Accepted bytes are still delivered.
    pub fn close_all(&mut self, now: Instant) {
        for id in self.core.sockets.ids() {
            self.close(now, id);
        }
    }

    /// Opens a listener.
    ///
    /// # Errors
    /// The address is not ours, or is in use.
    pub fn tcp_listen(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<SlotId, SocketError> {
        self.core.check_usable()?;
        if !local.ip().is_unspecified() && !self.core.net.ip.accepts(local.ip()) {
            return Err(SocketError::AddressNotAvailable);
        }
        let local = match options.any_port {
            true if local.port() != 0 => return Err(SocketError::Invalid),
            true => local,
            false => self.tcp.listen_port(local, &mut self.core.secret)?,
        };
        let dual_stack = local.is_ipv6() && local.ip().is_unspecified() && !options.only_v6;
        let wanted = ListenAddress { local, dual_stack };
        self.tcp.check_listen_conflict(wanted, &options, &self.core.sockets)?;
        let id = self.core.sockets.insert(Socket::Listener(Box::new(Listener {
            local,
            dual_stack,
            backlog: options.backlog.max(1),
            syn_queue: SynQueue::new(&options),
            accept: VecDeque::new(),
            pending: options.conditional_accept.map(|limits| self.tcp.pending.queue(limits)),
            options: options.socket,
            fast_open: None,
            watch: Default::default(),
        })));
        self.core.sockets.listener(id)?.set_fast_open(options.fast_open);
        self.tcp.listeners.entry(local.port()).or_default().push(id);
        Ok(id)
    }

    /// The next established connection of a listener, with its peer.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: not a listener, or one whose connections are pending
    /// ([`Shard::tcp_pending`]). [`SocketError::NetworkDown`].
    pub fn tcp_accept(&mut self, id: SlotId) -> Result<Poll<(SlotId, SocketAddr)>, SocketError> {
        let down = self.down();
        let listener = self.core.sockets.listener(id)?;
        let Some(child) = listener.accept.pop_front() else {
            if listener.pending.is_some() {
                return Err(SocketError::Invalid);
            }
            return down.map_or(Ok(Poll::Pending), Err);
        };
        // It is not removed while it waits here, even if the connection has ended.
        let entry = self.core.sockets.tcp(child)?;
        entry.parent = None;
        entry.is_open = true;
        Ok(Poll::Ready((child, entry.tcb.key().remote())))
    }

    /// Detaches up to `max` received bytes; an empty chain is the end of the stream. Give the chain
    /// back with [`Shard::tcp_read_done`].
    ///
    /// # Errors
    /// The connection's error, after everything that came before it.
    pub fn tcp_take(&mut self, id: SlotId, max: usize) -> Result<Poll<Chain>, SocketError> {
        self.tcp_take_more(id, max, 0, Least::OneByte)
    }

    /// As [`Shard::tcp_take`], for a call that has got `done` bytes already and ends with what it has
    /// when nothing more comes. [`Least::LowWater`] waits for the low-water mark of the socket, or for
    /// `max` bytes if that is less.
    ///
    /// # Errors
    /// As [`Shard::tcp_take`].
    pub fn tcp_take_more(
        &mut self,
        id: SlotId,
        max: usize,
        done: usize,
        least: Least,
    ) -> Result<Poll<Chain>, SocketError> {
        let Conn { entry, net, .. } = self.core.conn(id)?;
        if entry.has_posted() {
            return Ok(Poll::Pending);
        }
        let least = entry.least(max, least);
        let step = soreceive::take_at_least(&mut entry.tcb, &mut net.pool, max, least, done)?;
        match (&step, entry.error) {
            (Poll::Pending, Some(e)) if done == 0 => Err(e),
            (Poll::Pending, Some(_)) => Ok(Poll::Ready(Chain::new())),
            (Poll::Ready(_), _) => {
                net.pass(Stage::ReceiveTaken);
                Ok(step)
            }
            _ => Ok(step),
        }
    }

    /// References to up to `max` received bytes from `off` on, which stay where they are, once `least`
    /// of them have come; free them with [`Shard::free`].
    ///
    /// # Errors
    /// As [`Shard::tcp_take`].
    pub fn tcp_peek_at(
        &mut self,
        id: SlotId,
        off: usize,
        max: usize,
        least: usize,
    ) -> Result<Poll<Chain>, SocketError> {
        let Conn { entry, net, .. } = self.core.conn(id)?;
        if entry.has_posted() {
            return Ok(Poll::Pending);
        }
        let step = soreceive::peek_at(&mut entry.tcb, &mut net.pool, off, max, least)?;
        match (&step, entry.error) {
            (Poll::Pending, Some(e)) => Err(e),
            _ => Ok(step),
        }
    }

    /// Frees detached bytes that were copied, and opens the window if that is worth a packet.
    pub fn tcp_read_done(&mut self, now: Instant, id: SlotId, chain: Chain) {
        let bytes = chain.len();
        self.core.net.pool.free(chain);
        self.core.net.counters.count(Counter::Receives);
        self.core.net.counters.add(Counter::ReceiveBytes, bytes as u64);
        self.core.net.counters.add(Counter::CopiedBytes, bytes as u64);
        let Ok(mut conn) = self.core.conn(id) else { return };
        let is_news = conn.entry.tcb.after_read(&mut conn.net.env(now));
        conn.net.pass(Stage::ReceiveFreed);
        if is_news {
            conn.output_after_read(&mut self.tcp, now);
        }
    }

    /// Closes one or both directions.
    ///
    /// # Errors
    /// [`SocketError::NotConnected`].
    pub fn tcp_shutdown(
        &mut self,
        now: Instant,
        id: SlotId,
        how: Shutdown,
    ) -> Result<(), SocketError> {
        let entry = self.core.sockets.tcp(id)?;
        if matches!(entry.tcb.state(), State::SynSent | State::TimeWait | State::Closed) {
            return Err(SocketError::NotConnected);
        }
        if how != Shutdown::Read {
            entry.tcb.shutdown_write(now);
        }
        if how != Shutdown::Write {
            entry.tcb.shutdown_read(&mut self.core.net.env(now));
        }
        self.output_and_finish(now, id);
        self.tcp.run_posted(now, id, &mut self.core);
        self.notify(id);
        Ok(())
    }

    /// Closes a socket. Bytes that a connection accepted are still delivered, unless linger
    /// is zero or received data is left unread (RFC 2525 section 2.17: then it is reset).
    pub fn close(&mut self, now: Instant, id: SlotId) {
        self.core.events.closed(&mut self.core.sockets, id);
        match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(_)) => {
                self.tcp.close(now, id, &mut self.core);
                self.output_and_finish(now, id);
                self.tcp.reap_if_done(now, id, &mut self.core);
                self.tcp.orphaned(now, id, &mut self.core);
            }
            Some(Socket::Listener(_)) => {
                for child in self.tcp.close_listener(id, &mut self.core) {
                    self.output_and_finish(now, child);
                    self.tcp.reap_if_done(now, child, &mut self.core);
                }
            }
            Some(Socket::Udp(_)) => self.udp.close(id, &mut self.core),
            Some(Socket::Ping(_)) => self.ping.close(id, &mut self.core),
            Some(Socket::EchoListener(_)) => self.ping.close_listener(id, &mut self.core),
            None => {}
        }
    }

    /// Whether everything that was accepted for sending is acknowledged, of one socket or of all.
    pub fn is_drained(&self, id: Option<SlotId>) -> bool {
        let drained = |s: &Socket| match s {
            Socket::Tcp(t) => t.error.is_some() || t.tcb.is_drained(),
            _ => true,
        };
        match id {
            Some(id) => self.core.sockets.get(id).is_none_or(drained),
            None => self.core.sockets.iter().all(|(_, s)| drained(s)),
        }
    }

    /// The readiness of a socket.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn ready(&self, id: SlotId) -> Result<Ready, SocketError> {
        let socket = self.core.sockets.get(id).ok_or(SocketError::BadHandle)?;
        Ok(self.core.events.ready(socket))
    }

    /// The local and the remote address of a socket, as far as it has them.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn addresses(
        &self,
        id: SlotId,
    ) -> Result<(Option<SocketAddr>, Option<SocketAddr>), SocketError> {
        match self.core.sockets.get(id).ok_or(SocketError::BadHandle)? {
            Socket::Tcp(s) => {
                use State as S;
                let connected = !matches!(s.tcb.state(), S::SynSent | S::TimeWait | S::Closed);
                let key = s.tcb.key();
                Ok((Some(key.local()), connected.then(|| key.remote())))
            }
            Socket::Listener(l) => Ok((Some(l.local), None)),
            Socket::Udp(u) => Ok((u.socket.local, u.socket.remote)),
            Socket::Ping(_) | Socket::EchoListener(_) => Ok((None, None)),
        }
    }

    /// Runs `f` on the engine of a connection, for options; output follows, since some of them (nodelay, a larger
    /// buffer) release held segments.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn with_tcb<R>(
        &mut self,
        now: Instant,
        id: SlotId,
        f: impl FnOnce(&mut TcpEntry) -> R,
    ) -> Result<R, SocketError> {
        let mut conn = self.core.conn(id)?;
        let r = f(conn.entry);
        // An option may have made it ready.
        conn.notify();
        self.output_and_finish(now, id);
        Ok(r)
    }
}

impl Tcp {
    /// The local end of a new connection. The flow of a port chosen here is owned by this shard.
    fn choose_local(
        &self,
        src: IpAddr,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        core: &mut Core,
    ) -> Result<FlowKey, SocketError> {
        let ip = match local {
            Some(l) if !l.ip().is_unspecified() => l.ip(),
            _ => src,
        };
        if !core.net.ip.accepts(ip) {
            return Err(SocketError::AddressNotAvailable);
        }
        if ip.is_ipv4() != remote.is_ipv4() {
            return Err(SocketError::FamilyNotSupported);
        }
        let key_with = |port| FlowKey::new(with_zone(ip, port, zone_of(remote)), remote);
        if let Some(port) = local.map(|l| l.port()).filter(|p| *p != 0) {
            let key = key_with(port);
            if self.flows.find(&core.sockets, &key).is_some() {
                return Err(SocketError::AddressInUse);
            }
            if self.time_wait.contains(&key) {
                // Old segments of the last connection between the two ports may still arrive and
                // be accepted by this one (RFC 9293 section 3.4.2). Linux's answer too.
                return Err(SocketError::AddressNotAvailable);
            }
            return Ok(key);
        }
        let ports = core.secret.tcp_ports();
        ports
            .map(key_with)
            .find(|key| {
                core.siblings.owner_elsewhere(key).is_none()
                    && self.flows.find(&core.sockets, key).is_none()
                    && !self.time_wait.contains(key)
                    && !self.listeners.contains_key(&key.local_port)
            })
            .ok_or(SocketError::AddressNotAvailable)
    }

    fn listen_port(
        &self,
        local: SocketAddr,
        secret: &mut Secret,
    ) -> Result<SocketAddr, SocketError> {
        if local.port() != 0 {
            return Ok(local);
        }
        let mut ports = secret.tcp_ports();
        let port =
            ports.find(|p| !self.listeners.contains_key(p)).ok_or(SocketError::AddressInUse)?;
        Ok(SocketAddr::new(local.ip(), port))
    }

    fn check_listen_conflict(
        &self,
        wanted: ListenAddress,
        options: &ListenOptions,
        sockets: &Slab<Socket>,
    ) -> Result<(), SocketError> {
        let local = wanted.local;
        let others = self.listeners.get(&local.port()).map_or(&[][..], Vec::as_slice);
        let clash = others.iter().any(|id| match sockets.get(*id) {
            Some(Socket::Listener(l)) => wanted.clashes(l),
            _ => false,
        });
        let lingering = !options.reuse_address
            && connection_keys(sockets).chain(self.time_wait.keys()).any(|k| {
                k.local_port == local.port()
                    && (local.ip().is_unspecified() || local.ip() == k.local_ip())
            });
        if clash || lingering { Err(SocketError::AddressInUse) } else { Ok(()) }
    }

    /// The application closes a connection: its posted buffers are returned, the engine sends a FIN or resets.
    fn close(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        self.posted.cancel_all(now, id, core);
        let Core { sockets, net, .. } = core;
        let Ok(entry) = sockets.tcp(id) else { return };
        entry.is_open = false;
        entry.parent = None;
        if entry.linger == Some(Duration::ZERO) || entry.error.is_some() {
            entry.tcb.abort();
        } else {
            entry.tcb.close(&mut net.env(now));
        }
        self.posted.orphan(now, id, core);
    }

    /// Removes a listener. The connections that were not accepted are aborted: the caller sends their resets.
    fn close_listener(&mut self, id: SlotId, core: &mut Core) -> Vec<SlotId> {
        let Some(Socket::Listener(mut l)) = core.sockets.remove(id) else { return Vec::new() };
        if let Some(queue) = &mut l.pending {
            self.pending.close(queue);
            queue.timer.take().into_iter().for_each(|timer| core.wheel.cancel(timer));
        }
        if let Some(list) = self.listeners.get_mut(&l.local.port()) {
            list.retain(|other| *other != id);
            if list.is_empty() {
                self.listeners.remove(&l.local.port());
            }
        }
        let is_child = |s: &Socket| matches!(s, Socket::Tcp(t) if t.parent == Some(id));
        let children = core.sockets.iter().filter(|(_, s)| is_child(s)).map(|(id, _)| id);
        let children: Vec<SlotId> = children.collect();
        for child in &children {
            if let Ok(entry) = core.sockets.tcp(*child) {
                entry.parent = None;
                entry.is_embryo = false;
                entry.tcb.abort();
            }
        }
        children
    }
}

fn connection_keys(sockets: &Slab<Socket>) -> impl Iterator<Item = &FlowKey> {
    sockets.iter().filter_map(|(_, s)| match s {
        Socket::Tcp(entry) => Some(entry.tcb.key()),
        _ => None,
    })
}

/// The address that a new listener is bound to.
#[derive(Clone, Copy)]
struct ListenAddress {
    local: SocketAddr,
    /// It accepts IPv4 connections, too.
    dual_stack: bool,
}

impl ListenAddress {
    fn clashes(self, l: &Listener) -> bool {
        let (mine, other) = (l.local.ip(), self.local.ip());
        let families_meet = mine.is_ipv4() == other.is_ipv4()
            || (mine.is_ipv6() && l.dual_stack)
            || (other.is_ipv6() && self.dual_stack);
        if !families_meet {
            return false;
        }
        // As on Linux, where reuse-address does not go as far as two listeners.
        mine == other || mine.is_unspecified() || other.is_unspecified()
    }
}
