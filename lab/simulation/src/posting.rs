//! An end that receives into posted buffers: posts, cancels, abandons and reads in between, as its plan and
//! its draws say.

use std::collections::VecDeque;
use std::sync::Arc;

use fulmar::internals::runtime::RecvTicket;
use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::shard::RecvOutcome;
use fulmar_stack::socket::SocketError;
use fulmar_stack::socket::posted::{CompletionPolicy, MAX_POSTED};

use super::app::Cx;
use super::gate::lock;
use super::scenario::{Draw, PostPlan};

/// A posted buffer.
struct Outstanding {
    ticket: Arc<RecvTicket>,
    capacity: usize,
    /// Its cancellation was requested: an empty completion is not an error.
    is_cancelled: bool,
}

/// The buffers of one end.
pub struct Posting {
    plan: PostPlan,
    outstanding: VecDeque<Outstanding>,
    /// Buffers to post, or reads to make, before it is the other's turn.
    left: u64,
    reads: bool,
    /// Buffers that were asked back or let go of: they keep their place until the device is done with them.
    given_up: usize,
    /// Completed buffers, to be posted again.
    spare: Vec<RecvBuf>,
}

fn note(cx: &Cx, id: SlotId, what: impl FnOnce() -> String) {
    lock(cx.network).log.line(cx.now, || format!("  socket {} {}", id.index, what()));
}

/// A completed buffer.
pub enum Completed {
    /// It holds received bytes.
    Bytes(RecvBuf),
    /// The end of the stream.
    End,
    /// The connection failed.
    Failed(SocketError),
}

impl Posting {
    pub fn new(plan: PostPlan) -> Posting {
        let outstanding = VecDeque::new();
        Posting { plan, outstanding, left: 1, reads: false, given_up: 0, spare: Vec::new() }
    }

    /// Whether it is the turn of ordinary reads.
    pub fn is_reading(&self) -> bool {
        self.outstanding.is_empty() && self.reads
    }

    /// A read was made.
    pub fn has_read(&mut self, draw: &mut Draw) {
        self.step(draw);
    }

    fn step(&mut self, draw: &mut Draw) {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.reads = self.plan.mixed && !self.reads;
            self.left = 1 + draw.below(20);
        }
    }

    /// The next completed buffer.
    pub fn next_completed(&mut self) -> Option<Completed> {
        loop {
            let is_over = |a: &Outstanding| a.ticket.is_over();
            // Cancelled ones with nothing do not wait for those before them.
            let at = match self.outstanding.front() {
                Some(front) if is_over(front) => 0,
                _ => self.outstanding.iter().position(|a| a.is_cancelled && is_over(a))?,
            };
            let Outstanding { ticket, capacity, is_cancelled } = self.outstanding.remove(at)?;
            match ticket.take() {
                Some(RecvOutcome { error: Some(SocketError::Cancelled), buf }) if is_cancelled => {
                    self.spare.extend(buf);
                }
                Some(RecvOutcome { error: Some(e), .. }) => return Some(Completed::Failed(e)),
                Some(RecvOutcome { buf: Some(buf), .. }) if buf.is_empty() && capacity > 0 => {
                    return Some(Completed::End);
                }
                Some(RecvOutcome { buf: Some(buf), .. }) if !buf.is_empty() => {
                    return Some(Completed::Bytes(buf));
                }
                Some(_) => {}
                None => return Some(Completed::Failed(SocketError::BadHandle)),
            }
        }
    }

    /// A buffer is done with.
    pub fn reuse(&mut self, buf: RecvBuf) {
        if self.spare.len() < 4 {
            self.spare.push(buf);
        }
    }

    /// Posts what may be posted; now and then asks for one back, or lets go of it.
    pub fn post(&mut self, cx: &mut Cx, id: SlotId, draw: &mut Draw) -> Result<(), SocketError> {
        self.meddle(cx, id, draw);
        while self.outstanding.len() < self.plan.buffers && !self.reads {
            let buf = match self.spare.pop().filter(|_| draw.percent(70)) {
                Some(buf) => buf,
                None => {
                    RecvBuf::from(vec![0; draw.below(self.plan.most_bytes as u64 + 1) as usize])
                }
            };
            let (capacity, ticket) = (buf.capacity(), Arc::new(RecvTicket::default()));
            let rule = self.rule(capacity, draw);
            match cx.shard.tcp_post(cx.now, id, buf, rule, &ticket) {
                Ok(()) => {}
                Err((SocketError::WouldBlock, buf)) if self.may_be_full() => {
                    self.spare.push(buf);
                    return Ok(());
                }
                Err((e, _)) => return Err(e),
            }
            note(cx, id, || format!("posts {capacity}, {rule:?}"));
            self.outstanding.push_back(Outstanding { ticket, capacity, is_cancelled: false });
            self.step(draw);
        }
        Ok(())
    }

    /// Whether all places may be taken.
    fn may_be_full(&self) -> bool {
        self.given_up + self.outstanding.len() >= MAX_POSTED
    }

    fn rule(&self, capacity: usize, draw: &mut Draw) -> CompletionPolicy {
        match draw.below(4) {
            0 => CompletionPolicy { low_water_bytes: usize::MAX, on_push: false, idle: None },
            1 => CompletionPolicy {
                low_water_bytes: draw.below(capacity as u64 + 2) as usize,
                ..CompletionPolicy::default()
            },
            _ => CompletionPolicy::default(),
        }
    }

    fn meddle(&mut self, cx: &mut Cx, id: SlotId, draw: &mut Draw) {
        if self.outstanding.is_empty() || !draw.percent(self.plan.meddles_percent) {
            return;
        }
        let at = draw.below(self.outstanding.len() as u64) as usize;
        self.given_up += 1;
        if draw.percent(50) {
            self.outstanding[at].is_cancelled = true;
            note(cx, id, || format!("asks for buffer {at} back"));
            cx.shard.tcp_cancel_post(cx.now, id, &self.outstanding[at].ticket);
        } else if !self.outstanding[at].ticket.is_over()
            && cx.shard.tcp_abandon_post(cx.now, id, &self.outstanding[at].ticket)
        {
            note(cx, id, || format!("lets go of buffer {at}"));
            self.outstanding.remove(at);
        }
    }
}
