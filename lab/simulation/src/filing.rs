//! Files in the swarm: ends that send parts of a file, with a header before and a trailer behind each, instead of
//! writing. The file is the pattern; its offset is the place in the stream, so that pages begin anywhere.

use std::sync::Arc;
use std::task::Poll;

use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::SharedBytes;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::SocketError;
use fulmar_stack::socket::sendfile::{LowWater, Piece, Rest};
use fulmar_stack::socket::sosend::Attempt;

use super::app::{Cx, End};
use super::oracle::Violation;
use super::pattern;
use super::scenario::{Draw, Scenario};

/// The thread that calls.
const THREAD: u64 = 1;

/// How an end sends files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePlan {
    /// Bytes of the header before each part at most.
    pub head: usize,
    /// Bytes of the trailer behind each part at most.
    pub tail: usize,
    /// The bytes of the file go by reference, as memory that is given away.
    pub shares: bool,
    /// The caller blocks until half of the buffer is free.
    pub blocks: bool,
}

/// The file of a stream.
struct Pages {
    stream: u64,
}

impl SharedBytes for Pages {
    fn piece(&self, at: usize) -> &[u8] {
        pattern::piece(self.stream, at as u64, pattern::PIECE)
    }

    fn on_undelivered(&self, _why: u8) {}
}

impl Scenario {
    pub(super) fn draw_files(&mut self, d: &mut Draw) {
        for e in self.flows.iter_mut().flat_map(|f| &mut f.ends) {
            let most = d.pick(&[0, 0, 100, 5_000]);
            let plan = FilePlan {
                head: d.below(most + 1) as usize,
                tail: d.below(most + 1) as usize,
                shares: d.percent(50),
                blocks: d.percent(50),
            };
            e.options.file = d.percent(60).then_some(plan);
        }
    }
}

impl End {
    /// Sends parts of the file until the stack takes no more.
    pub(super) fn send_files(
        &mut self,
        cx: &mut Cx,
        id: SlotId,
        plan: FilePlan,
    ) -> Result<(), Violation> {
        while self.written < self.plan.bytes && self.write_at.is_none() {
            let outcome = self.begin_file(cx, id, plan).and_then(|rest| match rest {
                Some(rest) => self.send_part(cx, id, plan, rest),
                None => Ok(Poll::Pending),
            });
            match outcome {
                Ok(Poll::Ready(())) => {}
                Ok(Poll::Pending) => return Ok(()),
                Err(e) => return self.fail(cx, e),
            }
        }
        Ok(())
    }

    /// What is left of the call under way, or of a new one; `None` while another thread calls.
    fn begin_file(
        &mut self,
        cx: &mut Cx,
        id: SlotId,
        plan: FilePlan,
    ) -> Result<Option<Rest>, SocketError> {
        if self.file_rest.is_none() {
            let Poll::Ready(()) = cx.shard.tcp_entry(id)?.lock_send(THREAD)? else {
                return Ok(None);
            };
            let left = (self.plan.bytes - self.written) as usize;
            let bytes = self.size(self.plan.write_bytes).min(left);
            let head = plan.head.min(bytes);
            let tail = plan.tail.min(bytes - head);
            let file_at = self.written + head as u64;
            let file = (bytes - head - tail) as u64;
            self.file_rest = Some(Rest { head, file_at, file, tail });
        }
        Ok(self.file_rest)
    }

    fn send_part(
        &mut self,
        cx: &mut Cx,
        id: SlotId,
        plan: FilePlan,
        rest: Rest,
    ) -> Result<Poll<()>, SocketError> {
        let worth = if plan.blocks { LowWater::HalfBuffer } else { LowWater::Writable };
        if plan.shares && rest.head == 0 && rest.file > 0 {
            let pages: Arc<dyn SharedBytes> = Arc::new(Pages { stream: self.stream(false) });
            let at = rest.file_at as usize;
            let attempt = if plan.blocks { Attempt::Retry } else { Attempt::First };
            let part = at..at + rest.file as usize;
            match cx.shard.sosend(id).share(cx.now, &pages, part, attempt)? {
                Poll::Ready(file) => {
                    self.has_sent(cx, id, rest, Piece { head: 0, file, tail: 0 });
                    return Ok(Poll::Ready(()));
                }
                Poll::Pending => return Ok(Poll::Pending),
            }
        }
        // A chunk that is sent by reference has no bytes before it.
        let is_head_alone = plan.shares && rest.head > 0;
        let now = if is_head_alone { Rest { file: 0, tail: 0, ..rest } } else { rest };
        match cx.shard.sendfile(id).reserve(cx.now, &now, worth)? {
            Poll::Ready((mut r, piece)) => {
                r.chain.copy_from(0, pattern::piece(self.stream(false), self.written, piece.len()));
                let more = MoreData::of_rest(rest.bytes().saturating_sub(piece.len() as u64));
                cx.shard.sendfile(id).commit(cx.now, r, piece.len(), more)?;
                self.has_sent(cx, id, rest, piece);
                Ok(Poll::Ready(()))
            }
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    /// The stack has taken a part; the call ends with its last one.
    fn has_sent(&mut self, cx: &mut Cx, id: SlotId, rest: Rest, piece: Piece) {
        let left = Rest {
            head: rest.head - piece.head,
            file_at: rest.file_at + piece.file as u64,
            file: rest.file - piece.file as u64,
            tail: rest.tail - piece.tail,
        };
        self.write_left = rest.bytes() as usize;
        self.file_rest = (left.bytes() > 0).then_some(left);
        if self.file_rest.is_none() {
            cx.shard.sendfile(id).end();
        }
        self.accepted(cx, piece.len());
    }
}
