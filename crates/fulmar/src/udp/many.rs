//! Many datagrams in one call.

use std::io;

use fulmar_runtime::LockedShard;
use fulmar_shard::{PendingError, RecvMessage, SendMessage};
use fulmar_socket::Ready;

use crate::error::invalid;

use super::UdpSocket;

impl UdpSocket {
    /// Sends many datagrams: one lock for 64 of them, one crossing into the device per burst. Returns
    /// how many went; in order, the first ones. A socket that may wait does so for buffers and for a
    /// full device, never for the peer.
    ///
    /// Where the device cuts runs of datagrams itself (UDP segmentation), messages of equal size to the
    /// same destination that follow each other cross as one frame.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], if not even the first one went. An error of a later one ends the call
    /// with the count, and is met again by whoever repeats the call from there.
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

    /// Sends `buf` as datagrams of `segment_bytes` each to the connected peer, the last one with what is
    /// left, at most 128: Linux's UDP_SEGMENT. The device cuts them, or what stands before it in
    /// software. All go, or none; returns the length of `buf`.
    ///
    /// # Errors
    /// As [`UdpSocket::send`]; `InvalidInput` for more than 128 datagrams or a `segment_bytes` of 0 or
    /// above 65,535, `EMSGSIZE` if one does not fit the path's packets: runs are never fragmented.
    pub fn send_segmented(&self, buf: &[u8], segment_bytes: usize) -> io::Result<usize> {
        let segment = u16::try_from(segment_bytes).ok().filter(|n| *n > 0);
        let segment = segment.ok_or_else(|| {
            invalid(format!("a datagram of a run has from 1 to 65535 bytes, not {segment_bytes}"))
        })?;
        self.send_many(&[SendMessage::new(buf).segmented(segment)]).map(|_| buf.len())
    }

    /// Receives datagrams into `messages`: waits for the first one, and takes what else is there, all
    /// under one lock as long as they are small. Returns how many came; what does not fit its buffer is
    /// lost, and its message says so.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_many(&self, messages: &mut [RecvMessage<'_>]) -> io::Result<usize> {
        if messages.is_empty() {
            return Ok(0);
        }
        let s = &*self.socket;
        let mut take = |shard: &mut LockedShard, _| shard.udp().receive_many(s.id, messages);
        s.wait_coarse(Ready::READABLE, || s.read_limit(), &mut take)
    }
}
