//! Packets towards the stack: the sink collects them while its task runs, and a task passes them together.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use fulmar_tokio::PacketSender;
use tokio::task::JoinHandle;

/// The sink's end. Its drop ends the task.
pub(crate) struct Inward(Arc<Mutex<State>>);

struct State {
    sender: PacketSender,
    /// There are packets to pass.
    is_dirty: bool,
    is_over: bool,
    task: Option<Waker>,
    /// The sink's task, if it waits for space.
    sink: Option<Waker>,
}

impl Inward {
    /// Starts the task.
    pub(crate) fn new(sender: PacketSender) -> (Inward, JoinHandle<io::Result<()>>) {
        let state = State { sender, is_dirty: false, is_over: false, task: None, sink: None };
        let state = Arc::new(Mutex::new(state));
        let task = tokio::spawn(Flush(Arc::clone(&state)));
        (Inward(state), task)
    }

    /// Takes a packet, or `WouldBlock`.
    pub(crate) fn push(&self, packet: &[u8]) -> io::Result<()> {
        let mut state = lock(&self.0);
        let pushed = state.sender.get_mut().push(packet);
        if !std::mem::replace(&mut state.is_dirty, true)
            && let Some(task) = &state.task
        {
            task.wake_by_ref();
        }
        pushed
    }

    /// [`Inward::push`] for the sink's task.
    pub(crate) fn poll_push(&self, cx: &mut Context<'_>, packet: &[u8]) -> Poll<io::Result<()>> {
        // Before the attempt, which wakes the other task.
        lock(&self.0).sink = Some(cx.waker().clone());
        match self.push(packet) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            done => Poll::Ready(done),
        }
    }
}

impl Drop for Inward {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.is_over = true;
        if let Some(task) = state.task.take() {
            task.wake();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes what the sink has taken. Alone in waiting for space in the channel.
struct Flush(Arc<Mutex<State>>);

impl Future for Flush {
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        if state.is_over {
            return Poll::Ready(Ok(()));
        }
        state.task = Some(cx.waker().clone());
        if state.is_dirty {
            let flushed = ready!(pin!(state.sender.flush()).poll(cx));
            state.is_dirty = false;
            if let Some(sink) = state.sink.take() {
                sink.wake();
            }
            flushed?;
        }
        Poll::Pending
    }
}

/// Lasts as long as the [`Stack`](crate::Stack). The stack's own tasks run without it.
pub struct Runner(pub(crate) JoinHandle<io::Result<()>>);

impl Future for Runner {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // An error of the task itself: the runtime ends.
        Pin::new(&mut self.0).poll(cx).map(|ended| ended.unwrap_or(Ok(())))
    }
}
