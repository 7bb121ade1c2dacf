//! Network namespaces and their interfaces, all of them gone with the last process or descriptor that
//! holds them: nothing is ever mounted, named or made persistent.
//!
//! [`enter`] moves the whole program into namespaces of its own: as root a network namespace, as anybody else a user
//! namespace too, in which it then is root. [`Netns::new`] makes another namespace, held by a descriptor. A namespace
//! is a property of a *thread*; [`Netns::run`] does one thing in another namespace on a thread that ends with it.
//! Sockets and TAP descriptors stay in the namespace where they were opened, whichever thread uses them.
//!
//! Sources: user_namespaces(7), network_namespaces(7).

#![deny(unsafe_code)]

mod changes;
mod channel;
mod netlink;
mod route;
mod sock_diag;
mod sys;

pub use changes::Changes;
pub use netlink::{Address, Interface, Netlink, VethEnd};
pub use route::{NextHop, Route};
pub use sock_diag::{OpenPorts, abort_connections};
pub(crate) use sys::clone_mount;
pub(crate) use sys::move_mount;
pub use sys::{copy_descriptor, pidfd_open};

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Gid, Uid, getegid, geteuid, setgroups, setresgid, setresuid};

/// Advice if the system forbids [`enter`] and [`enter_with_mounts`]: the end of an error message.
pub const HOW_TO_ALLOW: &str = "allow it with `sysctl user.max_user_namespaces=10000`, on Ubuntu with `sysctl \
     kernel.apparmor_restrict_unprivileged_userns=0`, on Debian before 11 with `sysctl \
     kernel.unprivileged_userns_clone=1`, in a container with `--security-opt seccomp=unconfined`, or run as root";

/// Prefixes an error with the step that failed.
pub fn context<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|e| io::Error::new(e.kind(), format!("{what}: {e}")))
}

/// Moves this process into a network namespace of its own, with `lo` up.
///
/// # Errors
/// The process has more than one thread and is not root (EINVAL), or the system forbids
/// unprivileged user namespaces (EPERM, ENOSPC).
pub fn enter() -> io::Result<()> {
    if unshare(CloneFlags::CLONE_NEWNET).is_err() {
        unshare_as(User::Root, CloneFlags::CLONE_NEWNET)?;
    }
    loopback_up()
}

/// The caller's identity in a user namespace made by [`enter_with_mounts`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "a user namespace has these two")]
pub enum User {
    /// uid and gid 0.
    Root,
    /// The uid and gid that it has outside.
    Same,
}

const WITH_MOUNTS: CloneFlags = CloneFlags::CLONE_NEWNET.union(CloneFlags::CLONE_NEWNS);

/// As [`enter`], with a mount namespace, too, whose mounts are private. Returns whether that took a user namespace:
/// without CAP_SYS_ADMIN the process gets one, and all capabilities in it until it executes a program.
///
/// # Errors
/// As [`enter`].
pub fn enter_with_mounts(user: User) -> io::Result<bool> {
    let has_user_namespace = unshare(WITH_MOUNTS).is_err();
    if has_user_namespace {
        unshare_as(user, WITH_MOUNTS)?;
    }
    private_mounts()?;
    Ok(has_user_namespace)
}

/// As [`enter_with_mounts`], in a user namespace in any case: root outside has no rights over the caller's namespaces
/// any more.
///
/// # Errors
/// As [`enter`].
pub fn enter_user_with_mounts(user: User) -> io::Result<()> {
    unshare_as(user, WITH_MOUNTS)?;
    private_mounts()
}

fn private_mounts() -> io::Result<()> {
    // Mounts from here on stay in this namespace.
    let private =
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>);
    context("cannot make the mounts private", private.map_err(Into::into))?;
    loopback_up()
}

/// Moves this process into a user namespace, in which the caller is `user`, and into namespaces of these kinds that
/// belong to it (user_namespaces(7)).
fn unshare_as(user: User, kinds: CloneFlags) -> io::Result<()> {
    // Before the call: after it both are the overflow ids.
    let (uid, gid) = (geteuid(), getegid());
    let made = unshare(CloneFlags::CLONE_NEWUSER | kinds);
    context("cannot create a user and network namespace (unshare)", made.map_err(Into::into))?;
    let (inner_uid, inner_gid) = match user {
        User::Root => (0, 0),
        User::Same => (uid.as_raw(), gid.as_raw()),
    };
    for (file, text) in [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("{inner_uid} {uid} 1")),
        ("/proc/self/gid_map", format!("{inner_gid} {gid} 1")),
    ] {
        context(&format!("cannot write {file}"), fs::write(file, text))?;
    }
    Ok(())
}

/// The id by which a user namespace shows those that it does not map (/proc/sys/kernel/overflowuid).
const UNMAPPED: u32 = 65_534;

/// Joins the user namespace behind a path such as `/proc/PID/ns/user`, with all capabilities in it. Does nothing
/// if the process is in it already.
///
/// # Errors
/// The process has more than one thread (EINVAL), or the namespace is not one of this user (EPERM).
pub fn enter_user_namespace(path: &Path) -> io::Result<()> {
    match other_user_namespace(path)? {
        Some(there) => Ok(setns(there, CloneFlags::CLONE_NEWUSER)?),
        None => Ok(()),
    }
}

/// As [`enter_user_namespace`], for a process that starts a program there: only a namespace that this user has made.
/// Its owner may trace the program (ptrace(2), "Ptrace access mode checking"), which is still this user's outside.
///
/// # Errors
/// As [`enter_user_namespace`]; PermissionDenied with a sentence: another user has made it.
pub fn enter_own_user_namespace(path: &Path) -> io::Result<()> {
    let Some(there) = other_user_namespace(path)? else { return Ok(()) };
    let (owner, own) = (sys::namespace_owner(there.as_fd())?, geteuid());
    if owner != own.as_raw() {
        let what = format!(
            "it belongs to user {owner}, who could trace processes started in it; join it as that user"
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    setns(there, CloneFlags::CLONE_NEWUSER)?;
    if geteuid().as_raw() == UNMAPPED {
        // A namespace of other ids: its root may trace the programs that are started in it, so they are started as that
        // root.
        let _ = setgroups(&[]);
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
    }
    Ok(())
}

/// A user namespace, unless the process is in it already.
fn other_user_namespace(path: &Path) -> io::Result<Option<File>> {
    let (there, here) = (File::open(path)?, File::open("/proc/self/ns/user")?);
    let (of_there, of_here) = (there.metadata()?, here.metadata()?);
    let is_here = (of_there.dev(), of_there.ino()) == (of_here.dev(), of_here.ino());
    Ok((!is_here).then_some(there))
}

/// Brings `lo` of the calling thread's namespace up.
///
/// # Errors
/// No CAP_NET_ADMIN there (EPERM).
pub fn loopback_up() -> io::Result<()> {
    context("cannot bring up lo", Netlink::open().and_then(|mut n| n.set_up(if_nametoindex("lo")?)))
}

/// A network namespace, alive while this value or a process in it is.
#[derive(Debug)]
pub struct Netns(OwnedFd);

impl Netns {
    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// No descriptor, or no `/proc`.
    pub fn current() -> io::Result<Netns> {
        Ok(Netns(File::open("/proc/thread-self/ns/net")?.into()))
    }

    /// Opens the namespace at a path: `/proc/PID/ns/net`, or a name of ip-netns(8) below `/run/netns`.
    ///
    /// # Errors
    /// The errors of `open`; InvalidInput if the file is not a network namespace.
    pub fn open(path: &Path) -> io::Result<Netns> {
        let file = File::open(path)?;
        let kind = sys::namespace_type(file.as_fd());
        if kind.ok() != Some(CloneFlags::CLONE_NEWNET) {
            let what = format!("{} is not a network namespace", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Netns(file.into()))
    }

    /// A fresh namespace with `lo` up.
    ///
    /// # Errors
    /// No CAP_SYS_ADMIN in the current user namespace (EPERM): see [`enter`].
    pub fn new() -> io::Result<Netns> {
        let made = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            loopback_up()?;
            Netns::current()
        });
        context("cannot create a network namespace", made)
    }

    /// Runs `work` on a thread in this namespace and returns its result.
    ///
    /// # Errors
    /// Those of `work`; no CAP_SYS_ADMIN in the namespace (EPERM); no thread.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        on_own_thread(|| {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            work()
        })
    }

    /// Moves the calling thread into this namespace.
    ///
    /// # Errors
    /// No rights there (EPERM).
    pub fn enter(&self) -> io::Result<()> {
        Ok(setns(&self.0, CloneFlags::CLONE_NEWNET)?)
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
    ///
    /// # Errors
    /// There is none of that name (ENODEV), or as [`Netns::run`].
    pub fn if_index(&self, name: &str) -> io::Result<u32> {
        context(
            &format!("cannot find the interface {name}"),
            self.run(|| Ok(if_nametoindex(name)?)),
        )
    }

    /// Gives an interface an address and brings it up.
    pub fn set_address(&self, name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
        let index = self.if_index(name)?;
        let mut netlink = self.netlink()?;
        context("cannot set the address", netlink.add_address(index, address, prefix))?;
        context("cannot bring up the interface", netlink.set_up(index))
    }

    /// Brings an interface up without an address.
    pub fn set_up(&self, name: &str) -> io::Result<()> {
        let index = self.if_index(name)?;
        context("cannot bring up the interface", self.netlink()?.set_up(index))
    }

    /// Brings an interface up that packet sockets alone hear: see `Netlink::set_silent`.
    pub fn set_up_silent(&self, name: &str) -> io::Result<()> {
        let index = self.if_index(name)?;
        let mut netlink = self.netlink()?;
        context(
            "cannot disable ARP and IPv6 address generation on the interface",
            netlink.set_silent(index),
        )?;
        context("cannot bring up the interface", netlink.set_up(index))
    }

    /// Joins this namespace and `other` by a veth pair, both ends still down.
    pub fn add_veth(&self, near: &VethEnd<'_>, other: &Netns, far: &VethEnd<'_>) -> io::Result<()> {
        context("cannot create a veth pair", self.netlink()?.add_veth(near, far, other.0.as_fd()))
    }

    /// Makes a bridge, still down and without ports.
    pub fn add_bridge(&self, name: &str, mac: [u8; 6]) -> io::Result<()> {
        context("cannot create a bridge", self.netlink()?.add_bridge(name, mac))
    }

    /// Makes an interface a port of a bridge.
    pub fn add_to_bridge(&self, port: &str, bridge: &str) -> io::Result<()> {
        let (port, bridge) = (self.if_index(port)?, self.if_index(bridge)?);
        context("cannot add a port to the bridge", self.netlink()?.set_controller(port, bridge))
    }

    /// Switches TSO, GSO, GRO and transmit checksum offload of an interface (ethtool(8), `-K`).
    pub fn set_offloads(&self, name: &str, on: bool) -> io::Result<()> {
        /// ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO, ETHTOOL_STXCSUM (linux/ethtool.h): in this
        /// order, because segmentation depends on the checksum.
        const COMMANDS: [u32; 4] = [0x1f, 0x24, 0x2c, 0x17];
        let name = CString::new(name)?;
        self.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
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
