//! Becoming another program.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::failure::Failure;

/// Becomes a program with its arguments; without any the user's shell. `prepare` changes its environment. Returns only
/// if that fails: the exit status by the convention of env(1), 127 where there is no such program and 126 otherwise,
/// and why.
pub fn become_program(
    command: &[OsString],
    prepare: impl FnOnce(&mut Command) -> &mut Command,
) -> (u8, Failure) {
    let shell = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let (program, arguments) = match command.split_first() {
        Some((program, arguments)) => (program, arguments),
        None => (&shell, &[][..]),
    };
    let error = prepare(Command::new(program).args(arguments)).exec();
    let what = format!("cannot run `{}`", program.to_string_lossy());
    let (status, why) = match error.kind() {
        io::ErrorKind::NotFound => (127, "program not found; check the name".to_owned()),
        io::ErrorKind::PermissionDenied => (126, "not executable".to_owned()),
        _ => (126, error.to_string()),
    };
    (status, Failure::new(format!("{what}: {why}")))
}
