//! Datagrams of the guest on their way to the host's network.

use std::os::fd::AsFd;

use fulmar_base::{SlotId, Stage};
use fulmar_ip::{InvokingPacket, SentError};
use fulmar_shard::SendMessage;
use fulmar_socket::{SocketError, Step};
use fulmar_udp::Datagram;
use nix::errno::Errno;

use super::super::host::{self, Failure};
use super::super::poll::Owner;
use super::super::{Context, canonical, names};
use super::Udp;
use super::flow::{self, Flow, HostSocket};
use crate::stat::Refusal;

/// Datagrams or runs that are taken from the shard in one turn.
const TAKEN_PER_TURN: usize = 256;
/// Datagrams that leave with one call at most, as many as Linux took before 6.9; and their bytes.
const MOST_JOINED: usize = 64;
const MOST_JOINED_BYTES: usize = 65_000;
/// Longest question of DNS that is looked into: header, name, type and class.
const LONGEST_QUESTION: usize = 12 + 256 + 4;

impl Udp {
    /// What the guest has sent goes out.
    pub(super) fn take_datagrams(&mut self, cx: &mut Context<'_>) {
        let Some(socket) = self.socket else { return };
        let mut joined: Vec<Datagram> = Vec::new();
        for _ in 0..TAKEN_PER_TURN {
            let next = match cx.stack.udp().receive(socket) {
                Ok(Step::Done(datagram)) => datagram,
                // An error of something that was sent to the guest: nobody outside is told.
                Err(SocketError::NetworkDown | SocketError::BadHandle) | Ok(_) => {
                    return self.send_out(cx, &mut joined);
                }
                Err(_) => continue,
            };
            if !may_join(&joined, &next) {
                self.send_out(cx, &mut joined);
            }
            joined.push(next);
        }
        self.send_out(cx, &mut joined);
        self.has_datagrams = true;
    }

    /// Sends datagrams of one flow and frees them.
    fn send_out(&mut self, cx: &mut Context<'_>, joined: &mut Vec<Datagram>) {
        if cx.settings.judge.has_policy() {
            self.refuse_names(cx, joined);
        }
        if let Some(first) = joined.first() {
            let key = (first.src, canonical(first.dst));
            let flow = match self.find(key) {
                Some(id) => Ok(id),
                None => self.begin(cx, key),
            };
            match flow {
                Ok(id) => self.send(cx, id, joined),
                Err((failure, why)) => {
                    cx.refuse(why);
                    report(cx, first, failure);
                }
            }
        }
        joined.drain(..).for_each(|d| cx.stack.free(d.payload));
    }

    /// Answers questions for names that the policy denies, and frees them. Questions that come as a run are not
    /// looked into: the policy decides about the connections.
    fn refuse_names(&mut self, cx: &mut Context<'_>, joined: &mut Vec<Datagram>) {
        joined.retain_mut(|d| {
            if !cx.settings.mapping.is_dns(d.dst) {
                return true;
            }
            let mut message = [0; LONGEST_QUESTION];
            let n = d.payload.copy_to(0, &mut message);
            let message = message.get(..n).unwrap_or(&[]);
            match names::question(message) {
                Some((name, _)) if !cx.settings.judge.allows_name(&name) => {}
                _ => return true,
            }
            cx.refuse(Refusal::Policy);
            if let (Some(socket), Some(answer)) = (self.socket, names::refusal(message)) {
                let answer = SendMessage::new(&answer).to(d.src).from(canonical(d.dst));
                // One that is lost is asked for again.
                let _ = cx.stack.udp_send_many(cx.now, socket, &[answer], true);
            }
            cx.stack.free(std::mem::take(&mut d.payload));
            false
        });
    }

    fn send(&mut self, cx: &mut Context<'_>, id: SlotId, datagrams: &[Datagram]) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let is_run = datagrams.len() > 1;
        let segment_bytes = datagrams.first().and_then(|d| d.segment_bytes);
        let sent = match is_run && flow.lacks_runs {
            true => Err(Errno::EINVAL),
            false => flow.send(datagrams, cx.now),
        };
        let sent = match sent {
            Err(e) if is_run && flow::refuses_runs(e) => {
                flow.lacks_runs = true;
                datagrams.iter().try_for_each(|d| flow.send(std::slice::from_ref(d), cx.now))
            }
            Err(e) if host::may_be_of_earlier(e) => flow.send(datagrams, cx.now),
            sent => sent,
        };
        let sent = match sent {
            Err(e) if flow::wants_another_socket(e, segment_bytes) => match self.renew(cx, id) {
                Some(renewed) => renewed.send(datagrams, cx.now),
                None => Err(e),
            },
            sent => sent,
        };
        cx.stack.pass(Stage::HostSent);
        match sent {
            Ok(()) => {
                cx.totals.datagrams_out += datagrams.len() as u64;
                let bytes: usize = datagrams.iter().map(|d| d.payload.len()).sum();
                cx.totals.bytes_out += bytes as u64;
            }
            Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => {
                cx.refuse(Refusal::HostQueueFull);
            }
            Err(Errno::EMSGSIZE) => cx.refuse(Refusal::TooLong),
            // The path does not take the run that the guest has sent as one.
            Err(Errno::EINVAL) if segment_bytes.is_some() => cx.refuse(Refusal::TooLong),
            Err(e) => {
                let (failure, why) = host::failure_of(e);
                cx.refuse(why);
                datagrams.iter().for_each(|d| report(cx, d, failure));
            }
        }
    }

    /// Gives a flow another socket, which starts where the host's routes lead now.
    fn renew(&mut self, cx: &mut Context<'_>, id: SlotId) -> Option<&mut Flow> {
        let flow = self.flows.get_mut(id)?;
        if let HostSocket::Own(old) = &mut flow.host {
            let fd = flow::open(flow.host_addr, &cx.settings.outbound).ok()?;
            cx.poll.add_readable(fd.as_fd(), Owner::Udp(id)).ok()?;
            *old = fd;
        }
        Some(flow)
    }
}

/// Whether a datagram leaves with those before it: of the same flow and length, the last one shorter at most.
fn may_join(joined: &[Datagram], next: &Datagram) -> bool {
    let (Some(first), Some(last)) = (joined.first(), joined.last()) else { return true };
    let bytes = first.payload.len();
    let parts: usize = joined.iter().map(Flow::parts_of).sum();
    (first.src, first.dst) == (next.src, next.dst)
        && first.segment_bytes.is_none()
        && next.segment_bytes.is_none()
        && last.payload.len() == bytes
        && (1..=bytes).contains(&next.payload.len())
        && joined.len() < MOST_JOINED
        && (joined.len() + 1) * bytes <= MOST_JOINED_BYTES
        && !Flow::is_full(parts + Flow::parts_of(next))
}

/// Tells the guest that its datagram went nowhere.
fn report(cx: &mut Context<'_>, d: &Datagram, failure: Failure) {
    let error = match failure {
        Failure::Refused => SentError::PortUnreachable,
        Failure::Unreachable(v4, v6) => {
            SentError::Unreachable { code: if d.dst.is_ipv4() { v4 } else { v6 } }
        }
        Failure::Silence => return,
    };
    let mut start = [0; 64];
    let n = d.payload.copy_to(0, &mut start);
    let about = InvokingPacket::datagram(d.src, d.dst, &start[..n], d.payload.len());
    cx.stack.send_icmp_error(cx.now, &about, error, None);
}
