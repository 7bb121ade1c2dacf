//! The queue of the echo listener.

use alloc::collections::VecDeque;

use crate::ip::EchoRequest;
use crate::mbuf::FairShare;

use crate::shard::outcome::Watched;

/// Requests in the queue at most.
const QUEUED_REQUESTS: usize = 256;
/// Limit of their charge ([`charge`](crate::udp::charge)): a datagram socket's default.
const QUEUED_BYTES: usize = 256 << 10;

/// The socket that receives echo requests to addresses of other hosts.
#[derive(Default)]
pub struct EchoListener {
    requests: VecDeque<EchoRequest>,
    /// Sum of their charges, bytes.
    truesize: usize,
    /// The watch of the socket.
    pub(crate) watch: Watched,
}

impl EchoListener {
    /// Whether no request is queued.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests in the queue.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Appends a request; returns it if there is no space.
    #[allow(clippy::result_large_err, reason = "a refused request is returned whole")]
    pub fn push(&mut self, request: EchoRequest, share: FairShare) -> Result<(), EchoRequest> {
        let charge = crate::udp::charge(&request.payload);
        let is_unfair = share.is_contended() && charge > share.allowance(self.truesize, false);
        let is_full =
            self.requests.len() >= QUEUED_REQUESTS || self.truesize + charge > QUEUED_BYTES;
        if is_unfair || is_full {
            return Err(request);
        }
        self.truesize += charge;
        self.requests.push_back(request);
        Ok(())
    }

    /// The oldest request.
    pub fn pop(&mut self) -> Option<EchoRequest> {
        let request = self.requests.pop_front()?;
        self.truesize -= crate::udp::charge(&request.payload);
        Some(request)
    }
}
