//! Follows the host's network: a process beside the gateway, which itself can neither open files nor sockets of rtnetlink.
//!
//! ```text
//!   rtnetlink ─┐
//!              ├─► this process ── a pipe ──► the gateway: a new Mapping for its threads
//!   inotify ───┘
//! ```
//!
//! After a change the network is read anew and, if something that a gateway needs is different, written to the pipe as a
//! whole ([`message`]). What changes fast is read at most four times a second. The process reads files
//! and does nothing else ([`contain_reader`](crate::contain::contain_reader)); it ends when the other end of the pipe is
//! closed.

pub mod message;
mod paths;

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::netns::{Changes, Netlink};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::host::HostNetwork;
use crate::resolv::RESOLV_CONF;
pub(crate) use paths::PathWatch;

/// Most readings of the network in a second.
const READS_PER_SECOND: u32 = 4;
/// Part of the time that readings take at most: one in this number.
const SHARE: u32 = 20;
/// How long it waits before it reads, so that changes which come together are read together.
const SETTLING: Duration = Duration::from_millis(20);
/// How often the file is checked if inotify is unavailable: a user has few inotify instances.
const LOOK_MS: u16 = 2000;

/// Follows the network of the calling thread's namespace and `/etc/resolv.conf`, and writes each state to a pipe, the
/// first one at once. Returns when the pipe has no reader any more. `upstream`: as for [`HostNetwork::read`].
///
/// # Errors
/// rtnetlink does not work.
pub fn follow(upstream: Option<&str>, mut out: impl Write + AsFd) -> io::Result<()> {
    let (changes, mut netlink) = (Changes::open()?, Netlink::open()?);
    let mut said = Vec::new();
    loop {
        // Before the file is read: a change in between is seen.
        let watch = PathWatch::new(Path::new(RESOLV_CONF)).ok();
        changes.take()?;
        let started = Instant::now();
        let state = message::encode(&HostNetwork::read_by(&mut netlink, upstream)?);
        if state != said {
            if out.write_all(&state).is_err() {
                return Ok(());
            }
            said = state;
        }
        let rest = (Duration::from_secs(1) / READS_PER_SECOND).max(started.elapsed() * SHARE);
        thread::sleep(rest.saturating_sub(SETTLING));
        if !wait(&changes, watch.as_ref(), &out)? {
            return Ok(());
        }
        thread::sleep(SETTLING);
    }
}

/// Waits for a change. False: the pipe has no reader any more.
fn wait(changes: &Changes, watch: Option<&PathWatch>, out: &impl AsFd) -> io::Result<bool> {
    loop {
        let mut ready = vec![
            PollFd::new(out.as_fd(), PollFlags::empty()),
            PollFd::new(changes.as_fd(), PollFlags::POLLIN),
        ];
        ready.extend(watch.map(|watch| PollFd::new(watch.as_fd(), PollFlags::POLLIN)));
        let look = if watch.is_some() { PollTimeout::NONE } else { PollTimeout::from(LOOK_MS) };
        let is_due = match poll(&mut ready, look) {
            Ok(number) => number == 0,
            Err(Errno::EINTR) => continue,
            Err(e) => return Err(e.into()),
        };
        let has_no_reader = ready.first().is_some_and(|fd| fd.any() == Some(true));
        if has_no_reader {
            return Ok(false);
        }
        let has_changed = changes.take()?;
        if is_due || has_changed || watch.is_some_and(PathWatch::has_changed) {
            return Ok(true);
        }
    }
}
