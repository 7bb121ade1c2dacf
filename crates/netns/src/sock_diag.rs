//! Which ports the programs of a namespace have opened.
//!
//! The kernel is asked for sockets in one state and walks the tables of these alone, where a file of `/proc/net`
//! lists every connection.
//!
//! Source: sock_diag(7).

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::channel::Channel;

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
    /// Those of netlink. A kernel without IPv6 is no error.
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
        let request = InetRequest {
            family,
            protocol: self.protocol,
            extensions: ExtensionFlags::empty(),
            states: self.state.clone(),
            socket_id,
        };
        self.channel.send(SockDiagMessage::InetRequest(request), NLM_F_DUMP)?;
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
