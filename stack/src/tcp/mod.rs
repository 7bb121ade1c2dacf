//! The TCP engine: RFC 9293 with window scaling and timestamps (RFC 7323), selective
//! acknowledgements (RFC 2018, RFC 2883), loss recovery by RACK-TLP (RFC 8985) and proportional
//! rate reduction (RFC 9937), congestion control (CUBIC of RFC 9438, NewReno, BBR), explicit congestion
//! notification (RFC 9768, RFC 3168) and the defences of RFC 5961.
//!
//! A [`Tcb`] is a state machine. Inputs: segments, time and user calls. Outputs: segments (through
//! [`Emit`]), deadlines and [`Events`]. No I/O, no clock, no lock, no randomness, no callback but
//! `Emit`, and no heap allocation per segment.
//!
//! How a shard drives it:
//!
//! 1. [`Tcb::input`] for every segment of a batch; it never emits.
//! 2. [`Tcb::output`] once for every connection touched by the batch, a commit, a read or a timer.
//!    [`Tcb::wants_output`] tells whether the call would send anything.
//! 3. [`Tcb::on_timer`] at or after [`Tcb::next_deadline`], then [`Tcb::output`].
//! 4. In [`State::TimeWait`]: keep [`Tcb::time_wait_entry`], then [`Tcb::release`] and drop the
//!    Tcb. When [`Tcb::is_closed`]: release and drop it once the user has closed its handle.
//!
//! **Who owns the memory.** Payload belongs to the send and receive queues of `mbuf`. An outgoing
//! segment holds references into the send queue. A retransmission copies no payload.
//!
//! **Cost.** Constant per segment or super-segment, independent of its size. A pure ACK or in-order
//! data segment passes header prediction and a handful of stores. A data segment sent costs one
//! decision, one header mbuf and one payload reference per 64 KiB.
//!
//! **Not here.** Listening sockets and SYN queues (`shard`; SYN cookies are computed here), the
//! choice of initial sequence numbers (RFC 6528, the caller), routing.

#![forbid(unsafe_code)]
// Every number here may come from a packet.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod arith;
mod challenge;
mod config;
mod congestion;
mod contract;
mod cookie;
mod delivery;
mod dialogue;
mod ecn;
mod embryo;
mod expire;
mod fast_open;
mod info;
mod input;
mod keepalive;
mod output;
mod pacing;
mod plpmtud;
mod records;
mod recovery;
mod rtt;
mod scoreboard;
mod segment;
mod statistics;
mod tcb;
mod timers;
mod timewait;
mod tuning;
mod user;
mod window;

pub use config::Config;
pub use congestion::{CongestionControl, PathModel, UnknownCongestionControl};
pub use contract::{
    ConnError, EcnField, Emit, EmitError, Env, Events, IcmpError, PathInfo, SegmentOut, Sent,
    State, Syn, WindowBudget,
};
pub(crate) use cookie::COOKIE_LIFETIME;
pub(crate) use cookie::CookieHashes;
pub(crate) use cookie::CookieInput;
pub(crate) use cookie::CookieVerdict;
pub(crate) use cookie::check_cookie;
pub(crate) use cookie::cookie_syn_ack;
pub(crate) use ecn::EcnMode;
pub use ecn::{EcnPolicy, UnknownEcnPolicy};
pub use fast_open::{FastOpenReport, FastOpenSyn, FastOpenVerdict};
pub use info::Info;
pub use keepalive::Keepalive;
pub use plpmtud::MtuProbing;
pub(crate) use segment::control_segment;
pub(crate) use segment::reset_for;
pub(crate) use segment::verify_checksum;
pub use statistics::SendTimes;
pub use tcb::Tcb;
pub use timewait::{TimeWait, TimeWaitVerdict};
pub use window::LoanCharge;
