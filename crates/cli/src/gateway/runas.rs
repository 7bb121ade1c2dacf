//! The user that a gateway becomes after its set-up.

use std::io;

use nix::unistd::{Gid, Group, Uid, User, geteuid, setgroups, setresgid, setresuid};

/// Whom a gateway started as root becomes.
const NOBODY: &str = "nobody";

/// A user and a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    uid: Uid,
    gid: Gid,
}

/// Whom to become: as the option says, else nobody if this is root of the whole system. To be asked after the
/// guest's user namespace was joined, which may know no such user.
///
/// # Errors
/// There is no such user or group, or the option is given by another than root.
pub fn wanted(option: Option<&str>) -> Result<Option<Identity>, String> {
    let is_root = geteuid().is_root();
    let Some(text) = option else {
        return Ok(if is_root && is_initial_namespace() { parse(NOBODY).ok() } else { None });
    };
    let identity = parse(text)?;
    if is_root { Ok(Some(identity)) } else { Err("only root can use --runas".into()) }
}

/// The initial user namespace maps every id to itself.
fn is_initial_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn parse(text: &str) -> Result<Identity, String> {
    let (user, group) = text.split_once(':').map_or((text, None), |(u, g)| (u, Some(g)));
    let (uid, own_group) = match user.parse() {
        Ok(number) => (Uid::from_raw(number), None),
        Err(_) => {
            let found = User::from_name(user).ok().flatten();
            let found = found.ok_or_else(|| format!("--runas: there is no user `{user}`"))?;
            (found.uid, Some(found.gid))
        }
    };
    let gid = match group.map(str::parse) {
        None => own_group.unwrap_or(Gid::from_raw(uid.as_raw())),
        Some(Ok(number)) => Gid::from_raw(number),
        Some(Err(_)) => {
            let name = group.unwrap_or_default();
            let found = Group::from_name(name).ok().flatten();
            found.ok_or_else(|| format!("--runas: there is no group `{name}`"))?.gid
        }
    };
    Ok(Identity { uid, gid })
}

impl Identity {
    /// Becomes this user, with no other groups. All threads do.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn assume(self) -> io::Result<()> {
        let done = setgroups(&[])
            .and_then(|()| setresgid(self.gid, self.gid, self.gid))
            .and_then(|()| setresuid(self.uid, self.uid, self.uid));
        done.map_err(|e| io::Error::other(format!("cannot become user {}: {e}", self.uid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_numbers_or_names() {
        let ids = |text: &str| parse(text).map(|i| (i.uid.as_raw(), i.gid.as_raw()));
        assert_eq!(ids("12"), Ok((12, 12)));
        assert_eq!(ids("12:34"), Ok((12, 34)));
        assert_eq!(ids("root"), Ok((0, 0)));
        assert_eq!(ids("root:12"), Ok((0, 12)));
        assert!(ids("no-such-user").unwrap_err().contains("no user `no-such-user`"));
        assert!(ids("root:no-such-group").unwrap_err().contains("no group"));
    }
}
