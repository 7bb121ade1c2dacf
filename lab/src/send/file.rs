//! Sending a file: a page at a time as until 2006, `read` and `write`, and fulmar's `send_file`.
//!
//! ```text
//!  old:   [find the page, one mbuf, read it, check the socket, pru_send -> tcp_output] per page
//!  new:   as many pages as the send buffer has room for in one chain, pru_send -> tcp_output once
//! ```
//!
//! The old loop is the loop of FreeBSD 4 to 6. Each iteration takes one page (less at the ends of the range), allocates
//! one mbuf for it and reads its bytes synchronously. *After* that it checks the socket, waits for space, and sends the
//! one mbuf with flags 0. (The original waited while less than the low-water mark of 2048 bytes was free, and then
//! overfilled its buffer by up to half a page, which this send buffer does not allow.) So TCP sees two full segments
//! and a rest at a time. The original mapped the page and referred to it. Here the bytes come from the same source as
//! in the new way, by `pread` into the mbuf (one system call and one copy per page), so that the comparison shows the
//! difference of the loops.
//!
//! Source: FreeBSD 6, uipc_syscalls.c (`do_sendfile`).

use super::sosend::{Writing, to_io};
use super::{Caller, Load, Target};
use crate::file::{BenchFile, CacheState, FileCursor};
use fulmar::device::{Chain, Purpose};
use fulmar::zero_copy::ZeroCopy;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::SocketError;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// How a file is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileMethod {
    /// sendfile as it was until 2006: one page, one mbuf, one send.
    Old,
    /// `pread` into a buffer of the program's, then `TcpStream::write`.
    ReadWrite,
    /// `TcpStream::send_file`, read into the stack's buffers.
    Read,
}

impl FileMethod {
    /// Every method.
    pub const ALL: [FileMethod; 3] = [FileMethod::Old, FileMethod::ReadWrite, FileMethod::Read];

    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FileMethod::Old => "old",
            FileMethod::ReadWrite => "read_write",
            FileMethod::Read => "ours_read",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            FileMethod::Old => "old sendfile: one page, one send each",
            FileMethod::ReadWrite => "read + fulmar write",
            FileMethod::Read => "fulmar send_file, read",
        }
    }

    /// Makes the caller that sends parts of `file` in this way.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn caller(
        self,
        load: &Load,
        file: &BenchFile,
        heat: CacheState,
    ) -> io::Result<Box<dyn Caller>> {
        let part = Parts {
            file: file.file().try_clone()?,
            walk: FileCursor::new(heat, file.bytes()),
            bytes: load.write_bytes as u64,
        };
        Ok(match self {
            FileMethod::Old => Box::new(PageByPage(part)),
            FileMethod::ReadWrite => Box::new(ReadWrite(part, vec![0; load.write_bytes])),
            FileMethod::Read => Box::new(Ours(part)),
        })
    }
}

/// The parts of a file that are sent one after the other.
struct Parts {
    file: File,
    walk: FileCursor,
    bytes: u64,
}

impl Parts {
    fn next(&mut self) -> (u64, u64) {
        let start = self.walk.next(self.bytes);
        (start, start + self.bytes)
    }
}

struct Ours(Parts);

impl Caller for Ours {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let (start, end) = self.0.next();
        Ok(to.stream.send_file(&self.0.file, start..end, &[], &[])?)
    }
}

struct ReadWrite(Parts, Vec<u8>);

impl Caller for ReadWrite {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let (start, _) = self.0.next();
        self.0.file.read_exact_at(&mut self.1, start)?;
        let mut stream = to.stream;
        stream.write_all(&self.1)?;
        Ok(self.1.len() as u64)
    }

    /// Out of the page cache: the stack counts the other copy.
    fn copies_per_byte(&self) -> u64 {
        1
    }
}

struct PageByPage(Parts);

impl Caller for PageByPage {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let writing = Writing { host: to.stack.host(), id: to.stream.slot_id() };
        let (start, end) = self.0.next();
        send_pages(&writing, &self.0.file, start, end)
    }

    fn copies_per_byte(&self) -> u64 {
        1
    }
}

/// The old loop; returns the bytes that were accepted.
fn send_pages(writing: &Writing<'_>, file: &File, start: u64, end: u64) -> io::Result<u64> {
    let _turn = writing.begin().map_err(to_io)?;
    let mut at = start;
    while at < end {
        let bytes = (PAGE_BYTES - at % PAGE_BYTES).min(end - at);
        let page = read_page(writing, file, at, bytes as usize)?;
        if page.is_empty() {
            break;
        }
        at += page.len() as u64;
        // Only now: while the page was read the connection may have ended.
        writing.wait_room(page.len()).map_err(to_io)?;
        writing.send(page, MoreData::None).map_err(to_io)?;
    }
    Ok(at - start)
}

/// One mbuf with the bytes of one page, or of what the file still has of it.
fn read_page(writing: &Writing<'_>, file: &File, at: u64, bytes: usize) -> io::Result<Chain> {
    let obtained = writing.host.lock().map_err(to_io)?.pool().alloc(bytes, 0, Purpose::Send);
    let mut mbuf = obtained.map_err(|_| to_io(SocketError::NoBuffer))?;
    mbuf.set_len(bytes);
    let room = mbuf.as_mut_slice().ok_or_else(|| to_io(SocketError::NoBuffer))?;
    let n = file.read_at(room, at)?;
    mbuf.truncate(n);
    Ok(Chain::from(mbuf))
}
