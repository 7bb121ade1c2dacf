//! Namespaces for a program that the caller is about to become: its own network, and name resolution that leads to
//! the gateway.
//!
//! The program keeps its files: in its mount namespace only `/etc/resolv.conf` differs. Nothing is written to the
//! host's file system.
//!
//! Sources: user_namespaces(7), mount_namespaces(7), resolv.conf(5), icmp(7).

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use fulmar_netns::{HOW_TO_ALLOW, User, context, enter_with_mounts};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::getegid;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// A folder that every system has, under which a file system in memory is mounted for a moment.
const STAGING: &str = "/tmp";

/// Moves this process, which must have one thread, into namespaces for a program: see [`enter_with_mounts`].
///
/// # Errors
/// The system forbids it: the sentence says what to allow.
pub fn enter(user: User) -> io::Result<()> {
    enter_with_mounts(user).map_err(|e| {
        let sentence = format!("cannot make a namespace for the program: {e}; {HOW_TO_ALLOW}");
        io::Error::new(e.kind(), sentence)
    })?;
    let group = getegid();
    // Echo requests without a capability, as most hosts allow them; a kernel without it has no ping sockets.
    let _ = fs::write("/proc/sys/net/ipv4/ping_group_range", format!("{group} {group}"));
    Ok(())
}

/// Bind-mounts an `/etc/resolv.conf` for this process and its children: these resolvers, and the domains and options of
/// the host's file.
///
/// # Errors
/// The step that failed. A host without the file is left as it is.
pub fn resolve_through(nameservers: &[IpAddr]) -> io::Result<()> {
    let Ok(hosts) = fs::read_to_string(RESOLV_CONF) else { return Ok(()) };
    let none = None::<&str>;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mounted = mount(Some("fulmar"), STAGING, Some("tmpfs"), flags, Some("size=64k,mode=755"));
    context("cannot mount a file system in memory", mounted.map_err(Into::into))?;
    let file = Path::new(STAGING).join("resolv.conf");
    let bound = fs::write(&file, resolv_conf(&hosts, nameservers))
        .and_then(|()| Ok(mount(Some(&file), RESOLV_CONF, none, MsFlags::MS_BIND, none)?));
    // The bind mount keeps the file; the folder is what it was.
    umount2(STAGING, MntFlags::MNT_DETACH)?;
    context("cannot replace /etc/resolv.conf for the program", bound)
}

fn resolv_conf(hosts: &str, nameservers: &[IpAddr]) -> String {
    let mut text: String = nameservers.iter().map(|a| format!("nameserver {a}\n")).collect();
    let kept = hosts.lines().filter(|line| {
        let word = line.split_whitespace().next();
        matches!(word, Some("search" | "domain" | "options" | "sortlist"))
    });
    for line in kept {
        text.push_str(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_and_options_of_the_host_are_kept_and_its_resolvers_replaced() {
        let hosts = "# made by hand\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch a.example b.example\n";
        let text = resolv_conf(hosts, &["169.254.1.1".parse().unwrap()]);
        assert_eq!(
            text,
            "nameserver 169.254.1.1\noptions edns0 trust-ad\nsearch a.example b.example\n"
        );
    }
}
