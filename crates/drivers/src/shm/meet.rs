//! How two processes find each other and show each other their memory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_mbuf::{Backing, Pool, PoolConfig, SLAB_BYTES};

use super::layout::{FRAMES, PIECES, SLABS};
use super::sys::{self, Address, OwnMap, PeerMap};
use super::{ShmConfig, Side};
use crate::OpenError;

/// Size classes of a pool, each of which may hold one slab beyond the budget.
const SPARE_SLABS: usize = 5;

/// Frames whose bytes lie outside of the region are copied to memory of this size on their way.
const STAGING_BYTES: usize = 8 << 20;

/// What the two have to agree on, and a number that grows with every change of it.
const MAGIC: [u8; 8] = *b"fulmarsh";
const VERSION: u32 = 1;
const HELLO_BYTES: usize = 36;

/// The most memory of another process that is mapped: offsets have 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;

/// How long a process that has connected may take to say what it is.
const HELLO_MS: i32 = 3000;

/// How often somebody who met a process that went away looks for another.
const RETRY: Duration = Duration::from_millis(2);

/// A connection, and both memories.
pub struct Met {
    pub side: Side,
    pub socket: OwnedFd,
    pub own: Arc<OwnMap>,
    pub peer: PeerMap,
    pub region: Backing,
    pub staging: Pool,
    /// The smaller of the two MTUs.
    pub mtu: usize,
}

/// Why two processes did not get together.
#[derive(Debug)]
enum Trouble {
    /// The other one went away, or was nobody: look for another.
    Again,
    /// It will not work.
    Final(OpenError),
}

/// Meets the other process.
pub fn meet(config: &ShmConfig) -> Result<Met, OpenError> {
    let give_up = config.wait.map(|w| Instant::now() + w);
    loop {
        let (socket, side) = find(config, give_up)?;
        match introduce(config, socket, side) {
            Ok(met) => return Ok(met),
            Err(Trouble::Final(e)) => return Err(e),
            Err(Trouble::Again) if give_up.is_some_and(|at| Instant::now() >= at) => {
                return Err(nobody(config));
            }
            Err(Trouble::Again) => std::thread::sleep(RETRY),
        }
    }
}

/// Both ends in one process.
pub fn meet_oneself(config: &ShmConfig) -> Result<(Met, Met), OpenError> {
    let [a, b] = sys::socket_pair().map_err(|e| failed(config, e, LIMITS))?;
    let other = config.clone();
    let second = std::thread::spawn(move || introduce(&other, b, Side::Second));
    let first = introduce(config, a, Side::First);
    let second = second.join().unwrap_or(Err(Trouble::Again));
    match (first, second) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(Trouble::Final(e)), _) | (_, Err(Trouble::Final(e))) => Err(e),
        _ => Err(nobody(config)),
    }
}

const LIMITS: &str = "raise the limits on open files and on memory (ulimit -n, ulimit -v)";
const NAMES: &str = "choose another name; one with a slash is a path, any other a name that all \
                     processes of the network namespace share";

fn failed(config: &ShmConfig, e: io::Error, advice: &str) -> OpenError {
    OpenError::new(format!("cannot open shm:{}", config.name), e, advice)
}

fn nobody(config: &ShmConfig) -> OpenError {
    let e = io::Error::from_raw_os_error(libc::ETIMEDOUT);
    failed(config, e, "start the other process with the same name")
}

/// Connects to who is there already, or becomes who is there.
fn find(config: &ShmConfig, give_up: Option<Instant>) -> Result<(OwnedFd, Side), OpenError> {
    let is_abstract = !config.name.contains('/');
    let naming = |e| failed(config, e, NAMES);
    let address = Address::new(&config.name, is_abstract).map_err(naming)?;
    let listener = loop {
        // One at a time, or a path that somebody just bound would be taken for a left-over.
        let _lock =
            if is_abstract { None } else { Some(lock_directory(&config.name).map_err(naming)?) };
        let socket = sys::socket().map_err(|e| failed(config, e, LIMITS))?;
        match sys::connect(socket.as_fd(), &address) {
            Ok(()) => return Ok((socket, Side::Second)),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && !is_abstract => {
                std::fs::remove_file(&config.name).map_err(naming)?;
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ECONNREFUSED)) => {}
            Err(e) => return Err(naming(e)),
        }
        match sys::listen(socket.as_fd(), &address) {
            Ok(()) => break socket,
            // Somebody was faster and is about to listen.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_abstract => {
                std::thread::sleep(RETRY);
            }
            Err(e) => return Err(naming(e)),
        }
    };
    let bound = Bound { path: (!is_abstract).then(|| config.name.clone()) };
    (config.on_wait)(&config.name);
    let came = wait(&listener, give_up).map_err(|e| failed(config, e, LIMITS))?;
    // Gone before the connection is used: who comes now finds nobody, and becomes a first end.
    drop(bound);
    if !came {
        return Err(nobody(config));
    }
    let socket = sys::accept(listener.as_fd()).map_err(|e| failed(config, e, LIMITS))?;
    Ok((socket, Side::First))
}

/// A path that was bound: removed when it has served.
struct Bound {
    path: Option<String>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // If somebody else has removed it, so much the better.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// An exclusive lock on the directory of a path, without a file that would stay behind.
fn lock_directory(path: &str) -> io::Result<std::fs::File> {
    let parent = Path::new(path).parent().filter(|p| !p.as_os_str().is_empty());
    let directory = std::fs::File::open(parent.unwrap_or(Path::new(".")))?;
    sys::lock(directory.as_fd())?;
    Ok(directory)
}

/// Waits for somebody; false if the time is over.
fn wait(listener: &OwnedFd, give_up: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = give_up.map(|at| at.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |d| i32::try_from(d.as_millis() + 1).unwrap_or(i32::MAX));
        match sys::wait_readable(listener.as_fd(), ms) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Ok(false) if left.is_some_and(|d| d.is_zero()) => return Ok(false),
            Ok(false) => {}
            result => return result,
        }
    }
}

/// Shows the other process this one's memory, and looks at the other's.
fn introduce(config: &ShmConfig, socket: OwnedFd, side: Side) -> Result<Met, Trouble> {
    let last = |e, advice| Trouble::Final(failed(config, e, advice));
    if !config.name.contains('/') {
        check_user(&socket).map_err(|e| {
            last(e, "another user has taken this name; use a path in a directory of your own")
        })?;
    }
    let pool_bytes = config.pool_bytes.next_multiple_of(SLAB_BYTES) + SPARE_SLABS * SLAB_BYTES;
    let staging_bytes = STAGING_BYTES + SPARE_SLABS * SLAB_BYTES;
    let bytes = SLABS + pool_bytes + staging_bytes;
    if bytes > MAX_BYTES {
        let e = io::Error::from_raw_os_error(libc::EFBIG);
        return Err(last(e, "the pool can have at most 3 GiB in shared memory"));
    }
    let (own, file) = OwnMap::create(bytes).map_err(|e| last(e, LIMITS))?;
    let (mtu, wants) = (config.mtu, config.wants);
    let hello = Hello { version: VERSION, bytes, mtu, shape: SHAPE, wants };
    // If that fails, so does the answer.
    let _ = sys::send_with(socket.as_fd(), &hello.emit(), file.as_fd());
    let (theirs, file) = hear(&socket).map_err(|e| match e {
        None => Trouble::Again,
        Some(e) => last(e, "the other process is no fulmar, or has other limits"),
    })?;
    if theirs.version != VERSION || theirs.shape != SHAPE {
        let what = format!("it speaks version {}, this one {VERSION}", theirs.version);
        let e = io::Error::other(what);
        return Err(last(e, "use the same release of fulmar at both ends"));
    }
    if theirs.bytes < SLABS || theirs.bytes > MAX_BYTES {
        let e = io::Error::from_raw_os_error(libc::EPROTO);
        return Err(last(e, "the other process is no fulmar"));
    }
    let peer = PeerMap::open(file.as_fd(), theirs.bytes).map_err(|e| {
        last(e, "the other process's memory is not sealed, so it is not safe to read")
    })?;
    let own = Arc::new(own);
    let region = own.backing(SLABS, pool_bytes);
    let staging = own.backing(SLABS + pool_bytes, staging_bytes);
    let staging = Pool::with_backing(staging_config(), Some(staging))
        .map_err(|e| last(io::Error::other(e.to_string()), LIMITS))?;
    let mtu = config.mtu.min(theirs.mtu);
    let side = agree(side, config.wants, theirs.wants);
    Ok(Met { side, socket, own, peer, region, staging, mtu })
}

/// Which end this one is; the other one comes to the opposite conclusion.
fn agree(came: Side, ours: Option<Side>, theirs: Option<Side>) -> Side {
    match (ours, theirs) {
        (ours, theirs) if ours == theirs => came,
        (Some(side), _) => side,
        (None, theirs) => theirs.map_or(came, Side::other),
    }
}

/// All of it for one purpose.
fn staging_config() -> PoolConfig {
    PoolConfig { huge_pages: false, ..PoolConfig::with_budget(STAGING_BYTES) }
}

/// An abstract name has no permissions, so whoever is met by one must be the same user.
fn check_user(socket: &OwnedFd) -> io::Result<()> {
    let (peer, own) = sys::users(socket.as_fd())?;
    if peer == own || peer == 0 { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Numbers that must be the same in both: places of a ring, pieces of a frame.
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
        if b.get(..8)? != MAGIC {
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

/// The other end's hello. `None`: it went away, or said nothing that makes sense.
fn hear(socket: &OwnedFd) -> Result<(Hello, OwnedFd), Option<io::Error>> {
    let mut bytes = [0; HELLO_BYTES];
    if !sys::wait_readable(socket.as_fd(), HELLO_MS).map_err(|_| None)? {
        return Err(None);
    }
    let (n, file) = sys::receive_with(socket.as_fd(), &mut bytes).map_err(|_| None)?;
    if n == 0 {
        return Err(None);
    }
    let refused = || Some(io::Error::from_raw_os_error(libc::EPROTO));
    let hello = Hello::parse(&bytes[..n]).ok_or_else(refused)?;
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
