//! Namespaces for a program that the caller is about to become: its own network, and name resolution that leads to
//! the gateway.
//!
//! The program keeps its files: in its mount namespace `/etc/resolv.conf` differs, and the folder of its rules is
//! read-only. Nothing is written to the host's file system but that folder, if it is missing.
//!
//! Sources: user_namespaces(7), mount_namespaces(7), resolv.conf(5), icmp(7), ioctl_tty(2), seccomp(2).

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use crate::netns::{HOW_TO_ALLOW, User, context, enter_user_with_mounts, enter_with_mounts};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::getegid;
use seccompiler::{apply_filter, sock_filter};

use crate::resolv::{RESOLV_CONF, contents, value_of};

/// Keywords of the host's resolv.conf that the program's has, too.
const KEPT: [&[u8]; 2] = [b"options", b"sortlist"];
const DOMAINS: [&[u8]; 2] = [b"search", b"domain"];
/// Without a list the C library takes the domain of the host's name.
const NO_DOMAIN: &[u8] = b"search .\n";
/// Bytes of the program's file.
const MOST_BYTES: usize = 32 << 10;
/// A folder that every system has, under which a file system in memory is mounted for a moment.
pub(crate) const STAGING: &str = "/tmp";

/// Moves this process, which must have one thread, into namespaces for a program: see [`enter_with_mounts`]. `is_strict`:
/// root, too, gets a user namespace.
///
/// # Errors
/// The system forbids it: the sentence says what to allow.
pub fn enter(user: User, is_strict: bool) -> io::Result<()> {
    let entered = match is_strict {
        true => enter_user_with_mounts(user),
        false => enter_with_mounts(user).map(drop),
    };
    entered.map_err(|e| {
        let sentence = format!("cannot create a namespace for the program: {e}; {HOW_TO_ALLOW}");
        io::Error::new(e.kind(), sentence)
    })?;
    let group = getegid();
    // Echo requests without a capability, as most hosts allow them; a kernel without it has no ping sockets.
    let _ = fs::write("/proc/sys/net/ipv4/ping_group_range", format!("{group} {group}"));
    // Ports below 1024, too: the network is the program's own. Root has a capability for them.
    let _ = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    Ok(())
}

/// The resolvers of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolvers {
    /// Their addresses.
    pub servers: Vec<IpAddr>,
    /// Names are completed by the domains of the host's file.
    pub has_domains: bool,
}

/// Bind-mounts an `/etc/resolv.conf` for this process and its children: these resolvers, and the domains and options of
/// the host's file.
///
/// # Errors
/// The step that failed. A host without the file is left as it is.
pub fn resolve_through(resolvers: &Resolvers) -> io::Result<()> {
    if !fs::metadata(RESOLV_CONF).is_ok_and(|m| !m.is_dir()) {
        return Ok(());
    }
    let text = resolv_conf(&contents(Path::new(RESOLV_CONF)).unwrap_or_default(), resolvers);
    mount_staging()?;
    let none = None::<&str>;
    let file = Path::new(STAGING).join("resolv.conf");
    let bound = fs::write(&file, text)
        .and_then(|()| Ok(mount(Some(&file), RESOLV_CONF, none, MsFlags::MS_BIND, none)?));
    // The bind mount keeps the file; the folder is what it was.
    umount2(STAGING, MntFlags::MNT_DETACH)?;
    context("cannot replace /etc/resolv.conf for the program", bound)
}

/// Makes a file or folder read-only for this process and its children, who cannot move it either. A folder that is
/// missing is made; where that is not possible, the program cannot make it either.
///
/// # Errors
/// The step that failed, for what exists.
pub fn make_read_only(path: &Path) -> io::Result<()> {
    let is_missing = !path.exists();
    if is_missing {
        let _ = fs::create_dir_all(path);
    }
    match bind_read_only(path) {
        Err(e) if !is_missing => {
            let what = format!("cannot make {} read-only for the program", path.display());
            context(&what, Err(e.into()))
        }
        _ => Ok(()),
    }
}

fn bind_read_only(path: &Path) -> nix::Result<()> {
    let none = None::<&str>;
    mount(Some(path), path, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
    // A remount must keep the restrictions that the file system already has. Those of access times stay unless it names
    // one (Linux's path_mount).
    let own = statvfs(path)?.flags();
    let kept = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
    ];
    let kept = kept.into_iter().filter(|(flag, _)| own.contains(*flag)).map(|(_, flag)| flag);
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, path, none, kept.fold(read_only, MsFlags::union), none)
}

/// The architectures by which a program can call the kernel, each with its number of ioctl (linux/audit.h,
/// asm/unistd.h): x86-64, its x32, and i386; arm64 and arm; RISC-V.
#[cfg(target_arch = "x86_64")]
const IOCTLS: &[(u32, u32)] = &[(0xc000_003e, 16), (0xc000_003e, 0x4000_0202), (0x4000_0003, 54)];
#[cfg(target_arch = "aarch64")]
const IOCTLS: &[(u32, u32)] = &[(0xc000_00b7, 29), (0x4000_0028, 54)];
#[cfg(target_arch = "riscv64")]
const IOCTLS: &[(u32, u32)] = &[(0xc000_00f3, 29)];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
const IOCTLS: &[(u32, u32)] = &[];

/// Requests that type into a terminal (asm-generic/ioctls.h).
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;

/// Keeps this process and its children from typing into their terminal, which the caller's shell would take for
/// commands: those requests of ioctl(2) fail with EPERM. It forbids new privileges, too (PR_SET_NO_NEW_PRIVS).
///
/// # Errors
/// The kernel has no filters of system calls.
pub fn forbid_terminal_input() -> io::Result<()> {
    let applied = apply_filter(&terminal_filter()).map_err(io::Error::other);
    context("cannot block injection of terminal input by the program (seccomp)", applied)
}

/// Of BPF, since a filter for one architecture would end a program that calls the kernel by another one.
fn terminal_filter() -> Vec<sock_filter> {
    let step = |code: u32, jt: u8, jf: u8, k: u32| sock_filter { code: code as u16, jt, jf, k };
    let load = |offset: u32| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let equals = |k, jt, jf| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, k);
    let returns = |k| step(libc::BPF_RET | libc::BPF_K, 0, 0, k);
    // struct seccomp_data: the number, the architecture, the address, the arguments. The request is 32 bits of the
    // second one, which come first on the architectures above.
    let (number, architecture, request) = (0, 4, 24);
    let mut filter = Vec::new();
    for (n, (arch, call)) in IOCTLS.iter().enumerate() {
        let after = 4 * (IOCTLS.len() - n - 1) as u8;
        filter.extend([load(architecture), equals(*arch, 0, 2)]);
        filter.extend([load(number), equals(*call, after + 1, 0)]);
    }
    filter.push(returns(libc::SECCOMP_RET_ALLOW));
    filter.extend([load(request), equals(TIOCSTI, 1, 0), equals(TIOCLINUX, 0, 1)]);
    filter.push(returns(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    filter.push(returns(libc::SECCOMP_RET_ALLOW));
    filter
}

/// Mounts a small file system in memory on [`STAGING`].
pub(crate) fn mount_staging() -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mounted = mount(Some("fulmar"), STAGING, Some("tmpfs"), flags, Some("size=64k,mode=755"));
    context("cannot mount a tmpfs", mounted.map_err(Into::into))
}

/// The file of a program, of at most [`MOST_BYTES`]: lines of the host's that do not fit are left out.
pub(crate) fn resolv_conf(hosts: &[u8], resolvers: &Resolvers) -> Vec<u8> {
    let servers = resolvers.servers.iter().map(|a| format!("nameserver {a}\n"));
    let mut text = servers.collect::<String>().into_bytes();
    let domains: &[&[u8]] = if resolvers.has_domains { &DOMAINS } else { &[] };
    text.extend(if resolvers.has_domains { b"" } else { NO_DOMAIN });
    let kept = KEPT.iter().chain(domains);
    let is_kept = |line: &&[u8]| kept.clone().any(|keyword| value_of(line, keyword).is_some());
    for line in hosts.split(|byte| *byte == b'\n').filter(is_kept) {
        if text.len() + line.len() < MOST_BYTES {
            text.extend_from_slice(line);
            text.push(b'\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_and_options_of_the_host_are_kept_and_its_resolvers_replaced() {
        let hosts = b"# made by hand\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch a.example b.example\n";
        let servers = vec!["169.254.1.1".parse().unwrap()];
        let own = Resolvers { servers, has_domains: true };
        assert_eq!(
            String::from_utf8(resolv_conf(hosts, &own)).unwrap(),
            "nameserver 169.254.1.1\noptions edns0 trust-ad\nsearch a.example b.example\n"
        );
        let without = Resolvers { has_domains: false, ..own.clone() };
        assert_eq!(
            String::from_utf8(resolv_conf(hosts, &without)).unwrap(),
            "nameserver 169.254.1.1\nsearch .\noptions edns0 trust-ad\n"
        );
        let long =
            ["search ".as_bytes(), &b"x".repeat(10 << 20), b"\noptions \xff\nsearch a.example"]
                .concat();
        assert_eq!(
            resolv_conf(&long, &own),
            b"nameserver 169.254.1.1\noptions \xff\nsearch a.example\n",
            "what does not fit is left out"
        );
    }
}
