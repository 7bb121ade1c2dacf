//! The one list of stages that a packet passes, and the probe that may look at each.
//!
//! The stack takes its probe as a type parameter. [`NoProbe`] is the released path: the compiler
//! removes every call. A probe that answers [`ControlFlow::Break`] asks the path to return at this
//! stage, undoing what must be undone, so that a loop measures the cost up to it (the exit-point
//! method of Rizzo's 2012 measurement).

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
    SendCall, "socket", "send_call";
    /// The socket is found and its state is checked.
    SendChecked, "socket", "send_checked";
    /// Buffers are obtained for the whole write.
    SendReserved, "socket", "send_reserved";
    /// The bytes are copied in.
    SendCopied, "socket", "send_copied";
    /// The bytes are in the send buffer.
    SendCommitted, "socket", "send_committed";
    /// The transport decided what to send and built its header.
    TransportOutput, "transport", "transport_output";
    /// The route is known.
    RouteFound, "ip", "route_found";
    /// The IP header stands.
    IpOutput, "ip", "ip_output";
    /// The neighbour is known and the Ethernet header stands.
    EtherOutput, "ether", "ether_output";
    /// The frame lies in the burst.
    BurstQueued, "stack", "burst_queued";
    /// The device took the burst.
    DeviceTaken, "device", "device_taken";
    /// The device finished with the frame and its buffers came back.
    Completed, "device", "completed";
    /// The device handed over a received frame.
    DeviceReceived, "device", "device_received";
    /// The Ethernet header is checked.
    EtherInput, "ether", "ether_input";
    /// The IP header is checked.
    IpInput, "ip", "ip_input";
    /// The owner of the packet is found.
    Demultiplexed, "stack", "demultiplexed";
    /// The transport accepted the bytes.
    TransportInput, "transport", "transport_input";
    /// The reader is told.
    ReaderWoken, "socket", "reader_woken";
    /// The bytes are copied out.
    ReceiveCopied, "socket", "receive_copied";
}

/// Looks at the stages of a path. Implementations are chosen when a stack is created.
pub trait Probe: Send + 'static {
    /// False if every call of [`Probe::stage`] is known to do nothing.
    const ACTIVE: bool;

    /// The path has reached `stage`. `Break` asks it to stop here and undo.
    fn stage(&mut self, stage: Stage) -> ControlFlow<()>;
}

/// The probe of the released path: no code at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {
    const ACTIVE: bool = false;

    #[inline(always)]
    fn stage(&mut self, _stage: Stage) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}
