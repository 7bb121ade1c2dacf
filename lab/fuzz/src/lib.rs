//! Hostile input, for the parsers, for the whole input path of a stack with live connections, for the readers of a
//! guest's first bytes, and for policy files.
//!
//! Each harness takes bytes and panics if a property is broken. It serves twice: as a property test
//! (`tests/replay.rs` plays the corpus and random bytes in every `cargo test`), and as a target of
//! libFuzzer (`make fuzz MINUTES=n`), which keeps inputs that reach new code in `corpus/`.
//!
//! The harnesses use no clock and no thread: an input that fails once fails always.

mod extra;
mod first;
mod frames;
mod messages;
mod parsers;
mod peer;
mod policy;
mod script;
mod world;

pub use first::{first_datagrams, first_stream};
pub use messages::gateway_messages;
pub use parsers::parsers;
pub use policy::policy_file;
pub use world::stack;
