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

/// Writes bytes to standard output and flushes it. False: it is closed (`fulmar nc ... | head`), which is no failure.
///
/// # Errors
/// Any other error of the write.
pub fn write_out(output: &mut impl Write, bytes: &[u8]) -> Outcome<bool> {
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => written.during("cannot write to standard output").map(|()| true),
    }
}
