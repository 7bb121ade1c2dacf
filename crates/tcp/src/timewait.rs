//! TIME-WAIT as a small entry: what must be remembered of a connection that both sides have closed
//! (RFC 9293 section 3.6.1), without its control block.

use crate::challenge::Limit;
use crate::timers::later;
use fulmar_base::{DropReason, Duration, Instant, SeqNum};
use fulmar_wire::tcp::{Flags, Header, Options, Timestamps};

/// The remains of a connection. Made by [`crate::Tcb::time_wait_entry`].
#[derive(Clone, Copy, Debug)]
pub struct TimeWait {
    pub(crate) snd_nxt: SeqNum,
    pub(crate) rcv_nxt: SeqNum,
    /// The last window, as on the wire.
    pub(crate) window: u16,
    /// Offset of our timestamp clock and TS.Recent, if timestamps were on.
    pub(crate) stamps: Option<(u32, u32)>,
    /// Our port, the peer's port.
    pub(crate) ports: (u16, u16),
    pub(crate) lasts: Duration,
    pub(crate) expires: Instant,
    pub(crate) limit: Limit,
}

/// What to do with a segment for a connection in TIME-WAIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeWaitVerdict {
    /// Count it and forget it.
    Drop(DropReason),
    /// Answer with this header.
    Ack(Header),
    /// A SYN that may start a new connection (RFC 6191, RFC 9293 section 3.10.7.4): hand it to the
    /// listener, and remove the entry if that takes it. See [`TimeWait::on_unwanted_syn`].
    Reopen {
        /// The new initial sequence number must not be before this .
        min_iss: SeqNum,
    },
    /// The entry has expired: treat the segment as one without a connection.
    Closed,
}

impl TimeWait {
    /// Judges a segment (RFC 9293 section 3.10.7.4 for TIME-WAIT).
    ///
    /// A reset is ignored (RFC 1337: an old duplicate must not end TIME-WAIT early).
    pub fn on_segment(
        &mut self,
        now: Instant,
        hdr: &Header,
        payload_len: usize,
    ) -> TimeWaitVerdict {
        if now >= self.expires {
            return TimeWaitVerdict::Closed;
        }
        if hdr.flags.contains(Flags::RST) {
            return TimeWaitVerdict::Drop(DropReason::TcpBlindReset);
        }
        if hdr.flags.contains(Flags::SYN) && !hdr.flags.intersects(Flags::ACK | Flags::FIN) {
            if self.may_reopen(hdr) {
                return TimeWaitVerdict::Reopen { min_iss: SeqNum(self.snd_nxt.0.wrapping_add(1)) };
            }
            return self.answer(now, DropReason::TcpBlindSyn);
        }
        if self.repeats_fin(hdr, payload_len) {
            self.expires = later(now, self.lasts);
        }
        let occupies = payload_len > 0 || hdr.flags.intersects(Flags::FIN | Flags::SYN);
        if occupies || hdr.seq != self.rcv_nxt {
            return self.answer(now, DropReason::TcpOutOfWindow);
        }
        TimeWaitVerdict::Drop(DropReason::TcpDuplicate)
    }

    /// Whether it is the peer's FIN again, in its place, with an acknowledgement that the peer may send
    /// and a timestamp that is not old.
    fn repeats_fin(&self, hdr: &Header, payload_len: usize) -> bool {
        let end = SeqNum(hdr.seq.0.wrapping_add(payload_len as u32).wrapping_add(1));
        let young = match (self.stamps, hdr.options.timestamps) {
            (Some((_, recent)), Some(t)) => t.value.wrapping_sub(recent) as i32 >= 0,
            (stamps, _) => stamps.is_none(),
        };
        let flags = hdr.flags.contains(Flags::FIN | Flags::ACK);
        flags && end == self.rcv_nxt && !hdr.ack.after(self.snd_nxt) && young
    }

    /// Nobody listens for a SYN that may open a new connection: it is answered as an old one is.
    pub fn on_unwanted_syn(&mut self, now: Instant) -> TimeWaitVerdict {
        self.answer(now, DropReason::TcpNoSocket)
    }

    /// RFC 6191 section 2.
    fn may_reopen(&self, syn: &Header) -> bool {
        let newer_seq = syn.seq.after(self.rcv_nxt);
        match (self.stamps, syn.options.timestamps) {
            (Some((_, recent)), Some(t)) => {
                let age = t.value.wrapping_sub(recent) as i32;
                age > 0 || (age == 0 && newer_seq)
            }
            (None, Some(_)) => true,
            (_, None) => newer_seq,
        }
    }

    fn answer(&mut self, now: Instant, otherwise: DropReason) -> TimeWaitVerdict {
        if !self.limit.allow(now) {
            return TimeWaitVerdict::Drop(otherwise);
        }
        let timestamps = self.stamps.map(|(offset, recent)| Timestamps {
            value: now.as_millis_u32().wrapping_add(offset),
            echo: recent,
        });
        TimeWaitVerdict::Ack(Header {
            src_port: self.ports.0,
            dst_port: self.ports.1,
            seq: self.snd_nxt,
            ack: self.rcv_nxt,
            flags: Flags::ACK,
            window: self.window,
            urgent: 0,
            options: Options { timestamps, ..Options::default() },
        })
    }

    /// When the entry may be forgotten. A retransmitted FIN moves it.
    pub fn expires(&self) -> Instant {
        self.expires
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(stamps: Option<(u32, u32)>) -> TimeWait {
        TimeWait {
            snd_nxt: SeqNum(5000),
            rcv_nxt: SeqNum(900),
            window: 77,
            stamps,
            ports: (80, 4000),
            lasts: Duration::from_secs(60),
            expires: Instant::from_millis(60_000),
            limit: Limit::new(),
        }
    }

    fn segment(flags: Flags, seq: u32, stamp: Option<u32>) -> Header {
        let timestamps = stamp.map(|value| Timestamps { value, echo: 0 });
        let options = Options { timestamps, ..Options::default() };
        Header { seq: SeqNum(seq), flags, options, ..Header::default() }
    }

    fn judge(t: &mut TimeWait, h: Header, len: usize) -> TimeWaitVerdict {
        t.on_segment(Instant::from_millis(10_000), &h, len)
    }

    #[test]
    fn a_repeated_fin_is_acknowledged_and_starts_the_wait_again() {
        let mut t = entry(Some((7, 100)));
        let v = judge(&mut t, segment(Flags::FIN | Flags::ACK, 899, Some(100)), 0);
        let TimeWaitVerdict::Ack(h) = v else { panic!("{v:?}") };
        assert_eq!((h.seq, h.ack, h.flags), (SeqNum(5000), SeqNum(900), Flags::ACK));
        assert_eq!((h.src_port, h.dst_port, h.window), (80, 4000, 77));
        let stamps = Some(Timestamps { value: 10_007, echo: 100 });
        assert_eq!(h.options.timestamps, stamps);
        assert_eq!(t.expires(), Instant::from_millis(70_000));
    }

    #[test]
    fn only_the_peers_own_fin_starts_the_wait_again() {
        let fin = Flags::FIN | Flags::ACK;
        let acks = |h: Header, ack| Header { ack: SeqNum(ack), ..h };
        for (what, h, len) in [
            ("another place", segment(fin, 880, Some(100)), 0),
            ("behind the end", segment(fin, 900, Some(100)), 0),
            ("an old timestamp", segment(fin, 899, Some(99)), 0),
            ("no timestamp", segment(fin, 899, None), 0),
            ("no acknowledgement", segment(Flags::FIN, 899, Some(100)), 0),
            ("of data never sent", acks(segment(fin, 899, Some(100)), 5001), 0),
        ] {
            let mut t = entry(Some((7, 100)));
            assert!(matches!(judge(&mut t, h, len), TimeWaitVerdict::Ack(_)), "{what}");
            assert_eq!(t.expires(), Instant::from_millis(60_000), "{what}");
        }
        let mut t = entry(Some((7, 100)));
        judge(&mut t, segment(fin, 879, Some(100)), 20); // with the last bytes
        assert_eq!(t.expires(), Instant::from_millis(70_000));
    }

    #[test]
    fn syn_with_fin_does_not_reopen() {
        let mut t = entry(None);
        let v = judge(&mut t, segment(Flags::SYN | Flags::FIN, 901, None), 0);
        assert!(matches!(v, TimeWaitVerdict::Ack(_)));
    }

    #[test]
    fn a_reset_does_not_assassinate_the_wait() {
        let mut t = entry(None);
        let v = judge(&mut t, segment(Flags::RST, 900, None), 0);
        assert_eq!(v, TimeWaitVerdict::Drop(DropReason::TcpBlindReset));
    }

    #[test]
    fn a_syn_with_a_newer_timestamp_or_number_reopens() {
        let reopen = TimeWaitVerdict::Reopen { min_iss: SeqNum(5001) };
        let mut t = entry(Some((0, 100)));
        assert_eq!(judge(&mut t, segment(Flags::SYN, 10, Some(101)), 0), reopen);
        assert_eq!(judge(&mut t, segment(Flags::SYN, 901, Some(100)), 0), reopen);
        assert_ne!(judge(&mut t, segment(Flags::SYN, 10, Some(100)), 0), reopen);
        assert_ne!(judge(&mut t, segment(Flags::SYN, 901, Some(99)), 0), reopen);
        let mut t = entry(None);
        assert_eq!(judge(&mut t, segment(Flags::SYN, 901, None), 0), reopen);
        assert_ne!(judge(&mut t, segment(Flags::SYN, 899, None), 0), reopen);
    }

    #[test]
    fn a_plain_ack_in_place_is_not_answered_and_answers_are_limited() {
        let mut t = entry(None);
        let v = judge(&mut t, segment(Flags::ACK, 900, None), 0);
        assert_eq!(v, TimeWaitVerdict::Drop(DropReason::TcpDuplicate));
        let answers = (0..100)
            .filter(|_| {
                matches!(judge(&mut t, segment(Flags::ACK, 5, None), 10), TimeWaitVerdict::Ack(_))
            })
            .count();
        assert_eq!(answers, 10);
    }

    #[test]
    fn an_expired_entry_says_so() {
        let mut t = entry(None);
        let h = segment(Flags::ACK, 900, None);
        assert_eq!(t.on_segment(Instant::from_millis(60_000), &h, 0), TimeWaitVerdict::Closed);
    }
}
