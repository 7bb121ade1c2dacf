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
//! ([`FlowQueues::note`]); whoever uses the device sees nothing but fewer misses.
//!
//! **Order.** A flow that *joins* its queue may have frames in the main one, so its own is read from when
//! the main one was found empty, or so many frames came from there as a queue holds. A flow that *leaves*
//! has its own queue read until it is empty before the main one is read on; that goes on for [`GRACE`],
//! since a sender may have chosen the queue before the map was changed. The same sender may overtake
//! itself by a frame when a flow joins: TCP puts that in order.
//!
//! **Holding.** A flow that has just filled its rooms is not read for [`HOLD`], or until it has rooms
//! again: its reader is about to post some, and frames that came before would have to be copied. Meanwhile
//! its queue wakes nobody; [`FlowQueues::next_deadline`] says when it is due. If no rooms come, [`SIP`] is
//! read, then it is held again. More at once would bring what no buffer is posted for faster than its
//! reader can take it away, and as long as some of it is left no buffer can be offered to the device: a
//! reader who turns to two flows in turn would never come out of that.
//!
//! **Sleepers** poll a number that stands for the main queue, and for an epoll descriptor of all queues
//! from when the first one is opened. Somebody may sleep on what it stood for before. So the map stays
//! empty until somebody has armed the device since, who is the one that sleeps on it now; or [`HEARD`]
//! frames came by the main queue, each of which woke whoever slept there; or at once if nobody has ever
//! armed it.
//!
//! Bounds: [`MOST`] queues. Opened when they are first needed, kept to the end of the device: closing one
//! would give its number to another one. Cost: nothing while no flow has a queue; then a read per queue
//! and poll, and a look-up in the kernel per packet.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use fulmar_base::{Duration, FlowKey, Instant};

use super::FLAGS;
use super::attach::open_clone_device;
use crate::{OpenError, steering, sys};

/// Most queues for flows of one TAP.
const MOST: usize = 16;
/// How long a flow without rooms keeps its queue.
const BARE: Duration = Duration::from_millis(100);
/// How long frames wait for rooms.
const HOLD: Duration = Duration::from_millis(1);
/// Bytes that a flow without rooms gets between two holds: what its reader surely takes in that time.
const SIP: usize = 256 << 10;
/// How long a queue is read that no flow has any more.
const GRACE: Duration = Duration::from_millis(10);
/// Frames that a queue holds, unless somebody has set `txqueuelen`.
const QUEUE_FRAMES: usize = 1000;
/// What a mixed frame weighs against one that was placed: a flow gets a queue if more than every
/// sixteenth is mixed, some time after the fourth.
const MIXED_WEIGHT: u64 = 16;
const ENOUGH: u64 = 4 * MIXED_WEIGHT;
/// Frames after which nobody sleeps any more on what they slept on before.
const HEARD: usize = 64;
const MOST_NEED: u64 = 16 * ENOUGH;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nobody's; not read.
    Free,
    /// The main queue may have earlier frames: so many at most.
    Joining { ahead: usize },
    /// The flow's, and for how long it has had no rooms.
    Own { bare: Option<Bare> },
    /// No longer the flow's, since then.
    Leaving { since: Instant },
}

/// A flow without rooms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bare {
    since: Instant,
    /// When the last hold began.
    held_from: Instant,
    /// Bytes read since it ended.
    sipped_bytes: usize,
}

impl Bare {
    fn new(now: Instant) -> Bare {
        Bare { since: now, held_from: now, sipped_bytes: 0 }
    }

    fn is_held(&self, now: Instant) -> bool {
        now.since(self.held_from) < HOLD
    }
}

/// One queue.
struct FlowQueue {
    file: File,
    flow: Option<FlowKey>,
    state: State,
    /// It wakes nobody.
    is_held: bool,
}

/// The kernel's side, once it was needed.
struct Steering {
    map: OwnedFd,
    epoll: OwnedFd,
    /// Frames to come by the main queue until nobody sleeps on that alone any more.
    unheard: usize,
    /// The epoll descriptor watches for room, too.
    wants_room: bool,
}

/// See the module's header.
pub struct FlowQueues {
    /// Open in the network namespace of the interface, which whoever polls need not be in.
    spare: Vec<File>,
    queues: Vec<FlowQueue>,
    steering: Option<Steering>,
    /// What sleepers poll.
    wake: OwnedFd,
    /// Queues that are read.
    in_use: usize,
    need: u64,
    turn: usize,
    most: usize,
    refused: Option<String>,
    /// Somebody has slept on this device.
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
            spare,
            queues: Vec::with_capacity(most),
            steering: None,
            wake: wake.into(),
            in_use: 0,
            need: 0,
            turn: 0,
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

    /// Whether any queue but the main one is to be read.
    pub fn is_in_use(&self) -> bool {
        self.in_use > 0
    }

    /// How many queues there are, in use or not.
    pub fn len(&self) -> usize {
        self.queues.len()
    }

    pub fn file(&self, queue: usize) -> Option<&File> {
        self.queues.get(queue).map(|q| &q.file)
    }

    /// The flow that has this queue.
    pub fn flow(&self, queue: usize) -> Option<FlowKey> {
        self.queues.get(queue)?.flow
    }

    /// Whether a flow has a queue.
    pub fn has(&self, flow: &FlowKey) -> bool {
        self.queues.iter().any(|q| q.flow == Some(*flow))
    }

    /// Whether a queue is to be read in its turn. If not, nobody is woken for it.
    pub fn is_due(
        &mut self,
        queue: usize,
        now: Instant,
        has_rooms: impl Fn(&FlowKey) -> bool,
    ) -> bool {
        let (Some(q), Some(steering)) = (self.queues.get_mut(queue), &self.steering) else {
            return false;
        };
        let State::Own { bare } = q.state else { return false };
        let is_held = bare.is_some_and(|b| b.is_held(now));
        let is_due = !is_held || q.flow.is_some_and(|flow| has_rooms(&flow));
        hold(q, &steering.epoll, !is_due);
        is_due
    }

    /// So many bytes came from a flow's queue while it had no rooms; whether it may be read on.
    pub fn sipped(&mut self, queue: usize, now: Instant, bytes: usize) -> bool {
        let Some(State::Own { bare }) = self.queues.get_mut(queue).map(|q| &mut q.state) else {
            return true;
        };
        let bare = bare.get_or_insert_with(|| Bare::new(now));
        bare.sipped_bytes = bare.sipped_bytes.saturating_add(bytes);
        if bare.sipped_bytes >= SIP {
            (bare.held_from, bare.sipped_bytes) = (now, 0);
        }
        !bare.is_held(now)
    }

    /// A flow has rooms again: whoever sleeps may come for what is held.
    pub fn placed(&mut self, flow: &FlowKey) {
        let Some(steering) = &self.steering else { return };
        for q in self.queues.iter_mut().filter(|q| q.is_held && q.flow == Some(*flow)) {
            hold(q, &steering.epoll, false);
        }
    }

    /// When what is held is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let held = self.queues.iter().filter(|q| q.is_held);
        held.filter_map(|q| match q.state {
            State::Own { bare } => bare.map(|b| b.held_from + HOLD),
            _ => None,
        })
        .min()
    }

    /// Whether a queue is to be read before the main one.
    pub fn is_leaving(&self, queue: usize) -> bool {
        self.queues.get(queue).is_some_and(|q| matches!(q.state, State::Leaving { .. }))
    }

    /// Whether a queue may have frames that are not to be read yet.
    pub fn has_joining(&self) -> bool {
        self.queues.iter().any(|q| matches!(q.state, State::Joining { .. }))
    }

    /// Where to begin reading this time, so that each queue is the first in its turn.
    pub fn next_turn(&mut self) -> usize {
        self.turn = self.turn.wrapping_add(1);
        self.turn
    }

    /// So many frames came by the main queue; it was found empty behind them, or not.
    pub fn main_gave(&mut self, frames: usize, is_empty: bool) {
        if let Some(s) = &mut self.steering {
            s.unheard = s.unheard.saturating_sub(frames);
        }
        for q in &mut self.queues {
            if let State::Joining { ahead } = &mut q.state {
                *ahead = if is_empty { 0 } else { ahead.saturating_sub(frames) };
                if *ahead == 0 {
                    q.state = State::Own { bare: None };
                }
            }
        }
    }

    /// Somebody is about to sleep on what the number stands for now, and nobody else.
    pub fn armed(&mut self) {
        self.is_slept_on = true;
        if let Some(s) = &mut self.steering {
            s.unheard = 0;
        }
    }

    /// A queue was found empty.
    pub fn was_empty(&mut self, queue: usize, now: Instant) {
        let Some(q) = self.queues.get_mut(queue) else { return };
        let State::Leaving { since } = q.state else { return };
        if now.since(since) < GRACE {
            return;
        }
        (q.flow, q.state) = (None, State::Free);
        self.in_use -= 1;
        if let Some(s) = &self.steering {
            // What may come yet lies there until the queue is used again, and wakes nobody.
            let _ = sys::epoll_set(s.epoll.as_fd(), libc::EPOLL_CTL_DEL, q.file.as_fd(), 0);
        }
    }

    /// Takes queues from flows that have had no rooms for a while.
    pub fn look_after(&mut self, now: Instant, has_rooms: impl Fn(&FlowKey) -> bool) {
        let Some(steering) = &self.steering else { return };
        for q in &mut self.queues {
            let (State::Own { bare }, Some(flow)) = (&mut q.state, q.flow) else { continue };
            if has_rooms(&flow) {
                *bare = None;
                continue;
            }
            let since = bare.get_or_insert_with(|| Bare::new(now)).since;
            if now.since(since) >= BARE {
                hold(q, &steering.epoll, false);
                leave(q, &flow, &steering.map, now);
            }
        }
    }

    /// What came: frames that were placed, and frames that were not because flows come mixed.
    pub fn note(&mut self, placed: u64, mixed: u64) {
        let more = self.need.saturating_add(mixed.saturating_mul(MIXED_WEIGHT)).min(MOST_NEED);
        self.need = more.saturating_sub(placed);
    }

    /// Whether flows come so mixed that one should get a queue.
    pub fn is_needed(&self) -> bool {
        self.need >= ENOUGH && self.refused.is_none()
    }

    /// Nobody can use a queue, or none is left: to be seen again later.
    pub fn not_now(&mut self) {
        self.need = 0;
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

    /// Attaches one more queue, which is nobody's.
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
        self.queues.push(FlowQueue { file, flow: None, state: State::Free, is_held: false });
        Ok(())
    }

    fn give_one(&mut self, flow: &FlowKey, main: BorrowedFd<'_>) -> Result<bool, String> {
        self.need = 0;
        if !self.queues.iter().any(|q| q.state == State::Free) {
            self.add_queue(main)?;
        }
        let Some(steering) = &self.steering else { return Ok(false) };
        let free = self.queues.iter_mut().zip(1u32..).find(|(q, _)| q.state == State::Free);
        let Some((q, number)) = free else { return Ok(false) };
        let failed = |e| format!("the kernel refuses to steer: {e}");
        let add = (libc::EPOLL_CTL_ADD, libc::EPOLLIN);
        sys::epoll_set(steering.epoll.as_fd(), add.0, q.file.as_fd(), add.1).map_err(failed)?;
        (q.flow, q.state) = (Some(*flow), State::Joining { ahead: QUEUE_FRAMES });
        self.in_use += 1;
        let key = steering::flow_key(flow);
        sys::flow_map_set(steering.map.as_fd(), &key, Some(number)).map_err(failed)?;
        Ok(true)
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

/// Has a queue wake nobody, or again whoever sleeps.
fn hold(q: &mut FlowQueue, epoll: &OwnedFd, is_held: bool) {
    if q.is_held != is_held {
        let op = if is_held { libc::EPOLL_CTL_DEL } else { libc::EPOLL_CTL_ADD };
        // If it fails it is tried again at the next look, which a deadline brings.
        if sys::epoll_set(epoll.as_fd(), op, q.file.as_fd(), libc::EPOLLIN).is_ok() {
            q.is_held = is_held;
        }
    }
}

/// Sends the packets of a queue's flow to the main queue again.
fn leave(q: &mut FlowQueue, flow: &FlowKey, map: &OwnedFd, now: Instant) {
    // An entry that is not there is what is wanted; any other failure is not worth losing frames for.
    let left = sys::flow_map_set(map.as_fd(), &steering::flow_key(flow), None);
    if left.as_ref().map_or_else(|e| e.raw_os_error() == Some(libc::ENOENT), |()| true) {
        q.state = State::Leaving { since: now };
    }
}
