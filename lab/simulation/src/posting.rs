//! An end that receives into posted buffers: posts, cancels, abandons and reads in between, as its plan and
//! its draws say.

use std::collections::VecDeque;
use std::sync::Arc;

use fulmar_base::SlotId;
use fulmar_mbuf::RecvBuf;
use fulmar_runtime::RecvTicket;
use fulmar_shard::RecvOutcome;
use fulmar_socket::SocketError;
use fulmar_socket::posted::CompletionPolicy;

use super::app::Cx;
use super::gate::lock;
use super::scenario::{Draw, PostPlan};

/// A buffer that is away.
struct Away {
    ticket: Arc<RecvTicket>,
    capacity: usize,
    /// It was asked back: that it comes with nothing is no error.
    is_cancelled: bool,
}

/// The buffers of one end.
pub struct Posting {
    plan: PostPlan,
    away: VecDeque<Away>,
    /// Buffers to post, or reads to make, before it is the other's turn.
    left: u64,
    reads: bool,
    /// Buffers that came back, to be used again.
    spare: Vec<RecvBuf>,
}

fn note(cx: &Cx, id: SlotId, what: impl FnOnce() -> String) {
    lock(cx.network).log.line(cx.now, || format!("  socket {} {}", id.index, what()));
}

/// What came back.
pub enum Back {
    /// These bytes.
    Bytes(RecvBuf),
    /// The end of the stream.
    End,
    /// The connection failed.
    Failed(SocketError),
}

impl Posting {
    pub fn new(plan: PostPlan) -> Posting {
        Posting { plan, away: VecDeque::new(), left: 1, reads: false, spare: Vec::new() }
    }

    /// Whether it is the turn of ordinary reads.
    pub fn is_reading(&self) -> bool {
        self.away.is_empty() && self.reads
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

    /// The next buffer that is back.
    pub fn next_back(&mut self) -> Option<Back> {
        loop {
            let is_over = |a: &Away| a.ticket.is_over();
            // Cancelled ones with nothing do not wait for those before them.
            let at = match self.away.front() {
                Some(front) if is_over(front) => 0,
                _ => self.away.iter().position(|a| a.is_cancelled && is_over(a))?,
            };
            let Away { ticket, capacity, is_cancelled } = self.away.remove(at)?;
            match ticket.take() {
                Some(RecvOutcome { error: Some(SocketError::Cancelled), buf }) if is_cancelled => {
                    self.spare.extend(buf);
                }
                Some(RecvOutcome { error: Some(e), .. }) => return Some(Back::Failed(e)),
                Some(RecvOutcome { buf: Some(buf), .. }) if buf.is_empty() && capacity > 0 => {
                    return Some(Back::End);
                }
                Some(RecvOutcome { buf: Some(buf), .. }) if !buf.is_empty() => {
                    return Some(Back::Bytes(buf));
                }
                Some(_) => {}
                None => return Some(Back::Failed(SocketError::BadHandle)),
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
        while self.away.len() < self.plan.buffers && !self.reads {
            let buf = match self.spare.pop().filter(|_| draw.percent(70)) {
                Some(buf) => buf,
                None => {
                    RecvBuf::from(vec![0; draw.below(self.plan.most_bytes as u64 + 1) as usize])
                }
            };
            let (capacity, ticket) = (buf.capacity(), Arc::new(RecvTicket::default()));
            let rule = self.rule(capacity, draw);
            cx.shard.tcp_post(cx.now, id, buf, rule, &ticket).map_err(|(e, _)| e)?;
            note(cx, id, || format!("posts {capacity}, {rule:?}"));
            self.away.push_back(Away { ticket, capacity, is_cancelled: false });
            self.step(draw);
        }
        Ok(())
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
        if self.away.is_empty() || !draw.percent(self.plan.meddles_percent) {
            return;
        }
        let at = draw.below(self.away.len() as u64) as usize;
        if draw.percent(50) {
            self.away[at].is_cancelled = true;
            note(cx, id, || format!("asks for buffer {at} back"));
            cx.shard.tcp_cancel_post(cx.now, id, &self.away[at].ticket);
        } else if !self.away[at].ticket.is_over()
            && cx.shard.tcp_abandon_post(cx.now, id, &self.away[at].ticket)
        {
            note(cx, id, || format!("lets go of buffer {at}"));
            self.away.remove(at);
        }
    }
}
