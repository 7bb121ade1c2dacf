//! The rendezvous: how two processes find each other and exchange their memory files.
//!
//! ```text
//!   first end (listens)                 second end (calls)
//!        │ ◄───── hello, memory file ─────── │   may pause here: the listener hears others meanwhile
//!   checks, maps                             │
//!        │ ────── hello, memory file ──────► │   may pause here: the caller waits
//!      has met                          checks, maps, has met
//! ```
//!
//! The only time limit is the caller's ([`ShmConfig::wait`]). The rendezvous is complete for the first end
//! when its answer is sent, for the second end when the answer is read. Between the two only the end of a
//! process can intervene, which ends the link as it would later. So neither end is left with half a
//! connection, however long the other pauses.
//!
//! Clients are not trusted. A client that connects and sends nothing occupies one of [`MAX_CALLERS`] slots. The
//! listener rejects a message that is not a hello, a hello without a file, and a file that is not safe to read, and
//! keeps listening. A client that gets one of these from a listener returns an error.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_stack::mbuf::{Backing, Pool, PoolConfig, SLAB_BYTES};

use super::layout::{FRAMES, PIECES, SLABS};
use super::sys::{self, Address, OwnMap, PeerMap};
use super::{ShmConfig, Side};
use crate::drivers::OpenError;

/// Size classes of a pool; each may have one slab beyond the budget.
const SPARE_SLABS: usize = 5;

/// Bytes of the memory to which frames from outside the region are copied.
const STAGING_BYTES: usize = 8 << 20;

/// Version of the protocol; incremented with every change.
const MAGIC: [u8; 8] = *b"fulmarsh";
const VERSION: u32 = 2;
const HELLO_BYTES: usize = 36;

/// The most memory of another process that is mapped: offsets have 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;

/// Clients that have connected and sent nothing yet. Beyond, the oldest is disconnected; it may reconnect.
const MAX_CALLERS: usize = 8;

/// Interval of retries while the peer's queue is full, or after a peer went away.
const RETRY: Duration = Duration::from_millis(2);

/// A connection, and both memories.
pub(super) struct Met {
    pub side: Side,
    pub socket: OwnedFd,
    pub own: Arc<OwnMap>,
    pub peer: PeerMap,
    pub region: Backing,
    pub staging: Pool,
    /// The smaller of the two MTUs.
    pub mtu: usize,
}

/// Why a rendezvous failed.
#[derive(Debug)]
enum Trouble {
    /// The peer went away or was none: try again.
    Again,
    /// Permanent.
    Final(OpenError),
}

/// Runs the rendezvous.
pub(super) fn meet(config: &ShmConfig) -> Result<Met, OpenError> {
    let give_up = config.wait.map(|w| Instant::now() + w);
    loop {
        let met = match find(config, give_up)? {
            Found::Listener(socket) => call(config, socket, give_up),
            Found::Unclaimed(rendezvous) => answer(config, &rendezvous, give_up),
        };
        match met {
            Ok(met) => return Ok(met),
            Err(Trouble::Final(e)) => return Err(e),
            Err(Trouble::Again) => pause(config, give_up)?,
        }
    }
}

/// Both ends in one process.
pub(super) fn meet_oneself(config: &ShmConfig) -> Result<(Met, Met), OpenError> {
    let [a, b] = sys::socket_pair().map_err(|e| failed(config, e, LIMITS))?;
    let other = config.clone();
    let second = std::thread::spawn(move || call(&other, b, None));
    let first = Own::create(config).map_err(Trouble::Final).and_then(|own| {
        let spoke = wait_for(a.as_fd(), None).unwrap_or(false);
        let theirs = own.answer_to(config, &a).ok().filter(|_| spoke).ok_or(Trouble::Again)?;
        Ok(own.meet(Side::First, a, theirs))
    });
    let second = second.join().unwrap_or(Err(Trouble::Again));
    match (first, second) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(Trouble::Final(e)), _) | (_, Err(Trouble::Final(e))) => Err(e),
        _ => Err(timed_out(config)),
    }
}

/// Sleeps before the next attempt. An error if the time is over.
fn pause(config: &ShmConfig, give_up: Option<Instant>) -> Result<(), OpenError> {
    if give_up.is_some_and(|at| Instant::now() >= at) {
        return Err(timed_out(config));
    }
    std::thread::sleep(RETRY);
    Ok(())
}

const LIMITS: &str = "raise the limits on open files and on memory (ulimit -n, ulimit -v)";
const NAMES: &str = "choose another name; a name with a slash is a path, any other name is shared by the processes \
    of the network namespace";
const LOCKED: &str =
    "another process holds a lock on its directory; choose a directory of your own";

fn failed(config: &ShmConfig, e: io::Error, advice: &str) -> OpenError {
    OpenError::new(format!("cannot open shm:{}", config.name), e, advice)
}

fn timed_out(config: &ShmConfig) -> OpenError {
    let e = io::Error::from_raw_os_error(libc::ETIMEDOUT);
    failed(config, e, "start the other process with the same name")
}

/// The outcome of a look-up of the name.
enum Found {
    /// A listening process; the socket is connected to it.
    Listener(OwnedFd),
    /// No listener, so this process is the listener.
    Unclaimed(Rendezvous),
}

/// The socket on which this process listens for its peer.
struct Rendezvous {
    listener: OwnedFd,
    _bound: Bound,
}

/// Connects to the listener of this name, or becomes it.
fn find(config: &ShmConfig, give_up: Option<Instant>) -> Result<Found, OpenError> {
    let is_abstract = is_abstract(config);
    let naming = |e| failed(config, e, NAMES);
    let address = match is_abstract {
        true => Address::in_namespace(&config.name),
        false => Address::of_path(&config.name),
    };
    let address = address.map_err(naming)?;
    loop {
        // Under a lock: otherwise a path that another process has just bound would look stale.
        let lock = match (!is_abstract).then(|| lock_directory(&config.name)).transpose() {
            // Any user that can open a directory can lock it, and may never unlock it.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                pause(config, give_up).map_err(|_| failed(config, e, LOCKED))?;
                continue;
            }
            lock => lock.map_err(naming)?,
        };
        let socket = sys::socket().map_err(|e| failed(config, e, LIMITS))?;
        match sys::connect(socket.as_fd(), &address) {
            Ok(()) => return Ok(Found::Listener(socket)),
            // The listener's backlog is full.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                drop(lock);
                pause(config, give_up)?;
                continue;
            }
            // The path of a killed process, or no socket at all (the error is the same).
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && !is_abstract => {
                let found = fs::symlink_metadata(&config.name).map_err(naming)?;
                if !found.file_type().is_socket() {
                    let e = io::Error::from_raw_os_error(libc::ENOTSOCK);
                    return Err(failed(
                        config,
                        e,
                        "this path is used for something else; choose another",
                    ));
                }
                fs::remove_file(&config.name).map_err(naming)?;
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ECONNREFUSED)) => {}
            Err(e) => return Err(naming(e)),
        }
        match sys::listen(socket.as_fd(), &address) {
            Ok(()) => {
                let bound = Bound { path: (!is_abstract).then(|| config.name.clone()) };
                (config.on_wait)(&config.name);
                return Ok(Found::Unclaimed(Rendezvous { listener: socket, _bound: bound }));
            }
            // Another process has just bound the name and is about to listen.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_abstract => {
                pause(config, give_up)?;
            }
            Err(e) => return Err(naming(e)),
        }
    }
}

/// Without a slash a name is an abstract one.
fn is_abstract(config: &ShmConfig) -> bool {
    !config.name.contains('/')
}

/// Whether any user may bind this name: an abstract one has no permissions, nor has a path in a
/// world-writable directory. The peer's credentials are checked for such a name.
fn is_world_writable(config: &ShmConfig) -> bool {
    let is_writable = |m: Metadata| m.mode() & 0o002 != 0;
    is_abstract(config) || fs::metadata(directory_of(&config.name)).is_ok_and(is_writable)
}

fn directory_of(path: &str) -> &Path {
    let parent = Path::new(path).parent().filter(|p| !p.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// A bound path, unlinked on drop.
struct Bound {
    path: Option<String>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Another process may have removed it already.
            let _ = fs::remove_file(path);
        }
    }
}

/// An exclusive lock (flock) on the directory of a path.
///
/// # Errors
/// `WouldBlock`: another process has it.
fn lock_directory(path: &str) -> io::Result<fs::File> {
    let directory = fs::File::open(directory_of(path))?;
    sys::try_lock(directory.as_fd())?;
    Ok(directory)
}

/// Waits until a descriptor is readable; false if the time is over.
fn wait_for(fd: BorrowedFd<'_>, give_up: Option<Instant>) -> io::Result<bool> {
    Ok(wait_any(&[fd], give_up)?.first().copied().unwrap_or(false))
}

/// Waits until any of the descriptors is readable. Returns which are; none if the time is over.
fn wait_any(fds: &[BorrowedFd<'_>], give_up: Option<Instant>) -> io::Result<Vec<bool>> {
    loop {
        let left = give_up.map(|at| at.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |d| i32::try_from(d.as_millis() + 1).unwrap_or(i32::MAX));
        match sys::wait_any_readable(fds, ms) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(ready) if ready.contains(&true) || left.is_some_and(|d| d.is_zero()) => {
                return Ok(ready);
            }
            Ok(_) => {}
            Err(e) => return Err(e),
        }
    }
}

// The first end listens. The rendezvous is complete when its hello is sent.

/// Waits for a client's hello and answers it. A silent client does not delay the others, and a client that
/// sends anything else is disconnected.
fn answer(
    config: &ShmConfig,
    rendezvous: &Rendezvous,
    give_up: Option<Instant>,
) -> Result<Met, Trouble> {
    let last = |e| Trouble::Final(failed(config, e, LIMITS));
    let own = Own::create(config).map_err(Trouble::Final)?;
    let mut callers: Vec<OwnedFd> = Vec::new();
    let mut refused = None;
    loop {
        let fds: Vec<_> =
            [&rendezvous.listener].into_iter().chain(&callers).map(AsFd::as_fd).collect();
        let ready = wait_any(&fds, give_up).map_err(last)?;
        if !ready.contains(&true) {
            return Err(Trouble::Final(refused.unwrap_or_else(|| timed_out(config))));
        }
        let spoken = ready.get(1..).unwrap_or_default();
        for i in (0..callers.len()).rev().filter(|i| spoken.get(*i) == Some(&true)) {
            let caller = callers.remove(i);
            match own.answer_to(config, &caller) {
                Ok(theirs) => return Ok(own.meet(Side::First, caller, theirs)),
                Err(Refusal::Gone) => {}
                Err(Refusal::Stranger(e)) => refused = Some(e),
                Err(Refusal::Version(e)) => return Err(Trouble::Final(e)),
            }
        }
        if ready.first() == Some(&true) {
            match sys::accept(rendezvous.listener.as_fd()) {
                // Another user's process is disconnected.
                Ok(socket) if is_world_writable(config) && check_user(&socket).is_err() => {}
                Ok(socket) => callers.push(socket),
                Err(e) if is_passing(&e) => {}
                Err(e) => return Err(last(e)),
            }
            if callers.len() > MAX_CALLERS {
                callers.remove(0);
            }
        }
    }
}

/// Whether an error is the end of one connection, not of the listener.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(e.kind(), ConnectionAborted | Interrupted | WouldBlock)
}

/// Why a client is not the other end.
enum Refusal {
    /// It disconnected.
    Gone,
    /// It sent no hello, or memory that is not safe to read.
    Stranger(OpenError),
    /// It has another version.
    Version(OpenError),
}

// The second end connects, sends its hello, and waits for the answer.

/// Sends the hello to the listener, and waits for its answer.
fn call(config: &ShmConfig, socket: OwnedFd, give_up: Option<Instant>) -> Result<Met, Trouble> {
    let last = |e, advice| Trouble::Final(failed(config, e, advice));
    if is_world_writable(config) {
        check_user(&socket).map_err(|e| {
            last(e, "another user uses this name; choose a path in a directory of your own")
        })?;
    }
    let own = Own::create(config).map_err(Trouble::Final)?;
    own.say(&socket).map_err(|_| Trouble::Again)?;
    if !wait_for(socket.as_fd(), give_up).map_err(|e| last(e, LIMITS))? {
        let e = io::Error::from_raw_os_error(libc::ETIMEDOUT);
        return Err(last(
            e,
            "a process listens under this name but does not answer; check that process",
        ));
    }
    match own.hear(config, &socket) {
        Ok(theirs) => Ok(own.meet(Side::Second, socket, theirs)),
        Err(Refusal::Gone) => Err(Trouble::Again),
        Err(Refusal::Stranger(e) | Refusal::Version(e)) => Err(Trouble::Final(e)),
    }
}

/// This process's side of the rendezvous.
struct Own {
    map: Arc<OwnMap>,
    file: OwnedFd,
    hello: Hello,
    region: Backing,
    staging: Pool,
}

/// The other process's hello and memory.
struct Theirs {
    hello: Hello,
    memory: PeerMap,
}

impl Own {
    fn create(config: &ShmConfig) -> Result<Own, OpenError> {
        let pool_bytes = config.pool_bytes.next_multiple_of(SLAB_BYTES) + SPARE_SLABS * SLAB_BYTES;
        let staging_bytes = STAGING_BYTES + SPARE_SLABS * SLAB_BYTES;
        let bytes = SLABS + pool_bytes + staging_bytes;
        if bytes > MAX_BYTES {
            let e = io::Error::from_raw_os_error(libc::EFBIG);
            return Err(failed(config, e, "the buffer pool is limited to 3 GiB in shared memory"));
        }
        let (map, file) = OwnMap::create(bytes).map_err(|e| failed(config, e, LIMITS))?;
        let map = Arc::new(map);
        let region = map.backing(SLABS, pool_bytes);
        let staging = map.backing(SLABS + pool_bytes, staging_bytes);
        let staging_config =
            PoolConfig { huge_pages: false, ..PoolConfig::with_budget(STAGING_BYTES) };
        let staging = Pool::with_backing(staging_config, Some(staging))
            .map_err(|e| failed(config, io::Error::other(e.to_string()), LIMITS))?;
        let (mtu, wants) = (config.mtu, config.wants);
        let hello = Hello { version: VERSION, bytes, mtu, shape: SHAPE, wants };
        Ok(Own { map, file, hello, region, staging })
    }

    fn say(&self, socket: &OwnedFd) -> io::Result<()> {
        sys::send_with(socket.as_fd(), &self.hello.emit(), self.file.as_fd())
    }

    /// Reads the other process's hello, and maps its memory.
    fn hear(&self, config: &ShmConfig, socket: &OwnedFd) -> Result<Theirs, Refusal> {
        let stranger = |e, advice| Refusal::Stranger(failed(config, e, advice));
        let broken = || io::Error::from_raw_os_error(libc::EPROTO);
        let (hello, file) = hear(socket).map_err(|e| match e {
            None => Refusal::Gone,
            Some(e) => stranger(e, "the other process is not fulmar, or has different limits"),
        })?;
        if hello.version != VERSION || hello.shape != SHAPE {
            let what = match hello.version {
                VERSION => "its rings have a different layout".to_owned(),
                version => {
                    format!("it uses protocol version {version}, this process version {VERSION}")
                }
            };
            let advice = "use the same release of fulmar at both ends";
            return Err(Refusal::Version(failed(config, io::Error::other(what), advice)));
        }
        let is_own = sys::is_same_file(file.as_fd(), self.file.as_fd());
        if hello.bytes < SLABS || hello.bytes > MAX_BYTES || is_own.unwrap_or(true) {
            return Err(stranger(broken(), "the other process is not fulmar"));
        }
        let memory = PeerMap::open(file.as_fd(), hello.bytes).map_err(|e| {
            stranger(e, "the other process's memory is not sealed, so reading it is not safe")
        })?;
        Ok(Theirs { hello, memory })
    }

    /// Reads a client's hello and answers it. Nothing can fail after the answer. A client of another version
    /// is answered too, so that it can report the mismatch.
    fn answer_to(&self, config: &ShmConfig, socket: &OwnedFd) -> Result<Theirs, Refusal> {
        let heard = self.hear(config, socket);
        match &heard {
            Ok(_) => self.say(socket).map_err(|_| Refusal::Gone)?,
            // A failure to send means that the peer is gone.
            Err(Refusal::Version(_)) => drop(self.say(socket)),
            Err(_) => {}
        }
        heard
    }

    fn meet(self, came: Side, socket: OwnedFd, theirs: Theirs) -> Met {
        Met {
            side: agree(came, self.hello.wants, theirs.hello.wants),
            socket,
            own: self.map,
            peer: theirs.memory,
            region: self.region,
            staging: self.staging,
            mtu: self.hello.mtu.min(theirs.hello.mtu),
        }
    }
}

/// Which end this one is; the other end concludes the opposite.
fn agree(came: Side, ours: Option<Side>, theirs: Option<Side>) -> Side {
    match (ours, theirs) {
        (ours, theirs) if ours == theirs => came,
        (Some(side), _) => side,
        (None, theirs) => theirs.map_or(came, Side::other),
    }
}

/// The peer of a world-writable name must be a process of the same user, or of root.
fn check_user(socket: &OwnedFd) -> io::Result<()> {
    let (peer, own) = sys::users(socket.as_fd())?;
    if peer == own || peer == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EACCES)) }
}

/// Constants that must be equal in both: entries of a ring, pieces of a frame.
const SHAPE: u64 = (FRAMES as u64) << 32 | PIECES as u64;

/// The message that each end sends first, with its memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Hello {
    version: u32,
    bytes: usize,
    mtu: usize,
    shape: u64,
    wants: Option<Side>,
}

impl Hello {
    /// magic 8, version 4, mtu 4, bytes 8, shape 8, wish 4; little-endian.
    fn emit(&self) -> [u8; HELLO_BYTES] {
        let mut b = [0; HELLO_BYTES];
        b[..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&self.version.to_le_bytes());
        b[12..16].copy_from_slice(&(self.mtu as u32).to_le_bytes());
        b[16..24].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        b[24..32].copy_from_slice(&self.shape.to_le_bytes());
        let wish = self.wants.map_or(0u32, |w| if w == Side::First { 1 } else { 2 });
        b[32..].copy_from_slice(&wish.to_le_bytes());
        b
    }

    fn parse(b: &[u8]) -> Option<Hello> {
        let word = |at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
        let half = |at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
        if b.len() != HELLO_BYTES || b.get(..8)? != MAGIC {
            return None;
        }
        Some(Hello {
            version: half(8)?,
            bytes: usize::try_from(word(16)?).ok()?,
            mtu: half(12)? as usize,
            shape: word(24)?,
            wants: match half(32)? {
                1 => Some(Side::First),
                2 => Some(Side::Second),
                _ => None,
            },
        })
    }
}

/// Reads the other end's hello. `None`: it disconnected.
fn hear(socket: &OwnedFd) -> Result<(Hello, OwnedFd), Option<io::Error>> {
    // One byte more than a hello, to detect a longer message.
    let mut bytes = [0; HELLO_BYTES + 1];
    let (n, file) = sys::receive_with(socket.as_fd(), &mut bytes).map_err(|_| None)?;
    if n == 0 {
        return Err(None);
    }
    let refused = || Some(io::Error::from_raw_os_error(libc::EPROTO));
    let hello = bytes.get(..n).and_then(Hello::parse).ok_or_else(refused)?;
    Ok((hello, file.ok_or_else(refused)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_hello_survives_its_bytes_and_is_refused_at_every_shorter_length() {
        let wants = Some(Side::Second);
        let hello = Hello { version: 3, bytes: 1 << 30, mtu: 9000, shape: SHAPE, wants };
        let bytes = hello.emit();
        assert_eq!(Hello::parse(&bytes), Some(hello));
        (0..HELLO_BYTES).for_each(|n| assert_eq!(Hello::parse(&bytes[..n]), None));
    }

    #[test]
    fn the_two_ends_always_agree_on_who_is_who() {
        let wishes = [None, Some(Side::First), Some(Side::Second)];
        for (a, b) in wishes.iter().flat_map(|a| wishes.iter().map(move |b| (*a, *b))) {
            let first = agree(Side::First, a, b);
            assert_eq!(agree(Side::Second, b, a), first.other());
            assert!(a == b || a.is_none_or(|w| w == first), "{a:?} {b:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            Hello::parse(&bytes);
        }
    }
}
