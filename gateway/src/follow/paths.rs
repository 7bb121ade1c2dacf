//! Changes of a file that is named by a path: it is written in place, another one is renamed over it, a symbolic link on
//! the way leads elsewhere, a folder on the way appears.
//!
//! Watched are the name of each step in its folder, as the kernel resolves the path, and the file itself: a file that is
//! mounted on its name is written under another one.
//!
//! Sources: inotify(7), path_resolution(7).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

/// Symbolic links that are followed (path_resolution(7)).
const MOST_LINKS: usize = 40;
/// Steps that are watched.
const MOST_STEPS: usize = 256;

/// A path that is watched with the links that it had when it was checked.
pub(crate) struct PathWatch {
    inotify: Inotify,
    /// The folders, and the name in each.
    steps: Vec<(WatchDescriptor, OsString)>,
}

impl PathWatch {
    /// Watches an absolute path, as far as it leads.
    ///
    /// # Errors
    /// The user has no inotify instance left.
    pub(crate) fn new(path: &Path) -> io::Result<PathWatch> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let mut watch = PathWatch { inotify, steps: Vec::new() };
        let file =
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_ATTRIB;
        if let Some(end) = watch.walk(path) {
            // It may be unreadable, or gone by now: its folder tells.
            let _ = watch.inotify.add_watch(&end, file | AddWatchFlags::IN_DELETE_SELF);
        }
        Ok(watch)
    }

    /// Watches each step. Returns where the path leads, if it leads to something.
    fn walk(&mut self, path: &Path) -> Option<PathBuf> {
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        let mut left: Vec<OsString> = steps_of(path);
        while let Some(step) = left.pop() {
            match Path::new(&step).components().next() {
                Some(Component::RootDir) => at = PathBuf::from("/"),
                Some(Component::ParentDir) => drop(at.pop()),
                Some(Component::Normal(name)) if self.steps.len() < MOST_STEPS => {
                    self.add(&at, name)?;
                    let next = at.join(name);
                    if std::fs::symlink_metadata(&next).ok()?.is_symlink() {
                        links += 1;
                        let target = std::fs::read_link(&next).ok()?;
                        left.extend(steps_of(&target));
                    } else {
                        at = next;
                    }
                }
                Some(Component::Normal(_)) => return None,
                _ => {}
            }
            if links > MOST_LINKS {
                return None;
            }
        }
        Some(at)
    }

    /// Watches a name in a folder.
    fn add(&mut self, folder: &Path, name: &OsStr) -> Option<()> {
        let of_names = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CLOSE_WRITE;
        let of_folder = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        let mask = of_names | of_folder | AddWatchFlags::IN_ONLYDIR;
        let watch = self.inotify.add_watch(folder, mask).ok()?;
        self.steps.push((watch, name.to_owned()));
        Some(())
    }

    /// Whether the path may lead elsewhere by now, or the file have changed.
    pub(crate) fn has_changed(&self) -> bool {
        let mut has_changed = false;
        loop {
            match self.inotify.read_events() {
                Ok(events) => {
                    has_changed |= events.iter().any(|e| self.is_step(e.wd, e.name.as_deref()))
                }
                Err(Errno::EINTR) => {}
                // No more events now. If the watch has failed, the file is checked by time.
                Err(_) => return has_changed,
            }
        }
    }

    /// Whether an event is about a step. What has no name is about a folder or the file itself, or tells of lost events.
    fn is_step(&self, watch: WatchDescriptor, name: Option<&OsStr>) -> bool {
        name.is_none_or(|name| {
            self.steps.iter().any(|(w, step)| (*w, step.as_os_str()) == (watch, name))
        })
    }
}

impl AsFd for PathWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

/// The steps of a path, the last one first.
fn steps_of(path: &Path) -> Vec<OsString> {
    let mut steps: Vec<OsString> = path.components().map(|c| c.as_os_str().to_owned()).collect();
    steps.reverse();
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A folder of its own; nothing is left of it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder =
                std::env::temp_dir().join(format!("fulmar-paths-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).unwrap();
            Folder(fs::canonicalize(folder).unwrap())
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Whether a change of the folder is seen by a watch on `path` in it, and nothing before it.
    fn sees(folder: &Folder, path: &str, change: impl FnOnce()) -> bool {
        let watch = PathWatch::new(&folder.at(path)).unwrap();
        assert!(!watch.has_changed(), "nothing has changed yet");
        change();
        watch.has_changed()
    }

    #[test]
    fn a_file_that_is_written_replaced_removed_or_made_has_changed() {
        let folder = Folder::new("file");
        let (file, other) = (folder.at("file"), folder.at("other"));
        assert!(sees(&folder, "file", || fs::write(&file, "1").unwrap()), "made");
        assert!(sees(&folder, "file", || fs::write(&file, "2").unwrap()), "written");
        assert!(!sees(&folder, "file", || fs::write(&other, "3").unwrap()), "another one");
        assert!(sees(&folder, "file", || fs::rename(&other, &file).unwrap()), "renamed over");
        assert!(sees(&folder, "file", || fs::remove_file(&file).unwrap()), "removed");
    }

    #[test]
    fn a_link_that_leads_elsewhere_has_changed_and_so_has_what_it_leads_to() {
        let folder = Folder::new("link");
        fs::create_dir_all(folder.at("run/a")).unwrap();
        fs::create_dir_all(folder.at("run/b")).unwrap();
        fs::create_dir_all(folder.at("etc")).unwrap();
        fs::write(folder.at("run/a/stub"), "a").unwrap();
        fs::write(folder.at("run/b/stub"), "b").unwrap();
        symlink("a", folder.at("run/current")).unwrap();
        symlink("../run/current/stub", folder.at("etc/file")).unwrap();
        let path = "etc/file";
        assert!(sees(&folder, path, || fs::write(folder.at("run/a/stub"), "A").unwrap()));
        assert!(!sees(&folder, path, || fs::write(folder.at("run/b/stub"), "B").unwrap()));
        let retarget = |link: &str, to: &str| {
            symlink(to, folder.at("new")).unwrap();
            fs::rename(folder.at("new"), folder.at(link)).unwrap();
        };
        assert!(sees(&folder, path, || retarget("run/current", "b")), "a folder on the way");
        assert!(sees(&folder, path, || fs::write(folder.at("run/b/stub"), "C").unwrap()));
        let absolute = folder.at("run/a/stub").display().to_string();
        assert!(sees(&folder, path, || retarget("etc/file", &absolute)), "the file itself");
        assert!(sees(&folder, path, || fs::write(folder.at("run/a/stub"), "D").unwrap()));
        assert!(sees(&folder, path, || retarget("etc/file", "../run/c/stub")), "to nothing");
        assert!(sees(&folder, path, || fs::create_dir(folder.at("run/c")).unwrap()), "on the way");
        assert!(sees(&folder, path, || fs::write(folder.at("run/c/stub"), "E").unwrap()));
    }

    #[test]
    fn links_in_a_circle_come_to_an_end() {
        let folder = Folder::new("circle");
        symlink("b", folder.at("a")).unwrap();
        symlink("a", folder.at("b")).unwrap();
        assert!(sees(&folder, "a", || fs::remove_file(folder.at("b")).unwrap()));
    }
}
