//! Many datagrams in one call.

use std::io;

use crate::runtime::WatchedShard;
use fulmar_stack::shard::{PendingError, RecvMessage, SendMessage};
use fulmar_stack::socket::Ready;

use crate::api::error::invalid;
use crate::api::udp::UdpSocket;

impl UdpSocket {
    /// Sends datagrams in order, with one lock for 64 of them and one crossing into the device per burst (sendmmsg(2)).
    /// Returns how many were sent. A blocking socket waits for buffers and for a full device, never for the peer.
    ///
    /// On a device with UDP GSO consecutive messages of equal size to one destination cross as one frame.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], about the first message. An error of a later one ends the call, which returns the
    /// count; the next call, from that message on, returns the error.
    pub fn send_many(&self, messages: &[SendMessage<'_>]) -> io::Result<usize> {
        let socket = &self.socket;
        let mut done = 0;
        while let Some(rest) = messages.get(done..).filter(|rest| !rest.is_empty()) {
            let error = if done == 0 { PendingError::Return } else { PendingError::Leave };
            let sent = socket.wait_coarse(
                Ready::WRITABLE,
                || socket.write_limit(),
                |shard, now| shard.udp().send_many(now, socket.id, rest, error),
            );
            match sent {
                Ok(sent) => {
                    done += sent.messages;
                    if sent.is_over {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Sends `buf` to the connected peer as at most 128 datagrams of `segment_bytes` each, the last one with the
    /// remainder (Linux: UDP_SEGMENT). The device segments them, or the stack in software. All are sent, or none;
    /// returns the length of `buf`.
    ///
    /// # Errors
    /// As [`UdpSocket::send`]; `InvalidInput` for more than 128 datagrams or a `segment_bytes` of 0 or
    /// above 65,535, `EMSGSIZE` if one exceeds the path MTU: they are never fragmented.
    pub fn send_segmented(&self, buf: &[u8], segment_bytes: usize) -> io::Result<usize> {
        let segment = u16::try_from(segment_bytes).ok().filter(|n| *n > 0);
        let segment = segment.ok_or_else(|| {
            invalid(format!("invalid segment size {segment_bytes}: expected 1-65535"))
        })?;
        self.send_many(&[SendMessage::new(buf).segmented(segment)]).map(|_| buf.len())
    }

    /// Receives datagrams into `messages`: waits for the first one, and takes the others that are queued, small ones
    /// under one lock (recvmmsg(2)). Returns the number of datagrams. Bytes that do not fit a buffer are lost, and its
    /// message reports that.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_many(&self, messages: &mut [RecvMessage<'_>]) -> io::Result<usize> {
        if messages.is_empty() {
            return Ok(0);
        }
        let s = &*self.socket;
        let mut take = |shard: &mut WatchedShard, _| shard.udp().receive_many(s.id, messages);
        s.wait_coarse(Ready::READABLE, || s.read_limit(), &mut take)
    }
}
