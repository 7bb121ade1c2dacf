//! Errors of socket calls, with their errno values, generated from one list.

use crate::tcp::ConnError;

macro_rules! socket_errors {
    ($($(#[doc = $doc:literal])* $variant:ident = $errno:literal;)*) => {
        /// Why a socket call failed. Events of the network appear here only as the state of a connection.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum SocketError {
            $($(#[doc = $doc])* $variant,)*
        }

        impl SocketError {
            /// All errors.
            pub const ALL: &'static [SocketError] = &[$(SocketError::$variant,)*];

            /// The errno of Linux for the same call (x86-64 and aarch64 numbers).
            pub const fn errno(self) -> i32 {
                match self { $(SocketError::$variant => $errno,)* }
            }

            /// A one-sentence description.
            pub const fn sentence(self) -> &'static str {
                match self { $(SocketError::$variant => concat!($($doc,)*),)* }
            }
        }
    };
}

socket_errors! {
    /// The file could not be read.
    InputOutput = 5;
    /// The handle refers to a socket that no longer exists.
    BadHandle = 9;
    /// The call would block and the socket is non-blocking.
    WouldBlock = 11;
    /// The share of the buffer pool that the call needs is exhausted.
    NoBuffer = 105;
    /// Broadcast requires the broadcast option.
    AccessDenied = 13;
    /// The argument is invalid for this socket.
    Invalid = 22;
    /// The connection is shut down for writing.
    BrokenPipe = 32;
    /// The operation is not supported on this kind of socket.
    NotSupported = 95;
    /// The datagram has no destination.
    DestinationRequired = 89;
    /// The message exceeds the maximum size of a datagram, or the MTU if it must not be fragmented.
    MessageTooLong = 90;
    /// The address family differs from the socket's.
    FamilyNotSupported = 97;
    /// The address is in use.
    AddressInUse = 98;
    /// The address does not belong to this stack.
    AddressNotAvailable = 99;
    /// The device is gone or down.
    NetworkDown = 100;
    /// The peer process of the device violated the protocol of the link.
    Protocol = 71;
    /// No route to the network.
    NetworkUnreachable = 101;
    /// The connection was aborted locally.
    ConnectionAborted = 103;
    /// The peer reset the connection.
    ConnectionReset = 104;
    /// The socket is already connected.
    AlreadyConnected = 106;
    /// The socket is not connected.
    NotConnected = 107;
    /// The peer did not answer in time.
    TimedOut = 110;
    /// The peer refused the connection.
    ConnectionRefused = 111;
    /// No route to the host, or the host does not answer.
    HostUnreachable = 113;
    /// The connection is being established.
    InProgress = 115;
    /// The operation was cancelled before any byte was transferred.
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
