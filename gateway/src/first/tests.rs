//! The engines on what real programs send, on what hostile ones may send, and on any cut of both.

mod cuts;
mod fixtures;
mod hpack;
mod http1;
mod http2;
mod quic;
mod sniff;
mod tls;

use super::{Expected, Reason, Stream, Verdict};

/// The name of the address in these tests.
const NAME: &str = "allowed.example";

/// The verdict on bytes that come at once, at port 80.
fn verdict_on(bytes: &[u8]) -> Verdict {
    Stream::new(Expected::new([NAME], 80)).read(bytes)
}

fn reason(verdict: &Verdict) -> Option<Reason> {
    match verdict {
        Verdict::Refuse(refusal) => Some(refusal.reason),
        Verdict::Pass(_) => None,
    }
}

/// Why bytes are refused; `None`: they are not.
fn refused(bytes: &[u8]) -> Option<Reason> {
    reason(&verdict_on(bytes))
}

/// All of the bytes pass, and the stream is read on.
fn all_of(bytes: &[u8]) -> Verdict {
    Verdict::Pass(bytes.len() as u64)
}
