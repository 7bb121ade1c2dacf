//! Several packet sockets on one interface, among which the kernel deals out what it receives.
//!
//! A frame comes to one socket of the group (packet(7), PACKET_FANOUT): by a program that computes its
//! owner where this process may load one, else by the kernel's own hash of the flow, which does not know
//! who owns what. The group goes with its sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use fulmar_base::OwnerKey;

use super::{PacketConfig, PacketSocket};
use crate::{OpenError, steering, sys};

// linux/if_packet.h.
const BY_HASH: u32 = 0;
const BY_PROGRAM: u32 = 7;
/// A number that no other group of the network namespace has.
const NEW_GROUP: u32 = 0x2000;
/// What the kernel itself sends on the interface is not for the group.
const IGNORE_OUTGOING: u32 = 0x4000;

/// What a group is joined with: how it deals out and what not, and its number once it has one.
#[derive(Clone, Copy)]
struct Group {
    kind: u32,
    left_out: u32,
    number: Option<u16>,
}

impl PacketSocket {
    /// Opens so many sockets on one interface, each a device for a shard of its own.
    ///
    /// Where this process may load a program for the kernel (CAP_BPF), the kernel gives each frame to the
    /// socket of the shard that owns its flow. Elsewhere all frames of a flow come to one socket, but not
    /// that of its owner; shards hand over what they get of others.
    /// [`fulmar_netdev::DeviceStats::path`] says which it is.
    ///
    /// # Errors
    /// As [`PacketSocket::open`].
    pub fn open_queues(config: &PacketConfig, queues: u16) -> Result<Vec<PacketSocket>, OpenError> {
        if queues < 2 {
            return Ok(vec![PacketSocket::open(config)?]);
        }
        // The key comes with the stack; until then all frames come to the first socket.
        let no_key = OwnerKey::new([0; OwnerKey::WORDS]);
        let program = sys::load_socket_program(&steering::group_program(queues, &no_key));
        let kind = if program.is_ok() { BY_PROGRAM } else { BY_HASH };
        let mut group = Group { kind, left_out: IGNORE_OUTGOING, number: None };
        let mut sockets = Vec::with_capacity(usize::from(queues));
        for _ in 0..queues {
            let mut socket = PacketSocket::open(config)?;
            let joined = group.join(socket.socket.as_fd(), program.as_ref().ok().map(AsFd::as_fd));
            joined.map_err(|e| {
                let what = format!("cannot share the frames of {} among sockets", config.interface);
                OpenError::new(what, e, "Linux 4.12 or newer is needed; or use one queue")
            })?;
            socket.caps.queues = queues;
            sockets.push(socket);
        }
        if let (Ok(_), Some(first)) = (&program, sockets.first_mut()) {
            first.steered = Some(queues);
        }
        let steered = match program {
            Ok(_) => "to the owner of each flow".to_owned(),
            Err(e) => format!(
                "by the kernel's hash, since the kernel refuses a program ({e}): to steer by owner run as \
                 root, or with CAP_BPF"
            ),
        };
        for socket in &mut sockets {
            socket.stats.path.push_str("; steered ");
            socket.stats.path.push_str(&steered);
        }
        Ok(sockets)
    }

    /// Gives the group the program with a key, in place of the one that it has.
    pub(super) fn steer(&self, queues: u16, key: &OwnerKey) -> io::Result<()> {
        let program = sys::load_socket_program(&steering::group_program(queues, key))?;
        let (socket, program) = (self.socket.as_fd(), program.as_raw_fd());
        sys::set_int(socket, libc::SOL_PACKET, sys::PACKET_FANOUT_DATA, program)
    }
}

impl Group {
    /// Makes a socket, which is bound, the next one of the group; the first one makes the group.
    fn join(&mut self, socket: BorrowedFd<'_>, program: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let set = |name, value| sys::set_int(socket, libc::SOL_PACKET, name, value);
        let mut joined = set(sys::PACKET_FANOUT, self.terms());
        if joined.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            // An older kernel: what it sends itself comes as well, and is dropped as not for us.
            self.left_out = 0;
            joined = set(sys::PACKET_FANOUT, self.terms());
        }
        joined?;
        if self.number.is_some() {
            return Ok(());
        }
        self.number = Some(sys::get_int(socket, libc::SOL_PACKET, sys::PACKET_FANOUT)? as u16);
        match program {
            Some(program) => set(sys::PACKET_FANOUT_DATA, program.as_raw_fd()),
            None => Ok(()),
        }
    }

    /// The value of the option.
    fn terms(&self) -> libc::c_int {
        let is_new = if self.number.is_none() { NEW_GROUP } else { 0 };
        let number = u32::from(self.number.unwrap_or(0));
        ((self.kind | is_new | self.left_out) << 16 | number) as libc::c_int
    }
}
