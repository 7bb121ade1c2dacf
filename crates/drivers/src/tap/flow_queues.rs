//! Queues of a TAP that single flows have to themselves.
//!
//! ```text
//!                     the kernel's map says      read with
//!   frames of flow A ──────────► queue 1 ──────► the rooms of A, always right
//!   frames of flow B ──────────► queue 2 ──────► the rooms of B, always right
//!   all others ────────────────► queue 0 ──────► a guess, or no room at all
//! ```
//!
//! On one queue a read has to guess whose frame comes next. Where that fails because flows with posted
//! buffers, or others beside one, come mixed, a flow gets a queue: a program in the kernel
//! ([`crate::steering`]) looks it up in a map. The TAP decides that by itself, from what it sees
//! ([`Table::note`]); the user of the device sees nothing but fewer misses.
//!
//! **Order.** A flow that *joins* its queue may have frames in the main one, so its own is read from when
//! the main one was found empty, or so many frames came from there as a queue holds. A flow that *leaves*
//! has its own queue read until it is empty before the main one is read on; that goes on for [`table::GRACE`],
//! since a sender may have chosen the queue before the map was changed. The same sender may overtake
//! itself by a frame when a flow joins: TCP puts that in order. [`table`] decides all this.
//!
//! **Holding.** A flow that has just filled its rooms is not read for [`table::HOLD`], or until it has rooms
//! again: its reader is about to post some, and frames that came before would have to be copied. Meanwhile
//! its queue wakes no thread; [`Table::next_deadline`] says when it is due. If no rooms come, [`table::SIP`] is
//! read, then it is held again. More at once would bring what no buffer is posted for faster than its
//! reader can take it away, and as long as some of it is left no buffer can be offered to the device: a
//! reader who turns to two flows in turn would never come out of that. The price: a reader who no longer
//! posts gets no more than that until the queue is taken away ([`table::BARE`]).
//!
//! **Sleepers** poll a number that stands for the main queue, and for an epoll descriptor of all queues
//! from when the first one is opened. A thread may sleep on what it stood for before. So the map stays
//! empty until the device has been armed since, by the thread that sleeps on it now; or [`HEARD`]
//! frames came by the main queue, each of which woke the thread that slept there; or it is filled at once
//! if the device has never been armed.
//!
//! Bounds: [`MOST`] queues. Opened when they are first needed, kept to the end of the device: closing one
//! would give its number to another one. Cost: nothing while no flow has a queue; then a read per queue
//! and poll, and a look-up in the kernel per packet.

pub mod table;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use fulmar_base::{FlowKey, Instant};

use super::FLAGS;
use super::attach::open_clone_device;
use crate::{OpenError, steering, sys};
use table::{Kernel, Table};

/// Most queues for flows of one TAP.
const MOST: usize = 16;
/// Frames after which no thread sleeps on the former descriptor any more.
const HEARD: usize = 64;

/// The kernel's side, once it was needed.
struct Steering {
    map: OwnedFd,
    epoll: OwnedFd,
    /// Frames to come by the main queue until no thread sleeps on that alone any more.
    unheard: usize,
    /// The epoll descriptor watches for room, too.
    wants_room: bool,
}

/// What the table asks for.
struct Side<'a> {
    steering: &'a Steering,
    queues: &'a [File],
}

impl Kernel for Side<'_> {
    fn watch(&mut self, queue: usize, is_watched: bool) -> bool {
        let Some(file) = self.queues.get(queue) else { return false };
        let op = if is_watched { libc::EPOLL_CTL_ADD } else { libc::EPOLL_CTL_DEL };
        sys::epoll_set(self.steering.epoll.as_fd(), op, file.as_fd(), libc::EPOLLIN).is_ok()
    }

    fn steer(&mut self, flow: &FlowKey, queue: Option<usize>) -> std::io::Result<()> {
        // The kernel counts the main queue as the first.
        let number = queue.map(|q| q as u32 + 1);
        let key = steering::flow_key(flow);
        match sys::flow_map_set(self.steering.map.as_fd(), &key, number) {
            // What is to be taken out is not there.
            Err(e) if queue.is_none() && e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            set => set,
        }
    }
}

/// See the module's header.
pub struct FlowQueues {
    pub table: Table,
    /// Open in the network namespace of the interface, which the polling thread need not be in.
    spare: Vec<File>,
    queues: Vec<File>,
    steering: Option<Steering>,
    /// What sleepers poll.
    wake: OwnedFd,
    most: usize,
    refused: Option<String>,
    /// The device has been armed before.
    is_slept_on: bool,
}

impl FlowQueues {
    /// None yet, at most `most` later, beside the queue `main`.
    ///
    /// # Errors
    /// Too many open descriptors.
    pub fn new(main: &File, most: usize) -> Result<FlowQueues, OpenError> {
        let most = most.min(MOST);
        let spare = (0..most).map(|_| open_clone_device()).collect::<Result<_, _>>()?;
        let wake = main.try_clone().map_err(|e| {
            OpenError::new("cannot copy a descriptor", e, "raise the limit (`ulimit -n`)")
        })?;
        Ok(FlowQueues {
            table: Table::default(),
            spare,
            queues: Vec::with_capacity(most),
            steering: None,
            wake: wake.into(),
            most,
            refused: None,
            is_slept_on: false,
        })
    }

    /// What sleepers poll.
    pub fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// In words, for a person, behind others.
    pub fn sentence(&self) -> String {
        match &self.refused {
            None => {
                format!(
                    "; posted flows that come mixed get queues of their own, up to {}",
                    self.most
                )
            }
            Some(why) => format!("; posted flows share one queue ({why})"),
        }
    }

    pub fn file(&self, queue: usize) -> Option<&File> {
        self.queues.get(queue)
    }

    /// The table, and what it works on once the kernel steers.
    fn both(&mut self) -> Option<(&mut Table, Side<'_>)> {
        let steering = self.steering.as_ref()?;
        Some((&mut self.table, Side { steering, queues: &self.queues }))
    }

    /// See [`Table::is_due`].
    pub fn is_due(
        &mut self,
        queue: usize,
        now: Instant,
        has_rooms: impl Fn(&FlowKey) -> bool,
    ) -> bool {
        self.both().is_some_and(|(t, mut kernel)| t.is_due(queue, now, &mut kernel, has_rooms))
    }

    /// See [`Table::placed`].
    pub fn placed(&mut self, flow: &FlowKey) {
        if let Some((table, mut kernel)) = self.both() {
            table.placed(flow, &mut kernel);
        }
    }

    /// See [`Table::was_empty`].
    pub fn was_empty(&mut self, queue: usize, now: Instant) {
        if let Some((table, mut kernel)) = self.both() {
            table.was_empty(queue, now, &mut kernel);
        }
    }

    /// See [`Table::look_after`].
    pub fn look_after(&mut self, now: Instant, has_rooms: impl Fn(&FlowKey) -> bool) {
        if let Some((table, mut kernel)) = self.both() {
            table.look_after(now, &mut kernel, has_rooms);
        }
    }

    /// So many frames came by the main queue; it was found empty behind them, or not.
    pub fn main_gave(&mut self, frames: usize, is_empty: bool) {
        if let Some(s) = &mut self.steering {
            s.unheard = s.unheard.saturating_sub(frames);
        }
        self.table.main_gave(frames, is_empty);
    }

    /// The one sleeper is about to sleep on what the number stands for now.
    pub fn armed(&mut self) {
        self.is_slept_on = true;
        if let Some(s) = &mut self.steering {
            s.unheard = 0;
        }
    }

    /// Whether packets are steered, so that it counts what comes by the main queue.
    pub fn is_begun(&self) -> bool {
        self.steering.is_some()
    }

    /// Whether a flow should get a queue, and may.
    pub fn is_needed(&self) -> bool {
        self.table.is_needed() && self.refused.is_none()
    }

    /// Gives a flow a queue, if there is one; false: not yet, or none is free. If the kernel refuses, that
    /// is the end of it.
    pub fn give(&mut self, flow: &FlowKey, main: BorrowedFd<'_>) -> bool {
        let given = match &self.steering {
            None => self.begin(main).map(|()| false),
            Some(s) if s.unheard == 0 => self.give_one(flow, main),
            Some(_) => Ok(false),
        };
        given.unwrap_or_else(|why| {
            self.refused = Some(why);
            false
        })
    }

    /// Prepares everything but the map's first entry.
    fn begin(&mut self, main: BorrowedFd<'_>) -> Result<(), String> {
        let refused = |e: std::io::Error| match e.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => format!(
                "the kernel refuses a program: {e}; as root, or with CAP_BPF and CAP_NET_ADMIN, they get \
                 queues of their own"
            ),
            _ => format!("the kernel refuses to steer: {e}"),
        };
        let mut steering = steer(main, self.most).map_err(refused)?;
        // The program is there before the second queue is, or the kernel would use that as it likes.
        self.add_queue(main)?;
        sys::stand_for(&self.wake, steering.epoll.as_fd()).map_err(refused)?;
        steering.unheard = if self.is_slept_on { HEARD } else { 0 };
        self.steering = Some(steering);
        Ok(())
    }

    /// Attaches one more queue, free.
    fn add_queue(&mut self, main: BorrowedFd<'_>) -> Result<(), String> {
        let Some(file) = self.spare.pop() else { return Ok(()) };
        let failed = |e| format!("the kernel refuses a further queue: {e}");
        // It may have been renamed since.
        let (name, _) = sys::tun_interface(main).map_err(failed)?;
        let flags = FLAGS | libc::IFF_MULTI_QUEUE;
        sys::tun_attach(file.as_fd(), &name, flags).map_err(failed)?;
        // Where the interface has moved to another network namespace, a new one came into being.
        let ethers = [main, file.as_fd()].map(|fd| sys::interface_ether(fd, &name).ok());
        if ethers[0].is_none() || ethers[0] != ethers[1] {
            return Err("the interface is in another network namespace".to_owned());
        }
        self.queues.push(file);
        self.table.add();
        Ok(())
    }

    fn give_one(&mut self, flow: &FlowKey, main: BorrowedFd<'_>) -> Result<bool, String> {
        if !self.table.has_free() {
            self.add_queue(main)?;
        }
        let Some((table, mut kernel)) = self.both() else { return Ok(false) };
        table.give(flow, &mut kernel).map_err(|e| format!("the kernel refuses to steer: {e}"))
    }

    /// Has sleepers woken, or no longer, when the main queue takes frames again.
    pub fn want_room(&mut self, main: BorrowedFd<'_>, wants_room: bool) {
        let Some(s) = &mut self.steering else { return };
        if s.wants_room != wants_room {
            let events = libc::EPOLLIN | if wants_room { libc::EPOLLOUT } else { 0 };
            let set = sys::epoll_set(s.epoll.as_fd(), libc::EPOLL_CTL_MOD, main, events);
            s.wants_room = set.is_ok() && wants_room;
        }
    }

    /// Whether sleepers are woken by [`FlowQueues::want_room`].
    pub fn wakes_for_room(&self) -> bool {
        self.steering.is_some()
    }
}

/// Has all packets of an interface looked up in a map, which is empty.
fn steer(main: BorrowedFd<'_>, most: usize) -> std::io::Result<Steering> {
    let map = sys::flow_map(most as u32)?;
    let program = sys::load_socket_program(&steering::flow_program(map.as_raw_fd()))?;
    sys::tun_set_steering(main, Some(program.as_fd()))?;
    let epoll = sys::epoll()?;
    sys::epoll_set(epoll.as_fd(), libc::EPOLL_CTL_ADD, main, libc::EPOLLIN)?;
    Ok(Steering { map, epoll, unheard: 0, wants_room: false })
}
