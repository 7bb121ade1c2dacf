//! Changes of a network namespace, as rtnetlink tells them (rtnetlink(7), the multicast groups).
//!
//! The contents of a change are not read: after a change the follower reads the namespace anew. So it does not matter
//! which messages the kernel has dropped because they came too fast (ENOBUFS).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE (linux/rtnetlink.h).
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
/// Messages that are taken at once.
const MOST_MESSAGES: usize = 4096;

/// A socket that is readable when interfaces, addresses or routes have changed.
pub struct Changes(Socket);

impl Changes {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// Those of `socket` and `bind`.
    pub fn open() -> io::Result<Changes> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        socket.set_non_blocking(true)?;
        Ok(Changes(socket))
    }

    /// Takes the queued notifications. Returns whether there were any.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn take(&self) -> io::Result<bool> {
        let mut has_changed = false;
        for _ in 0..MOST_MESSAGES {
            // The rest of a message is dropped with it.
            let mut start = Vec::with_capacity(64);
            match self.0.recv(&mut start, 0) {
                Ok(_) => has_changed = true,
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => has_changed = true,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(has_changed)
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
