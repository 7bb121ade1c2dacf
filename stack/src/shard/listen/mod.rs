//! A listener's connections from the SYN until they are accepted.
//!
//! ```text
//!          space in the SYN queue                                 space in the accept queue
//!   SYN ──► embryo ── SYN,ACK ──► ACK ──────────────────────────────► accept queue ──► tcp_accept
//!    │                                                                     ▲
//!    └────► no space: SYN,ACK with a cookie ─► ACK, cookie is right ───────┘
//! ```
//!
//! Invariants: a listener has at most `syn_backlog` embryos and at most `backlog` connections in its accept queue. A
//! SYN that is answered with a cookie leaves no state, so cookies bound the memory that a flood of SYNs can take. An
//! embryo whose last ACK finds the accept queue full stays an embryo; its peer repeats that ACK when the SYN,ACK is
//! repeated (Linux does the same). Pressure does not shorten its life: its peer is not a flood.
//!
//! A SYN with a valid Fast Open cookie opens a connection in the accept queue at once: see `fast_open.rs`.
//!
//! A listener with [`ConditionalAccept`](crate::shard::ConditionalAccept) offers a SYN to its program before it is
//! answered: see `pending.rs`.
//!
//! An embryo is a whole connection: a compact record would need the SYN-RECEIVED state of the engine a
//! second time, and `syn_backlog` bounds the memory either way.

mod decide;
pub(crate) mod fast_open;
pub(crate) mod pending;
pub(in crate::shard) mod sources;
pub(in crate::shard) mod syn_queue;

use crate::base::{Counter, DropReason, FlowKey, Instant, IpVersion, SeqNum, SlotId};
use crate::mbuf::Chain;
use crate::tcp::{
    COOKIE_LIFETIME, CookieHashes, CookieVerdict, EcnField, PathInfo, Tcb, check_cookie,
    cookie_syn_ack,
};
use crate::wire::tcp;

use crate::shard::conn::input::Segment;
use crate::shard::conn::layer::Tcp;
use crate::shard::conn::socket_options::HeaderOptions;
use crate::shard::layers::Core;
use crate::shard::listen::sources::SourceUse;
use crate::shard::listen::syn_queue::SynCookies;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};

/// How often a SYN,ACK is repeated at most while the SYN queue is more than half full, as on Linux: the
/// embryos of a flood are gone after 7 s instead of 127 s.
const REPEATS_UNDER_PRESSURE: u32 = 2;

/// How a SYN is answered.
enum SynVerdict {
    Embryo,
    /// An embryo, in the place of the oldest one if that may be given up.
    Replace,
    Cookie,
    /// The program decides.
    Offer,
    Drop(DropReason),
}

/// A SYN for a listener.
struct Syn {
    key: FlowKey,
    header: tcp::Header,
    /// The ECN field of its IP packet.
    ecn: EcnField,
    /// Its data, for Fast Open.
    payload: Chain,
    /// See [`Tcp::passive_open`].
    min_iss: Option<SeqNum>,
}

impl Tcp {
    /// A SYN for a listener (RFC 9293 section 3.10.7.2); false if it was dropped. Data on it is not kept, but by Fast
    /// Open: the peer sends it again. `min_iss` is what our initial sequence number must not be before, if there
    /// was a connection of this flow a moment ago: a cookie could not promise that, so the SYN gets an
    /// embryo.
    pub(crate) fn passive_open(
        &mut self,
        now: Instant,
        listener: SlotId,
        seg: Segment,
        min_iss: Option<SeqNum>,
        core: &mut Core,
    ) -> bool {
        let Segment { key, header, ecn, payload, .. } = seg;
        let mut syn = Syn { key, header, ecn, payload, min_iss };
        let taken = match self.judge_syn(listener, &syn, core) {
            SynVerdict::Embryo => self.add_embryo(now, listener, &mut syn, core),
            SynVerdict::Replace => match self.drop_oldest_embryo(now, listener, core) {
                true => self.add_embryo(now, listener, &mut syn, core),
                false => Err(DropReason::ListenBacklog),
            },
            SynVerdict::Cookie => {
                send_cookie(now, listener, &syn, core);
                Ok(())
            }
            SynVerdict::Offer => self.offer(now, listener, &syn, core),
            SynVerdict::Drop(reason) => Err(reason),
        };
        core.net.pool.free(syn.payload);
        if let Err(reason) = taken {
            core.net.counters.drop_packet(reason);
            if reason != DropReason::SynPending
                && let Ok(l) = core.sockets.listener(listener)
            {
                l.syn_queue.counts.syns_dropped += 1;
            }
        }
        taken.is_ok()
    }

    fn judge_syn(&self, listener: SlotId, syn: &Syn, core: &Core) -> SynVerdict {
        let key = &syn.key;
        let needs_embryo = syn.min_iss.is_some();
        if let Err(reason) = self.check_space(listener, key, &core.sockets) {
            return SynVerdict::Drop(reason);
        }
        let Some(Socket::Listener(l)) = core.sockets.get(listener) else {
            return SynVerdict::Drop(DropReason::TcpNoSocket);
        };
        if l.pending.is_some() {
            return SynVerdict::Offer;
        }
        let is_queue_full = l.syn_queue.len >= l.syn_queue.limit;
        let is_table_full = core.sockets.len() >= core.config.max_sockets;
        let is_source_full = self.sources.as_ref().is_some_and(|s| !s.takes_embryo(key));
        match l.syn_queue.cookies {
            SynCookies::Always if !needs_embryo => SynVerdict::Cookie,
            _ if !(is_queue_full || is_table_full || is_source_full) => SynVerdict::Embryo,
            SynCookies::WhenFull if !needs_embryo => SynVerdict::Cookie,
            _ if is_source_full => SynVerdict::Drop(DropReason::SourceLimit),
            _ if is_queue_full => SynVerdict::Replace,
            _ => SynVerdict::Drop(DropReason::ListenBacklog),
        }
    }

    /// Whether a further connection could be accepted.
    fn check_space(
        &self,
        listener: SlotId,
        key: &FlowKey,
        sockets: &Slab<Socket>,
    ) -> Result<(), DropReason> {
        match sockets.get(listener) {
            Some(Socket::Listener(l)) if l.accept.len() < l.backlog => {}
            _ => return Err(DropReason::AcceptQueueFull),
        }
        match &self.sources {
            Some(sources) if !sources.takes_connection(key) => Err(DropReason::SourceLimit),
            _ => Ok(()),
        }
    }

    fn add_embryo(
        &mut self,
        now: Instant,
        listener: SlotId,
        syn: &mut Syn,
        core: &mut Core,
    ) -> Result<(), DropReason> {
        let key = syn.key;
        let path = core.net.path_to(Some(key.local_ip()), key.remote_ip(), key.zone);
        let (_, path) = path.map_err(|_| DropReason::NoRoute)?;
        let iss = core.secret.initial_sequence(&key, now);
        let iss = syn.min_iss.map_or(iss, |min| iss.max(min));
        let offset = core.secret.timestamp_offset(&key);
        let answer = fast_open::judge(now, listener, syn, core);
        let cfg = core.sockets.options_of_listener(listener).config(&core.config.tcp);
        let mut tcb = Tcb::passive(&cfg, key, iss, offset, path.info, now, &syn.header);
        tcb.set_syn_ecn(syn.ecn);
        if let Some(option) = answer.option {
            tcb.offer_cookie(option);
        }
        let id = if answer.opens {
            let payload = core::mem::take(&mut syn.payload);
            tcb.accept_syn_data(&mut core.net.env(now), payload);
            self.enter_early(listener, TcpEntry::new(tcb, path), core)
        } else {
            self.enter_embryo(listener, TcpEntry::new(tcb, path), core)
        };
        core.queue_output(id);
        Ok(())
    }

    /// Enters an embryo into the tables.
    fn enter_embryo(&mut self, listener: SlotId, mut entry: TcpEntry, core: &mut Core) -> SlotId {
        entry.set_options(&core.sockets.options_of_listener(listener));
        entry.parent = Some(listener);
        entry.is_embryo = true;
        if let Some(sources) = &mut self.sources {
            sources.add_embryo(entry.tcb.key());
            entry.counts_as = Some(SourceUse::Embryo);
        }
        let id = self.insert(entry, &mut core.sockets);
        tidy_order(listener, &mut core.sockets);
        if let Ok(l) = core.sockets.listener(listener) {
            l.syn_queue.len += 1;
            l.syn_queue.order.push_back(id);
        }
        id
    }

    /// Gives up the oldest embryo of a listener (RFC 4987 section 3.4); false if there is none. A listener with
    /// cookies gives up only one that has repeated its SYN,ACK: the ACK of a younger one may be on its way, and its
    /// peer, which takes the connection for open, would be reset.
    fn drop_oldest_embryo(&mut self, now: Instant, listener: SlotId, core: &mut Core) -> bool {
        loop {
            let Ok(l) = core.sockets.listener(listener) else { return false };
            let is_sparing = l.syn_queue.cookies != SynCookies::Off;
            let Some(id) = l.syn_queue.order.front().copied() else { return false };
            if let Some(Socket::Tcp(entry)) = core.sockets.get(id)
                && entry.is_embryo
            {
                if is_sparing && (entry.is_acked || !entry.tcb.has_repeated_syn_ack()) {
                    return false;
                }
                self.drop_embryo(now, id, core);
                core.net.counters.count(Counter::TcpEmbryosReplaced);
                if let Ok(l) = core.sockets.listener(listener) {
                    l.syn_queue.order.pop_front();
                    l.syn_queue.counts.embryos_replaced += 1;
                }
                return true;
            }
            if let Ok(l) = core.sockets.listener(listener) {
                l.syn_queue.order.pop_front();
            }
        }
    }

    fn drop_embryo(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        if let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) {
            entry.tcb.drop_embryo();
        }
        self.reap_if_done(now, id, core);
    }

    /// A segment for an embryo. The ACK that ends the handshake is dropped while the connection could not
    /// be accepted; one that acknowledges a cookie sent earlier replaces the embryo, and what may be data
    /// behind such an ACK is dropped, since the embryo would answer it by a reset.
    pub(crate) fn embryo_input(&mut self, now: Instant, id: SlotId, seg: Segment, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get(id) else {
            return core.net.pool.free(seg.payload);
        };
        if let Some(listener) = entry.parent.filter(|_| is_ack(seg.header.flags)) {
            let is_own = entry.tcb.completes_handshake(&seg.header);
            if is_own && let Err(reason) = self.check_space(listener, &seg.key, &core.sockets) {
                if let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) {
                    entry.is_acked = true;
                }
                return drop_last_ack(listener, seg, reason, core);
            }
            if !is_own && expects_cookies(now, listener, &core.sockets) {
                match cookie_of(now, listener, &seg, core) {
                    CookieVerdict::Valid(syn) => {
                        self.drop_embryo(now, id, core);
                        return self.open_from_cookie(now, listener, seg, &syn, core);
                    }
                    CookieVerdict::NotHandshake => {
                        return core.net.drop_chain(seg.payload, DropReason::SynCookieFailed);
                    }
                    CookieVerdict::Forged => {}
                }
            }
        }
        self.connection_input(now, id, &seg.header, seg.ecn, seg.payload, core);
    }

    /// An ACK without a connection, at a listener that has sent cookies. A wrong one is answered by a
    /// reset, as any ACK in LISTEN (RFC 9293 section 3.10.7.2); but not what may be data behind a first
    /// segment that was lost.
    pub(crate) fn cookie_input(
        &mut self,
        now: Instant,
        listener: SlotId,
        seg: Segment,
        core: &mut Core,
    ) {
        let verdict = cookie_of(now, listener, &seg, core);
        if let CookieVerdict::Valid(syn) = verdict {
            return self.open_from_cookie(now, listener, seg, &syn, core);
        }
        if let Ok(l) = core.sockets.listener(listener) {
            l.syn_queue.counts.cookies_failed += 1;
        }
        match verdict {
            CookieVerdict::Forged => self.refuse(now, seg, DropReason::SynCookieFailed, core),
            _ => core.net.drop_chain(seg.payload, DropReason::SynCookieFailed),
        }
    }

    /// A cookie came back and is right: the connection exists from now on.
    fn open_from_cookie(
        &mut self,
        now: Instant,
        listener: SlotId,
        seg: Segment,
        syn: &tcp::Header,
        core: &mut Core,
    ) {
        let key = seg.key;
        if let Err(reason) = self.check_space(listener, &key, &core.sockets) {
            return drop_last_ack(listener, seg, reason, core);
        }
        if core.sockets.len() >= core.config.max_sockets {
            return drop_last_ack(listener, seg, DropReason::ListenBacklog, core);
        }
        let Ok((_, path)) = core.net.path_to(Some(key.local_ip()), key.remote_ip(), key.zone)
        else {
            return drop_last_ack(listener, seg, DropReason::NoRoute, core);
        };
        let offset = core.secret.timestamp_offset(&key);
        let cfg = core.sockets.options_of_listener(listener).config(&core.config.tcp);
        let (env, ack) = (&mut core.net.env(now), &seg.header);
        let tcb = Tcb::from_cookie(&cfg, key, offset, path.info, env, syn, ack);
        core.net.counters.count(Counter::TcpSynCookiesValid);
        if let Ok(l) = core.sockets.listener(listener) {
            l.syn_queue.counts.cookies_valid += 1;
        }
        let id = self.enter_embryo(listener, TcpEntry::new(tcb, path), core);
        self.connection_input(now, id, &seg.header, seg.ecn, seg.payload, core);
    }

    /// A connection is complete: a passive one goes to its listener's accept queue.
    pub(crate) fn established(&mut self, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        if !core::mem::take(&mut entry.is_embryo) {
            return;
        }
        if let Some(sources) = &mut self.sources {
            sources.complete(entry.tcb.key());
            entry.counts_as = Some(SourceUse::Connection);
        }
        let Some(listener) = entry.parent else { return };
        if let Ok(l) = core.sockets.listener(listener) {
            l.syn_queue.remove_one();
            l.accept.push_back(id);
            core.notify(listener);
        }
    }

    /// Before the timer of a connection: an embryo whose timer finds the SYN queue more than half full is given up
    /// earlier, unless its peer has answered (RFC 4987 section 3.3).
    pub(crate) fn shorten_syn_retries(&mut self, id: SlotId, core: &mut Core) {
        let (key, parent) = match core.sockets.get(id) {
            Some(Socket::Tcp(entry)) if entry.is_embryo => {
                (*entry.tcb.key(), entry.parent.or(entry.decided_by))
            }
            _ => return,
        };
        let listener = parent.and_then(|listener| core.sockets.get(listener));
        let Some(Socket::Listener(l)) = listener else { return };
        let is_under_pressure = match &l.pending {
            Some(queue) => queue.is_under_pressure(&key),
            None => l.syn_queue.is_under_pressure(),
        };
        let retries = core.config.tcp.syn_retries;
        if let Ok(entry) = core.sockets.tcp(id) {
            match entry.is_acked {
                true => entry.tcb.set_syn_retries(retries),
                false if is_under_pressure => {
                    entry.tcb.set_syn_retries(retries.min(REPEATS_UNDER_PRESSURE));
                }
                false => {}
            }
        }
    }
}

/// Keeps the order of embryos at most twice as long as there may be embryos.
fn tidy_order(listener: SlotId, sockets: &mut Slab<Socket>) {
    let Ok(l) = sockets.listener(listener) else { return };
    if l.syn_queue.order.len() < 2 * l.syn_queue.limit {
        return;
    }
    let mut order = core::mem::take(&mut l.syn_queue.order);
    order.retain(|id| sockets.is_embryo(*id));
    if let Ok(l) = sockets.listener(listener) {
        l.syn_queue.order = order;
    }
}

/// Drops the last ACK of a handshake.
fn drop_last_ack(listener: SlotId, seg: Segment, reason: DropReason, core: &mut Core) {
    core.net.drop_chain(seg.payload, reason);
    if let Ok(l) = core.sockets.listener(listener) {
        l.syn_queue.counts.acks_dropped += 1;
    }
}

/// Answers a SYN and remembers nothing of it.
fn send_cookie(now: Instant, listener: SlotId, syn: &Syn, core: &mut Core) {
    let key = &syn.key;
    let Ok(l) = core.sockets.listener(listener) else { return };
    l.syn_queue.cookies_until = now + COOKIE_LIFETIME;
    l.syn_queue.counts.cookies_sent += 1;
    let options = l.options;
    core.net.counters.count(Counter::TcpSynCookiesSent);
    // The MSS option is that of the link, without a route look-up.
    let ip_header_bytes = if key.remote_ip().is_ipv4() { 20 } else { 40 };
    let mtu = core.net.ip.mtu();
    let path = PathInfo { mtu, route_mtu: mtu, ip_header_bytes, tso_bytes: None };
    let path = options.limit_path(path);
    let hashes = CookieHashes {
        base: core.secret.cookie_base(key),
        ts_offset: core.secret.timestamp_offset(key),
    };
    let mac = |input: &_| core.secret.cookie_mac(key, input);
    let (cfg, budget) = (options.config(&core.config.tcp), &core.net.window);
    let syn = crate::tcp::Syn { header: &syn.header, ecn: syn.ecn };
    let reply = cookie_syn_ack(&cfg, &path, budget, syn, now, hashes, mac);
    core.net.send_control(now, key, HeaderOptions::of_segments(&options), &reply);
}

/// Whether a listener has sent cookies that may still come back.
pub(super) fn expects_cookies(now: Instant, listener: SlotId, sockets: &Slab<Socket>) -> bool {
    matches!(sockets.get(listener), Some(Socket::Listener(l)) if now < l.syn_queue.cookies_until)
}

/// Checks the ACK of a segment as a cookie of this listener, by whose configuration it was made.
fn cookie_of(now: Instant, listener: SlotId, seg: &Segment, core: &Core) -> CookieVerdict {
    let cfg = core.sockets.options_of_listener(listener).config(&core.config.tcp);
    let (key, version) = (&seg.key, IpVersion::of(&seg.key.remote_ip()));
    let mac = |input: &_| core.secret.cookie_mac(key, input);
    let base = core.secret.cookie_base(key);
    check_cookie(&cfg, version, &seg.header, now, base, mac)
}

/// Whether a segment could end a handshake.
pub(crate) fn is_ack(flags: tcp::Flags) -> bool {
    flags.contains(tcp::Flags::ACK) && !flags.intersects(tcp::Flags::SYN | tcp::Flags::RST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::listen::syn_queue::ListenOptions;

    #[test]
    fn the_embryos_of_a_full_syn_queue_take_at_most_two_and_a_half_megabytes() {
        let embryos = ListenOptions::default().embryo_limit();
        let bytes = embryos * size_of::<TcpEntry>();
        assert!(bytes <= 10 << 18, "{bytes} bytes");
    }
}
