//! The TLS ClientHello (RFC 8446 section 4.1.2), as TLS over TCP and QUIC send it.
//!
//! The walk is our own. Parsers that are kept elsewhere are made for observers: tls-parser 0.12 ignores what follows an
//! entry of the server name list that it cannot read, and allocates lists that are not needed here. This walk accepts
//! only a message whose every length fits, allocates nothing, and is linear.

use super::reason::{Reason, Refusal};
use super::walk::Walk;
use super::{EncryptedHello, Expected};

/// The handshake type of a ClientHello.
pub(super) const CLIENT_HELLO: u8 = 1;
/// The bytes of a handshake message's type and length.
pub(super) const HEADER_BYTES: usize = 4;
/// Most bytes of a ClientHello. With post-quantum keys it has about 2,000; session tickets may add several thousand.
pub(super) const MOST_BYTES: usize = 65_536;

const SERVER_NAME: u16 = 0;
const EARLY_DATA: u16 = 42;
const SUPPORTED_VERSIONS: u16 = 43;
const TLS_1_2: u16 = 0x0303;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
/// The draft before it (ESNI).
const ENCRYPTED_SERVER_NAME: u16 = 0xffce;
const HOST_NAME: u8 = 0;

/// What a ClientHello says beside its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hello {
    /// It offers 0-RTT data, which may precede a second ClientHello.
    pub offers_early_data: bool,
    /// It offers TLS 1.3 or a later version, whose servers may ask for a second ClientHello.
    pub may_be_repeated: bool,
}

/// The length of the handshake message that begins here, with its header, when the header is there.
///
/// # Errors
/// The message is not a ClientHello, or too long.
pub(super) fn message_bytes(bytes: &[u8]) -> Result<Option<usize>, Refusal> {
    if bytes.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(Reason::TlsUnreadable.into());
    }
    let Some([_, a, b, c]) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if length > MOST_BYTES {
        return Err(Reason::TlsTooLong.into());
    }
    Ok(Some(HEADER_BYTES + length))
}

/// Checks a whole ClientHello, from its handshake type to its last byte.
///
/// # Errors
/// It does not name the expected host.
pub(super) fn check(expected: &Expected, message: &[u8]) -> Result<Hello, Refusal> {
    let body = message.get(HEADER_BYTES..).unwrap_or_default();
    let extensions = extensions(body).ok_or(Reason::TlsUnreadable)?;
    let (mut hello, mut names) = (Hello::default(), None);
    let mut rest = Walk(extensions);
    while !rest.is_empty() {
        let kind = rest.u16().ok_or(Reason::TlsUnreadable)?;
        let content = rest.vec16().ok_or(Reason::TlsUnreadable)?;
        match kind {
            // Servers differ in which of two they take.
            SERVER_NAME if names.is_some() => return Err(Reason::TlsUnreadable.into()),
            SERVER_NAME => names = Some(content),
            EARLY_DATA => hello.offers_early_data = true,
            SUPPORTED_VERSIONS => hello.may_be_repeated |= offers_tls_1_3(content),
            ENCRYPTED_CLIENT_HELLO | ENCRYPTED_SERVER_NAME
                if expected.encrypted_hello == EncryptedHello::Refuse =>
            {
                return Err(Reason::TlsEncryptedHello.into());
            }
            _ => {}
        }
    }
    let names = names.ok_or(Reason::TlsNoName)?;
    let name = only_name(names).ok_or(Reason::TlsUnreadable)?;
    if !expected.is_name(name) {
        return Err(Refusal::with_name(Reason::TlsOtherName, name));
    }
    Ok(hello)
}

/// Whether a list of versions has one above TLS 1.2. A list that cannot be read may.
fn offers_tls_1_3(list: &[u8]) -> bool {
    let mut rest = Walk(list);
    let Some(mut versions) = rest.vec8().map(Walk) else { return true };
    while !versions.is_empty() {
        if versions.u16().is_none_or(|version| version > TLS_1_2) {
            return true;
        }
    }
    !rest.is_empty()
}

/// The extensions of a ClientHello's body, if every length fits. A body without any has none.
fn extensions(body: &[u8]) -> Option<&[u8]> {
    let mut rest = Walk(body);
    // legacy_version and random.
    rest.bytes(2 + 32)?;
    let session_id = rest.vec8()?;
    let cipher_suites = rest.vec16()?;
    let compression_methods = rest.vec8()?;
    let is_plausible = session_id.len() <= 32
        && !cipher_suites.is_empty()
        && cipher_suites.len() % 2 == 0
        && !compression_methods.is_empty();
    if !is_plausible {
        return None;
    }
    if rest.is_empty() {
        return Some(&[]);
    }
    let extensions = rest.vec16()?;
    rest.is_empty().then_some(extensions)
}

/// The one host name of a server name list (RFC 6066 section 3).
fn only_name(list: &[u8]) -> Option<&[u8]> {
    let mut outer = Walk(list);
    let mut inner = Walk(outer.vec16()?);
    let kind = inner.u8()?;
    let name = inner.vec16()?;
    let is_only = outer.is_empty() && inner.is_empty() && kind == HOST_NAME;
    is_only.then_some(name)
}
