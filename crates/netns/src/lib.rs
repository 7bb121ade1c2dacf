//! Network namespaces and what stands in them, all of it gone when the last process or descriptor
//! that holds it is gone: nothing is ever mounted, named or made persistent.
//!
//! [`enter`] moves the whole program into namespaces of its own: as root a network namespace, as
//! anybody else a user namespace too, in which it then is root. [`Netns::new`] makes one more
//! beside it, held by a descriptor. A namespace is a property of a *thread*; [`Netns::run`] does
//! one thing in another namespace on a thread that ends with it. Sockets and TAP descriptors stay
//! in the namespace where they were opened, whoever uses them.
//!
//! Sources: user_namespaces(7), network_namespaces(7).

#![deny(unsafe_code)]

mod netlink;
mod sys;

pub use netlink::{Netlink, VethEnd};

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// A set-up step that failed: what it was, and what the system said.
pub fn context<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|e| io::Error::new(e.kind(), format!("{what}: {e}")))
}

/// Moves this process into a network namespace of its own, with `lo` up.
///
/// # Errors
/// The process has more than one thread and is not root (EINVAL), or the system forbids
/// unprivileged user namespaces (EPERM, ENOSPC).
pub fn enter() -> io::Result<()> {
    let (uid, gid) = sys::effective_ids();
    if sys::unshare(libc::CLONE_NEWNET).is_err() {
        let both = sys::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET);
        context("cannot make a user and network namespace (unshare)", both)?;
        context("setgroups", fs::write("/proc/self/setgroups", "deny"))?;
        context("uid_map", fs::write("/proc/self/uid_map", format!("0 {uid} 1")))?;
        context("gid_map", fs::write("/proc/self/gid_map", format!("0 {gid} 1")))?;
    }
    loopback_up()
}

fn loopback_up() -> io::Result<()> {
    context("bring lo up", Netlink::open().and_then(|mut n| n.set_up(sys::if_index(c"lo")?)))
}

/// A network namespace, alive while this value or a process in it is.
#[derive(Debug)]
pub struct Netns(OwnedFd);

impl Netns {
    /// The namespace of the calling thread.
    pub fn current() -> io::Result<Netns> {
        Ok(Netns(File::open("/proc/thread-self/ns/net")?.into()))
    }

    /// A fresh namespace with `lo` up. Needs root in the current user namespace: see [`enter`].
    pub fn new() -> io::Result<Netns> {
        let made = on_own_thread(|| {
            sys::unshare(libc::CLONE_NEWNET)?;
            loopback_up()?;
            Netns::current()
        });
        context("cannot make a network namespace", made)
    }

    /// Does `work` on a thread in this namespace and returns what it returned.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        on_own_thread(|| {
            sys::enter_netns(self.0.as_fd())?;
            work()
        })
    }

    /// The descriptor, for `setns` in a child.
    pub fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// A netlink socket of this namespace.
    pub fn netlink(&self) -> io::Result<Netlink> {
        self.run(Netlink::open)
    }

    /// The index of an interface of this namespace.
    pub fn if_index(&self, name: &str) -> io::Result<u32> {
        let name = CString::new(name)?;
        context("find the interface", self.run(|| sys::if_index(&name)))
    }

    /// Gives an interface an address and brings it up.
    pub fn set_address(&self, name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
        let index = self.if_index(name)?;
        let mut netlink = self.netlink()?;
        context("set the address", netlink.add_address(index, address, prefix))?;
        context("bring the interface up", netlink.set_up(index))
    }

    /// Brings an interface up without an address.
    pub fn set_up(&self, name: &str) -> io::Result<()> {
        let index = self.if_index(name)?;
        context("bring the interface up", self.netlink()?.set_up(index))
    }

    /// Joins this namespace and `other` by a veth pair, both ends still down.
    pub fn add_veth(&self, near: &VethEnd<'_>, other: &Netns, far: &VethEnd<'_>) -> io::Result<()> {
        context("make a veth pair", self.netlink()?.add_veth(near, far, other.0.as_fd()))
    }

    /// Switches segmentation, receive coalescing and transmit checksum offload of an interface.
    pub fn set_offloads(&self, name: &str, on: bool) -> io::Result<()> {
        /// ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO, ETHTOOL_STXCSUM (linux/ethtool.h): in this
        /// order, because segmentation depends on the checksum.
        const COMMANDS: [u32; 4] = [0x1f, 0x24, 0x2c, 0x17];
        let name = CString::new(name)?;
        self.run(|| {
            let socket = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
            COMMANDS
                .iter()
                .try_for_each(|&c| sys::ethtool_set(socket.as_fd(), &name, c, u32::from(on)))
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Does `work` on a thread that ends with it.
pub fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the helper thread panicked")))
    })
}
