//! Stages of a packet's path, generated from one list, and the observer that receives them.
//!
//! The cost of a stage is the time since the previous stage, so the stages of a path add up to its total. Without an
//! observer, passing a stage costs one branch.

use alloc::sync::Arc;
use core::fmt;

macro_rules! stages {
    ($($(#[doc = $doc:literal])* $variant:ident, $layer:literal, $name:literal;)*) => {
        /// A named point on a packet's path.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Stage {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Stage {
            /// All stages, in the order of a path.
            pub const ALL: &'static [Stage] = &[$(Stage::$variant,)*];

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Stage::$variant => $name,)* }
            }

            /// The layer that the stage belongs to.
            pub const fn layer(self) -> &'static str {
                match self { $(Stage::$variant => $layer,)* }
            }

            /// What has been done since the previous stage.
            pub const fn sentence(self) -> &'static str {
                match self { $(Stage::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

stages! {
    /// The application called send.
    SendCall, "application", "send_call";
    /// The shard lock is held, deferred requests are done, and the clock is read.
    Locked, "lock", "locked";
    /// The socket is found and its state is checked.
    SendChecked, "socket", "send_checked";
    /// The route lookup chose a datagram's source address and MTU.
    PathChosen, "ip", "path_chosen";
    /// Buffers for the whole write are allocated.
    SendReserved, "memory", "send_reserved";
    /// The bytes are copied into the buffers.
    SendCopied, "copy", "send_copied";
    /// The bytes are in the send buffer.
    SendCommitted, "socket", "send_committed";
    /// The transport chose a segment and built its header.
    TransportOutput, "transport", "transport_output";
    /// The route and the neighbour are resolved.
    RouteFound, "ip", "route_found";
    /// Headroom for both headers is reserved, and the IP header is written.
    IpOutput, "ip", "ip_output";
    /// The Ethernet header is written.
    EtherOutput, "ether", "ether_output";
    /// The frame is ready for the device: offloads it lacks are done in software, and it is queued in the
    /// burst.
    BurstQueued, "stack", "burst_queued";
    /// The frame is in the device's transmit ring, and the device is notified. A path that ends here still
    /// reclaims completed frames as often as a full one.
    DeviceTaken, "device", "device_taken";
    /// Completed frames are reclaimed, and their buffers are freed.
    Completed, "device", "completed";
    /// A receive poll returned no frame.
    PolledEmpty, "device", "polled_empty";
    /// The device returned a received frame.
    DeviceReceived, "device", "device_received";
    /// The Ethernet header is checked.
    EtherInput, "ether", "ether_input";
    /// The IP header is checked.
    IpInput, "ip", "ip_input";
    /// The transport header is checked; the socket lookup is next.
    Demultiplexed, "transport", "demultiplexed";
    /// The transport accepted the bytes.
    TransportInput, "transport", "transport_input";
    /// Waiting readers are marked for a wake-up.
    ReaderWoken, "wake", "reader_woken";
    /// Expired timers and deferred output are done.
    TimersRun, "stack", "timers_run";
    /// The bytes are detached from the receive buffer.
    ReceiveTaken, "socket", "receive_taken";
    /// The bytes are copied to the application.
    ReceiveCopied, "copy", "receive_copied";
    /// The buffers are freed, and the window update is decided.
    ReceiveFreed, "memory", "receive_freed";
    /// The shard lock is released, and pending wake-ups are delivered.
    Released, "lock", "released";
    /// The host's kernel took bytes of the guest.
    HostSent, "host", "host_sent";
    /// The host's kernel was asked for bytes for the guest.
    HostReceived, "host", "host_received";
    /// The gateway found flows, opened and closed sockets of the host, and dealt with events.
    Relayed, "gateway", "relayed";
    /// A poll without work ended: the thread polled, spun or yielded.
    Spun, "wake", "spun";
    /// The thread slept.
    Slept, "idle", "slept";
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = Stage::ALL.len();
}

/// Receives the stages that a shard's paths pass, on the thread that passes them.
pub trait Observer: Send + Sync {
    /// The path has reached `stage`.
    fn pass(&self, stage: Stage);
}

/// Reports stages to an observer.
#[derive(Default)]
pub struct Stages {
    observer: Option<Arc<dyn Observer>>,
    is_observed: bool,
}

impl Stages {
    /// Reports to `observer` from now on, until [`Stages::observe`] says otherwise.
    pub fn set_observer(&mut self, observer: Arc<dyn Observer>) {
        self.observer = Some(observer);
        self.is_observed = true;
    }

    /// Whether the observer receives the next stages.
    #[inline(always)]
    pub fn observe(&mut self, is_observed: bool) {
        self.is_observed = is_observed;
    }

    /// The path has reached `stage`.
    #[inline(always)]
    pub fn pass(&self, stage: Stage) {
        if self.is_observed {
            self.report(stage);
        }
    }

    /// The path has reached these stages, in turn.
    #[inline(always)]
    pub(crate) fn pass_all<const N: usize>(&self, stages: [Stage; N]) {
        if self.is_observed {
            stages.into_iter().for_each(|stage| self.report(stage));
        }
    }

    // Not inlined: a path that is not observed pays for the branch only.
    #[inline(never)]
    fn report(&self, stage: Stage) {
        if let Some(observer) = &self.observer {
            observer.pass(stage);
        }
    }
}

impl fmt::Debug for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stages").field("is_observed", &self.is_observed).finish_non_exhaustive()
    }
}
