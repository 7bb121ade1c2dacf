//! The rights that a gateway drops once it is set up, so that a guest that takes it over gains nothing.
//!
//! [`empty_root`] leaves the process a root directory without files. [`contain`] drops all capabilities, forbids new
//! privileges, forbids the file system (Landlock) and allows only the system calls of the relay (seccomp). A forbidden
//! system call fails with EPERM; it does not end the process, so that a library which tries a newer call first falls
//! back. What was opened before stays open.
//!
//! Sources: capabilities(7), landlock(7), seccomp(2), PR_SET_NO_NEW_PRIVS(2const).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use caps::CapSet;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};

/// How far the kernel let the process be contained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Containment {
    /// The file system is out of reach. Kernels before 5.13, and some configurations, have no Landlock; the
    /// filter of system calls forbids opening files all the same.
    pub has_landlock: bool,
}

impl fmt::Display for Containment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no capabilities, no new privileges, only the system calls of the relay")?;
        f.write_str(if self.has_landlock {
            ", no file system"
        } else {
            "; this kernel has no Landlock, so only the system call filter blocks the file system"
        })
    }
}

/// The system calls of the relay. `socket` has conditions of its own: see [`SOCKET_DOMAINS`].
const ALLOWED: &[libc::c_long] = &[
    // Bytes.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_splice,
    // Sockets.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Descriptors.
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_pipe2,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_ppoll,
    libc::SYS_restart_syscall,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Time and randomness.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrusage,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads and signals; the exit. clone3 is answered by the other filter.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// Calls that only some architectures have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[libc::c_long] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[libc::c_long] = &[];

/// No raw, packet or netlink sockets: TCP, UDP and ping sockets of both IP versions. No Unix sockets, by which the
/// services of the user could be reached: the one that answers `fulmar stat` is open already.
const SOCKET_DOMAINS: [libc::c_int; 2] = [libc::AF_INET, libc::AF_INET6];
const SOCKET_TYPES: [libc::c_int; 2] = [libc::SOCK_STREAM, libc::SOCK_DGRAM];
/// The pairs of domain and type, each with the protocol that is allowed besides the default (0).
const SOCKET_PROTOCOLS: [(libc::c_int, libc::c_int, libc::c_int); 4] = [
    (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP),
    (libc::AF_INET6, libc::SOCK_STREAM, libc::IPPROTO_TCP),
    (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP),
    (libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_ICMPV6),
];
/// The allowed commands of fcntl(2): none that makes a descriptor send signals (F_SETOWN, F_SETSIG).
const DESCRIPTOR_CALLS: [libc::c_int; 5] =
    [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL];
/// The bits of a socket's type that are flags: SOCK_CLOEXEC and SOCK_NONBLOCK.
const SOCKET_FLAGS: libc::c_int = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;

/// Folders of which every system has one, to mount the empty root on.
const MOUNT_POINTS: [&str; 4] = ["/tmp", "/proc", "/dev", "/mnt"];
/// A joined thread may still be listed for a moment.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Replaces the root directory of the process by an empty one that cannot be written to, in a mount namespace of
/// its own. What is open stays open.
///
/// # Errors
/// The step that failed: without CAP_SYS_ADMIN the first one.
pub fn empty_root() -> io::Result<()> {
    let step = |what: &str, done: nix::Result<()>| {
        done.map_err(|e| {
            io::Error::other(format!("cannot create an empty root directory: {what}: {e}"))
        })
    };
    let none = None::<&str>;
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let point = MOUNT_POINTS.into_iter().find(|p| Path::new(p).is_dir()).unwrap_or("/");
    step("unshare", unshare(CloneFlags::CLONE_NEWNS))?;
    step("private mounts", mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none))?;
    step(
        "tmpfs",
        mount(Some("fulmar"), point, Some("tmpfs"), quiet, Some("nr_inodes=2,nr_blocks=1")),
    )?;
    step("chdir", nix::unistd::chdir(point))?;
    // The old root is mounted over the new one, and is unmounted (pivot_root(2), NOTES).
    step("pivot_root", nix::unistd::pivot_root(".", "."))?;
    step("umount", umount2(".", MntFlags::MNT_DETACH))?;
    let read_only = quiet | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    step("read-only", mount(none, "/", none, read_only, none))?;
    step("chdir", nix::unistd::chdir("/"))
}

/// Contains the process and the threads that it starts from now on, for good.
///
/// # Errors
/// The process has more than one thread: capabilities are a thread's own. The kernel refused a step, which the error
/// names. A kernel without Landlock is not an error.
pub fn contain() -> io::Result<Containment> {
    let deadline = Instant::now() + THREAD_EXIT_TIMEOUT;
    while std::fs::read_dir("/proc/self/task")?.count() > 1 {
        if Instant::now() > deadline {
            return Err(io::Error::other("cannot contain a process with several threads"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    contain_thread()
}

/// Contains the calling thread and the threads that it starts from now on. For a process whose threads stand in
/// several network namespaces: each of them has to call this.
///
/// # Errors
/// As [`contain`].
pub fn contain_thread() -> io::Result<Containment> {
    let step = |what: &str, e: &dyn fmt::Display| io::Error::other(format!("{what}: {e}"));
    drop_rights()?;
    let has_landlock =
        restrict_files(None).map_err(|e| step("cannot block the file system (Landlock)", &e))?;
    // The stricter answer of two filters counts, and the first one has to let the second one in.
    for program in [without_clone3(), filter()] {
        let program = program.map_err(|e| step("cannot build the system call filter", &e))?;
        apply_filter(&program)
            .map_err(|e| step("cannot install the system call filter (seccomp)", &e))?;
    }
    Ok(Containment { has_landlock })
}

/// Contains a process of one thread that reads files, and does nothing else with the system that needs a right: it has
/// no capability, and can write to no file and start no program.
///
/// # Errors
/// The kernel refused a step, which the error names.
pub fn contain_reader() -> io::Result<()> {
    let step = |what: &str, e: &dyn fmt::Display| io::Error::other(format!("{what}: {e}"));
    drop_rights()?;
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    restrict_files(Some(reads)).map_err(|e| step("cannot restrict files (Landlock)", &e))?;
    Ok(())
}

/// Drops all capabilities and forbids new privileges.
pub(crate) fn drop_rights() -> io::Result<()> {
    let step = |what: &str, e: &dyn fmt::Display| io::Error::other(format!("{what}: {e}"));
    for set in [CapSet::Ambient, CapSet::Bounding] {
        // Taking from the bounding set needs CAP_SETPCAP: without it there is nothing to lose.
        let _ = caps::clear(None, set);
    }
    for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        caps::clear(None, set).map_err(|e| step("cannot drop capabilities", &e))?;
    }
    nix::sys::prctl::set_no_new_privs()
        .map_err(|e| step("cannot forbid new privileges (PR_SET_NO_NEW_PRIVS)", &e))
}

/// Forbids every access to files but `allowed`, and signals to and abstract sockets of processes outside. Returns whether the
/// kernel has Landlock.
fn restrict_files(allowed: Option<BitFlags<AccessFs>>) -> Result<bool, landlock::RulesetError> {
    let abi = ABI::V6;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    if let Some(allowed) = allowed {
        rules = rules.add_rules(path_beneath_rules(["/"], allowed))?;
    }
    let status = rules.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, Vec::new())).collect();
    let is = |index, value: libc::c_int| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value as u64)
    };
    let mut sockets = Vec::new();
    for domain in SOCKET_DOMAINS {
        for kind in SOCKET_TYPES {
            let mask = SeccompCmpOp::MaskedEq(!SOCKET_FLAGS as u32 as u64);
            let of_kind = SeccompCondition::new(1, SeccompCmpArgLen::Dword, mask, kind as u64)?;
            let own = SOCKET_PROTOCOLS.iter().filter(|(d, k, _)| (*d, *k) == (domain, kind));
            for protocol in own.map(|(.., protocol)| *protocol).chain([0]) {
                let of_kind = of_kind.clone();
                sockets.push(SeccompRule::new(vec![is(0, domain)?, of_kind, is(2, protocol)?])?);
            }
        }
    }
    let fcntl = DESCRIPTOR_CALLS.map(|call| SeccompRule::new(vec![is(1, call)?]));
    rules.insert(libc::SYS_fcntl, fcntl.into_iter().collect::<Result<_, _>>()?);
    rules.insert(libc::SYS_socket, sockets);
    // Memory, but none that is executable.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let mask = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
        let without_exec = SeccompCondition::new(2, SeccompCmpArgLen::Dword, mask, 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![without_exec])?]);
    }
    // Threads, but no processes and no namespaces: clone with CLONE_THREAD.
    let mask = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
    let thread =
        SeccompCondition::new(0, SeccompCmpArgLen::Qword, mask, libc::CLONE_THREAD as u64)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![thread])?]);
    // The process may signal its own threads, for an abort. Before ABI 6, Landlock does not prevent signals to threads
    // of other processes.
    let own = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        std::process::id().into(),
    )?;
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![own])?]);
    // Of the devices' requests the one by which std makes a socket non-blocking.
    let non_blocking =
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::FIONBIO as _)?;
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(vec![non_blocking])?]);
    let arch = std::env::consts::ARCH.try_into()?;
    let otherwise = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, otherwise, SeccompAction::Allow, arch)?.try_into()
}

/// clone3 passes its flags in memory, which a filter cannot read. With ENOSYS the C library falls back to clone.
fn without_clone3() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let arch = std::env::consts::ARCH.try_into()?;
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, missing, arch)?.try_into()
}
