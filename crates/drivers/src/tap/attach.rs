//! Attaching to an interface, and what to say if that fails.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use super::FLAGS;
use super::netlink::{self, Queues};
use crate::{OpenError, sys};

const CLONE_DEVICE: &str = "/dev/net/tun";
/// How long an interface that is busy may stay so.
const BUSY_PATIENCE: Duration = Duration::from_millis(300);

pub fn open_clone_device() -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    options.open(CLONE_DEVICE).map_err(|e| {
        let advice = match e.kind() {
            ErrorKind::PermissionDenied => {
                "let root run `chmod 666 /dev/net/tun` once, or use device `packet` on a veth, \
                 which needs no device node"
            }
            ErrorKind::NotFound => {
                "load the kernel module with `modprobe tun`, or let root run \
                 `mkdir -p /dev/net && mknod /dev/net/tun c 10 200`"
            }
            _ => "check that the kernel was built with CONFIG_TUN",
        };
        OpenError::new(format!("cannot open {CLONE_DEVICE}"), e, advice)
    })
}

/// An interface that is busy is asked for again for a while: when a process is killed, the kernel keeps
/// what its rings had open for some tens of milliseconds more.
fn attach_patiently(file: &File, name: &str, flags: libc::c_int) -> std::io::Result<String> {
    let begin = Instant::now();
    loop {
        let attached = sys::tun_attach(file.as_fd(), name, flags);
        let is_busy = attached.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY));
        if !is_busy || begin.elapsed() > BUSY_PATIENCE {
            return attached;
        }
        std::thread::sleep(BUSY_PATIENCE / 60);
    }
}

/// Attaches to one more queue of an interface, or the first.
pub fn attach(file: &File, name: &str, flags: libc::c_int) -> Result<String, OpenError> {
    attach_patiently(file, name, flags).map_err(|e| not_attached(name, flags, e))
}

/// Attaches to an interface as the only one. Made so that it can have more queues, if there is none yet
/// and they are wanted; answers also whether it can.
///
/// An interface that can have more would let another program in, so a new one is asked for exclusively, and
/// one that is there already must be unused. (Two programs that ask for such a one in the same instant
/// both get it, and share what comes.)
pub fn attach_alone(
    file: &File,
    name: &str,
    wants_room: bool,
) -> Result<(String, bool), OpenError> {
    let begin = Instant::now();
    loop {
        let e = match try_alone(file, name, wants_room) {
            Ok(attached) => return Ok(attached),
            Err(e) => e,
        };
        let may_go = matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENODEV));
        if !may_go || begin.elapsed() > BUSY_PATIENCE {
            return Err(not_attached(name, FLAGS, e));
        }
        std::thread::sleep(BUSY_PATIENCE / 60);
    }
}

/// EBUSY: another program has it. ENODEV: it has just gone. EINVAL: it is no TAP.
fn try_alone(file: &File, name: &str, wants_room: bool) -> std::io::Result<(String, bool)> {
    // linux/if_tun.h: IFF_TUN_EXCL.
    const EXCLUSIVE: libc::c_int = 0x8000;
    const SEVERAL: libc::c_int = FLAGS | libc::IFF_MULTI_QUEUE;
    if wants_room && let Ok(name) = sys::tun_attach(file.as_fd(), name, SEVERAL | EXCLUSIVE) {
        // Else the kernel makes a queueing discipline for each of the 256 queues that there could be.
        let _ = netlink::ask(&name).and_then(|i| netlink::set_no_queue(i.index));
        return Ok((name, true));
    }
    let e = match sys::tun_attach(file.as_fd(), name, FLAGS) {
        Ok(name) => return Ok((name, false)),
        Err(e) => e,
    };
    if e.raw_os_error() != Some(libc::EINVAL) {
        return Err(e);
    }
    match netlink::ask(name)?.tap {
        Some(Queues::Several(0)) => {
            let name = sys::tun_attach(file.as_fd(), name, SEVERAL)?;
            // Whoever had it before may have left a program there.
            let _ = sys::tun_set_steering(file.as_fd(), None);
            Ok((name, wants_room))
        }
        Some(_) => Err(std::io::Error::from_raw_os_error(libc::EBUSY)),
        None => Err(e),
    }
}

fn not_attached(name: &str, flags: libc::c_int, e: std::io::Error) -> OpenError {
    let has_queues = flags & libc::IFF_MULTI_QUEUE != 0;
    let advice = match e.raw_os_error() {
        Some(libc::EPERM) => {
            "run in a network namespace of your own (`unshare -Urn`), or let root create it for you with \
             `ip tuntap add dev NAME mode tap user USER vnet_hdr`"
        }
        Some(libc::EBUSY) => "another program holds it: end it, or choose another name",
        Some(libc::EINVAL) if has_queues => {
            "an interface of this name exists and is no TAP of several queues with a virtio-net \
             header (`ip tuntap add dev NAME mode tap multi_queue vnet_hdr`): choose another name"
        }
        Some(libc::E2BIG) => "it has as many queues as it can have: ask for fewer",
        Some(libc::EINVAL) => "an interface of this name exists and is no TAP: choose another name",
        Some(libc::ENAMETOOLONG) => "an interface's name has at most 15 bytes",
        _ => "choose another name",
    };
    OpenError::new(format!("cannot attach to TAP interface {name:?}"), e, advice)
}
