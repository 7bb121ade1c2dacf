//! The errors.

use std::io;

use etherparse::err::ValueTooBigError;
use tokio::sync::mpsc::error::SendError;

use crate::IpStackStream;

/// An error of the API. Some variants stand for the type's sake and are never returned.
#[derive(thiserror::Error, Debug)]
pub enum IpStackError {
    /// Never returned.
    #[error("the transport protocol is not supported")]
    UnsupportedTransportProtocol,
    /// Never returned.
    #[error("the packet is invalid")]
    InvalidPacket,
    /// A payload does not fit its packet.
    #[error("the value is too large: {0}")]
    ValueTooBigErrorU16(#[from] ValueTooBigError<u16>),
    /// A payload does not fit its packet.
    #[error("the value is too large: {0}")]
    ValueTooBigErrorUsize(#[from] ValueTooBigError<usize>),
    /// Never returned.
    #[error("the TCP segment is invalid")]
    InvalidTcpPacket,
    /// An error of a device or a socket.
    #[error("I/O error: {0}")]
    IoError(#[from] io::Error),
    /// The device is gone.
    #[error("the stack has ended: its device is gone")]
    AcceptError,
    /// Never returned.
    #[error("cannot send: {0}")]
    SendError(#[from] Box<SendError<IpStackStream>>),
    /// The MTU is less than the least of IPv6.
    #[error("invalid MTU {0}: expected at least 1280")]
    InvalidMtuSize(u16),
}

impl From<IpStackError> for io::Error {
    fn from(e: IpStackError) -> Self {
        match e {
            IpStackError::IoError(e) => e,
            e => io::Error::other(e),
        }
    }
}

/// A result of the API.
pub type Result<T, E = IpStackError> = std::result::Result<T, E>;
