//! Attaching to a TAP or TUN interface, and the errors of that.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use super::FLAGS;
use super::netlink::{self, Queues};
use crate::drivers::{OpenError, sys};

const CLONE_DEVICE: &str = "/dev/net/tun";
/// EBUSY is retried for this long.
const BUSY_PATIENCE: Duration = Duration::from_millis(300);

pub(crate) fn open_clone_device() -> Result<File, OpenError> {
    open_clone_device_at(CLONE_DEVICE)
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
            0 => Err(std::io::Error::from_raw_os_error(libc::ENOTTY)),
            _ => Ok(file),
        });
    features.map_err(|e| {
        let advice = "as root, run `rm /dev/net/tun && mknod /dev/net/tun c 10 200`";
        OpenError::new(format!("cannot open {path}: it is a different device"), e, advice)
            .of_other_device()
    })
}

/// Retries EBUSY: the kernel closes the descriptors of a killed process's io_uring some tens of
/// milliseconds later.
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

/// Attaches to one queue of an interface.
pub(crate) fn attach(file: &File, name: &str, flags: libc::c_int) -> Result<String, OpenError> {
    attach_patiently(file, name, flags).map_err(|e| not_attached(name, flags, e))
}

/// Attaches to an interface that no other program uses. Returns its name.
///
/// A multi-queue interface lets another program attach too, so an existing one must have no queue attached. (Two
/// programs that attach to such an interface at the same instant both succeed, and share its packets.)
pub(crate) fn attach_alone(file: &File, name: &str) -> Result<String, OpenError> {
    let begin = Instant::now();
    loop {
        let e = match try_alone(file, name) {
            Ok(name) => return Ok(name),
            Err(e) => e,
        };
        let may_go = matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENODEV));
        if !may_go || begin.elapsed() > BUSY_PATIENCE {
            return Err(not_attached(name, FLAGS, e));
        }
        std::thread::sleep(BUSY_PATIENCE / 60);
    }
}

/// EBUSY: another program is attached. ENODEV: the interface was just removed. EINVAL: it is no TAP.
fn try_alone(file: &File, name: &str) -> std::io::Result<String> {
    let e = match sys::tun_attach(file.as_fd(), name, FLAGS) {
        Ok(name) => return Ok(name),
        Err(e) => e,
    };
    if e.raw_os_error() != Some(libc::EINVAL) {
        return Err(e);
    }
    match netlink::queues(name)? {
        Some(Queues::Several(0)) => {
            let name = sys::tun_attach(file.as_fd(), name, FLAGS | libc::IFF_MULTI_QUEUE)?;
            // The program of an earlier owner may still be attached.
            let _ = sys::tun_set_steering(file.as_fd(), None);
            Ok(name)
        }
        Some(_) => Err(std::io::Error::from_raw_os_error(libc::EBUSY)),
        None => Err(e),
    }
}

fn not_attached(name: &str, flags: libc::c_int, e: std::io::Error) -> OpenError {
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
