//! The thread that reads bytes of files that a non-blocking socket has accepted without reading them.
//!
//! One per stack, started when first needed. It fills a reservation from the file and commits it. If the bytes cannot
//! be read (a disk error, or the file was truncated), the connection is reset: its stream would have a gap. The queue
//! is bounded; a call that finds it full waits for the disk itself.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;

use crate::runtime::Host;
use crate::runtime::file::{End, Patience, read_into};
use fulmar_stack::base::SlotId;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::Reservation;

/// Queued pieces at most. Their storage is charged to the send share already.
const QUEUE: usize = 256;

/// A piece to be read.
pub(crate) struct Job {
    pub host: Arc<Host>,
    pub socket: SlotId,
    pub file: File,
    /// Offset in the file.
    pub at: u64,
    /// Bytes of the chain before the bytes of the file, already filled.
    pub skip: usize,
    /// Bytes of the file.
    pub len: usize,
    pub reservation: Reservation,
}

/// The queue of the reader thread.
#[derive(Default)]
pub(crate) struct Reader {
    queue: Mutex<Option<SyncSender<Job>>>,
}

impl Reader {
    /// Queues a piece; returns it if the queue is full or the thread could not be started.
    #[allow(clippy::result_large_err, reason = "a piece is rarely returned")]
    pub(crate) fn submit(&self, job: Job) -> Result<(), Job> {
        // A signal handler may have interrupted the holder.
        let mut queue = match self.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(job),
        };
        if queue.is_none() {
            *queue = start();
        }
        let Some(sender) = &*queue else { return Err(job) };
        sender.try_send(job).map_err(|e| match e {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
        })
    }
}

/// Starts the thread, which ends when the reader is dropped and the queue is empty.
fn start() -> Option<SyncSender<Job>> {
    let (sender, jobs) = sync_channel(QUEUE);
    let named = thread::Builder::new().name("fulmar-reader".to_owned());
    named.spawn(move || serve(&jobs)).ok()?;
    Some(sender)
}

fn serve(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        read(job);
    }
}

fn read(job: Job) {
    let Job { host, socket, file, at, skip, len, reservation: mut r } = job;
    let (_, end) = read_into(file.as_fd(), at, &mut r.chain, skip, len, Patience::Wait);
    drop(file);
    // The lock cannot fail here: this thread does not exist in a forked child, and runs no signal handlers of the
    // stack.
    let _ = host.call(|shard, now| {
        shard.count(fulmar_stack::base::Counter::SendFileDeferred, 1);
        match end {
            End::Full => return shard.sendfile(socket).commit(now, r, skip + len, MoreData::None),
            _ => shard.sendfile(socket).fail(now, r),
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};

    use fulmar_stack::base::Counter;
    use fulmar_stack::socket::sendfile::{LowWater, Rest};
    use std::task::Poll;

    use super::*;
    use crate::{Stack, TcpListener, TcpStream, devices};

    fn stacks() -> (Stack, Stack) {
        let (a, b) = devices::link_pair().expect("descriptors");
        let stack = |device, address: &str| {
            let address = address.parse().expect("an address");
            Stack::builder().device(device).address(address).unlisted().build().expect("a stack")
        };
        (stack(a, "10.1.0.1/24"), stack(b, "10.1.0.2/24"))
    }

    fn connection(a: &Stack, b: &Stack) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(b, "10.1.0.2:80").expect("a port");
        let client = TcpStream::connect(a, "10.1.0.2:80").expect("a listener");
        (client, listener.accept().expect("a connection").0)
    }

    fn file_of(name: &str, bytes: &[u8]) -> File {
        let path = std::env::temp_dir().join(format!("fulmar-{name}-{}", std::process::id()));
        std::fs::write(&path, bytes).expect("room");
        let file = File::open(&path).expect("it was just made");
        std::fs::remove_file(path).expect("it was just made");
        file
    }

    /// Space of a connection for `len` bytes, to be read from `file` on.
    fn job(c: &TcpStream, file: &File, at: u64, len: usize) -> Job {
        let host = c.socket.host().clone();
        let (id, rest) = (c.socket.id, Rest { file: len as u64, ..Rest::default() });
        let step = host.call(|s, now| s.sendfile(id).reserve(now, &rest, LowWater::Writable));
        let Ok(Poll::Ready((reservation, piece))) = step else { panic!("no space") };
        assert_eq!(piece.file, len);
        let file = file.try_clone().expect("a descriptor");
        Job { host, socket: id, file, at, skip: 0, len, reservation }
    }

    #[test]
    fn pieces_are_read_in_turn_and_hold_up_what_is_behind_them() {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b);
        let file = file_of("reader", &[[1; 1000], [2; 1000], [3; 1000]].concat());
        let [first, second] = [1000, 2000].map(|at| job(&c, &file, at, 1000));
        (&c).write_all(b"behind").expect("space");
        let reader = Reader::default();
        assert!(reader.submit(first).is_ok() && reader.submit(second).is_ok());
        drop(reader);
        let mut got = [0; 2006];
        s.read_exact(&mut got).expect("it is sent");
        assert!(got[..] == [&[2; 1000][..], &[3; 1000], b"behind"].concat());
        let counters = c.stack().stat().expect("it runs").shard.counters;
        assert_eq!(counters.value(Counter::SendFileDeferred), 2);
    }

    #[test]
    fn a_file_that_is_shorter_than_what_was_accepted_resets_the_connection() {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b);
        let file = file_of("short", &[7; 1500]);
        let reader = Reader::default();
        assert!(reader.submit(job(&c, &file, 0, 1000)).is_ok());
        assert!(reader.submit(job(&c, &file, 1000, 1000)).is_ok());
        let mut got = Vec::new();
        let end = s.read_to_end(&mut got).expect_err("the connection is reset");
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
        assert!(got.iter().all(|b| *b == 7) && got.len() <= 1000, "no byte of anything else");
        let e = (&c).write(b"more").expect_err("the stream has a hole");
        assert_eq!(e.raw_os_error(), Some(5));
        let error = c.take_error().expect("it is open").map(|e| e.raw_os_error());
        assert_eq!(error, Some(Some(5)));
    }
}
