//! The user that a gateway becomes after its set-up.

use std::io;

use nix::unistd::{Gid, Group, Uid, User, geteuid, setgroups, setresgid, setresuid};

/// Whom a gateway started as root becomes.
const NOBODY: &str = "nobody";

/// The id of the user `nobody` on a system without that name.
const NOBODY_ID: u32 = 65_534;

/// A user and a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    uid: Uid,
    gid: Gid,
    /// In a guest's user namespace: its root, where it has no such user.
    or_root: bool,
}

/// Whether this is root of the whole system. To be asked before a guest's user namespace is joined.
pub fn is_system_root() -> bool {
    geteuid().is_root() && is_initial_namespace()
}

/// Gives up the groups of root of the whole system: in a guest's user namespace that may be forbidden.
///
/// # Errors
/// The system refuses it.
pub fn leave_groups() -> io::Result<()> {
    setgroups(&[])
        .map_err(|e| io::Error::other(format!("cannot drop root's supplementary groups: {e}")))
}

/// The user to become: the option's, else the user `nobody` if the process was root of the initial user namespace
/// before it joined the guest's. The guest's namespace may not have that user, and its root is another user outside.
///
/// # Errors
/// The user or group does not exist, or a user other than root gave the option.
pub fn wanted(option: Option<&str>, was_root: bool) -> Result<Option<Identity>, String> {
    let Some(text) = option else { return Ok(was_root.then(nobody)) };
    let identity = parse(text)?;
    if was_root || geteuid().is_root() {
        Ok(Some(identity))
    } else {
        Err("--runas requires root".into())
    }
}

fn nobody() -> Identity {
    let (uid, gid) = (Uid::from_raw(NOBODY_ID), Gid::from_raw(NOBODY_ID));
    let named = parse(NOBODY).unwrap_or(Identity { uid, gid, or_root: false });
    Identity { or_root: !is_initial_namespace(), ..named }
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
            let found = found.ok_or_else(|| format!("--runas: unknown user `{user}`"))?;
            (found.uid, Some(found.gid))
        }
    };
    let gid = match group.map(str::parse) {
        None => own_group.unwrap_or(Gid::from_raw(uid.as_raw())),
        Some(Ok(number)) => Gid::from_raw(number),
        Some(Err(_)) => {
            let name = group.unwrap_or_default();
            let found = Group::from_name(name).ok().flatten();
            found.ok_or_else(|| format!("--runas: unknown group `{name}`"))?.gid
        }
    };
    Ok(Identity { uid, gid, or_root: false })
}

impl Identity {
    /// Becomes this user, with no other groups. All threads do.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn assume(self) -> io::Result<()> {
        let turn_into = |uid, gid| setresgid(gid, gid, gid).and_then(|()| setresuid(uid, uid, uid));
        let groups = setgroups(&[]);
        let done = match self.or_root {
            false => groups.and_then(|()| turn_into(self.uid, self.gid)),
            // The namespace may forbid to change groups, and map one user alone.
            true => turn_into(self.uid, self.gid)
                .or_else(|_| turn_into(Uid::from_raw(0), Gid::from_raw(0))),
        };
        done.map_err(|e| io::Error::other(format!("cannot switch to user {}: {e}", self.uid)))
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
        assert!(ids("no-such-user").unwrap_err().contains("unknown user `no-such-user`"));
        assert!(ids("root:no-such-group").unwrap_err().contains("unknown group"));
    }
}
