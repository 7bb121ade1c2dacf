//! Helpers for chains, shared by input, output and ICMP.

use core::net::IpAddr;

use crate::base::{Counters, DropReason, EtherAddr, Instant, Offload};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose};
use crate::wire::checksum::Sum;

use crate::ip::{Egress, FrameSink, OutputError};

/// Headroom of a new header mbuf, bytes: all lower headers (Ethernet 14, IPv6 40) and slack.
pub(crate) const HEADROOM_BYTES: usize = 80;
/// Ethernet and IPv6 header, bytes: the headroom that an upper header must leave.
const LOWER_HEADERS_BYTES: usize = 54;

/// The context of a call that may send: time, buffers, counters, sink.
pub struct Context<'a, S> {
    /// The time.
    pub now: Instant,
    /// The buffers.
    pub pool: &'a mut Pool,
    /// Where packets and drops are counted.
    pub counters: &'a mut Counters,
    /// Where frames go.
    pub out: &'a mut S,
}

impl<S: FrameSink> Context<'_, S> {
    /// Drops a packet: counts and frees it.
    pub(crate) fn discard(&mut self, chain: Chain, reason: DropReason) {
        self.counters.drop_packet(reason);
        self.pool.free(chain);
    }

    /// Passes a frame to the device, or to loopback.
    pub(crate) fn send(
        &mut self,
        chain: Chain,
        offload: Offload,
        egress: Egress,
    ) -> Result<(), OutputError> {
        let sent = match egress {
            Egress::Device => self.out.frame(self.pool, self.counters, chain, offload),
            Egress::Loopback => self.out.loopback(self.counters, chain, offload),
        };
        sent.map_err(|refused| {
            self.pool.free(refused);
            OutputError::Full
        })
    }
}

/// A received frame passing through the input steps. A step that delivers the packet takes the
/// chain. Otherwise the chain is freed at the end of input.
pub(crate) struct Frame {
    pub(crate) chain: Chain,
    pub(crate) offload: Offload,
    /// Source Ethernet address.
    pub(crate) ether_src: EtherAddr,
    /// The destination Ethernet address is a group address.
    pub(crate) is_group: bool,
    /// The frame was looped back.
    pub(crate) is_own: bool,
}

impl Frame {
    /// Strips a header. Offsets of `offload` are adjusted to the new front.
    ///
    /// # Errors
    /// `BadOffload` if the checksum range starts within the header.
    pub(crate) fn strip(&mut self, bytes: usize, pool: &mut Pool) -> Result<(), DropReason> {
        let n = u16::try_from(bytes).map_err(|_| DropReason::BadOffload)?;
        if self.offload.needs_csum {
            let start = self.offload.csum_start.checked_sub(n);
            self.offload.csum_start = start.ok_or(DropReason::BadOffload)?;
        }
        if let Some(gso) = &mut self.offload.gso {
            gso.header_bytes = gso.header_bytes.saturating_sub(n);
        }
        self.chain.trim_front(bytes, pool);
        Ok(())
    }

    /// Whether the transport checksum need not be verified: the device verified it, or the packet
    /// never left this host.
    pub(crate) fn is_checksum_trusted(&self) -> bool {
        self.offload.csum_valid || self.offload.needs_csum
    }

    /// Takes the chain, leaving an empty one.
    pub(crate) fn take(&mut self) -> Chain {
        core::mem::replace(&mut self.chain, Chain::new())
    }
}

/// Makes the first `bytes` bytes contiguous and returns the bytes of the first mbuf.
///
/// # Errors
/// `Truncated` if the chain is shorter, `NoBuffer`.
#[inline]
pub(crate) fn pull<'a>(
    chain: &'a mut Chain,
    bytes: usize,
    pool: &mut Pool,
) -> Result<&'a [u8], DropReason> {
    if chain.len() < bytes {
        return Err(DropReason::Truncated);
    }
    chain.pullup(bytes, pool).map_err(|NoBuffer| DropReason::NoBuffer)?;
    Ok(first(chain))
}

/// The bytes of the first mbuf.
#[inline]
pub(crate) fn first(chain: &Chain) -> &[u8] {
    chain.front().map_or(&[], |m| m.as_slice())
}

/// Prepends space for an upper header, with headroom for the lower headers.
pub(crate) fn prepend_upper<'a>(
    chain: &'a mut Chain,
    bytes: usize,
    pool: &mut Pool,
) -> Result<&'a mut [u8], NoBuffer> {
    let needed_bytes = bytes.saturating_add(LOWER_HEADERS_BYTES);
    if !chain.front().is_some_and(|m| m.is_unique() && m.headroom() >= needed_bytes) {
        let headroom = bytes.saturating_add(HEADROOM_BYTES);
        chain.push_front(pool.alloc(0, headroom, Purpose::Control)?);
    }
    chain.prepend(bytes, pool, Purpose::Control)
}

/// A chain of one mbuf with headroom for the lower headers, filled by `fill`.
pub(crate) fn control_chain(
    bytes: usize,
    pool: &mut Pool,
    fill: impl FnOnce(&mut [u8]) -> Option<()>,
) -> Result<Chain, NoBuffer> {
    let mut m = pool.alloc(bytes, HEADROOM_BYTES, Purpose::Control)?;
    match m.append(bytes).and_then(fill) {
        Some(()) => Ok(Chain::from(m)),
        None => {
            pool.free_mbuf(m);
            Err(NoBuffer)
        }
    }
}

/// The checksum of an ICMP message. ICMPv6 adds a pseudo-header (RFC 4443 section 2.3).
pub(crate) fn sum_of_icmp(chain: &Chain, src: IpAddr, dst: IpAddr) -> Sum {
    let mut sum = Sum::new();
    chain.slices().for_each(|piece| sum.add_bytes(piece));
    if src.is_ipv6() {
        let len = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        sum.add_pseudo(src, dst, crate::wire::protocol::ICMPV6, len);
    }
    sum
}
