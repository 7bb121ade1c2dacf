//! Reads of files into mbuf chains for sendfile, with or without waiting for the disk, and read-ahead.
//!
//! Called without a lock, since a disk may be slow. The descriptor and the chain are the caller's. Cost: one system
//! call per `MAX_PARTS` mbufs, and the kernel's copy. Source: preadv2(2), posix_fadvise(2); `RWF_NOWAIT` since Linux
//! 4.14.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use fulmar_stack::mbuf::Chain;

#[allow(unsafe_code)]
mod sys;

/// Most mbufs that one system call fills: 4 MiB with the largest mbufs.
const MAX_PARTS: usize = 64;

/// Bytes of one POSIX_FADV_WILLNEED: Linux reads at most `read_ahead_kb` per request, 128 KiB by default.
const AHEAD_STEP_BYTES: u64 = 128 << 10;

/// Whether a read may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// It may wait for the disk.
    Wait,
    /// Only bytes in the page cache are read.
    InMemory,
}

/// Why a read ended.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums, reason = "internal: its users are released with it")]
pub enum End {
    /// All bytes asked for were read.
    Full,
    /// The end of the file.
    OfFile,
    /// The next bytes are not in the page cache.
    NotInMemory,
    /// The kernel or the file system has no reads that do not wait.
    MustWait,
    /// The file cannot be read.
    Failed(io::Error),
}

/// Reads the file from `at` on into the bytes [skip, skip + len) of a chain. Returns how many were read, and why it
/// ended. No mbuf of the chain may be shared.
pub(crate) fn read_into(
    file: BorrowedFd<'_>,
    at: u64,
    chain: &mut Chain,
    skip: usize,
    len: usize,
    patience: Patience,
) -> (usize, End) {
    let mut done = 0;
    while done < len {
        let mut parts: [IoSliceMut<'_>; MAX_PARTS] =
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
        // Old kernels, and file systems without such reads.
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => End::MustWait,
        _ => End::Failed(e),
    }
}

/// Sets `parts` to the mbufs of the bytes [skip, skip + len) of the chain, as far as they fit; returns how many there
/// are.
fn split<'a>(
    chain: &'a mut Chain,
    mut skip: usize,
    mut len: usize,
    parts: &mut [IoSliceMut<'a>; MAX_PARTS],
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

/// Advises the kernel to read a part of the file into the page cache (POSIX_FADV_WILLNEED). Errors are ignored.
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
