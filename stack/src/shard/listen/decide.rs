//! The decisions about pending connections: see `pending.rs`.

use crate::base::{Counter, DropReason, Instant, SeqNum, SlotId};
use crate::ip::{InvokingPacket, SentError};
use crate::socket::SocketError;
use crate::tcp::{Tcb, reset_for};
use core::task::Poll;

use crate::shard::conn::layer::Tcp;
use crate::shard::conn::socket_options::HeaderOptions;
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::listen::Syn;
use crate::shard::listen::pending::{Decision, Pending, PendingId, PendingQueue, PendingSyn};
use crate::shard::listen::sources::SourceUse;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::wheel::TimerKey;
use crate::shard::world::Shard;

fn queue_of(sockets: &mut Slab<Socket>, listener: SlotId) -> Option<&mut PendingQueue> {
    match sockets.get_mut(listener) {
        Some(Socket::Listener(l)) => l.pending.as_deref_mut(),
        _ => None,
    }
}

impl Tcp {
    /// A SYN for a conditional listener.
    pub(super) fn offer(
        &mut self,
        now: Instant,
        listener: SlotId,
        syn: &Syn,
        core: &mut Core,
    ) -> Result<(), DropReason> {
        let Core { sockets, wheel, .. } = core;
        let Some(queue) = queue_of(sockets, listener) else { return Err(DropReason::TcpNoSocket) };
        let deadline = now + queue.limits.timeout;
        let entry = PendingSyn {
            key: syn.key,
            listener,
            syn: syn.header,
            ecn: syn.ecn,
            min_iss: syn.min_iss,
            is_taken: false,
        };
        self.pending.add(queue, entry, deadline)?;
        queue.timer = Some(wheel.schedule(queue.timer, TimerKey::Pending(listener), deadline));
        core.notify(listener);
        Ok(())
    }

    /// A reset for a pending connection ends it if its sequence number is exactly the expected one (RFC 5961
    /// section 3.2).
    pub(crate) fn reset_pending(
        &mut self,
        id: PendingId,
        seq: SeqNum,
        core: &mut Core,
    ) -> Result<(), DropReason> {
        let entry = self.pending.get(id).ok_or(DropReason::TcpNoSocket)?;
        if seq != SeqNum(entry.syn.seq.0.wrapping_add(1)) {
            return Err(DropReason::TcpBlindReset);
        }
        let listener = entry.listener;
        core.net.counters.count(Counter::TcpResetsIn);
        self.remove_pending(id, &mut core.sockets);
        if let Some(queue) = queue_of(&mut core.sockets, listener) {
            queue.reset += 1;
        }
        Ok(())
    }

    /// The handshake of a connection that was accepted before its SYN was answered is over, or the connection is.
    pub(crate) fn end_opening(&self, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        let Some(listener) = entry.decided_by.take() else { return };
        let key = *entry.tcb.key();
        if let Some(queue) = queue_of(&mut core.sockets, listener) {
            queue.end_opening(&key);
        }
    }

    fn remove_pending(&mut self, id: PendingId, sockets: &mut Slab<Socket>) -> Option<PendingSyn> {
        let entry = self.pending.remove(id.0)?;
        if let Some(queue) = queue_of(sockets, entry.listener) {
            queue.forget(&entry);
        }
        Some(entry)
    }

    fn accept_pending(
        &mut self,
        now: Instant,
        id: PendingId,
        core: &mut Core,
    ) -> Result<SlotId, SocketError> {
        let entry = self.pending.get(id).ok_or(SocketError::ConnectionAborted)?;
        let key = entry.key;
        if core.sockets.len() >= core.config.max_sockets {
            return Err(SocketError::NoBuffer);
        }
        if self.flows.find(&core.sockets, &key).is_some() {
            return Err(SocketError::AddressInUse);
        }
        if self.sources.as_ref().is_some_and(|sources| !sources.takes_opening(&key)) {
            return Err(SocketError::NoBuffer);
        }
        let (_, path) = core.net.path_to(Some(key.local_ip()), key.remote_ip(), key.zone)?;
        let Some(entry) = self.pending.remove(id.0) else {
            return Err(SocketError::ConnectionAborted);
        };
        if let Some(queue) = queue_of(&mut core.sockets, entry.listener) {
            queue.begin_opening(&entry);
        }
        let iss = core.secret.initial_sequence(&key, now);
        let iss = entry.min_iss.map_or(iss, |min| iss.max(min));
        let offset = core.secret.timestamp_offset(&key);
        let options = core.sockets.options_of_listener(entry.listener);
        let cfg = options.config(&core.config.tcp);
        let mut tcb = Tcb::passive(&cfg, key, iss, offset, path.info, now, &entry.syn);
        tcb.set_syn_ecn(entry.ecn);
        let mut connection = TcpEntry::new(tcb, path);
        connection.set_options(&options);
        connection.decided_by = Some(entry.listener);
        connection.is_embryo = true;
        connection.is_open = true;
        if let Some(sources) = &mut self.sources {
            sources.add_embryo(&key);
            connection.counts_as = Some(SourceUse::Embryo);
        }
        let id = self.insert(connection, &mut core.sockets);
        core.net.link.set_now(now);
        self.output_now(now, id, core);
        Ok(id)
    }

    /// The timer of the pending connections of a listener.
    pub(crate) fn expire_pending(&mut self, now: Instant, listener: SlotId, core: &mut Core) {
        let Core { sockets, wheel, .. } = core;
        let Some(queue) = queue_of(sockets, listener) else { return };
        let next = self.pending.expire(queue, now);
        queue.timer = next.map(|at| wheel.schedule(None, TimerKey::Pending(listener), at));
    }
}

fn refuse(net: &mut Net, now: Instant, entry: &PendingSyn) {
    if let Some(header) = reset_for(&entry.syn, 0) {
        net.counters.count(Counter::TcpResetsOut);
        net.send_control(now, &entry.key, HeaderOptions::SEGMENT, &header);
    }
}

fn report_unreachable(net: &mut Net, now: Instant, entry: &PendingSyn, code: u8) {
    let (src, dst) = (entry.key.remote(), entry.key.local());
    let about = InvokingPacket::syn(src, dst, entry.syn.seq.0, entry.syn.header_bytes());
    let error = SentError::Unreachable { code };
    net.with_ip(now, |ip, cx| ip.send_error_about_packet(cx, &about, error, None));
}

impl Shard {
    /// The oldest pending connection that was not returned before, of a listener with
    /// [`ListenOptions::conditional_accept`](crate::shard::ListenOptions::conditional_accept).
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: a listener without that, or no listener. [`SocketError::NetworkDown`].
    pub fn tcp_pending(&mut self, listener: SlotId) -> Result<Poll<Pending>, SocketError> {
        let down = self.down();
        self.core.sockets.listener(listener)?;
        let Shard { core: Core { sockets, .. }, tcp: Tcp { pending, .. }, .. } = self;
        let queue = queue_of(sockets, listener).ok_or(SocketError::Invalid)?;
        match (pending.take(queue), down) {
            (Some(pending), _) => Ok(Poll::Ready(pending)),
            (None, Some(e)) => Err(e),
            (None, None) => Ok(Poll::Pending),
        }
    }

    /// Decides about a pending connection. [`Decision::Accept`] returns the connection: it becomes writable
    /// when the handshake is over, as one that was opened with [`Shard::tcp_connect`], or has an error.
    ///
    /// # Errors
    /// [`SocketError::ConnectionAborted`]: a reset of the peer or the time-out has ended it. From `Accept`, with the
    /// connection still pending: [`SocketError::NoBuffer`] without a free socket or at a limit of its source
    /// ([`SourceLimits`](crate::shard::SourceLimits)), [`SocketError::NetworkUnreachable`],
    /// [`SocketError::AddressInUse`] if the program has connected between the same addresses and ports meanwhile.
    pub fn tcp_decide(
        &mut self,
        now: Instant,
        id: PendingId,
        decision: Decision,
    ) -> Result<Option<SlotId>, SocketError> {
        if decision == Decision::Accept {
            let accepted = self.tcp.accept_pending(now, id, &mut self.core)?;
            self.finish_call(now);
            return Ok(Some(accepted));
        }
        let entry = self
            .tcp
            .remove_pending(id, &mut self.core.sockets)
            .ok_or(SocketError::ConnectionAborted)?;
        self.core.net.link.set_now(now);
        match decision {
            Decision::Refuse => refuse(&mut self.core.net, now, &entry),
            Decision::Unreachable(code) => {
                report_unreachable(&mut self.core.net, now, &entry, code)
            }
            Decision::Accept | Decision::Drop => {}
        }
        self.finish_call(now);
        Ok(None)
    }
}
