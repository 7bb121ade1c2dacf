//! Files that a gateway writes, perhaps as root, at paths where other users may have put something.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

/// Opens a file to write to, or makes it with this mode. What is in it stays.
///
/// # Errors
/// Those of `open`; a sentence: the file is another user's, or the path is a link that another user may have made.
pub fn open(path: &Path, mode: u32, is_appended: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).append(is_appended).create(true).truncate(false).mode(mode);
    if !is_in_own_folder(path) {
        options.custom_flags(OFlag::O_NOFOLLOW.bits());
    }
    let file = options.open(path).map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other(
            "it is a symbolic link in a directory that others can write to; give the path of its target",
        ),
        _ => e,
    })?;
    let about = file.metadata()?;
    if about.is_file() && about.uid() != geteuid().as_raw() {
        return Err(io::Error::other("the file belongs to another user; choose another file"));
    }
    Ok(file)
}

/// Whether only this user and root can have put a link there, such as /dev/stdout and the links in /proc/self/fd.
fn is_in_own_folder(path: &Path) -> bool {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::metadata(parent).is_ok_and(|folder| {
        let is_own = [0, geteuid().as_raw()].contains(&folder.uid());
        is_own && folder.mode() & WRITABLE_BY_OTHERS == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_link_in_a_folder_of_several_users_is_not_followed() {
        let folder = std::env::temp_dir().join(format!("fulmar-output-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.join(name));
        fs::write(&file, "kept").unwrap();
        symlink(&file, &link).unwrap();
        for (mode, is_followed) in [(0o1777, false), (0o775, false), (0o755, true)] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            let opened = open(&link, 0o600, false);
            assert_eq!(opened.is_ok(), is_followed, "{mode:o}");
            assert!(open(&file, 0o600, true).is_ok(), "{mode:o}");
        }
        assert_eq!(fs::read(&file).unwrap(), b"kept");
        fs::remove_dir_all(&folder).unwrap();
        assert!(open(Path::new("/dev/stdout"), 0o600, false).is_ok());
        assert!(open(Path::new("/dev/null"), 0o600, false).is_ok());
    }
}
