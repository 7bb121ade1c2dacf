//! TIME-WAIT entries: the state of a connection in TIME-WAIT (RFC 9293 section 3.6.1) without its
//! control block.

use crate::base::{DropReason, Duration, Instant, SeqNum};
use crate::tcp::challenge::ChallengeLimit;
use crate::tcp::timers::later;
use crate::wire::tcp::{Flags, Header, Options, Timestamps};

/// A connection in TIME-WAIT. Created by [`Tcb::time_wait_entry`](crate::tcp::Tcb::time_wait_entry).
#[derive(Clone, Copy, Debug)]
pub struct TimeWait {
    pub(crate) snd_nxt: SeqNum,
    pub(crate) rcv_nxt: SeqNum,
    /// The last window field sent.
    pub(crate) window: u16,
    /// Timestamp offset and TS.Recent, if timestamps were negotiated.
    pub(crate) timestamps: Option<(u32, u32)>,
    /// A new connection would negotiate timestamps if its SYN has them (`Config::timestamps`).
    pub(crate) offers_timestamps: bool,
    /// Our port, the peer's port.
    pub(crate) ports: (u16, u16),
    pub(crate) duration: Duration,
    pub(crate) expires: Instant,
    pub(crate) challenge_limit: ChallengeLimit,
}

/// How to handle a segment for a connection in TIME-WAIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeWaitVerdict {
    /// Drop the segment and count the reason.
    Drop(DropReason),
    /// Answer with this header.
    Ack(Header),
    /// A SYN that may open a new connection (RFC 6191, RFC 9293 section 3.10.7.4): pass it to the
    /// listener, and remove the entry if the listener accepts it. Otherwise see
    /// `TimeWait::on_refused_syn`.
    Reopen {
        /// Lower bound of the new initial sequence number.
        min_iss: SeqNum,
    },
    /// The entry has expired: handle the segment as one without a connection.
    Closed,
}

impl TimeWait {
    /// Processes a segment (RFC 9293 section 3.10.7.4 for TIME-WAIT).
    ///
    /// A reset is ignored: an old duplicate must not end TIME-WAIT early (RFC 1337).
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
            self.expires = later(now, self.duration);
        }
        let occupies = payload_len > 0 || hdr.flags.intersects(Flags::FIN | Flags::SYN);
        if occupies || hdr.seq != self.rcv_nxt {
            return self.answer(now, DropReason::TcpOutOfWindow);
        }
        TimeWaitVerdict::Drop(DropReason::TcpDuplicate)
    }

    /// Whether the segment is a retransmission of the peer's FIN: same position, an acceptable
    /// acknowledgement, no old timestamp.
    fn repeats_fin(&self, hdr: &Header, payload_len: usize) -> bool {
        let end = SeqNum(hdr.seq.0.wrapping_add(payload_len as u32).wrapping_add(1));
        let young = match (self.timestamps, hdr.options.timestamps) {
            (Some((_, recent)), Some(t)) => t.value.wrapping_sub(recent) as i32 >= 0,
            _ => true,
        };
        let flags = hdr.flags.contains(Flags::FIN | Flags::ACK);
        flags && end == self.rcv_nxt && !hdr.ack.after(self.snd_nxt) && young
    }

    /// No listener accepted the SYN of [`TimeWaitVerdict::Reopen`]: it is answered like any other
    /// segment.
    pub(crate) fn on_refused_syn(&mut self, now: Instant) -> TimeWaitVerdict {
        self.answer(now, DropReason::TcpNoSocket)
    }

    /// RFC 6191 section 2. Without PAWS in the new connection only its sequence number keeps old segments out.
    fn may_reopen(&self, syn: &Header) -> bool {
        let newer_seq = syn.seq.after(self.rcv_nxt);
        match (self.timestamps, syn.options.timestamps) {
            (Some((_, recent)), Some(t)) => {
                let age = t.value.wrapping_sub(recent) as i32;
                age > 0 || (age == 0 && newer_seq)
            }
            (None, Some(_)) if self.offers_timestamps => true,
            _ => newer_seq,
        }
    }

    fn answer(&mut self, now: Instant, otherwise: DropReason) -> TimeWaitVerdict {
        if !self.challenge_limit.allow(now) {
            return TimeWaitVerdict::Drop(otherwise);
        }
        let timestamps = self.timestamps.map(|(offset, recent)| Timestamps {
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

    /// When the entry may be removed. A retransmitted FIN restarts it.
    pub fn expires(&self) -> Instant {
        self.expires
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(timestamps: Option<(u32, u32)>) -> TimeWait {
        TimeWait {
            snd_nxt: SeqNum(5000),
            rcv_nxt: SeqNum(900),
            window: 77,
            timestamps,
            offers_timestamps: true,
            ports: (80, 4000),
            duration: Duration::from_secs(60),
            expires: Instant::from_millis(60_000),
            challenge_limit: ChallengeLimit::new(),
        }
    }

    fn segment(flags: Flags, seq: u32, stamp: Option<u32>) -> Header {
        let timestamps = stamp.map(|value| Timestamps { value, echo: 0 });
        let options = Options { timestamps, ..Options::default() };
        Header { seq: SeqNum(seq), flags, options, ..Header::default() }
    }

    fn segment_in(t: &mut TimeWait, h: Header, len: usize) -> TimeWaitVerdict {
        t.on_segment(Instant::from_millis(10_000), &h, len)
    }

    #[test]
    fn a_retransmitted_fin_is_acknowledged_and_restarts_time_wait() {
        let mut t = entry(Some((7, 100)));
        let v = segment_in(&mut t, segment(Flags::FIN | Flags::ACK, 899, Some(100)), 0);
        let TimeWaitVerdict::Ack(h) = v else { panic!("{v:?}") };
        assert_eq!((h.seq, h.ack, h.flags), (SeqNum(5000), SeqNum(900), Flags::ACK));
        assert_eq!((h.src_port, h.dst_port, h.window), (80, 4000, 77));
        let stamps = Some(Timestamps { value: 10_007, echo: 100 });
        assert_eq!(h.options.timestamps, stamps);
        assert_eq!(t.expires(), Instant::from_millis(70_000));
    }

    #[test]
    fn only_the_peers_own_fin_restarts_the_entry() {
        let fin = Flags::FIN | Flags::ACK;
        let acks = |h: Header, ack| Header { ack: SeqNum(ack), ..h };
        for (what, h, len) in [
            ("another place", segment(fin, 880, Some(100)), 0),
            ("behind the end", segment(fin, 900, Some(100)), 0),
            ("an old timestamp", segment(fin, 899, Some(99)), 0),
            ("no acknowledgement", segment(Flags::FIN, 899, Some(100)), 0),
            ("of data never sent", acks(segment(fin, 899, Some(100)), 5001), 0),
        ] {
            let mut t = entry(Some((7, 100)));
            assert!(matches!(segment_in(&mut t, h, len), TimeWaitVerdict::Ack(_)), "{what}");
            assert_eq!(t.expires(), Instant::from_millis(60_000), "{what}");
        }
        for (seq, stamp, len) in [(879, Some(100), 20), (899, None, 0)] {
            // With the last bytes; of a peer that omits the timestamp.
            let mut t = entry(Some((7, 100)));
            segment_in(&mut t, segment(fin, seq, stamp), len);
            assert_eq!(t.expires(), Instant::from_millis(70_000));
        }
    }

    #[test]
    fn syn_with_fin_does_not_reopen() {
        let mut t = entry(None);
        let v = segment_in(&mut t, segment(Flags::SYN | Flags::FIN, 901, None), 0);
        assert!(matches!(v, TimeWaitVerdict::Ack(_)));
    }

    #[test]
    fn a_reset_does_not_assassinate_time_wait() {
        let mut t = entry(None);
        let v = segment_in(&mut t, segment(Flags::RST, 900, None), 0);
        assert_eq!(v, TimeWaitVerdict::Drop(DropReason::TcpBlindReset));
    }

    #[test]
    fn a_syn_with_a_newer_timestamp_or_sequence_number_reopens() {
        let reopen = TimeWaitVerdict::Reopen { min_iss: SeqNum(5001) };
        let mut t = entry(Some((0, 100)));
        assert_eq!(segment_in(&mut t, segment(Flags::SYN, 10, Some(101)), 0), reopen);
        assert_eq!(segment_in(&mut t, segment(Flags::SYN, 901, Some(100)), 0), reopen);
        assert_ne!(segment_in(&mut t, segment(Flags::SYN, 10, Some(100)), 0), reopen);
        assert_ne!(segment_in(&mut t, segment(Flags::SYN, 901, Some(99)), 0), reopen);
        let mut t = entry(None);
        assert_eq!(segment_in(&mut t, segment(Flags::SYN, 901, None), 0), reopen);
        assert_ne!(segment_in(&mut t, segment(Flags::SYN, 899, None), 0), reopen);
        assert_eq!(segment_in(&mut t, segment(Flags::SYN, 899, Some(1)), 0), reopen);
    }

    #[test]
    fn a_timestamp_that_will_not_be_negotiated_reopens_nothing() {
        let reopen = TimeWaitVerdict::Reopen { min_iss: SeqNum(5001) };
        let mut t = TimeWait { offers_timestamps: false, ..entry(None) };
        assert_ne!(segment_in(&mut t, segment(Flags::SYN, 899, Some(1)), 0), reopen);
        assert_eq!(segment_in(&mut t, segment(Flags::SYN, 901, Some(1)), 0), reopen);
    }

    #[test]
    fn a_pure_ack_at_rcv_nxt_is_not_answered_and_answers_are_rate_limited() {
        let mut t = entry(None);
        let v = segment_in(&mut t, segment(Flags::ACK, 900, None), 0);
        assert_eq!(v, TimeWaitVerdict::Drop(DropReason::TcpDuplicate));
        let answers = (0..100)
            .filter(|_| {
                matches!(
                    segment_in(&mut t, segment(Flags::ACK, 5, None), 10),
                    TimeWaitVerdict::Ack(_)
                )
            })
            .count();
        assert_eq!(answers, 10);
    }

    #[test]
    fn a_segment_for_an_expired_entry_finds_it_closed() {
        let mut t = entry(None);
        let h = segment(Flags::ACK, 900, None);
        assert_eq!(t.on_segment(Instant::from_millis(60_000), &h, 0), TimeWaitVerdict::Closed);
    }
}
