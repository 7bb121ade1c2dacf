//! Attaching to a TAP or TUN interface, and the errors of that.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use fulmar_stack::base::Medium;
use libc::c_int;

use super::netlink::{self, Queues};
use crate::drivers::{OpenError, sys};

/// linux/if_tun.h, Linux 7.2.
const IFF_BACKPRESSURE: c_int = 0x0080;
const CLONE_DEVICE: &str = "/dev/net/tun";
/// EBUSY is retried for this long.
const BUSY_PATIENCE: Duration = Duration::from_millis(300);

/// A descriptor that is attached to an interface.
pub(in crate::drivers) struct Attached {
    pub file: File,
    /// The interface.
    pub name: String,
    /// A socket in the interface's network namespace, for ioctls; `None`: the interface may be in another one
    /// than this thread.
    pub control: Option<OwnedFd>,
}

impl Attached {
    /// Attaches to an interface that no other program uses; it is created if it does not exist.
    ///
    /// A multi-queue interface lets another program attach too, so an existing one must have no queue attached. (Two
    /// programs that attach to such an interface at the same instant both succeed, and share its packets.)
    pub(in crate::drivers) fn alone(name: &str, medium: Medium) -> Result<Attached, OpenError> {
        let file = open_clone_device_at(CLONE_DEVICE)?;
        let attached = patiently(&[libc::EBUSY, libc::ENODEV], || try_alone(&file, name, medium));
        let name = attached.map_err(|e| not_attached(name, flags(medium), e))?;
        Ok(Attached::here(file, name))
    }

    /// Attaches to `queues` queues of one interface; to one as [`Attached::alone`].
    pub(in crate::drivers) fn to_queues(
        name: &str,
        queues: u16,
        medium: Medium,
    ) -> Result<Vec<Attached>, OpenError> {
        if queues < 2 {
            return Ok(vec![Attached::alone(name, medium)?]);
        }
        let (mut name, flags) = (name.to_owned(), flags(medium) | libc::IFF_MULTI_QUEUE);
        let mut all = Vec::with_capacity(usize::from(queues));
        for _ in 0..queues {
            let file = open_clone_device_at(CLONE_DEVICE)?;
            let attached = patiently(&[libc::EBUSY], || attach(&file, &name, flags));
            name = attached.map_err(|e| not_attached(&name, flags, e))?;
            all.push(Attached::here(file, name.clone()));
        }
        Ok(all)
    }

    /// A descriptor that another process has opened and attached.
    pub(in crate::drivers) fn by_another(
        fd: OwnedFd,
        medium: Medium,
    ) -> Result<Attached, OpenError> {
        let (flags, kind) = (flags(medium), kind(medium));
        let advice =
            format!("attach it with IFF_{kind} | IFF_NO_PI | IFF_VNET_HDR before passing it");
        let wrong =
            |e| OpenError::new(format!("cannot use the descriptor as a {kind}"), e, advice.clone());
        let (name, has) = sys::tun_interface(fd.as_fd()).map_err(wrong)?;
        if has & flags != flags {
            return Err(wrong(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        sys::set_nonblocking(fd.as_fd()).map_err(wrong)?;
        Ok(Attached { file: File::from(fd), name, control: None })
    }

    /// In this thread's network namespace.
    fn here(file: File, name: String) -> Attached {
        Attached { file, name, control: sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).ok() }
    }
}

fn kind(medium: Medium) -> &'static str {
    match medium {
        Medium::Ethernet => "TAP",
        Medium::Ip => "TUN",
    }
}

fn flags(medium: Medium) -> c_int {
    let kind = match medium {
        Medium::Ethernet => libc::IFF_TAP,
        Medium::Ip => libc::IFF_TUN,
    };
    kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR
}

fn open_clone_device_at(path: &str) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    let file = options.open(path).map_err(|e| {
        let advice = match e.kind() {
            ErrorKind::PermissionDenied => {
                "as root, run `chmod 666 /dev/net/tun`, or use device `packet` on a veth, which needs no device node"
            }
            ErrorKind::NotFound => {
                "load the kernel module with `modprobe tun`, or as root run `mkdir -p /dev/net && mknod \
                 /dev/net/tun c 10 200`"
            }
            _ => "check that the kernel was built with CONFIG_TUN",
        };
        OpenError::new(format!("cannot open {path}"), e, advice).of_node()
    })?;
    // A container's engine may have covered it by /dev/null.
    let features =
        sys::tun_features(file.as_fd()).and_then(|features| match features & libc::IFF_TAP {
            0 => Err(io::Error::from_raw_os_error(libc::ENOTTY)),
            _ => Ok(file),
        });
    features.map_err(|e| {
        let advice = "as root, run `rm /dev/net/tun && mknod /dev/net/tun c 10 200`";
        OpenError::new(format!("cannot open {path}: it is a different device"), e, advice)
            .of_other_device()
    })
}

/// Retries the errors `which`: the kernel closes the descriptors of a killed process's io_uring some tens of
/// milliseconds later.
fn patiently(which: &[c_int], attach: impl Fn() -> io::Result<String>) -> io::Result<String> {
    let begin = Instant::now();
    loop {
        let attached = attach();
        let errno = attached.as_ref().err().and_then(io::Error::raw_os_error);
        if errno.is_none_or(|e| !which.contains(&e)) || begin.elapsed() > BUSY_PATIENCE {
            return attached;
        }
        std::thread::sleep(BUSY_PATIENCE / 60);
    }
}

/// Attaches with back-pressure: Linux 7.2 lets the interface's queueing discipline hold what this end has no space for,
/// and older kernels, which drop it, ignore the flag.
fn attach(file: &File, name: &str, flags: c_int) -> io::Result<String> {
    sys::tun_attach(file.as_fd(), name, flags | IFF_BACKPRESSURE)
}

/// EBUSY: another program is attached. ENODEV: the interface was just removed. EINVAL: it is of another kind.
fn try_alone(file: &File, name: &str, medium: Medium) -> io::Result<String> {
    let flags = flags(medium);
    let e = match attach(file, name, flags) {
        Ok(name) => return Ok(name),
        Err(e) => e,
    };
    if e.raw_os_error() != Some(libc::EINVAL) {
        return Err(e);
    }
    match netlink::queues(name, flags)? {
        Some(Queues::Several(0)) => {
            let name = attach(file, name, flags | libc::IFF_MULTI_QUEUE)?;
            // The program of an earlier owner may still be attached.
            let _ = sys::tun_set_steering(file.as_fd(), None);
            Ok(name)
        }
        Some(_) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        None => Err(e),
    }
}

fn not_attached(name: &str, flags: c_int, e: io::Error) -> OpenError {
    let (kind, mode) = match flags & libc::IFF_TAP {
        0 => ("TUN", "tun"),
        _ => ("TAP", "tap"),
    };
    let add = format!("`ip tuntap add dev NAME mode {mode}");
    let has_queues = flags & libc::IFF_MULTI_QUEUE != 0;
    let advice = match e.raw_os_error() {
        Some(libc::EPERM) => format!(
            "run in a network namespace of your own (`unshare -Urn`), or create it as root with {add} user USER \
             vnet_hdr`"
        ),
        Some(libc::EBUSY) => {
            "another program is attached to it: end that program, or choose another name".to_owned()
        }
        Some(libc::EINVAL) if has_queues => format!(
            "an interface of this name exists and is not a multi-queue {kind} with a virtio-net header ({add} \
             multi_queue vnet_hdr`): choose another name"
        ),
        Some(libc::E2BIG) => {
            "the interface has its maximum number of queues: request fewer".to_owned()
        }
        Some(libc::EINVAL) => {
            format!(
                "an interface of this name exists and is not a {kind}: choose another name, or omit `{mode}:`"
            )
        }
        Some(libc::ENAMETOOLONG) => "an interface's name has at most 15 bytes".to_owned(),
        _ => "choose another name".to_owned(),
    };
    OpenError::new(format!("cannot attach to {kind} interface {name:?}"), e, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_a_tun_device_counts_as_absent() {
        for path in ["/dev/null", "/dev/zero", "/dev", "/dev/null/tun", "/dev/missing"] {
            let e = open_clone_device_at(path).expect_err("refused");
            assert!(e.is_without_node(), "{e}");
        }
        let e = open_clone_device_at("/dev/null").expect_err("refused").to_string();
        assert!(e.contains("a different device") && e.contains("mknod"), "{e}");
    }
}
