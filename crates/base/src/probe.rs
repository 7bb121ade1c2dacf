//! The one list of stages that a packet passes, and the probe that may look at each.
//!
//! The stack takes its probe as a type parameter. [`NoProbe`] is the released path: the compiler
//! removes every call. A probe that answers [`ControlFlow::Break`] asks the path to return at this
//! stage, undoing what must be undone, so that a loop measures the cost up to it (the exit-point
//! method of Rizzo's 2012 measurement). A probe that reads a counter makes an account: what a stage
//! costs is the time since the stage before, so the stages of a path sum up to the whole.
//!
//! Some stages are passed outside of the shard's lock (a copy, the wait for the lock itself). They
//! go to [`Probe::Outside`], which threads may use at the same time.

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
            /// Every stage, in the order in which a path passes them.
            pub const ALL: &'static [Stage] = &[$(Stage::$variant,)*];

            /// The name in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Stage::$variant => $name,)* }
            }

            /// The layer it belongs to.
            pub const fn layer(self) -> &'static str {
                match self { $(Stage::$variant => $layer,)* }
            }

            /// What lies between the stage before and this one.
            pub const fn sentence(self) -> &'static str {
                match self { $(Stage::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

stages! {
    /// The application's own loop.
    SendCall, "application", "send_call";
    /// The shard is the caller's: its lock is taken, what others left is done, the clock is read.
    Locked, "lock", "locked";
    /// The socket is found and its state is checked.
    SendChecked, "socket", "send_checked";
    /// The routes gave a datagram its source address and MTU.
    PathChosen, "ip", "path_chosen";
    /// Buffers are obtained for the whole write.
    SendReserved, "memory", "send_reserved";
    /// The bytes are copied in.
    SendCopied, "copy", "send_copied";
    /// The bytes are in the send buffer.
    SendCommitted, "socket", "send_committed";
    /// The transport decided what to send and built its header.
    TransportOutput, "transport", "transport_output";
    /// Route and neighbour are known.
    RouteFound, "ip", "route_found";
    /// There is room for both headers, and the IP header stands.
    IpOutput, "ip", "ip_output";
    /// The Ethernet header stands.
    EtherOutput, "ether", "ether_output";
    /// The frame is in a form that the device can send: it lies in the burst, or goes by itself.
    BurstQueued, "stack", "burst_queued";
    /// The frame lies in the device's ring, and the device was told. A path that ends here takes finished
    /// frames back as often as a whole one.
    DeviceTaken, "device", "device_taken";
    /// The frames that the device has finished with are taken back, their buffers freed.
    Completed, "device", "completed";
    /// The device was looked at and had nothing.
    PolledEmpty, "device", "polled_empty";
    /// The device handed over a received frame.
    DeviceReceived, "device", "device_received";
    /// The Ethernet header is checked.
    EtherInput, "ether", "ether_input";
    /// The IP header is checked.
    IpInput, "ip", "ip_input";
    /// The transport header is checked, and the owner of the packet is to be looked for.
    Demultiplexed, "transport", "demultiplexed";
    /// The transport accepted the bytes.
    TransportInput, "transport", "transport_input";
    /// Whoever waits for them is noted, to be woken.
    ReaderWoken, "wake", "reader_woken";
    /// Timers and what was held back had their turn.
    TimersRun, "stack", "timers_run";
    /// The bytes are detached from the receive buffer.
    ReceiveTaken, "socket", "receive_taken";
    /// The bytes are copied out.
    ReceiveCopied, "copy", "receive_copied";
    /// The buffers are freed, and whether the window is worth a packet is decided.
    ReceiveFreed, "memory", "receive_freed";
    /// The lock is released, and those to be woken are.
    Released, "lock", "released";
    /// A poll that found nothing is over: the thread has looked, spun or yielded.
    Spun, "wake", "spun";
    /// The thread slept.
    Slept, "idle", "slept";
}

impl Stage {
    /// How many there are.
    pub const COUNT: usize = Stage::ALL.len();

    /// The stage with this number (`stage as u8`).
    pub fn from_index(index: usize) -> Option<Stage> {
        Stage::ALL.get(index).copied()
    }
}

/// A step that is done in another way than on the released path, to see what its own way is worth.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Variation {
    /// Every packet asks the tables for its route, its source and its neighbour: nothing is remembered.
    TablesEachTime,
    /// No headers are ready-made for a flow: every layer is asked, and remembers what it can.
    NoTemplate,
    /// Nothing is asked: a packet goes where the one before went, whatever has changed since.
    NoLookUp,
    /// Buffers of datagrams come from a stock of the socket's own instead of the shard's.
    StockPerSocket,
    /// The bytes go into a buffer that is made before the protocols have been asked what they need, so
    /// without room for headers, which get a buffer of their own.
    EarlyEncapsulation,
}

/// Looks at the stages of a path. Implementations are chosen when a stack is created.
pub trait Probe: Send + 'static {
    /// False if every call of [`Probe::stage`] is known to do nothing.
    const ACTIVE: bool;

    /// What looks at the stages that are passed outside of the shard's lock.
    type Outside: Outside;

    /// The part for those who do not hold the lock.
    fn outside(&self) -> Self::Outside;

    /// The path has reached `stage`. `Break` asks it to stop here and undo.
    fn stage(&mut self, stage: Stage) -> ControlFlow<()>;

    /// The path has reached these stages, one right behind the other: as [`Probe::stage`] of each in turn.
    #[inline(always)]
    fn stages<const N: usize>(&mut self, stages: [Stage; N]) -> ControlFlow<()> {
        stages.into_iter().try_for_each(|stage| self.stage(stage))
    }

    /// Whether the path is to stop at `stage`, without passing it: for steps that begin behind it.
    #[inline(always)]
    fn stops_at(&self, stage: Stage) -> bool {
        let _ = stage;
        false
    }

    /// Whether a step is to be done in another way.
    #[inline(always)]
    fn varies(&self, variation: Variation) -> bool {
        let _ = variation;
        false
    }

    /// Whether a step is to be done in one of these other ways.
    #[inline(always)]
    fn varies_in<const N: usize>(&self, variations: [Variation; N]) -> bool {
        variations.into_iter().any(|v| self.varies(v))
    }
}

/// The part of a probe that threads use outside of the shard's lock.
pub trait Outside: Clone + Send + Sync + 'static {
    /// A thread is about to take the lock: what lies behind it since it left was the program's.
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

/// The probe of the released path: no code at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {
    const ACTIVE: bool = false;
    type Outside = ();

    #[inline(always)]
    fn outside(&self) {}

    #[inline(always)]
    fn stage(&mut self, _stage: Stage) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}
