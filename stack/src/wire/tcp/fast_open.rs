//! The Fast Open option (RFC 7413 section 4.1.1).
//!
//! ```text
//! kind 34  | length | cookie, 4 to 16 bytes, an even number; none: a request
//! kind 254 | length | F9 89 | cookie                    as before RFC 7413 (RFC 6994)
//! ```
//!
//! An option with a cookie of another length is ignored, as section 4.1.1 says.

/// Kind of the option.
pub(super) const FAST_OPEN: u8 = 34;
/// Kind of experimental options (RFC 6994).
pub(super) const EXPERIMENT: u8 = 254;
/// Experiment identifier of Fast Open.
pub(super) const EXPERIMENT_ID: [u8; 2] = [0xf9, 0x89];

/// A Fast Open cookie: 4 to 16 bytes, an even number, which only the server understands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FastOpenCookie {
    /// Unused bytes are zero, so that derived equality is correct.
    bytes: [u8; FastOpenCookie::MAX_BYTES],
    len: u8,
}

impl FastOpenCookie {
    /// The shortest cookie.
    pub const MIN_BYTES: usize = 4;
    /// The longest cookie.
    pub const MAX_BYTES: usize = 16;

    /// A cookie of these bytes. `None` if their number is not allowed.
    pub fn new(value: &[u8]) -> Option<FastOpenCookie> {
        let is_allowed = value.len() >= Self::MIN_BYTES && value.len().is_multiple_of(2);
        let mut bytes = [0; Self::MAX_BYTES];
        bytes.get_mut(..value.len()).filter(|_| is_allowed)?.copy_from_slice(value);
        Some(FastOpenCookie { bytes, len: value.len() as u8 })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// The option of a SYN or SYN,ACK.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FastOpen {
    /// `None`: a request for a cookie.
    pub cookie: Option<FastOpenCookie>,
    /// In the experimental option. Servers answer in the form that they were asked in.
    pub is_experimental: bool,
}

impl FastOpen {
    /// The value of an option of kind [`FAST_OPEN`], or of [`EXPERIMENT`] behind the identifier.
    pub(super) fn parse(value: &[u8], is_experimental: bool) -> Option<FastOpen> {
        let cookie = FastOpenCookie::new(value);
        (cookie.is_some() || value.is_empty()).then_some(FastOpen { cookie, is_experimental })
    }

    /// The option without padding: its bytes, at most 20, and their number.
    pub(super) fn emitted(&self) -> ([u8; 20], usize) {
        let mut bytes = [0; 20];
        let value = self.cookie.as_ref().map_or(&[][..], FastOpenCookie::as_slice);
        let lead = if self.is_experimental { 4 } else { 2 };
        let length = value.len().saturating_add(lead);
        let [a, b] = EXPERIMENT_ID;
        let head = match self.is_experimental {
            true => [EXPERIMENT, length as u8, a, b],
            false => [FAST_OPEN, length as u8, 0, 0],
        };
        let places = bytes.iter_mut();
        for (place, byte) in places.zip(head.iter().take(lead).chain(value)) {
            *place = *byte;
        }
        (bytes, length)
    }

    /// Length of the option with its padding, a multiple of 4.
    pub(super) fn padded_bytes(&self) -> usize {
        let value = self.cookie.as_ref().map_or(0, |c| usize::from(c.len));
        let lead = if self.is_experimental { 4 } else { 2 };
        value.saturating_add(lead).next_multiple_of(4)
    }
}
