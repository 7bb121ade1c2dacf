//! The flooder: a packet socket on the router's side of a link, which sends frames made ahead. It receives
//! nothing.

use std::ffi::CString;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};

use fulmar_stack::base::{EtherAddr, SeqNum};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::tcp::{Flags, Header, Options, Timestamps};
use fulmar_stack::wire::{WireError, arp, eth, ipv4, protocol};

use crate::sys;
use crate::udp::sys::Batch;
use fulmar_gateway::netns::Netns;

/// Frames of a section, which are sent before the victim looks: fewer than any queue on the way holds.
pub const SECTION: usize = 256;
/// Where the victim listens.
pub const OPEN_PORT: u16 = 80;
/// A closed port.
pub const CLOSED_PORT: u16 = 81;
/// The router of the victim: an address that the flooder claims.
pub const ROUTER_IP: Ipv4Addr = Ipv4Addr::new(10, 72, 0, 254);
/// An unused station address: the far end drops frames to it before IP.
const ROUTER_ETHER: EtherAddr = EtherAddr([2, 0, 0, 0, 0x72, 9]);
/// A local experimental EtherType (IEEE 802).
const UNCLAIMED: u16 = 0x88b5;

/// Types of flooded frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Frames {
    /// SYNs under an unclaimed EtherType.
    Unclaimed,
    /// SYNs with the options of Linux to the open port, each from an address and port of its own.
    Syns,
    /// Resets to the closed port: they belong to no connection, and a reset is never answered.
    Strays,
}

/// The destination of frames.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its Ethernet address.
    pub ether: EtherAddr,
    /// Its IP address.
    pub ip: Ipv4Addr,
}

/// Frames of one section.
pub struct Section(Batch);

/// Sends frames to one target.
pub struct Flooder {
    socket: OwnedFd,
    target: Target,
    /// Sources so far.
    sources: u32,
}

impl Flooder {
    /// Opens a socket on an interface of a namespace.
    pub fn new(netns: &Netns, interface: &str, target: Target) -> io::Result<Flooder> {
        let name = CString::new(interface)?;
        let socket = netns.run(|| {
            let socket = sys::socket(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
            sys::bind_packet(socket.as_fd(), sys::if_index(&name)?, 0)?;
            Ok(socket)
        })?;
        Ok(Flooder { socket, target, sources: 0 })
    }

    /// Makes `sections` sections.
    pub fn make(&mut self, what: Frames, sections: usize) -> io::Result<Vec<Section>> {
        (0..sections).map(|_| self.section(what)).collect()
    }

    fn section(&mut self, what: Frames) -> io::Result<Section> {
        let (mut memory, mut bytes) = (Vec::new(), 0);
        for _ in 0..SECTION {
            self.sources = self.sources.wrapping_add(1);
            let frame = segment(what, self.sources, self.target);
            let frame = frame.map_err(|e| io::Error::other(format!("a frame: {e:?}")))?;
            bytes = frame.len();
            memory.extend(frame);
        }
        Ok(Section(Batch::of(memory, bytes)))
    }

    /// Sends a section.
    pub fn send(&self, section: &mut Section) -> io::Result<()> {
        let mut sent = 0;
        while sent < SECTION {
            sent += section.0.send_from(self.socket.as_fd(), sent, SECTION - sent)?;
        }
        Ok(())
    }

    /// Answers the question of the target for its router, if it has one.
    pub fn answer_for_router(&self) -> io::Result<()> {
        let reply = router_reply(self.target);
        let reply =
            reply.map_err(|e| io::Error::other(format!("cannot build an ARP reply: {e:?}")))?;
        let bytes = reply.len();
        Batch::of(reply, bytes).send(self.socket.as_fd(), 1).map(drop)
    }
}

/// A segment from the source of this number.
fn segment(what: Frames, number: u32, to: Target) -> Result<Vec<u8>, WireError> {
    // The networks for benchmarks, 198.18.0.0/15 (RFC 2544), and all ports but the lowest.
    let [_, a, b, c] = number.to_be_bytes();
    let source = Ipv4Addr::new(198, 18 + (a & 1), b, c);
    let header = Header {
        src_port: 1024 + (number % 60_000) as u16,
        seq: SeqNum(number.wrapping_mul(0x9e37_79b9)),
        window: 64_240,
        ..match what {
            Frames::Strays => {
                Header { dst_port: CLOSED_PORT, flags: Flags::RST, ..Header::default() }
            }
            Frames::Syns | Frames::Unclaimed => Header {
                dst_port: OPEN_PORT,
                flags: Flags::SYN,
                options: syn_options(number),
                ..Header::default()
            },
        }
    };
    let (link, tcp_bytes) = (eth::HEADER_BYTES + ipv4::HEADER_BYTES, header.header_bytes());
    let mut frame = vec![0; link + tcp_bytes];
    let ethertype = if what == Frames::Unclaimed { UNCLAIMED } else { eth::IPV4 };
    eth::Header { dst: to.ether, src: ROUTER_ETHER, ethertype }.emit(&mut frame)?;
    let network = ipv4::Header {
        src: source,
        dst: to.ip,
        protocol: protocol::TCP,
        ttl: 64,
        dscp_ecn: 0,
        ident: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + tcp_bytes,
    };
    network.emit(&mut frame[eth::HEADER_BYTES..])?;
    let tcp = &mut frame[link..];
    header.emit(tcp)?;
    let mut sum = Sum::new();
    let ends = (IpAddr::V4(source), IpAddr::V4(to.ip));
    sum.add_pseudo(ends.0, ends.1, protocol::TCP, tcp_bytes as u32);
    sum.add_bytes(tcp);
    tcp[16..18].copy_from_slice(&sum.finish().to_be_bytes());
    Ok(frame)
}

/// The options of a SYN of Linux.
fn syn_options(clock: u32) -> Options {
    Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: clock, echo: 0 }),
        ..Options::default()
    }
}

fn router_reply(to: Target) -> Result<Vec<u8>, WireError> {
    let mut frame = vec![0; eth::HEADER_BYTES + arp::BYTES];
    eth::Header { dst: to.ether, src: ROUTER_ETHER, ethertype: eth::ARP }.emit(&mut frame)?;
    let reply = arp::Packet {
        operation: arp::Operation::Reply,
        sender_ether: ROUTER_ETHER,
        sender_ip: ROUTER_IP,
        target_ether: to.ether,
        target_ip: to.ip,
    };
    reply.emit(&mut frame[eth::HEADER_BYTES..])?;
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const TARGET: Target =
        Target { ether: EtherAddr([2, 0, 0, 0, 0, 1]), ip: Ipv4Addr::new(10, 72, 0, 2) };

    #[test]
    fn every_syn_of_a_round_comes_from_another_source_with_right_checksums() {
        let mut sources = HashSet::new();
        for n in 1..20_000 {
            let frame = segment(Frames::Syns, n, TARGET).expect("a frame");
            let network = ipv4::Header::parse(&frame[14..], frame.len() - 14).expect("IPv4");
            assert!(ipv4::checksum_ok(&frame[14..], network.header_bytes));
            let (header, bytes) = Header::parse(&frame[34..]).expect("TCP");
            assert_eq!((header.flags, bytes), (Flags::SYN, frame.len() - 34));
            let mut sum = Sum::new();
            sum.add_pseudo(network.src.into(), network.dst.into(), protocol::TCP, bytes as u32);
            sum.add_bytes(&frame[34..]);
            assert_eq!(sum.finish(), 0);
            assert!(sources.insert((network.src, header.src_port)));
        }
    }

    #[test]
    fn the_unclaimed_frame_is_as_long_as_the_syn_and_a_stray_is_a_reset() {
        let frame = |what| segment(what, 7, TARGET).expect("a frame");
        let (syn, other) = (frame(Frames::Syns), frame(Frames::Unclaimed));
        assert_eq!(syn.len(), other.len());
        assert_ne!(syn[12..14], other[12..14]);
        let stray = frame(Frames::Strays);
        let (header, _) = Header::parse(&stray[34..]).expect("TCP");
        assert_eq!((header.flags, header.dst_port), (Flags::RST, CLOSED_PORT));
    }
}
