//! TCP Fast Open (RFC 7413): data on the SYN.
//!
//! ```text
//! client, without a cookie     SYN(request) ──► SYN,ACK(cookie)               the cookie is reported
//! client, with a cookie        SYN(cookie) + data ──► SYN,ACK of SYN and data     taken
//!                                                 ──► SYN,ACK of the SYN alone    data is sent again at once
//!                                                 ──► nothing: SYN without option and data (section 4.1.3)
//! server, valid cookie         the connection is the user's in SYN-RECEIVED, and may send
//! ```
//!
//! In: the option of the SYN ([`FastOpenSyn`]), the payload of a SYN whose cookie the caller has checked. Out: a
//! [`FastOpenReport`] for the caller's cache of cookies. Cookies are made, checked and cached by the caller.
//!
//! Invariant: positions `1..=syn_bytes` were sent with our SYN and are in no run of the scoreboard. What the
//! SYN,ACK does not acknowledge of them is unsent again.

use crate::mbuf::Chain;
use crate::tcp::Tcb;
use crate::tcp::contract::{Env, State};
use crate::wire::tcp::{FastOpen, FastOpenCookie, Header};

/// Bytes of a segment that SYN data leaves free: the longest options, since middleboxes may add some (as Linux).
const OPTION_SPACE: usize = 40;

/// The Fast Open option in the SYN of an active open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FastOpenSyn {
    /// A request for a cookie, and no data.
    Request,
    /// A cookie, and data.
    Cookie {
        /// The server's cookie.
        cookie: FastOpenCookie,
        /// The MSS option of the SYN,ACK that it came with (RFC 7413 section 4.1.3).
        mss: u16,
    },
    /// Data without an option, for servers that ask for no cookie. Only where the peers are known: RFC 7413 section
    /// 4.1 requires a cookie.
    WithoutCookie,
}

/// The response of a server to a SYN with a Fast Open option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FastOpenVerdict {
    /// It acknowledged data or sent a cookie, or the SYN had neither data nor a request.
    Taken,
    /// It did neither (RFC 7413 section 4.1.3.1: a negative response).
    Refused,
    /// The SYN, or all answers, were lost.
    Lost,
}

/// What an active open has learnt of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FastOpenReport {
    /// The response of the server.
    pub verdict: FastOpenVerdict,
    /// The cookie of the SYN,ACK.
    pub cookie: Option<FastOpenCookie>,
    /// The MSS of the SYN,ACK, bytes.
    pub mss: u16,
}

/// Which end of a Fast Open the connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Role {
    #[default]
    None,
    Client,
    /// The user owns the connection before the handshake completes.
    Server,
}

/// First the option to send, then the report for the caller.
#[derive(Clone, Copy, Debug, Default)]
enum Exchange {
    #[default]
    Nothing,
    /// The option of our first SYN or SYN,ACK.
    Offer(FastOpen),
    /// The report, until the caller takes it.
    Report(FastOpenReport),
}

/// State of Fast Open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FastOpenState {
    role: Role,
    exchange: Exchange,
    /// Most bytes of data on the SYN; 0: none.
    most_bytes: u16,
    /// Bytes sent with our SYN.
    pub syn_bytes: u16,
    /// The data of a SYN, ours or the peer's, was taken as a whole.
    pub is_data_taken: bool,
}

impl FastOpenState {
    /// The option of our first SYN or SYN,ACK.
    pub(crate) fn option(&self) -> Option<FastOpen> {
        match self.exchange {
            Exchange::Offer(option) => Some(option),
            _ => None,
        }
    }
}

impl Tcb {
    /// Sets the Fast Open option and data of the SYN. Call it after the options of the user and before the first
    /// output; data is committed to the send queue before.
    pub fn set_fast_open(&mut self, syn: FastOpenSyn) {
        let (cookie, mss) = match syn {
            FastOpenSyn::Request => (None, 0),
            FastOpenSyn::Cookie { cookie, mss } => (Some(cookie), mss),
            FastOpenSyn::WithoutCookie => (None, u16::MAX),
        };
        let segment = usize::from(mss).min(self.path.mss()).min(self.own_mss());
        self.fast_open = FastOpenState {
            role: Role::Client,
            exchange: match syn {
                FastOpenSyn::WithoutCookie => Exchange::Nothing,
                _ => Exchange::Offer(FastOpen { cookie, is_experimental: false }),
            },
            most_bytes: segment.saturating_sub(OPTION_SPACE) as u16,
            ..FastOpenState::default()
        };
    }

    /// Most bytes of data that the SYN will carry.
    pub fn syn_data_limit(&self) -> usize {
        usize::from(self.fast_open.most_bytes)
    }

    /// The option of the SYN,ACK: a cookie for the peer.
    pub fn offer_cookie(&mut self, option: FastOpen) {
        self.fast_open.exchange = Exchange::Offer(option);
    }

    /// Takes the data of the SYN of a passive open, whose cookie is valid (RFC 7413 section 4.2.2). From now on the
    /// user may read, write and close, in SYN-RECEIVED. Data beyond our MSS is not taken; the peer sends it again.
    pub fn accept_syn_data(&mut self, env: &mut Env, mut payload: Chain) {
        self.fast_open.role = Role::Server;
        let len = payload.len();
        payload.trim_back(len.saturating_sub(self.own_mss()), env.pool);
        if payload.is_empty() {
            return env.pool.free(payload);
        }
        // A message, whether its segment was pushed or not.
        self.record_push(1, payload.len());
        // The user learns of it when the connection is accepted.
        let _readable = self.store_in_order(env, payload);
        self.fast_open.is_data_taken = self.rcv.nxt > 1;
    }

    /// Whether the user owns the connection before the handshake completes.
    #[inline]
    pub fn is_open_early(&self) -> bool {
        self.fast_open.role == Role::Server && matches!(self.state, State::SynReceived)
    }

    /// Takes what an active open has learnt, once.
    pub fn take_fast_open_report(&mut self) -> Option<FastOpenReport> {
        let Exchange::Report(report) = self.fast_open.exchange else { return None };
        self.fast_open.exchange = Exchange::Nothing;
        Some(report)
    }

    /// Bytes of data for the SYN to be sent next: none on a repetition (RFC 7413 section 4.1.3).
    pub(crate) fn syn_payload_bytes(&self) -> usize {
        let is_first = self.snd.nxt == 0 && matches!(self.state, State::SynSent);
        let ready = usize::try_from(self.send.ready_end()).unwrap_or(usize::MAX);
        if is_first { ready.min(self.syn_data_limit()) } else { 0 }
    }

    /// After the segment that acknowledged our SYN: data of the SYN that it did not acknowledge is
    /// unsent again.
    pub(crate) fn requeue_syn_data(&mut self) {
        let sent_to = u64::from(core::mem::take(&mut self.fast_open.syn_bytes)).saturating_add(1);
        if sent_to <= 1 {
            return;
        }
        let missing = sent_to.saturating_sub(self.snd.una);
        self.fast_open.is_data_taken = missing == 0;
        if missing > 0 {
            self.snd.nxt = self.snd.una;
            self.retransmits.segments = self.retransmits.segments.saturating_add(1);
            self.retransmits.bytes = self.retransmits.bytes.saturating_add(missing);
        }
    }

    /// Records the response of the SYN,ACK to our SYN. Call it before [`Tcb::requeue_syn_data`]; `moved`: positions
    /// acknowledged, the SYN included.
    pub(crate) fn report_syn_ack(&mut self, syn_ack: &Header, moved: u64) {
        // Cookies that were not asked for are ignored.
        let Some(offer) = self.fast_open.option().filter(|_| self.fast_open.role == Role::Client)
        else {
            return;
        };
        let cookie = syn_ack.options.fast_open.and_then(|o| o.cookie);
        let asks = self.fast_open.syn_bytes > 0 || offer.cookie.is_none();
        let verdict = if cookie.is_some() || moved > 1 || !asks {
            FastOpenVerdict::Taken
        } else if self.retransmits.segments > 0 {
            FastOpenVerdict::Lost
        } else {
            FastOpenVerdict::Refused
        };
        let report = FastOpenReport { verdict, cookie, mss: self.peer_mss };
        self.fast_open.exchange = Exchange::Report(report);
    }

    /// No answer to our SYN came.
    pub(crate) fn report_syn_lost(&mut self) {
        let is_client = self.fast_open.role == Role::Client && matches!(self.state, State::SynSent);
        if is_client && self.fast_open.option().is_some() {
            let verdict = FastOpenVerdict::Lost;
            let report = FastOpenReport { verdict, cookie: None, mss: 0 };
            self.fast_open.exchange = Exchange::Report(report);
        }
    }
}
