//! How an end connects: from one port, and again where that is what a program would do.

use fulmar::internals::runtime::WatchedShard;
use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::socket::SocketError;
use std::task::Poll;

use super::app::{Cx, End, Phase};
use super::oracle::Violation;

/// The attempts of an end.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Attempts {
    /// Calls of `connect` that began a handshake.
    pub(super) calls: u64,
    /// SYNs sent for those that are over.
    pub(super) syns: u64,
    /// Connections that its own station's listener has handed over for them.
    pub(super) accepted: u64,
}

impl End {
    pub(super) fn connect(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let Some((from, to, at)) = self.connects else { return Ok(()) };
        if cx.now < at {
            return Ok(());
        }
        self.asked_at = cx.now;
        self.began_at.get_or_insert(cx.now);
        match self.call_connect(cx, from, to) {
            Ok(id) => {
                self.id = Some(id);
                self.phase = Phase::Connecting;
                self.attempts.calls += 1;
                self.note(cx, || format!("connects {from} > {to}"));
                Ok(())
            }
            // The route is cut for a moment, or the last connection from this port is not quite over:
            // as a program would, try again.
            Err(
                SocketError::NetworkUnreachable
                | SocketError::AddressInUse
                | SocketError::AddressNotAvailable,
            ) => {
                self.connects = Some((from, to, cx.now + Duration::from_millis(500)));
                Ok(())
            }
            Err(e) => self.fail(cx, e),
        }
    }

    /// SYNs sent for the attempt that is not over.
    pub(super) fn syns_of_attempt(&self, shard: &mut WatchedShard) -> u64 {
        let Some(id) = self.id.filter(|_| self.phase == Phase::Connecting) else { return 0 };
        1 + shard.tcp_entry(id).map_or(0, |e| e.tcb.info().retransmits)
    }

    pub(super) fn check_connected(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let Some(id) = self.id else { return Ok(()) };
        let outcome = cx.shard.tcp_connected(id);
        if !matches!(outcome, Ok(Poll::Pending)) {
            self.attempts.syns += self.syns_of_attempt(cx.shard);
        }
        match outcome {
            Ok(Poll::Ready(())) => {
                self.note(cx, || "connected".into());
                self.open(cx, id)
            }
            Ok(_) => Ok(()),
            Err(_) if self.connects.is_none() => {
                self.forget(cx, id);
                Ok(())
            }
            // Both connect, but one was held up and not there yet: as a program would, try again.
            Err(SocketError::ConnectionRefused) if self.both_connect && !self.may_fail => {
                self.reconnect(cx, id)
            }
            // Three requests for the other's Ethernet address went unanswered.
            Err(SocketError::HostUnreachable) if self.may_be_absent && !self.may_fail => {
                self.reconnect_unless_early(cx, id)
            }
            Err(e) => self.fail(cx, e),
        }
    }

    pub(super) fn reconnect(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        cx.shard.close(cx.now, id);
        let at = (cx.now + Duration::from_micros(self.draw.below(2_000_000))).as_nanos();
        // Two that connect to each other meet within a transit time only: at a whole second.
        let at = at.next_multiple_of(if self.both_connect { 1_000_000_000 } else { 1 });
        let at = Instant::from_nanos(at);
        self.connects = self.connects.map(|(from, to, _)| (from, to, at));
        (self.id, self.phase, self.told) = (None, Phase::Idle, None);
        (self.written, self.write_left, self.has_reconnected) = (0, 0, true);
        Ok(())
    }
}
