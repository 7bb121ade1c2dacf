//! Calls of posted receive: buffers are posted, taken back and waited for. Those that are over leave as data
//! ([`PostOver`]).

use alloc::boxed::Box;

use fulmar_base::{Instant, Probe, SlotId};
use fulmar_mbuf::RecvBuf;
use fulmar_socket::posted::{IoContext, Posted};
use fulmar_socket::{SocketError, Step};

use crate::outcome::{PostOver, PostToken, RecvOutcome};
use crate::posted::{Post, ReadOrPost, RecvEntry, is_receiving, with_machine};
use crate::shard::Shard;
use crate::sockets::Socket;

impl<P: Probe> Shard<P> {
    /// Posts a buffer: what comes next and is not for those posted before goes into it.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: too many wait already; [`SocketError::BadHandle`],
    /// [`SocketError::NotSupported`], [`SocketError::NetworkDown`]. The buffer comes back.
    pub fn tcp_post(&mut self, now: Instant, post: Post) -> Result<(), (SocketError, RecvBuf)> {
        let Post { id, buf, read, rule, token } = post;
        let entry = match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) if entry.error.is_none() => entry,
            _ => return Err((self.why_not(id), buf)),
        };
        let posted = entry.posted.get_or_insert_default();
        let posting = match read {
            Some(done) => posted.machine.post_read(buf, done, rule, token),
            None => posted.machine.post(buf, rule, token),
        };
        if let Err((buf, _)) = posting {
            return Err((SocketError::WouldBlock, buf));
        }
        let may_wait = posted.machine.may_wait(entry.tcb.recv_queue_ref());
        self.tcp.posted.list(id, &mut entry.posted);
        if may_wait {
            self.tcp.posted.has_news = true;
        } else {
            self.run_posted_now(now, id);
        }
        Ok(())
    }

    /// Why nothing can be posted.
    #[cold]
    fn why_not(&mut self, id: SlotId) -> SocketError {
        let checked = self.check_down(id).and_then(|()| self.tcp_entry(id).map(drop));
        checked.err().unwrap_or(SocketError::BadHandle)
    }

    /// One step of a read that waits, of `done` bytes so far with room for more. What is there is detached
    /// ([`Shard::tcp_take_more`]); where the read has to wait, its buffer may be posted ([`Shard::tcp_post`]),
    /// unless others are or the device is told nothing of this flow.
    ///
    /// # Errors
    /// As [`Shard::tcp_take`].
    pub fn tcp_take_or_post(
        &mut self,
        now: Instant,
        id: SlotId,
        room: usize,
        done: usize,
    ) -> Result<ReadOrPost, SocketError> {
        if !self.may_place_read(now, id) {
            return Ok(ReadOrPost::Refused);
        }
        if let Step::Done(chain) = self.tcp_take_more(id, room, done, done == 0)? {
            return Ok(ReadOrPost::Taken(chain));
        }
        Ok(ReadOrPost::MayPost(self.tcp_entry(id)?.least(room, done == 0)))
    }

    /// Whether the device may be told of the buffer of a read.
    fn may_place_read(&mut self, now: Instant, id: SlotId) -> bool {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return false };
        let is_remote = !self.core.net.ip.is_local(entry.tcb.key().remote_ip());
        let may_place = |p: &mut Box<RecvEntry>| !p.is_waiting() && p.machine.may_place(now);
        is_remote && is_receiving(&entry.tcb) && entry.posted.as_mut().is_none_or(may_place)
    }

    /// Ends a posted buffer before its time: with what it has, or as cancelled. It is over once no device
    /// writes to it any more, which may take until the next polls.
    pub fn tcp_cancel_post(&mut self, now: Instant, id: SlotId, token: PostToken) {
        // Whoever waited with the lock in hand, and was thrown out by a device that panicked, does no more.
        (self.tcp.posted.out.awaited, self.tcp.posted.out.outcome) = (None, None);
        self.end_post(now, id, |machine, io| {
            machine.cancel(io, |t| *t == token);
        });
    }

    /// Nobody waits any more for a posted buffer: what it has goes back into the stream. False: it is over,
    /// or what follows has been received already; it comes as it would have.
    pub fn tcp_abandon_post(&mut self, now: Instant, id: SlotId, token: PostToken) -> bool {
        self.tcp.posted.deliver(now, id, &mut self.core);
        if !self.is_posted(id, token) {
            return false;
        }
        let mut is_gone = true;
        self.end_post(now, id, |machine, io| {
            is_gone = machine.abandon(io, |t| *t == token);
        });
        is_gone
    }

    fn is_posted(&self, id: SlotId, token: PostToken) -> bool {
        self.tcp_posted(id).any(|t| t == token)
    }

    /// What stands for the buffers of a connection that are posted, in order.
    pub fn tcp_posted(&self, id: SlotId) -> impl Iterator<Item = PostToken> {
        let posted = match self.core.sockets.get(id) {
            Some(Socket::Tcp(entry)) => entry.posted.as_ref(),
            _ => None,
        };
        posted.into_iter().flat_map(|p| p.machine.tokens().copied())
    }

    fn end_post(
        &mut self,
        now: Instant,
        id: SlotId,
        f: impl FnOnce(&mut Posted<PostToken>, &mut IoContext<'_>),
    ) {
        self.tcp.posted.deliver(now, id, &mut self.core);
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
            with_machine(&mut self.core.net, entry, f);
        }
        self.list_posted(id);
        self.run_posted_now(now, id);
        self.notify(id);
    }

    /// As [`Shard::step_for_reader`], for one who waits for this buffer and nothing else: how many frames
    /// came, and the outcome if it was over with them.
    pub fn step_for_post(
        &mut self,
        now: Instant,
        token: PostToken,
    ) -> (usize, Option<RecvOutcome>) {
        self.step_for(token, |shard| match shard.tcp.posted.is_placed {
            true => shard.step_for_placed(now),
            false => shard.step_for_reader(now),
        })
    }

    /// The same for a read, whose buffer goes back to its caller with what one step brings: more than stays
    /// in a cache until the caller looks at it, or than the buffer has room for, would cost what was saved.
    pub fn step_for_read(
        &mut self,
        now: Instant,
        token: PostToken,
    ) -> (usize, Option<RecvOutcome>) {
        self.step_for(token, |shard| shard.step_for_reader(now))
    }

    fn step_for(
        &mut self,
        token: PostToken,
        step: impl FnOnce(&mut Self) -> usize,
    ) -> (usize, Option<RecvOutcome>) {
        self.tcp.posted.out.awaited = Some(token);
        let came = step(self);
        self.tcp.posted.out.awaited = None;
        (came, self.tcp.posted.out.outcome.take())
    }

    fn list_posted(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
            self.tcp.posted.list(id, &mut entry.posted);
        }
    }

    /// For a call on one connection: what waits for it, and what it has to say then.
    pub(crate) fn run_posted_now(&mut self, now: Instant, id: SlotId) {
        self.tcp.posted.deliver(now, id, &mut self.core);
        self.tcp.posted.end_burst(now, id, true, &mut self.core);
        if self.expects_frames() {
            return;
        }
        if matches!(self.core.sockets.get(id), Some(Socket::Tcp(s)) if s.is_queued) {
            self.core.net.link.set_now(now);
            self.output_now(now, id);
            self.flush();
        }
    }

    /// Urgent data came: once what belongs in front of it is there too, buffers are given back with what
    /// they have.
    pub(crate) fn flush_posted(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id)
            && let Some(posted) = &mut entry.posted
        {
            posted.machine.flush(entry.tcb.urgent_to());
        }
    }

    /// The next posted buffer that is over. To be taken after each step and call.
    pub fn pop_over(&mut self) -> Option<PostOver> {
        self.tcp.posted.out.over.pop_front()
    }
}
