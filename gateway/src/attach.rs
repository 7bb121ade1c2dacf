//! The namespaces of a guest: joining them, and noticing that the guest has exited.
//!
//! [`Target::attach`] opens the network namespace and joins the user namespace, so that the caller has the
//! capabilities that an interface inside needs; the caller's own network namespace stays. [`ExitWatch`] is a descriptor
//! that becomes readable when the guest's process or the file of its namespace is gone: an open TAP keeps the
//! namespace itself alive, so the namespace cannot be watched.
//!
//! Sources: user_namespaces(7), pidfd_open(2), inotify(7), ip-netns(8), ptrace(2), PR_SET_DUMPABLE(2const).

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::netns::{Netns, enter_user_namespace};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// Where ip-netns(8) keeps its names.
const NAMED: &str = "/run/netns";

/// The guest to attach to.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "a caller decides about each kind")]
pub enum Target {
    /// The namespaces of a process.
    Process {
        /// Its id.
        pid: u32,
        /// Another user namespace than its own.
        userns: Option<PathBuf>,
    },
    /// A network namespace, and the user namespace to join for it, by their files.
    Path {
        /// The network namespace.
        netns: PathBuf,
        /// The user namespace; the caller's own if there is none.
        userns: Option<PathBuf>,
    },
}

impl Target {
    /// The namespace of a path, or of a name of ip-netns(8): a string without `/` is a name.
    pub fn named(netns: &Path, userns: Option<PathBuf>) -> Target {
        let is_name = !netns.as_os_str().as_encoded_bytes().contains(&b'/');
        let netns = if is_name { Path::new(NAMED).join(netns) } else { netns.to_owned() };
        Target::Path { netns, userns }
    }

    fn netns_path(&self) -> PathBuf {
        match self {
            Target::Process { pid, .. } => format!("/proc/{pid}/ns/net").into(),
            Target::Path { netns, .. } => netns.clone(),
        }
    }

    fn userns_path(&self) -> Option<PathBuf> {
        match self {
            Target::Process { pid, userns: None } => Some(format!("/proc/{pid}/ns/user").into()),
            Target::Process { userns, .. } | Target::Path { userns, .. } => userns.clone(),
        }
    }

    /// The process whose end is the guest's end.
    fn process(&self) -> Option<u32> {
        match self {
            Target::Process { pid, .. } => Some(*pid),
            Target::Path { netns, .. } => {
                let below = netns.strip_prefix("/proc").ok()?;
                below.components().next()?.as_os_str().to_str()?.parse().ok()
            }
        }
    }

    /// Opens the guest's network namespace and joins its user namespace. The process must have one thread. From then on
    /// the guest cannot trace the process.
    ///
    /// # Errors
    /// A sentence: the process or file does not exist, it is not a namespace, or the namespace is not the caller's.
    pub fn attach(&self) -> io::Result<Netns> {
        let path = self.netns_path();
        let netns = Netns::open(&path).map_err(|e| self.refused(e))?;
        forbid_tracing()?;
        if let Some(userns) = self.userns_path() {
            enter_user_namespace(&userns).map_err(|e| self.refused_user(&userns, e))?;
        }
        netns.run(|| Ok(())).map_err(|e| self.refused(e))?;
        Ok(netns)
    }

    /// A descriptor that becomes readable when the guest is gone. To be made before [`Target::attach`].
    ///
    /// # Errors
    /// As for `attach`.
    pub fn exit_watch(&self) -> io::Result<ExitWatch> {
        if let Some(pid) = self.process() {
            let process = crate::netns::pidfd_open(pid).map_err(|e| self.refused(e))?;
            return Ok(ExitWatch::Process(process));
        }
        let path = self.netns_path();
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(self.refused(io::ErrorKind::NotFound.into()));
        };
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let gone = AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        watch.add_watch(folder, gone).map_err(|e| self.refused(e.into()))?;
        Ok(ExitWatch::File { watch, name: name.to_owned() })
    }

    fn refused(&self, e: io::Error) -> io::Error {
        let path = self.netns_path();
        let path = path.display();
        let sentence = match (e.raw_os_error(), e.kind(), self) {
            (Some(libc::ESRCH), ..) | (_, io::ErrorKind::NotFound, Target::Process { .. }) => {
                format!("cannot attach to {self}: no such process")
            }
            (_, io::ErrorKind::NotFound, _) => format!(
                "cannot attach to {self}: no such file; list the namespaces with `ip netns` or `lsns -t net`"
            ),
            (_, io::ErrorKind::InvalidInput, _) => {
                format!("cannot attach to {self}: {path} is not a network namespace")
            }
            (_, io::ErrorKind::PermissionDenied, _) if is_own(&self.netns_path()) => format!(
                "cannot attach to {self}: it shares the network namespace of this command; start it with `unshare \
                 -rn PROGRAM`, then give its process id"
            ),
            (_, io::ErrorKind::PermissionDenied, _) => format!(
                "cannot attach to {self}: it belongs to another user ({e}); run as that user or as root, or give \
                 its user namespace with --userns"
            ),
            _ => format!("cannot attach to {self}: {e}"),
        };
        io::Error::new(e.kind(), sentence)
    }

    fn refused_user(&self, userns: &Path, e: io::Error) -> io::Error {
        let userns = userns.display();
        let sentence = match e.kind() {
            io::ErrorKind::NotFound => format!("the user namespace {userns} does not exist"),
            io::ErrorKind::PermissionDenied => {
                format!(
                    "the user namespace {userns} belongs to another user ({e}); run as that user or as root"
                )
            }
            io::ErrorKind::InvalidInput => format!("{userns} is not a user namespace ({e})"),
            _ => format!("cannot join the user namespace {userns}: {e}"),
        };
        io::Error::new(e.kind(), format!("cannot attach to {self}: {sentence}"))
    }
}

/// Whether a file is that of the network namespace of this process.
fn is_own(netns: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    id(netns).is_some_and(|found| Some(found) == id(Path::new("/proc/self/ns/net")))
}

/// Keeps the process from being traced, its memory and descriptors from being read, and its core from being dumped by
/// a process without CAP_SYS_PTRACE in the user namespace where its program was started (PR_SET_DUMPABLE). A guest in
/// the user namespace that this process joins could otherwise open connections of the host through it (ptrace(2),
/// "Ptrace access mode checking").
fn forbid_tracing() -> io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(false)?)
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Process { pid, .. } => write!(f, "process {pid}"),
            Target::Path { netns, .. } => write!(f, "namespace {}", netns.display()),
        }
    }
}

/// A descriptor that becomes readable when a guest may be gone.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExitWatch {
    /// The guest's process.
    Process(OwnedFd),
    /// The folder in which the file of the guest's namespace is.
    File {
        /// Events of the folder.
        watch: Inotify,
        /// The file.
        name: OsString,
    },
}

impl ExitWatch {
    /// Whether the guest is gone, after the descriptor became readable.
    pub fn has_exited(&self) -> bool {
        match self {
            ExitWatch::Process(_) => true,
            ExitWatch::File { watch, name } => match watch.read_events() {
                Ok(events) => events.iter().any(|e| is_exit(e.mask, e.name.as_deref(), name)),
                Err(_) => false,
            },
        }
    }
}

fn is_exit(mask: AddWatchFlags, name: Option<&OsStr>, guest: &OsStr) -> bool {
    let of_folder =
        AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_IGNORED;
    mask.intersects(of_folder) || name == Some(guest)
}

impl AsFd for ExitWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ExitWatch::Process(process) => process.as_fd(),
            ExitWatch::File { watch, .. } => watch.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_slash_belongs_to_ip_netns() {
        let path = |text: &str| Target::named(Path::new(text), None).netns_path();
        assert_eq!(path("blue"), Path::new("/run/netns/blue"));
        assert_eq!(path("/run/user/1/netns/x"), Path::new("/run/user/1/netns/x"));
        assert_eq!(path("./blue"), Path::new("./blue"));
    }

    #[test]
    fn a_file_of_proc_stands_for_its_process() {
        let process = |text: &str| Target::named(Path::new(text), None).process();
        assert_eq!(process("/proc/42/ns/net"), Some(42));
        assert_eq!(process("/proc/self/ns/net"), None);
        assert_eq!(process("/run/netns/42"), None);
    }

    #[test]
    fn an_impossible_attachment_is_refused_with_a_sentence() {
        let refused = |target: Target| target.attach().expect_err("refused").to_string();
        let nobody = Target::Process { pid: 4_194_999, userns: None };
        assert_eq!(refused(nobody.clone()), "cannot attach to process 4194999: no such process");
        assert!(nobody.exit_watch().unwrap_err().to_string().contains("no such process"));
        let missing = refused(Target::named(Path::new("fulmar-missing"), None));
        assert!(missing.contains("/run/netns/fulmar-missing: no such file"), "{missing}");
        let file = refused(Target::named(Path::new("/proc/self/status"), None));
        assert!(file.contains("is not a network namespace"), "{file}");
        let here = PathBuf::from("/proc/self/ns/net");
        let userns = Some(PathBuf::from("/proc/self/nothing"));
        let no_user = refused(Target::Path { netns: here, userns });
        assert!(no_user.contains("does not exist"), "{no_user}");
    }

    #[test]
    fn the_removal_of_the_file_is_the_end() {
        let folder = std::env::temp_dir().join(format!("fulmar-end-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [guest, other] = ["guest", "other"].map(|name| folder.join(name));
        for file in [&guest, &other] {
            std::fs::write(file, "").unwrap();
        }
        let end = Target::named(&guest, None).exit_watch().unwrap();
        std::fs::remove_file(&other).unwrap();
        assert!(!end.has_exited(), "another file");
        assert!(!end.has_exited(), "nothing");
        std::fs::remove_file(&guest).unwrap();
        assert!(end.has_exited());
        std::fs::remove_dir(&folder).unwrap();
    }
}
