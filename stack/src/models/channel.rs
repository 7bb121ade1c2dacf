//! A bounded channel, which loom has not.

use std::collections::VecDeque;
use std::sync::Arc;
pub use std::sync::mpsc::TrySendError;

use loom::sync::Mutex;

type Queue<T> = Arc<Mutex<VecDeque<T>>>;

/// As of std.
pub struct SyncSender<T> {
    queue: Queue<T>,
    bound: usize,
}

/// As of std.
pub struct Receiver<T>(Queue<T>);

impl<T> Clone for SyncSender<T> {
    fn clone(&self) -> Self {
        SyncSender { queue: Arc::clone(&self.queue), bound: self.bound }
    }
}

/// As of std.
pub fn sync_channel<T>(bound: usize) -> (SyncSender<T>, Receiver<T>) {
    let queue = Queue::default();
    (SyncSender { queue: Arc::clone(&queue), bound }, Receiver(queue))
}

impl<T> SyncSender<T> {
    /// As of std, but that it does not notice a receiver that is gone.
    ///
    /// # Errors
    /// As there.
    pub fn try_send(&self, what: T) -> Result<(), TrySendError<T>> {
        let mut queue = self.queue.lock().unwrap();
        if queue.len() >= self.bound {
            return Err(TrySendError::Full(what));
        }
        queue.push_back(what);
        Ok(())
    }
}

/// Nothing is there.
#[derive(Debug)]
pub struct Empty;

impl<T> Receiver<T> {
    /// As of std.
    ///
    /// # Errors
    /// As there.
    pub fn try_recv(&self) -> Result<T, Empty> {
        self.0.lock().unwrap().pop_front().ok_or(Empty)
    }
}
