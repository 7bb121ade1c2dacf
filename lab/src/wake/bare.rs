//! The least that an answer over a TAP can cost: a program without a stack that turns every question
//! around in place and writes it back. What fulmar takes beyond it is fulmar's own; what it takes
//! beyond the kernel's request-reply is the price of the device.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::program::{Account, END, MEASURED, Start};
use super::tally::Tally;
use crate::floor::device::{FrameDevice, Tap};
use crate::floor::segment::{self, Addresses, Arrival};
use crate::topology::{self, OUR_IP, OUR_MAC, PEER_IP, PEER_MAC, Topology};

/// The port that answers.
pub const PORT: u16 = 9;
/// How long a program that never sleeps waits for a frame.
const PATIENCE: Duration = Duration::from_secs(6);
/// Bytes of the frames that are expected.
const ROOM: usize = 2048;

// Offsets in a frame with its virtio-net header and an IPv4 header without options.
const ETHER: usize = segment::VNET_BYTES;
const IP: usize = ETHER + 14;
const UDP: usize = IP + 20;
const PAYLOAD: usize = UDP + 8;

/// A TAP, and the kernel's end of it.
pub struct Bare(Topology<Mutex<Tap>>);

impl Bare {
    /// Makes both.
    pub fn open() -> io::Result<Bare> {
        Ok(Bare(topology::tap(|name| Tap::open(name).map(Mutex::new))?))
    }

    /// Where those who ask live.
    pub fn peer_netns(&self) -> &fulmar_gateway::netns::Netns {
        &self.0.peer_netns
    }

    /// Answers until the end is said; asleep when there is nothing, or never asleep.
    pub fn answer(&self, sleeps: bool) -> io::Result<Account> {
        let mut device = self.0.device.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tally = Tally::new(false)?;
        let mut start: Option<Start> = None;
        let mut answer = Vec::with_capacity(ROOM);
        loop {
            next(&mut device, sleeps, &mut answer)?;
            let Some(kind) = turn(&mut answer) else {
                arp(&answer).map_or(Ok(()), |reply| device.send(&reply, &[]))?;
                continue;
            };
            match (kind, &start) {
                (END, Some(start)) => return start.account(None, tally),
                (MEASURED, None) => start = Some(Start::now(None)?),
                _ => {}
            }
            device.send(&answer, &[])?;
            if start.is_some() {
                tally.packets += 1;
                tally.sent += 1;
            }
        }
    }
}

/// The next frame.
fn next(device: &mut Tap, sleeps: bool, to: &mut Vec<u8>) -> io::Result<()> {
    let since = Instant::now();
    to.clear();
    loop {
        match device.receive(sleeps)? {
            Some(frame) => {
                to.extend_from_slice(frame);
                return Ok(());
            }
            None if since.elapsed() > PATIENCE => return Err(io::ErrorKind::TimedOut.into()),
            None => {}
        }
    }
}

/// Makes the answer of a question: both addresses and both ports change places, which no checksum
/// notices. What kind of question it was; `None` if it is none.
fn turn(frame: &mut [u8]) -> Option<u8> {
    let is_udp = frame.get(ETHER + 12..=IP)? == [8, 0, 0x45] && *frame.get(IP + 9)? == 17;
    let is_ours = frame.get(UDP + 2..UDP + 4)? == PORT.to_be_bytes();
    if !is_udp || !is_ours || frame.get(IP + 16..IP + 20)? != OUR_IP.octets() {
        return None;
    }
    let kind = *frame.get(PAYLOAD)?;
    for (at, bytes) in [(ETHER, 6), (IP + 12, 4), (UDP, 2)] {
        let (near, far) = frame.get_mut(at..at + 2 * bytes)?.split_at_mut(bytes);
        near.swap_with_slice(far);
    }
    Some(kind)
}

fn arp(frame: &[u8]) -> Option<Vec<u8>> {
    let (our_port, peer_port) = (PORT, 0);
    let (our_ip, peer_ip): (Ipv4Addr, Ipv4Addr) = (OUR_IP, PEER_IP);
    let a =
        Addresses { our_mac: OUR_MAC, peer_mac: PEER_MAC, our_ip, peer_ip, our_port, peer_port };
    match segment::parse(&a, frame) {
        Arrival::ArpRequest { mac, ip } => Some(segment::arp_reply(&a, mac, ip)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Vec<u8> {
        let mut frame = vec![0; PAYLOAD];
        frame[ETHER..ETHER + 6].copy_from_slice(&OUR_MAC);
        frame[ETHER + 6..ETHER + 12].copy_from_slice(&PEER_MAC);
        frame[ETHER + 12..=IP].copy_from_slice(&[8, 0, 0x45]);
        frame[IP + 9] = 17;
        frame[IP + 12..IP + 16].copy_from_slice(&PEER_IP.octets());
        frame[IP + 16..UDP].copy_from_slice(&OUR_IP.octets());
        frame[UDP..UDP + 4].copy_from_slice(&[0x12, 0x34, 0, PORT as u8]);
        frame.extend([MEASURED, 1, 2, 3]);
        frame
    }

    #[test]
    fn an_answer_is_the_question_with_its_ends_exchanged() {
        let (mut frame, asked) = (question(), question());
        assert_eq!(turn(&mut frame), Some(MEASURED));
        assert_eq!(frame[ETHER..ETHER + 6], PEER_MAC);
        assert_eq!(frame[IP + 12..IP + 16], OUR_IP.octets());
        assert_eq!(frame[UDP..UDP + 4], [0, PORT as u8, 0x12, 0x34]);
        assert_eq!(frame[PAYLOAD..], asked[PAYLOAD..]);
    }

    #[test]
    fn what_is_no_question_or_is_cut_is_left_alone() {
        for bytes in 0..PAYLOAD + 1 {
            assert_eq!(turn(&mut question()[..bytes]), None, "{bytes} bytes");
        }
        let mut to_another_port = question();
        to_another_port[UDP + 3] += 1;
        assert_eq!(turn(&mut to_another_port), None);
    }
}
