//! The receive window: how much to offer, within the receive buffer, the storage behind it and the
//! shard's budget, without ever taking back what was offered (RFC 9293 section 3.8.6).

use crate::Tcb;
use crate::contract::{Env, State, WindowBudget};
use crate::input::{SHARED_BLOCK_BYTES, WASTE_PART};
use fulmar_mbuf::Chain;

/// Bytes that left the receive buffer by reference and are still held by the user, and the storage
/// behind them: they keep the window as small as if they had not been read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lent {
    /// Bytes of the stream.
    pub bytes: usize,
    /// Bytes of storage that they keep from arriving packets; at least `bytes`.
    pub storage_bytes: usize,
}

impl Lent {
    /// What a chain keeps while somebody holds it.
    pub fn of(chain: &Chain) -> Lent {
        let bytes = chain.len();
        Lent { bytes, storage_bytes: chain.held_bytes().max(bytes) }
    }
}

impl Tcb {
    /// Bytes offered and not yet used.
    #[inline]
    pub(crate) fn rcv_wnd(&self) -> u64 {
        self.rcv_adv.saturating_sub(self.rcv_nxt)
    }

    /// The offered window as the peer sees it: whole units of the scale, never rounded up, since that
    /// would move the right edge without cause. So it may seem to shrink, by less than a unit; what
    /// was offered once is taken all the same (RFC 7323 section 2.4).
    #[inline]
    pub(crate) fn visible_window(&self) -> u64 {
        self.in_units(self.rcv_wnd())
    }

    /// The largest window up to `bytes` that the field can say.
    #[inline]
    fn in_units(&self, bytes: u64) -> u64 {
        let scale = self.scale.rcv;
        (bytes >> scale).min(u64::from(u16::MAX)) << scale
    }

    /// Storage that the receive buffer may take: twice its bytes, since few blocks are full.
    #[inline]
    pub(crate) fn storage_limit(&self) -> usize {
        self.recv_limit.saturating_mul(2)
    }

    /// Storage that bytes keep, those that the user holds by reference included.
    #[inline]
    pub(crate) fn kept_storage(&self) -> usize {
        self.recv.storage_bytes().saturating_add(self.lent.storage_bytes)
    }

    /// Half of the storage is used up.
    pub fn is_storage_short(&self) -> bool {
        self.kept_storage() > self.recv_limit
    }

    /// Storage beyond their number that bytes take which were copied together: the last block, which
    /// may be empty, and what is too little to be worth copying.
    #[inline]
    fn slack(&self) -> usize {
        SHARED_BLOCK_BYTES.min(self.recv_limit / 2).saturating_add(self.recv_limit / WASTE_PART)
    }

    /// The window that storage allows, bytes: whatever sizes its segments have, copied together they
    /// fit. Bytes behind gaps are a part of it that has its storage already.
    fn by_storage(&self) -> usize {
        let kept = self.kept_storage().saturating_add(self.slack());
        let free = self.storage_limit().saturating_sub(kept);
        free.saturating_add(self.recv.out_of_order_bytes())
    }

    /// Whether the rest of the offered window still has its storage if this payload is kept as it is.
    #[inline]
    pub(crate) fn leaves_window_backed(&self, payload: &Chain) -> bool {
        let adds = payload.held_bytes().max(payload.len());
        let has = self.recv.out_of_order_bytes().saturating_add(payload.len());
        let rest = self.rcv_wnd().saturating_sub(has as u64) as usize;
        let need = self.kept_storage().saturating_add(adds).saturating_add(rest);
        need.saturating_add(self.slack()) <= self.storage_limit()
    }

    /// The window that buffer, storage, budget and field allow, bytes.
    fn allowed_window(&self, budget: &WindowBudget) -> u64 {
        self.in_units(self.allowed_bytes(budget))
    }

    /// The same whatever the field can say.
    fn allowed_bytes(&self, budget: &WindowBudget) -> u64 {
        if self.user.recv_shut {
            return self.recv_limit as u64;
        }
        let unread = self.recv.readable().saturating_add(self.lent.bytes);
        let by_bytes = self.recv_limit.saturating_sub(unread);
        // What is lent is among the others: it stays charged when the connection is gone.
        let others = budget.granted_bytes.saturating_sub(self.charged);
        let fair = budget.fair_part(self.charged, others);
        let by_budget = fair.saturating_sub(self.recv.storage_bytes());
        // What everybody may have: not again while the last of it lies unread.
        let floor = budget.minimum(self.own_mss()).saturating_sub(unread);
        by_bytes.min(self.by_storage()).min(by_budget.max(floor)) as u64
    }

    /// The receive buffer as the budget lets it be now, bytes: what is unread and what is allowed, and no
    /// less than everybody may have.
    #[inline]
    fn present_buffer(&self, allowed: u64) -> u64 {
        let unread = self.recv.readable().saturating_add(self.lent.bytes) as u64;
        let present = allowed.saturating_add(unread).max(WindowBudget::MIN_BYTES as u64);
        present.min(self.recv_limit as u64)
    }

    /// Moves the right edge, charges the budget, and returns the window field. The edge moves only in
    /// steps worth a segment or half of the buffer (RFC 9293 section 3.8.6.2.2), and never left.
    #[inline]
    pub(crate) fn advertise(&mut self, budget: &mut WindowBudget) -> u16 {
        let allowed = self.allowed_window(budget);
        let step = (self.present_buffer(allowed) / 2).min(u64::from(self.rcv_mss));
        if allowed >= self.rcv_wnd().saturating_add(step) {
            self.rcv_adv = self.rcv_nxt.saturating_add(allowed);
        }
        self.recharge(budget);
        (self.visible_window() >> self.scale.rcv) as u16
    }

    /// The window field of a SYN: never scaled (RFC 7323 section 2.2).
    pub(crate) fn advertise_in_syn(&mut self, budget: &mut WindowBudget) -> u16 {
        // An embryo is charged when its handshake is complete: a flood of SYNs takes no window from others.
        let is_embryo = matches!(self.state, State::SynReceived);
        let most = if is_embryo { budget.for_embryo(self.own_mss()) } else { usize::MAX };
        let field = self.allowed_bytes(budget).min(most as u64).min(u64::from(u16::MAX));
        self.rcv_adv = self.rcv_adv.max(self.rcv_nxt.saturating_add(field));
        if !is_embryo {
            self.recharge(budget);
        }
        field as u16
    }

    /// Makes this connection's charge equal to window and storage.
    pub(crate) fn recharge(&mut self, budget: &mut WindowBudget) {
        let now = (self.rcv_wnd() as usize).saturating_add(self.recv.storage_bytes());
        let others = budget.granted_bytes.saturating_sub(self.charged);
        budget.granted_bytes = others.saturating_add(now);
        self.charged = now;
    }

    /// Bytes that were taken from the receive queue stay with the user for now. Charge them to the
    /// budget as well ([`WindowBudget::lend`]).
    pub fn lend(&mut self, lent: Lent, env: &mut Env) {
        self.lent.bytes = self.lent.bytes.saturating_add(lent.bytes);
        self.lent.storage_bytes = self.lent.storage_bytes.saturating_add(lent.storage_bytes);
        self.recharge(env.window);
    }

    /// The user has given them back. True if the peer should hear of the larger window: call output.
    pub fn take_back(&mut self, lent: Lent, env: &mut Env) -> bool {
        self.lent.bytes = self.lent.bytes.saturating_sub(lent.bytes);
        self.lent.storage_bytes = self.lent.storage_bytes.saturating_sub(lent.storage_bytes);
        self.after_read(env)
    }

    /// The window that is offered has no room for another full segment, so that a reader who waits for
    /// more might wait for ever.
    pub fn is_window_shut(&self) -> bool {
        self.visible_window() <= u64::from(self.rcv_mss)
    }

    /// What the user holds by reference.
    pub fn lent(&self) -> Lent {
        self.lent
    }

    /// Says that bytes were taken from the receive queue. True if the peer should hear of the
    /// larger window: call output.
    ///
    /// A window update of its own goes only if it opens the window by two segments and a quarter
    /// of the buffer, or if the peer has little left; otherwise the next ACK carries it.
    #[inline]
    pub fn after_read(&mut self, env: &mut Env) -> bool {
        self.recharge(env.window);
        if !self.is_synchronized() || self.peer_closed() {
            return self.wants_output();
        }
        let offered = self.visible_window();
        let allowed = self.allowed_window(env.window);
        let gain = allowed.saturating_sub(offered);
        let limit = self.present_buffer(allowed);
        let two = u64::from(self.rcv_mss).saturating_mul(2).min(limit / 2);
        let low = offered <= (limit / 8).max(two);
        // A peer whose Nagle algorithm or small send buffer waits for this ACK would else wait for
        // the timer. Where answers carry the ACKs (RFC 9293 section 3.8.6.3) they are awaited.
        if self.due.pushed && !self.interactive && self.recv.readable() == 0 {
            self.due.ack = true;
        }
        if gain >= two && gain > 0 && (low || gain >= limit / 4) {
            self.due.ack = true;
        }
        self.wants_output()
    }
}
