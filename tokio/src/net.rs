//! A stack and the task that drives it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar::{Driver, Stack};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// How often the end checks whether all bytes are acknowledged.
const DRAIN_PERIOD: Duration = Duration::from_millis(5);

/// A stack that a task of the runtime drives. Clones are handles to the same stack; sockets have one, too.
///
/// ```
/// use fulmar::{Stack, devices};
/// use fulmar_tokio::{Net, TcpListener};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (device, _peer) = devices::link_pair()?;
/// // Or `devices::open("fulmar0")?`.
/// let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).build()?;
/// let net = Net::new(stack)?;
/// let listener = TcpListener::bind(&net, "10.0.0.1:80").await?;
/// println!("{} sockets", net.stack().stat()?.sockets().len());
/// # drop(listener);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Net {
    stack: Stack,
    /// Ends the task when the last one is dropped.
    _end: Arc<watch::Sender<()>>,
}

/// Says what to do about the error of a stack that has a driver.
fn explained(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::ResourceBusy => {
            io::Error::new(e.kind(), format!("{e}: clone its Net instead of making a second one"))
        }
        _ => e,
    }
}

impl Net {
    /// Starts the task that drives a stack, or a shard of it ([`Stack::on_shard`]), in the present runtime.
    ///
    /// # Errors
    /// As [`Stack::driver`].
    ///
    /// # Panics
    /// Outside of a tokio runtime whose I/O is enabled, as all of `tokio::net`.
    pub fn new(stack: Stack) -> io::Result<Net> {
        // The function that takes its place is unsafe, for types that change their descriptor; a driver has one for life.
        #[allow(deprecated)]
        let driver =
            AsyncFd::with_interest(stack.driver().map_err(explained)?, Interest::READABLE)?;
        let (end, mut ended) = watch::channel(());
        tokio::spawn(async move {
            let mut drive = Drive { driver };
            let changed = async { _ = ended.changed().await };
            if is_second(&mut drive, changed).await {
                drain(drive).await;
            }
        });
        Ok(Net { stack, _end: Arc::new(end) })
    }

    /// The stack: routes, statistics, its end.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }
}

/// Runs two futures until one has ended. Whether that is the second.
async fn is_second(first: impl Future<Output = ()>, second: impl Future<Output = ()>) -> bool {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|cx| {
        if first.as_mut().poll(cx).is_ready() {
            return Poll::Ready(false);
        }
        second.as_mut().poll(cx).map(|()| true)
    })
    .await
}

/// Delivers what the sockets have accepted, which are all dropped: else the drop of the stack would wait in the runtime.
async fn drain(drive: Drive) {
    let stack = drive.driver.get_ref().stack().clone();
    let drained = async {
        while stack.is_drained().is_ok_and(|is_drained| !is_drained) {
            tokio::time::sleep(DRAIN_PERIOD).await;
        }
    };
    let limited = async { _ = tokio::time::timeout(stack.exit_drain(), drained).await };
    is_second(drive, limited).await;
    if stack.is_drained().is_ok_and(|is_drained| !is_drained) {
        // Its drop waits once more, and not here.
        std::thread::spawn(move || drop(stack));
    }
}

/// Turns the driver; ends when the stack is down.
struct Drive {
    driver: AsyncFd<Driver>,
}

impl Future for Drive {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let driver = self.driver.get_mut();
            match driver.turn() {
                Err(_) => return Poll::Ready(()),
                Ok(true) => {
                    // The tasks that were woken come first.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Ok(false) => {}
            }
            match driver.rest() {
                Err(_) => return Poll::Ready(()),
                // Busy-polls: once the runtime has looked at everything else, also at the future of `block_on`.
                Ok(false) => return pin!(tokio::task::yield_now()).poll(cx),
                Ok(true) => {}
            }
            match ready!(self.driver.poll_read_ready(cx)) {
                // The turn finds what there is.
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return Poll::Ready(()),
            }
        }
    }
}
