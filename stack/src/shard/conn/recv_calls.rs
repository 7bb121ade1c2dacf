//! Calls of posted receive: buffers are posted, cancelled and waited for. Completions are data
//! ([`PostCompletion`]).

use crate::base::{Instant, SlotId};
use crate::mbuf::RecvBuf;
use crate::shard::conn::posted::BurstEnd;
use crate::socket::SocketError;
use crate::socket::posted::{IoContext, Posted};

use crate::shard::conn::layer::Tcp;
use crate::shard::conn::posted::{Post, with_machine};
use crate::shard::layers::Core;
use crate::shard::outcome::{PostCompletion, PostToken, RecvOutcome};
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;
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
}

impl<'a> PostedBuffers<'a> {
    /// Posts a buffer, to be filled behind those posted before.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: too many wait already; [`SocketError::BadHandle`],
    /// [`SocketError::NotSupported`], [`SocketError::NetworkDown`]. The buffer comes back.
    pub fn post(&mut self, now: Instant, post: Post) -> Result<(), (SocketError, RecvBuf)> {
        let Post { id, buf, rule, token } = post;
        let entry = match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) if entry.error.is_none() => entry,
            Some(Socket::Tcp(entry)) => {
                return Err((entry.error.unwrap_or(SocketError::BadHandle), buf));
            }
            Some(_) => return Err((SocketError::NotSupported, buf)),
            None => return Err((SocketError::BadHandle, buf)),
        };
        let posted = entry.posted.get_or_insert_default();
        if let Err((buf, _)) = posted.machine.post(buf, rule, token) {
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

fn tokens(sockets: &Slab<Socket>, id: SlotId) -> impl Iterator<Item = PostToken> + use<'_> {
    let posted = match sockets.get(id) {
        Some(Socket::Tcp(entry)) => entry.posted.as_ref(),
        _ => None,
    };
    posted.into_iter().flat_map(|p| p.machine.tokens().copied())
}
