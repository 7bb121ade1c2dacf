//! Posted receive for callers who have nothing but addresses: a library that stands in for the system's
//! sockets, where a program calls `aio_read` with a pointer of its own.
//!
//! ```text
//!   post(receiver, base, len, generation, token) ─► the memory belongs to the receiver
//!   reap(receiver, out[]) ─► { token, bytes or -errno } ─► the memory is the caller's again
//! ```
//!
//! Invariant *lent*: memory that was posted is in `away` as a [`RecvCompletion`] until its token is
//! reaped; a completion leaves `away` only when it is over, and it is over only when neither the stack nor
//! a device refers to the memory. A receiver that goes waits until that is so for all.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fulmar_mbuf::RecvBuf;
use fulmar_runtime::Limit;
use fulmar_socket::SocketError;

use super::{RecvCompletion, RecvError};
use crate::tcp::TcpStream;

/// What became of memory that was posted.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RawReceived {
    /// As it was given when the memory was posted.
    pub token: u64,
    /// Bytes received, 0 at the end of the stream; or `-errno`.
    pub result: i64,
}

/// Receives of one connection into memory that stays its caller's.
///
/// Dropping it cancels what is away and waits until no device writes there.
pub struct RawReceiver {
    stream: TcpStream,
    /// What is away, in the order of posting.
    away: Mutex<Away>,
}

type Away = VecDeque<(u64, Arc<RecvCompletion>)>;

impl RawReceiver {
    /// For a connection; several may exist, and their buffers are filled in the order of posting.
    ///
    /// # Errors
    /// Never; as `TcpStream::try_clone`.
    pub fn new(stream: &TcpStream) -> std::io::Result<RawReceiver> {
        Ok(RawReceiver { stream: stream.try_clone()?, away: Mutex::default() })
    }

    fn away(&self) -> MutexGuard<'_, Away> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts memory; see [`fulmar_recv_post`].
    ///
    /// # Errors
    /// Those of [`TcpStream::recv_posted`]; nothing is posted then.
    ///
    /// # Safety
    /// `len` bytes from `base` on are initialised, readable and writable, and nobody else touches them until
    /// [`RawReceiver::reap`] has returned their token or the receiver is dropped.
    pub unsafe fn post(
        &self,
        base: NonNull<u8>,
        len: usize,
        generation: u64,
        token: u64,
    ) -> Result<(), RecvError> {
        // One at a time, so that the order here is that of the stream.
        let mut away = self.away();
        // SAFETY: as the caller promises; lent.
        let buf = unsafe { RecvBuf::from_raw(base, len, generation) };
        away.push_back((token, Arc::new(self.stream.recv_posted(buf)?)));
        Ok(())
    }

    /// Collects what is over into `out`, as many as there are and fit; waits for the first, at most for
    /// `timeout` (`None`: for ever). Returns how many; 0 also if nothing is away.
    pub fn reap(&self, out: &mut [RawReceived], timeout: Option<Duration>) -> usize {
        let mut away = self.away();
        if out.is_empty() || away.is_empty() {
            return 0;
        }
        let done = reap_now(&mut away, out, Limit::DoNotWait);
        if done > 0 || timeout == Some(Duration::ZERO) {
            return done;
        }
        let Some((_, first)) = away.front().cloned() else { return 0 };
        // Others may post and cancel meanwhile.
        drop(away);
        let _ = first.wait_for(timeout.map_or(Limit::Forever, Limit::For));
        reap_now(&mut self.away(), out, Limit::DoNotWait)
    }

    /// Asks for the memory of a token back before its time; it is to be reaped all the same.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: nothing of this token is away. [`SocketError::WouldBlock`] in a signal
    /// handler that interrupted the stack.
    pub fn cancel(&self, token: u64) -> Result<(), SocketError> {
        let away = self.away();
        let found = away.iter().find(|(t, _)| *t == token).ok_or(SocketError::Invalid)?;
        found.1.cancel().map_err(|_| SocketError::WouldBlock)
    }
}

impl Drop for RawReceiver {
    fn drop(&mut self) {
        let away = std::mem::take(&mut *self.away());
        for (_, completion) in &away {
            // If it cannot be cancelled now, it ends with the stream.
            let _ = completion.cancel();
        }
        for (_, completion) in away {
            // lent: not before it is over.
            while !completion.is_done() {
                let waited = completion.wait_for(Limit::For(Duration::from_secs(1)));
                if waited.is_err_and(|e| errno_of(&e) == SocketError::BadHandle.errno()) {
                    // A forked child: the stack does not exist here, nor its device.
                    break;
                }
            }
        }
    }
}

/// Takes out what is over; lets the stack run for the first.
fn reap_now(away: &mut Away, out: &mut [RawReceived], limit: Limit) -> usize {
    if let Some((_, first)) = away.front() {
        // What is not over stays.
        let _ = first.wait_for(limit);
    }
    let (mut done, mut at) = (0, 0);
    while let (Some((token, completion)), Some(entry)) = (away.get(at), out.get_mut(done)) {
        match completion.take() {
            Some(outcome) => {
                *entry = RawReceived { token: *token, result: result_of(outcome) };
                away.remove(at);
                done += 1;
            }
            None => at += 1,
        }
    }
    done
}

fn result_of(outcome: Result<RecvBuf, RecvError>) -> i64 {
    match outcome {
        Ok(buf) => buf.len() as i64,
        Err(e) => -i64::from(errno_of(&e)),
    }
}

fn errno_of(e: &RecvError) -> i32 {
    e.error.raw_os_error().unwrap_or(SocketError::InputOutput.errno())
}

/// [`RawReceiver::post`] for C: 0, or `-errno`. `-EINVAL` for null pointers.
///
/// # Safety
/// `receiver` is null or points to a receiver; the memory is as [`RawReceiver::post`] asks.
pub unsafe extern "C" fn fulmar_recv_post(
    receiver: *const RawReceiver,
    base: *mut u8,
    len: usize,
    generation: u64,
    token: u64,
) -> c_int {
    // SAFETY: null or a receiver, as the caller promises.
    let (Some(receiver), Some(base)) = (unsafe { receiver.as_ref() }, NonNull::new(base)) else {
        return -SocketError::Invalid.errno();
    };
    // SAFETY: as the caller promises.
    match unsafe { receiver.post(base, len, generation, token) } {
        Ok(()) => 0,
        Err(e) => -errno_of(&e),
    }
}

/// [`RawReceiver::reap`] for C: how many entries of `out` were written. `timeout_ms` below 0: for ever.
///
/// # Safety
/// `receiver` is null or points to a receiver; `out` is null or has room for `most` entries.
pub unsafe extern "C" fn fulmar_recv_reap(
    receiver: *const RawReceiver,
    out: *mut RawReceived,
    most: usize,
    timeout_ms: c_int,
) -> isize {
    // SAFETY: null or a receiver, as the caller promises.
    let (Some(receiver), false) = (unsafe { receiver.as_ref() }, out.is_null()) else {
        return -(SocketError::Invalid.errno() as isize);
    };
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let mut found = [RawReceived::default(); REAPED_AT_ONCE];
    let n = receiver.reap(&mut found[..most.min(REAPED_AT_ONCE)], timeout);
    // SAFETY: room for `most` entries, as the caller promises; they need not be initialised to be written.
    unsafe { out.copy_from_nonoverlapping(found.as_ptr(), n) };
    n as isize
}

/// Entries that one call for C returns at most.
const REAPED_AT_ONCE: usize = 32;

/// [`RawReceiver::cancel`] for C: 0, or `-errno`.
///
/// # Safety
/// `receiver` is null or points to a receiver.
pub unsafe extern "C" fn fulmar_recv_cancel(receiver: *const RawReceiver, token: u64) -> c_int {
    // SAFETY: null or a receiver, as the caller promises.
    match unsafe { receiver.as_ref() }.map(|r| r.cancel(token)) {
        Some(Ok(())) => 0,
        Some(Err(e)) => -e.errno(),
        None => -SocketError::Invalid.errno(),
    }
}

const _: () = assert!(size_of::<RawReceived>() == 16);
