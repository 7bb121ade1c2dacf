//! What a socket call may answer besides its result, and the one table of errno values.

use fulmar_tcp::ConnError;

macro_rules! socket_errors {
    ($($(#[doc = $doc:literal])* $variant:ident = $errno:literal;)*) => {
        /// Why a socket call failed. Small and `Copy`; what the *network* does arrives here only as
        /// the state of a connection.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum SocketError {
            $($(#[doc = $doc])* $variant,)*
        }

        impl SocketError {
            /// Every error.
            pub const ALL: &'static [SocketError] = &[$(SocketError::$variant,)*];

            /// The errno that Linux gives for the same call (x86-64 and aarch64 numbers).
            pub const fn errno(self) -> i32 {
                match self { $(SocketError::$variant => $errno,)* }
            }

            /// One sentence for a person.
            pub const fn sentence(self) -> &'static str {
                match self { $(SocketError::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

socket_errors! {
    /// The file could not be read.
    InputOutput = 5;
    /// The handle names a socket that is gone.
    BadHandle = 9;
    /// The call would have to wait and the socket is non-blocking.
    WouldBlock = 11;
    /// No memory is left in the share of the pool that the call needs.
    NoBuffer = 105;
    /// Broadcast needs the broadcast option.
    AccessDenied = 13;
    /// The argument makes no sense for this socket.
    Invalid = 22;
    /// The connection is closed for writing.
    BrokenPipe = 32;
    /// The call is not possible on this kind of socket.
    NotSupported = 95;
    /// The datagram has no destination.
    DestinationRequired = 89;
    /// Larger than a datagram may be, or than a packet if it must not be fragmented.
    MessageTooLong = 90;
    /// The address family differs from the socket's.
    FamilyNotSupported = 97;
    /// The address is in use.
    AddressInUse = 98;
    /// The address is not one of this stack.
    AddressNotAvailable = 99;
    /// The device is gone or down.
    NetworkDown = 100;
    /// The process behind the device broke the protocol of the link.
    Protocol = 71;
    /// No route to the network.
    NetworkUnreachable = 101;
    /// The connection was aborted on this side.
    ConnectionAborted = 103;
    /// The peer reset the connection.
    ConnectionReset = 104;
    /// The socket is connected already.
    AlreadyConnected = 106;
    /// The socket is not connected.
    NotConnected = 107;
    /// The peer did not answer in time.
    TimedOut = 110;
    /// The peer refused the connection.
    ConnectionRefused = 111;
    /// No route to the host, or it does not answer.
    HostUnreachable = 113;
    /// The connection is being made.
    InProgress = 115;
    /// The operation was cancelled before it had any bytes.
    Cancelled = 125;
}

impl core::fmt::Display for SocketError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.sentence().trim().trim_end_matches('.'))
    }
}

impl core::error::Error for SocketError {}

impl From<ConnError> for SocketError {
    fn from(e: ConnError) -> SocketError {
        match e {
            ConnError::Refused => SocketError::ConnectionRefused,
            ConnError::Reset => SocketError::ConnectionReset,
            ConnError::TimedOut => SocketError::TimedOut,
            ConnError::HostUnreachable => SocketError::HostUnreachable,
            ConnError::NetUnreachable => SocketError::NetworkUnreachable,
            ConnError::Aborted => SocketError::ConnectionAborted,
            ConnError::BrokenPipe => SocketError::BrokenPipe,
        }
    }
}
