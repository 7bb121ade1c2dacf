//! Man pages and shell completions, made from the declaration of the command itself.

use crate::failure::{Failure, Outcome};
use clap_complete::Shell;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Print the completions for a shell
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:
  fulmar completions bash > ~/.local/share/bash-completion/completions/fulmar")]
pub struct CompletionArgs {
    /// The shell
    shell: Shell,
}

/// Write the man pages, one for each subcommand
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:
  fulmar man ~/.local/share/man/man1")]
pub struct ManArgs {
    /// The directory, made if need be
    directory: PathBuf,
}

/// Prints the completions of `command`.
pub fn completions(args: &CompletionArgs, mut command: clap::Command) -> Outcome<ExitCode> {
    let (name, mut script) = (command.get_name().to_owned(), Vec::new());
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    let written = io::stdout().write_all(&script);
    written.map_err(|e| Failure::io("cannot print the completions", &e))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the man pages of commands.
pub fn man<const N: usize>(args: &ManArgs, commands: [clap::Command; N]) -> Outcome<ExitCode> {
    let directory = &args.directory;
    let written = std::fs::create_dir_all(directory).and_then(|()| {
        commands.into_iter().try_for_each(|c| clap_mangen::generate_to(c, directory))
    });
    written.map_err(|e| Failure::file("cannot write the man pages to", directory, &e))?;
    Ok(ExitCode::SUCCESS)
}
