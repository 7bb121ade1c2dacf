//! NewReno congestion control: RFC 5681, with the byte counting of RFC 3465.

use super::window::MAX_CWND;
use super::{Ack, Controller, Window};
use crate::base::Instant;
use crate::tcp::arith::div_rem;

/// The state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewReno {
    window: Window,
    /// Bytes acknowledged since the last growth in congestion avoidance.
    acked: u64,
    /// The window before the last reduction.
    saved: Option<Window>,
}

impl NewReno {
    pub(super) fn new(window: Window) -> NewReno {
        NewReno { window, acked: 0, saved: None }
    }

    /// Reduces the window because of marks: never spurious.
    pub(super) fn reduce_to(&mut self, bytes: u64) {
        self.saved = None;
        self.window.reduce_to(bytes);
        self.acked = 0;
    }
}

impl Controller for NewReno {
    #[inline]
    fn window(&self) -> &Window {
        &self.window
    }

    fn window_mut(&mut self) -> &mut Window {
        &mut self.window
    }

    /// A segment per window of acknowledged bytes (RFC 5681 section 3.1, RFC 3465 section 2.1).
    #[inline]
    fn on_ack(&mut self, ack: &Ack) {
        let rest = self.window.slow_start(ack);
        if rest == 0 {
            return;
        }
        let (windows, carry) = div_rem(self.acked.saturating_add(rest), self.window.cwnd);
        self.acked = carry;
        let step = windows.saturating_mul(self.window.mss);
        self.window.cwnd = self.window.cwnd.saturating_add(step).min(MAX_CWND);
    }

    /// RFC 5681 section 3.2 halves FlightSize; cwnd stands for it, as the window grows only while
    /// it is used.
    fn on_loss(&mut self) {
        self.saved = Some(self.window);
        self.window.reduce_to(self.window.cwnd / 2);
        self.acked = 0;
    }

    /// RFC 8511 section 3.1: four fifths of the window.
    fn on_ecn(&mut self, _now: Instant) {
        self.reduce_to(self.window.cwnd.saturating_mul(4) / 5);
    }

    fn on_timeout(&mut self) {
        self.on_loss();
        self.window.collapse();
    }

    fn on_undo(&mut self) {
        if let Some(saved) = self.saved.take() {
            self.window.undo(&saved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(c: &mut NewReno, acked: u64) {
        c.on_ack(&Ack::of(acked));
    }

    #[test]
    fn a_window_of_acknowledgements_adds_a_segment_however_it_is_cut() {
        for cut in [1000u64, 10, 7000] {
            let mut c = NewReno::new(Window::new(1000, 14));
            c.on_loss();
            assert_eq!(c.window.cwnd, 7000);
            (0..7000 / cut).for_each(|_| ack(&mut c, cut));
            assert_eq!(c.window.cwnd, 8000, "in pieces of {cut}");
        }
    }

    #[test]
    fn a_loss_halves_and_a_time_out_leaves_one_segment() {
        let mut c = NewReno::new(Window::new(1000, 10));
        c.on_loss();
        assert_eq!((c.window.cwnd, c.window.ssthresh), (5000, 5000));
        c.on_timeout();
        assert_eq!((c.window.cwnd, c.window.ssthresh), (1000, 2500));
        ack(&mut c, 1000);
        assert_eq!(c.window.cwnd, 2000);
    }
}
