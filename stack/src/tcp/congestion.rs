//! Congestion control: how many bytes may be in flight.
//!
//! The engine detects losses ([`recovery`](crate::tcp::recovery)) and reports the inputs of a controller: deliveries,
//! the start of a loss episode, time-outs, idle periods, and that an episode turned out to be spurious. A controller
//! answers with its congestion window. It has no sequence numbers, clock or timer of its own; windows are in bytes.
//!
//! There are two kinds. A window-based controller ([`Cubic`](cubic::Cubic),
//! [`NewReno`](new_reno::NewReno)) grows its window by what was acknowledged, and reduces it once per
//! loss episode; fast recovery follows PRR. A model-based controller ([`Bbr`](bbr::Bbr)) sees each
//! delivery-rate sample ([`delivery`](crate::tcp::delivery)) and each lost run, and sets window and pacing rate
//! ([`pacing`](crate::tcp::pacing)) itself, in recovery too.
//!
//! A further controller is a file in `congestion/` that implements [`Controller`], and a line in the
//! list below. The list yields the public names, the configuration and the dispatch, which is a
//! `match`: no call of the data path is indirect.

mod bbr;
mod cubic;
mod dctcp;
mod hystart;
mod marks;
mod new_reno;
mod window;

use crate::base::{Duration, Instant};
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

/// What an ACK delivered, for controllers that take samples (RS and C of draft-ietf-ccwg-bbr). Rates
/// are in bytes per second, volumes in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub now: Instant,
    /// Bytes that this ACK delivered, cumulatively or selectively.
    pub newly_acked: u64,
    /// Part of `newly_acked` that was marked with CE, by accurate feedback (RFC 9768); 0 without.
    pub newly_marked: u64,
    /// Bytes delivered on this connection (C.delivered).
    pub total_delivered: u64,
    /// Part of `total_delivered` that was marked. `None`: the feedback is not accurate.
    pub total_marked: Option<u64>,
    /// The delivery rate; 0 if this ACK gives none.
    pub rate: u64,
    /// Bytes delivered since the latest delivered bytes were sent (RS.delivered).
    pub delivered: u64,
    /// Part of `delivered` that was marked.
    pub marked: u64,
    /// C.delivered when the latest delivered bytes were sent (RS.prior_delivered), if known.
    pub prior_delivered: Option<u64>,
    pub is_app_limited: bool,
    /// In flight when the latest delivered bytes were sent (RS.tx_in_flight).
    pub tx_in_flight: u64,
    /// Lost since the latest delivered bytes were sent (RS.lost).
    pub lost: u64,
    /// The round-trip time of the latest bytes that were sent once.
    pub rtt: Option<Duration>,
    /// The smoothed round-trip time; zero before the first sample.
    pub srtt: Duration,
    /// In flight after the ACK, less what is SACKed or lost.
    pub in_flight: u64,
    /// The congestion window was full within the last round trip.
    pub is_cwnd_limited: bool,
    /// The peer sends SACK blocks.
    pub has_sack: bool,
}

impl Sample {
    /// Nothing delivered.
    pub(crate) const fn at(now: Instant) -> Sample {
        Sample {
            now,
            newly_acked: 0,
            newly_marked: 0,
            total_delivered: 0,
            total_marked: None,
            rate: 0,
            delivered: 0,
            marked: 0,
            prior_delivered: None,
            is_app_limited: false,
            tx_in_flight: 0,
            lost: 0,
            rtt: None,
            srtt: Duration::ZERO,
            in_flight: 0,
            is_cwnd_limited: false,
            has_sack: true,
        }
    }
}

/// Bytes that were marked as lost, for controllers that take samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    pub now: Instant,
    /// Position of the first byte.
    pub start: u64,
    pub bytes: u64,
    /// C.delivered.
    pub total_delivered: u64,
    /// Bytes lost since this run was sent, the run included.
    pub lost: u64,
    /// In flight when this run was sent (P.tx_in_flight), the run included.
    pub tx_in_flight: u64,
    pub is_app_limited: bool,
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
    /// The controller takes delivery-rate samples: [`Controller::on_sample`] and
    /// [`Controller::on_lost`] are called. Taking them costs a little per super-segment.
    const TAKES_SAMPLES: bool = false;

    /// In fast recovery the window follows PRR, from the flight to ssthresh.
    const USES_PRR: bool = true;

    /// The window, for the rules that all controllers share.
    fn window(&self) -> &Window;
    fn window_mut(&mut self) -> &mut Window;

    /// Data was acknowledged while the window was in full use.
    fn on_ack(&mut self, _ack: &Ack) {}

    /// Data was delivered; loss detection has run.
    fn on_sample(&mut self, _sample: &Sample) {}

    /// A run of bytes was marked as lost.
    fn on_lost(&mut self, _lost: &Lost) {}

    /// A loss episode starts: segments were found lost that were sent after the last episode.
    fn on_loss(&mut self);

    /// The path has marked data with CE, whichever the feedback; at most once per round trip, after
    /// [`Controller::on_sample`]. RFC 8511 section 2: the reduction may be smaller than that for a loss.
    fn on_ecn(&mut self, _now: Instant) {
        self.on_loss();
    }

    /// A tail loss probe has repaired a loss. No episode follows.
    fn on_repaired_loss(&mut self) {
        self.on_loss();
    }

    /// Everything sent before the loss episode is acknowledged.
    fn on_recovered(&mut self) {}

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

    /// For controllers that take samples: data is about to be sent after an application-limited
    /// pause with nothing in flight.
    fn on_restart(&mut self, _now: Instant) {}

    /// The last loss episode or time-out was spurious: restores the state before it.
    fn on_undo(&mut self);

    /// The rate of sending, bytes per second; `None`: not paced.
    fn pacing_rate(&self, _srtt: Duration) -> Option<u64> {
        None
    }

    /// The controller deliberately sends below the rate of the path (ProbeRTT): samples count as
    /// application-limited.
    fn is_probing_rtt(&self) -> bool {
        false
    }

    /// The path model, if the controller keeps one.
    fn model(&self) -> Option<PathModel> {
        None
    }
}

/// A controller's model of the path, for display (Linux: `struct tcp_bbr_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PathModel {
    /// The phase of its state machine.
    pub phase: &'static str,
    /// The rate that the path is taken to deliver, bytes per second.
    pub rate: u64,
    /// Its least round-trip time; `None` before the first sample.
    pub min_rtt: Option<Duration>,
    /// What `rate` is multiplied by for pacing, percent.
    pub pacing_gain: u64,
    /// The factor of the product of `rate` and `min_rtt` in the congestion window, percent.
    pub cwnd_gain: u64,
}

/// Declares the controllers: the public name in code, the name of options and pages, the type.
macro_rules! controllers {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $type:ty;)*) => {
        /// A congestion control algorithm.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum CongestionControl {
            $($(#[$doc])* $variant,)*
        }

        impl CongestionControl {
            /// Every algorithm.
            pub const ALL: &'static [CongestionControl] = &[$(CongestionControl::$variant),*];

            /// Its name: that of Linux if Linux has the algorithm.
            pub const fn name(self) -> &'static str {
                match self { $(CongestionControl::$variant => $name,)* }
            }

            /// See [`Controller::TAKES_SAMPLES`].
            pub(crate) const fn takes_samples(self) -> bool {
                match self {
                    $(CongestionControl::$variant => <$type as Controller>::TAKES_SAMPLES,)*
                }
            }
        }

        /// The controller of a connection.
        #[derive(Clone, Debug)]
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

            /// See [`Controller::USES_PRR`].
            pub(crate) fn uses_prr(&self) -> bool {
                match self { $(Congestion::$variant(_) => <$type as Controller>::USES_PRR,)* }
            }

            /// See [`Controller::on_sample`].
            pub(crate) fn on_sample(&mut self, sample: &Sample) {
                match self { $(Congestion::$variant(c) => c.on_sample(sample),)* }
            }

            /// See [`Controller::on_lost`].
            pub(crate) fn on_lost(&mut self, lost: &Lost) {
                match self { $(Congestion::$variant(c) => c.on_lost(lost),)* }
            }

            /// See [`Controller::on_ecn`].
            pub(crate) fn on_ecn(&mut self, now: Instant) {
                match self { $(Congestion::$variant(c) => c.on_ecn(now),)* }
            }

            /// See [`Controller::on_repaired_loss`].
            pub(crate) fn on_repaired_loss(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_repaired_loss(),)* }
            }

            /// See [`Controller::on_recovered`].
            pub(crate) fn on_recovered(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_recovered(),)* }
            }

            /// See [`Controller::on_restart`].
            pub(crate) fn on_restart(&mut self, now: Instant) {
                match self { $(Congestion::$variant(c) => c.on_restart(now),)* }
            }

            /// See [`Controller::pacing_rate`].
            pub(crate) fn pacing_rate(&self, srtt: Duration) -> Option<u64> {
                match self { $(Congestion::$variant(c) => c.pacing_rate(srtt),)* }
            }

            /// See [`Controller::model`].
            pub(crate) fn model(&self) -> Option<PathModel> {
                match self { $(Congestion::$variant(c) => c.model(),)* }
            }

            /// See [`Controller::is_probing_rtt`].
            pub(crate) fn is_probing_rtt(&self) -> bool {
                match self { $(Congestion::$variant(c) => c.is_probing_rtt(),)* }
            }

            /// See [`Controller::on_loss`].
            pub(crate) fn on_loss(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_loss(),)* }
            }

            /// See [`Controller::on_timeout`].
            pub(crate) fn on_timeout(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_timeout(),)* }
            }

            /// See [`Controller::on_repeated_timeout`].
            pub(crate) fn on_repeated_timeout(&mut self) {
                match self { $(Congestion::$variant(c) => c.on_repeated_timeout(),)* }
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
    /// BBR version 3 (draft-ietf-ccwg-bbr): a model of the path's rate and round-trip time instead of
    /// losses; paced.
    Bbr, "bbr", bbr::Bbr;
    /// DCTCP (RFC 8257): NewReno that reduces by the share of marked bytes. For data centers.
    Dctcp, "dctcp", dctcp::Dctcp;
}

/// The name of no algorithm. `Display` lists the known names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownCongestionControl;

impl core::error::Error for UnknownCongestionControl {}

impl core::fmt::Display for UnknownCongestionControl {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("unknown congestion control; expected one of")?;
        let mut names = CongestionControl::ALL.iter().map(|c| c.name());
        names.next().into_iter().try_for_each(|first| write!(f, " {first}"))?;
        names.try_for_each(|name| write!(f, ", {name}"))
    }
}

impl core::str::FromStr for CongestionControl {
    type Err = UnknownCongestionControl;

    /// The algorithm of a name ([`CongestionControl::name`]), which is Linux's for TCP_CONGESTION.
    fn from_str(name: &str) -> Result<CongestionControl, UnknownCongestionControl> {
        let found = CongestionControl::ALL.iter().copied().find(|c| c.name() == name);
        found.ok_or(UnknownCongestionControl)
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

    /// The SYN was lost again: cwnd becomes one segment (RFC 5681 section 3.1).
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
            assert_eq!(c.name().parse(), Ok(*c));
            assert_eq!(Congestion::new(*c, 1448, 10).which(), *c);
        }
        let unknown = "vegas".parse::<CongestionControl>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown congestion control; expected one of cubic, reno, bbr, dctcp"
        );
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
        for which in CongestionControl::ALL.iter().filter(|c| !c.takes_samples()) {
            let mut c = Congestion::new(*which, 1000, 10);
            let before = (c.cwnd(), c.ssthresh());
            c.on_loss();
            assert!(c.cwnd() < before.0);
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
            c.on_timeout();
            c.on_repeated_timeout();
            assert_eq!(c.cwnd(), 1000);
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
            // There is nothing left to undo.
            c.on_undo();
            assert_eq!((c.cwnd(), c.ssthresh()), before, "{which}");
        }
    }
}
