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
        commands.into_iter().try_for_each(|c| clap_mangen::generate_to(c, directory))?;
        std::fs::read_dir(directory)?.try_for_each(|entry| {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_ours = name.starts_with("fulmar") || name.starts_with("pasta");
            if !(is_ours && name.ends_with(".1")) {
                return Ok(());
            }
            std::fs::write(&path, with_examples(&std::fs::read_to_string(&path)?))
        })
    });
    written.map_err(|e| Failure::file("cannot write the man pages to", directory, &e))?;
    Ok(ExitCode::SUCCESS)
}

/// The page with what follows the options as lines of their own, under a name that man-pages(7) knows.
fn with_examples(page: &str) -> String {
    const EXTRA: &str = ".SH EXTRA\n";
    let Some((before, after)) = page.split_once(EXTRA) else { return page.to_owned() };
    let end = after.find("\n.SH ").map_or(after.len(), |at| at + 1);
    let (body, rest) = after.split_at(end);
    let (title, body) = match body.split_once(":\n") {
        Some(("Examples" | "Example", lines)) => ("EXAMPLES", lines),
        _ => ("NOTES", body),
    };
    format!("{before}.SH {title}\n.nf\n{}\n.fi\n{rest}", body.trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines() {
        let page = ".TH x\n.SH EXTRA\nExamples:\n  a  b\n  c\n.SH VERSION\nv1\n";
        let wanted = ".TH x\n.SH EXAMPLES\n.nf\n  a  b\n  c\n.fi\n.SH VERSION\nv1\n";
        assert_eq!(with_examples(page), wanted);
        assert_eq!(with_examples(".TH x\n"), ".TH x\n");
    }
}
