//! Pages for programmers, which are also in `docs/` of the repository.
//!
//! [`fulmar::guide`] has the pages about sockets.

// A page's links lead to files of the repository; the first definition of a link counts.

/// [`axum_hyper`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/axum_hyper.rs
/// [`grpc`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/grpc.rs
/// [`quic`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/quic.rs
/// [`websocket`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/websocket.rs
/// [`relay`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/relay.rs
/// [`with_smol`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/with_smol.rs
/// [results]: https://github.com/fulmar-net/fulmar/blob/main/results/async/README.md
///
#[doc = include_str!("../guide/async.md")]
pub mod async_programs {}

/// [`two_shards`]: https://github.com/fulmar-net/fulmar/blob/main/stack/examples/two_shards.rs
/// [`proxy_any`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/proxy_any.rs
/// [`tun2socks`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/tun2socks.rs
/// [`wireguard`]: https://github.com/fulmar-net/fulmar/blob/main/tokio/examples/wireguard.rs
/// [results]: https://github.com/fulmar-net/fulmar/blob/main/results/embed/README.md
///
#[doc = include_str!("../guide/embed.md")]
pub mod embed {}
