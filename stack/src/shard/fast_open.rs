//! TCP Fast Open (RFC 7413) beside the engine: the cookies that servers make ([`keys`]), the options of listeners and
//! the limit of pending connections ([`queue`]), the cookies that clients keep ([`cache`]), and connections with first
//! data ([`calls`]). Listeners take SYNs with data in `listen/fast_open.rs`.
//!
//! Replay: a SYN with data that the network duplicates may reach the server again after the connection has ended, and
//! is then taken for a new one (RFC 7413 section 2.1). First data has to be idempotent.

pub(super) mod cache;
pub(super) mod calls;
pub(super) mod keys;
pub(super) mod queue;
