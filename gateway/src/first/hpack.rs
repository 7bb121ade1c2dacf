//! HPACK (RFC 7541): the header lists that a client sends.
//!
//! The decoder is our own. Those that are kept elsewhere are not made for hostile input: fluke-hpack 0.3 and httlib-hpack
//! 0.1 panic on an integer that is cut off, and neither bounds a list. A walk in front of them that excludes this would be
//! most of a decoder.
//!
//! The size of the table that the host allows (SETTINGS_HEADER_TABLE_SIZE) need not be known: at one index a larger table
//! and a smaller one have the same entry, or the smaller one has none. Where this table has none the guest is refused;
//! where the host's has none, the host refuses. The guest's size updates are followed up to [`MOST_TABLE_BYTES`].

use std::collections::VecDeque;

use super::huffman;
use super::reason::{Reason, Refusal};

/// Size of the table before any update (RFC 9113 section 6.5.2).
const FIRST_TABLE_BYTES: usize = 4096;
/// Most bytes of the table.
const MOST_TABLE_BYTES: usize = 65_536;
/// What an entry costs beside its bytes (section 4.1).
const ENTRY_BYTES: usize = 32;
/// Most bytes of a list, each field with [`ENTRY_BYTES`].
const MOST_LIST_BYTES: usize = 65_536;
/// Most size updates at the begin of a list; two say all (section 4.2).
const MOST_UPDATES: usize = 2;

type Field = (Box<[u8]>, Box<[u8]>);

/// A string of a field: borrowed from the block or decoded.
type Text<'a> = std::borrow::Cow<'a, [u8]>;

/// Decodes the header blocks of one direction of a connection, in their order.
pub(super) struct Decoder {
    /// The newest entry first.
    table: VecDeque<Field>,
    table_bytes: usize,
    most_bytes: usize,
}

impl Decoder {
    pub(super) fn new() -> Self {
        Decoder { table: VecDeque::new(), table_bytes: 0, most_bytes: FIRST_TABLE_BYTES }
    }

    /// The size of the table (RFC 7541 section 4.1).
    pub(super) fn table_bytes(&self) -> usize {
        self.table_bytes
    }

    /// Gives every field of a block to `visit`.
    ///
    /// # Errors
    /// The block is wrong, or `visit` refused a field. The decoder is of no use any more.
    pub(super) fn decode(
        &mut self,
        mut block: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut left = MOST_LIST_BYTES;
        let (mut updates, mut has_fields) = (0, false);
        while let Some(first) = block.first().copied() {
            if first & 0xe0 == 0x20 {
                updates += 1;
                let size = integer(&mut block, 5).ok_or(Reason::Http2Unreadable)?;
                if has_fields || updates > MOST_UPDATES || size > MOST_TABLE_BYTES {
                    return Err(Reason::Http2Unreadable.into());
                }
                self.most_bytes = size;
                self.evict(0);
                continue;
            }
            has_fields = true;
            self.decode_field(first, &mut block, &mut left, &mut visit)?;
        }
        Ok(())
    }

    fn decode_field(
        &mut self,
        first: u8,
        block: &mut &[u8],
        left: &mut usize,
        visit: &mut impl FnMut(&[u8], &[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let wrong = Reason::Http2Unreadable;
        if first & 0x80 != 0 {
            let index = integer(block, 7).ok_or(wrong)?;
            let (name, value) = self.entry(index).ok_or(wrong)?;
            charge(left, name, value)?;
            return visit(name, value);
        }
        let is_indexed = first & 0x40 != 0;
        let index = integer(block, if is_indexed { 6 } else { 4 }).ok_or(wrong)?;
        let name = match index {
            0 => string(block).ok_or(wrong)?,
            _ => Text::Owned(self.entry(index).ok_or(wrong)?.0.to_vec()),
        };
        let value = string(block).ok_or(wrong)?;
        charge(left, &name, &value)?;
        visit(&name, &value)?;
        if is_indexed {
            self.insert(name.into_owned().into(), value.into_owned().into());
        }
        Ok(())
    }

    fn entry(&self, index: usize) -> Option<(&[u8], &[u8])> {
        let at = index.checked_sub(1)?;
        match STATIC.get(at) {
            Some(entry) => Some(*entry),
            None => self.table.get(at - STATIC.len()).map(|(name, value)| (&**name, &**value)),
        }
    }

    /// Adds an entry (section 4.4). One that is too large empties the table.
    fn insert(&mut self, name: Box<[u8]>, value: Box<[u8]>) {
        let bytes = name.len() + value.len() + ENTRY_BYTES;
        self.evict(bytes);
        if bytes <= self.most_bytes {
            self.table_bytes += bytes;
            self.table.push_front((name, value));
        }
    }

    /// Removes the oldest entries until `bytes` more bytes fit.
    fn evict(&mut self, bytes: usize) {
        while self.table_bytes + bytes > self.most_bytes {
            let Some((name, value)) = self.table.pop_back() else { return };
            self.table_bytes -= name.len() + value.len() + ENTRY_BYTES;
        }
    }
}

fn charge(left: &mut usize, name: &[u8], value: &[u8]) -> Result<(), Refusal> {
    let bytes = name.len() + value.len() + ENTRY_BYTES;
    *left = left.checked_sub(bytes).ok_or(Reason::Http2TooLong)?;
    Ok(())
}

/// Takes an integer with a prefix of `prefix` bits (section 5.1), of at most 28 bits and the prefix.
fn integer(block: &mut &[u8], prefix: u32) -> Option<usize> {
    let most = (1 << prefix) - 1;
    let mut value = usize::from(take(block)?) & most;
    if value < most {
        return Some(value);
    }
    for shift in [0, 7, 14, 21] {
        let byte = take(block)?;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Takes a string (section 5.2).
fn string<'a>(block: &mut &'a [u8]) -> Option<Text<'a>> {
    let is_huffman = block.first()? & 0x80 != 0;
    let length = integer(block, 7)?;
    let (bytes, rest) = block.split_at_checked(length)?;
    *block = rest;
    if is_huffman {
        return huffman::decode(bytes, MOST_LIST_BYTES).map(Text::Owned);
    }
    Some(Text::Borrowed(bytes))
}

fn take(block: &mut &[u8]) -> Option<u8> {
    let (first, rest) = block.split_first()?;
    *block = rest;
    Some(*first)
}

/// Appendix A.
#[rustfmt::skip]
const STATIC: [(&[u8], &[u8]); 61] = [
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
];
