//! Calls of posted receive: buffers are posted, cancelled and waited for. Completions are data
//! ([`PostCompletion`]).

use alloc::boxed::Box;
use core::task::Poll;

use crate::base::{Instant, SlotId};
use crate::ip::Ip;
use crate::mbuf::RecvBuf;
use crate::shard::posted::BurstEnd;
use crate::socket::posted::{IoContext, Posted};
use crate::socket::{Least, SocketError};

use crate::shard::layers::Core;
use crate::shard::outcome::{PostCompletion, PostToken, RecvOutcome};
use crate::shard::posted::{Post, ReadOrPost, RecvEntry, is_receiving, with_machine};
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::tcp::Tcp;
use crate::shard::tcp_calls::take_more;
use crate::shard::world::{PLACED_BYTES, POLL_FRAMES, Shard};

/// The posted buffers of all connections.
pub struct PostedBuffers<'a> {
    tcp: &'a mut Tcp,
    core: &'a mut Core,
}

impl Shard {
    /// Posted receive.
    #[inline]
    pub fn posted(&mut self) -> PostedBuffers<'_> {
        PostedBuffers { tcp: &mut self.tcp, core: &mut self.core }
    }

    /// As [`Shard::step_for_reader`], for a caller that waits for this buffer and nothing else: how many frames
    /// were received, and the completion if they completed the buffer.
    pub fn step_for_post(
        &mut self,
        now: Instant,
        token: PostToken,
    ) -> (usize, Option<RecvOutcome>) {
        self.tcp.posted.out.awaited = Some(token);
        let came = match self.tcp.posted.is_placed {
            true => self.advance(now, POLL_FRAMES, PLACED_BYTES),
            false => self.step_for_reader(now),
        };
        (came, self.tcp.posted.out.take_awaited())
    }

    /// The same for a read, whose buffer returns to its caller with the bytes of one step: more bytes than stay
    /// in a cache until the caller reads them, or than the buffer holds, would cost what placement saves.
    pub fn step_for_read(
        &mut self,
        now: Instant,
        token: PostToken,
    ) -> (usize, Option<RecvOutcome>) {
        self.tcp.posted.out.awaited = Some(token);
        let came = self.step_for_reader(now);
        (came, self.tcp.posted.out.take_awaited())
    }
}

impl<'a> PostedBuffers<'a> {
    /// Posts a buffer, to be filled behind those posted before.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: too many wait already; [`SocketError::BadHandle`],
    /// [`SocketError::NotSupported`], [`SocketError::NetworkDown`]. The buffer comes back.
    pub fn post(&mut self, now: Instant, post: Post) -> Result<(), (SocketError, RecvBuf)> {
        let Post { id, buf, read, rule, token } = post;
        let entry = match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) if entry.error.is_none() => entry,
            Some(Socket::Tcp(entry)) => {
                return Err((entry.error.unwrap_or(SocketError::BadHandle), buf));
            }
            Some(_) => return Err((SocketError::NotSupported, buf)),
            None => return Err((SocketError::BadHandle, buf)),
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
            self.tcp.posted.has_new_posts = true;
        } else {
            self.tcp.run_posted(now, id, self.core);
        }
        Ok(())
    }

    /// One step of a read of `done` bytes so far with `space` for more. Available bytes are detached
    /// ([`Shard::tcp_take_more`]); where the read has to wait, its buffer may be posted ([`PostedBuffers::post`]),
    /// unless others are or the device does not place bytes of this flow.
    ///
    /// # Errors
    /// As [`Shard::tcp_take`].
    pub fn take_or_post(
        &mut self,
        now: Instant,
        id: SlotId,
        space: usize,
        done: usize,
    ) -> Result<ReadOrPost, SocketError> {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Ok(ReadOrPost::Refused);
        };
        if !may_place_read(now, entry, &self.core.net.ip) {
            return Ok(ReadOrPost::Refused);
        }
        let least = Least::of_rest(done);
        if let Poll::Ready(chain) = take_more(self.core, id, space, done, least)? {
            return Ok(ReadOrPost::Taken(chain));
        }
        Ok(ReadOrPost::MayPost(self.core.sockets.tcp(id)?.least(space, least)))
    }

    /// Cancels a posted buffer: it completes with the bytes it has, or as cancelled, once no device writes to it
    /// any more, which may take until the next polls.
    pub fn cancel(&mut self, now: Instant, id: SlotId, token: PostToken) {
        // A thread that waited with the lock held may be gone, unwound by a panic of the device.
        self.tcp.posted.out.take_awaited();
        self.tcp.posted.deliver(now, id, self.core);
        self.tcp.end_post(now, id, self.core, |machine, io| {
            machine.cancel(io, |t| *t == token);
        });
    }

    /// Revokes a posted buffer whose read was given up: its bytes go back into the stream. False: the buffer is
    /// complete, or later bytes have been received already; it completes as usual.
    pub fn revoke(&mut self, now: Instant, id: SlotId, token: PostToken) -> bool {
        self.tcp.posted.deliver(now, id, self.core);
        if !tokens(&self.core.sockets, id).any(|t| t == token) {
            return false;
        }
        let mut is_gone = true;
        self.tcp.end_post(now, id, self.core, |machine, io| {
            is_gone = machine.abandon(io, |t| *t == token);
        });
        is_gone
    }

    /// The tokens of the posted buffers of a connection, in order.
    pub fn tokens(self, id: SlotId) -> impl Iterator<Item = PostToken> + use<'a> {
        tokens(&self.core.sockets, id)
    }

    /// The next completion. To be taken after each step and call.
    pub fn pop_completion(&mut self) -> Option<PostCompletion> {
        self.tcp.posted.out.completed.pop_front()
    }
}

impl Tcp {
    /// Ends posted buffers of a connection, whose bytes have been delivered.
    fn end_post(
        &mut self,
        now: Instant,
        id: SlotId,
        core: &mut Core,
        f: impl FnOnce(&mut Posted<PostToken>, &mut IoContext<'_>),
    ) {
        if let Ok(entry) = core.sockets.tcp(id) {
            with_machine(&mut core.net, entry, f);
            entry.tcb.note_read(now);
            self.posted.list(id, &mut entry.posted);
        }
        self.run_posted(now, id, core);
        core.notify(id);
    }

    /// For a call on one connection: delivers to its posted buffers, and sends what that gives rise to.
    pub(crate) fn run_posted(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        self.posted.deliver(now, id, core);
        self.posted.end_burst(BurstEnd::drained(now), id, core);
        if self.unacked_frames == 0 && core.conn(id).is_ok_and(|conn| conn.entry.is_queued) {
            core.net.link.set_now(now);
            self.output_now(now, id, core);
            core.net.flush();
        }
    }
}

/// Whether the device may place bytes into the buffer of a read.
fn may_place_read(now: Instant, entry: &mut TcpEntry, ip: &Ip) -> bool {
    let is_remote = !ip.is_local(entry.tcb.key().remote_ip());
    let may_place = |p: &mut Box<RecvEntry>| !p.is_waiting() && p.machine.may_place(now);
    is_remote && is_receiving(&entry.tcb) && entry.posted.as_mut().is_none_or(may_place)
}

fn tokens(sockets: &Slab<Socket>, id: SlotId) -> impl Iterator<Item = PostToken> + use<'_> {
    let posted = match sockets.get(id) {
        Some(Socket::Tcp(entry)) => entry.posted.as_ref(),
        _ => None,
    };
    posted.into_iter().flat_map(|p| p.machine.tokens().copied())
}
