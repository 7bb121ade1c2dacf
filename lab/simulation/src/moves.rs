//! A station whose Ethernet address changes. Its stack keeps its first address, and the frames are rewritten between
//! the stack and the wire, as if another card answered for its IP addresses.
//!
//! Outward the station's address is replaced wherever it occurs: in the Ethernet header, in ARP, and in the options of
//! neighbour discovery. Inward only frames to the station's present address, to a group or to all stations arrive.
//! Frames to its former address are lost, as they are on a real wire.

use std::net::IpAddr;

use fulmar_stack::base::{Counters, EtherAddr};
use fulmar_stack::device::Packet;
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::{checksum, protocol};
use fulmar_testbed::tamper::copied;

const ETHER_BYTES: usize = 14;
/// Bytes up to the end of what may have to be rewritten: the longest TCP header over IPv6.
const HEAD_BYTES: usize = ETHER_BYTES + 40 + 60;
/// Where ICMPv6 begins, its checksum, and the first option of a solicitation or an advertisement.
const ICMP6: usize = ETHER_BYTES + 40;
const ICMP6_CHECKSUM: usize = ICMP6 + 2;
const NDP_OPTION: usize = ICMP6 + 24;
const ARP_SENDER: usize = ETHER_BYTES + 8;

/// The Ethernet address of a station: at first and now.
#[derive(Clone, Copy, Debug)]
pub struct StationAddress {
    own: EtherAddr,
    /// `None`: where it has always been.
    now: Option<EtherAddr>,
    moves: u32,
}

/// The fate of an arriving frame.
pub enum Arrival {
    /// The station gets it.
    Here(Packet),
    /// It is addressed to the station's former Ethernet address.
    Elsewhere(Packet),
}

impl StationAddress {
    pub fn new(own: EtherAddr) -> StationAddress {
        StationAddress { own, now: None, moves: 0 }
    }

    /// The station has another address from now on.
    pub fn move_on(&mut self) {
        self.moves += 1;
        let EtherAddr(mut bytes) = self.own;
        bytes[1..5].copy_from_slice(&self.moves.to_be_bytes());
        // Locally administered, one station.
        bytes[0] = 0x06;
        self.now = Some(EtherAddr(bytes));
    }

    /// A frame as others see it; `None` without memory for one that may not be written to.
    pub fn outward(&self, p: Packet, pool: &mut Pool) -> Option<Packet> {
        let Some(now) = self.now else { return Some(p) };
        let needs_sum = !p.offload.needs_csum;
        rewritten(p, pool, |head| {
            let old = self.own.0;
            replace(head, 6, &old, &now.0, None);
            match head.get(12..14) {
                Some([0x08, 0x06]) => replace(head, ARP_SENDER, &old, &now.0, None),
                Some([0x86, 0xdd]) if is_neighbour_message(head) => {
                    let sum = needs_sum.then_some(ICMP6_CHECKSUM);
                    replace(head, NDP_OPTION + 2, &old, &now.0, sum);
                }
                _ => {}
            }
        })
    }

    /// A frame that came over the wire; `None` as for [`StationAddress::outward`].
    pub fn inward(&self, p: Packet, pool: &mut Pool) -> Option<Arrival> {
        let Some(now) = self.now else { return Some(Arrival::Here(p)) };
        let mut to = [0; 6];
        if p.chain.copy_to(0, &mut to) == to.len() && to[0] & 1 == 0 && to != now.0 {
            return Some(Arrival::Elsewhere(p));
        }
        rewritten(p, pool, |head| replace(head, 0, &now.0, &self.own.0, None)).map(Arrival::Here)
    }

    /// The frame that announces where the station with `ip` is: a gratuitous ARP request (RFC 5227
    /// section 2.3), or an unsolicited advertisement (RFC 4861 section 7.2.6).
    pub fn announcement(&self, ip: IpAddr) -> Vec<u8> {
        let EtherAddr(ether) = self.now.unwrap_or(self.own);
        match ip {
            IpAddr::V4(ip) => {
                let head = [&[0xff; 6][..], &ether, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
                [&head[..], &ether, &ip.octets(), &[0; 6], &ip.octets()].concat()
            }
            IpAddr::V6(ip) => {
                let all_nodes = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
                let own = ip.octets();
                let mut icmp = [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &own, &[2, 1], &ether].concat();
                let len = icmp.len() as u8;
                let pseudo =
                    [&own[..], &all_nodes, &[0, 0, 0, len, 0, 0, 0, protocol::ICMPV6]].concat();
                let sum = checksum::checksum(&[&pseudo[..], &icmp].concat());
                icmp[2..4].copy_from_slice(&sum.to_be_bytes());
                let link = [&[0x33, 0x33, 0, 0, 0, 1][..], &ether, &[0x86, 0xdd]].concat();
                let ip = [&[0x60, 0, 0, 0, 0, len, protocol::ICMPV6, 255][..], &own].concat();
                [&link[..], &ip, &all_nodes, &icmp].concat()
            }
        }
    }
}

fn is_neighbour_message(head: &[u8]) -> bool {
    head.get(ETHER_BYTES + 6) == Some(&protocol::ICMPV6)
        && matches!(head.get(ICMP6), Some(135 | 136))
}

/// Replaces an address if it stands there, and corrects the checksum at `sum`.
fn replace(head: &mut [u8], at: usize, old: &[u8; 6], new: &[u8; 6], sum: Option<usize>) {
    let Some(place) = head.get_mut(at..at + 6).filter(|p| *p == old) else { return };
    place.copy_from_slice(new);
    if let Some(at) = sum {
        correct(head, at, old, new);
    }
}

/// Corrects the checksum at `at` after words of what it covers have changed (RFC 1624).
pub fn correct(head: &mut [u8], at: usize, old: &[u8], new: &[u8]) {
    let Some(field) = head.get_mut(at..at + 2) else { return };
    let word = |b: &[u8]| u32::from(u16::from_be_bytes([b[0], b[1]]));
    let mut total = !word(field) & 0xffff;
    for (o, n) in old.chunks(2).zip(new.chunks(2)) {
        total += (!word(o) & 0xffff) + word(n);
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    field.copy_from_slice(&(!total as u16).to_be_bytes());
}

/// The frame with its first bytes changed by `f`, in memory of its own where others refer to it.
pub fn rewritten(mut p: Packet, pool: &mut Pool, f: impl Fn(&mut [u8])) -> Option<Packet> {
    let (mut head, mut before) = ([0; HEAD_BYTES], [0; HEAD_BYTES]);
    let n = p.chain.copy_to(0, &mut before);
    head[..n].copy_from_slice(&before[..n]);
    f(&mut head[..n]);
    let differs = |i: &usize| head[*i] != before[*i];
    let (Some(from), Some(last)) = ((0..n).find(differs), (0..n).rfind(differs)) else {
        return Some(p);
    };
    // Not more than that: behind the headers lies memory that others refer to.
    if p.chain.copy_from(from, &head[from..=last]).is_none() {
        p = copied(p, pool, &mut Counters::default())?;
        p.chain.copy_from(from, &head[from..=last])?;
    }
    Some(p)
}
