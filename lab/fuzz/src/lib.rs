//! Hostile input, for the parsers and for the whole input path of a stack with live connections.
//!
//! Each harness takes bytes and panics if a property is broken. It serves twice: as a property test
//! (`tests/replay.rs` plays the corpus and random bytes in every `cargo test`), and as a target of
//! libFuzzer (`make fuzz MINUTES=n`), which keeps inputs that reach new code in `corpus/`.
//!
//! The harnesses use no clock and no thread: an input that fails once fails always.

mod extra;
mod frames;
mod parsers;
mod peer;
mod script;
mod world;

pub use parsers::parsers;
pub use world::stack;
