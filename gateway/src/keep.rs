//! Keeps the `/etc/resolv.conf` of a program ([`program`](crate::program)) in its place.
//!
//! It is a bind mount on the host's file, or on the file to which a symbolic link of the host's leads. A kernel takes the
//! mounts from a file that another one is renamed over, in every mount namespace, and a link may come to lead elsewhere:
//! the program would then see the host's file. So the mount is made anew, on whatever the path leads to by then. Domains
//! and options follow the host's.
//!
//! This runs on a thread with a mount namespace of its own, where the host's file is seen and a copy of the program's lies
//! in memory; it enters the program's namespace for a moment. It needs the rights of the program's user namespace
//! and Linux 5.2 (open_tree(2), move_mount(2)).
//!
//! Sources: mount_namespaces(7), rename(2), proc_pid_mountinfo(5).

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::netns::{clone_mount, move_mount};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns, unshare};

use crate::follow::PathWatch;
use crate::program::{Resolvers, STAGING, mount_staging, resolv_conf};
use crate::resolv::{RESOLV_CONF, contents};

/// How long it waits after a change: what comes together is looked at together, and a mount that is lost again and again
/// costs little.
const REST: Duration = Duration::from_millis(20);
/// How often it is looked where there is no inotify instance.
const LOOK_MS: u16 = 2000;

/// A file: its device and its inode.
type Id = (u64, u64);

struct Keeper {
    own: File,
    programs: OwnedFd,
    resolvers: Resolvers,
    /// The copy below [`STAGING`], and what is in it.
    staged: PathBuf,
    text: Vec<u8>,
    /// The program's file, as it was mounted last.
    mounted: Option<Id>,
}

/// Keeps the file in a mount namespace of a program, until `end` is readable. The thread that calls this has another mount
/// namespace afterwards.
///
/// # Errors
/// A right is missing, or the kernel is older.
pub fn keep_resolv_conf(
    programs: OwnedFd,
    resolvers: &Resolvers,
    end: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut keeper = Keeper::new(programs, resolvers)?;
    loop {
        let watch = PathWatch::new(Path::new(RESOLV_CONF)).ok();
        let has_new_text = keeper.bring_up_to_date()?;
        let mounts = keeper.look(has_new_text)?;
        if wait(&mounts, watch.as_ref(), end)? {
            return Ok(());
        }
        thread::sleep(REST);
    }
}

impl Keeper {
    fn new(programs: OwnedFd, resolvers: &Resolvers) -> io::Result<Keeper> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let (none, private) = (None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE);
        mount(none, "/", none, private, none)?;
        mount_staging()?;
        let own = File::open("/proc/thread-self/ns/mnt")?;
        let (staged, resolvers) = (Path::new(STAGING).join("resolv.conf"), resolvers.clone());
        let (text, mounted) = (Vec::new(), None);
        let mut keeper = Keeper { own, programs, resolvers, staged, text, mounted };
        keeper.bring_up_to_date()?;
        // The program's own process has mounted one, unless that is lost already.
        keeper.mounted = keeper.in_programs(|keeper| {
            let there = contents(Path::new(RESOLV_CONF)).unwrap_or_default();
            let own = resolv_conf(b"", &keeper.resolvers);
            Ok(there.starts_with(&own).then(current).flatten())
        })?;
        Ok(keeper)
    }

    /// Writes the copy where the host's file has changed. Returns whether it has.
    fn bring_up_to_date(&mut self) -> io::Result<bool> {
        let hosts = contents(Path::new(RESOLV_CONF)).unwrap_or_default();
        let text = resolv_conf(&hosts, &self.resolvers);
        if text == self.text {
            return Ok(false);
        }
        fs::write(&self.staged, &text)?;
        self.text = text;
        Ok(true)
    }

    /// Does something in the program's namespace.
    fn in_programs<T>(&mut self, work: impl FnOnce(&mut Keeper) -> io::Result<T>) -> io::Result<T> {
        setns(&self.programs, CloneFlags::CLONE_NEWNS)?;
        let done = work(self);
        setns(&self.own, CloneFlags::CLONE_NEWNS)?;
        done
    }

    /// Mounts the file if it is not there, or not this one and its text is new. Returns a file that tells of changes of the
    /// program's mounts.
    fn look(&mut self, has_new_text: bool) -> io::Result<File> {
        let (copy, id) = (clone_mount(&self.staged)?, id_of(&self.staged));
        self.in_programs(|keeper| {
            // Before the file is read: a change in between is seen.
            let mounts = File::open("/proc/thread-self/mountinfo")?;
            let there = current();
            let is_lost = there.is_some() && there != keeper.mounted;
            let is_old = has_new_text && keeper.mounted != id;
            if is_lost || is_old {
                match move_mount(copy.as_fd(), Path::new(RESOLV_CONF)) {
                    Ok(()) => keeper.mounted = current(),
                    // It is being replaced: the watch tells when it is there.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(mounts)
        })
    }
}

fn current() -> Option<Id> {
    id_of(Path::new(RESOLV_CONF))
}

fn id_of(path: &Path) -> Option<Id> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Waits for a change of mounts or of the path. True: the end has come.
fn wait(mounts: &File, watch: Option<&PathWatch>, end: BorrowedFd<'_>) -> io::Result<bool> {
    loop {
        let mut ready = vec![
            PollFd::new(end, PollFlags::POLLIN),
            PollFd::new(mounts.as_fd(), PollFlags::POLLPRI),
        ];
        ready.extend(watch.map(|watch| PollFd::new(watch.as_fd(), PollFlags::POLLIN)));
        let look = if watch.is_some() { PollTimeout::NONE } else { PollTimeout::from(LOOK_MS) };
        let is_due = match poll(&mut ready, look) {
            Ok(number) => number == 0,
            Err(Errno::EINTR) => continue,
            Err(e) => return Err(e.into()),
        };
        let is_ready = |n: usize| ready.get(n).is_some_and(|fd| fd.any() == Some(true));
        if is_ready(0) {
            return Ok(true);
        }
        if is_due || is_ready(1) || watch.is_some_and(PathWatch::has_changed) {
            return Ok(false);
        }
    }
}
