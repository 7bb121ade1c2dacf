//! Stages of a packet's path, generated from one list, and the probe that observes them.
//!
//! The stack takes its probe as a type parameter. With [`NoProbe`] the compiler removes every call.
//! A probe that returns [`ControlFlow::Break`] makes the path return at that stage and undo its side
//! effects, so that a loop measures the cost up to the stage (the exit-point method of Rizzo's 2012
//! measurement). A probe that reads a cycle counter yields an account: the cost of a stage is the time
//! since the previous stage, so the stages of a path add up to its total.
//!
//! Some stages are outside the shard lock (a copy, the wait for the lock itself). They are reported to
//! [`Probe::Outside`], which threads use concurrently.

use core::ops::ControlFlow;

macro_rules! stages {
    ($($(#[doc = $doc:literal])* $variant:ident, $layer:literal, $name:literal;)*) => {
        /// A named point on a packet's path.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
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

/// An ablation: one mechanism of the released path replaced or left out, to measure what it gains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum StepAblation {
    /// No destination cache: route, source address and neighbour are looked up for every packet.
    NoDestinationCache,
    /// No header template per flow: each layer writes its header and uses its own caches.
    NoTemplate,
    /// No validation of cached lookups: a packet takes the previous packet's path even if a table has
    /// changed.
    NoCacheValidation,
    /// Datagram buffers come from a cache per socket instead of the shard's pool.
    CachePerSocket,
    /// Payload is copied into a buffer without headroom before the headers are known; the headers get a
    /// buffer of their own.
    EarlyEncapsulation,
}

/// An observer of the stages of a path, chosen when a stack is created.
pub trait Probe: Send + 'static {
    /// The probe for stages outside the shard lock.
    type Outside: Outside;

    /// Returns a handle of the probe for stages outside the shard lock.
    fn outside(&self) -> Self::Outside;

    /// Reports `stage`. On `Break` the path undoes its side effects and returns.
    fn stage(&mut self, stage: Stage) -> ControlFlow<()>;

    /// Reports consecutive stages, as [`Probe::stage`] of each in turn.
    #[inline(always)]
    fn stages<const N: usize>(&mut self, stages: [Stage; N]) -> ControlFlow<()> {
        stages.into_iter().try_for_each(|stage| self.stage(stage))
    }

    /// Whether `stage` is the exit point, without reporting the stage: asked before work that the exit
    /// point leaves out.
    #[inline(always)]
    fn stops_at(&self, stage: Stage) -> bool {
        let _ = stage;
        false
    }

    /// Whether an ablation is on.
    #[inline(always)]
    fn ablates(&self, variation: StepAblation) -> bool {
        let _ = variation;
        false
    }

    /// Whether any of these ablations is on.
    #[inline(always)]
    fn varies_in<const N: usize>(&self, variations: [StepAblation; N]) -> bool {
        variations.into_iter().any(|v| self.ablates(v))
    }
}

/// The part of a probe that threads use outside the shard lock.
pub trait Outside: Clone + Send + Sync + 'static {
    /// A thread is about to take the lock: its time since [`Outside::leave`] belongs to the application.
    #[inline(always)]
    fn enter(&self) {}

    /// The thread has released the lock.
    #[inline(always)]
    fn leave(&self) {}

    /// As [`Probe::stage`].
    #[inline(always)]
    fn stage(&self, stage: Stage) -> ControlFlow<()> {
        let _ = stage;
        ControlFlow::Continue(())
    }
}

impl Outside for () {}

/// The probe of the released path, which compiles to no code.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {
    type Outside = ();

    #[inline(always)]
    fn outside(&self) {}

    #[inline(always)]
    fn stage(&mut self, _stage: Stage) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}
