//! A fanout group: several packet sockets on one interface, over which the kernel distributes received frames.
//!
//! Each frame is delivered to one socket of the group (packet(7), PACKET_FANOUT): by a BPF program that computes the
//! owner of its flow, if this process may load one, else by the kernel's flow hash, which differs from the stack's. The
//! group ends with its last socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use fulmar_stack::base::OwnerKey;

use super::{PacketConfig, PacketSocket};
use crate::drivers::{OpenError, steering, sys};

// linux/if_packet.h.
const BY_HASH: u32 = 0;
const BY_PROGRAM: u32 = 7;
/// The kernel chooses an unused group number (PACKET_FANOUT_FLAG_UNIQUEID).
const NEW_GROUP: u32 = 0x2000;
/// Frames that the kernel sends are not delivered to the group (PACKET_FANOUT_FLAG_IGNORE_OUTGOING).
const IGNORE_OUTGOING: u32 = 0x4000;

/// The parameters of PACKET_FANOUT.
#[derive(Clone, Copy)]
struct Group {
    /// How frames are distributed.
    kind: u32,
    flags: u32,
    /// The group number, once the first socket has created the group.
    number: Option<u16>,
}

impl PacketSocket {
    /// Opens `queues` sockets on one interface, each the device of one shard.
    ///
    /// Where this process may load a BPF program (CAP_BPF), the kernel delivers each frame to the socket of the shard
    /// that owns its flow. Without it all frames of a flow are delivered to one socket, in general not that of the
    /// owner, and shards hand over misdirected packets. [`DeviceStats::path`](fulmar_stack::device::DeviceStats::path)
    /// reports which of the two is in use.
    ///
    /// # Errors
    /// As [`PacketSocket::open`].
    pub fn open_queues(config: &PacketConfig, queues: u16) -> Result<Vec<PacketSocket>, OpenError> {
        if queues < 2 {
            return Ok(vec![PacketSocket::open(config)?]);
        }
        // The key is set when a stack attaches; until then all frames are delivered to the first socket.
        let no_key = OwnerKey::new([0; OwnerKey::WORDS]);
        let program = sys::load_socket_program(&steering::group_program(queues, &no_key));
        let kind = if program.is_ok() { BY_PROGRAM } else { BY_HASH };
        let mut group = Group { kind, flags: IGNORE_OUTGOING, number: None };
        let mut claim = config.claim()?;
        let mut sockets = Vec::with_capacity(usize::from(queues));
        for _ in 0..queues {
            let mut socket = PacketSocket::open_shared(config)?;
            socket.claim = claim.take();
            let joined = group.join(socket.socket.as_fd(), program.as_ref().ok().map(AsFd::as_fd));
            joined.map_err(|e| {
                let what = format!("cannot share the frames of {} among sockets", config.interface);
                OpenError::new(what, e, "Linux 4.12 or newer is required; or use one queue")
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
                "by the kernel's hash, because the kernel rejects the BPF program ({e}): to steer to owners, run as \
                 root or with CAP_BPF"
            ),
        };
        for socket in &mut sockets {
            socket.stats.path.push_str("; steered ");
            socket.stats.path.push_str(&steered);
        }
        Ok(sockets)
    }

    /// Replaces the program of the group by one with this key.
    pub(super) fn steer(&self, queues: u16, key: &OwnerKey) -> io::Result<()> {
        let program = sys::load_socket_program(&steering::group_program(queues, key))?;
        let (socket, program) = (self.socket.as_fd(), program.as_raw_fd());
        sys::set_int(socket, libc::SOL_PACKET, sys::PACKET_FANOUT_DATA, program)
    }
}

impl Group {
    /// Adds a bound socket to the group. The first socket creates it.
    fn join(&mut self, socket: BorrowedFd<'_>, program: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let set = |name, value| sys::set_int(socket, libc::SOL_PACKET, name, value);
        let mut joined = set(sys::PACKET_FANOUT, self.option());
        if joined.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            // An older kernel delivers the frames that it sends as well; the stack drops them as `NotForUs`.
            self.flags = 0;
            joined = set(sys::PACKET_FANOUT, self.option());
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
    fn option(&self) -> libc::c_int {
        let is_new = if self.number.is_none() { NEW_GROUP } else { 0 };
        let number = u32::from(self.number.unwrap_or(0));
        ((self.kind | is_new | self.flags) << 16 | number) as libc::c_int
    }
}
