//! Fast Open of listeners (RFC 7413 section 4.2.2): a SYN with a valid cookie opens a connection that waits in the
//! accept queue at once, with the data of the SYN, before the handshake is complete.
//!
//! ```text
//!   SYN ── request, or invalid cookie ──► embryo; the SYN,ACK has a cookie and acknowledges no data
//!    │
//!    └─── valid cookie, space ──► accept queue ──► tcp_accept         counted as pending ──► handshake complete
//!                                                                                     └──► reset: counts on for 60 s
//! ```
//!
//! Bounds (section 5.1): pending connections and recent resets together stay within `backlog`; beyond it, and where a
//! SYN would be answered with a SYN cookie, the option is ignored. A forged cookie costs two hashes at most. Resets
//! count on, since a peer could otherwise open without end by resetting the connections that its SYNs have opened (from
//! a forged source, the owner of the address resets).

use crate::base::{Counter, Instant, SlotId};
use crate::tcp::{ConnError, State};
use crate::wire::tcp::FastOpen;

use super::Syn;
use crate::shard::conn::layer::Tcp;
use crate::shard::fast_open::keys::CookieAge;
use crate::shard::layers::Core;
use crate::shard::listen::sources::SourceUse;
use crate::shard::sockets::TcpEntry;

/// How a SYN is answered as to Fast Open.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct FastOpenAnswer {
    /// The option of the SYN,ACK.
    pub option: Option<FastOpen>,
    /// The connection opens with the SYN.
    pub opens: bool,
}

/// Decides about the option and the data of a SYN that gets an embryo. The order is that of Linux
/// (`tcp_try_fastopen`).
pub(super) fn judge(now: Instant, listener: SlotId, syn: &Syn, core: &mut Core) -> FastOpenAnswer {
    let own = core.secret.fast_open_keys(now);
    let Ok(l) = core.sockets.listener(listener) else { return FastOpenAnswer::default() };
    let Some(queue) = &mut l.fast_open else { return FastOpenAnswer::default() };
    let asked = syn.header.options.fast_open;
    if asked.is_none() && syn.payload.is_empty() {
        return FastOpenAnswer::default();
    }
    let counts = &mut l.syn_queue.counts;
    if !queue.has_space(now) {
        counts.fast_open_overflows += 1;
        core.net.counters.count(Counter::TcpFastOpenOverflows);
        return FastOpenAnswer::default();
    }
    if queue.options.without_cookie {
        return FastOpenAnswer { option: None, opens: true };
    }
    let Some(FastOpen { cookie, is_experimental }) = asked else {
        return FastOpenAnswer::default();
    };
    let keys = queue.options.keys.unwrap_or(own);
    let age = cookie.map(|cookie| keys.check(&syn.key, &cookie));
    if age == Some(CookieAge::Invalid) {
        counts.fast_open_invalid += 1;
        core.net.counters.count(Counter::TcpFastOpenCookiesInvalid);
    }
    let opens = matches!(age, Some(CookieAge::Current | CookieAge::Previous));
    let sends_cookie = age != Some(CookieAge::Current);
    if sends_cookie {
        core.net.counters.count(Counter::TcpFastOpenCookiesSent);
    }
    let fresh = FastOpen { cookie: Some(keys.cookie(&syn.key)), is_experimental };
    FastOpenAnswer { option: sends_cookie.then_some(fresh), opens }
}

impl Tcp {
    /// Enters a connection that opens with its SYN into the tables and the accept queue.
    pub(super) fn enter_early(
        &mut self,
        listener: SlotId,
        mut entry: TcpEntry,
        core: &mut Core,
    ) -> SlotId {
        entry.parent = Some(listener);
        entry.early = Some(listener);
        if let Some(sources) = &mut self.sources {
            // It is the program's at once, so it counts as complete.
            sources.add_embryo(entry.tcb.key());
            sources.complete(entry.tcb.key());
            entry.counts_as = Some(SourceUse::Connection);
        }
        entry.set_options(&core.sockets.options_of_listener(listener));
        core.net.counters.count(Counter::TcpFastOpensPassive);
        let id = self.insert(entry, &mut core.sockets);
        if let Ok(l) = core.sockets.listener(listener) {
            l.accept.push_back(id);
            l.syn_queue.counts.fast_opens += 1;
            if let Some(queue) = &mut l.fast_open {
                queue.pending += 1;
            }
        }
        core.notify(listener);
        id
    }

    /// The handshake of a connection is complete, or the connection is over: the listener stops counting it as pending.
    pub(crate) fn end_early(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        let Some(listener) = entry.early.take() else { return };
        let is_reset =
            entry.tcb.state() == State::Closed && entry.tcb.send_error() == Some(ConnError::Reset);
        let Ok(l) = core.sockets.listener(listener) else { return };
        let Some(queue) = &mut l.fast_open else { return };
        queue.pending = queue.pending.saturating_sub(1);
        if is_reset {
            queue.add_reset(now);
        }
    }
}
