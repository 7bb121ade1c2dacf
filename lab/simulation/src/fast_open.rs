//! TCP Fast Open (RFC 7413) in the swarm: listeners that give cookies, openers with first data, and middleboxes that
//! eat or change what they do not know.
//!
//! Data of a SYN that the network doubles may reach the program twice (RFC 7413 section 2.1): ports are not used again,
//! and a connection that comes twice is closed ([`super::World::may_repeat`]).

use std::net::SocketAddr;

use fulmar_stack::base::{Duration, SlotId};
use fulmar_stack::shard::{FastOpenOptions, FirstData};
use fulmar_stack::socket::SocketError;

use super::app::{Cx, End, Quirk};
use super::middlebox::{self, Action, Middlebox, Segments};
use super::oracle::Violation;
use super::pattern;
use super::scenario::{Draw, FlowKind, FlowPlan, Scenario};
use super::swarm::{limit_bytes, plain_end};
use super::world::START;

const MS: Duration = Duration::from_millis(1);

/// First data of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FirstPlan {
    /// Bytes at most, of those that the end writes.
    pub bytes: usize,
    /// Without a cookie.
    pub without_cookie: bool,
}

impl Scenario {
    pub(super) fn draw_fast_open(&mut self, d: &mut Draw) {
        self.flows.iter_mut().for_each(|f| f.again = None);
        for listener in &mut self.swarm.fast_open {
            let backlog = d.pick(&[1, 2, 16, 256]);
            let options =
                FastOpenOptions { backlog, without_cookie: d.percent(30), ..Default::default() };
            *listener = d.percent(85).then_some(options);
        }
        // The first connection gets the cookie that the others bring.
        let (opener, spread) = (d.below(2) as usize, d.log(1, 20_000));
        for _ in 0..d.below(12) {
            let mut f = FlowPlan {
                opener,
                to_self: d.percent(4),
                at: MS * d.below(spread) as u32,
                again: None,
                kind: if d.percent(10) { FlowKind::Abort(0, 1) } else { FlowKind::Plain },
                ends: [0; 2].map(|_| plain_end(d.log(1, 20_000))),
            };
            limit_bytes(&mut f, 20_000);
            self.flows.push(f);
        }
        for f in &mut self.flows {
            let most = f.ends[0].bytes.min(pattern::PIECE as u64);
            let first = FirstPlan {
                bytes: d.log(1, most.min(5_000)).min(most) as usize,
                without_cookie: d.percent(25),
            };
            f.ends[0].options.first = d.percent(80).then_some(first);
        }
        for _ in 0..d.below(3) {
            self.draw_fast_open_middlebox(d, opener);
        }
    }

    fn draw_fast_open_middlebox(&mut self, d: &mut Draw, opener: usize) {
        let option = middlebox::FAST_OPEN;
        let (action, segments) = d.pick(&[
            (Action::DropData, Segments::Syns),
            (Action::DropOption(option), Segments::Syns),
            (Action::DropOption(option), Segments::SynAcks),
            (Action::ForgeCookie, Segments::Syns),
            (Action::Strip(option), Segments::Syns),
            (Action::Strip(option), Segments::SynAcks),
            (Action::ForgeCookie, Segments::Syns),
            (Action::ForgeCookie, Segments::SynAcks),
        ]);
        let station = if segments == Segments::Syns { 1 - opener } else { opener };
        self.add_middlebox(d, station, action, segments);
    }

    /// Puts a middlebox in front of a station, from the beginning or from later on.
    pub(super) fn add_middlebox(
        &mut self,
        d: &mut Draw,
        station: usize,
        action: Action,
        segments: Segments,
    ) {
        let from = if d.percent(50) { Duration::ZERO } else { MS * d.log(1, 10_000) as u32 };
        self.swarm.middleboxes[station].push(Middlebox { action, segments, from: START + from });
    }
}

impl End {
    /// First data, if it has any.
    fn first(&self) -> Option<FirstPlan> {
        let first = self.plan.options.first.filter(|_| self.quirk != Quirk::Stuck)?;
        let bytes = first.bytes.min(usize::try_from(self.plan.bytes).unwrap_or(usize::MAX));
        Some(FirstPlan { bytes, ..first })
    }

    /// Whether its attempt failed although the data of its SYN may have arrived.
    pub(super) fn has_failed_early(&self) -> bool {
        self.opens_early && self.error == Some(SocketError::HostUnreachable) && self.read == 0
    }

    /// Reconnects after the peer was unreachable, unless the peer may have the data of the SYN, which a second SYN
    /// would deliver again.
    pub(super) fn reconnect_unless_early(
        &mut self,
        cx: &mut Cx,
        id: SlotId,
    ) -> Result<(), Violation> {
        if !self.opens_early {
            return self.reconnect(cx, id);
        }
        self.may_fail = true;
        self.fail(cx, SocketError::HostUnreachable)
    }

    /// Connects, with first data if that is its plan.
    pub(super) fn call_connect(
        &mut self,
        cx: &mut Cx,
        from: SocketAddr,
        to: SocketAddr,
    ) -> Result<SlotId, SocketError> {
        let Some(plan) = self.first() else {
            return cx.shard.tcp_connect(cx.now, to, Some(from));
        };
        let bytes = pattern::piece(self.stream(false), 0, plan.bytes);
        let first = FirstData { bytes, without_cookie: plan.without_cookie };
        let space = cx.shard.fast_open_space(cx.now, to, Some(from), first, |_| ())?;
        self.opens_early = space.is_some() && !bytes.is_empty();
        let (id, n) = cx.shard.tcp_connect_fast(cx.now, to, Some(from), first, |_| ())?;
        if n > 0 {
            self.accepted(cx, n);
        }
        Ok(id)
    }
}
