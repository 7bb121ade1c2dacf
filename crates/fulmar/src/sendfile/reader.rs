//! The thread that reads what a non-blocking socket has accepted but not found in memory.
//!
//! One per stack, started when first needed. Enters: a claimed, empty chain and where its bytes
//! stand in the file. Leaves: the same chain, filled and committed; if the bytes cannot be had (the
//! disk fails, or the file shrank below what was accepted) the connection is reset, since its peer
//! would otherwise take what follows for them. The queue is bounded; who finds it full waits for the
//! disk itself.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread;

use fulmar_base::SlotId;
use fulmar_socket::Reservation;
use fulmar_stack::Host;
use fulmar_stack::file::{End, Patience, read_into};

/// Pieces that wait to be read at most. Their storage is charged to the send share already.
const QUEUE: usize = 256;

/// A piece to be read.
pub(crate) struct Job {
    pub host: Arc<Host>,
    pub socket: SlotId,
    pub file: File,
    /// Where in the file.
    pub at: u64,
    /// Bytes of the chain before those of the file; they are there already.
    pub skip: usize,
    /// Bytes of the file.
    pub len: usize,
    pub reservation: Reservation,
}

/// The way to the thread.
#[derive(Default)]
pub(crate) struct Reader {
    queue: Mutex<Option<SyncSender<Job>>>,
}

impl Reader {
    /// Leaves a piece to the thread; gives it back if it cannot take it.
    #[allow(clippy::result_large_err, reason = "it comes back rarely")]
    pub fn submit(&self, job: Job) -> Result<(), Job> {
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

/// The thread ends when the reader is dropped and what waits is done.
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
    // In a forked child nobody runs this; elsewhere the lock is always to be had here.
    let _ = host.call(|shard, now| {
        shard.sendfile_deferred();
        match end {
            End::Full => return shard.sendfile_commit(now, socket, r, skip + len, false),
            _ => shard.sendfile_fail(now, socket, r),
        }
        Ok(())
    });
}
