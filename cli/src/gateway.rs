//! `fulmar gateway`, which is also `pasta`: a network for a namespace without root.

pub(crate) mod args;
pub(crate) mod ask;
pub(crate) mod audit;
mod auto;
pub(crate) mod capture;
mod detach;
mod document;
mod endpoints;
mod follow;
mod guard;
mod interface;
pub(crate) mod learn;
pub(crate) mod log;
mod output;
pub(crate) mod outside;
mod panics;
mod pesto;
pub(crate) mod plan;
mod publish;
mod refused;
mod reload;
mod report;
mod runas;
mod serve;
pub(crate) mod slirp;
mod snapshot;
mod splicers;
mod stderr;
mod wait;
mod watch;

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::path::Path;
use std::process::{Child, ExitCode};

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, Parser};
use fulmar_gateway::attach::Target;
use fulmar_gateway::hidden;
use fulmar_gateway::netns::User;
use fulmar_gateway::program::{self, Resolvers};

use crate::failure::{During, Failure, Outcome};
pub use args::Args;
use ask::Covered;
use detach::{Becomes, PendingGateway, Process};
use plan::{Guest, Plan};
use serve::RunMode;
use slirp::Caller;

/// Exit status of every failure of pasta and of slirp4netns.
const PASTA_FAILED: u8 = 1;
/// Exit status of a failure before the program runs (env(1), nohup(1)).
const NOT_STARTED: u8 = 125;

/// `fulmar gateway`.
///
/// # Errors
/// A sentence about the option or the step that failed.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    Session { plan: Plan::new(args)?, name: "fulmar", user: User::Root }.run()
}

/// A gateway of a command.
pub(crate) struct Session<'a> {
    /// The plan made from the options.
    pub plan: Plan,
    /// The prefix of messages.
    pub name: &'a str,
    /// The user that a program in new namespaces has there.
    pub user: User,
}

impl Session<'_> {
    /// Does the part of this process: see [`detach`].
    ///
    /// # Errors
    /// A sentence about the step that failed.
    pub fn run(&self) -> Outcome<ExitCode> {
        if Process::current() != Process::Command {
            // Started as /proc/self/exe the process is called `exe`.
            let name = if self.name == "pasta" { c"pasta" } else { c"fulmar" };
            let _ = nix::sys::prctl::set_name(name);
        }
        if let Some(becomes) = self.becomes() {
            let closed = detach::close_inherited(&self.plan.guest, becomes, &self.inherited());
            closed.during("cannot close inherited descriptors")?;
        }
        match (Process::current(), &self.plan.guest) {
            (Process::Attach(pid), _) => {
                if !detach::wait_for_namespaces() {
                    return Ok(ExitCode::FAILURE);
                }
                Ok(ready(&detach::start(Process::Watch(pid))?))
            }
            (Process::Follow, _) => follow::run(&self.plan),
            (Process::ReadPolicy, _) => {
                match self.plan.reload.as_ref().and_then(|(args, _)| args.policy()) {
                    Some(path) => reload::read_on_request(path),
                    None => Ok(ExitCode::FAILURE),
                }
            }
            (Process::Watch(pid), guest) => watch::watch(pid, self.name, guest, self.resolvers()),
            (Process::Serve(Some(pid)), _) => {
                self.serve(&Target::Process { pid, userns: None }, RunMode::Watched)
            }
            (Process::Serve(None), Guest::Existing(target)) => {
                self.serve(target, RunMode::Detached)
            }
            (Process::Command, Guest::Existing(target)) if self.plan.process.foreground => {
                self.serve(target, RunMode::Foreground)
            }
            (Process::Command, Guest::Existing(_)) => {
                Ok(ready(&detach::start(Process::Serve(None))?))
            }
            (Process::Command | Process::Serve(None), Guest::Program(command)) => {
                self.become_program(command)
            }
        }
    }

    /// As [`Session::run`]; then waits for the program, and prints the gateway's summary.
    ///
    /// # Errors
    /// As `run`.
    pub fn run_and_wait(&self) -> Outcome<ExitCode> {
        match Process::current() {
            Process::Command if !wait::is_waited_for() => {
                wait::run_and_wait(self.plan.ask.as_ref())
            }
            Process::Command => {
                wait::unblock();
                wait::enter_terminal()?;
                self.run()
            }
            _ => self.run(),
        }
    }

    /// What this process becomes; `None`: a program that inherits all descriptors of its caller.
    fn becomes(&self) -> Option<Becomes> {
        match (Process::current(), &self.plan.guest) {
            (Process::Command, Guest::Program(_)) if self.plan.outside.is_strict => {
                Some(Becomes::Gateway)
            }
            (Process::Command, Guest::Program(_)) if self.user == User::Same => None,
            (Process::Command, Guest::Program(_)) => Some(Becomes::Program),
            _ => Some(Becomes::Gateway),
        }
    }

    /// The descriptors that an option names.
    fn inherited(&self) -> Vec<RawFd> {
        self.plan.audit.iter().filter_map(audit::Target::inherited).collect()
    }

    /// The resolvers of the program's own resolv.conf; `None`: it has the host's.
    fn resolvers(&self) -> Option<Resolvers> {
        let servers = self.plan.map.dns_forward.clone();
        // A name that a domain completes would be asked about, and the user does not know whether it exists.
        let has_domains = self.plan.ask.is_none();
        (self.user == User::Same && !servers.is_empty())
            .then_some(Resolvers { servers, has_domains })
    }

    fn serve(&self, target: &Target, mode: RunMode) -> Outcome<ExitCode> {
        serve::serve(&self.plan, target, self.name, mode, Caller::default())
    }

    /// Gives the program of a run its resolvers, and takes from it what would undo the rules of the next run.
    fn prepare_program(&self) -> std::io::Result<()> {
        self.plan.outside.close()?;
        if let Some(resolvers) = self.resolvers() {
            program::resolve_through(&resolvers)?;
        }
        match &self.plan.covered {
            Some(Covered::Socket(path)) => hidden::cover(path)?,
            Some(Covered::Terminal(device)) => hidden::hide_terminals(*device)?,
            None => {}
        }
        self.plan.protected.iter().try_for_each(|path| program::make_read_only(path))?;
        program::forbid_terminal_input()?;
        self.plan.outside.confine()
    }

    /// Makes namespaces with a gateway, and becomes a program there.
    fn become_program(&self, command: &[OsString]) -> Outcome<ExitCode> {
        let outside = &self.plan.outside;
        outside.tell(self.name).map_err(|e| Failure::new(e.to_string()))?;
        let pending = PendingGateway::start()?;
        let entered = program::enter(self.user, outside.is_strict).and_then(|()| match self.user {
            User::Same => self.prepare_program(),
            User::Root => Ok(()),
        });
        if let Err(e) = entered {
            pending.cancel();
            eprintln!("{}: {e}", self.name);
            return Ok(ExitCode::from(NOT_STARTED));
        }
        if pending.attach()?.is_some() {
            return Ok(ExitCode::from(NOT_STARTED));
        }
        if outside.is_strict {
            detach::close_others().during("cannot close inherited descriptors")?;
        }
        // The audit is not the program's to write.
        for fd in self.inherited() {
            let _ = nix::unistd::close(fd);
        }
        let (status, failure) = detach::become_program(command);
        eprintln!("{}: {failure}", self.name);
        Ok(ExitCode::from(status))
    }
}

/// Whether this process reads the policy file for a gateway.
pub(crate) fn is_policy_reader() -> bool {
    Process::current() == Process::ReadPolicy
}

fn ready(started: &Result<Child, u8>) -> ExitCode {
    started.as_ref().map_or_else(|status| ExitCode::from(*status), |_| ExitCode::SUCCESS)
}

/// Give a network namespace a network without root
#[derive(Parser, Debug)]
#[command(name = "pasta", version = concat!(env!("CARGO_PKG_VERSION"), " (fulmar gateway)"), infer_long_args = true)]
struct Pasta {
    #[command(flatten)]
    args: Args,
}

/// The declaration of `pasta`, for its man page.
pub fn pasta_command() -> clap::Command {
    Pasta::command()
}

/// The command line of pasta, if this is one: the name of the program, or `--pasta` as the first argument.
pub fn pasta_line(line: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let mut line: Vec<OsString> = line.collect();
    let name = line.first().map(Path::new).and_then(Path::file_name);
    if name == Some(OsStr::new("pasta")) {
        return Some(line);
    }
    let is_asked_for = line.get(1).is_some_and(|first| first == "--pasta");
    is_asked_for.then(|| {
        line.remove(1);
        line
    })
}

/// `pasta`: the same options, with the messages and the exit status that its callers expect.
pub fn pasta(line: Vec<OsString>) -> ExitCode {
    let args = match Pasta::try_parse_from(line) {
        Ok(pasta) => pasta.args,
        Err(e) => return refuse("pasta", &e, advice_about),
    };
    let outcome =
        Plan::new(&args).and_then(|plan| Session { plan, name: "pasta", user: User::Root }.run());
    outcome.unwrap_or_else(|failure: Failure| {
        eprintln!("pasta: {failure}");
        ExitCode::from(PASTA_FAILED)
    })
}

/// The advice about an option that pasta's command line does not have here.
fn advice_about(option: &str) -> &'static str {
    match option {
        "--fd" | "-F" | "--one-off" | "-1" | "--socket" | "-s" | "--vhost-user" => {
            "it belongs to passt(1), which serves virtual machines; fulmar does not"
        }
        _ => "`pasta --help` lists the options",
    }
}

/// Prints an error of the options of a command. Podman looks for getopt_long(3)'s words about an unknown option.
fn refuse(command: &str, e: &clap::Error, advice: fn(&str) -> &'static str) -> ExitCode {
    if !e.use_stderr() {
        let _ = e.print();
        return ExitCode::SUCCESS;
    }
    let option = e.get(ContextKind::InvalidArg).map(|option| option.to_string());
    match (e.kind(), option) {
        (ErrorKind::UnknownArgument, Some(option)) => {
            eprintln!("{command}: unrecognized option '{option}'; {}", advice(&option));
        }
        (ErrorKind::MissingRequiredArgument, Some(missing)) => {
            eprintln!("{command}: missing {missing}; see `{command} --help`");
        }
        _ => {
            let text = e.to_string();
            let what = text.lines().next().unwrap_or_default();
            eprintln!("{command}: {}", what.strip_prefix("error: ").unwrap_or(what));
        }
    }
    ExitCode::from(PASTA_FAILED)
}

#[cfg(test)]
mod tests;
