//! Posted receive into raw memory: for a library that replaces the system's sockets, where a program calls `aio_read`
//! with a pointer.
//!
//! ```text
//!   post(receiver, base, len, generation, token) ─► the memory belongs to the receiver
//!   reap(receiver, out[]) ─► { token, bytes or -errno } ─► the memory belongs to the caller again
//! ```
//!
//! Invariant *lent*: posted memory is in `posted`, as a [`RecvCompletion`], until its token is reaped. An entry is
//! removed only when it is complete, and it is complete only when neither the stack nor a device refers to the memory.
//! The drop of a receiver waits for all entries.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::runtime::Limit;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::socket::SocketError;

use super::{RecvCompletion, RecvError};
use crate::api::tcp::TcpStream;

/// The completion of posted memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RawReceived {
    /// The token with which the memory was posted.
    pub token: u64,
    /// Bytes received, 0 at the end of the stream; or `-errno`.
    pub result: i64,
}

/// Posts memory of its caller to one connection.
///
/// Its drop cancels what is posted and waits until no device writes there.
pub struct RawReceiver {
    stream: TcpStream,
    /// In the order of posting.
    posted: Mutex<PostedMemory>,
}

type PostedMemory = VecDeque<(u64, Arc<RecvCompletion>)>;

impl RawReceiver {
    /// A receiver of a connection. There may be several; memory is filled in the order of posting.
    ///
    /// # Errors
    /// Never; the signature is that of `TcpStream::try_clone`.
    pub fn new(stream: &TcpStream) -> std::io::Result<RawReceiver> {
        Ok(RawReceiver { stream: stream.try_clone()?, posted: Mutex::default() })
    }

    fn posted(&self) -> MutexGuard<'_, PostedMemory> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts memory; see [`fulmar_recv_post`].
    ///
    /// # Errors
    /// Those of [`TcpStream::recv_posted`]; nothing is posted then.
    ///
    /// # Safety
    /// `len` bytes from `base` on are initialised, readable and writable, and are not accessed by other code until
    /// [`RawReceiver::reap`] has returned their token or the receiver is dropped.
    pub unsafe fn post(
        &self,
        base: NonNull<u8>,
        len: usize,
        generation: u64,
        token: u64,
    ) -> Result<(), RecvError> {
        // Under the lock, so that the order of entries is that of the stream.
        let mut posted = self.posted();
        // SAFETY: as the caller promises; lent.
        let buf = unsafe { RecvBuf::from_raw(base, len, generation) };
        posted.push_back((token, Arc::new(self.stream.recv_posted(buf)?)));
        Ok(())
    }

    /// Moves completions into `out`, as many as fit. Waits for the first one, at most for `timeout` (`None`: for ever).
    /// Returns how many; 0 also if nothing is posted.
    pub fn reap(&self, out: &mut [RawReceived], timeout: Option<Duration>) -> usize {
        let mut posted = self.posted();
        if out.is_empty() || posted.is_empty() {
            return 0;
        }
        let done = reap_now(&mut posted, out, Limit::DoNotWait);
        if done > 0 || timeout == Some(Duration::ZERO) {
            return done;
        }
        let Some((_, first)) = posted.front().cloned() else { return 0 };
        // Other threads may post and cancel during the wait.
        drop(posted);
        let _ = first.wait_for(timeout.map_or(Limit::Forever, Limit::For));
        reap_now(&mut self.posted(), out, Limit::DoNotWait)
    }

    /// Cancels the memory of a token, which is still to be reaped.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: nothing is posted with this token. [`SocketError::WouldBlock`] in a signal
    /// handler that interrupted the stack.
    pub fn cancel(&self, token: u64) -> Result<(), SocketError> {
        let posted = self.posted();
        let found = posted.iter().find(|(t, _)| *t == token).ok_or(SocketError::Invalid)?;
        found.1.cancel().map_err(|_| SocketError::WouldBlock)
    }
}

impl Drop for RawReceiver {
    fn drop(&mut self) {
        let posted = std::mem::take(&mut *self.posted());
        for (_, completion) in &posted {
            // If it cannot be cancelled, it completes with the stream.
            let _ = completion.cancel();
        }
        for (_, completion) in posted {
            // lent: dropped only when it is complete.
            while !completion.is_done() {
                let waited = completion.wait_for(Limit::For(Duration::from_secs(1)));
                if waited.is_err_and(|e| errno_of(&e) == SocketError::BadHandle.errno()) {
                    // A forked child, which has neither the stack nor its device.
                    break;
                }
            }
        }
    }
}

/// Runs the stack for the first entry, and removes the complete ones.
fn reap_now(posted: &mut PostedMemory, out: &mut [RawReceived], limit: Limit) -> usize {
    if let Some((_, first)) = posted.front() {
        // An entry that is not complete stays.
        let _ = first.wait_for(limit);
    }
    let (mut done, mut at) = (0, 0);
    while let (Some((token, completion)), Some(entry)) = (posted.get(at), out.get_mut(done)) {
        match completion.take() {
            Some(outcome) => {
                *entry = RawReceived { token: *token, result: result_of(outcome) };
                posted.remove(at);
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
/// `receiver` is null or points to a receiver; the memory is as [`RawReceiver::post`] requires.
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
/// `receiver` is null or points to a receiver; `out` is null or has space for `most` entries.
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
    // SAFETY: space for `most` entries, as the caller promises; a write does not require that they are initialised.
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
