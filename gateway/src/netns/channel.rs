//! A netlink socket, on which each request is answered before the next one is sent.
//!
//! Source: netlink(7).

use std::io;

use netlink_packet_core::{
    NLM_F_REQUEST, NetlinkBuffer, NetlinkDeserializable, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

/// The first message type of a family's own objects; lower types are netlink's control messages (linux/netlink.h).
const NLMSG_MIN_TYPE: u16 = 16;
const HEADER_BYTES: usize = 16;

/// A socket of one netlink family.
pub(crate) struct Channel {
    socket: Socket,
    sequence: u32,
}

impl Channel {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open(protocol: isize) -> io::Result<Channel> {
        let socket = Socket::new(protocol)?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Channel { socket, sequence: 0 })
    }

    /// Sends a request.
    pub(super) fn send<M: NetlinkSerializable>(&mut self, message: M, flags: u16) -> io::Result<()>
    where
        NetlinkPayload<M>: From<M>,
    {
        let mut request = NetlinkMessage::from(message);
        request.header.flags = flags;
        request.finalize();
        self.send_message(request)
    }

    /// Sends a request of another type than its contents have by themselves.
    pub(crate) fn send_as<M: NetlinkSerializable>(
        &mut self,
        kind: u16,
        message: M,
        flags: u16,
    ) -> io::Result<()>
    where
        NetlinkPayload<M>: From<M>,
    {
        let mut request = NetlinkMessage::from(message);
        request.header.flags = flags;
        request.finalize();
        request.header.message_type = kind;
        self.send_message(request)
    }

    fn send_message<M: NetlinkSerializable>(
        &mut self,
        mut request: NetlinkMessage<M>,
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        request.header.flags |= NLM_F_REQUEST;
        request.header.sequence_number = self.sequence;
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map(drop)
    }

    /// Receives messages until the acknowledgement, the end of the dump, or an error.
    pub(super) fn receive<M: NetlinkDeserializable>(
        &self,
        mut on_object: impl FnMut(M),
    ) -> io::Result<()> {
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let header = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
                let length = (header.length() as usize).max(HEADER_BYTES);
                let message = NetlinkMessage::<M>::deserialize(rest);
                let is_object = header.message_type() >= NLMSG_MIN_TYPE;
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                let message = match message {
                    Ok(message) => message,
                    // One object among many with an attribute that the library does not understand.
                    Err(_) if is_object => continue,
                    Err(e) => return Err(io::Error::other(e)),
                };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::Error(e) if e.code.is_some() => return Err(e.to_io()),
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::InnerMessage(object) => on_object(object),
                    _ => {}
                }
            }
        }
    }
}
