//! QUIC: the ClientHello of every connection that a flow of datagrams begins.
//!
//! ```text
//!   Initial ──► keys of a known connection, else of its own destination ID ──► CRYPTO frames ──► ClientHello checked
//!                                                                                  │
//!           while any connection's is not whole, every datagram of the flow is held ┘
//! ```
//!
//! A ClientHello may be cut into many frames, packets and datagrams, in any order. Nothing of a flow passes while some of
//! a ClientHello is missing, so that the server has seen no byte that was not checked. Bytes that were accepted are kept:
//! a later packet with other bytes at the same place is refused, since the server may have dropped the first. A datagram of
//! less than 1,200 bytes, and a packet number for the second time, are refused, since a server drops them unread. After a
//! HelloRetryRequest a second ClientHello follows the first, and is checked.
//!
//! A refused datagram is dropped with those that are held; what they began is forgotten. The flow may begin anew.
//!
//! | datagram | port 443 | other ports |
//! |---|---|---|
//! | QUIC 1 and 2, Initial | checked | checked |
//! | QUIC 1 and 2, 0-RTT and Handshake | behind an accepted Initial | behind an accepted Initial |
//! | a draft, Google QUIC, a reserved version, version negotiation | refused | refused, but version negotiation passes |
//! | another version | refused | passes |
//! | no long header | behind an accepted Initial | passes |
//!
//! On other ports a first byte without the upper bit may be any protocol, and an unregistered version
//! number may be four bytes of another protocol. A flow that was idle until the gateway forgot it begins with a packet of a
//! connection that was not seen: on port 443 it is refused, and the client connects anew.
//!
//! Bounds: [`MOST_HELD`] datagrams of [`MOST_HELD_BYTES`] in the caller's hands; here [`MOST_CONNECTIONS`] of
//! [`MOST_HELLO_BYTES`] with a mark each, and [`MOST_SPENT`] connection IDs of those that gave way.

use super::Expected;
use super::hello;
use super::quic::{CryptoFrame, Keys, Kind, Packet, Version, crypto_frames};
use super::reason::{Reason, Refusal};
use super::walk::Walk;

/// Most datagrams that are held.
pub const MOST_HELD: usize = 16;
/// Most bytes of those.
pub const MOST_HELD_BYTES: usize = 32 << 10;
/// Most connections of a flow whose ClientHello is kept.
const MOST_CONNECTIONS: usize = 4;
/// Most bytes of the ClientHellos of one connection.
const MOST_HELLO_BYTES: usize = 8 << 10;
/// Most connection IDs that may not be used again.
const MOST_SPENT: usize = 256;
/// A datagram with an Initial packet has at least so much (RFC 9000 section 14.1). A server drops a smaller one unread.
const LEAST_INITIAL_BYTES: usize = 1200;
/// Most Initial packets of one connection.
const MOST_INITIALS: usize = 64;
/// Most packets of one datagram.
const MOST_PACKETS: usize = 8;
/// A connection has a second ClientHello after a HelloRetryRequest.
const MOST_HELLOS: u8 = 2;
const QUIC_PORT: u16 = 443;

/// What to do with a datagram of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a caller has to handle each answer")]
pub enum Decision {
    /// It may go, after those that are held, in their order.
    Pass,
    /// It is held. The caller keeps it.
    Hold,
    /// It is dropped, and so are those that are held.
    Refuse(Refusal),
}

/// The reader of the guest's datagrams of one flow.
pub struct Datagrams {
    expected: Expected,
    connections: Vec<Connection>,
    /// Destination IDs of accepted connections that gave way.
    spent: Vec<Box<[u8]>>,
    held: usize,
    held_bytes: usize,
}

/// A connection, from the client's first Initial packet on.
struct Connection {
    /// The destination ID of that packet.
    dcid: Box<[u8]>,
    /// By version, since a server may change it (RFC 9368).
    keys: [Option<Box<Keys>>; 2],
    /// The numbers of its packets.
    numbers: Vec<u64>,
    crypto: Crypto,
}

/// The bytes of CRYPTO frames.
#[derive(Default)]
struct Crypto {
    bytes: Vec<u8>,
    /// Which of them are there.
    is_there: Vec<bool>,
    /// All before it are there.
    ready: usize,
    /// All before it are ClientHellos that were accepted.
    checked: usize,
    hellos: u8,
}

/// What a datagram is.
#[derive(PartialEq, Eq)]
enum Look {
    Quic,
    /// Of QUIC if the flow has a connection; otherwise of an unknown protocol.
    Unknown,
}

impl Datagrams {
    /// For datagrams that may ask for this.
    pub fn new(expected: Expected) -> Self {
        Datagrams { expected, connections: Vec::new(), spent: Vec::new(), held: 0, held_bytes: 0 }
    }

    /// Reads the guest's next datagram.
    pub fn read(&mut self, datagram: &[u8]) -> Decision {
        let looked = self.look(datagram);
        match looked.and_then(|look| self.decide(&look, datagram.len())) {
            Ok(true) => {
                (self.held, self.held_bytes) = (0, 0);
                Decision::Pass
            }
            Ok(false) => Decision::Hold,
            Err(refusal) => {
                self.forget_unchecked();
                Decision::Refuse(refusal)
            }
        }
    }

    /// The destination IDs of the connections whose ClientHello has passed. None is ever missing again.
    pub fn connection_ids(&self) -> impl Iterator<Item = &[u8]> {
        let passed = self.connections.iter().filter(|connection| connection.crypto.hellos > 0);
        let ids = passed.map(|connection| &*connection.dcid);
        ids.chain(self.spent.iter().map(|dcid| &**dcid))
    }

    /// Memory that it keeps, but for its own size.
    pub fn memory_bytes(&self) -> usize {
        let of = |c: &Connection| c.dcid.len() + c.crypto.bytes.len() + c.crypto.is_there.len();
        let spent = self.spent.iter().map(|dcid| dcid.len()).sum::<usize>();
        self.connections.iter().map(of).sum::<usize>() + spent
    }

    /// Whether the datagram may go now.
    fn decide(&mut self, look: &Look, bytes: usize) -> Result<bool, Refusal> {
        if !self.connections.iter().all(|c| c.crypto.is_checked()) {
            self.held += 1;
            self.held_bytes += bytes;
            if self.held > MOST_HELD || self.held_bytes > MOST_HELD_BYTES {
                return Err(Reason::QuicTooMuch.into());
            }
            return Ok(false);
        }
        let may_pass = match look {
            Look::Quic => !self.connections.is_empty(),
            Look::Unknown if self.connections.is_empty() && self.expected.is_shared => {
                return Err(Reason::NoName.into());
            }
            Look::Unknown => !self.connections.is_empty() || self.expected.port != QUIC_PORT,
        };
        may_pass.then_some(true).ok_or(Reason::QuicNotBegun.into())
    }

    fn look(&mut self, datagram: &[u8]) -> Result<Look, Refusal> {
        let mut rest = datagram;
        for nth in 0..MOST_PACKETS {
            let is_long = rest.first().is_some_and(|first| first & 0x80 != 0);
            // A packet with a short header extends to the end.
            if !is_long {
                return Ok(if nth == 0 { Look::Unknown } else { Look::Quic });
            }
            if let Some(look) = self.look_at_version(rest, nth > 0)? {
                return Ok(look);
            }
            let packet = Packet::take(&mut rest).ok_or(Reason::QuicUnreadable)?;
            if packet.kind == Kind::Initial {
                if datagram.len() < LEAST_INITIAL_BYTES {
                    return Err(Reason::QuicUnreadable.into());
                }
                self.read_initial(&packet)?;
            }
        }
        Err(Reason::QuicUnreadable.into())
    }

    /// `None`: the packet has a version that is read.
    fn look_at_version(&self, packet: &[u8], is_quic: bool) -> Result<Option<Look>, Refusal> {
        let mut rest = Walk(packet);
        let version = rest.u8().and_then(|_| rest.u32());
        if version.is_some_and(|v| Version::of(v).is_some()) {
            return Ok(None);
        }
        let is_quic = is_quic
            || self.expected.port == QUIC_PORT
            || !self.connections.is_empty()
            || version.is_some_and(is_version_of_quic);
        match is_quic {
            true => Err(Reason::QuicVersion.into()),
            false => Ok(Some(Look::Unknown)),
        }
    }

    fn read_initial(&mut self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let (at, number, payload) = self.open(packet)?;
        let frames = crypto_frames(&payload).ok_or(Reason::QuicUnreadable)?;
        let Some(connection) = self.connections.get_mut(at) else { return Ok(()) };
        connection.note(number)?;
        for frame in &frames {
            connection.crypto.add(frame)?;
        }
        connection.crypto.check(&self.expected)
    }

    /// Opens a packet with the keys of its connection, which it may begin. Returns which connection it is.
    fn open(&mut self, packet: &Packet<'_>) -> Result<(usize, u64, Vec<u8>), Refusal> {
        for (at, connection) in self.connections.iter_mut().enumerate() {
            if let Some((number, payload)) = connection.open(packet) {
                return Ok((at, number, payload));
            }
        }
        // A server derives new keys for a destination that it does not know; so does a client after a Retry packet.
        // A second one of the same ID would be the first for the server.
        if self.connections.iter().any(|connection| *connection.dcid == *packet.dcid) {
            return Err(Reason::QuicConflict.into());
        }
        let mut connection = Connection::new(packet.dcid);
        let (number, payload) = connection.open(packet).ok_or(Reason::QuicUnreadable)?;
        if self.spent.iter().any(|dcid| **dcid == *packet.dcid) {
            return Err(Reason::QuicTooMany.into());
        }
        self.make_room()?;
        self.connections.push(connection);
        Ok((self.connections.len() - 1, number, payload))
    }

    /// Forgets the oldest accepted connection if there are too many. Its ID may not begin another one: the server may
    /// still have a part of the first.
    fn make_room(&mut self) -> Result<(), Refusal> {
        if self.connections.len() < MOST_CONNECTIONS {
            return Ok(());
        }
        let oldest = self.connections.iter().position(|c| c.crypto.is_checked());
        match oldest {
            Some(at) if self.spent.len() < MOST_SPENT => {
                self.spent.push(self.connections.remove(at).dcid);
                Ok(())
            }
            _ => Err(Reason::QuicTooMany.into()),
        }
    }

    /// Forgets what the datagrams brought that are dropped now.
    fn forget_unchecked(&mut self) {
        (self.held, self.held_bytes) = (0, 0);
        self.connections.retain(|c| c.crypto.hellos > 0);
        for connection in &mut self.connections {
            connection.crypto.forget_unchecked();
        }
    }
}

impl Connection {
    fn new(dcid: &[u8]) -> Self {
        Connection {
            dcid: dcid.into(),
            keys: [None, None],
            numbers: Vec::new(),
            crypto: Crypto::default(),
        }
    }

    /// Notes the number of a packet. A server drops a packet whose number it has seen, and keeps what the first brought.
    fn note(&mut self, number: u64) -> Result<(), Refusal> {
        if self.numbers.contains(&number) {
            return Err(Reason::QuicConflict.into());
        }
        if self.numbers.len() >= MOST_INITIALS {
            return Err(Reason::QuicTooMany.into());
        }
        self.numbers.push(number);
        Ok(())
    }

    fn open(&mut self, packet: &Packet<'_>) -> Option<(u64, Vec<u8>)> {
        let [v1, v2] = &mut self.keys;
        let keys = match packet.version {
            Version::V1 => v1,
            Version::V2 => v2,
        };
        if keys.is_none() {
            *keys = Keys::derive(packet.version, &self.dcid).map(Box::new);
        }
        keys.as_ref()?.open(packet, self.numbers.iter().max().copied())
    }
}

impl Crypto {
    fn add(&mut self, frame: &CryptoFrame<'_>) -> Result<(), Refusal> {
        let end = frame.offset.checked_add(frame.data.len()).ok_or(Reason::TlsTooLong)?;
        if end > MOST_HELLO_BYTES {
            return Err(Reason::TlsTooLong.into());
        }
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
            self.is_there.resize(end, false);
        }
        let places = self.bytes.get_mut(frame.offset..end).unwrap_or_default();
        let are_there = self.is_there.get_mut(frame.offset..end).unwrap_or_default();
        for ((place, is_there), byte) in places.iter_mut().zip(are_there).zip(frame.data) {
            if *is_there && place != byte {
                return Err(Reason::QuicConflict.into());
            }
            (*place, *is_there) = (*byte, true);
        }
        let new = self.is_there.iter().skip(self.ready).take_while(|is_there| **is_there);
        self.ready += new.count();
        Ok(())
    }

    /// Checks the ClientHellos that are whole.
    fn check(&mut self, expected: &Expected) -> Result<(), Refusal> {
        loop {
            let rest = self.bytes.get(self.checked..self.ready).unwrap_or_default();
            let Some(whole) = hello::message_bytes(rest)? else { return Ok(()) };
            if self.hellos >= MOST_HELLOS {
                return Err(Reason::TlsUnreadable.into());
            }
            let Some(message) = rest.get(..whole) else { return Ok(()) };
            hello::check(expected, message)?;
            self.hellos += 1;
            self.checked += whole;
        }
    }

    fn is_checked(&self) -> bool {
        self.hellos > 0 && self.checked == self.bytes.len()
    }

    fn forget_unchecked(&mut self) {
        self.bytes.truncate(self.checked);
        self.is_there.truncate(self.checked);
        self.ready = self.checked;
    }
}

/// Versions that are QUIC's beyond doubt: drafts, Google's, Facebook's, and those that are reserved to exercise version
/// negotiation (RFC 9000 section 15).
fn is_version_of_quic(version: u32) -> bool {
    let [a, b, ..] = version.to_be_bytes();
    version & 0x0f0f_0f0f == 0x0a0a_0a0a
        || (a, b) == (0xff, 0)
        || (a, b) == (b'Q', b'0')
        || (a, b) == (b'T', b'0')
        || (a, b) == (0xfa, 0xce)
}
