//! `--ask`: the user decides about destinations that no rule names.
//!
//! ```text
//!   the guest's SYN waits ──► policy ── a question ──► the waiting command ──► terminal, or the user's socket
//!                               ▲                              │
//!                               └────────── an answer ─────────┘
//! ```
//!
//! The gateway is contained, so that the command that waits for the program ([`wait`](super::wait)) asks for it. Between
//! both are two pipes with a JSON line for each question and each answer. Only questions that were asked have answers:
//! an unknown number is ignored, and a line that is none ends the questions.

mod socket;
mod table;
mod terminal;

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fulmar_gateway::policy::NewFlow;
use fulmar_gateway::{FdHandler, Gateway};
use serde::{Deserialize, Serialize};

use super::log::Log;
use crate::format::printable;
pub(super) use socket::Socket;
use table::{Answer, Host, Key, Known, LONGEST, Table, Why};
pub(super) use terminal::{Terminal, enter as enter_terminal};

/// Bytes of a question or an answer at most.
const MOST_LINE_BYTES: usize = 4096;

/// Who is asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Whom {
    /// The user at the terminal.
    Terminal,
    /// The program that listens at a Unix socket.
    Socket(PathBuf),
}

/// What is hidden from a program, which could reach there who is asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Covered {
    /// A Unix socket.
    Socket(PathBuf),
    /// The user's terminal, by its device number, and all ptys.
    Terminal(u64),
}

impl Whom {
    /// What is hidden from the program. `None`: this process has no terminal.
    pub(crate) fn covered(&self) -> Option<Covered> {
        match self {
            Whom::Terminal => own_terminal().map(Covered::Terminal),
            Whom::Socket(path) => Some(Covered::Socket(path.clone())),
        }
    }
}

/// The device of the terminal of this process's session (proc_pid_stat(5), `tty_nr`).
fn own_terminal() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let device: u32 = stat.rsplit(')').next()?.split_whitespace().nth(4)?.parse().ok()?;
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
    (device != 0).then(|| nix::sys::stat::makedev(major.into(), minor.into()))
}

/// The pipes of the gateway's end.
pub(super) struct Pipes {
    pub questions: File,
    pub answers: File,
}

impl Pipes {
    /// The questions of the policy, and where answers come from.
    pub(super) fn of(self, log: &Log) -> (Ask, File) {
        (Ask::new(self.questions, log), self.answers)
    }
}

/// A question as a line.
#[derive(Serialize, Deserialize, Debug)]
struct Question {
    id: u64,
    protocol: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    /// How long it waits.
    seconds: u64,
}

/// An answer as a line.
#[derive(Serialize, Deserialize, Debug)]
struct Answered {
    id: u64,
    answer: Answer,
}

impl Question {
    fn new(id: u64, key: &Key) -> Question {
        let (name, address) = match &key.host {
            Host::Name(name) => (Some(name.clone()), None),
            Host::Address(address) => (None, Some(*address)),
        };
        let port = Some(key.port).filter(|port| *port != 0);
        let protocol = key.protocol.name().to_owned();
        Question { id, protocol, name, address, port, seconds: LONGEST.as_secs() }
    }
}

fn line_of(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Bytes that come in pieces, as lines.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn next(&mut self) -> Option<Vec<u8>> {
        let end = self.0.iter().position(|byte| *byte == b'\n')?;
        Some(self.0.drain(..=end).collect())
    }

    /// Reads once. An end, or a line that is too long, is an error.
    fn read(&mut self, from: &mut impl Read) -> io::Result<()> {
        let mut piece = [0; MOST_LINE_BYTES];
        match from.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            read => self.0.extend_from_slice(&piece[..read?]),
        }
        if self.0.len() > MOST_LINE_BYTES && !self.0.contains(&b'\n') {
            return Err(io::Error::new(ErrorKind::InvalidData, "a line is too long"));
        }
        Ok(())
    }
}

struct Desk {
    table: Table,
    questions: File,
    log: Log,
}

impl Desk {
    /// Nothing is asked any more, which is said once.
    fn end(&mut self, why: &str) {
        if !self.table.has_ended() {
            self.table.end();
            let why = printable(why);
            self.log.fail(&format!("no further questions{why}: what no rule allows is refused"));
        }
    }
}

/// What is asked and answered, for the policy. Clones share it.
#[derive(Clone)]
pub(super) struct Ask(Arc<Mutex<Desk>>);

/// What the user says about a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    Allowed,
    /// And why.
    Refused(&'static str),
    /// Nothing yet.
    Nothing,
}

impl Ask {
    /// Where questions go.
    pub(super) fn new(questions: File, log: &Log) -> Ask {
        let table = Table::default();
        Ask(Arc::new(Mutex::new(Desk { table, questions, log: log.clone() })))
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes answers from the pipe while a gateway runs.
    ///
    /// # Errors
    /// The pipe cannot be watched.
    pub(super) fn watch(&self, gateway: &mut Gateway, answers: File) -> io::Result<()> {
        let (ask, mut lines) = (self.clone(), Lines::default());
        let watched = answers.as_fd().try_clone_to_owned()?;
        let mut answers = answers;
        let handler: FdHandler = Box::new(move |_, handle| {
            if let Err(e) = lines.read(&mut answers).and_then(|()| ask.take(&mut lines)) {
                let why = match e.kind() {
                    ErrorKind::UnexpectedEof => String::new(),
                    _ => format!(" (invalid answer: {e})"),
                };
                ask.desk().end(&why);
                handle.forget();
            }
            handle.decide_again();
            ControlFlow::Continue(())
        });
        gateway.on_readable(watched, handler)
    }

    fn take(&self, lines: &mut Lines) -> io::Result<()> {
        while let Some(line) = lines.next() {
            let Answered { id, answer } = serde_json::from_slice(&line)?;
            self.desk().table.answer(id, answer, Instant::now());
        }
        Ok(())
    }

    /// What the user says about a flow. A question is asked if there is none about its destination.
    pub(super) fn about(&self, flow: &NewFlow<'_>) -> Said {
        let (key, mut desk) = (Key::of(flow), self.desk());
        match desk.table.ask(&key, Instant::now()) {
            Known::Allowed => Said::Allowed,
            Known::Refused(why) => Said::Refused(why.sentence()),
            Known::Open(None) => Said::Nothing,
            Known::Open(Some(id)) => {
                let line = line_of(&Question::new(id, &key));
                // A pipe takes a line of this length whole, or not at all (pipe(7), PIPE_BUF).
                match desk.questions.write(&line) {
                    Ok(_) => Said::Nothing,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {
                        desk.table.withdraw(id);
                        Said::Refused(Why::Unread.sentence())
                    }
                    Err(e) => {
                        desk.end(&format!(" ({e})"));
                        Said::Refused(Why::Ended.sentence())
                    }
                }
            }
        }
    }

    /// Whether the user has allowed a flow that has begun. Nothing is asked.
    pub(super) fn was_allowed(&self, flow: &NewFlow<'_>) -> bool {
        self.desk().table.was_allowed(&Key::of(flow))
    }
}

#[cfg(test)]
impl Ask {
    /// Questions that no one reads.
    pub(super) fn unread() -> Ask {
        let questions = File::options().write(true).open("/dev/null").unwrap();
        Ask::new(questions, &Log::to_stderr("t", true))
    }

    /// Takes a line of an answer.
    pub(super) fn hear(&self, line: &str) {
        self.take(&mut Lines(format!("{line}\n").into_bytes())).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::policy::Protocol;

    #[test]
    fn lines_are_whole_however_they_are_cut_and_bounded() {
        let text = b"one\ntwo\n\nthree\n";
        for each in 1..=text.len() {
            let (mut lines, mut found) = (Lines::default(), Vec::new());
            for mut piece in text.chunks(each) {
                lines.read(&mut piece).unwrap();
                found.extend(std::iter::from_fn(|| lines.next()));
            }
            assert_eq!(found.concat(), text, "{each}");
            assert_eq!(found.len(), 4);
        }
        let mut lines = Lines::default();
        assert!(lines.read(&mut &b""[..]).is_err(), "the end");
        lines.read(&mut &[b'x'; MOST_LINE_BYTES][..]).unwrap();
        assert!(lines.read(&mut &b"x"[..]).is_err(), "too long");
    }

    #[test]
    fn a_question_is_one_line_whatever_the_name_is() {
        let host = Host::Name("a\n\u{1b}[2J\".example".to_owned());
        let line = line_of(&Question::new(7, &Key { protocol: Protocol::Icmp, host, port: 0 }));
        assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
        let back: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(back["name"], "a\n\u{1b}[2J\".example");
        assert!(back.get("port").is_none() && back.get("address").is_none());
    }

    #[test]
    fn an_answer_that_is_none_is_an_error() {
        let ask = Ask::unread();
        for line in
            ["", "{}", "{\"id\":1}", "{\"id\":-1,\"answer\":\"no\"}", "[1,\"no\"] x", "\u{0}"]
        {
            let mut lines = Lines(format!("{line}\n").into_bytes());
            assert!(ask.take(&mut lines).is_err(), "{line}");
        }
        ask.hear("{\"id\":18446744073709551615,\"answer\":\"always\",\"by\":\"me\"}");
    }
}
