//! Dedicated queues of a TAP for single flows.
//!
//! ```text
//!                     the kernel's map says      read with
//!   frames of flow A ──────────► queue 1 ──────► the ranges of A, always right
//!   frames of flow B ──────────► queue 2 ──────► the ranges of B, always right
//!   all others ────────────────► queue 0 ──────► a predicted flow's, or none
//! ```
//!
//! On a shared queue a read has to predict the flow of the next frame. Where the prediction fails because
//! flows are interleaved, a flow gets a queue of its own: a BPF program ([`crate::drivers::steering`]) looks the
//! flow up in a map. The TAP decides from its counts of hits and misses ([`Table::note`]).
//!
//! **Order.** A flow that *joins* its queue may have earlier frames in the main queue. So its own queue is
//! read once the main queue was empty, or as many frames as a queue can hold were read from it. The queue
//! of a flow that *leaves* is read until it is empty before the main queue is; this lasts for
//! [`table::LINGER`], since a sender may have chosen the queue before the map was changed. When a flow
//! joins, one frame may be reordered; TCP tolerates that. [`table`] implements this order.
//!
//! **Back-off.** The queue of a flow that has just filled its posted ranges is not read for
//! [`table::BACK_OFF`], or until the reader posts again: a frame read before that would have to be copied.
//! Meanwhile the queue is masked (it wakes no thread), and [`Table::next_deadline`] has the end of the
//! back-off. If nothing is posted by then, [`table::READ_QUANTUM`] bytes are read, and the queue backs off
//! again. A larger quantum would fill the receive queue faster than the reader empties it; while it is not
//! empty no buffer can be offered to the device, and a reader that alternates between two flows would
//! never get placement back. The cost: a reader that stops posting receives at this rate until its queue
//! is reclaimed ([`table::IDLE_TIMEOUT`]).
//!
//! **Sleepers** poll one descriptor number. It refers to the main queue at first (`dup2`), and to an epoll
//! descriptor over all queues once the first dedicated queue is open. A thread may still sleep on the
//! former file. So the map stays empty until the device is armed again, or [`DRAIN_FRAMES`] frames came by
//! the main queue, each of which woke such a thread. If the device was never armed, the map is filled at
//! once.
//!
//! Bounds: [`MOST`] queues, opened when they are first needed and kept until the device is dropped: closing
//! a queue would renumber another. Cost: none while no flow has a queue; then one read per queue and poll,
//! and one map look-up in the kernel per packet.

pub mod table;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use fulmar_stack::base::{FlowKey, Instant};

use super::FLAGS;
use super::attach::open_clone_device;
use crate::drivers::{OpenError, steering, sys};
use table::{Kernel, ReadEnd, Table};

/// Most queues for flows of one TAP.
const MOST: usize = 16;
/// Frames by the main queue after which no thread sleeps on the former descriptor.
const DRAIN_FRAMES: usize = 64;

/// The kernel's objects, once the first flow needs a queue.
struct Steering {
    map: OwnedFd,
    epoll: OwnedFd,
    /// Frames still to come by the main queue until no thread sleeps on it alone.
    frames_to_drain: usize,
    /// The epoll descriptor also reports that the main queue accepts frames.
    wants_space: bool,
}

/// The kernel's side of the table.
struct Side<'a> {
    steering: &'a Steering,
    queues: &'a [File],
}

impl Side<'_> {
    fn set_epoll(&self, queue: usize, op: libc::c_int) -> bool {
        let Some(file) = self.queues.get(queue) else { return false };
        sys::epoll_set(self.steering.epoll.as_fd(), op, file.as_fd(), libc::EPOLLIN).is_ok()
    }
}

impl Kernel for Side<'_> {
    fn watch(&mut self, queue: usize) -> bool {
        self.set_epoll(queue, libc::EPOLL_CTL_ADD)
    }

    fn unwatch(&mut self, queue: usize) -> bool {
        self.set_epoll(queue, libc::EPOLL_CTL_DEL)
    }

    fn steer(&mut self, flow: &FlowKey, queue: Option<usize>) -> std::io::Result<()> {
        // The kernel counts the main queue as the first.
        let number = queue.map(|q| q as u32 + 1);
        let key = steering::flow_key(flow);
        match sys::flow_map_set(self.steering.map.as_fd(), &key, number) {
            // The entry to be removed does not exist.
            Err(e) if queue.is_none() && e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            set => set,
        }
    }
}

/// The flow queues of one TAP. See the module's header.
pub struct FlowQueues {
    pub table: Table,
    /// Open in the network namespace of the interface, which the polling thread need not be in.
    spare: Vec<File>,
    queues: Vec<File>,
    steering: Option<Steering>,
    /// The descriptor that sleepers poll.
    wake: OwnedFd,
    most: usize,
    refused: Option<String>,
    /// The device has been armed before.
    was_armed: bool,
}

impl FlowQueues {
    /// Prepares for at most `most` queues beside the queue `main`; none is attached yet.
    ///
    /// # Errors
    /// The limit of open descriptors is reached.
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
            was_armed: false,
        })
    }

    /// The descriptor that sleepers poll.
    pub fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Continues [`fulmar_stack::device::DeviceStats::path`].
    pub fn describe(&self) -> String {
        match &self.refused {
            None => {
                format!(
                    "; posted flows that are interleaved get queues of their own, up to {}",
                    self.most
                )
            }
            Some(why) => format!("; posted flows share one queue ({why})"),
        }
    }

    pub fn file(&self, queue: usize) -> Option<&File> {
        self.queues.get(queue)
    }

    /// The table and the kernel's side. `None`: no flow has needed a queue yet.
    fn both(&mut self) -> Option<(&mut Table, Side<'_>)> {
        let steering = self.steering.as_ref()?;
        Some((&mut self.table, Side { steering, queues: &self.queues }))
    }

    /// See [`Table::is_due`].
    pub fn is_due(
        &mut self,
        queue: usize,
        now: Instant,
        has_ranges: impl Fn(&FlowKey) -> bool,
    ) -> bool {
        self.both().is_some_and(|(t, mut kernel)| t.is_due(queue, now, &mut kernel, has_ranges))
    }

    /// See [`Table::placed`].
    pub fn placed(&mut self, flow: &FlowKey) {
        if let Some((table, mut kernel)) = self.both() {
            table.placed(flow, &mut kernel);
        }
    }

    /// See [`Table::on_empty`].
    pub fn on_empty(&mut self, queue: usize, now: Instant) {
        if let Some((table, mut kernel)) = self.both() {
            table.on_empty(queue, now, &mut kernel);
        }
    }

    /// See [`Table::reclaim_idle`].
    pub fn reclaim_idle(&mut self, now: Instant, has_ranges: impl Fn(&FlowKey) -> bool) {
        if let Some((table, mut kernel)) = self.both() {
            table.reclaim_idle(now, &mut kernel, has_ranges);
        }
    }

    /// See [`Table::on_main_read`].
    pub fn on_main_read(&mut self, frames: usize, end: ReadEnd) {
        if let Some(s) = &mut self.steering {
            s.frames_to_drain = s.frames_to_drain.saturating_sub(frames);
        }
        self.table.on_main_read(frames, end);
    }

    /// The sleeper is about to sleep on the descriptor as it is now.
    pub fn armed(&mut self) {
        self.was_armed = true;
        if let Some(s) = &mut self.steering {
            s.frames_to_drain = 0;
        }
    }

    /// Whether the kernel steers packets.
    pub fn is_steering(&self) -> bool {
        self.steering.is_some()
    }

    /// Whether a flow should get a queue, and the kernel has not refused one.
    pub fn is_needed(&self) -> bool {
        self.table.is_needed() && self.refused.is_none()
    }

    /// Assigns a queue to a flow. False: not yet possible, or no queue is free. After a refusal of the
    /// kernel's it is not tried again.
    pub fn give(&mut self, flow: &FlowKey, main: BorrowedFd<'_>) -> bool {
        let given = match &self.steering {
            None => self.begin(main).map(|()| false),
            Some(s) if s.frames_to_drain == 0 => self.give_one(flow, main),
            Some(_) => Ok(false),
        };
        given.unwrap_or_else(|why| {
            self.refused = Some(why);
            false
        })
    }

    /// Sets steering up, with an empty map.
    fn begin(&mut self, main: BorrowedFd<'_>) -> Result<(), String> {
        let refused = |e: std::io::Error| match e.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => format!(
                "the kernel refuses a BPF program: {e}; root, or CAP_BPF and CAP_NET_ADMIN, allow them \
                 queues of their own"
            ),
            _ => format!("the kernel refuses to steer: {e}"),
        };
        let mut steering = steer(main, self.most).map_err(refused)?;
        // The program first: without one the kernel would distribute flows over both queues.
        self.add_queue(main)?;
        sys::stand_for(&self.wake, steering.epoll.as_fd()).map_err(refused)?;
        steering.frames_to_drain = if self.was_armed { DRAIN_FRAMES } else { 0 };
        self.steering = Some(steering);
        Ok(())
    }

    /// Attaches one more queue.
    fn add_queue(&mut self, main: BorrowedFd<'_>) -> Result<(), String> {
        let Some(file) = self.spare.pop() else { return Ok(()) };
        let failed = |e| format!("the kernel refuses a further queue: {e}");
        // The interface may have been renamed.
        let (name, _) = sys::tun_interface(main).map_err(failed)?;
        let flags = FLAGS | libc::IFF_MULTI_QUEUE;
        sys::tun_attach(file.as_fd(), &name, flags).map_err(failed)?;
        // If the interface has moved to another network namespace, TUNSETIFF has created a new one.
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

    /// Sets whether sleepers are woken when the main queue accepts frames again.
    pub fn watch_for_space(&mut self, main: BorrowedFd<'_>, wants_space: bool) {
        let Some(s) = &mut self.steering else { return };
        if s.wants_space != wants_space {
            let events = libc::EPOLLIN | if wants_space { libc::EPOLLOUT } else { 0 };
            let set = sys::epoll_set(s.epoll.as_fd(), libc::EPOLL_CTL_MOD, main, events);
            s.wants_space = set.is_ok() && wants_space;
        }
    }
}

/// Loads the program that looks flows up in an empty map, and attaches it.
fn steer(main: BorrowedFd<'_>, most: usize) -> std::io::Result<Steering> {
    let map = sys::flow_map(most as u32)?;
    let program = sys::load_socket_program(&steering::flow_program(map.as_raw_fd()))?;
    sys::tun_set_steering(main, Some(program.as_fd()))?;
    let epoll = sys::epoll()?;
    sys::epoll_set(epoll.as_fd(), libc::EPOLL_CTL_ADD, main, libc::EPOLLIN)?;
    Ok(Steering { map, epoll, frames_to_drain: 0, wants_space: false })
}
