//! Options of one command by themselves, for its tests.

use std::ffi::OsString;

/// Parses words as the options of a command. The first word is the name of the command.
///
/// # Errors
/// Those of clap.
pub fn parse<A: clap::Args>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("command"));
    A::from_arg_matches(&command.try_get_matches_from(words)?)
}
