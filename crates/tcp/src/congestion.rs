//! Congestion control: how many bytes may be in flight.
//!
//! The engine detects losses ([`crate::recovery`]) and reports what a controller needs: deliveries,
//! the start of a loss episode, time-outs, idle periods, and that an episode turned out to be
//! spurious. A controller answers with its congestion window. It has no sequence numbers, clock or
//! timer of its own; windows are in bytes.
//!
//! A further controller is a file in `congestion/` that implements [`Controller`], and a line in the
//! list below. The list yields the public names, the configuration and the dispatch, which is a
//! `match`: no call of the data path is indirect.

mod cubic;
mod hystart;
mod new_reno;
mod window;

use fulmar_base::{Duration, Instant};
pub(crate) use window::Window;

/// A delivery, as reported to a controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ack {
    /// When the ACK arrived.
    pub now: Instant,
    /// Bytes newly acknowledged that may enlarge the window: those sent while the connection was
    /// limited by cwnd (RFC 9438 section 5.8), outside fast recovery, and after a time-out at most
    /// two segments per ACK.
    pub acked: u64,
    /// The smoothed round-trip time; zero before the first sample.
    pub srtt: Duration,
    /// The round-trip time of this ACK, if it acknowledged bytes sent once.
    pub rtt: Option<Duration>,
    /// `snd_una` after the ACK, and `snd_nxt`: they delimit round trips.
    pub una: u64,
    pub snd_nxt: u64,
}

#[cfg(test)]
impl Ack {
    /// Of `acked` bytes, at time zero.
    fn of(acked: u64) -> Ack {
        let (now, srtt) = (Instant::ZERO, Duration::ZERO);
        Ack { now, acked, srtt, rtt: None, una: 0, snd_nxt: 0 }
    }
}

/// A congestion controller.
pub(crate) trait Controller {
    /// The window, for the rules that all controllers share.
    fn window(&self) -> &Window;
    fn window_mut(&mut self) -> &mut Window;

    /// Data was delivered.
    fn on_ack(&mut self, ack: &Ack);

    /// A loss episode starts: segments were found lost that were sent after the last episode.
    fn on_loss(&mut self);

    /// The retransmission timer expired for the first time since the last progress.
    fn on_timeout(&mut self);

    /// The retransmission timer expired again: the slow start threshold stays.
    fn on_repeated_timeout(&mut self) {
        self.window_mut().collapse();
    }

    /// Nothing was sent for longer than the retransmission time-out (RFC 5681 section 4.1).
    fn on_idle(&mut self) {
        self.window_mut().restart();
    }

    /// The last loss episode or time-out was spurious: restores the state before it.
    fn on_undo(&mut self);
}

/// Declares the controllers: the public name in code, the name of options and pages, the type.
macro_rules! controllers {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $type:ty;)*) => {
        /// A congestion control algorithm.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum CongestionControl {
            $($(#[$doc])* $variant,)*
        }

        impl CongestionControl {
            /// Every algorithm.
            pub const ALL: &'static [CongestionControl] = &[$(CongestionControl::$variant),*];

            /// Its name, as Linux spells it where Linux has it.
            pub const fn name(self) -> &'static str {
                match self { $(CongestionControl::$variant => $name,)* }
            }
        }

        /// The controller of a connection.
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum Congestion {
            $($variant($type),)*
        }

        impl Congestion {
            fn with_window(which: CongestionControl, window: Window) -> Congestion {
                match which {
                    $(CongestionControl::$variant => Congestion::$variant(<$type>::new(window)),)*
                }
            }

            /// The algorithm.
            pub(crate) fn which(&self) -> CongestionControl {
                match self { $(Congestion::$variant(_) => CongestionControl::$variant,)* }
            }

            #[inline]
            fn window(&self) -> &Window {
                match self { $(Congestion::$variant(c) => c.window(),)* }
            }

            fn window_mut(&mut self) -> &mut Window {
                match self { $(Congestion::$variant(c) => c.window_mut(),)* }
            }

            /// See [`Controller::on_ack`].
            #[inline]
            pub(crate) fn on_ack(&mut self, ack: &Ack) {
                match self { $(Congestion::$variant(c) => c.on_ack(ack),)* }
            }

            /// See [`Controller::on_loss`].
            pub(crate) fn on_loss(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_loss(),)* }
            }

            /// See [`Controller::on_timeout`] and [`Controller::on_repeated_timeout`].
            pub(crate) fn on_timeout(&mut self, repeated: bool) {
                match self {
                    $(Congestion::$variant(c) if repeated => c.on_repeated_timeout(),)*
                    $(Congestion::$variant(c) => c.on_timeout(),)*
                }
            }

            /// See [`Controller::on_idle`].
            pub(crate) fn on_idle(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_idle(),)* }
            }

            /// See [`Controller::on_undo`].
            pub(crate) fn on_undo(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_undo(),)* }
            }
        }
    };
}

controllers! {
    /// CUBIC (RFC 9438), the default.
    Cubic, "cubic", cubic::Cubic;
    /// NewReno: additive increase by a segment per round trip, decrease by half (RFC 5681).
    NewReno, "reno", new_reno::NewReno;
}

impl CongestionControl {
    /// The algorithm of a name ([`CongestionControl::name`]).
    pub fn from_name(name: &str) -> Option<CongestionControl> {
        CongestionControl::ALL.iter().copied().find(|c| c.name() == name)
    }
}

impl core::fmt::Display for CongestionControl {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

impl Congestion {
    pub(crate) fn new(which: CongestionControl, mss: u32, initial_segments: u32) -> Congestion {
        Congestion::with_window(which, Window::new(mss, initial_segments))
    }

    /// Changes the algorithm. The window and the slow start threshold stay.
    pub(crate) fn switch_to(&mut self, which: CongestionControl) {
        if self.which() != which {
            *self = Congestion::with_window(which, *self.window());
        }
    }

    #[inline]
    pub(crate) fn cwnd(&self) -> u64 {
        self.window().cwnd
    }

    pub(crate) fn ssthresh(&self) -> u64 {
        self.window().ssthresh
    }

    /// Sets cwnd: proportional rate reduction.
    pub(crate) fn set_cwnd(&mut self, bytes: u64) {
        let window = self.window_mut();
        window.cwnd = bytes.max(window.mss).min(window::MAX_CWND);
    }

    #[inline]
    pub(crate) fn in_slow_start(&self) -> bool {
        self.window().in_slow_start()
    }

    /// Sets the segment size. The initial window is recomputed as long as cwnd still equals it.
    pub(crate) fn set_mss(&mut self, mss: u32, initial_segments: u32) {
        self.window_mut().set_mss(mss, initial_segments);
    }

    /// The SYN was lost: cwnd becomes one segment (RFC 6928 section 2, RFC 5681 section 3.1).
    pub(crate) fn on_syn_lost(&mut self) {
        self.window_mut().collapse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_finds_its_algorithm() {
        for c in CongestionControl::ALL {
            assert_eq!(CongestionControl::from_name(c.name()), Some(*c));
            assert_eq!(Congestion::new(*c, 1448, 10).which(), *c);
        }
        assert_eq!(CongestionControl::from_name("vegas"), None);
    }

    #[test]
    fn a_change_of_algorithm_keeps_the_window() {
        let mut c = Congestion::new(CongestionControl::Cubic, 1000, 10);
        c.on_loss();
        c.switch_to(CongestionControl::NewReno);
        assert_eq!((c.cwnd(), c.ssthresh()), (7000, 7000));
        c.on_loss();
        assert_eq!((c.cwnd(), c.ssthresh()), (3500, 3500));
    }

    #[test]
    fn an_undone_episode_leaves_no_trace_in_the_window() {
        for which in CongestionControl::ALL {
            let mut c = Congestion::new(*which, 1000, 10);
            let before = (c.cwnd(), c.ssthresh());
            c.on_loss();
            assert!(c.cwnd() < before.0);
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
            c.on_timeout(false);
            c.on_timeout(true);
            assert_eq!(c.cwnd(), 1000);
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
            // There is nothing left to undo.
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
        }
    }
}
