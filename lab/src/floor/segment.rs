//! The floor's headers: built once, patched per frame; and the least parsing that will do.
//!
//! ```text
//! 0            12             26          46               78
//! | virtio-net | Ethernet     | IPv4      | TCP, timestamps | payload …
//! ```
//! Every frame that leaves asks for its checksum (virtio-net NEEDS_CSUM): the field holds the
//! folded pseudo-header sum, and the payload is never summed. Facts: linux/virtio_net.h,
//! RFC 9293 section 3.1, RFC 7323 section 3.2, RFC 826.

use std::net::Ipv4Addr;

/// Bytes of the virtio-net header before every frame.
pub const VNET_BYTES: usize = 12;
/// Bytes before the payload of a data segment: virtio-net, Ethernet, IPv4, TCP with timestamps.
pub const HEADER_BYTES: usize = VNET_BYTES + 14 + 20 + 32;
/// Payload bytes of one packet at MTU 1500 with timestamps.
pub const MSS: usize = 1448;

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

const ETHER: usize = VNET_BYTES;
const IP: usize = ETHER + 14;
const TCP: usize = IP + 20;
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
/// The window scale that we offer (RFC 7323 section 2): 64 bytes per unit reach 4 MiB.
pub const WINDOW_SCALE: u8 = 6;

/// The addresses of both ends.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say it all")]
pub struct Addresses {
    pub our_mac: [u8; 6],
    pub peer_mac: [u8; 6],
    pub our_ip: Ipv4Addr,
    pub peer_ip: Ipv4Addr,
    pub our_port: u16,
    pub peer_port: u16,
}

/// A prebuilt header for frames of one payload length.
#[derive(Clone)]
pub struct Template([u8; HEADER_BYTES]);

impl Template {
    /// The header of every frame with this payload length and these flags; more than [`MSS`]
    /// bytes ask the device for segmentation.
    pub fn new(a: &Addresses, flags: u8, window: u16, payload_bytes: usize) -> Template {
        let options = [1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
        let bytes = build(a, flags, window, &options, payload_bytes);
        Template(bytes.try_into().expect("invariant: 12 bytes of options make HEADER_BYTES"))
    }

    /// Fills in the fields that change from frame to frame.
    #[inline]
    pub fn patch(&mut self, seq: u32, ack: u32, ts_value: u32, ts_echo: u32) -> &[u8] {
        let mut put = |at: usize, v: u32| self.0[at..at + 4].copy_from_slice(&v.to_be_bytes());
        put(TCP + 4, seq);
        put(TCP + 8, ack);
        put(TCP + 24, ts_value);
        put(TCP + 28, ts_echo);
        &self.0
    }
}

/// A SYN that offers MSS, timestamps and window scaling; no SACK, since nothing gets lost here.
pub fn syn(a: &Addresses, seq: u32, window: u16) -> Vec<u8> {
    let mut options = vec![2, 4];
    options.extend_from_slice(&((MSS + 12) as u16).to_be_bytes());
    options.extend_from_slice(&[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0]);
    options.extend_from_slice(&[1, 3, 3, WINDOW_SCALE]);
    let mut frame = build(a, SYN, window, &options, 0);
    frame[TCP + 4..TCP + 8].copy_from_slice(&seq.to_be_bytes());
    frame
}

fn build(a: &Addresses, flags: u8, window: u16, options: &[u8], payload_bytes: usize) -> Vec<u8> {
    let tcp_bytes = 20 + options.len();
    let segment_bytes = (tcp_bytes + payload_bytes) as u16;
    let mut f = virtio_header(tcp_bytes, payload_bytes).to_vec();
    f.extend_from_slice(&a.peer_mac);
    f.extend_from_slice(&a.our_mac);
    f.extend_from_slice(&[0x08, 0x00]);
    f.extend_from_slice(&ipv4_header(a, segment_bytes + 20));
    f.extend_from_slice(&a.our_port.to_be_bytes());
    f.extend_from_slice(&a.peer_port.to_be_bytes());
    f.extend_from_slice(&[0; 8]);
    f.extend_from_slice(&[(tcp_bytes as u8 / 4) << 4, flags]);
    f.extend_from_slice(&window.to_be_bytes());
    let mut pseudo = Vec::with_capacity(12);
    pseudo.extend_from_slice(&a.our_ip.octets());
    pseudo.extend_from_slice(&a.peer_ip.octets());
    pseudo.extend_from_slice(&[0, 6]);
    pseudo.extend_from_slice(&segment_bytes.to_be_bytes());
    f.extend_from_slice(&fold_sum(&pseudo).to_be_bytes());
    f.extend_from_slice(&[0; 2]);
    f.extend_from_slice(options);
    f
}

fn virtio_header(tcp_bytes: usize, payload_bytes: usize) -> [u8; VNET_BYTES] {
    let le = |v: usize| (v as u16).to_le_bytes();
    let mut v = [0; VNET_BYTES];
    v[0] = NEEDS_CSUM;
    v[2..4].copy_from_slice(&le(34 + tcp_bytes));
    if payload_bytes > MSS {
        v[1] = GSO_TCPV4;
        v[4..6].copy_from_slice(&le(MSS));
    }
    v[6..8].copy_from_slice(&le(34));
    v[8..10].copy_from_slice(&le(16));
    v
}

fn ipv4_header(a: &Addresses, total_bytes: u16) -> [u8; 20] {
    let mut h = [0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    h[2..4].copy_from_slice(&total_bytes.to_be_bytes());
    h[12..16].copy_from_slice(&a.our_ip.octets());
    h[16..20].copy_from_slice(&a.peer_ip.octets());
    let sum = !fold_sum(&h);
    h[10..12].copy_from_slice(&sum.to_be_bytes());
    h
}

/// The one's complement sum of 16-bit words, folded, not inverted (RFC 1071).
fn fold_sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The fields of a received segment that the floor uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival<'a> {
    /// A TCP segment to our port.
    Tcp(Segment<'a>),
    /// A request for the hardware address of our IP address.
    #[expect(missing_docs, reason = "the asker's addresses")]
    ArpRequest { mac: [u8; 6], ip: [u8; 4] },
    /// Anything else.
    Other,
}

/// A TCP segment to our port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment<'a> {
    /// Sequence number of the first byte.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Control bits.
    pub flags: u8,
    /// As it stands in the header, not scaled.
    pub window: u16,
    /// The options, padding included.
    pub options: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

impl Segment<'_> {
    /// The timestamp value (RFC 7323 section 3.2), zero without one.
    #[inline]
    pub fn ts_value(&self) -> u32 {
        match self.options {
            // The form that Linux always sends on an established connection.
            [1, 1, 8, 10, a, b, c, d, ..] => u32::from_be_bytes([*a, *b, *c, *d]),
            _ => self.option(8).and_then(|v| be32(v, 0)).unwrap_or(0),
        }
    }

    /// The body of the first option of this kind.
    pub fn option(&self, kind: u8) -> Option<&[u8]> {
        let mut rest = self.options;
        loop {
            match *rest {
                [0, ..] | [] => return None,
                [1, ..] => rest = &rest[1..],
                [k, len, ..] => {
                    let option = rest.get(..usize::from(len.max(2)))?;
                    if k == kind {
                        return option.get(2..);
                    }
                    rest = &rest[option.len()..];
                }
                [_] => return None,
            }
        }
    }
}

fn be16(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn be32(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

/// Looks at a frame that starts with its virtio-net header.
pub fn parse<'a>(a: &Addresses, frame: &'a [u8]) -> Arrival<'a> {
    match be16(frame, ETHER + 12) {
        Some(0x0800) => parse_tcp(a, frame).map_or(Arrival::Other, Arrival::Tcp),
        Some(0x0806) => parse_arp(a, frame).unwrap_or(Arrival::Other),
        _ => Arrival::Other,
    }
}

fn parse_tcp<'a>(a: &Addresses, frame: &'a [u8]) -> Option<Segment<'a>> {
    let ip = frame.get(IP..)?;
    if *ip.first()? != 0x45 || *ip.get(9)? != 6 {
        return None;
    }
    let tcp = ip.get(20..usize::from(be16(ip, 2)?))?;
    if be16(tcp, 0)? != a.peer_port || be16(tcp, 2)? != a.our_port {
        return None;
    }
    let header_bytes = usize::from(*tcp.get(12)? >> 4) * 4;
    Some(Segment {
        seq: be32(tcp, 4)?,
        ack: be32(tcp, 8)?,
        flags: *tcp.get(13)?,
        window: be16(tcp, 14)?,
        options: tcp.get(20..header_bytes)?,
        payload: tcp.get(header_bytes..)?,
    })
}

fn parse_arp(a: &Addresses, frame: &[u8]) -> Option<Arrival<'static>> {
    let arp = frame.get(IP..IP + 28)?;
    let request = arp.starts_with(&[0, 1, 8, 0, 6, 4, 0, 1]);
    if !request || arp.get(24..28)? != a.our_ip.octets() {
        return None;
    }
    let mac = arp.get(8..14)?.try_into().ok()?;
    Some(Arrival::ArpRequest { mac, ip: arp.get(14..18)?.try_into().ok()? })
}

/// The answer to an ARP request (RFC 826).
pub fn arp_reply(a: &Addresses, mac: [u8; 6], ip: [u8; 4]) -> Vec<u8> {
    let mut f = vec![0; VNET_BYTES];
    f.extend_from_slice(&mac);
    f.extend_from_slice(&a.our_mac);
    f.extend_from_slice(&[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2]);
    f.extend_from_slice(&a.our_mac);
    f.extend_from_slice(&a.our_ip.octets());
    f.extend_from_slice(&mac);
    f.extend_from_slice(&ip);
    f
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> Addresses {
        Addresses {
            our_mac: [2, 0, 0, 0, 0, 1],
            peer_mac: [2, 0, 0, 0, 0, 2],
            our_ip: Ipv4Addr::new(10, 0, 0, 2),
            peer_ip: Ipv4Addr::new(10, 0, 0, 1),
            our_port: 7,
            peer_port: 9,
        }
    }

    /// The same connection seen from the other side.
    fn other_side(a: &Addresses) -> Addresses {
        Addresses {
            our_mac: a.peer_mac,
            peer_mac: a.our_mac,
            our_ip: a.peer_ip,
            peer_ip: a.our_ip,
            our_port: a.peer_port,
            peer_port: a.our_port,
        }
    }

    #[test]
    fn built_segments_parse_to_the_same_values() {
        let a = addresses();
        let mut frame = Template::new(&a, ACK | PSH, 512, 4).patch(1, 2, 3, 4).to_vec();
        frame.extend_from_slice(b"abcd");
        let Arrival::Tcp(s) = parse(&other_side(&a), &frame) else { panic!("not TCP") };
        assert_eq!((s.seq, s.ack, s.flags, s.window), (1, 2, ACK | PSH, 512));
        assert_eq!((s.ts_value(), s.payload), (3, b"abcd".as_slice()));
    }

    #[test]
    fn the_ip_header_sums_to_zero_and_the_tcp_field_holds_the_pseudo_header() {
        let f = Template::new(&addresses(), ACK, 1, 10).0;
        assert_eq!(fold_sum(&f[IP..TCP]), 0xffff);
        // 10.0.0.2 + 10.0.0.1 + protocol 6 + length 42.
        assert_eq!(be16(&f, TCP + 16), Some(0x0a00 * 2 + 3 + 6 + 42));
    }

    #[test]
    fn only_more_than_one_mss_asks_for_segmentation() {
        let a = addresses();
        assert_eq!(Template::new(&a, ACK, 1, MSS).0[1], 0);
        let large = Template::new(&a, ACK, 1, 45 * MSS).0;
        assert_eq!((large[1], large[4..6].to_vec()), (GSO_TCPV4, 1448u16.to_le_bytes().to_vec()));
    }

    #[test]
    fn a_syn_offers_mss_scale_and_timestamps() {
        let a = addresses();
        let frame = syn(&a, 5, 100);
        let Arrival::Tcp(s) = parse(&other_side(&a), &frame) else { panic!("not TCP") };
        assert_eq!(s.option(2), Some(1460u16.to_be_bytes().as_slice()));
        assert_eq!(s.option(3), Some([WINDOW_SCALE].as_slice()));
        assert_eq!(s.ts_value(), 1);
        assert_eq!(s.option(5), None);
    }

    #[test]
    fn a_frame_cut_anywhere_is_something_else_and_no_panic() {
        let a = addresses();
        for frame in [syn(&a, 5, 100), arp_reply(&a, [1; 6], [2; 4])] {
            for cut in 0..frame.len() {
                assert_eq!(parse(&other_side(&a), &frame[..cut]), Arrival::Other);
            }
        }
    }

    #[test]
    fn an_arp_request_for_us_is_seen_and_for_others_is_not() {
        let a = addresses();
        let mut request = arp_reply(&other_side(&a), a.our_mac, a.our_ip.octets());
        request[IP + 7] = 1;
        let wanted = Arrival::ArpRequest { mac: a.peer_mac, ip: a.peer_ip.octets() };
        assert_eq!(parse(&a, &request), wanted);
        request[IP + 27] ^= 1;
        assert_eq!(parse(&a, &request), Arrival::Other);
    }
}
