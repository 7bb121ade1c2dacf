//! Datagrams of the guest on their way to the host's network.

use fulmar_stack::base::{SlotId, Stage};
use fulmar_stack::ip::{InvokingPacket, SentError};
use fulmar_stack::shard::{PendingError, SendMessage};
use fulmar_stack::socket::SocketError;
use fulmar_stack::udp::Datagram;
use nix::errno::Errno;
use std::task::Poll;

use super::super::dns::ruling::{self, Ruling};
use super::super::way::NotCarried;
use super::super::{Context, canonical, host_socket};
use super::Udp;
use super::flow::{self, Flow};
use crate::policy::Protocol;
use crate::stat::Refusal;

/// Datagrams or runs that are taken from the shard in one turn, and calls that send what a path does not take as runs.
const WORK_PER_TURN: usize = 256;
/// Most datagrams that leave with one call, which is Linux's limit before 6.9; and their bytes.
const MOST_JOINED: usize = 64;
const MOST_JOINED_BYTES: usize = 65_000;

impl Udp {
    /// Sends what the guest has sent.
    pub(super) fn take_datagrams(&mut self, cx: &mut Context<'_>) {
        let Some(socket) = self.socket else { return };
        let mut joined: Vec<Datagram> = Vec::new();
        let mut work = 0;
        while work < WORK_PER_TURN {
            work += 1;
            let next = match cx.stack.udp().receive(socket) {
                Ok(Poll::Ready(datagram)) => datagram,
                // An ICMP error about a datagram to the guest: it is not passed on.
                Err(SocketError::NetworkDown | SocketError::BadHandle) | Ok(_) => {
                    self.send_out(cx, &mut joined);
                    return;
                }
                Err(_) => continue,
            };
            if !may_join(&joined, &next) {
                work += self.send_out(cx, &mut joined);
            }
            joined.push(next);
        }
        self.send_out(cx, &mut joined);
        self.has_datagrams = true;
    }

    /// Sends datagrams of one flow and frees them. Returns how many calls it took.
    fn send_out(&mut self, cx: &mut Context<'_>, joined: &mut Vec<Datagram>) -> usize {
        if let Some(taken) = self.dns.take(cx, joined) {
            joined.drain(..).for_each(|d| cx.stack.free(d.payload));
            if taken.lacks_descriptor {
                self.displace_port(cx);
            }
            return taken.messages;
        }
        if cx.settings.policy.reads_names() {
            self.refuse_names(cx, joined);
        }
        let Some(first) = joined.first() else { return 0 };
        if first.hop_limit == 0 {
            cx.totals.refusals.add(Refusal::HopLimit, joined.len() as u64);
            joined.iter().for_each(|d| send_error(cx, d, SentError::TimeExceeded { code: 0 }));
            joined.drain(..).for_each(|d| cx.stack.free(d.payload));
            return 0;
        }
        let key = (first.src, canonical(first.dst));
        let flow = match self.flows.find(key) {
            Some(id) => Ok(id),
            None => self.begin(cx, key),
        };
        let calls = match flow {
            Ok(id) => self.send(cx, id, joined),
            Err(NotCarried { why: why @ Refusal::Undecided, .. }) => {
                cx.totals.refusals.add(why, joined.len() as u64);
                0
            }
            Err(why) => {
                cx.refuse_flow(Protocol::Udp, key, &why);
                if let Some(error) = why.failure.error(first.dst.is_ipv4()) {
                    send_error(cx, first, error);
                }
                0
            }
        };
        joined.drain(..).for_each(|d| cx.stack.free(d.payload));
        calls
    }

    /// Answers questions to servers of the guest's choice that the policy denies, and frees them; a run of which it
    /// denies one, whole.
    fn refuse_names(&mut self, cx: &mut Context<'_>, joined: &mut Vec<Datagram>) {
        joined.retain_mut(|d| {
            let ruling = ruling::ruling_on_run(cx, d);
            if let Ruling::Pass(_) = ruling {
                return true;
            }
            cx.refuse(Refusal::Policy);
            if let (Some(socket), Ruling::Answer(answer)) = (self.socket, ruling) {
                let answer = SendMessage::new(&answer).to(d.src).from(canonical(d.dst));
                // One that is lost is asked for again.
                let _ = cx.stack.udp().send_many(cx.now, socket, &[answer], PendingError::Return);
            }
            cx.stack.free(std::mem::take(&mut d.payload));
            false
        });
    }

    /// Sends datagrams of a flow. Returns how many calls it took.
    fn send(&mut self, cx: &mut Context<'_>, id: SlotId, datagrams: &[Datagram]) -> usize {
        let bytes = datagrams.iter().map(|d| d.payload.len()).sum();
        if self.flows.get(id).is_some_and(|flow| !flow.grant.may_pass(cx.now, bytes)) {
            let count = |d: &Datagram| flow::count_of(d.payload.len(), d.segment_bytes) as u64;
            cx.totals.refusals.add(Refusal::Allowance, datagrams.iter().map(count).sum());
            return 1;
        }
        let Some(sent) = self.send_read(cx, id, datagrams) else { return 0 };
        let Some(flow) = self.flows.get_mut(id) else { return sent.calls };
        if let Some(port) = flow.host.port.and_then(|port| self.ports.get_mut(port)) {
            port.sent_at = cx.now;
        }
        self.flows.touched(id, cx.now);
        cx.stack.pass(Stage::HostSent);
        cx.totals.datagrams_out += sent.datagrams as u64;
        cx.totals.bytes_out += sent.bytes as u64;
        if let Some(errno) = sent.failed {
            let count = |d: &Datagram| flow::count_of(d.payload.len(), d.segment_bytes);
            let lost = datagrams.iter().map(count).sum::<usize>().saturating_sub(sent.datagrams);
            let first = sent.datagrams.min(datagrams.len() - 1);
            report_unsent(cx, &datagrams[first..], errno, lost as u64);
        }
        sent.calls
    }
}

/// Whether a datagram leaves with those before it: of the same flow and length, the last one shorter at most.
fn may_join(joined: &[Datagram], next: &Datagram) -> bool {
    let (Some(first), Some(last)) = (joined.first(), joined.last()) else { return true };
    let bytes = first.payload.len();
    let parts: usize = joined.iter().map(Flow::parts_of).sum();
    (first.src, first.dst, first.hop_limit) == (next.src, next.dst, next.hop_limit)
        && first.segment_bytes.is_none()
        && next.segment_bytes.is_none()
        && last.payload.len() == bytes
        && (1..=bytes).contains(&next.payload.len())
        && joined.len() < MOST_JOINED
        && (joined.len() + 1) * bytes <= MOST_JOINED_BYTES
        && !Flow::is_full(parts + Flow::parts_of(next))
}

/// Counts datagrams that were not sent, and sends the guest ICMP errors about them.
fn report_unsent(cx: &mut Context<'_>, datagrams: &[Datagram], errno: Errno, count: u64) {
    match errno {
        Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM => {
            cx.totals.refusals.add(Refusal::HostQueueFull, count);
        }
        Errno::EMSGSIZE => cx.totals.refusals.add(Refusal::TooLong, count),
        // Errors of other datagrams, perhaps to other peers, that came faster than they were taken.
        e if host_socket::is_always_pending(e) => {
            cx.totals.refusals.add(Refusal::HostQueueFull, count)
        }
        e => {
            let (failure, why) = host_socket::failure_of(e);
            cx.totals.refusals.add(why, count);
            for d in datagrams {
                if let Some(error) = failure.error(d.dst.is_ipv4()) {
                    send_error(cx, d, error);
                }
            }
        }
    }
}

/// Sends the guest an ICMP error about its datagram.
pub(super) fn send_error(cx: &mut Context<'_>, d: &Datagram, error: SentError) {
    let mut start = [0; 64];
    let n = d.payload.copy_to(0, &mut start);
    let about = InvokingPacket::datagram(d.src, d.dst, &start[..n], d.payload.len());
    cx.stack.icmp().send_error(cx.now, &about, error, None);
}
