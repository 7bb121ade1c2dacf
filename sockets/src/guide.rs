//! Pages for programmers, which are also in `docs/` of the repository.
//!
//! | page | about |
//! |---|---|
//! | [`calls`] | which call to use: connecting, sending, receiving, waiting |
//! | [`waiting`] | latency against CPU while a thread waits |
//! | [`bursts`] | the frames that each device takes in a call, and what that saves |
//! | [`listeners`] | backlog, SYN floods, Fast Open, limits of a source |
//! | [`shm`] | what another process can do to a stack over shared memory |
//! | [`icmp`] | which messages of ICMP, ARP and neighbour discovery a stack accepts |
//!
//! Async programs and packets of the program's own loop have pages in
//! [`fulmar_tokio::guide`](https://docs.rs/fulmar-tokio/latest/fulmar_tokio/guide/).
//! [The repository](https://github.com/fulmar-net/fulmar/tree/main/docs) has the others.

// A page's links lead to files of the repository; the first definition of a link counts.

/// [listeners.md]: listeners
/// [async.md]: https://docs.rs/fulmar-tokio/latest/fulmar_tokio/guide/
///
#[doc = include_str!("../guide/calls.md")]
pub mod calls {}

/// [results/restructure/waiting.md]: https://github.com/fulmar-net/fulmar/blob/main/results/restructure/waiting.md
/// [`turn.rs`]: https://github.com/fulmar-net/fulmar/blob/main/sockets/src/runtime/watched/turn.rs
/// [`event_loop.rs`]: https://github.com/fulmar-net/fulmar/blob/main/sockets/tests/kernel/event_loop.rs
/// [results/wake]: https://github.com/fulmar-net/fulmar/blob/main/results/wake/README.md
///
#[doc = include_str!("../guide/waiting.md")]
pub mod waiting {}

/// [`results/burst`]: https://github.com/fulmar-net/fulmar/tree/main/results/burst
///
#[doc = include_str!("../guide/bursts.md")]
pub mod bursts {}

/// [`stack/src/shard/listen/mod.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/shard/listen/mod.rs
/// [`stack/src/shard/listen/sources.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/shard/listen/sources.rs
/// [`stack/src/tcp/cookie.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/tcp/cookie.rs
/// [`stack/src/shard/listen/pending.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/shard/listen/pending.rs
/// [`stack/src/shard/listen/fast_open.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/shard/listen/fast_open.rs
/// [`stack/src/tcp/fast_open.rs`]: https://github.com/fulmar-net/fulmar/blob/main/stack/src/tcp/fast_open.rs
/// [secrets.md]: https://github.com/fulmar-net/fulmar/blob/main/docs/secrets.md
/// [`TcpStream::connect_first`]: crate::TcpStream::connect_first
/// [memory.md]: https://github.com/fulmar-net/fulmar/blob/main/docs/memory.md
/// [The results]: https://github.com/fulmar-net/fulmar/blob/main/results/trust/README.md
/// [stat.md]: https://github.com/fulmar-net/fulmar/blob/main/docs/stat.md
///
#[doc = include_str!("../guide/listeners.md")]
pub mod listeners {}

#[doc = include_str!("../guide/shm.md")]
pub mod shm {}

/// [wan.md]: https://github.com/fulmar-net/fulmar/blob/main/docs/wan.md
///
#[doc = include_str!("../guide/icmp.md")]
pub mod icmp {}
