//! Output of a command.

use crate::failure::{During, Outcome};
use std::io::{self, Write};

/// Writes bytes to standard output and flushes it. False: it is closed (`fulmar nc ... | head`), which is not a
/// failure.
///
/// # Errors
/// Any other error of the write.
pub fn write_out(output: &mut impl Write, bytes: &[u8]) -> Outcome<bool> {
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => written.during("cannot write to standard output").map(|()| true),
    }
}
