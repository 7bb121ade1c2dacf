//! The programs that receive as fulmar is meant to be used.

use super::{Load, Reader, Target};
use crate::kernel::receive::touch;
use fulmar::zero_copy::{RecvBuf, RecvRing, ZeroCopy};
use std::io::{self, Read};

/// Buffers that are used in turn.
pub(super) struct Ring {
    buffers: Vec<Vec<u8>>,
    next: usize,
}

impl Ring {
    pub fn new(load: &Load) -> Ring {
        // Touched, so that no page fault is measured.
        Ring { buffers: vec![vec![1; load.buffer_bytes]; load.buffers.max(1)], next: 0 }
    }

    pub fn advance(&mut self) -> &mut [u8] {
        self.next = (self.next + 1) % self.buffers.len();
        &mut self.buffers[self.next]
    }

    /// The next buffer, out of the ring until [`Ring::put_back`].
    pub fn take_next(&mut self) -> Vec<u8> {
        self.next = (self.next + 1) % self.buffers.len();
        std::mem::take(&mut self.buffers[self.next])
    }

    /// Puts the buffer back that was taken last.
    pub fn put_back(&mut self, buffer: Vec<u8>) {
        self.buffers[self.next] = buffer;
    }
}

/// `TcpStream::read`.
pub(super) struct Reading {
    ring: Ring,
    touch: bool,
}

impl Reading {
    pub fn new(load: &Load) -> Reading {
        Reading { ring: Ring::new(load), touch: load.is_touched() }
    }
}

impl Reader for Reading {
    fn call(&mut self, from: &Target<'_>) -> io::Result<u64> {
        let mut stream = from.stream;
        let buffer = self.ring.advance();
        let n = stream.read(buffer)?;
        if self.touch {
            touch(&buffer[..n]);
        }
        Ok(n as u64)
    }
}

/// `TcpStream::recv_owned`: the stack's own buffers, until the next call.
pub(super) struct Loaned {
    most_bytes: usize,
    touch: bool,
}

impl Loaned {
    pub fn new(load: &Load) -> Loaned {
        Loaned { most_bytes: load.buffer_bytes, touch: load.is_touched() }
    }
}

impl Reader for Loaned {
    fn call(&mut self, from: &Target<'_>) -> io::Result<u64> {
        let loan = from.stream.recv_owned(self.most_bytes)?;
        if self.touch {
            loan.slices().map(touch).fold(0, u64::wrapping_add);
        }
        Ok(loan.len() as u64)
    }
}

/// `TcpStream::recv_ring`: buffers that are given away before their bytes come, and used in turn.
pub(super) struct PostedAhead {
    /// Until they are posted.
    buffers: Vec<RecvBuf>,
    ring: Option<RecvRing>,
    touch: bool,
}

impl PostedAhead {
    pub fn new(load: &Load) -> io::Result<PostedAhead> {
        Ok(PostedAhead { buffers: owned_buffers(load)?, ring: None, touch: load.is_touched() })
    }
}

fn owned_buffers(load: &Load) -> io::Result<Vec<RecvBuf>> {
    let buffer = |_| {
        let mut buffer = RecvBuf::try_with_capacity(load.buffer_bytes)?;
        // Touched, so that no page fault is measured.
        buffer.memory_mut().fill(1);
        Ok(buffer)
    };
    let buffers: Result<_, fulmar_stack::mbuf::NoMemory> =
        (0..load.buffers.max(1)).map(buffer).collect();
    buffers.map_err(io::Error::other)
}

impl Reader for PostedAhead {
    fn begin(&mut self, from: &Target<'_>) -> io::Result<()> {
        self.ring = Some(from.stream.recv_ring(std::mem::take(&mut self.buffers))?);
        Ok(())
    }

    fn call(&mut self, _from: &Target<'_>) -> io::Result<u64> {
        let Some(ring) = &mut self.ring else { return Ok(0) };
        let bytes = ring.recv()?;
        if self.touch {
            touch(bytes);
        }
        Ok(bytes.len() as u64)
    }

    /// Takes back what is posted.
    fn finish(&mut self, _from: &Target<'_>) -> io::Result<()> {
        self.ring = None;
        Ok(())
    }
}
