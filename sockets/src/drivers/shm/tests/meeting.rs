//! Rendezvous: a paused peer is waited for, and a foreign client does not block it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::thread::JoinHandle;

use super::*;
use crate::drivers::OpenError;

fn named(name: String) -> ShmConfig {
    ShmConfig { name, wait: Some(std::time::Duration::from_secs(120)), ..config() }
}

fn unique(what: &str) -> String {
    format!("fulmar-shm-{what}-{}", std::process::id())
}

fn open(name: &str) -> JoinHandle<Result<Shm, OpenError>> {
    let config = named(name.to_owned());
    std::thread::spawn(move || Shm::open(&config))
}

fn address_of(name: &str) -> sys::Address {
    let is_path = name.contains('/');
    if is_path { sys::Address::of_path(name) } else { sys::Address::in_namespace(name) }.unwrap()
}

/// A connection to the listener of this name, as soon as there is one.
fn connect(name: &str) -> OwnedFd {
    let address = address_of(name);
    let socket = sys::socket().unwrap();
    while sys::connect(socket.as_fd(), &address).is_err() {
        std::thread::yield_now();
    }
    socket
}

/// A socket that listens under this name.
fn listen(name: &str) -> OwnedFd {
    let socket = sys::socket().unwrap();
    sys::listen(socket.as_fd(), &sys::Address::in_namespace(name).unwrap()).unwrap();
    socket
}

const BYTES: usize = 16 * SLAB_BYTES;

/// An honest hello, but for what a test changes: of this version, with memory of `BYTES`.
fn hello() -> [u8; 36] {
    let mut b = [0; 36];
    b[..8].copy_from_slice(b"fulmarsh");
    b[8] = 2;
    b[12..16].copy_from_slice(&1500u32.to_le_bytes());
    b[16..24].copy_from_slice(&(BYTES as u64).to_le_bytes());
    b[24..32].copy_from_slice(&((FRAMES as u64) << 32 | 13).to_le_bytes());
    b
}

fn wait(socket: BorrowedFd<'_>) {
    assert!(sys::wait_any_readable(&[socket], 120_000).unwrap()[0], "no word in two minutes");
}

/// Whether a hello with a file comes before the other end hangs up.
fn is_answered(socket: &OwnedFd) -> bool {
    wait(socket.as_fd());
    matches!(sys::receive_with(socket.as_fd(), &mut [0; 36]), Ok((36, Some(_))))
}

#[test]
fn the_first_end_listens_by_path_and_by_name() {
    let path = std::env::temp_dir().join(unique("test"));
    let path = path.to_str().unwrap().to_owned();
    for name in [path, unique("test")] {
        // The file that a killed process leaves.
        if name.contains('/') {
            drop(std::os::unix::net::UnixListener::bind(&name).unwrap());
        }
        let ends = [open(&name), open(&name)];
        let ends = ends.map(|t| t.join().unwrap().unwrap());
        assert_ne!(ends[0].side(), ends[1].side());
        assert_ne!(ends[0].caps().ether, ends[1].caps().ether);
        assert!(!std::path::Path::new(&name).exists(), "the path has served");
        let [mut a, mut b] = ends.map(Host::new);
        assert!(a.send(b"fourteen bytes") && b.receive().len() == 1);
    }
}

#[test]
fn a_time_out_and_an_invalid_name_are_different_errors() {
    let alone = ShmConfig { wait: Some(std::time::Duration::ZERO), ..named(unique("alone")) };
    let error = Shm::open(&alone).expect_err("nobody is there");
    assert_eq!(error.errno(), libc::ETIMEDOUT);
    assert!(error.to_string().contains("same name"), "{error}");
    for name in [String::new(), "x".repeat(200), "/no/such/directory/x".into()] {
        let error = Shm::open(&named(name)).expect_err("no such name");
        assert!(error.to_string().contains("choose another name"), "{error}");
    }
}

/// A path that does not exist, in a world-writable directory.
fn temporary(what: &str) -> String {
    std::env::temp_dir().join(unique(what)).to_str().unwrap().to_owned()
}

#[test]
fn a_file_that_is_not_a_socket_is_left_alone() {
    let path = temporary("precious");
    std::fs::write(&path, "bytes").unwrap();
    let link = temporary("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for name in [&path, &link] {
        let error = Shm::open(&named(name.clone())).expect_err("it is a file");
        assert_eq!(error.errno(), libc::ENOTSOCK);
        assert_eq!(std::fs::read(name).unwrap(), b"bytes");
    }
    [link, path].iter().for_each(|name| std::fs::remove_file(name).unwrap());
}

#[test]
fn a_locked_directory_is_given_up_in_time() {
    let directory = temporary("locked");
    std::fs::create_dir(&directory).unwrap();
    let held = std::fs::File::open(&directory).unwrap();
    sys::try_lock(held.as_fd()).unwrap();
    let name = format!("{directory}/x");
    let impatient = ShmConfig { wait: Some(std::time::Duration::ZERO), ..named(name.clone()) };
    let error = Shm::open(&impatient).expect_err("the lock is held");
    assert!(error.to_string().contains("holds a lock"), "{error}");
    let ends = [open(&name), open(&name)];
    drop(held);
    assert!(ends.map(|t| t.join().unwrap().is_ok()) == [true; 2]);
    std::fs::remove_dir(&directory).unwrap();
}

#[test]
fn another_user_cannot_wait_under_a_name_that_anybody_may_take() {
    // An abstract name, and one in the directory of temporary files.
    for name in [unique("trap"), temporary("trap")] {
        let trap = sys::as_another_user(|| {
            let socket = sys::socket().unwrap();
            sys::listen(socket.as_fd(), &address_of(&name)).unwrap();
            socket
        });
        let Some(_trap) = trap else {
            eprintln!("skipped: only root can become another user");
            return;
        };
        let error = Shm::open(&named(name.clone())).expect_err("it is another user's");
        assert_eq!(error.errno(), libc::EACCES);
        assert!(error.to_string().contains("another user uses this name"), "{error}");
        let _ = std::fs::remove_file(name);
    }
}

#[test]
fn another_user_is_disconnected_from_a_shared_name() {
    use std::os::unix::fs::PermissionsExt;
    for name in [unique("caller"), temporary("caller")] {
        let first = open(&name);
        while name.contains('/') && !std::path::Path::new(&name).exists() {
            std::thread::yield_now();
        }
        if name.contains('/') {
            // The permissions of the socket alone admit every user.
            std::fs::set_permissions(&name, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let stranger = sys::as_another_user(|| connect(&name));
        if let Some(stranger) = &stranger {
            let (_own, file) = sys::OwnMap::create(BYTES).unwrap();
            // It may have been turned away already.
            let _ = sys::send_with(stranger.as_fd(), &hello(), file.as_fd());
            assert!(!is_answered(stranger));
        } else {
            eprintln!("skipped: only root can become another user");
        }
        assert!(open(&name).join().unwrap().is_ok(), "the user's own process meets");
        assert!(first.join().unwrap().is_ok());
    }
}

/// Longer than any time limit that a meeting ever had.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(3500);

#[test]
fn a_caller_that_pauses_before_its_hello_is_met() {
    let name = unique("slow-caller");
    let first = open(&name);
    let socket = connect(&name);
    std::thread::sleep(PAUSE);
    let (_own, file) = sys::OwnMap::create(BYTES).unwrap();
    sys::send_with(socket.as_fd(), &hello(), file.as_fd()).unwrap();
    assert!(is_answered(&socket));
    assert_eq!(first.join().unwrap().unwrap().side(), Side::First);
}

#[test]
fn a_listener_that_pauses_before_its_answer_is_met() {
    let name = unique("slow-listener");
    let door = listen(&name);
    let second = open(&name);
    wait(door.as_fd());
    let socket = sys::accept(door.as_fd()).unwrap();
    std::thread::sleep(PAUSE);
    assert!(is_answered(&socket), "the caller speaks first");
    let (_own, file) = sys::OwnMap::create(BYTES).unwrap();
    sys::send_with(socket.as_fd(), &hello(), file.as_fd()).unwrap();
    assert_eq!(second.join().unwrap().unwrap().side(), Side::Second);
}

#[test]
fn a_caller_that_is_turned_away_comes_again_and_meets() {
    let name = unique("again");
    let door = listen(&name);
    let second = open(&name);
    for _ in 0..3 {
        wait(door.as_fd());
        let socket = sys::accept(door.as_fd()).unwrap();
        assert!(is_answered(&socket));
        // It dies after it has received the hello.
    }
    drop(door);
    let first = open(&name);
    let (mut a, mut b) =
        (Host::new(first.join().unwrap().unwrap()), Host::new(second.join().unwrap().unwrap()));
    assert!(a.send(b"fourteen bytes") && b.receive().len() == 1);
}

#[test]
fn foreign_clients_do_not_block_the_rendezvous() {
    let name = unique("door");
    let first = open(&name);
    let (own, sealed) = sys::OwnMap::create(BYTES).unwrap();
    let bare = sys::unsealed(BYTES);
    let exe = std::fs::File::open("/proc/self/exe").unwrap();
    let too_long = [&hello()[..], &[0]].concat();
    let mut no_magic = hello();
    no_magic[0] = b'F';
    let mut huge = hello();
    huge[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut larger = hello();
    larger[16..24].copy_from_slice(&(BYTES as u64 + 1).to_le_bytes());
    let mut tiny = hello();
    tiny[16..24].copy_from_slice(&1u64.to_le_bytes());
    let strangers: [(&[u8], BorrowedFd<'_>); 9] = [
        (&[], sealed.as_fd()),
        (&hello()[..35], sealed.as_fd()),
        (&too_long, sealed.as_fd()),
        (&no_magic, sealed.as_fd()),
        (&huge, sealed.as_fd()),
        (&larger, sealed.as_fd()),
        (&tiny, sealed.as_fd()),
        (&hello(), bare.as_fd()),
        (&hello(), exe.as_fd()),
    ];
    for (bytes, file) in strangers {
        let socket = connect(&name);
        sys::send_with(socket.as_fd(), bytes, file).unwrap();
        assert!(!is_answered(&socket), "{bytes:?}");
    }
    // A client that hangs up, a client that sends no descriptor, and more silent clients than slots.
    drop(connect(&name));
    let bare_word = connect(&name);
    sys::send_message(bare_word.as_fd());
    assert!(!is_answered(&bare_word));
    let silent: Vec<OwnedFd> = (0..20).map(|_| connect(&name)).collect();
    let second = open(&name);
    let (mut a, mut b) =
        (Host::new(first.join().unwrap().unwrap()), Host::new(second.join().unwrap().unwrap()));
    assert!(a.send(b"fourteen bytes") && b.receive().len() == 1);
    drop((silent, own));
}

#[test]
fn a_client_of_a_foreign_listener_gets_an_error() {
    let bare = sys::unsealed(BYTES);
    let (_own, sealed) = sys::OwnMap::create(BYTES).unwrap();
    let mut no_magic = hello();
    no_magic[0] = b'F';
    let cases: [(&[u8], BorrowedFd<'_>, &str); 2] =
        [(&no_magic, sealed.as_fd(), "not fulmar"), (&hello(), bare.as_fd(), "not sealed")];
    for (i, (bytes, file, words)) in cases.into_iter().enumerate() {
        let name = unique(&format!("stranger-{i}"));
        let door = listen(&name);
        let second = open(&name);
        wait(door.as_fd());
        let socket = sys::accept(door.as_fd()).unwrap();
        sys::send_with(socket.as_fd(), bytes, file).unwrap();
        let error = second.join().unwrap().expect_err("a stranger");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_peer_that_sends_back_the_received_file_is_rejected() {
    let name = unique("mirror");
    let door = listen(&name);
    let second = open(&name);
    wait(door.as_fd());
    let socket = sys::accept(door.as_fd()).unwrap();
    wait(socket.as_fd());
    let mut bytes = [0; 36];
    let (_, file) = sys::receive_with(socket.as_fd(), &mut bytes).unwrap();
    sys::send_with(socket.as_fd(), &bytes, file.unwrap().as_fd()).unwrap();
    let error = second.join().unwrap().expect_err("a mirror");
    assert!(error.to_string().contains("not fulmar"), "{error}");
}

#[test]
fn another_release_is_refused_at_both_ends() {
    for (at, value, says) in [(8, 99, "version 99"), (24, 14, "a different layout")] {
        let name = unique(&format!("release-{at}"));
        let first = open(&name);
        let socket = connect(&name);
        let (_own, file) = sys::OwnMap::create(BYTES).unwrap();
        let mut other = hello();
        other[at] = value;
        sys::send_with(socket.as_fd(), &other, file.as_fd()).unwrap();
        assert!(is_answered(&socket), "it can tell, too");
        let error = first.join().unwrap().expect_err("another release").to_string();
        assert!(error.contains(says) && error.contains("same release"), "{error}");
    }
}

#[test]
fn a_file_that_was_sent_with_others_is_the_only_one_that_is_kept() {
    let [a, b] = sys::socket_pair().unwrap();
    let (_own, file) = sys::OwnMap::create(BYTES).unwrap();
    sys::send_with_many(a.as_fd(), &hello(), &[file.as_fd(); 20]);
    let (n, first) = sys::receive_with(b.as_fd(), &mut [0; 37]).unwrap();
    assert!(n == 36 && first.is_some());
    let identity = |m: std::fs::Metadata| (m.dev(), m.ino());
    let file = std::fs::File::from(file);
    let sent = identity(file.metadata().unwrap());
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let same = open.filter(|e| std::fs::metadata(e.path()).is_ok_and(|m| identity(m) == sent));
    assert_eq!(same.count(), 2, "the one that was sent, and the one that came");
}
