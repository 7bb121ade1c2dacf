//! The control socket of a running stack, which `fulmar stat` reads: a Unix socket per stack.
//!
//! A client that connects gets one JSON document and the end of the stream; nothing is read from it. The socket is in a
//! directory that only its owner may enter, is named after the process, and is removed with the stack. A process that
//! was killed, or that can reach no file any more, leaves its socket behind; it is removed by a client that is refused
//! ([`ask`]) and by the next process that opens one in the directory.
//!
//! Both sides trust the file system and nothing else: the runtime directory, the directory and the socket
//! must belong to the user and be inaccessible to all others, so that both client and stack are processes of the user.
//! Even so the client limits the time and the length of the document ([`MAX_DOCUMENT_BYTES`]).
//!
//! A thread sleeps in `accept` and costs nothing until a client connects. To end the thread, the stack connects
//! to its own socket.
//!
//! ```no_run
//! use fulmar::stat::{Document, control};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! for socket in control::sockets() {
//!     if let Some(text) = control::ask(&socket)? {
//!         let document: Document = serde_json::from_str(&text)?;
//!         println!("{}: process {}", document.name, document.pid);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The directory of root's control sockets.
const SYSTEM_DIRECTORY: &str = "/run/fulmar";
/// Where the runtime directories of login sessions are, each named by its user's number (pam_systemd(8)).
const SESSION_DIRECTORIES: &str = "/run/user";
/// How long a side waits for the other in all: a document is a few KiB, so this is a stopped process.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after `accept` failed, such as for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Longest document that is read: that of a stack with hundreds of thousands of sockets.
pub const MAX_DOCUMENT_BYTES: usize = 256 << 20;
/// Bytes per read of a document.
const READ_BYTES: usize = 64 * 1024;
/// Stacks of one process that may have a control socket.
const SOCKETS_PER_PROCESS: u32 = 64;
/// Sockets of dead processes that opening a new one removes at most.
const MOST_PRUNED: usize = 64;
/// The thread formats one document and does nothing deep.
const THREAD_STACK_BYTES: usize = 256 * 1024;

/// The control socket of one stack; closed when dropped.
///
/// A stack opens its own ([`Builder::unlisted`](crate::Builder::unlisted) prevents it). A program that is not a stack, as
/// a gateway, opens one for a document of its own:
///
/// ```no_run
/// use fulmar::stat::control::Control;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let control = Control::open(|| Some("{\"version\":1}".to_owned()))?;
/// println!("answers on {}", control.path().display());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    closing: Arc<AtomicBool>,
}

/// A control socket that is bound and not served yet: a program binds it before it gives up the right to open files.
///
/// ```no_run
/// use fulmar::stat::control::Bound;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let bound = Bound::new()?;
/// // The process enters its sandbox here.
/// let control = bound.serve(|| Some("{\"version\":1}".to_owned()))?;
/// # drop(control);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    path: PathBuf,
}

/// Where control sockets may be, in the order in which they are tried: the user's runtime directory,
/// `/run/fulmar`, `/tmp/fulmar-UID`, and the runtime directory of the user's login session where the environment names
/// none of the user's (cron, `sudo -u`): it is last, since it goes with the session. The number of the user is that outside
/// of user namespaces: the root of a sandbox is not the root whose directory `/tmp/fulmar-0` is.
pub fn directories() -> Vec<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    directories_of(named, own_uid().map(|uid| outer_uid(uid, &map)), Path::new(SESSION_DIRECTORIES))
}

fn directories_of(named: Option<PathBuf>, uid: Option<u32>, sessions: &Path) -> Vec<PathBuf> {
    let runtime = named.and_then(in_runtime_directory);
    let session = || in_runtime_directory(sessions.join(uid?.to_string()));
    let session = if runtime.is_none() { session() } else { None };
    let own = uid.map(|uid| PathBuf::from(format!("/tmp/fulmar-{uid}")));
    runtime.into_iter().chain([PathBuf::from(SYSTEM_DIRECTORY)]).chain(own).chain(session).collect()
}

/// The number of a user in the parent user namespace, as `/proc/self/uid_map` has it (user_namespaces(7): first
/// number inside, first number outside, how many). One that the map does not name keeps its number.
fn outer_uid(uid: u32, map: &str) -> u32 {
    let of_line = |line: &str| {
        let mut numbers = line.split_whitespace().map(|word| word.parse::<u32>().ok());
        let (inside, outside, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let offset = uid.checked_sub(inside).filter(|offset| *offset < count)?;
        outside.checked_add(offset)
    };
    map.lines().find_map(of_line).unwrap_or(uid)
}

/// The directory of control sockets in a runtime directory. `None`: it is not the user's alone, such as one that root
/// has inherited by `su`: its owner could put anything in the place of what root makes there.
fn in_runtime_directory(runtime: PathBuf) -> Option<PathBuf> {
    check_directory(&runtime).is_ok().then(|| runtime.join("fulmar"))
}

/// The control sockets in every directory that is the user's alone, stale ones included.
pub fn sockets() -> Vec<PathBuf> {
    let own = directories().into_iter().filter(|d| check_directory(d).is_ok());
    let entries = own.filter_map(|d| fs::read_dir(d).ok()).flatten();
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "sock"))
        .collect();
    found.sort();
    found
}

/// The directories that exist and are not looked into, since others own them or may enter them. `/run/fulmar` is
/// root's: where another user finds it, nothing is wrong.
pub fn foreign_directories() -> Vec<PathBuf> {
    let is_foreign = |d: &PathBuf| {
        let found = fs::symlink_metadata(d);
        let is_roots = d == Path::new(SYSTEM_DIRECTORY)
            && found.as_ref().is_ok_and(|found| own_uid() != Some(found.uid()));
        found.is_ok() && !is_roots && check_directory(d).is_err()
    };
    directories().into_iter().filter(is_foreign).collect()
}

/// The document of a control socket. `None`: its process has ended; the stale socket was removed.
///
/// # Errors
/// What connecting or reading failed with: no permission (also if the socket is another user's), or a
/// process that does not answer within two seconds, or not with a document of a possible length.
pub fn ask(socket: &Path) -> io::Result<Option<String>> {
    match fs::symlink_metadata(socket) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => check_owner(&found?)?,
    }
    let deadline = Instant::now() + PATIENCE;
    let stream = match connect(socket) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            // Only its owner can remove it, and only they need to.
            let _ = fs::remove_file(socket);
            return Ok(None);
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let document = read_document(stream, deadline, MAX_DOCUMENT_BYTES)?;
    Ok((!document.is_empty()).then_some(document))
}

/// Connects, or gives up after [`PATIENCE`]: with a full backlog the kernel would wait for ever. What
/// waits then is a thread, which ends with the other process.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let (tell, hear) = mpsc::channel();
    let socket = socket.to_owned();
    let name = thread::Builder::new().name("fulmar-ask".to_owned());
    name.stack_size(THREAD_STACK_BYTES).spawn(move || {
        crate::runtime::block_signals();
        let _ = tell.send(UnixStream::connect(socket));
    })?;
    hear.recv_timeout(PATIENCE).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Reads to the end of the stream, at most until `deadline` and `most_bytes`.
fn read_document(
    mut stream: UnixStream,
    deadline: Instant,
    most_bytes: usize,
) -> io::Result<String> {
    let (mut document, mut chunk) = (Vec::new(), vec![0; READ_BYTES]);
    loop {
        stream.set_read_timeout(Some(left_until(deadline)?))?;
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) if document.len() + n > most_bytes => {
                return Err(io::Error::other(format!("the answer exceeds {most_bytes} bytes")));
            }
            Ok(n) => document.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(e) => return Err(e),
        }
    }
    String::from_utf8(document).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Removes the control sockets of this process, for an end that does not drop its stacks (`process::exit`).
pub fn remove_own() {
    let pid = std::process::id().to_string();
    let is_own = |p: &PathBuf| {
        let stem = p.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        stem.split('-').next() == Some(&pid)
    };
    for socket in sockets().into_iter().filter(is_own) {
        let _ = fs::remove_file(socket);
    }
}

impl Bound {
    /// Binds a control socket in the first directory that allows it. Clients wait until [`Bound::serve`].
    ///
    /// # Errors
    /// The error of the last directory; the stack works without a control socket.
    pub fn new() -> io::Result<Bound> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for directory in directories() {
            match own_directory(&directory).and_then(|()| bind(&directory)) {
                Ok((listener, path)) => return Ok(Bound { listener, path }),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Starts the thread that answers. `document` is called for each client; with `None` the client gets an
    /// empty document. No file is opened.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(
        self,
        document: impl Fn() -> Option<String> + Send + 'static,
    ) -> io::Result<Control> {
        let Bound { listener, path } = self;
        let control = Control { path, closing: Arc::default() };
        let closing = control.closing.clone();
        thread::Builder::new()
            .name("fulmar-control".to_owned())
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || {
                crate::runtime::block_signals();
                let clients = listener.incoming();
                let open = clients.take_while(|_| !closing.load(Ordering::Acquire));
                attend(open, document, || thread::sleep(ACCEPT_RETRY));
            })?;
        Ok(control)
    }
}

impl Control {
    /// Opens a control socket and attends to it.
    ///
    /// # Errors
    /// As [`Bound::new`] and [`Bound::serve`].
    pub fn open(document: impl Fn() -> Option<String> + Send + 'static) -> io::Result<Control> {
        Bound::new()?.serve(document)
    }

    /// Where the socket is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _one = one_at_a_time();
        self.closing.store(true, Ordering::Release);
        // The connection ends the thread's `accept`; if it fails, the thread has ended already.
        let _ = UnixStream::connect(&self.path);
        let _ = fs::remove_file(&self.path);
    }
}

/// Answers one client after the other. Without descriptors `accept` fails at once for as long as there are none:
/// it is retried after a pause.
fn attend(
    clients: impl Iterator<Item = io::Result<UnixStream>>,
    document: impl Fn() -> Option<String>,
    pause: impl Fn(),
) {
    for client in clients {
        match client {
            // A client that disconnects early is not an error.
            Ok(client) => drop(answer(client, document())),
            Err(_) => pause(),
        }
    }
}

/// Writes the document, for at most [`PATIENCE`]: a slow client delays the others no
/// longer.
fn answer(mut client: UnixStream, document: Option<String>) -> io::Result<()> {
    let document = document.unwrap_or_default();
    let (mut rest, deadline) = (document.as_bytes(), Instant::now() + PATIENCE);
    while !rest.is_empty() {
        client.set_write_timeout(Some(left_until(deadline)?))?;
        match client.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => rest = &rest[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The effective user, as the owner of our own entry in /proc.
fn own_uid() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|m| m.uid())
}

/// Makes the directory if need be; refuses one that is not ours alone, since /tmp is world-writable.
fn own_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => check_directory(path),
    }
}

fn check_directory(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    let is_private = found.permissions().mode() & 0o077 == 0;
    if !found.is_dir() || !is_private {
        let why = "other users have access to the directory";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    check_owner(&found)
}

fn check_owner(found: &Metadata) -> io::Result<()> {
    if own_uid() == Some(found.uid()) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"))
}

/// `PID.sock`, and `PID-N.sock` for further stacks of the process. A stale socket was left by a
/// dead process that had our number, and is replaced.
fn bind(directory: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let _one = one_at_a_time();
    prune(directory);
    let pid = std::process::id();
    for n in 0..SOCKETS_PER_PROCESS {
        let name = if n == 0 { format!("{pid}.sock") } else { format!("{pid}-{n}.sock") };
        let path = directory.join(name);
        if is_stale(&path) {
            return Ok((publish(&path)?, path));
        }
    }
    Err(io::Error::from(io::ErrorKind::AddrInUse))
}

/// Removes sockets of dead processes. Processes of other PID namespaces are not seen in /proc: a socket is
/// removed only if it refuses connections, too.
fn prune(directory: &Path) {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_dead = |path: &PathBuf| {
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let pid: Option<u32> = stem.split('-').next().and_then(|pid| pid.parse().ok());
        let is_socket = path.extension().is_some_and(|x| x == "sock");
        is_socket && pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    };
    for path in paths.filter(is_dead).take(MOST_PRUNED) {
        let refused = io::ErrorKind::ConnectionRefused;
        if UnixStream::connect(&path).is_err_and(|e| e.kind() == refused) {
            let _ = fs::remove_file(path);
        }
    }
}

fn is_stale(path: &Path) -> bool {
    let silent = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    UnixStream::connect(path).is_err_and(|e| silent.contains(&e.kind()))
}

/// A socket that is found under `path` only once it listens: one that refuses connections is taken
/// for stale.
fn publish(path: &Path) -> io::Result<UnixListener> {
    let unseen = path.with_extension("new");
    let _ = fs::remove_file(&unseen);
    let listener = UnixListener::bind(&unseen)?;
    fs::set_permissions(&unseen, fs::Permissions::from_mode(0o600))?;
    fs::rename(&unseen, path)?;
    Ok(listener)
}

/// Control sockets of one process open and close in turn, since their names depend on each other.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_the_document_and_the_socket_vanishes_with_the_stack() {
        const DOCUMENT: &str = "{\"a\":1}";
        let control = Control::open(|| Some(DOCUMENT.to_owned())).unwrap();
        let path = control.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(sockets().contains(&path));
        assert_eq!(ask(&path).unwrap().as_deref(), Some(DOCUMENT));
        assert_eq!(ask(&path).unwrap().as_deref(), Some(DOCUMENT));
        drop(control);
        // Another test's stack may have taken the name that is free now.
        assert!(!path.exists() || ask(&path).unwrap().as_deref() != Some(DOCUMENT));
    }

    #[test]
    fn a_user_of_a_namespace_has_the_number_that_the_map_gives_outside() {
        let all = "         0          0 4294967295\n";
        assert_eq!((outer_uid(0, all), outer_uid(1000, all)), (0, 1000));
        let sandbox = "         0       1000          1\n";
        assert_eq!(outer_uid(0, sandbox), 1000);
        let rootless = "0 1000 1\n1 100000 65536\n";
        assert_eq!((outer_uid(0, rootless), outer_uid(34, rootless)), (1000, 100_033));
        for nonsense in ["", "0 1000", "5 6 7", "0 4294967295 9"] {
            assert_eq!(outer_uid(1, nonsense), 1, "{nonsense}");
        }
    }

    #[test]
    fn every_stack_of_a_process_has_its_own_socket() {
        let first = Control::open(|| Some("1".to_owned())).unwrap();
        let second = Control::open(|| Some("2".to_owned())).unwrap();
        assert_ne!(first.path(), second.path());
        assert_eq!(ask(second.path()).unwrap().as_deref(), Some("2"));
    }

    #[test]
    fn control_sockets_that_open_and_close_at_once_are_never_mistaken_for_each_other() {
        thread::scope(|all| {
            for n in 0..4 {
                all.spawn(move || {
                    for _ in 0..100 {
                        let control = Control::open(move || Some(n.to_string())).unwrap();
                        assert_eq!(ask(control.path()).unwrap(), Some(n.to_string()));
                    }
                });
            }
        });
    }

    #[test]
    fn a_socket_that_a_dead_process_left_is_removed() {
        let control = Control::open(|| None).unwrap();
        let name = format!("stale-test-{}.sock", std::process::id());
        let stale = control.path().with_file_name(name);
        drop(UnixListener::bind(&stale).unwrap());
        assert_eq!(ask(&stale).unwrap(), None);
        assert!(!stale.exists());
    }

    #[test]
    fn files_of_dead_processes_are_removed_when_the_next_socket_is_opened() {
        let control = Control::open(|| Some("{}".to_owned())).unwrap();
        // No process has number 0.
        let dead = control.path().with_file_name(format!("0-{}.sock", std::process::id()));
        let alive = control.path().with_file_name(format!("0-{}a.sock", std::process::id()));
        drop(UnixListener::bind(&dead).unwrap());
        let listener = UnixListener::bind(&alive).unwrap();
        let _next = Control::open(|| Some("{}".to_owned())).unwrap();
        assert!(!dead.exists());
        assert!(alive.exists(), "a process of another PID namespace may have it");
        drop(listener);
        fs::remove_file(alive).unwrap();
    }

    #[test]
    fn a_client_waits_until_a_bound_socket_is_attended_to() {
        let bound = Bound::new().unwrap();
        let stream = UnixStream::connect(&bound.path).unwrap();
        let control = bound.serve(|| Some("late".to_owned())).unwrap();
        let document = read_document(stream, Instant::now() + PATIENCE * 30, 100).unwrap();
        assert_eq!(document, "late");
        drop(control);
    }

    #[test]
    fn a_client_that_does_not_read_delays_others_for_a_bounded_time() {
        // More than a socket holds.
        let control = Control::open(|| Some("x".repeat(16 << 20))).unwrap();
        let slow = UnixStream::connect(control.path()).unwrap();
        // The slow one is given up before the next one is answered, and so is this one if it is slow.
        let is_answered = |_| {
            let stream = UnixStream::connect(control.path()).unwrap();
            let deadline = Instant::now() + PATIENCE * 60;
            let document = read_document(stream, deadline, MAX_DOCUMENT_BYTES);
            document.is_ok_and(|d| d.len() == 16 << 20)
        };
        assert!((0..100).any(is_answered));
        drop(slow);
    }

    #[test]
    fn a_document_without_end_is_refused() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let writer = thread::spawn(move || while theirs.write_all(&[b'x'; 4096]).is_ok() {});
        let deadline = Instant::now() + PATIENCE * 10;
        let error = read_document(ours, deadline, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("exceeds 1048576 bytes"), "{error}");
        writer.join().unwrap();
    }

    #[test]
    fn a_socket_without_descriptors_waits_before_it_accepts_again() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let none = || io::Error::from_raw_os_error(libc::EMFILE);
        let clients = [Err(none()), Err(none()), Ok(ours), Err(none())];
        let breaths = std::cell::Cell::new(0);
        let breathe = || breaths.set(breaths.get() + 1);
        attend(clients.into_iter(), || Some("{}".to_owned()), breathe);
        assert_eq!(breaths.get(), 3);
        let mut document = String::new();
        theirs.read_to_string(&mut document).unwrap();
        assert_eq!(document, "{}");
    }

    #[test]
    fn a_runtime_directory_that_is_not_the_users_alone_holds_no_sockets() {
        let path = std::env::temp_dir().join(format!("fulmar-runtime-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        assert_eq!(in_runtime_directory(path.clone()), Some(path.join("fulmar")));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(in_runtime_directory(path.clone()), None);
        fs::remove_dir(&path).unwrap();
    }

    #[test]
    fn the_login_sessions_directory_is_the_last_where_the_environment_names_none() {
        let sessions = std::env::temp_dir().join(format!("fulmar-sessions-{}", std::process::id()));
        let session = sessions.join("1000");
        DirBuilder::new().mode(0o700).recursive(true).create(&session).unwrap();
        let tmp = PathBuf::from("/tmp/fulmar-1000");
        let [system, own] = [PathBuf::from(SYSTEM_DIRECTORY), session.join("fulmar")];
        let of = |named: Option<&PathBuf>| directories_of(named.cloned(), Some(1000), &sessions);
        assert_eq!(of(None), [system.clone(), tmp.clone(), own.clone()]);
        assert_eq!(of(Some(&session)), [own.clone(), system.clone(), tmp.clone()]);
        // One of another user that `su` has left in the environment.
        assert_eq!(of(Some(&PathBuf::from("/"))), [system.clone(), tmp.clone(), own]);
        fs::set_permissions(&session, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(of(None), [system, tmp]);
        fs::remove_dir_all(&sessions).unwrap();
    }

    #[test]
    fn a_silent_client_is_dropped_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let error = read_document(ours, Instant::now(), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn the_socket_of_another_user_is_not_asked() {
        let path = std::env::temp_dir().join(format!("fulmar-foreign-{}", std::process::id()));
        let _listener = UnixListener::bind(&path).unwrap();
        // Root gives the socket to another user; another user checks a socket of root's.
        let is_given = std::os::unix::fs::chown(&path, Some(12_345), None).is_ok();
        let foreign = if is_given { path.as_path() } else { Path::new("/proc/1/status") };
        let (checked, asked) = (check_owner(&fs::metadata(foreign).unwrap()), ask(foreign));
        fs::remove_file(&path).unwrap();
        assert_eq!(checked.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(asked.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let path = std::env::temp_dir().join(format!("fulmar-open-{}", std::process::id()));
        DirBuilder::new().mode(0o755).create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let refused = own_directory(&path);
        fs::remove_dir(&path).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
