//! Datagrams of one flow, which may cross joined: what is sent, and the kernel's socket that takes every
//! one of them.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;

use fulmar::base::{EtherAddr, Offload};
use fulmar::netdev::Packet;

use super::rig::{HEADER_BYTES, PATIENCE, PORT, SECTION};
use super::sys::Batch;
use crate::{sys as calls, topology};
use fulmar_gateway::netns::Netns;

/// Where UDP begins.
const L4: usize = 34;
/// Offsets in the UDP header.
const LENGTH: usize = 4;
const CHECKSUM: usize = 6;
const UDP: u8 = 17;
/// Holds a section of datagrams, what the kernel adds to each included.
const BUFFER_BYTES: i32 = 16 << 20;
/// Longer datagrams do not come.
const MOST_BYTES: usize = 2048;

/// The far end of a flow.
pub struct Flow {
    receiver: UdpSocket,
    batch: Batch,
}

impl Flow {
    /// A socket in the namespace of the kernel's end.
    pub fn new(netns: &Netns) -> io::Result<Flow> {
        let receiver = netns.run(|| {
            let socket = UdpSocket::bind((topology::PEER_IP, PORT))?;
            let bytes = BUFFER_BYTES.to_ne_bytes();
            let set = |option| calls::setsockopt(socket.as_fd(), libc::SOL_SOCKET, option, &bytes);
            set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))?;
            Ok(socket)
        })?;
        Ok(Flow { receiver, batch: Batch::new(SECTION, MOST_BYTES) })
    }

    /// Takes what was sent: each datagram by itself, and every one.
    pub fn drain(&mut self, expected: usize) -> io::Result<()> {
        let mut came = 0;
        for _ in 0..PATIENCE {
            came += self.batch.receive(self.receiver.as_fd(), SECTION).unwrap_or(0);
            if came >= expected {
                return Ok(());
            }
            std::thread::yield_now();
        }
        Err(io::Error::other(format!("{came} of {expected} datagrams came to the kernel's socket")))
    }
}

/// A datagram to that socket, as a stack hands it to a device that computes checksums.
pub fn datagram(from: EtherAddr, bytes: usize) -> (Vec<u8>, Offload) {
    let l4_bytes = (bytes - L4) as u16;
    let mut f = [&topology::PEER_MAC[..], &from.0, &[0x08, 0x00]].concat();
    // Not to be fragmented, so that the identification means nothing.
    f.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
    f.extend(topology::OUR_IP.octets());
    f.extend(topology::PEER_IP.octets());
    f[16..18].copy_from_slice(&(l4_bytes + 20).to_be_bytes());
    let header_sum = !sum(&f[14..L4]);
    f[24..26].copy_from_slice(&header_sum.to_be_bytes());
    f.resize(bytes, 0x5a);
    f[L4..L4 + LENGTH].copy_from_slice(&[0x20, 0, 0, PORT as u8]);
    f[L4 + LENGTH..L4 + CHECKSUM].copy_from_slice(&l4_bytes.to_be_bytes());
    let pseudo = [&f[26..L4], &[0, UDP], &l4_bytes.to_be_bytes()].concat();
    let partial = sum(&pseudo);
    f[L4 + CHECKSUM..HEADER_BYTES].copy_from_slice(&partial.to_be_bytes());
    let offload = Offload {
        needs_csum: true,
        csum_start: L4 as u16,
        csum_offset: CHECKSUM as u16,
        ..Offload::default()
    };
    (f, offload)
}

/// The folded sum of 16-bit words (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |b| (*b).into()));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The datagrams that a received frame stands for, with their common headers' length.
pub fn pieces(p: &Packet) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let (from, unit) = match p.offload.gso {
        Some(gso) => (usize::from(gso.header_bytes), usize::from(gso.segment_bytes).max(1)),
        None => (0, usize::MAX),
    };
    let end = p.chain.len();
    std::iter::successors(Some(from), move |at| at.checked_add(unit))
        .take_while(move |at| *at < end)
        .map(move |at| at..end.min(at.saturating_add(unit)))
}
