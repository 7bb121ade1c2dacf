//! Datagrams and echo requests beside the connections.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};

use fulmar_stack::shard::Shard;
use fulmar_stack::socket::SocketError;
use fulmar_stack::udp::BindOptions;
use fulmar_stack::wire::checksum::checksum;

use super::oracle::Violation;
use super::pattern;
use super::scenario::{Draw, Scenario};

/// Streams of the pattern for datagrams and echoes, far from the streams of connections.
const DATAGRAM_STREAM: u64 = 1_000;
const ECHO_STREAM: u64 = 2_000;
/// Bytes in front of the pattern: the datagram's number and length.
const HEADER_BYTES: usize = 8;

/// Datagrams that a station sends at most.
const MOST_SENT: u32 = 200;

/// The header and the body of a station's datagram.
fn datagram(station: usize, number: u32, len: usize) -> ([u8; HEADER_BYTES], &'static [u8]) {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&number.to_be_bytes());
    header[4..].copy_from_slice(&(len as u32).to_be_bytes());
    let stream = DATAGRAM_STREAM + station as u64;
    (header, pattern::piece(stream, u64::from(number) * 31, len))
}

/// Whether the Internet checksum (RFC 1071) takes `got` for `sent`. One flipped bit it finds always, but the wire flips
/// one in each frame, and a datagram comes in fragments: two bits of the same weight, one set and one cleared, it
/// cannot find.
fn passes_for(got: &[u8], sent: &[u8]) -> bool {
    let flipped: u32 = got.iter().zip(sent).map(|(a, b)| (a ^ b).count_ones()).sum();
    got.len() == sent.len() && (2..=8).contains(&flipped) && checksum(got) == checksum(sent)
}

/// What one station sends and gets beside its connections.
pub struct SideTraffic {
    station: usize,
    udp: SlotId,
    ping: SlotId,
    to: SocketAddr,
    mtu: usize,
    /// The wire to it flips bits.
    is_corrupted: bool,
    /// Either wire does.
    echoes_are_corrupted: bool,
    datagrams_left: u32,
    pings_left: u32,
    sent: u32,
    next_at: Instant,
    draw: Draw,
}

fn unexpected(call: &'static str) -> impl Fn(SocketError) -> Violation {
    move |e| Violation::Call(call, e)
}

impl SideTraffic {
    /// Opens the sockets.
    pub fn new(
        station: usize,
        shard: &mut Shard,
        (local, to): (SocketAddr, SocketAddr),
        s: &Scenario,
    ) -> Result<SideTraffic, Violation> {
        let udp =
            shard.udp().bind(local, BindOptions::default()).map_err(unexpected("udp_bind"))?;
        Ok(SideTraffic {
            station,
            udp,
            ping: shard.icmp().open().map_err(unexpected("ping_open"))?,
            to,
            mtu: s.mtu,
            is_corrupted: s.paths[1 - station].corrupt > 0.0,
            echoes_are_corrupted: s.paths.iter().any(|w| w.corrupt > 0.0),
            datagrams_left: s.datagrams[station],
            pings_left: s.pings[station],
            sent: 0,
            next_at: Instant::ZERO,
            draw: Draw::new(s.seed ^ 0xdada ^ station as u64),
        })
    }

    /// When the next one goes.
    pub fn deadline(&self) -> Option<Instant> {
        (self.datagrams_left + self.pings_left > 0).then_some(self.next_at)
    }

    /// Takes what came and sends what is due.
    pub fn drive(&mut self, shard: &mut Shard, now: Instant) -> Result<(), Violation> {
        self.take_datagrams(shard)?;
        self.take_echoes(shard)?;
        if now < self.next_at {
            return Ok(());
        }
        self.next_at = now + Duration::from_micros(self.draw.log(1, 200_000));
        if self.datagrams_left > 0 {
            self.datagrams_left -= 1;
            self.send_datagram(shard, now)?;
        }
        if self.pings_left > 0 {
            self.pings_left -= 1;
            self.send_ping(shard, now)?;
        }
        Ok(())
    }

    fn send_datagram(&mut self, shard: &mut Shard, now: Instant) -> Result<(), Violation> {
        let len = self.draw.below(self.mtu as u64 + 50) as usize;
        let number = self.sent;
        self.sent += 1;
        let (header, body) = datagram(self.station, number, len);
        // To a closed port, now and then: an error comes back, or not.
        let mut to = self.to;
        if self.draw.percent(10) {
            to.set_port(9);
        }
        match shard.udp().send(now, self.udp, &[&header, body], Some(to)) {
            Err(
                e @ (SocketError::BadHandle | SocketError::Invalid | SocketError::NotSupported),
            ) => Err(Violation::Call("udp_send", e)),
            _ => Ok(()),
        }
    }

    fn take_datagrams(&mut self, shard: &mut Shard) -> Result<(), Violation> {
        loop {
            match shard.udp().receive(self.udp) {
                Ok(Poll::Ready(d)) => {
                    let bytes = d.payload.to_vec();
                    shard.free(d.payload);
                    self.check_datagram(&bytes)?;
                }
                Ok(_) | Err(SocketError::NetworkDown) => return Ok(()),
                Err(SocketError::BadHandle) => {
                    return Err(unexpected("udp_receive")(SocketError::BadHandle));
                }
                // An error of an earlier datagram, told once.
                Err(_) => {}
            }
        }
    }

    fn check_datagram(&self, bytes: &[u8]) -> Result<(), Violation> {
        let forged = |why: &str| {
            let of_peer = |n| {
                let len = bytes.len().checked_sub(HEADER_BYTES)?;
                let (header, body) = datagram(1 - self.station, n, len);
                Some([&header, body].concat())
            };
            if self.is_corrupted
                && (0..MOST_SENT).filter_map(of_peer).any(|s| passes_for(bytes, &s))
            {
                return Ok(());
            }
            Err(Violation::ForgedDatagram(format!("{why}: {} bytes", bytes.len())))
        };
        let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return forged("short");
        };
        let [n0, n1, n2, n3, l0, l1, l2, l3] = *header;
        let number = u32::from_be_bytes([n0, n1, n2, n3]);
        if u32::from_be_bytes([l0, l1, l2, l3]) as usize != body.len() {
            return forged("of another length");
        }
        let stream = DATAGRAM_STREAM + 1 - self.station as u64;
        match pattern::first_difference(stream, u64::from(number) * 31, body) {
            None => Ok(()),
            Some(_) => forged("changed"),
        }
    }

    fn send_ping(&mut self, shard: &mut Shard, now: Instant) -> Result<(), Violation> {
        let len = self.draw.below(1200.min(self.mtu as u64 - 100)) as usize;
        let seq = self.pings_left as u16;
        let body = pattern::piece(ECHO_STREAM, u64::from(seq), len);
        match shard.icmp().send_request(now, self.ping, self.to, seq, body) {
            Err(e @ SocketError::BadHandle) => Err(Violation::Call("ping_send", e)),
            _ => Ok(()),
        }
    }

    fn take_echoes(&mut self, shard: &mut Shard) -> Result<(), Violation> {
        while let Ok(Poll::Ready(echo)) = shard.icmp().receive_reply(self.ping) {
            let Ok(chain) = echo.outcome else { continue };
            let bytes = chain.to_vec();
            shard.free(chain);
            let sent = pattern::piece(ECHO_STREAM, u64::from(echo.seq), bytes.len());
            if bytes != sent && !(self.echoes_are_corrupted && passes_for(&bytes, sent)) {
                return Err(Violation::ForgedDatagram(format!("echo {} changed", echo.seq)));
            }
        }
        Ok(())
    }

    /// Closes the sockets.
    pub fn close(&mut self, shard: &mut Shard, now: Instant) {
        shard.close(now, self.udp);
        shard.close(now, self.ping);
        (self.datagrams_left, self.pings_left) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flips_that_cancel_each_other_in_the_checksum_are_excused() {
        let (_, sent) = datagram(0, 3, 1000);
        let with = |flips: &[(usize, u8)]| {
            let mut got = sent.to_vec();
            flips.iter().for_each(|(at, bit)| got[*at] ^= bit);
            passes_for(&got, sent)
        };
        let byte_with = |is_set: bool| {
            (0..500).map(|n| 2 * n).find(|at| (sent[*at] & 4 != 0) == is_set).expect("one of many")
        };
        let (set, cleared) = (byte_with(true), byte_with(false));
        assert!(with(&[(set, 4), (cleared, 4)]));
        assert!(!with(&[(set, 4)]) && !with(&[(set, 4), (cleared, 8)]) && !with(&[]));
        // Another weight within the 16-bit word.
        assert!(!with(&[(set, 4), (cleared + 1, 4)]));
        assert!(!passes_for(&sent[1..], sent));
    }
}
