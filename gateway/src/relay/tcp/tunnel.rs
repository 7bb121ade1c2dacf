//! The tunnel through a proxy ([`upstream`](crate::upstream)), which is opened before the guest's SYN is answered.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use crate::upstream::{Handshake, Step, Target, Upstream};

/// Most bytes of an answer that are looked at.
const MOST_ANSWER_BYTES: usize = 16 << 10;
/// Most answers that are read in one turn.
const MOST_STEPS: usize = 8;

/// A tunnel that is being opened.
pub(super) struct Tunnel {
    handshake: Handshake,
    /// Bytes that the proxy has not taken yet.
    unsent: Vec<u8>,
}

/// How a tunnel stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stands {
    Waits,
    Open,
    Refused,
}

impl Tunnel {
    pub(super) fn new(upstream: &Upstream, target: Target) -> Box<Tunnel> {
        let (handshake, unsent) = Handshake::begin(upstream, target);
        Box::new(Tunnel { handshake, unsent })
    }

    /// Exchanges what can be exchanged now over a connection to the proxy.
    pub(super) fn advance(&mut self, mut proxy: &TcpStream) -> Stands {
        for _ in 0..MOST_STEPS {
            while !self.unsent.is_empty() {
                match proxy.write(&self.unsent) {
                    Ok(n) => drop(self.unsent.drain(..n)),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return Stands::Waits,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return Stands::Refused,
                }
            }
            // The bytes behind the answer stay in the socket.
            let mut bytes = [0; MOST_ANSWER_BYTES];
            let came = match proxy.peek(&mut bytes) {
                Ok(0) => return Stands::Refused,
                Ok(n) => bytes.get(..n).unwrap_or_default(),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Stands::Waits,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Stands::Refused,
            };
            let (consumed, step) = self.handshake.read(came);
            let mut taken = vec![0; consumed];
            if proxy.read_exact(&mut taken).is_err() {
                return Stands::Refused;
            }
            match step {
                Step::Send(next) => self.unsent = next,
                Step::Read => return Stands::Waits,
                Step::Done => return Stands::Open,
                Step::Refused => return Stands::Refused,
            }
        }
        Stands::Refused
    }
}
