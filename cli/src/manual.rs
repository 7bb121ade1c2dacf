//! Man pages and shell completions, made from the declaration of the command itself.

use crate::failure::{Failure, Outcome};
use clap_complete::Shell;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Print the completion script for a shell
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
    /// The directory; created if missing
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
pub fn man(args: &ManArgs, commands: Vec<clap::Command>) -> Outcome<ExitCode> {
    let directory = &args.directory;
    let commands: Vec<_> = commands.into_iter().map(described).collect();
    let pages: Vec<Page> = commands.iter().cloned().flat_map(pages_of).collect();
    let written = std::fs::create_dir_all(directory).and_then(|()| {
        commands.into_iter().try_for_each(|c| clap_mangen::generate_to(c, directory))?;
        pages.iter().try_for_each(|page| {
            let path = directory.join(format!("{}.1", page.name));
            std::fs::write(&path, page.complete(&std::fs::read_to_string(&path)?, &pages))
        })
    });
    written.map_err(|e| Failure::file("cannot write the man pages to", directory, &e))?;
    Ok(ExitCode::SUCCESS)
}

/// The command with the descriptions of all options: `-h` leaves some out, a page does not.
fn described(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| arg.hide_short_help(false)).mut_subcommands(described)
}

/// The parts of a command that its page needs.
struct Page {
    /// `fulmar-ping`.
    name: String,
    /// `fulmar ping [OPTIONS] [HOST]`, a line for each form.
    usage: String,
}

impl Page {
    fn of(name: String, command: &mut clap::Command) -> Page {
        let usage = command.render_usage().to_string();
        let lines = usage.trim_start_matches("Usage:").lines().map(str::trim);
        Page { name, usage: lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n") }
    }

    /// The page with the sections that man-pages(7) knows.
    fn complete(&self, page: &str, all: &[Page]) -> String {
        let (page, status) = with_examples(&with_synopsis(page, &self.usage));
        let others = all.iter().map(|p| p.name.as_str()).filter(|name| *name != self.name);
        let others: Vec<_> =
            others.map(|name| format!(".BR {} (1)", name.replace('-', "\\-"))).collect();
        let after = format!(
            ".SH \"EXIT STATUS\"\n{}\n.SH \"SEE ALSO\"\n{}\n",
            status.as_deref().unwrap_or(EXIT_STATUS),
            others.join(",\n")
        );
        match page.split_once(".SH VERSION\n") {
            Some((before, version)) => format!("{before}{after}.SH VERSION\n{version}"),
            None => page + &after,
        }
    }
}

/// The exit status of a command whose help does not describe it.
const EXIT_STATUS: &str = "0: success. 2: an error, including invalid options. 128 plus the number of a signal: \
    ended by that signal.";

/// The pages of a command and of its subcommands.
fn pages_of(mut command: clap::Command) -> Vec<Page> {
    command.build();
    let name = command.get_name().to_owned();
    let mut pages = vec![Page::of(name.clone(), &mut command)];
    let shown = |c: &&mut clap::Command| !c.is_hide_set() && c.get_name() != "help";
    pages.extend(command.get_subcommands_mut().filter(shown).map(|c| {
        let name = format!("{name}-{}", c.get_name());
        Page::of(name, c)
    }));
    pages
}

/// The page with the usage of the help as its synopsis, not every option without its value.
fn with_synopsis(page: &str, usage: &str) -> String {
    const SYNOPSIS: &str = ".SH SYNOPSIS\n";
    let Some((before, after)) = page.split_once(SYNOPSIS) else { return page.to_owned() };
    let rest = after.find(".SH ").map_or("", |at| &after[at..]);
    format!("{before}{SYNOPSIS}.nf\n{}\n.fi\n{rest}", usage.replace('-', "\\-"))
}

/// The page with the text after the options as lines of their own, under a name that man-pages(7) knows; and its text
/// about the exit status.
fn with_examples(page: &str) -> (String, Option<String>) {
    const EXTRA: &str = ".SH EXTRA\n";
    let Some((before, after)) = page.split_once(EXTRA) else { return (page.to_owned(), None) };
    let end = after.find("\n.SH ").map_or(after.len(), |at| at + 1);
    let (body, rest) = after.split_at(end);
    let (body, status) = without_status(body);
    let mut sections = String::new();
    // Examples may follow other paragraphs.
    let (notes, examples) = match body.find("Examples:\n").or_else(|| body.find("Example:\n")) {
        Some(at) => (&body[..at], body[at..].split_once('\n').unwrap_or_default().1),
        None => (body.as_str(), ""),
    };
    let (examples, remarks) = examples.split_once("\n\n").unwrap_or((examples, ""));
    for (title, text) in [("NOTES", notes), ("EXAMPLES", examples), ("NOTES", remarks)] {
        let text = text.trim_matches('\n');
        if !text.is_empty() {
            sections += &format!(".SH {title}\n.nf\n{text}\n.fi\n");
        }
    }
    (format!("{before}{sections}{rest}"), status)
}

/// The text without the paragraph, or the end of it, that begins with *Exit status:*, and that.
fn without_status(text: &str) -> (String, Option<String>) {
    const STATUS: &str = "Exit status: ";
    let Some(at) = text.find(STATUS) else { return (text.to_owned(), None) };
    let end = text[at..].find("\n\n").map_or(text.len(), |n| at + n);
    let status = text[at + STATUS.len()..end].trim_end().to_owned();
    (format!("{}{}", &text[..at], &text[end..]), Some(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines() {
        let page = ".TH x\n.SH EXTRA\nExamples:\n  a  b\n  c\n.SH VERSION\nv1\n";
        let wanted = ".TH x\n.SH EXAMPLES\n.nf\n  a  b\n  c\n.fi\n.SH VERSION\nv1\n";
        assert_eq!(with_examples(page), (wanted.to_owned(), None));
        assert_eq!(with_examples(".TH x\n"), (".TH x\n".to_owned(), None));
    }

    #[test]
    fn a_page_has_a_short_synopsis_an_exit_status_and_the_other_pages() {
        let text = ".SH SYNOPSIS\n[\\-\\-count]\n.SH OPTIONS\no\n.SH EXTRA\nExit status: 0 or\n1.\n\nExample:\n  a\n";
        let page = |name: &str| Page { name: name.to_owned(), usage: "x y [OPTIONS]".to_owned() };
        let wanted = ".SH SYNOPSIS\n.nf\nx y [OPTIONS]\n.fi\n.SH OPTIONS\no\n.SH EXAMPLES\n.nf\n  a\n.fi\n\
                      .SH \"EXIT STATUS\"\n0 or\n1.\n.SH \"SEE ALSO\"\n.BR x (1),\n.BR x\\-z (1)\n";
        assert_eq!(page("x-y").complete(text, &[page("x"), page("x-y"), page("x-z")]), wanted);
    }

    #[test]
    fn every_option_is_described_on_its_page() {
        let option = clap::Arg::new("mtu").long("mtu").help("The MTU").hide_short_help(true);
        let mut page = Vec::new();
        let command = described(clap::Command::new("x").arg(option));
        clap_mangen::Man::new(command).render(&mut page).unwrap();
        assert!(String::from_utf8(page).unwrap().contains("The MTU"));
    }
}
