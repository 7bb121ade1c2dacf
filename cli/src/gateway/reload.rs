//! A new policy for a gateway that runs. The gateway can open no file, so another process reads the policy when asked.
//!
//! ```text
//!   SIGHUP ──► the gateway ── a byte ──► this process: reads the file
//!                   ▲                          │
//!                   └── the text, or an error ─┘
//! ```
//!
//! The file is opened before the program starts, and only this file is read again: the program, which has the same user,
//! can put another one in its place, but not write to it. The
//! gateway keeps its rules if the file has an error. The reader ends with the gateway, whose end closes the pipe.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use fulmar_gateway::rules::file::MOST_BYTES;
use fulmar_gateway::{FdHandler, Gateway, Handle, contain};
use nix::sys::signal::{SigSet, Signal};

use super::detach;
use super::log::Log;
use super::plan::Plan;
use crate::failure::{During, Failure, Outcome};
use crate::policy;
use crate::run::{self, Wanted};

/// Signals that a terminal or a service manager sends to all processes: this one ends with the gateway.
const IGNORED: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
/// A message: whether it is a text or an error, its length, its bytes.
const HEADER_BYTES: usize = 5;
/// The byte that precedes all messages: the file is open.
const OPENED: u8 = 2;
const TEXT: u8 = 0;
const ERROR: u8 = 1;
/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;

/// Reads the file for each byte of standard input, to standard output, until the gateway is gone.
///
/// # Errors
/// A sentence: the process could not be contained.
pub fn read_on_request(path: &Path) -> Outcome<ExitCode> {
    let _ = nix::unistd::setsid();
    let _ = IGNORED.into_iter().collect::<SigSet>().thread_block();
    let _ = nix::sys::prctl::set_dumpable(false);
    let file = File::open(path).map_err(|e| Failure::file("cannot read the policy", path, &e))?;
    contain::contain_reader().map_err(|e| Failure::new(e.to_string()))?;
    let (mut asked, mut out) = (io::stdin(), io::stdout());
    out.write_all(&[OPENED]).and_then(|()| out.flush()).during("cannot answer the gateway")?;
    while asked.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {
        let (kind, text) = match policy::read_again(&file, path) {
            Ok(text) => (TEXT, text),
            Err(failure) => (ERROR, failure.to_string()),
        };
        let length = u32::try_from(text.len()).unwrap_or(0).to_le_bytes();
        let message = [&[kind][..], &length, text.as_bytes()].concat();
        if out.write_all(&message).and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The process that reads.
pub struct Reader {
    ask: File,
    answers: OwnedFd,
}

/// Starts the reader. `None`: the plan has no policy file, or the reader could not be started.
pub fn start(plan: &Plan, log: &Log) -> Option<Reader> {
    plan.reload.as_ref()?;
    let failed = |e: &Failure| log.fail(&format!("cannot read a new policy later: {e}"));
    let (ask, answers) = detach::start_policy_reader().inspect_err(failed).ok()?;
    let mut answers = File::from(answers);
    // Before the program starts, which could replace the file.
    let opened = answers.read_exact(&mut [OPENED]).during("it has not opened the file");
    opened.inspect_err(failed).ok()?;
    Some(Reader { ask: File::from(ask), answers: answers.into() })
}

impl Reader {
    /// Lets the gateway take over each policy that is read. Returns what asks for one.
    ///
    /// # Errors
    /// The descriptor cannot be watched.
    pub fn watch(self, gateway: &mut Gateway, plan: &Plan, log: &Log) -> io::Result<File> {
        let Reader { ask, answers } = self;
        // A reader that is busy reads once more for what is asked meanwhile.
        nix::fcntl::fcntl(&ask, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
        let mut pipe = File::from(answers.as_fd().try_clone_to_owned()?);
        let (plan, log, mut messages) = (plan.clone(), log.clone(), Messages::default());
        let mut last = plan.reload.as_ref().map_or_else(|| "".into(), |(_, text)| text.clone());
        let handler: FdHandler = Box::new(move |_, handle| {
            match messages.read(&mut pipe) {
                Ok(None) => {}
                Ok(Some(said)) => {
                    match said.and_then(|text| apply(&text, &mut last, &plan, handle)) {
                        Ok(true) => log.fail("the policy was read again"),
                        Ok(false) => log.fail("the policy is the same as before"),
                        Err(e) => log.fail(&format!("the policy stays as it is: {e}")),
                    }
                }
                Err(e) => {
                    log.fail(&format!("cannot read a new policy any more: {e}"));
                    handle.forget();
                }
            }
            ControlFlow::Continue(())
        });
        gateway.on_readable(answers, handler)?;
        Ok(ask)
    }
}

/// The reader's bytes that are not a whole message yet.
#[derive(Default)]
struct Messages {
    bytes: Vec<u8>,
}

impl Messages {
    /// Reads once. `Some`: the newest whole message, which makes those before it void.
    fn read(&mut self, pipe: &mut impl Read) -> io::Result<Option<Outcome<String>>> {
        let mut buffer = [0; READ_BYTES];
        let bytes = pipe.read(&mut buffer)?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.bytes.extend_from_slice(&buffer[..bytes]);
        let mut newest = None;
        while let Some(message) = self.next()? {
            newest = Some(message);
        }
        Ok(newest)
    }

    /// Takes the first message if it is whole.
    fn next(&mut self) -> io::Result<Option<Outcome<String>>> {
        let Some(([kind, a, b, c, d], rest)) = self.bytes.split_first_chunk::<HEADER_BYTES>()
        else {
            return Ok(None);
        };
        let (kind, length) = (*kind, u32::from_le_bytes([*a, *b, *c, *d]) as usize);
        // The reader refuses a longer file; it is a process of its own all the same.
        if length > MOST_BYTES + READ_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(text) = rest.get(..length) else { return Ok(None) };
        let text = String::from_utf8_lossy(text).into_owned();
        self.bytes.drain(..HEADER_BYTES + length);
        Ok(Some(if kind == TEXT { Ok(text) } else { Err(Failure::new(text)) }))
    }
}

/// Takes over the policy of a text that differs from the `last` one. Returns whether it does.
fn apply(text: &str, last: &mut Arc<str>, plan: &Plan, handle: &mut Handle<'_>) -> Outcome<bool> {
    // The program may send the signal, too: the use of limits would begin anew.
    let Some((args, _)) = plan.reload.as_ref().filter(|_| **last != *text) else {
        return Ok(false);
    };
    let wanted = run::wanted_by(args, text)?;
    check(&wanted, plan)?;
    *last = text.into();
    handle.set_rules(wanted.rules);
    Ok(true)
}

/// Checks that only rules differ. Nothing else can change while the program has its addresses of names.
fn check(wanted: &Wanted, plan: &Plan) -> Outcome {
    let what = match plan.names {
        Some(_) if !wanted.has_given_names() && wanted.rules.have_names() => "`names` is different",
        None if wanted.has_given_names() => "its rules name the first name",
        _ if wanted.encrypted_hello != plan.encrypted_hello => {
            "`encrypted-client-hello` is different"
        }
        _ if wanted.audit != plan.audit => "`audit` is different",
        _ if wanted.proxy != plan.proxy => "`proxy` is different",
        _ => return Ok(()),
    };
    Err(Failure::new(format!("{what}; start the program again")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, text: &str) -> Vec<u8> {
        [&[kind][..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn the_newest_of_several_messages_counts() {
        let all = [message(TEXT, "old"), message(ERROR, "no such file"), message(TEXT, "new")];
        let mut pipe = &[all.concat(), vec![TEXT, 9]].concat()[..];
        let mut messages = Messages::default();
        assert_eq!(messages.read(&mut pipe).unwrap().unwrap().unwrap(), "new");
        assert!(messages.read(&mut &[0, 0, 0][..]).unwrap().is_none());
        assert_eq!(messages.bytes, [TEXT, 9, 0, 0, 0]);
    }

    #[test]
    fn a_message_is_whole_however_it_is_cut() {
        let all = [message(TEXT, "default = \"deny\""), message(ERROR, "no such file")].concat();
        for each in 1..all.len() {
            let mut messages = Messages::default();
            let read = all.chunks(each).filter_map(|mut piece| messages.read(&mut piece).unwrap());
            let said: Vec<_> = read.map(|m| m.map_err(|e| e.to_string())).collect();
            let both = [Ok("default = \"deny\"".to_owned()), Err("no such file".to_owned())];
            // A piece may hold the end of the first and the whole of the second.
            let expected = if said.len() == 1 { &both[1..] } else { &both[..] };
            assert_eq!(said, expected, "{each}");
        }
        let mut messages = Messages::default();
        assert!(messages.read(&mut &[0, 255, 255, 255, 255][..]).is_err(), "too long");
        assert!(messages.read(&mut &[][..]).is_err(), "the end");
    }
}
