//! What devices of tests share that put payload into posted buffers: which segment it is, and its parts.

use std::net::SocketAddr;

use fulmar_stack::base::{FlowKey, SeqNum};
use fulmar_stack::device::WritableRanges;
use fulmar_stack::mbuf::{Chain, Pool, Purpose};

/// What a device knows of a flow.
pub struct Expected {
    /// The flow.
    pub flow: FlowKey,
    /// The sequence number whose byte the first room is for.
    pub next: SeqNum,
    /// Where payload goes.
    pub rooms: WritableRanges,
}

impl Expected {
    /// Whether a segment of this flow with this number is the next one.
    pub fn is_next(&self, flow: FlowKey, seq: SeqNum) -> bool {
        self.flow == flow && self.next == seq
    }

    /// A frame of which the payload is in the rooms as far as they reach: headers, rooms, the rest.
    pub fn place(&mut self, frame: &[u8], headers: usize, pool: &mut Pool) -> Chain {
        let mut chain = copy(&frame[..headers], pool);
        let mut at = headers;
        while at < frame.len()
            && let Some(room) = self.rooms.front_mut()
        {
            let n = room.len().min(frame.len() - at);
            room.bytes()[..n].copy_from_slice(&frame[at..at + n]);
            chain.push_back(room.split(n, pool).expect("a descriptor"));
            at += n;
            if room.is_empty() {
                self.rooms.pop_front();
            }
        }
        self.next += (at - headers) as u32;
        if at < frame.len() {
            chain.append(copy(&frame[at..], pool));
        }
        chain
    }
}

/// Bytes in buffers of the pool.
pub fn copy(bytes: &[u8], pool: &mut Pool) -> Chain {
    let mut c = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).expect("memory");
    c.copy_from(0, bytes);
    c
}

/// Flow, sequence number and bytes of headers of a TCP segment over IPv4 that carries data and no flags but
/// ACK and PSH.
pub fn segment(frame: &[u8]) -> Option<(FlowKey, SeqNum, usize)> {
    let ip = frame.get(14..34).filter(|_| frame[12..14] == [8, 0])?;
    let tcp = frame.get(34..54).filter(|_| ip[9] == 6)?;
    let headers = 34 + usize::from(tcp[12] >> 4) * 4;
    let end = |at: usize, port: usize| -> SocketAddr {
        let a: [u8; 4] = ip[at..at + 4].try_into().expect("four bytes");
        (a, u16::from_be_bytes([tcp[port], tcp[port + 1]])).into()
    };
    let seq = SeqNum(u32::from_be_bytes(tcp[4..8].try_into().expect("four bytes")));
    let usual = tcp[13] & !0x18 == 0 && frame.len() > headers;
    usual.then(|| (FlowKey::new(end(16, 2), end(12, 0)), seq, headers))
}
