//! Datagrams that the modelled peer sends by itself: as fast as the line allows, or at a rate.
//!
//! At a rate they leave when they are due, whatever the host does meanwhile: a host that is late finds them queued, and
//! their stamps give the delay. If neither the line nor the source has a rate, a run makes a burst, so that the thread
//! that runs the hardware can do other work.

use std::net::{IpAddr, SocketAddr};

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{protocol, udp};

use super::super::frame::{Addresses, HeaderBuf, Rest, WireFrame};
use super::super::meter::bump;
use super::Out;

/// Datagrams that are made in one run at most where nothing else limits them.
const BURST: u64 = 256;
/// A mark and a time.
pub const STAMP_BYTES: usize = 16;
const NS_PER_S: u128 = 1_000_000_000;

/// Datagrams that are still to be sent.
pub struct Source {
    from: SocketAddr,
    to: SocketAddr,
    bytes: usize,
    left: u64,
    /// When it began: none leaves earlier.
    start: Instant,
    rate: Option<Rate>,
}

/// A flow that lasts for a time.
struct Rate {
    /// Datagrams per second; 0: as fast as the line allows.
    pps: u64,
    until: Instant,
    mark: u64,
    sent: u64,
}

impl Source {
    /// So many, as fast as the line allows.
    pub fn counted(
        from: SocketAddr,
        to: SocketAddr,
        bytes: usize,
        count: u64,
        start: Instant,
    ) -> Source {
        Source { from, to, bytes, left: count, start, rate: None }
    }

    /// The same at a rate, for a time, with stamps.
    pub fn at_rate(self, pps: u64, time: Duration, mark: u64) -> Source {
        let rate = Rate { pps, until: self.start + time, mark, sent: 0 };
        Source { rate: Some(rate), ..self }
    }

    /// From where to where.
    pub fn addresses(&self) -> (IpAddr, IpAddr) {
        (self.from.ip(), self.to.ip())
    }

    /// When the next datagram is due, if there is a rate.
    fn due(&self) -> Option<Instant> {
        let rate = self.rate.as_ref().filter(|r| r.pps > 0)?;
        let ns = u128::from(rate.sent) * NS_PER_S / u128::from(rate.pps);
        Some(self.start + Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)))
    }

    /// When there is something to do: `free` is when the line has sent everything.
    pub fn next_event(&self, free: Instant) -> Instant {
        let at = self.due().map_or(free, |due| due.max(free));
        // What is over leaves the list in the next run.
        self.rate.as_ref().map_or(at, |r| at.min(r.until))
    }

    /// Whether it has sent everything.
    pub fn is_over(&self, now: Instant) -> bool {
        // One that was due in time still leaves, however late the hardware runs.
        let ended = self.rate.as_ref().is_some_and(|r| self.due().unwrap_or(now) >= r.until);
        self.left == 0 || ended
    }

    /// Sends the datagrams that are due by now.
    pub fn run(&mut self, now: Instant, ends: &Addresses, out: &mut Out<'_>) {
        let is_endless = !out.line.has_rate();
        let mut burst = BURST;
        while burst > 0 && out.has_space() && !self.is_over(now) {
            let due = self.due();
            let may_leave = match due {
                Some(at) => at <= now,
                None => is_endless || out.line.is_free(now),
            };
            if !may_leave {
                return;
            }
            let at = due.unwrap_or(if is_endless { now } else { self.start });
            let Some(frame) = self.datagram(at.max(out.line.busy_until()) + out.delay, ends) else {
                self.left = 0;
                return;
            };
            out.send(at, frame);
            bump(&out.board.counts.peer_datagrams_out, 1);
            self.left -= 1;
            burst -= 1;
            if let Some(rate) = &mut self.rate {
                rate.sent += 1;
            }
        }
    }

    /// One datagram; nothing if it cannot be (mixed versions, too long).
    fn datagram(&self, arrives: Instant, ends: &Addresses) -> Option<WireFrame> {
        let length = u16::try_from(self.bytes.checked_add(udp::HEADER_BYTES)?).ok()?;
        let mut buf = HeaderBuf::ip(ends, protocol::UDP, usize::from(length))?;
        let mut sum = Sum::new();
        sum.add_pseudo(ends.src, ends.dst, protocol::UDP, u32::from(length));
        let (src_port, dst_port) = (self.from.port(), self.to.port());
        let header = udp::Header { src_port, dst_port, length, checksum: sum.fold() };
        header.emit(buf.l4_mut()).ok()?;
        let mut front_bytes = udp::HEADER_BYTES;
        if let Some(rate) = &self.rate {
            let stamp = buf.l4_mut().get_mut(front_bytes..front_bytes + STAMP_BYTES)?;
            let (mark, time) = stamp.split_at_mut(STAMP_BYTES / 2);
            mark.copy_from_slice(&rate.mark.to_ne_bytes());
            time.copy_from_slice(&arrives.as_nanos().to_ne_bytes());
            front_bytes += STAMP_BYTES;
        }
        let stamped = (front_bytes - udp::HEADER_BYTES) as u64;
        let rest = Rest::Pattern(stamped, self.bytes - stamped as usize);
        let mut frame = WireFrame::new(buf.with_l4(front_bytes), rest);
        frame.partial_csum = Some((buf.l4() as u16, udp::CHECKSUM_OFFSET as u16));
        Some(frame)
    }
}
