//! QEMU's `-netdev stream`: Ethernet frames on a stream, each behind its length as four bytes in network order.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use super::{MAX_FRAME_BYTES, PacketIo};

const LENGTH_BYTES: usize = 4;
/// Space for several frames of one call.
const BUFFER_BYTES: usize = 2 * (MAX_FRAME_BYTES + LENGTH_BYTES);

/// The socket of a virtual machine (`-netdev stream,id=n,server=off,addr.type=unix,addr.path=…`, and passt's `--socket`).
/// With [`plain_ethernet`](super::plain_ethernet) it is a device.
///
/// ```no_run
/// use std::os::unix::net::UnixListener;
/// use fulmar::device::EtherAddr;
/// use fulmar::devices::{self, QemuStream};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (machine, _) = UnixListener::bind("vm.sock")?.accept()?;
/// let ether = EtherAddr([2, 0, 0, 0, 0, 1]);
/// let device = devices::plain_ethernet(QemuStream::new(machine), 1500, ether)?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct QemuStream {
    stream: UnixStream,
    arriving: Box<[u8]>,
    /// The bytes of `arriving` that are not returned yet.
    from: usize,
    to: usize,
    /// Frames that the stream has not taken, of which `sent` bytes have gone.
    leaving: Vec<u8>,
    sent: usize,
}

impl std::fmt::Debug for QemuStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QemuStream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl QemuStream {
    /// Over a connected stream.
    pub fn new(stream: UnixStream) -> QemuStream {
        let arriving = vec![0; BUFFER_BYTES].into();
        QemuStream { stream, arriving, from: 0, to: 0, leaving: Vec::new(), sent: 0 }
    }

    /// The frame at the front of what has come. `None`: it has not come completely.
    fn front(&self) -> io::Result<Option<(usize, usize)>> {
        let Some(length) = self.arriving[self.from..self.to].first_chunk() else { return Ok(None) };
        let bytes = u32::from_be_bytes(*length) as usize;
        if bytes > MAX_FRAME_BYTES {
            let text = format!("a frame of {bytes} bytes: expected at most {MAX_FRAME_BYTES}");
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        let start = self.from + LENGTH_BYTES;
        Ok((start + bytes <= self.to).then_some((start, start + bytes)))
    }
}

impl AsFd for QemuStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl PacketIo for QemuStream {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        if self.leaving.len() >= BUFFER_BYTES {
            self.flush()?;
        }
        let length = u32::try_from(frame.len()).map_err(|_| ErrorKind::InvalidInput)?;
        self.leaving.extend_from_slice(&length.to_be_bytes());
        self.leaving.extend_from_slice(frame);
        Ok(())
    }

    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some((start, end)) = self.front()? {
                self.from = end;
                let frame = &self.arriving[start..end];
                let bytes = frame.len().min(buf.len());
                buf[..bytes].copy_from_slice(&frame[..bytes]);
                return Ok(bytes);
            }
            // One more read completes a frame that has come in part: half of the buffer holds any.
            self.arriving.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            match self.stream.read(&mut self.arriving[self.to..])? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => self.to += n,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.leaving.len() {
            self.sent += self.stream.write(&self.leaving[self.sent..])?;
        }
        self.leaving.clear();
        self.sent = 0;
        Ok(())
    }
}
