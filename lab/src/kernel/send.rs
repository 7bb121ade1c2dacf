//! The kernel's own ways of sending: `write`, `MSG_ZEROCOPY`, `sendfile`, `read` and `write`.
//!
//! Zerocopy: a send pins the caller's pages, and a completion on the socket's error queue says when
//! they may be changed, and whether the kernel had to copy after all. Completions are taken off after
//! every call, as a program has to; the kernel's limit on those outstanding shows as `ENOBUFS`, and
//! then the caller waits for one. (Documentation/networking/msg_zerocopy.rst, sendfile(2).)

use crate::file::{CacheState, FileCursor};
use crate::sys;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

/// How a kernel peer sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KernelCall {
    /// `write` from one hot buffer.
    #[default]
    Write,
    /// `send` with `MSG_ZEROCOPY` from one buffer.
    ZeroCopy,
    /// `sendfile`.
    SendFile,
    /// `pread` into a buffer, then `write`.
    ReadWrite,
}

impl KernelCall {
    /// Every call.
    pub const ALL: [KernelCall; 4] =
        [KernelCall::Write, KernelCall::ZeroCopy, KernelCall::SendFile, KernelCall::ReadWrite];

    /// The name in scenarios and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            KernelCall::Write => "kernel_write",
            KernelCall::ZeroCopy => "kernel_zerocopy",
            KernelCall::SendFile => "kernel_sendfile",
            KernelCall::ReadWrite => "kernel_read_write",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            KernelCall::Write => "kernel write",
            KernelCall::ZeroCopy => "kernel MSG_ZEROCOPY",
            KernelCall::SendFile => "kernel sendfile",
            KernelCall::ReadWrite => "kernel read + write",
        }
    }

    /// Whether it sends a file.
    pub const fn needs_file(self) -> bool {
        matches!(self, KernelCall::SendFile | KernelCall::ReadWrite)
    }
}

/// A file of the parent's, by its process and descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileOf {
    /// The parent.
    pub pid: u32,
    /// Its descriptor.
    pub fd: i32,
    /// Bytes of the file.
    pub bytes: u64,
    /// Which of them are sent.
    pub heat: CacheState,
}

/// How a source sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sending {
    /// The call.
    pub call: KernelCall,
    /// The file; `None`: from memory.
    pub file: Option<FileOf>,
    /// Bytes of the send buffer (of a sink: the receive buffer) to ask for; `None`: as the kernel
    /// tunes it.
    pub socket_buffer_bytes: Option<usize>,
    /// The bursts; `None`: as fast as it can.
    pub burst: Option<Burst>,
}

/// A burst of bytes, then a pause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Burst {
    /// Bytes of a burst.
    pub bytes: u64,
    /// From the end of one to the begin of the next.
    pub gap: Duration,
}

/// Keeps the pauses between bursts.
pub struct Pauses {
    burst: Burst,
    /// Bytes left of this burst.
    left: u64,
}

impl Pauses {
    /// Begins with a burst.
    pub fn new(burst: Burst) -> Pauses {
        Pauses { burst, left: burst.bytes }
    }

    /// Counts bytes that were sent; sleeps at the end of a burst.
    pub fn sent(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            std::thread::sleep(self.burst.gap);
            self.left = self.burst.bytes;
        }
    }
}

impl Sending {
    pub(crate) fn to_json(self) -> Value {
        json!({
            "call": self.call.name(),
            "socket_buffer_bytes": self.socket_buffer_bytes,
            "burst": self.burst.map(|b| json!({
                "bytes": b.bytes, "gap_ns": u64::try_from(b.gap.as_nanos()).unwrap_or(u64::MAX),
            })),
            "file": self.file.map(|f| json!({
                "pid": f.pid, "fd": f.fd, "bytes": f.bytes, "heat": f.heat.name(),
            })),
        })
    }

    pub(crate) fn from_json(v: &Value) -> Option<Sending> {
        let name = v.get("call")?.as_str()?;
        let file = v.get("file").filter(|f| !f.is_null());
        let burst = v.get("burst").filter(|b| !b.is_null());
        Some(Sending {
            burst: match burst {
                Some(b) => Some(Burst {
                    bytes: number(b, "bytes")?,
                    gap: Duration::from_nanos(number(b, "gap_ns")?),
                }),
                None => None,
            },
            call: KernelCall::ALL.into_iter().find(|c| c.name() == name)?,
            socket_buffer_bytes: number(v, "socket_buffer_bytes").map(|n| n as usize),
            file: match file {
                Some(f) => Some(FileOf {
                    pid: u32::try_from(number(f, "pid")?).ok()?,
                    fd: i32::try_from(number(f, "fd")?).ok()?,
                    bytes: number(f, "bytes")?,
                    heat: if f.get("heat")? == "hot" { CacheState::Hot } else { CacheState::Cold },
                }),
                None => None,
            },
        })
    }
}

fn number(v: &Value, name: &str) -> Option<u64> {
    v.get(name).and_then(Value::as_u64)
}

/// A source in the act of sending.
pub(crate) struct Sender {
    call: KernelCall,
    buffer: Vec<u8>,
    file: Option<(File, FileCursor)>,
    /// Sends with zerocopy, and of those the ones that the kernel copied after all.
    pub zerocopy_sends: u64,
    pub zerocopy_copied: u64,
    outstanding: u64,
}

impl Sender {
    pub fn new(sending: &Sending, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<Sender> {
        if sending.call == KernelCall::ZeroCopy {
            sys::setsockopt(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &1i32.to_ne_bytes())?;
        }
        let file = match sending.file {
            Some(f) => {
                let path = PathBuf::from(format!("/proc/{}/fd/{}", f.pid, f.fd));
                Some((File::open(path)?, FileCursor::new(f.heat, f.bytes)))
            }
            None if sending.call.needs_file() => return Err(io::ErrorKind::InvalidInput.into()),
            None => None,
        };
        Ok(Sender {
            call: sending.call,
            buffer: vec![0x5a; bytes],
            file,
            zerocopy_sends: 0,
            zerocopy_copied: 0,
            outstanding: 0,
        })
    }

    /// One call's worth; returns the bytes that were accepted.
    pub fn call<S: Write + AsFd>(&mut self, stream: &mut S) -> io::Result<usize> {
        match (self.call, &mut self.file) {
            (KernelCall::ZeroCopy, _) => self.zerocopy(stream.as_fd()),
            (KernelCall::SendFile, Some((file, walk))) => {
                let at = walk.next(self.buffer.len() as u64);
                send_whole(stream.as_fd(), file, at, self.buffer.len())
            }
            (KernelCall::ReadWrite, Some((file, walk))) => {
                let at = walk.next(self.buffer.len() as u64);
                file.read_exact_at(&mut self.buffer, at)?;
                stream.write_all(&self.buffer)?;
                Ok(self.buffer.len())
            }
            _ => {
                stream.write_all(&self.buffer)?;
                Ok(self.buffer.len())
            }
        }
    }

    fn zerocopy(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let mut done = 0;
        while done < self.buffer.len() {
            match sys::send_zerocopy(fd, &self.buffer[done..]) {
                Ok(n) => {
                    done += n;
                    self.zerocopy_sends += 1;
                    self.outstanding += 1;
                }
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                    sys::wait_error_queue(fd)?;
                }
                Err(e) => return Err(e),
            }
            self.reap(fd)?;
        }
        Ok(done)
    }

    fn reap(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        while self.outstanding > 0
            && let Some((first, last, was_copied)) = sys::zerocopy_completion(fd)?
        {
            let n = u64::from(last.wrapping_sub(first)) + 1;
            self.outstanding = self.outstanding.saturating_sub(n);
            self.zerocopy_copied += if was_copied { n } else { 0 };
        }
        Ok(())
    }
}

/// `sendfile` until all of it is accepted, as a program does.
fn send_whole(fd: BorrowedFd<'_>, file: &File, at: u64, bytes: usize) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes {
        match sys::send_file(fd, file.as_fd(), at + done as u64, bytes - done)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => done += n,
        }
    }
    Ok(done)
}
