//! Receiving as BSD did it before: the baseline.
//!
//! ```text
//!  device:     [crossing, one packet, input] x 45      for 64 KiB of stream
//!  soreceive:  [lock, one mbuf, unlock, copy] x 45, one window update at the end
//! ```
//!
//! - **No aggregation**: the device hands over packets of MTU size, each in a buffer of its own.
//! - **One packet per crossing** ([`super::Limited`]): the device is called once for each packet and once for each ACK,
//!   as an interrupt handler and `if_output` did.
//! - **soreceive mbuf by mbuf** ([`Reader`]): `soreceive_generic` drops the socket buffer's lock for the copy of each
//!   mbuf, and takes it again to free that mbuf and find the next.
//! - **A general free list**: each packet's buffer comes from the pool's free lists and returns there, not to the ring
//!   that it came from.
//!
//! TCP and IP are fulmar's own, so a comparison with the released path shows the effect of these four alone.
//!
//! Source: FreeBSD 6, uipc_socket.c (`soreceive`), and any driver of that time.

use super::{Load, Target, readers::Ring};
use crate::kernel::receive::touch;
use fulmar::Ready;
use fulmar::device::Chain;
use fulmar::internals::runtime::{Host, Limit};
use fulmar_stack::base::SlotId;
use fulmar_stack::socket::SocketError;
use std::io;
use std::task::Poll;

/// Payload of a full packet with timestamps on a device of MTU 1500: an mbuf's bytes.
const MBUF_BYTES: usize = 1448;

/// `soreceive_generic` into buffers that are used in turn.
pub struct Reader {
    ring: Ring,
    touch: bool,
    /// Bytes of the mbuf at the front that an earlier call left.
    rest_of_mbuf: usize,
}

impl Reader {
    /// A reader with the buffers of `load`.
    pub fn new(load: &Load) -> Reader {
        Reader { ring: Ring::new(load), touch: load.is_touched(), rest_of_mbuf: MBUF_BYTES }
    }

    /// Takes one mbuf, or what of it fits.
    fn want(&self, room: usize) -> usize {
        self.rest_of_mbuf.min(room)
    }

    fn note_taken(&mut self, bytes: usize) {
        let rest = self.rest_of_mbuf.saturating_sub(bytes);
        self.rest_of_mbuf = if rest == 0 { MBUF_BYTES } else { rest };
    }

    fn read(&mut self, host: &Host, id: SlotId, into: &mut [u8]) -> Result<usize, SocketError> {
        let want = self.want(into.len());
        let mut chain =
            host.wait(id, Ready::READABLE, Limit::Forever, |shard, _| shard.tcp_take(id, want))?;
        let mut done = 0;
        while !chain.is_empty() {
            let n = chain.len();
            copy(&chain, &mut into[done..]);
            done += n;
            self.note_taken(n);
            let want = self.want(into.len() - done);
            let mut shard = host.lock()?;
            shard.pool().free(chain);
            chain = match if want == 0 { Ok(Poll::Pending) } else { shard.tcp_take(id, want) } {
                Ok(Poll::Ready(next)) => next,
                // What was copied is returned first; an error stays for the next call.
                Ok(_) | Err(_) => break,
            };
        }
        // `pru_rcvd`: the window, once per call.
        host.lock()?.tcp_read_done(fulmar::internals::runtime::now(), id, Chain::new());
        Ok(done)
    }
}

fn copy(chain: &Chain, into: &mut [u8]) {
    let mut at = 0;
    for mbuf in chain.iter() {
        let bytes = mbuf.as_slice();
        into[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    }
}

impl super::Reader for Reader {
    fn call(&mut self, from: &Target<'_>) -> io::Result<u64> {
        let (host, id) = (from.stack.host(), from.stream.slot_id());
        let mut buffer = self.ring.take_next();
        let read = self.read(host, id, &mut buffer);
        if let (Ok(n), true) = (&read, self.touch) {
            touch(&buffer[..*n]);
        }
        self.ring.put_back(buffer);
        read.map(|n| n as u64).map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }

    fn copies_per_byte(&self) -> u64 {
        1
    }
}
