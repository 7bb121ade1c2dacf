//! What `--strict` takes from a program so that its network is the only way out: Unix sockets, sockets of other families,
//! io_uring, capabilities, signals to processes outside.
//!
//! A filter cannot read the address of a connect(2), which is in the program's memory. So the filter refuses to make the
//! socket: of all families but IPv4, IPv6 and netlink, whose sockets belong to the network namespace. A pair of
//! connected stream sockets stays allowed, which cannot be connected to anything else. io_uring would make sockets
//! that no filter sees.
//!
//! Sources: seccomp(2), landlock(7), unix(7), socketcall(2), io_uring_setup(2), linux/audit.h, asm/unistd.h.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    Scope, path_beneath_rules,
};
use nix::sched::{CloneFlags, unshare};
use seccompiler::{apply_filter, sock_filter};

use crate::contain::drop_rights;

/// A way to call the kernel, and its numbers of the calls that the filter looks at.
struct Calls {
    architecture: u32,
    socket: u32,
    socketpair: u32,
    /// All calls of sockets in one, with their arguments in memory: i386.
    socketcall: Option<u32>,
    io_uring_setup: u32,
}

#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

#[cfg(target_arch = "x86_64")]
const CALLS: &[Calls] = &[
    Calls {
        architecture: 0xc000_003e,
        socket: 41,
        socketpair: 53,
        socketcall: None,
        io_uring_setup: 425,
    },
    Calls {
        architecture: 0xc000_003e,
        socket: X32 + 41,
        socketpair: X32 + 53,
        socketcall: None,
        io_uring_setup: X32 + 425,
    },
    Calls {
        architecture: 0x4000_0003,
        socket: 359,
        socketpair: 360,
        socketcall: Some(102),
        io_uring_setup: 425,
    },
];
#[cfg(target_arch = "aarch64")]
const CALLS: &[Calls] = &[
    Calls {
        architecture: 0xc000_00b7,
        socket: 198,
        socketpair: 199,
        socketcall: None,
        io_uring_setup: 425,
    },
    Calls {
        architecture: 0x4000_0028,
        socket: 281,
        socketpair: 288,
        socketcall: None,
        io_uring_setup: 425,
    },
];
#[cfg(target_arch = "riscv64")]
const CALLS: &[Calls] = &[Calls {
    architecture: 0xc000_00f3,
    socket: 198,
    socketpair: 199,
    socketcall: None,
    io_uring_setup: 425,
}];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
const CALLS: &[Calls] = &[];

/// Families whose sockets belong to the network namespace.
const FAMILIES: [libc::c_int; 3] = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
/// Pairs that stay connected to each other (unix(7)). A datagram socket can be sent to any other address.
const PAIRS: [libc::c_int; 2] = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
const TYPE_MASK: u32 = 0xf;
/// The calls of socketcall(2) that make sockets (linux/net.h).
const SYS_SOCKET: u32 = 1;
const SYS_SOCKETPAIR: u32 = 8;

/// Confines this process, which must have one thread, and its children. `unix`: the Unix sockets that they may connect
/// to. Given any, they may make Unix sockets; before Linux 7.1 the kernel cannot tell these sockets from others.
///
/// # Errors
/// The kernel or the architecture lacks something, which the error names.
pub fn confine(unix: &[PathBuf]) -> io::Result<()> {
    let step = |what: &str, e: &dyn Display| io::Error::other(format!("{what}: {e}"));
    if CALLS.is_empty() {
        let what = format!("--strict has no filter for {}", std::env::consts::ARCH);
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    unshare(CloneFlags::CLONE_NEWIPC).map_err(|e| step("cannot separate System V IPC", &e))?;
    drop_rights()?;
    restrict(unix).map_err(|e| step("cannot confine the program (Landlock)", &e))?;
    apply_filter(&filter(!unix.is_empty()))
        .map_err(|e| step("cannot install the system call filter (seccomp)", &e))
}

/// Forbids signals to processes outside, and Unix sockets of others, as far as the kernel can.
fn restrict(unix: &[PathBuf]) -> Result<(), landlock::RulesetError> {
    let connects = AccessFs::ResolveUnix;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .scope(Scope::from_all(ABI::V6))?;
    if !unix.is_empty() {
        rules = rules.handle_access(connects)?;
    }
    rules.create()?.add_rules(path_beneath_rules(unix, connects))?.restrict_self()?;
    Ok(())
}

fn filter(has_unix: bool) -> Vec<sock_filter> {
    let mut filter = Vec::new();
    for calls in CALLS {
        let mut block = vec![load(NUMBER)];
        block.extend(when(calls.io_uring_setup, vec![returns(errno(libc::EPERM))]));
        block.extend(when(calls.socket, socket_check(has_unix)));
        block.extend(when(calls.socketpair, pair_check(has_unix)));
        if let Some(number) = calls.socketcall {
            block.extend(when(number, socketcall_check()));
        }
        filter.push(load(ARCHITECTURE));
        filter.extend(when(calls.architecture, block));
    }
    filter.push(returns(libc::SECCOMP_RET_ALLOW));
    filter
}

fn socket_check(has_unix: bool) -> Vec<sock_filter> {
    let unix = has_unix.then_some(libc::AF_UNIX);
    let mut check = vec![load(argument(0))];
    for family in FAMILIES.into_iter().chain(unix) {
        check.extend(when(family as u32, vec![returns(libc::SECCOMP_RET_ALLOW)]));
    }
    check.push(returns(errno(libc::EAFNOSUPPORT)));
    check
}

fn pair_check(has_unix: bool) -> Vec<sock_filter> {
    let datagrams = has_unix.then_some(libc::SOCK_DGRAM);
    let mut kinds = vec![load(argument(1)), and(TYPE_MASK)];
    for kind in PAIRS.into_iter().chain(datagrams) {
        kinds.extend(when(kind as u32, vec![returns(libc::SECCOMP_RET_ALLOW)]));
    }
    kinds.push(returns(errno(libc::EPERM)));
    let mut check = vec![load(argument(0))];
    check.extend(when(libc::AF_UNIX as u32, kinds));
    check.push(returns(errno(libc::EAFNOSUPPORT)));
    check
}

fn socketcall_check() -> Vec<sock_filter> {
    let mut check = vec![load(argument(0))];
    for call in [SYS_SOCKET, SYS_SOCKETPAIR] {
        check.extend(when(call, vec![returns(errno(libc::EPERM))]));
    }
    check.push(returns(libc::SECCOMP_RET_ALLOW));
    check
}

/// Fields of struct seccomp_data (linux/seccomp.h).
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

/// The 32 bits that the kernel takes of an argument, which come first on the architectures above.
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

fn errno(number: libc::c_int) -> u32 {
    libc::SECCOMP_RET_ERRNO | number as u32
}

fn step(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

fn load(offset: u32) -> sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

fn and(mask: u32) -> sock_filter {
    step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, mask)
}

fn returns(verdict: u32) -> sock_filter {
    step(libc::BPF_RET | libc::BPF_K, 0, 0, verdict)
}

/// Runs `then` if what was loaded is `value`.
fn when(value: u32, then: Vec<sock_filter>) -> Vec<sock_filter> {
    let length = u8::try_from(then.len()).expect("invariant: the blocks above are short");
    let test = step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, length, value);
    [test].into_iter().chain(then).collect()
}
