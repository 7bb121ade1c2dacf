//! TCP options: MSS (RFC 9293 section 3.7.1), window scale and timestamps (RFC 7323), SACK (RFC
//! 2018), Fast Open (RFC 7413), AccECN (RFC 9768).
//!
//! ```text
//! kind 0 end | 1 no-op | 2 MSS (4 bytes) | 3 window scale (3) | 4 SACK permitted (2)
//!      5 SACK (2 + 8 per block) | 8 timestamps (10) | 34 Fast Open (2 to 18)
//!      172, 174 AccECN (2 + 3 per counter)
//! ```
//!
//! Emitted in an order that aligns all values, without an end-of-list option:
//!
//! ```text
//! | 2  4  MSS.....|                                                 4 bytes, if any
//! | 1  1  8  10   | value         | echo          |                12, or
//! | 4  2  8  10   | value         | echo          |                12 with SACK permitted, or
//! | 1  1  4  2    |                                                 4 with SACK permitted alone
//! | 1  3  3  shift|                                                 4, if any
//! | 34 len | cookie ...  | 1  1 |                                   4 to 20, if any
//! | 1  1  5  len  | left          | right         | ...             4 + 8 per block that fits
//! | 172 11 three counters of 3 bytes........... 1 |                 12, or
//! | 172 8  two counters           |                                 8, if that is what is left
//! ```

use super::fast_open::{EXPERIMENT, EXPERIMENT_ID, FAST_OPEN, FastOpen};
use crate::base::SeqNum;
use crate::wire::{WireError, writer::Writer};

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;
/// AccECN with ECT(0) first, and with ECT(1) first.
const ACCECN0: u8 = 172;
const ACCECN1: u8 = 174;

/// Maximum length of the options.
const MAX_OPTION_BYTES: usize = 40;
const BLOCK_BYTES: usize = 8;
const COUNTER_BYTES: usize = 3;

/// The start of the options of nearly every segment: the layout of RFC 7323 appendix A.
const PADDED_TIMESTAMPS: [u8; 4] = [NOP, NOP, TIMESTAMPS, 10];

/// The timestamps option (RFC 7323 section 3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Timestamps {
    /// TSval.
    pub value: u32,
    /// TSecr, valid only with ACK.
    pub echo: u32,
}

/// Up to four SACK blocks (RFC 2018 section 3): `(left, right)` are the left edge (the first byte) and the
/// right edge (the byte behind the last).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SackBlocks {
    /// Unused entries are zero, so that derived equality is correct.
    blocks: [(SeqNum, SeqNum); SackBlocks::MAX],
    len: u8,
}

impl SackBlocks {
    /// Maximum blocks of a header.
    pub const MAX: usize = 4;

    /// Appends a block. False if there are already four.
    #[inline]
    pub fn push(&mut self, left: SeqNum, right: SeqNum) -> bool {
        let end = self.len();
        let Some(slot) = self.blocks.get_mut(end) else { return false };
        *slot = (left, right);
        self.len = self.len.wrapping_add(1);
        true
    }

    /// The blocks in wire order: the first contains the most recently received segment.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (SeqNum, SeqNum)> + '_ {
        self.blocks.get(..self.len()).unwrap_or(&[]).iter().copied()
    }

    /// Number of blocks.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are no blocks.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Which counter of an AccECN option comes first; the last ones may be left out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EcnOrder {
    /// ECT(0), CE, ECT(1): kind 172.
    Ect0First,
    /// ECT(1), CE, ECT(0): kind 174.
    Ect1First,
}

/// Up to three byte counters of an AccECN option (RFC 9768 section 3.2.3), 24 bits each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EcnCounters {
    /// The meaning of the first counter.
    pub order: EcnOrder,
    /// How many counters there are: at most three.
    len: u8,
    /// In wire order; unused ones are zero, so that derived equality is correct.
    counters: [[u8; COUNTER_BYTES]; 3],
}

impl EcnCounters {
    /// All three. The lower 24 bits of each are sent.
    pub fn full(order: EcnOrder, ect0: u32, ce: u32, ect1: u32) -> EcnCounters {
        let [first, last] = match order {
            EcnOrder::Ect0First => [ect0, ect1],
            EcnOrder::Ect1First => [ect1, ect0],
        };
        let counters = [first, ce, last].map(|n| {
            let [_, a, b, c] = n.to_be_bytes();
            [a, b, c]
        });
        EcnCounters { order, len: 3, counters }
    }

    /// The whole counters of an option; what is left over counts as padding.
    fn parse(order: EcnOrder, value: &[u8]) -> EcnCounters {
        let mut parsed = EcnCounters { order, len: 0, counters: [[0; COUNTER_BYTES]; 3] };
        let (whole, _) = value.as_chunks::<COUNTER_BYTES>();
        for (slot, counter) in parsed.counters.iter_mut().zip(whole) {
            *slot = *counter;
            parsed.len = parsed.len.wrapping_add(1);
        }
        parsed
    }

    fn counter(&self, at: usize) -> Option<u32> {
        let [a, b, c] = *self.counters.get(..usize::from(self.len))?.get(at)?;
        Some(u32::from_be_bytes([0, a, b, c]))
    }

    /// Bytes that arrived with CE.
    pub fn ce(&self) -> Option<u32> {
        self.counter(1)
    }

    /// Bytes that arrived with ECT(0).
    pub fn ect0(&self) -> Option<u32> {
        self.counter(if self.order == EcnOrder::Ect0First { 0 } else { 2 })
    }

    /// Bytes that arrived with ECT(1).
    pub fn ect1(&self) -> Option<u32> {
        self.counter(if self.order == EcnOrder::Ect0First { 2 } else { 0 })
    }
}

/// The options of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Options {
    /// Maximum segment size, in bytes of payload and options (RFC 6691); SYN only.
    pub mss: Option<u16>,
    /// Window scale shift as received: the TCP engine limits it to 14 (RFC 7323 section 2.3); SYN only.
    pub window_scale: Option<u8>,
    /// SACK-permitted; SYN only.
    pub sack_permitted: bool,
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// SACK blocks.
    pub sack: SackBlocks,
    /// Fast Open; SYN only.
    pub fast_open: Option<FastOpen>,
    /// AccECN byte counters.
    pub ecn: Option<EcnCounters>,
}

impl Options {
    /// Parses the options of a header, which fill `bytes`.
    ///
    /// Unknown options, and known ones with a wrong length, are skipped. The last of repeated options is
    /// used.
    ///
    /// Errors: [`WireError::Malformed`] if the length of an option is below 2 or exceeds the header.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Options, WireError> {
        if bytes.is_empty() {
            return Ok(Options::default());
        }
        if let Ok(b) = <&[u8; 12]>::try_from(bytes)
            && b[0..4] == PADDED_TIMESTAMPS
        {
            let timestamps = Some(Timestamps {
                value: u32::from_be_bytes([b[4], b[5], b[6], b[7]]),
                echo: u32::from_be_bytes([b[8], b[9], b[10], b[11]]),
            });
            return Ok(Options { timestamps, ..Options::default() });
        }
        Options::parse_each(bytes)
    }

    pub(super) fn parse_each(bytes: &[u8]) -> Result<Options, WireError> {
        let mut options = Options::default();
        let mut rest = bytes;
        loop {
            rest = match *rest {
                [] | [END, ..] => return Ok(options),
                [NOP, ref tail @ ..] => tail,
                [kind, length, ..] => {
                    let (option, tail) =
                        rest.split_at_checked(usize::from(length)).ok_or(WireError::Malformed)?;
                    let value = option.get(2..).ok_or(WireError::Malformed)?;
                    options.store(kind, value);
                    tail
                }
                [_] => return Err(WireError::Malformed),
            };
        }
    }

    /// Stores an option; `value` follows its kind and length.
    fn store(&mut self, kind: u8, value: &[u8]) {
        match (kind, value) {
            (MSS, &[a, b]) => self.mss = Some(u16::from_be_bytes([a, b])),
            (WINDOW_SCALE, &[shift]) => self.window_scale = Some(shift),
            (SACK_PERMITTED, []) => self.sack_permitted = true,
            (SACK, blocks) => self.store_sack(blocks),
            (ACCECN0, value) => self.ecn = Some(EcnCounters::parse(EcnOrder::Ect0First, value)),
            (ACCECN1, value) => self.ecn = Some(EcnCounters::parse(EcnOrder::Ect1First, value)),
            (TIMESTAMPS, &[a, b, c, d, e, f, g, h]) => {
                self.timestamps = Some(Timestamps {
                    value: u32::from_be_bytes([a, b, c, d]),
                    echo: u32::from_be_bytes([e, f, g, h]),
                });
            }
            (FAST_OPEN, value) => self.store_fast_open(value, false),
            (EXPERIMENT, [a, b, value @ ..]) if [*a, *b] == EXPERIMENT_ID => {
                self.store_fast_open(value, true);
            }
            _ => {}
        }
    }

    fn store_fast_open(&mut self, value: &[u8], is_experimental: bool) {
        self.fast_open = FastOpen::parse(value, is_experimental).or(self.fast_open);
    }

    fn store_sack(&mut self, value: &[u8]) {
        let (blocks, []) = value.as_chunks::<BLOCK_BYTES>() else { return };
        self.sack = SackBlocks::default();
        for &[a, b, c, d, e, f, g, h] in blocks {
            let left = SeqNum(u32::from_be_bytes([a, b, c, d]));
            let right = SeqNum(u32::from_be_bytes([e, f, g, h]));
            self.sack.push(left, right);
        }
    }

    /// Length of the options that [`Options::emit`] writes, a multiple of 4 up to 40.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes_without_ecn().saturating_add(self.ecn_bytes())
    }

    #[inline]
    fn bytes_without_ecn(&self) -> usize {
        let blocks = self.sack_blocks_that_fit();
        let sack = if blocks == 0 { 0 } else { (blocks << 3).saturating_add(4) };
        self.bytes_without_sack().saturating_add(sack)
    }

    /// Length of the AccECN option with its padding: three counters if there is space for them, else two
    /// (RFC 9768 section 3.2.3.3: SACK comes first).
    #[inline]
    fn ecn_bytes(&self) -> usize {
        if self.ecn.is_none() {
            return 0;
        }
        match MAX_OPTION_BYTES.saturating_sub(self.bytes_without_ecn()) {
            12.. => 12,
            8.. => 8,
            _ => 0,
        }
    }

    /// Whether [`Options::emit`] writes the AccECN option.
    #[inline]
    pub(crate) fn sends_ecn(&self) -> bool {
        self.ecn_bytes() > 0
    }

    /// At most 40.
    #[inline]
    fn bytes_without_sack(&self) -> usize {
        let mss = if self.mss.is_some() { 4 } else { 0 };
        let scale = if self.window_scale.is_some() { 4 } else { 0 };
        let timestamps = match (self.timestamps, self.sack_permitted) {
            (Some(_), _) => 12,
            (None, true) => 4,
            (None, false) => 0,
        };
        let fast_open = self.fast_open.as_ref().map_or(0, FastOpen::padded_bytes);
        [mss, scale, timestamps, fast_open].into_iter().fold(0, usize::saturating_add)
    }

    /// Number of SACK blocks that are emitted: three with timestamps (RFC 2018 section 3).
    #[inline]
    fn sack_blocks_that_fit(&self) -> usize {
        if self.sack.is_empty() {
            return 0;
        }
        let free = MAX_OPTION_BYTES.saturating_sub(self.bytes_without_sack()).saturating_sub(4);
        self.sack.len().min(free >> 3)
    }

    /// Writes the options and returns their length.
    ///
    /// Errors: [`WireError::Truncated`] under [`Options::bytes`] bytes; the contents are then unspecified.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<usize, WireError> {
        let mut out = Writer(bytes);
        if let Some(mss) = self.mss {
            let [a, b] = mss.to_be_bytes();
            out.put([MSS, 4, a, b])?;
        }
        match (self.timestamps, self.sack_permitted) {
            (Some(t), permitted) => {
                let lead = [SACK_PERMITTED, 2, TIMESTAMPS, 10];
                out.put(if permitted { lead } else { PADDED_TIMESTAMPS })?;
                out.put(t.value.to_be_bytes())?;
                out.put(t.echo.to_be_bytes())?;
            }
            (None, true) => out.put([NOP, NOP, SACK_PERMITTED, 2])?,
            (None, false) => {}
        }
        if let Some(shift) = self.window_scale {
            out.put([NOP, WINDOW_SCALE, 3, shift])?;
        }
        if let Some(option) = &self.fast_open {
            let (bytes, length) = option.emitted();
            let padded = bytes.into_iter().take(length).chain([NOP, NOP]);
            padded.take(option.padded_bytes()).try_for_each(|byte| out.put([byte]))?;
        }
        self.emit_sack(&mut out)?;
        if let Some(ecn) = &self.ecn {
            self.emit_ecn(ecn, &mut out)?;
        }
        Ok(self.bytes())
    }

    fn emit_ecn(&self, ecn: &EcnCounters, out: &mut Writer<'_>) -> Result<(), WireError> {
        let kind = if ecn.order == EcnOrder::Ect0First { ACCECN0 } else { ACCECN1 };
        let [first, ce, last] = ecn.counters;
        match self.ecn_bytes() {
            12 => {
                out.put([kind, 11])?;
                out.put(first)?;
                out.put(ce)?;
                out.put(last)?;
                out.put([NOP])
            }
            8 => {
                out.put([kind, 8])?;
                out.put(first)?;
                out.put(ce)
            }
            _ => Ok(()),
        }
    }

    fn emit_sack(&self, out: &mut Writer<'_>) -> Result<(), WireError> {
        let blocks = self.sack_blocks_that_fit();
        if blocks == 0 {
            return Ok(());
        }
        // Two bytes of kind and length, then at most four blocks of eight: at most 34.
        let length = (blocks << 3 | 2) as u8;
        out.put([NOP, NOP, SACK, length])?;
        for (left, right) in self.sack.iter().take(blocks) {
            out.put(left.0.to_be_bytes())?;
            out.put(right.0.to_be_bytes())?;
        }
        Ok(())
    }
}
