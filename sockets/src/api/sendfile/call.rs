//! One sendfile call.

use std::io::{self, IoSlice};
use std::task::Poll;

use crate::runtime::file::{End, Patience};
use crate::runtime::{Limit, Request};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::sendfile::{LowWater, Piece, Rest};
use fulmar_stack::socket::{Ready, Reservation};

use super::reader::Job;
use super::source::Source;
use super::{SendFile, SendFileError};
use crate::api::send::lock_send;
use crate::api::socket::{Socket, to_io};

/// Most bytes of one deferred read, so that its first bytes are sent soon.
const DEFERRED_BYTES: u64 = 256 << 10;

/// The state of a call.
pub(super) struct Call<'a> {
    socket: &'a Socket,
    options: &'a SendFile,
    source: Source<'a>,
    headers: IovCursor<'a>,
    trailers: IovCursor<'a>,
    /// Bytes accepted.
    sent: u64,
    /// The call holds the send lock.
    is_locked: bool,
}

/// The headers or trailers, and how many of their bytes were accepted.
struct IovCursor<'a> {
    parts: &'a [IoSlice<'a>],
    done: usize,
    left: usize,
}

impl<'a> IovCursor<'a> {
    fn new(parts: &'a [IoSlice<'a>]) -> IovCursor<'a> {
        IovCursor { parts, done: 0, left: parts.iter().map(|p| p.len()).sum() }
    }

    /// Copies the next `len` bytes into a chain from `at` on.
    fn copy(&self, chain: &mut Chain, mut at: usize, len: usize) {
        let (mut skip, end) = (self.done, at + len);
        for part in self.parts {
            let from = skip.min(part.len());
            skip -= from;
            let n = (part.len() - from).min(end - at);
            let copied = chain.copy_from(at, &part[from..from + n]);
            debug_assert_eq!(copied, Some(n), "the storage of a reservation is not shared");
            at += n;
        }
    }

    fn advance(&mut self, len: usize) {
        self.done += len;
        self.left -= len;
    }
}

/// A reservation that is released unless it is committed.
struct Held<'a> {
    socket: &'a Socket,
    r: Option<Reservation>,
}

impl Held<'_> {
    fn chain(&mut self) -> &mut Chain {
        &mut self.r.as_mut().expect("invariant: present until it is committed").chain
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(r) = self.r.take() {
            self.socket.host().post(Request::GiveBack(self.socket.id, r));
        }
    }
}

impl<'a> Call<'a> {
    pub(super) fn new(
        socket: &'a Socket,
        options: &'a SendFile,
        source: Source<'a>,
        headers: &'a [IoSlice<'a>],
        trailers: &'a [IoSlice<'a>],
    ) -> Call<'a> {
        let (headers, trailers) = (IovCursor::new(headers), IovCursor::new(trailers));
        Call { socket, options, source, headers, trailers, sent: 0, is_locked: false }
    }

    /// Sends until nothing is left. Returns the bytes accepted.
    ///
    /// # Errors
    /// Why it ended early, with the bytes accepted before.
    pub(super) fn run(mut self) -> Result<u64, SendFileError> {
        loop {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => return Ok(self.sent),
                Err(error) => return Err(SendFileError { error, sent: self.sent }),
            }
        }
    }

    /// One turn: reserve, fill, commit. False: nothing is left.
    fn turn(&mut self) -> io::Result<bool> {
        let mut rest = self.rest()?;
        if rest.bytes() == 0 {
            return Ok(false);
        }
        if self.defers() && self.source.is_cold {
            rest.file = rest.file.min(DEFERRED_BYTES);
            rest.tail = 0;
        }
        let (mut held, piece) = self.reserve(&rest)?;
        self.headers.copy(held.chain(), 0, piece.head);
        let patience = if self.defers() { Patience::InMemory } else { Patience::Wait };
        let (n, end) = self.source.fill(held.chain(), piece.head, piece.file, patience);
        match end {
            End::NotInMemory if n == 0 && piece.file > 0 => self.defer(held, piece)?,
            End::Failed(e) if n == 0 => return Err(e),
            End::Failed(e) => {
                self.commit(held, Piece { file: n, tail: 0, ..piece })?;
                return Err(e);
            }
            _ => self.commit(held, self.read_part(piece, n))?,
        }
        Ok(true)
    }

    /// The bytes that are left, as far as is known.
    fn rest(&self) -> io::Result<Rest> {
        let file = self.source.left()?;
        let tail = if self.source.knows_its_end() || file == 0 { self.trailers.left } else { 0 };
        Ok(Rest { head: self.headers.left, file_at: self.source.at(), file, tail })
    }

    /// The piece with `n` bytes of the file, and with trailers only if the file part is complete.
    fn read_part(&self, piece: Piece, n: usize) -> Piece {
        let tail = if n == piece.file { piece.tail } else { 0 };
        Piece { file: n, tail, ..piece }
    }

    /// The call is non-blocking, so the file is read by the reader thread.
    fn defers(&self) -> bool {
        self.socket.write_limit() == Limit::DoNotWait
    }

    fn reserve(&mut self, rest: &Rest) -> io::Result<(Held<'a>, Piece)> {
        let socket = self.socket;
        let limit = socket.write_limit();
        let worth = worth(limit);
        let is_locked = &mut self.is_locked;
        let (r, piece) = socket.wait(Ready::WRITABLE, limit, |shard, now| {
            if lock_send(shard.tcp_entry(socket.id)?, is_locked)?.is_pending() {
                return Ok(Poll::Pending);
            }
            shard.sendfile(socket.id).reserve(now, rest, worth)
        })?;
        Ok((Held { socket, r: Some(r) }, piece))
    }

    /// Sends the filled first bytes of a reservation.
    fn commit(&mut self, mut held: Held<'_>, piece: Piece) -> io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        self.trailers.copy(held.chain(), piece.head + piece.file, piece.tail);
        self.advance(piece);
        let more = MoreData::of_rest(self.rest().map_or(0, |r| r.bytes()));
        let accepted = self.socket.host().call(|shard, now| match held.r.take() {
            Some(r) => shard.sendfile(self.socket.id).commit(now, r, piece.len(), more),
            None => Ok(()),
        });
        accepted.map_err(to_io)?;
        self.sent += piece.len() as u64;
        if self.source.is_cold && !self.defers() {
            self.source.read_ahead(self.ahead(piece));
        }
        Ok(())
    }

    fn advance(&mut self, piece: Piece) {
        self.headers.advance(piece.head);
        self.trailers.advance(piece.tail);
    }

    fn ahead(&self, piece: Piece) -> u64 {
        self.options.read_ahead_bytes.unwrap_or(2 * piece.file as u64)
    }

    /// No page of the piece is cached: the piece is accepted, and the reader thread reads it. If the reader cannot take
    /// it, this thread waits for the disk.
    fn defer(&mut self, mut held: Held<'_>, piece: Piece) -> io::Result<()> {
        let piece = Piece { tail: 0, ..piece };
        let reader = &self.socket.stack.reader;
        let Ok(file) = self.source.duplicate() else { return self.read_here(held, piece) };
        let Some(r) = held.r.take() else { return Ok(()) };
        let job = Job {
            host: self.socket.host().clone(),
            socket: self.socket.id,
            file,
            at: self.source.at(),
            skip: piece.head,
            len: piece.file,
            reservation: r,
        };
        match reader.submit(job) {
            Ok(()) => {
                self.advance(piece);
                self.source.skip(piece.file);
                self.sent += piece.len() as u64;
                self.source.read_ahead(self.ahead(piece));
                Ok(())
            }
            Err(job) => {
                held.r = Some(job.reservation);
                self.read_here(held, piece)
            }
        }
    }

    fn read_here(&mut self, mut held: Held<'_>, piece: Piece) -> io::Result<()> {
        let (n, end) = self.source.fill(held.chain(), piece.head, piece.file, Patience::Wait);
        match end {
            End::Failed(e) if n == 0 => Err(e),
            _ => self.commit(held, self.read_part(piece, n)),
        }
    }
}

/// A blocking call waits for half of the buffer; a non-blocking one goes on where the socket is writable.
fn worth(limit: Limit) -> LowWater {
    if limit == Limit::DoNotWait { LowWater::Writable } else { LowWater::HalfBuffer }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.is_locked {
            self.socket.host().post(Request::EndSendFile(self.socket.id));
        }
    }
}
