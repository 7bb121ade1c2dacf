//! Files as a source of what is sent: reads that scatter into a chain, with or without waiting for
//! the disk, and reading ahead.
//!
//! Called outside any lock, since a disk may be slow. Owns nothing: the descriptor and the chain are
//! the caller's. Cost: one system call per read of up to `MOST_PARTS` mbufs, and the kernel's copy.
//! Source: readv(2), posix_fadvise(2); `RWF_NOWAIT` since Linux 4.14.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use fulmar_mbuf::Chain;

mod map;
#[allow(unsafe_code)]
mod sys;

pub use map::{FileMap, MAX_MAP_BYTES};

/// Most mbufs that one system call fills: 4 MiB in the largest.
const MOST_PARTS: usize = 64;

/// The kernel reads ahead no more than this per request, whatever it is asked for (its default).
const AHEAD_STEP_BYTES: u64 = 128 << 10;

/// How long a read may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// As long as the disk does.
    Wait,
    /// Only what is in memory already.
    InMemory,
}

/// Why a read ended.
#[derive(Debug)]
pub enum End {
    /// Everything that was asked for is there.
    Full,
    /// The file ends here.
    OfFile,
    /// What comes next is not in memory.
    NotInMemory,
    /// This file cannot be read without waiting.
    MustWait,
    /// The file cannot be read.
    Failed(io::Error),
}

/// Fills bytes [skip, skip + len) of a chain from the file, and says how many it got. The chain's
/// mbufs must be the caller's alone.
pub fn read_into(
    file: BorrowedFd<'_>,
    at: u64,
    chain: &mut Chain,
    skip: usize,
    len: usize,
    patience: Patience,
) -> (usize, End) {
    let mut done = 0;
    while done < len {
        let mut parts: [IoSliceMut<'_>; MOST_PARTS] =
            std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let used = split(chain, skip + done, len - done, &mut parts);
        let Some(from) = at.checked_add(done as u64) else { return (done, End::OfFile) };
        match sys::preadv2(file, &mut parts[..used], from, patience) {
            Ok(0) => return (done, End::OfFile),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (done, why(e, patience)),
        }
    }
    (done, End::Full)
}

fn why(e: io::Error, patience: Patience) -> End {
    if patience == Patience::Wait {
        return End::Failed(e);
    }
    match e.raw_os_error() {
        Some(libc::EAGAIN) => End::NotInMemory,
        // Old kernels, and file systems that know no such reads.
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => End::MustWait,
        _ => End::Failed(e),
    }
}

/// The mbufs that hold bytes [skip, skip + len) of the chain; how many parts there are.
fn split<'a>(
    chain: &'a mut Chain,
    mut skip: usize,
    mut len: usize,
    parts: &mut [IoSliceMut<'a>; MOST_PARTS],
) -> usize {
    let mut used = 0;
    for slice in chain.slices_mut() {
        let from = skip.min(slice.len());
        skip -= from;
        let n = (slice.len() - from).min(len);
        if n == 0 {
            continue;
        }
        let Some(part) = parts.get_mut(used) else { break };
        *part = IoSliceMut::new(&mut slice[from..from + n]);
        len -= n;
        used += 1;
    }
    used
}

/// Asks the kernel to read a part of the file into memory meanwhile. Advice: nothing is said if it
/// does not.
pub fn read_ahead(file: BorrowedFd<'_>, at: u64, bytes: u64) {
    let end = at.saturating_add(bytes);
    let mut at = at;
    while at < end {
        let step = AHEAD_STEP_BYTES.min(end - at);
        sys::will_need(file, at, step);
        at += step;
    }
}

#[cfg(test)]
mod tests;
