//! Datagram packetisation-layer path MTU discovery (RFC 8899): the largest datagram for a protocol over UDP that
//! acknowledges its datagrams, as QUIC does. A state machine without I/O and clock: the caller sends probes,
//! which carry padding and no data worth a retransmission, with fragmentation forbidden, and reports what becomes
//! of them.
//!
//! ```text
//!            base acked              three losses, or the largest acked
//!   Base ───────────────► Searching ──────────────────► SearchComplete
//!    │ ▲  ◄─────────────────── black hole ────────────────────┤  │ after ten minutes: Searching
//!    ▼ │ an ack
//!   Error: not even the base size passes
//! ```
//!
//! Sizes are of payload, bytes. Times count from any epoch of the caller.

use core::time::Duration;

/// BASE_PLPMTU (section 5.1.2), as payload.
const BASE_BYTES: usize = 1200;
/// The size in the error state: the 576 bytes that each IPv4 host accepts (RFC 1122 section 3.3.2)
/// less IP and UDP header. MIN_PLPMTU of RFC 8899 would be 68 bytes of packet.
const LEAST_BYTES: usize = 548;
/// MAX_PROBES (section 5.1.2).
const MAX_PROBES: u8 = 3;
/// PROBE_TIMER (section 5.1.1): a probe that is not acknowledged within this time is lost.
const PROBE_TIMER: Duration = Duration::from_secs(15);
/// PMTU_RAISE_TIMER (section 5.1.1).
const RAISE_TIMER: Duration = Duration::from_secs(600);
/// The search ends when fewer bytes are open.
const THRESHOLD_BYTES: usize = 8;

/// The phases of section 5.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PlpmtudState {
    /// The base size is to be confirmed.
    Base,
    /// Larger sizes are probed for.
    Searching,
    /// The search is over; it is repeated after ten minutes.
    SearchComplete,
    /// The base size does not pass: datagrams are of the least size, and the base is probed for.
    Error,
}

/// The search of one path.
///
/// ```
/// # use core::time::Duration;
/// # use fulmar_stack::udp::{Plpmtud, PlpmtudState};
/// // A path whose packets carry 1400 bytes, behind an interface whose packets carry 1472.
/// let (mut search, mut now) = (Plpmtud::new(1472), Duration::ZERO);
/// while let Some(bytes) = search.poll_probe(now) {
///     now += Duration::from_millis(20);
///     match bytes {
///         ..=1400 => search.on_probe_acked(bytes, now),
///         _ => search.on_probe_lost(bytes, now),
///     }
/// }
/// assert_eq!(search.state(), PlpmtudState::SearchComplete);
/// assert!((1393..=1400).contains(&search.payload_bytes()));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Plpmtud {
    state: PlpmtudState,
    /// PLPMTU.
    current: usize,
    /// Sizes above it were lost.
    high: usize,
    /// The limit of the interface (MAX_PLPMTU).
    most: usize,
    /// PROBED_SIZE, and when its last probe was sent.
    probe: Option<(usize, Duration)>,
    /// PROBE_COUNT.
    losses: u8,
    /// Datagrams of more than the base size lost since one arrived.
    data_losses: u8,
    /// When the search is repeated.
    raise_at: Duration,
}

impl Plpmtud {
    /// A search for up to `most` bytes of payload, which is the payload at the interface's MTU (MAX_PLPMTU).
    pub fn new(most: usize) -> Plpmtud {
        let most = most.max(LEAST_BYTES);
        Plpmtud {
            state: PlpmtudState::Base,
            current: BASE_BYTES.min(most),
            high: most,
            most,
            probe: None,
            losses: 0,
            data_losses: 0,
            raise_at: Duration::ZERO,
        }
    }

    /// The phase.
    pub fn state(&self) -> PlpmtudState {
        self.state
    }

    /// The largest datagram to send, bytes of payload (PLPMTU).
    pub fn payload_bytes(&self) -> usize {
        self.current
    }

    /// The size of a probe that is to be sent now, if one is. It counts as sent.
    pub fn poll_probe(&mut self, now: Duration) -> Option<usize> {
        if let Some((bytes, sent_at)) = self.probe {
            if now.saturating_sub(sent_at) < PROBE_TIMER {
                return None;
            }
            self.on_probe_lost(bytes, now);
        }
        if self.state == PlpmtudState::SearchComplete {
            if now < self.raise_at {
                return None;
            }
            (self.state, self.high) = (PlpmtudState::Searching, self.most);
        }
        let bytes = self.next_size();
        if bytes.is_none() {
            self.end_if_complete(now);
        }
        self.probe = bytes.map(|bytes| (bytes, now));
        bytes
    }

    /// When [`Plpmtud::poll_probe`] is to be called at the latest; `None`: now.
    pub fn next_deadline(&self) -> Option<Duration> {
        match self.probe {
            Some((_, sent_at)) => Some(sent_at.saturating_add(PROBE_TIMER)),
            None => (self.state == PlpmtudState::SearchComplete).then_some(self.raise_at),
        }
    }

    /// A probe of `bytes` was acknowledged.
    pub fn on_probe_acked(&mut self, bytes: usize, now: Duration) {
        if self.probe.take_if(|p| p.0 == bytes).is_none() {
            return;
        }
        (self.losses, self.data_losses) = (0, 0);
        match self.state {
            PlpmtudState::Base | PlpmtudState::Error => {
                (self.state, self.current) = (PlpmtudState::Searching, bytes);
            }
            _ => self.current = self.current.max(bytes),
        }
        self.end_if_complete(now);
    }

    /// A probe of `bytes` was lost. The loss is not a sign of congestion (section 3, item 7).
    pub fn on_probe_lost(&mut self, bytes: usize, now: Duration) {
        if self.probe.take_if(|p| p.0 == bytes).is_none() {
            return;
        }
        self.losses = self.losses.saturating_add(1);
        if self.losses < MAX_PROBES {
            return;
        }
        self.losses = 0;
        match self.state {
            PlpmtudState::Base => {
                (self.state, self.current) = (PlpmtudState::Error, LEAST_BYTES.min(self.most));
            }
            PlpmtudState::Error => {}
            _ => self.high = bytes.saturating_sub(1).max(self.current),
        }
        self.end_if_complete(now);
    }

    /// A datagram other than a probe was acknowledged.
    pub fn on_data_acked(&mut self, bytes: usize) {
        if bytes > BASE_BYTES {
            self.data_losses = 0;
        }
    }

    /// A datagram other than a probe was lost. Three losses in a row above the base size are a black hole (section
    /// 4.3): the base size is used, and the search begins again.
    pub fn on_data_lost(&mut self, bytes: usize) {
        if bytes <= BASE_BYTES {
            return;
        }
        self.data_losses = self.data_losses.saturating_add(1);
        if self.data_losses >= MAX_PROBES {
            *self = Plpmtud::new(self.most);
        }
    }

    fn next_size(&self) -> Option<usize> {
        match self.state {
            PlpmtudState::Base | PlpmtudState::Error => Some(BASE_BYTES.min(self.most)),
            PlpmtudState::SearchComplete => None,
            // Most paths pass what their first link does.
            PlpmtudState::Searching if self.high == self.most && self.current < self.most => {
                Some(self.most)
            }
            PlpmtudState::Searching => {
                let open = self.high.saturating_sub(self.current);
                (open >= THRESHOLD_BYTES).then(|| self.current.saturating_add(open / 2))
            }
        }
    }

    fn end_if_complete(&mut self, now: Duration) {
        if self.state == PlpmtudState::Searching && self.next_size().is_none() {
            self.state = PlpmtudState::SearchComplete;
            self.raise_at = now.saturating_add(RAISE_TIMER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Probes over a path of `path` bytes until none is due. Returns how many were sent.
    fn run(search: &mut Plpmtud, path: usize, now: &mut Duration) -> usize {
        let mut probes = 0;
        while let Some(bytes) = search.poll_probe(*now) {
            probes += 1;
            *now += 20 * MS;
            if bytes <= path {
                search.on_probe_acked(bytes, *now);
            } else {
                search.on_probe_lost(bytes, *now);
            }
            assert!(search.payload_bytes() <= path.max(LEAST_BYTES) && probes < 100);
        }
        probes
    }

    #[test]
    fn a_path_that_passes_everything_needs_two_probes() {
        let (mut search, mut now) = (Plpmtud::new(1472), Duration::ZERO);
        assert_eq!(run(&mut search, 9000, &mut now), 2);
        assert_eq!((search.payload_bytes(), search.state()), (1472, PlpmtudState::SearchComplete));
        // The repeated search has no larger size to try: it is complete at once.
        now += RAISE_TIMER;
        assert_eq!(search.poll_probe(now), None);
        assert_eq!(search.state(), PlpmtudState::SearchComplete);
        assert_eq!(search.next_deadline(), Some(now + RAISE_TIMER));
    }

    #[test]
    fn each_size_is_found_and_found_again_after_ten_minutes() {
        for path in [1200, 1201, 1300, 1399, 1472, 4000, 8972] {
            let (mut search, mut now) = (Plpmtud::new(8972), Duration::ZERO);
            run(&mut search, path, &mut now);
            let found = search.payload_bytes();
            assert!(found <= path && found + THRESHOLD_BYTES > path, "{found} of {path}");
            assert_eq!(search.next_deadline(), Some(search.raise_at));
            now += RAISE_TIMER;
            run(&mut search, 8972, &mut now);
            assert_eq!(search.payload_bytes(), 8972);
        }
    }

    #[test]
    fn a_probe_that_is_not_acknowledged_in_time_is_lost() {
        let mut search = Plpmtud::new(1472);
        assert_eq!(search.poll_probe(Duration::ZERO), Some(1200));
        assert_eq!(search.poll_probe(14_999 * MS), None);
        for n in 1..=2 {
            assert_eq!(search.poll_probe(PROBE_TIMER * n), Some(1200));
        }
        assert_eq!(search.state(), PlpmtudState::Base);
        assert_eq!(search.poll_probe(PROBE_TIMER * 3), Some(1200));
        assert_eq!((search.state(), search.payload_bytes()), (PlpmtudState::Error, LEAST_BYTES));
        search.on_probe_acked(1200, PROBE_TIMER * 3 + MS);
        assert_eq!((search.state(), search.payload_bytes()), (PlpmtudState::Searching, 1200));
    }

    #[test]
    fn three_large_datagrams_lost_in_a_row_are_a_black_hole() {
        let (mut search, mut now) = (Plpmtud::new(1472), Duration::ZERO);
        run(&mut search, 1472, &mut now);
        for _ in 0..10 {
            search.on_data_lost(1472);
            search.on_data_lost(1472);
            search.on_data_acked(1472);
            search.on_data_lost(500);
        }
        assert_eq!(search.payload_bytes(), 1472);
        (0..3).for_each(|_| search.on_data_lost(1472));
        assert_eq!((search.payload_bytes(), search.state()), (1200, PlpmtudState::Base));
    }

    #[test]
    fn a_report_about_no_probe_changes_nothing() {
        let mut search = Plpmtud::new(1472);
        search.on_probe_acked(9000, MS);
        assert_eq!(search.poll_probe(MS), Some(1200));
        search.on_probe_acked(1472, MS);
        assert_eq!((search.payload_bytes(), search.state()), (1200, PlpmtudState::Base));
    }
}
