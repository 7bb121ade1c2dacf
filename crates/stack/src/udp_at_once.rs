//! A datagram from the call straight into the device's ring: a small one from a connected socket, by the
//! socket's own headers, to a device that takes frames one by one.
//!
//! What is asked here `udp_output.rs` asks too, and more. Whatever is in the way (an error to be told,
//! headers that no longer hold, frames that wait, no buffer, no room in the ring) is left to it: nothing has
//! happened then. It is one piece of code, up to the device's own, in which nothing larger than a word changes
//! hands.

use fulmar_base::{Instant, Probe, SlotId, Stage, Variation};
use fulmar_mbuf::Mbuf;
use fulmar_socket::SocketError;
use fulmar_wire::udp::HEADER_BYTES;

use crate::net::Net;
use crate::shard::Shard;
use crate::slab::Slab;
use crate::sockets::Socket;
use crate::templates::UdpTemplate;
use crate::udp_output::Letter;

impl<P: Probe> Shard<P> {
    /// Sends a datagram to the connected peer if nothing is in the way. False: it is not sent, and
    /// [`Shard::udp_send_step`] is to say why.
    #[inline(always)]
    pub(crate) fn udp_send_at_once(&mut self, now: Instant, id: SlotId, payload: &[u8]) -> bool {
        if self.is_down() || self.forgets_templates() {
            return false;
        }
        let Shard { sockets, net, .. } = self;
        let Some(template) = headers_of(sockets, id) else { return false };
        let (parts, bytes) = (std::iter::once(payload), payload.len());
        let letter = Letter { parts, bytes, to: None, segment_bytes: None, tells_error: true };
        net.may_send_at_once(now, template, bytes)
            && net.send_at_once(now, template, &letter).is_ok()
    }
}

/// The headers of a connected socket that has no error to tell.
#[inline(always)]
fn headers_of(sockets: &Slab<Socket>, id: SlotId) -> Option<&UdpTemplate> {
    match sockets.get(id) {
        Some(Socket::Udp(s)) if !s.socket.has_error() => s.template.as_deref(),
        _ => None,
    }
}

impl<P: Probe> Net<P> {
    /// Whether nothing is known to be in the way of a datagram with so much payload.
    #[inline(always)]
    fn may_send_at_once(&self, now: Instant, template: &UdpTemplate, bytes: usize) -> bool {
        self.link.sends_single()
            && self.writes_in_one_piece(bytes)
            && template.ip().fits_whole(bytes.saturating_add(HEADER_BYTES))
            && (self.ip.holds(template.ip(), now) || self.probe.varies(Variation::NoLookUp))
    }

    /// Sends it; `None` if a probe has ended the path.
    ///
    /// # Errors
    /// There is no buffer, or no room in the ring.
    #[inline(always)]
    fn send_at_once<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        template: &UdpTemplate,
        letter: &Letter<I>,
    ) -> Result<Option<()>, SocketError> {
        if self.ends_at_one_of([Stage::SendChecked, Stage::PathChosen]) {
            return Ok(None);
        }
        let Some(frame) = self.one_piece(template, letter)? else { return Ok(None) };
        if self.ends_at(Stage::BurstQueued) {
            self.pool.free_mbuf(frame);
            return Ok(None);
        }
        self.link.set_now(now);
        self.hand_over(template, frame)?;
        self.note_sent(letter);
        Ok(Some(()))
    }

    /// Hands a frame to the device.
    #[inline(always)]
    fn hand_over(&mut self, template: &UdpTemplate, frame: Mbuf) -> Result<(), SocketError> {
        let Net { pool, counters, link, probe, .. } = self;
        link.send_single(frame, template.offload(), pool, counters, probe).map_err(|frame| {
            pool.free_mbuf(frame);
            SocketError::WouldBlock
        })
    }
}
