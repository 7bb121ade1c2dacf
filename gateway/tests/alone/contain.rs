//! A contained process relays and does nothing else. Each test is a process of its own, which has no harness: what
//! it gives up it does not get back.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use fulmar_gateway::contain::contain;

/// A contained process cannot ask for it any more.
static PARENT: OnceLock<nix::unistd::Pid> = OnceLock::new();
const CONTAINED: &str = "FULMAR_TEST_CONTAINED";
type Test = (&'static str, fn(TcpListener));
const TESTS: [Test; 6] = [
    ("it_relays_as_before", it_relays_as_before),
    ("it_reaches_no_file", it_reaches_no_file),
    ("it_starts_no_program_and_enters_no_namespace", it_starts_no_program_and_enters_no_namespace),
    ("it_opens_no_raw_sockets", it_opens_no_raw_sockets),
    ("it_signals_no_other_process", it_signals_no_other_process),
    ("it_opens_no_unix_sockets", it_opens_no_unix_sockets),
];

pub fn main() {
    if let Ok(name) = std::env::var(CONTAINED) {
        let (_, test) = TESTS.iter().find(|(n, _)| *n == name).expect("a test of this name");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let has_landlock = kernel_has_landlock();
        PARENT.set(nix::unistd::Pid::parent()).unwrap();
        let done = contain().unwrap();
        assert!(done.to_string().starts_with("no capabilities"));
        assert_eq!(done.has_landlock, has_landlock);
        return test(listener);
    }
    let (wait, waited) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || waited.recv());
    assert!(contain().unwrap_err().to_string().contains("several threads"));
    drop(wait);
    assert!(other.join().unwrap().is_err());
    for (name, _) in TESTS {
        let this = std::env::current_exe().unwrap();
        let status = Command::new(this).env(CONTAINED, name).status().unwrap();
        assert!(status.success(), "{name}: {status}");
    }
    println!("test result: ok. {} passed; 0 failed", TESTS.len());
}

/// Whether the running kernel has Landlock: it tells its version (landlock_create_ruleset(2)).
fn kernel_has_landlock() -> bool {
    const VERSION: u32 = 1;
    let none = std::ptr::null::<u8>();
    // SAFETY: with the flag alone the call reads no memory.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, VERSION) > 0 }
}

fn is_denied<T>(result: io::Result<T>) -> bool {
    matches!(result, Err(e) if e.kind() == io::ErrorKind::PermissionDenied)
}

fn it_relays_as_before(listener: TcpListener) {
    let to = listener.local_addr().unwrap();
    let mut near = TcpStream::connect(to).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    near.set_nodelay(true).unwrap();
    near.write_all(b"hello").unwrap();
    let mut bytes = vec![0; 5];
    far.read_exact(&mut bytes).unwrap();
    near.set_nonblocking(true).unwrap();
    assert_eq!(near.read(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let (a, b) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    a.send_to(b"x", b.local_addr().unwrap()).unwrap();
    b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(b.recv_from(&mut bytes).unwrap().0, 1);
    let memory = vec![7u8; 64 << 20];
    assert_eq!(memory.iter().step_by(4096).map(|b| usize::from(*b)).sum::<usize>(), 7 << 14);
    drop(memory);
    let thread = std::thread::Builder::new().name("relay".into()).spawn(|| 7).unwrap();
    assert_eq!(thread.join().unwrap(), 7);
    println!("and it may still say so");
}

fn it_reaches_no_file(_: TcpListener) {
    assert!(is_denied(std::fs::read("/etc/hostname")));
    assert!(is_denied(std::fs::read_dir("/")));
    assert!(is_denied(std::fs::write("/tmp/fulmar-contained", b"x")));
    assert!(is_denied(std::fs::metadata("/")));
    assert!(is_denied(std::fs::remove_file("/tmp/fulmar-contained")));
}

fn it_starts_no_program_and_enters_no_namespace(_: TcpListener) {
    assert!(Command::new("/bin/true").status().is_err());
    assert_eq!(
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER),
        Err(nix::errno::Errno::EPERM)
    );
    let here = io::stdin();
    assert_eq!(
        nix::sched::setns(&here, nix::sched::CloneFlags::empty()),
        Err(nix::errno::Errno::EPERM)
    );
    assert!(here.as_raw_fd() == 0);
}

fn it_opens_no_raw_sockets(_: TcpListener) {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let open = |family, kind| socket(family, kind, SockFlag::SOCK_CLOEXEC, None);
    for (family, kind) in [
        (AddressFamily::Inet, SockType::Raw),
        (AddressFamily::Packet, SockType::Raw),
        (AddressFamily::Packet, SockType::Datagram),
        (AddressFamily::Netlink, SockType::Datagram),
    ] {
        assert_eq!(open(family, kind).err(), Some(nix::errno::Errno::EPERM), "{family:?} {kind:?}");
    }
    assert!(open(AddressFamily::Inet6, SockType::Stream).is_ok());
    // SCTP, Multipath TCP and UDP-Lite.
    for (kind, protocol) in
        [(libc::SOCK_STREAM, 132), (libc::SOCK_STREAM, 262), (libc::SOCK_DGRAM, 136)]
    {
        // SAFETY: the call has three numbers and no memory.
        let fd = unsafe { libc::socket(libc::AF_INET, kind, protocol) };
        assert_eq!(nix::errno::Errno::result(fd), Err(nix::errno::Errno::EPERM), "{protocol}");
    }
}

fn it_signals_no_other_process(_: TcpListener) {
    // Signal 0 asks whether it would be allowed.
    let ask = |process: nix::unistd::Pid| {
        let id = process.as_raw();
        // SAFETY: the call has three numbers and no memory.
        nix::errno::Errno::result(unsafe { libc::syscall(libc::SYS_tgkill, id, id, 0) })
    };
    assert_eq!(ask(nix::unistd::Pid::this()), Ok(0));
    let parent = *PARENT.get().unwrap();
    assert_eq!(ask(parent), Err(nix::errno::Errno::EPERM));
    // A descriptor sends signals to its owner (fcntl(2), F_SETOWN).
    let here = io::stdin();
    // SAFETY: the call has three numbers and no memory.
    let owned = unsafe { libc::fcntl(here.as_raw_fd(), libc::F_SETOWN, parent.as_raw()) };
    assert_eq!(nix::errno::Errno::result(owned), Err(nix::errno::Errno::EPERM));
    assert!(here.as_fd().try_clone_to_owned().is_ok());
    let killed = nix::sys::signal::kill(parent, None);
    assert_eq!(killed, Err(nix::errno::Errno::EPERM));
}

fn it_opens_no_unix_sockets(_: TcpListener) {
    assert!(is_denied(std::os::unix::net::UnixDatagram::unbound()));
    assert!(is_denied(std::os::unix::net::UnixStream::connect("\0nobody")));
}
