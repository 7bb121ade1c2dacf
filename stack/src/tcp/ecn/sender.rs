//! The sender's half of RFC 9768: how many bytes of what an ACK delivers were marked.

use super::EcnMode;
use crate::base::{Counter, Counters};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::wire::tcp::{Flags, Header};

/// The values of the field ACE.
const ACE_CYCLE: u64 = 8;

/// Whether options of the peer arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Options {
    /// Not so far.
    Absent,
    Present,
    /// The path clears the counters (section 3.2.3.2.4): they are ignored.
    Zeroed,
}

/// The counts that the peer has reported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reported {
    /// s.cep: marked packets.
    ce_packets: u32,
    /// s.ceb: marked bytes. An estimate between two options.
    ce_bytes: u32,
    options: Options,
    /// The last option: its count of marked bytes, ACE and `snd.una` with it.
    option_bytes: u32,
    option_ace: u8,
    option_una: u64,
    /// No segment has arrived since the handshake.
    pub is_first: bool,
    /// `snd.nxt` when a mark was reported last.
    marked_to: u64,
    /// Marked bytes, from zero.
    pub marked_bytes: u64,
}

impl Reported {
    pub(super) const fn new() -> Reported {
        Reported {
            ce_packets: 5,
            ce_bytes: 0,
            options: Options::Absent,
            option_bytes: 0,
            option_ace: 5,
            option_una: 0,
            is_first: true,
            marked_to: 0,
            marked_bytes: 0,
        }
    }

    pub(crate) fn ace(&self) -> u8 {
        (self.ce_packets & 7) as u8
    }

    pub(super) fn ace_flags(&self) -> Flags {
        Flags::of_ace(self.ace())
    }

    /// Whether ACE may have cycled unseen: marks arrive, and no options.
    pub(super) fn may_cycle(&self, una: u64) -> bool {
        self.options != Options::Present && una < self.marked_to
    }

    /// Newly marked packets by ACE, modulo 8.
    fn ace_delta(&self, ace: u8) -> u64 {
        u64::from(ace.wrapping_sub(self.ace()) & 7)
    }

    pub(super) fn on_marked_syn_ack(&mut self) {
        self.ce_packets = self.ce_packets.wrapping_add(1);
        self.option_ace = self.ace();
    }

    /// The segment that completes the handshake. Section 3.2.3.2.3: without an option in it, options are taken to be
    /// unavailable until one arrives.
    pub(super) fn on_handshake_option(&mut self, hdr: &Header, una: u64) {
        self.read_option(hdr, self.ace(), una);
    }

    /// Newly marked bytes by the option, if the segment has a valid one.
    fn read_option(&mut self, hdr: &Header, ace: u8, una: u64) -> Option<u64> {
        let counters = hdr.options.ecn.filter(|_| self.options != Options::Zeroed)?;
        let ce = counters.ce()?;
        if self.options == Options::Absent {
            let is_cleared = counters.ect0() == Some(0) || counters.ect1() == Some(0);
            self.options = if is_cleared { Options::Zeroed } else { Options::Present };
            self.sync_option(ce, ace, una);
            return None;
        }
        let more = difference(ce, self.ce_bytes);
        self.sync_option(ce, ace, una);
        Some(more.max(0).unsigned_abs().into())
    }

    fn sync_option(&mut self, ce: u32, ace: u8, una: u64) {
        (self.ce_bytes, self.option_bytes) = (ce, ce);
        (self.option_ace, self.option_una) = (ace, una);
    }

    /// `packets` more are marked, `bytes` of payload.
    fn add(&mut self, packets: u64, bytes: u64, snd_nxt: u64) {
        self.ce_packets = self.ce_packets.wrapping_add(packets as u32);
        self.marked_bytes = self.marked_bytes.saturating_add(bytes);
        if packets > 0 || bytes > 0 {
            self.marked_to = snd_nxt;
        }
    }
}

/// `a - b` of counters of which 24 bits are known (section 3.2.3.1).
fn difference(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// What an ACK delivers.
struct Ack {
    bytes: u64,
    /// At least; exact if all segments were full.
    packets: u64,
}

impl Tcb {
    /// Decodes the feedback of an ACK that delivers `bytes`: how many of them were marked. An ACK that delivers
    /// nothing is old, or repeats what is known. Called in every mode; `snd.una` is updated.
    #[inline]
    pub(crate) fn decode_marks(
        &mut self,
        hdr: &Header,
        bytes: u64,
        env: &mut crate::tcp::Env,
    ) -> u64 {
        if !matches!(self.ecn.mode, EcnMode::Accurate) {
            return 0;
        }
        let marked = self.decode_accurate(hdr, bytes, env.counters);
        self.ecn.update_predicted(self.snd.una);
        marked
    }

    #[inline(never)]
    fn decode_accurate(&mut self, hdr: &Header, bytes: u64, counters: &mut Counters) -> u64 {
        let ace = hdr.flags.ace();
        if core::mem::take(&mut self.ecn.reported.is_first) && ace == 0 {
            // Section 3.2.2.4: the flags are cleared on the way.
            self.ecn.distrust(counters);
        }
        if bytes == 0 {
            return 0;
        }
        if !self.ecn.is_feedback_trusted {
            let changed = self.ecn.reported.ace_delta(ace);
            self.ecn.reported.add(changed, 0, 0);
            return 0;
        }
        let ack = Ack { bytes, packets: div_rem(bytes, self.smss()).0.max(1) };
        if self.is_feedback_mangled(hdr) {
            self.ecn.distrust(counters);
            return 0;
        }
        let marked = self.marked_by(&ack, hdr);
        if marked > 0 {
            counters.count(Counter::TcpEcnEchoesIn);
            counters.add(Counter::TcpEcnMarkedBytes, marked);
        }
        marked
    }

    fn marked_by(&mut self, ack: &Ack, hdr: &Header) -> u64 {
        let mss = self.smss();
        let (una, snd_nxt) = (self.snd.una, self.snd.nxt);
        let ace = hdr.flags.ace();
        let by_option = self.ecn.reported.read_option(hdr, ace, una);
        let reported = &mut self.ecn.reported;
        let delta = reported.ace_delta(ace);
        let (packets, marked) = match by_option {
            Some(bytes) => (cycled_to(delta, div_rem(bytes, mss).0), bytes),
            None => {
                let packets = reported.marked_packets(delta, ack.packets, una);
                (packets, packets.saturating_mul(mss))
            }
        };
        let marked = marked.min(ack.bytes);
        if by_option.is_none() && hdr.options.ecn.is_none() {
            reported.ce_bytes = reported.ce_bytes.wrapping_add(marked as u32);
        }
        reported.add(packets, marked, snd_nxt);
        marked
    }

    /// Section 3.2.3.2.5: the option reports more marked bytes, ACE no more marked packets, and ACE cannot have
    /// cycled, since only full segments, and fewer than eight, were delivered since the last option.
    fn is_feedback_mangled(&self, hdr: &Header) -> bool {
        let r = &self.ecn.reported;
        let Some(ce) = hdr.options.ecn.and_then(|o| o.ce()) else { return false };
        let delivered = self.snd.una.saturating_sub(r.option_una);
        r.options == Options::Present
            && difference(ce, r.option_bytes) > 0
            && hdr.flags.ace() == r.option_ace
            && self.send_marks.small_end <= r.option_una
            && delivered < self.smss().saturating_mul(ACE_CYCLE)
    }
}

impl Reported {
    /// Section 3.2.2.5.2 and appendix A.2: the marked packets of an ACK without option that delivers `packets`; `delta`
    /// is their number modulo 8. If options of the peer arrive, ACE has not cycled: the peer would have sent an option.
    fn marked_packets(&self, delta: u64, packets: u64, una: u64) -> u64 {
        let is_marking = delta > 0 || una < self.marked_to;
        if packets < ACE_CYCLE || self.options == Options::Present || !is_marking {
            return delta;
        }
        packets.saturating_sub(packets.wrapping_sub(delta) & 7)
    }
}

/// The largest number up to `packets` that is `delta` modulo 8; `delta` if there is none.
fn cycled_to(delta: u64, packets: u64) -> u64 {
    delta.saturating_add(packets.saturating_sub(delta) & !7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_of_24_bits_and_have_a_sign() {
        assert_eq!(difference(5, 3), 2);
        assert_eq!(difference(3, 5), -2);
        assert_eq!(difference(1, 0x00ff_ffff), 2);
        assert_eq!(difference(0x0100_0001, 0x00ff_ffff), 2);
        assert_eq!(difference(0x0080_0000, 0), -0x0080_0000);
        assert_eq!(difference(0x007f_ffff, 0), 0x007f_ffff);
    }

    #[test]
    fn an_ack_of_many_packets_may_hide_cycles_of_ace_only_while_marks_arrive() {
        let mut r = Reported::new();
        assert_eq!(r.marked_packets(0, 45, 100), 0);
        assert_eq!(r.marked_packets(3, 7, 100), 3);
        assert_eq!(r.marked_packets(3, 45, 100), 43);
        r.marked_to = 200;
        assert_eq!(r.marked_packets(0, 45, 100), 40);
        assert_eq!(r.marked_packets(0, 45, 200), 0);
        r.options = Options::Present;
        assert_eq!(r.marked_packets(3, 45, 100), 3);
    }

    #[test]
    fn bytes_of_an_option_tell_how_often_ace_has_cycled() {
        assert_eq!(cycled_to(3, 0), 3);
        assert_eq!(cycled_to(3, 10), 3);
        assert_eq!(cycled_to(3, 11), 11);
        assert_eq!(cycled_to(0, 45), 40);
    }
}
