//! The guest's datagrams to a name: each is read before it leaves, and held while a ClientHello of QUIC is not whole.
//!
//! All flows together have a bound for the bytes that readers keep and hold: the flow that was idle for longest gives way.

use std::borrow::Cow;

use fulmar_stack::base::SlotId;
use fulmar_stack::udp::Datagram;

use super::super::Context;
use super::super::host_socket::Failure;
use super::first_bytes::{FirstBytes, bytes_of, cut};
use super::flow::{Flow, Sent};
use super::out::send_error;
use super::table::Class;
use super::{Udp, stat_of};
use crate::first::{Decision, Reason, Refusal as Why};
use crate::stat::Refusal;

/// Most bytes that the readers of all flows keep and hold.
const MOST_BYTES: usize = 16 << 20;

impl Udp {
    /// Sends the datagrams of a flow, of those that are read only what may pass. `None`: nothing was sent.
    pub(super) fn send_read(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        datagrams: &[Datagram],
    ) -> Option<Sent> {
        let flow = self.flows.get_mut(id)?;
        let Some(mut first) = flow.first_bytes.take() else {
            return Some(flow.send(datagrams, cx.now));
        };
        let pieces: Vec<Cow<'_, [u8]>> = datagrams.iter().map(bytes_of).collect();
        let with_pieces = datagrams.iter().zip(&pieces);
        let cut: Vec<&[u8]> =
            with_pieces.flat_map(|(d, bytes)| cut(bytes, d.segment_bytes)).collect();
        let mut read: Vec<Decision> = cut.iter().map(|bytes| first.read(bytes)).collect();
        if first.conflicts(&cx.settings.names.initials, (flow.guest, flow.peer), cx.now) {
            read.fill(Decision::Refuse(Reason::QuicConflict.into()));
        }
        let is_plain = first.held.is_empty() && read.iter().all(|said| *said == Decision::Pass);
        let (sent, why) = if is_plain {
            (flow.send(datagrams, cx.now), None)
        } else {
            let hops = datagrams.first().map_or(0, |d| d.hop_limit);
            send_each(flow, &mut first, cut.into_iter().zip(read), hops, cx)
        };
        let keeps = first.memory_bytes();
        self.read_bytes = self.read_bytes - first.counted + keeps;
        first.counted = keeps;
        flow.first_bytes = Some(first);
        if let (Some(why), Some(first)) = (why, datagrams.first()) {
            let stat = stat_of(flow, cx.now);
            cx.settings.policy.contradicted(&stat, &why);
            if let Some(error) = Failure::Prohibited.error(first.dst.is_ipv4()) {
                send_error(cx, first, error);
            }
        }
        self.bound_read_bytes(cx, id);
        Some(sent)
    }

    /// Ends flows until the readers keep few enough bytes; not `but`.
    fn bound_read_bytes(&mut self, cx: &mut Context<'_>, but: SlotId) {
        while self.read_bytes > MOST_BYTES {
            let is_own = self.flows.get(but).map(Flow::host_key);
            let keeps = |flow: &Flow| {
                flow.first_bytes.as_ref().is_some_and(|first| first.counted > 0)
                    && Some(flow.host_key()) != is_own
            };
            let oldest = self.flows.oldest(Class::Out, cx.now, keeps);
            cx.refuse(Refusal::Displaced);
            self.remove(cx, oldest.unwrap_or(but));
            if oldest.is_none() {
                return;
            }
        }
    }
}

/// Sends the datagrams that may pass after those that were held. Returns the last reason of a refusal.
fn send_each<'a>(
    flow: &mut Flow,
    first: &mut FirstBytes,
    read: impl Iterator<Item = (&'a [u8], Decision)>,
    hops: u8,
    cx: &mut Context<'_>,
) -> (Sent, Option<Why>) {
    let (mut sent, mut why) = (Sent::default(), None);
    for (bytes, said) in read {
        match said {
            Decision::Pass => {
                for held in first.held.drain(..) {
                    sent = sent.and(&flow.send_bytes(&held, hops, cx.now));
                }
                sent = sent.and(&flow.send_bytes(bytes, hops, cx.now));
            }
            Decision::Hold => first.held.push(bytes.to_vec()),
            Decision::Refuse(reason) => {
                cx.totals.refusals.add(Refusal::FirstBytes, first.held.len() as u64 + 1);
                first.held = Vec::new();
                why = Some(reason);
            }
        }
    }
    (sent, why)
}
