//! The error message of a command: one sentence with what failed, what the system said and what to
//! do about it.

use crate::sandbox;
use std::fmt;
use std::io;
use std::path::Path;

/// An error message of one sentence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

/// The result of a command or of one of its steps.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A sentence that needs no errno.
    pub fn new(sentence: impl Into<String>) -> Failure {
        Failure(sentence.into())
    }

    /// `what` failed with `error`: the sentence names the errno's meaning and the next step.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Failure {
        let errno = error.raw_os_error().or_else(|| errno_of(error.kind()));
        let row = errno.and_then(|errno| ROWS.iter().find(|row| row.0 == errno));
        match row {
            Some((libc::EACCES | libc::EPERM, name, meaning, _)) if sandbox::is_inside() => {
                Failure(format!(
                    "{what}: {meaning} ({name}); a sandbox has no access to the host's devices and protected files; \
                     run the command as root outside the sandbox"
                ))
            }
            Some((_, name, meaning, advice)) => {
                Failure(format!("{what}: {meaning} ({name}); {advice}"))
            }
            None => Failure(format!("{what}: {error}")),
        }
    }

    /// `what` ("cannot read") failed with `error` for a file.
    pub fn file(what: &str, path: &Path, error: &io::Error) -> Failure {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.exists());
        let why = match (error.kind(), parent) {
            (io::ErrorKind::NotFound, Some(parent)) => {
                format!(
                    "the directory {} does not exist (ENOENT); create it first",
                    parent.display()
                )
            }
            (io::ErrorKind::NotFound, None) => "no such file (ENOENT); check the name".into(),
            (io::ErrorKind::PermissionDenied, _) => {
                "permission denied (EACCES); check its owner and mode with `ls -l`".into()
            }
            _ => return Failure::io(format_args!("{what} {}", path.display()), error),
        };
        Failure(format!("{what} {}: {why}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds the failed operation to an I/O error.
pub trait During<T> {
    /// `what` completes the sentence "fulmar: ".
    fn during(self, what: impl fmt::Display) -> Outcome<T>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|e| Failure::io(what, &e))
    }
}

type Row = (i32, &'static str, &'static str, &'static str);

/// errno, its name, what it means for a user of this command, what to do.
const ROWS: &[Row] = &[
    (
        libc::ECONNREFUSED,
        "ECONNREFUSED",
        "connection refused",
        "check that a program listens on that port and address",
    ),
    (
        libc::ETIMEDOUT,
        "ETIMEDOUT",
        "timed out",
        "check the address, and that no firewall drops the packets",
    ),
    (
        libc::ECONNRESET,
        "ECONNRESET",
        "connection reset by the peer",
        "check the peer's program, which ended or failed",
    ),
    (
        libc::EPIPE,
        "EPIPE",
        "the peer no longer receives",
        "check the peer's program, which ended early",
    ),
    (
        libc::EHOSTUNREACH,
        "EHOSTUNREACH",
        "host unreachable: no neighbour answers for the address",
        "check the address, --addr and --gateway",
    ),
    (
        libc::ENETUNREACH,
        "ENETUNREACH",
        "no route to the address",
        "add a --gateway, a --route (with from=, only for sockets bound to such an address) or an --addr in the same \
         network",
    ),
    (
        libc::EADDRINUSE,
        "EADDRINUSE",
        "the port is in use",
        "choose another port, or end the program that uses it",
    ),
    (
        libc::EADDRNOTAVAIL,
        "EADDRNOTAVAIL",
        "the address does not belong to this stack",
        "use an address given with --addr",
    ),
    (
        libc::ENETDOWN,
        "ENETDOWN",
        "the device is gone or down",
        "for an interface, bring it up and start again; for shared memory, the other process has ended: restart both",
    ),
    (
        libc::EPROTO,
        "EPROTO",
        "the other process violated the protocol of the link",
        "do not trust the received data, and use the same release at both ends; `fulmar stat` names the violation \
         while the stack runs",
    ),
    (
        libc::EMSGSIZE,
        "EMSGSIZE",
        "the message exceeds the largest datagram",
        "send at most 65,507 bytes at a time",
    ),
    (libc::EACCES, "EACCES", "permission denied", "run as root, or inside `fulmar sandbox`"),
    (libc::EPERM, "EPERM", "operation not permitted", "run as root, or inside `fulmar sandbox`"),
    (
        libc::EBUSY,
        "EBUSY",
        "another program has it open",
        "choose another name with --device tap:NAME, or end that program",
    ),
    (libc::EMFILE, "EMFILE", "too many open descriptors", "raise the limit: `ulimit -n`"),
    (libc::ENODEV, "ENODEV", "no such interface", "list the interfaces with `ip link`"),
    (libc::ENOENT, "ENOENT", "it does not exist", "check the name"),
    (libc::EROFS, "EROFS", "the file system is read-only", "choose another directory"),
    (libc::ENOTDIR, "ENOTDIR", "a component of the path is not a directory", "check the path"),
    (libc::EISDIR, "EISDIR", "is a directory", "give the name of a file"),
    (libc::ENOSPC, "ENOSPC", "the disk is full", "free space and start again"),
];

/// The errno that an error without one stands for.
fn errno_of(kind: io::ErrorKind) -> Option<i32> {
    Some(match kind {
        io::ErrorKind::ConnectionRefused => libc::ECONNREFUSED,
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        io::ErrorKind::ConnectionReset => libc::ECONNRESET,
        io::ErrorKind::BrokenPipe => libc::EPIPE,
        io::ErrorKind::HostUnreachable => libc::EHOSTUNREACH,
        io::ErrorKind::NetworkUnreachable => libc::ENETUNREACH,
        io::ErrorKind::AddrInUse => libc::EADDRINUSE,
        io::ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
        io::ErrorKind::NetworkDown => libc::ENETDOWN,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_with_what_why_and_what_to_do() {
        let error = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        let text = Failure::io("cannot connect to 10.0.0.1:80", &error).to_string();
        assert_eq!(
            text,
            "cannot connect to 10.0.0.1:80: connection refused (ECONNREFUSED); \
             check that a program listens on that port and address"
        );
    }

    #[test]
    fn an_error_without_errno_is_named_by_its_kind() {
        let error = io::Error::new(io::ErrorKind::TimedOut, "whatever");
        assert!(Failure::io("x", &error).to_string().contains("(ETIMEDOUT)"));
    }

    #[test]
    fn an_unknown_error_keeps_its_own_words() {
        let error = io::Error::other("the moon is down");
        assert_eq!(Failure::io("x", &error).to_string(), "x: the moon is down");
    }

    #[test]
    fn a_missing_directory_and_a_missing_file_have_different_errors() {
        let error = io::Error::from_raw_os_error(libc::ENOENT);
        let text = |path| Failure::file("cannot write", Path::new(path), &error).to_string();
        assert_eq!(
            text("/nowhere/at/all"),
            "cannot write /nowhere/at/all: the directory /nowhere/at does not exist (ENOENT); create it first"
        );
        assert_eq!(text("/x"), "cannot write /x: no such file (ENOENT); check the name");
        assert!(text("x").contains("no such file"));
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let text = Failure::file("cannot write", Path::new("/x"), &full).to_string();
        assert!(text.contains("(ENOSPC)"), "{text}");
    }

    #[test]
    fn every_errno_has_one_row() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS.iter().skip(i + 1).all(|other| other.0 != row.0), "{} twice", row.1);
        }
    }
}
