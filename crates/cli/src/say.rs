//! What a command prints for its user, or for the program behind a pipe.

use crate::failure::{During, Outcome};
use std::fmt;
use std::io::{self, Write};

/// Prints a line.
///
/// # Errors
/// Nobody reads it any more, or there is no room for it.
pub fn say(line: impl fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).during("cannot print")
}
