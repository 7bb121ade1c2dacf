//! Packets of a script: read from text, written to the wire, compared with what was sent.

use std::net::IpAddr;

use fulmar_stack::base::SeqNum;
use fulmar_stack::wire::checksum::{Sum, checksum};
use fulmar_stack::wire::tcp::{
    FastOpen, FastOpenCookie, Flags, Header, Options, SackBlocks, Timestamps,
};
use fulmar_stack::wire::{ipv4, ipv6, protocol};

/// A packet. Sequence numbers are relative to the SYNs.
#[derive(Clone, PartialEq, Debug)]
pub enum Packet {
    /// A TCP segment.
    Tcp(Segment),
    /// An ICMP error about a segment that was sent: its kind, the sequence number quoted, and the bytes of payload.
    Icmp(IcmpKind, u32, usize),
}

/// An ICMP error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpKind {
    /// Destination unreachable: host unreachable, or no route.
    HostUnreachable,
    /// Destination unreachable: port unreachable.
    PortUnreachable,
    /// Fragmentation needed, or packet too big, with the MTU.
    TooBig(u16),
}

/// A TCP segment.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Segment {
    /// Flags.
    pub flags: Flags,
    /// The first sequence number.
    pub seq: u32,
    /// Bytes of payload.
    pub bytes: usize,
    /// The acknowledgement number.
    pub ack: u32,
    /// The window; `None`: not compared.
    pub window: Option<u16>,
    /// The options; `None`: `<...>`, not compared.
    pub options: Option<Options>,
}

/// The two ends, as one of them sees them.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The sender's.
    pub from: (IpAddr, u16),
    /// The receiver's.
    pub to: (IpAddr, u16),
}

impl Addresses {
    /// The other direction.
    pub fn reversed(self) -> Addresses {
        Addresses { from: self.to, to: self.from }
    }
}

impl Segment {
    /// Reads `FLAGS SEQ:END(BYTES) ack N win N <OPTIONS>`.
    pub fn parse(text: &str) -> Result<Segment, String> {
        let (head, options) = match text.split_once('<') {
            Some((head, rest)) => {
                let inner = rest.split_once('>').ok_or("`<` without `>`")?.0;
                (head, if inner == "..." { None } else { Some(parse_options(inner)?) })
            }
            None => (text, Some(Options::default())),
        };
        let mut words = head.split_whitespace();
        let flags = parse_flags(words.next().ok_or("no flags")?)?;
        let range = words.next().ok_or("no sequence numbers")?;
        let (seq, rest) = range.split_once(':').ok_or("no `:`")?;
        let (_, bytes) = rest.split_once('(').ok_or("no `(`")?;
        let bytes = number(bytes.trim_end_matches(')'))? as usize;
        let mut segment =
            Segment { flags, seq: number(seq)?, bytes, options, ..Segment::default() };
        while let Some(word) = words.next() {
            let value = number(words.next().ok_or("a word without its number")?)?;
            match word {
                "ack" => segment.ack = value,
                "win" => segment.window = Some(value as u16),
                _ => return Err(format!("unknown word `{word}`")),
            }
        }
        Ok(segment)
    }

    /// The segment as an IP packet. Its numbers are relative to `isn`: the sender's and the receiver's.
    pub fn emit(&self, ends: &Addresses, isn: (u32, u32)) -> Vec<u8> {
        let mut options = self.options.unwrap_or_default();
        options.sack = shifted(&options.sack, isn.1);
        let has_ack = self.flags.contains(Flags::ACK);
        let header = Header {
            src_port: ends.from.1,
            dst_port: ends.to.1,
            seq: SeqNum(self.seq.wrapping_add(isn.0)),
            ack: SeqNum(if has_ack { self.ack.wrapping_add(isn.1) } else { 0 }),
            flags: self.flags,
            window: self.window.unwrap_or(0),
            urgent: 0,
            options,
        };
        let mut bytes = vec![0; header.header_bytes() + self.bytes];
        header.emit(&mut bytes).expect("invariant: the buffer has the length of the header");
        with_ip(ends, protocol::TCP, bytes, 16)
    }

    /// Reads a packet that was sent, relative to `isn`: the sender's and the receiver's. With it the ends.
    pub fn of_wire(packet: &[u8], isn: (u32, u32)) -> Option<(Segment, Addresses)> {
        let is_v4 = packet.first()? >> 4 == 4;
        let (at, end, src, dst) = if is_v4 {
            let total = u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]);
            let ip = |at: usize| packet.get(at..)?.first_chunk::<4>().map(|b| IpAddr::from(*b));
            (usize::from(packet[0] & 15) * 4, usize::from(total), ip(12)?, ip(16)?)
        } else {
            let ip = |at: usize| packet.get(at..)?.first_chunk::<16>().map(|b| IpAddr::from(*b));
            (ipv6::HEADER_BYTES, packet.len(), ip(8)?, ip(24)?)
        };
        if *packet.get(if is_v4 { 9 } else { 6 })? != protocol::TCP {
            return None;
        }
        let (header, header_bytes) = Header::parse(packet.get(at..end)?).ok()?;
        let mut options = header.options;
        options.sack = shifted(&options.sack, 0u32.wrapping_sub(isn.1));
        let has_ack = header.flags.contains(Flags::ACK);
        let segment = Segment {
            flags: header.flags,
            seq: header.seq.0.wrapping_sub(isn.0),
            bytes: end - at - header_bytes,
            ack: if has_ack { header.ack.0.wrapping_sub(isn.1) } else { 0 },
            window: Some(header.window),
            options: Some(options),
        };
        let ends = Addresses { from: (src, header.src_port), to: (dst, header.dst_port) };
        Some((segment, ends))
    }

    /// What differs from `sent`, if anything does.
    pub fn difference(&self, sent: &Segment) -> Option<String> {
        let same_window = self.window.is_none_or(|w| Some(w) == sent.window);
        let same_options = self
            .options
            .is_none_or(|mine| sent.options.is_some_and(|theirs| options_agree(&mine, &theirs)));
        let is_same = self.flags == sent.flags
            && (self.seq, self.bytes, self.ack) == (sent.seq, sent.bytes, sent.ack)
            && same_window
            && same_options;
        (!is_same).then(|| format!("expected {self:?}\n but sent {sent:?}"))
    }
}

/// Whether options agree; the values of timestamps are other ones in each run.
fn options_agree(a: &Options, b: &Options) -> bool {
    let plain =
        |o: &Options| Options { timestamps: o.timestamps.map(|_| Timestamps::default()), ..*o };
    plain(a) == plain(b)
}

fn shifted(blocks: &SackBlocks, by: u32) -> SackBlocks {
    let mut moved = SackBlocks::default();
    for (left, right) in blocks.iter() {
        moved.push(SeqNum(left.0.wrapping_add(by)), SeqNum(right.0.wrapping_add(by)));
    }
    moved
}

/// A number of a script.
pub fn number(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| format!("`{text}` is no number"))
}

fn octets(hex: &str) -> Result<Vec<u8>, String> {
    let octet =
        |at: usize| hex.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let octets: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(octet).collect();
    octets.ok_or_else(|| format!("`{hex}` is no cookie"))
}

fn parse_flags(text: &str) -> Result<Flags, String> {
    text.chars().try_fold(Flags::default(), |all, c| {
        let flag = match c {
            'S' => Flags::SYN,
            'F' => Flags::FIN,
            'R' => Flags::RST,
            'P' => Flags::PSH,
            '.' => Flags::ACK,
            'E' => Flags::ECE,
            'W' => Flags::CWR,
            'A' => Flags::AE,
            _ => return Err(format!("unknown flag `{c}`")),
        };
        Ok(all | flag)
    })
}

fn parse_options(text: &str) -> Result<Options, String> {
    let mut options = Options::default();
    for item in text.split(',').map(str::trim) {
        let words: Vec<&str> = item.split_whitespace().collect();
        match words[..] {
            ["nop"] | ["eol"] => {}
            ["sackOK"] => options.sack_permitted = true,
            ["mss", n] => options.mss = Some(number(n)? as u16),
            ["wscale", n] => options.window_scale = Some(number(n)? as u8),
            ["TS", "val", value, "ecr", echo] => {
                let (value, echo) = (number(value)?, number(echo)?);
                options.timestamps = Some(Timestamps { value, echo });
            }
            ["FO"] => options.fast_open = Some(FastOpen { cookie: None, is_experimental: false }),
            ["FO", hex] => {
                let cookie = FastOpenCookie::new(&octets(hex)?);
                let cookie = Some(cookie.ok_or("no length of a cookie")?);
                options.fast_open = Some(FastOpen { cookie, is_experimental: false });
            }
            ["sack", ref blocks @ ..] => {
                for block in blocks {
                    let (left, right) = block.split_once(':').ok_or("a block without `:`")?;
                    options.sack.push(SeqNum(number(left)?), SeqNum(number(right)?));
                }
            }
            _ => return Err(format!("unknown option `{item}`")),
        }
    }
    Ok(options)
}

/// An IP header in front of the bytes of a protocol, whose checksum is at `at`.
fn with_ip(ends: &Addresses, protocol: u8, mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    let (src, dst) = (ends.from.0, ends.to.0);
    let mut sum = Sum::new();
    if protocol != protocol::ICMP {
        sum.add_pseudo(src, dst, protocol, bytes.len() as u32);
    }
    sum.add_bytes(&bytes);
    bytes[at..at + 2].copy_from_slice(&sum.finish().to_be_bytes());
    let mut packet = ip_header(src, dst, protocol, bytes.len());
    packet.extend(bytes);
    packet
}

fn ip_header(src: IpAddr, dst: IpAddr, protocol: u8, payload_bytes: usize) -> Vec<u8> {
    if let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) {
        let total = (ipv4::HEADER_BYTES + payload_bytes) as u16;
        let mut h = vec![0x45, 0];
        h.extend(total.to_be_bytes());
        h.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
        h.extend(src.octets());
        h.extend(dst.octets());
        let sum = checksum(&h);
        h[10..12].copy_from_slice(&sum.to_be_bytes());
        return h;
    }
    let octets = |ip| match ip {
        IpAddr::V6(ip) => ip.octets(),
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
    };
    let mut h = vec![0x60, 0, 0, 0];
    h.extend((payload_bytes as u16).to_be_bytes());
    h.extend([protocol, 64]);
    h.extend(octets(src));
    h.extend(octets(dst));
    h
}

/// An ICMP error of the peer's about a segment from `about.from` with the sequence number `seq`. It quotes the TCP header
/// (RFC 1812 section 4.3.2.3 asks for as much as fits).
pub fn emit_icmp(kind: IcmpKind, about: &Addresses, seq: u32, payload_bytes: usize) -> Vec<u8> {
    let is_v4 = about.from.0.is_ipv4();
    let (kind, code, mtu) = match (kind, is_v4) {
        (IcmpKind::HostUnreachable, true) => (3, 1, 0),
        (IcmpKind::PortUnreachable, true) => (3, 3, 0),
        (IcmpKind::TooBig(mtu), true) => (3, 4, mtu),
        (IcmpKind::HostUnreachable, false) => (1, 0, 0),
        (IcmpKind::PortUnreachable, false) => (1, 4, 0),
        (IcmpKind::TooBig(mtu), false) => (2, 0, mtu),
    };
    let mut bytes: Vec<u8> = vec![kind, code, 0, 0, 0, 0];
    bytes.extend(mtu.to_be_bytes());
    bytes.extend(ip_header(about.from.0, about.to.0, protocol::TCP, 20 + payload_bytes));
    bytes.extend(about.from.1.to_be_bytes());
    bytes.extend(about.to.1.to_be_bytes());
    bytes.extend(seq.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    let protocol = if is_v4 { protocol::ICMP } else { protocol::ICMPV6 };
    with_ip(&about.reversed(), protocol, bytes, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(from: &str, to: &str) -> Addresses {
        Addresses { from: (from.parse().unwrap(), 80), to: (to.parse().unwrap(), 8080) }
    }

    #[test]
    fn a_segment_goes_to_the_wire_and_back() {
        let text = "P. 1:1001(1000) ack 5 win 257 <nop,nop,TS val 7 ecr 9,nop,nop,sack 1:2 3:4>";
        let segment = Segment::parse(text).unwrap();
        for ends in [ends("192.0.2.1", "192.168.0.1"), ends("2001:db8::1", "fd3d::1")] {
            let packet = segment.emit(&ends, (77, u32::MAX - 2));
            let (back, _) = Segment::of_wire(&packet, (77, u32::MAX - 2)).unwrap();
            assert_eq!(segment.difference(&back), None);
            let other = Segment { ack: 6, ..back };
            assert!(segment.difference(&other).is_some());
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["X 0:0(0)", "S 0(0)", ". 0:0(0) ack", ". 0:0(0) <mss>", ". 0:0(0) <mss 1"] {
            assert!(Segment::parse(text).is_err(), "{text}");
        }
    }
}
