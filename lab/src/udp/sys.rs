//! Many datagrams of one socket in one system call: sendmmsg(2), recvmmsg(2).
//!
//! A [`Batch`] owns the memory of its datagrams and the headers that point to it, made once, as a
//! program that wants to be fast does.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// Room for a number of datagrams.
pub struct Batch {
    headers: Vec<libc::mmsghdr>,
    /// Behind `headers`, each of which points to one.
    _parts: Vec<libc::iovec>,
    /// Behind `_parts`.
    _memory: Vec<u8>,
}

// SAFETY: the pointers in `headers` and `_parts` lead to memory that belongs to this value and moves with it;
// nothing of it is tied to a thread.
unsafe impl Send for Batch {}

impl Batch {
    /// `count` datagrams of `bytes` each.
    pub fn new(count: usize, bytes: usize) -> Batch {
        let bytes = bytes.max(1);
        Batch::of(vec![0x5a; count * bytes], bytes)
    }

    /// As many datagrams of `bytes` each as are in `memory`.
    pub fn of(mut memory: Vec<u8>, bytes: usize) -> Batch {
        let part =
            |one: &mut [u8]| libc::iovec { iov_base: one.as_mut_ptr().cast(), iov_len: one.len() };
        let mut parts: Vec<libc::iovec> = memory.chunks_exact_mut(bytes.max(1)).map(part).collect();
        let header = |part: &mut libc::iovec| {
            // SAFETY: all of mmsghdr is plain numbers and pointers, for which zero (null) is a value.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = ptr::from_mut(part);
            header.msg_hdr.msg_iovlen = 1;
            header
        };
        let headers = parts.iter_mut().map(header).collect();
        Batch { headers, _parts: parts, _memory: memory }
    }

    /// Sends the first `count` datagrams on a connected socket; returns how many went.
    pub fn send(&mut self, fd: BorrowedFd<'_>, count: usize) -> io::Result<usize> {
        self.send_from(fd, 0, count)
    }

    /// The same from the datagram of this number on.
    pub fn send_from(
        &mut self,
        fd: BorrowedFd<'_>,
        first: usize,
        count: usize,
    ) -> io::Result<usize> {
        let headers = self.headers.get_mut(first..).unwrap_or_default();
        let count = count.min(headers.len()) as libc::c_uint;
        // SAFETY: each header points to a part, each part to bytes, all of them this batch's and where
        // they were made (a vector that moves leaves its elements); the kernel only reads them.
        let n = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, libc::MSG_DONTWAIT)
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Receives up to `count` datagrams; returns how many came.
    pub fn receive(&mut self, fd: BorrowedFd<'_>, count: usize) -> io::Result<usize> {
        let count = count.min(self.headers.len()) as libc::c_uint;
        let headers = self.headers.as_mut_ptr();
        // SAFETY: as for `send`; the kernel writes into the headers and the bytes, to which there is no
        // a reference.
        let n = unsafe {
            let no_limit = ptr::null_mut();
            libc::recvmmsg(fd.as_raw_fd(), headers, count, libc::MSG_DONTWAIT, no_limit)
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}
