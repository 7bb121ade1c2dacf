//! Hides from a program the sockets by which other processes resolve names: such a name passes no rule.
//!
//! ```text
//!   the host's /run                  the program's /run, a tmpfs
//!     nscd/                            -
//!     dbus/                            -
//!     lock/                            lock/               bind mount
//!     systemd/resolve/                 systemd/resolve/
//!       io.systemd.Resolve               -
//!       stub-resolv.conf                 stub-resolv.conf  bind mount
//! ```
//!
//! A mount on each socket would not last: a service that starts anew removes its socket or folder, and the kernel then
//! removes what is mounted there, in every mount namespace. What services add to `/run` later is not seen either.
//!
//! Sources: nscd(8), nss-resolve(8), mount_namespaces(7).

use std::fs::{self, File, FileType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::netns::context;
use crate::program::STAGING;
use crate::resolv::RESOLV_CONF;

/// Where services have their sockets. The second one is mostly a link to the first.
const FOLDERS: [&str; 2] = ["/run", "/var/run"];
/// Below them: nscd(8), D-Bus (systemd-resolved and Avahi answer on the system's bus), Avahi.
const RESOLVERS: [&str; 4] = ["nscd", "unscd", "dbus", "avahi-daemon"];
/// Of this folder the sockets are hidden: it also has files of resolv.conf(5).
const RESOLVED: &str = "systemd/resolve";

/// What a program sees of the folders of services.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_enums, reason = "all or part")]
pub enum Hidden {
    /// Everything but the sockets of resolvers.
    Resolvers,
    /// Everything.
    Services,
}

/// What is done with an entry of a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    Shown,
    /// A folder of which a part is shown.
    Divided,
    Left,
}

/// Replaces `/run` for this process and its children. `shown`: sockets and folders that stay in any case, as the file
/// to which `/etc/resolv.conf` leads.
///
/// # Errors
/// The step that failed.
pub fn hide(hidden: Hidden, shown: &[PathBuf]) -> io::Result<()> {
    let is_own_folder = |f: &&str| fs::symlink_metadata(f).is_ok_and(|m| m.is_dir());
    let resolv_conf = fs::canonicalize(RESOLV_CONF).ok();
    let shown: Vec<PathBuf> = shown.iter().cloned().chain(resolv_conf).collect();
    let working = std::env::current_dir();
    for folder in FOLDERS.into_iter().filter(is_own_folder).map(Path::new) {
        let what = format!("cannot hide sockets of {} from the program", folder.display());
        context(&what, replace(folder, hidden, &shown))?;
    }
    // The working folder may be below what is replaced.
    let entered = working.and_then(std::env::set_current_dir);
    context("cannot enter the working folder, whose services are hidden", entered)
}

/// Puts `/dev/null` in the place of a socket or device.
///
/// # Errors
/// Those of mount(2). A socket that is gone is not an error.
pub fn cover(socket: &Path) -> io::Result<()> {
    let covered = mount(Some("/dev/null"), socket, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    match covered {
        Err(nix::Error::ENOENT) => Ok(()),
        covered => {
            let what = format!("cannot hide {} from the program", socket.display());
            context(&what, covered.map_err(Into::into))
        }
    }
}

/// Major number of ptys (Documentation/admin-guide/devices.txt): 136 to 143.
const PTYS: std::ops::Range<u64> = 136..144;

/// Gives a program ptys of its own and none of others, and covers every device of `/dev` that is the terminal `own`, a
/// number as of stat(2).
///
/// # Errors
/// The step that failed; there is no such device.
pub fn hide_terminals(own: u64) -> io::Result<()> {
    const PTS: &str = "/dev/pts";
    const PTMX: &str = "/dev/ptmx";
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let none = None::<&str>;
    if Path::new(PTS).is_dir() {
        let options = Some("ptmxmode=0666,mode=0620");
        let mounted = mount(Some("devpts"), PTS, Some("devpts"), flags, options);
        context("cannot hide other terminals from the program", mounted.map_err(Into::into))?;
        // Elsewhere it is a link to the other one.
        if fs::symlink_metadata(PTMX).is_ok_and(|m| m.file_type().is_char_device()) {
            let bound = mount(Some("/dev/pts/ptmx"), PTMX, none, MsFlags::MS_BIND, none);
            context("cannot give the program ptys of its own", bound.map_err(Into::into))?;
        }
    }
    let is_own = |m: fs::Metadata| m.file_type().is_char_device() && m.rdev() == own;
    let entries = fs::read_dir("/dev")?.flatten().map(|entry| entry.path());
    let nodes: Vec<PathBuf> =
        entries.filter(|path| fs::symlink_metadata(path).is_ok_and(is_own)).collect();
    if nodes.is_empty() && !PTYS.contains(&nix::sys::stat::major(own)) {
        let what = "cannot ask: the terminal is not in /dev; use --ask-socket PATH instead";
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    }
    nodes.iter().try_for_each(|node| cover(node))
}

fn replace(folder: &Path, hidden: Hidden, shown: &[PathBuf]) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let none = None::<&str>;
    mount(Some("fulmar"), STAGING, Some("tmpfs"), flags, Some("size=16m,mode=755"))?;
    let view = View { folder, hidden, shown };
    let made = view.fill(Path::new(STAGING), folder);
    let moved = made.and_then(|()| Ok(mount(Some(STAGING), folder, none, MsFlags::MS_MOVE, none)?));
    if moved.is_err() {
        umount2(STAGING, MntFlags::MNT_DETACH)?;
    }
    moved
}

/// The program's view of a folder of services.
struct View<'a> {
    folder: &'a Path,
    hidden: Hidden,
    shown: &'a [PathBuf],
}

impl View<'_> {
    /// Copies what is shown of a folder by bind mounts.
    fn fill(&self, into: &Path, from: &Path) -> io::Result<()> {
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let (path, copy) = (entry.path(), into.join(entry.file_name()));
            let kind = entry.file_type()?;
            match self.entry(&path, kind) {
                Entry::Left => {}
                Entry::Divided => {
                    fs::create_dir(&copy)?;
                    self.fill(&copy, &path)?;
                }
                Entry::Shown => match bind(&path, &copy, kind) {
                    // It was removed meanwhile.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    bound => bound?,
                },
            }
        }
        Ok(())
    }

    fn entry(&self, path: &Path, kind: FileType) -> Entry {
        let below = path.strip_prefix(self.folder).unwrap_or(path);
        if self.shown.iter().any(|shown| shown == path) {
            return Entry::Shown;
        }
        let is_part_shown = self.shown.iter().any(|shown| shown.starts_with(path))
            || (self.hidden == Hidden::Resolvers && Path::new(RESOLVED).starts_with(below));
        if kind.is_dir() && is_part_shown {
            return Entry::Divided;
        }
        let is_of_resolved = below.starts_with(RESOLVED);
        let is_left = match self.hidden {
            Hidden::Resolvers => {
                let is_resolvers = RESOLVERS.iter().any(|own| below.starts_with(own));
                is_resolvers || (is_of_resolved && kind.is_socket())
            }
            Hidden::Services => true,
        };
        if is_left { Entry::Left } else { Entry::Shown }
    }
}

fn bind(path: &Path, copy: &Path, kind: FileType) -> io::Result<()> {
    if kind.is_symlink() {
        return symlink(fs::read_link(path)?, copy);
    }
    if kind.is_dir() {
        fs::create_dir(copy)?;
    } else {
        File::create(copy)?;
    }
    let none = None::<&str>;
    Ok(mount(Some(path), copy, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?)
}
