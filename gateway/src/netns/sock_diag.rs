//! Which ports the programs of a namespace have opened, and the end of their connections.
//!
//! The kernel is asked for sockets in one state and walks the tables of these alone, where a file of `/proc/net`
//! lists every connection.
//!
//! Sources: sock_diag(7); include/uapi/linux/sock_diag.h (SOCK_DESTROY), which ss(8) uses for `ss -K`.

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::netns::channel::Channel;

/// The open ports of one transport in one namespace.
pub struct OpenPorts {
    channel: Channel,
    protocol: u8,
    state: StateFlags,
}

impl OpenPorts {
    /// Ports with a TCP listener in the namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel was built without `sock_diag` for TCP, or without netlink.
    pub fn tcp() -> io::Result<OpenPorts> {
        OpenPorts::of(IPPROTO_TCP, StateFlags::LISTEN)
    }

    /// Ports with a UDP socket that is not connected, in the namespace of the calling thread.
    ///
    /// # Errors
    /// As [`OpenPorts::tcp`].
    pub fn udp() -> io::Result<OpenPorts> {
        OpenPorts::of(IPPROTO_UDP, StateFlags::CLOSE)
    }

    fn of(protocol: u8, state: StateFlags) -> io::Result<OpenPorts> {
        let channel = Channel::open(NETLINK_SOCK_DIAG)?;
        let mut ports = OpenPorts { channel, protocol, state };
        ports.list()?;
        Ok(ports)
    }

    /// The ports, of both IP versions.
    ///
    /// # Errors
    /// The errors of netlink. A kernel without IPv6 is not an error.
    pub fn list(&mut self) -> io::Result<BTreeSet<u16>> {
        let mut ports = BTreeSet::new();
        self.list_family(AF_INET, SocketId::new_v4(), &mut ports)?;
        match self.list_family(AF_INET6, SocketId::new_v6(), &mut ports) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
        Ok(ports)
    }

    fn list_family(
        &mut self,
        family: u8,
        socket_id: SocketId,
        ports: &mut BTreeSet<u16>,
    ) -> io::Result<()> {
        let request = request(family, self.protocol, self.state.clone(), socket_id);
        self.channel.send(request, NLM_F_DUMP)?;
        self.channel.receive(|answer| {
            if let SockDiagMessage::InetResponse(socket) = answer {
                ports.insert(socket.header.socket_id.source_port);
            }
        })?;
        // A UDP socket that is not bound.
        ports.remove(&0);
        Ok(())
    }
}

fn request(family: u8, protocol: u8, states: StateFlags, socket_id: SocketId) -> SockDiagMessage {
    let extensions = ExtensionFlags::empty();
    SockDiagMessage::InetRequest(InetRequest { family, protocol, extensions, states, socket_id })
}

/// SOCK_DESTROY of linux/sock_diag.h.
const SOCK_DESTROY: u16 = 21;

/// Aborts the TCP connections between the calling thread's namespace and others, those included that are not answered
/// yet: a program that reads, writes or connects hears ECONNABORTED. Those within the namespace stay. Returns how many
/// there were.
///
/// # Errors
/// Those of netlink: a kernel without CONFIG_INET_DIAG_DESTROY (EOPNOTSUPP), no CAP_NET_ADMIN in the namespace (EPERM).
pub fn abort_connections() -> io::Result<usize> {
    let mut channel = Channel::open(NETLINK_SOCK_DIAG)?;
    let mut outside = Vec::new();
    for (family, any) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        let states = StateFlags::all() - StateFlags::LISTEN - StateFlags::TIME_WAIT;
        channel.send(request(family, IPPROTO_TCP, states, any), NLM_F_DUMP)?;
        let listed = channel.receive(|answer| {
            if let SockDiagMessage::InetResponse(socket) = answer
                && is_external(&socket.header.socket_id)
            {
                outside.push((family, socket.header.socket_id.clone()));
            }
        });
        match listed {
            Err(e) if e.kind() == io::ErrorKind::NotFound && family == AF_INET6 => {}
            done => done?,
        }
    }
    let (mut aborted, mut refused) = (0, None);
    for (family, id) in outside {
        let one = request(family, IPPROTO_TCP, StateFlags::all(), id);
        channel.send_as(SOCK_DESTROY, one, NLM_F_ACK)?;
        match channel.receive(|_: SockDiagMessage| ()) {
            Ok(()) => aborted += 1,
            // It has ended meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            // The others are not kept waiting for it.
            Err(e) => refused = refused.or(Some(e)),
        }
    }
    refused.map_or(Ok(aborted), Err)
}

/// Whether a connection is one with another namespace.
fn is_external(id: &SocketId) -> bool {
    let peer = id.destination_address.to_canonical();
    id.destination_port != 0 && !peer.is_loopback() && id.destination_address != id.source_address
}
