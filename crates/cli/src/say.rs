//! Output of a command.

use crate::failure::{During, Outcome};
use std::fmt;
use std::io::{self, Write};

/// Prints a line.
///
/// # Errors
/// Standard output is closed, or its disk is full.
pub fn say(line: impl fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).during("cannot print")
}
