//! The receive window: how much to advertise within the receive buffer, its storage and the shard's
//! budget, without ever shrinking the window (RFC 9293 section 3.8.6). *Storage* is the memory that
//! received bytes occupy, unused space in their buffers included (Linux: truesize).

use crate::mbuf::Chain;
use crate::tcp::Tcb;
use crate::tcp::contract::{Env, State, WindowBudget};
use crate::tcp::input::{MAX_WASTE_FRACTION, SHARED_BLOCK_BYTES};

/// Bytes read by reference and still loaned to the user, and their storage. They reduce the window
/// like unread bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoanCharge {
    /// Bytes of the stream.
    pub bytes: usize,
    /// Storage that the loan keeps from reuse, bytes; at least `bytes`.
    pub storage_bytes: usize,
}

impl LoanCharge {
    /// The loan that a chain amounts to.
    pub fn of(chain: &Chain) -> LoanCharge {
        let bytes = chain.len();
        LoanCharge { bytes, storage_bytes: chain.truesize().max(bytes) }
    }
}

/// The receive buffer of a connection, and what it counts for in the window.
#[derive(Debug)]
pub(crate) struct ReceiveBuffer {
    /// Its size, bytes.
    limit: usize,
    /// This connection's part of `WindowBudget::granted_bytes`.
    charged: usize,
    /// Storage freed by reading, or bytes of returned loans, since the window was last opened.
    freed: usize,
    /// Bytes and storage loaned to the user.
    lent: LoanCharge,
}

impl ReceiveBuffer {
    /// An empty buffer of `limit` bytes, which is charged nothing.
    pub(crate) fn new(limit: usize) -> ReceiveBuffer {
        ReceiveBuffer { limit, charged: 0, freed: 0, lent: LoanCharge::default() }
    }

    /// Its size, bytes.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Sets its size, bytes. A smaller buffer does not shrink the advertised window.
    pub(crate) fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }
}

/// Storage that connections may take between two ACKs, before it is charged: 512 frames in blocks of 2 KiB. With so
/// much space left in the budget, [`Tcb::budget_has_space_for`] needs no exact sum.
const BURST_BYTES: usize = 1 << 20;

impl Tcb {
    /// RCV.WND: bytes advertised and not yet received.
    #[inline]
    pub(crate) fn rcv_wnd(&self) -> u64 {
        self.rcv.adv.saturating_sub(self.rcv.nxt)
    }

    /// The largest window that a header of this connection can offer: nothing older than that is repeated.
    pub(crate) fn largest_rcv_wnd(&self) -> u64 {
        u64::from(u16::MAX) << self.scale.rcv
    }

    /// The advertised window as the peer sees it: in units of the window scale, rounded down, so
    /// that the right edge never moves without cause. To the peer it may seem to shrink, by less
    /// than a unit. Bytes within the former edge are still accepted (RFC 7323 section 2.4).
    #[inline]
    pub(crate) fn advertised_window(&self) -> u64 {
        self.round_to_scale(self.rcv_wnd())
    }

    /// The largest window up to `bytes` that the field can express.
    #[inline]
    fn round_to_scale(&self, bytes: u64) -> u64 {
        let scale = self.scale.rcv;
        (bytes >> scale).min(u64::from(u16::MAX)) << scale
    }

    /// Storage limit of the receive buffer: twice its size, since few blocks are full.
    #[inline]
    pub(crate) fn storage_limit(&self) -> usize {
        self.space.limit.saturating_mul(2)
    }

    /// Storage in use, loans included.
    #[inline]
    pub(crate) fn storage_in_use(&self) -> usize {
        self.recv.storage_bytes().saturating_add(self.space.lent.storage_bytes)
    }

    /// Whether more than half of the storage limit is in use.
    pub(crate) fn is_recv_truesize_high(&self) -> bool {
        self.storage_in_use() > self.space.limit
    }

    /// Overhead of compacted storage: the last block, which may be empty, and unused space too
    /// small to be worth a copy.
    #[inline]
    fn storage_overhead(&self) -> usize {
        SHARED_BLOCK_BYTES
            .min(self.space.limit / 2)
            .saturating_add(self.space.limit / MAX_WASTE_FRACTION)
    }

    /// The window that storage admits, bytes: segments of any size fit once compacted. Out-of-order
    /// bytes are part of the window and have their storage already.
    fn window_by_storage(&self) -> usize {
        let in_use = self.storage_in_use().saturating_add(self.storage_overhead());
        let free = self.storage_limit().saturating_sub(in_use);
        free.saturating_add(self.recv.out_of_order_bytes())
    }

    /// Whether the rest of the advertised window is still backed by storage if this payload is
    /// queued without copying.
    #[inline]
    pub(crate) fn leaves_window_backed(&self, payload: &Chain) -> bool {
        let adds = payload.truesize().max(payload.len());
        let has = self.recv.out_of_order_bytes().saturating_add(payload.len());
        let rest = self.rcv_wnd().saturating_sub(has as u64) as usize;
        let need = self.storage_in_use().saturating_add(adds).saturating_add(rest);
        need.saturating_add(self.storage_overhead()) <= self.storage_limit()
    }

    /// Whether the budget has space for `bytes` beside what this connection has now.
    #[inline]
    pub(crate) fn budget_has_space_for(&self, budget: &WindowBudget, bytes: usize) -> bool {
        let with_burst = budget.granted_bytes.saturating_add(bytes).saturating_add(BURST_BYTES);
        with_burst <= budget.limit_bytes || self.budget_has_space_now(budget, bytes)
    }

    /// The exact check, from what this connection has now: `charged` is as of its last ACK.
    #[inline(never)]
    fn budget_has_space_now(&self, budget: &WindowBudget, bytes: usize) -> bool {
        let own = (self.rcv_wnd() as usize).saturating_add(self.recv.storage_bytes());
        let others = budget.granted_bytes.saturating_sub(self.space.charged);
        others.saturating_add(own).saturating_add(bytes) <= budget.limit_bytes
    }

    /// Whether the storage in use leaves the advertised window its storage and the budget its limit.
    pub(crate) fn is_storage_ample(&self, budget: &WindowBudget) -> bool {
        let rest = (self.rcv_wnd() as usize).saturating_sub(self.recv.out_of_order_bytes());
        let need = self.storage_in_use().saturating_add(rest);
        self.budget_has_space_now(budget, 0)
            && need.saturating_add(self.storage_overhead()) <= self.storage_limit()
    }

    /// The window that buffer, storage, budget and window field admit, bytes.
    fn admitted_window(&self, budget: &WindowBudget) -> u64 {
        self.round_to_scale(self.admitted_bytes(budget))
    }

    /// The same, not limited by the window field.
    fn admitted_bytes(&self, budget: &WindowBudget) -> u64 {
        if self.user.recv_shutdown {
            return self.space.limit as u64;
        }
        let unread = self.recv.readable().saturating_add(self.space.lent.bytes);
        let by_bytes = self.space.limit.saturating_sub(unread);
        // Loans count as charged by others: they stay charged when the connection is gone.
        let others = budget.granted_bytes.saturating_sub(self.space.charged);
        // A connection may use half of the bytes that its reader frees again, and others get the other half.
        let own = self.space.charged.saturating_add(self.space.freed / 2);
        let fair = budget.fair_share(own, others);
        let by_budget = fair.saturating_sub(self.recv.storage_bytes());
        // The guaranteed minimum, less unread bytes of it.
        let floor = budget.minimum(self.own_mss()).saturating_sub(unread);
        by_bytes.min(self.window_by_storage()).min(by_budget.max(floor)) as u64
    }

    /// The receive buffer under the current budget, bytes: unread bytes and the admitted window, at
    /// least `MIN_BYTES`.
    #[inline]
    fn effective_buffer(&self, allowed: u64) -> u64 {
        let unread = self.recv.readable().saturating_add(self.space.lent.bytes) as u64;
        let present = allowed.saturating_add(unread).max(WindowBudget::MIN_BYTES as u64);
        present.min(self.space.limit as u64)
    }

    /// Advances the right edge, charges the budget, and returns the window field. The edge that the peer sees advances
    /// by at least the smaller of a segment and half of the buffer (RFC 9293 section 3.8.6.2.2).
    #[inline]
    pub(crate) fn advertise(&mut self, budget: &mut WindowBudget) -> u16 {
        let allowed = self.admitted_window(budget);
        let step = (self.effective_buffer(allowed) / 2).min(u64::from(self.rcv_mss));
        if allowed >= self.advertised_window().saturating_add(step) {
            self.rcv.adv = self.rcv.nxt.saturating_add(allowed);
            self.space.freed = 0;
        }
        self.update_charge(budget);
        (self.advertised_window() >> self.scale.rcv) as u16
    }

    /// The window field of a SYN: never scaled (RFC 7323 section 2.2).
    pub(crate) fn advertise_in_syn(&mut self, budget: &mut WindowBudget) -> u16 {
        // An embryonic connection is charged when its handshake completes: a SYN flood does not use
        // up the budget. One with the data of its SYN is charged at once.
        let is_embryo = matches!(self.state, State::SynReceived);
        let most = if is_embryo { budget.syn_ack_window(self.own_mss()) } else { usize::MAX };
        let field = self.admitted_bytes(budget).min(most as u64).min(u64::from(u16::MAX));
        self.rcv.adv = self.rcv.adv.max(self.rcv.nxt.saturating_add(field));
        if !is_embryo || self.is_open_early() {
            self.update_charge(budget);
        }
        field as u16
    }

    /// Updates this connection's charge to window plus storage. After a shutdown of reading nothing is
    /// stored, so the window takes no memory from others.
    pub(crate) fn update_charge(&mut self, budget: &mut WindowBudget) {
        let window = if self.user.recv_shutdown { 0 } else { self.rcv_wnd() as usize };
        let now = window.saturating_add(self.recv.storage_bytes());
        let others = budget.granted_bytes.saturating_sub(self.space.charged);
        budget.granted_bytes = others.saturating_add(now);
        self.space.charged = now;
    }

    /// Records a loan of bytes taken from the receive queue. Charge it to the budget as well
    /// ([`WindowBudget::lend`]).
    pub fn lend(&mut self, lent: LoanCharge, env: &mut Env) {
        self.space.lent.bytes = self.space.lent.bytes.saturating_add(lent.bytes);
        self.space.lent.storage_bytes =
            self.space.lent.storage_bytes.saturating_add(lent.storage_bytes);
        self.note_read(env.now);
        self.update_charge(env.window);
    }

    /// Ends a loan. True if a window update is due: call output.
    pub fn take_back(&mut self, lent: LoanCharge, env: &mut Env) -> bool {
        self.space.lent.bytes = self.space.lent.bytes.saturating_sub(lent.bytes);
        self.space.lent.storage_bytes =
            self.space.lent.storage_bytes.saturating_sub(lent.storage_bytes);
        self.space.freed = self.space.freed.saturating_add(lent.bytes);
        self.after_read(env)
    }

    /// Whether the advertised window has no space for another full segment. A reader that waits for
    /// more bytes might then wait forever.
    pub(crate) fn is_recv_window_closed(&self) -> bool {
        self.advertised_window() <= u64::from(self.rcv_mss)
    }

    /// Bytes and storage loaned to the user.
    pub fn lent(&self) -> LoanCharge {
        self.space.lent
    }

    /// Call after taking bytes from the receive queue. True if output has something to send, such
    /// as a window update.
    ///
    /// A separate window update is sent only if it opens the window by two segments and a quarter
    /// of the buffer, or if little of the advertised window is left. Otherwise the next ACK carries
    /// it.
    #[inline]
    pub fn after_read(&mut self, env: &mut Env) -> bool {
        self.note_read(env.now);
        let charged = self.space.charged;
        self.update_charge(env.window);
        self.space.freed =
            self.space.freed.saturating_add(charged.saturating_sub(self.space.charged));
        if !self.is_synchronized() || self.peer_closed() {
            return self.wants_output();
        }
        let offered = self.advertised_window();
        let allowed = self.admitted_window(env.window);
        let gain = allowed.saturating_sub(offered);
        let limit = self.effective_buffer(allowed);
        let two = u64::from(self.rcv_mss).saturating_mul(2).min(limit / 2);
        let low = offered <= (limit / 8).max(two);
        // A peer that waits for this ACK (Nagle, small send buffer) would otherwise wait for the delayed ACK timer. In
        // interactive use the response carries the ACK (RFC 9293 section 3.8.6.3).
        if self.due.pushed && self.recv.readable() == 0 {
            self.dialogue.on_message();
            self.due.ack |= !self.dialogue.is_interactive();
        }
        if gain >= two && gain > 0 && (low || gain >= limit / 4) {
            self.due.ack = true;
        }
        self.wants_output()
    }
}
