//! Questions at the terminal. The program has a terminal of its own (a pty), and the command that waits for it copies
//! between both:
//!
//! ```text
//!   the user's terminal, raw ◄──► this command ◄──► pty ◄──► the program: its standard streams, its /dev/tty
//!                                     └── a question: the program's output waits, and what is typed is the answer
//! ```
//!
//! So the program cannot read the answer, cannot draw over the question, and cannot make the terminal answer: what it
//! writes waits until the question is over. An answer is a whole word, since the user may be typing for the program when
//! the question appears. Ctrl-C refuses, and reaches the program, too.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fulmar_gateway::policy::Protocol;
use nix::fcntl::{FcntlArg, OFlag};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

use super::table::Answer;
use super::{Answered, Lines, Question, line_of};
use crate::failure::{During, Failure, Outcome};
use crate::format::printable;

const TTY: &str = "/dev/tty";
/// Bytes that are copied at once, and that wait for a program that does not read.
const MOST_BYTES: usize = 4096;
/// Characters of an answer at most.
const MOST_TYPED: usize = 32;
/// How long the last output of a program is waited for: a process that it has left may have the pty still.
const LAST_OUTPUT_MS: u16 = 50;
const HELP: &str = "once, always, no, never; stop: no more questions";
/// Makes text visible again, whatever the program has left behind (sequences of xterm, Linux and Kitty), in the last line.
const VISIBLE: &str = concat!(
    // The rest of a sequence or a string (CAN, ST), VT52 mode, a held frame, the printer.
    "\x18\x1b\\\x1b<\x1b[?2026l\x1b[4i",
    // Soft reset; margins to the left and right, a scroll region, addresses relative to it.
    "\x1b[!p\x1b[?69l\x1b[r\x1b[?6l",
    // Attributes, character sets, insertion, wrapping, the cursor.
    "\x1b[0m\x1b(B\x0f\x1b[4l\x1b[?7h\x1b[?25h",
    // The colours of the palette, of text and of the background; images.
    "\x1b]104\x1b\\\x1b]110\x1b\\\x1b]111\x1b\\\x1b]R\x1b\\\x1b_Ga=d,q=2\x1b\\",
    "\x1b[999;1H",
);
/// Keys count as an answer so long after a question is shown, and so long after the last key that came before: they were
/// meant for the program.
const UNSEEN: Duration = Duration::from_millis(700);
const QUIET: Duration = Duration::from_millis(300);
/// Characters of a name that are shown: its end tells who has it.
const MOST_SHOWN: usize = 60;
const CTRL_C: u8 = 3;
const CTRL_D: u8 = 4;
const CTRL_U: u8 = 21;
const CTRL_BACKSLASH: u8 = 28;

/// The user's terminal, which gets its modes back at the end.
struct Outer {
    tty: File,
    before: Termios,
}

impl Drop for Outer {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _ = tcsetattr(&self.tty, OptionalActions::Drain, &self.before);
    }
}

/// A question that the user sees.
struct Asked {
    id: u64,
    until: Instant,
    /// When keys count.
    from: Instant,
    typed: String,
}

/// Both terminals, and the pipes of the gateway.
pub(in crate::gateway) struct Terminal {
    /// `None`: it has hung up.
    outer: Option<Outer>,
    /// `None`: the program's terminal has hung up, too.
    pty: Option<File>,
    /// Keeps the pty open while the program has not.
    program_end: Option<OwnedFd>,
    path: PathBuf,
    questions: File,
    /// `None`: no more questions.
    answers: Option<File>,
    lines: Lines,
    waiting: VecDeque<(Question, Instant)>,
    asked: Option<Asked>,
    /// Typed, and not taken by the program yet.
    input: Vec<u8>,
}

impl Terminal {
    /// Opens the user's terminal, and makes that of the program like it.
    ///
    /// # Errors
    /// A sentence: there is no terminal.
    pub(in crate::gateway) fn open(questions: File, answers: File) -> Outcome<Terminal> {
        let tty = OpenOptions::new().read(true).write(true).open(TTY).map_err(|_| {
            Failure::new("cannot ask: this command has no terminal; use --ask-socket PATH instead")
        })?;
        check_output()?;
        Terminal::over(tty, questions, answers)
            .map_err(|e| Failure::io("cannot make a terminal for the program", &e))
    }

    fn over(tty: File, questions: File, answers: File) -> io::Result<Terminal> {
        let before = tcgetattr(&tty)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let pty = openpt(flags)?;
        grantpt(&pty)?;
        unlockpt(&pty)?;
        let path = PathBuf::from(OsStr::from_bytes(ptsname(&pty, Vec::new())?.as_bytes()));
        let program_end = OpenOptions::new().read(true).write(true).open(&path)?;
        tcsetattr(&program_end, OptionalActions::Now, &before)?;
        tcsetwinsize(&pty, tcgetwinsize(&tty)?)?;
        let pty = File::from(pty);
        nix::fcntl::fcntl(&pty, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&tty, OptionalActions::Drain, &raw)?;
        Ok(Terminal {
            outer: Some(Outer { tty, before }),
            pty: Some(pty),
            program_end: Some(program_end.into()),
            path,
            questions,
            answers: Some(answers),
            lines: Lines::default(),
            waiting: VecDeque::new(),
            asked: None,
            input: Vec::new(),
        })
    }

    /// The path of the program's terminal.
    pub(in crate::gateway) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the program's terminal the size of the user's.
    pub(in crate::gateway) fn resize(&self) {
        let Some(outer) = &self.outer else { return };
        if let (Ok(size), Some(pty)) = (tcgetwinsize(&outer.tty), &self.pty) {
            let _ = tcsetwinsize(pty, size);
        }
    }

    /// Copies and asks until another descriptor is readable.
    ///
    /// # Errors
    /// Those of poll(2).
    pub(in crate::gateway) fn serve_until(&mut self, other: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            self.next_question();
            let readable = |is_wanted: bool| match is_wanted {
                true => PollFlags::POLLIN,
                false => PollFlags::empty(),
            };
            let mut of_pty = readable(self.asked.is_none());
            of_pty.set(PollFlags::POLLOUT, !self.input.is_empty());
            // An answer is read even if the program does not read.
            let has_space = readable(self.asked.is_some() || self.input.len() < MOST_BYTES);
            let is_asking = self.answers.is_some();
            let questions = is_asking.then(|| PollFd::new(self.questions.as_fd(), readable(true)));
            let pty = self.pty.as_ref().map(|pty| PollFd::new(pty.as_fd(), of_pty));
            let outer = self.outer.as_ref().map(|o| PollFd::new(o.tty.as_fd(), has_space));
            let wanted = [Some(PollFd::new(other, readable(true))), outer, pty, questions];
            let mut ready: Vec<PollFd<'_>> = wanted.iter().flatten().cloned().collect();
            match poll(&mut ready, self.time_left()) {
                Err(nix::Error::EINTR) => continue,
                polled => polled?,
            };
            let mut came = ready.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
            let [is_other, typed, of_pty, asked] =
                wanted.map(|one| one.and_then(|_| came.next()).unwrap_or(PollFlags::empty()));
            // Before new questions: earlier keys are not their answers.
            if !typed.is_empty() {
                self.take_typed();
            }
            if of_pty.contains(PollFlags::POLLOUT) {
                self.pass_input();
            }
            if of_pty.contains(PollFlags::POLLIN) && self.asked.is_none() {
                self.pass_output();
            }
            if !asked.is_empty() {
                self.take_questions();
            }
            if !is_other.is_empty() {
                return Ok(());
            }
        }
    }

    /// Until the time of the question is over.
    fn time_left(&self) -> PollTimeout {
        let Some(asked) = &self.asked else { return PollTimeout::NONE };
        let left = asked.until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        PollTimeout::from(u16::try_from(left.as_millis()).unwrap_or(u16::MAX))
    }

    /// Copies what the program has written at last, and gives the terminal back. Returns the pipe of the answers.
    pub(in crate::gateway) fn finish(mut self) -> Option<File> {
        if self.asked.take().is_some() {
            self.say("\r\n");
        }
        drop(self.program_end.take());
        while let Some(pty) = &self.pty {
            let mut ready = [PollFd::new(pty.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, PollTimeout::from(LAST_OUTPUT_MS)) {
                Err(nix::Error::EINTR) => {}
                Ok(1..) if self.pass_output() => {}
                _ => break,
            }
        }
        self.answers
    }

    fn say(&mut self, text: &str) {
        self.write(text.as_bytes());
    }

    fn write(&mut self, bytes: &[u8]) {
        let written = self.outer.as_mut().map(|outer| outer.tty.write_all(bytes));
        if written.is_some_and(|written| written.is_err()) {
            self.hang_up();
        }
    }

    /// The user's terminal is gone, and so is the program's.
    fn hang_up(&mut self) {
        (self.outer, self.pty) = (None, None);
        self.stop();
    }

    /// No further questions.
    fn stop(&mut self) {
        self.answers = None;
        self.waiting.clear();
        self.asked = None;
    }

    /// Copies output of the program. False: there is none.
    fn pass_output(&mut self) -> bool {
        let Some(pty) = &mut self.pty else { return false };
        let mut bytes = [0; MOST_BYTES];
        match pty.read(&mut bytes) {
            Ok(0) => false,
            Ok(n) => {
                self.write(&bytes[..n]);
                true
            }
            Err(e) => matches!(e.kind(), ErrorKind::Interrupted),
        }
    }

    fn pass_input(&mut self) {
        if let Some(Ok(n)) = self.pty.as_mut().map(|pty| pty.write(&self.input)) {
            self.input.drain(..n);
        }
    }

    fn take_typed(&mut self) {
        let Some(outer) = &mut self.outer else { return };
        let mut bytes = [0; MOST_BYTES];
        match outer.tty.read(&mut bytes) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => self.hang_up(),
            Ok(n) => bytes[..n].iter().for_each(|byte| self.type_one(*byte)),
        }
        self.pass_input();
    }

    fn type_one(&mut self, byte: u8) {
        let Some(asked) = &mut self.asked else { return self.input.push(byte) };
        let now = Instant::now();
        if now < asked.from && !matches!(byte, CTRL_C | CTRL_BACKSLASH | CTRL_D) {
            asked.from = asked.from.max(now + QUIET);
            return;
        }
        match byte {
            b'\r' | b'\n' => self.take_word(),
            CTRL_C | CTRL_BACKSLASH => {
                self.input.push(byte);
                // Before the program can end because of the refusal.
                self.pass_input();
                self.answer(Answer::No);
            }
            CTRL_D => self.answer(Answer::No),
            8 | 127 if asked.typed.pop().is_some() => self.say("\x08 \x08"),
            CTRL_U => {
                let erased = "\x08 \x08".repeat(asked.typed.len());
                asked.typed.clear();
                self.say(&erased);
            }
            b' '..=b'~' if asked.typed.len() < MOST_TYPED => {
                asked.typed.push(byte as char);
                self.write(&[byte]);
            }
            _ => {}
        }
    }

    fn take_word(&mut self) {
        let Some(asked) = &mut self.asked else { return };
        let word = std::mem::take(&mut asked.typed).to_ascii_lowercase();
        match word.trim() {
            "once" => self.answer(Answer::Once),
            "always" => self.answer(Answer::Always),
            "no" => self.answer(Answer::No),
            "never" => self.answer(Answer::Never),
            "stop" => {
                self.stop();
                self.say("\r\n");
            }
            _ => self.say(&format!("\r\ntype one of {HELP}: ")),
        }
    }

    fn answer(&mut self, answer: Answer) {
        let Some(Asked { id, .. }) = self.asked.take() else { return };
        let line = line_of(&Answered { id, answer });
        if self.answers.as_mut().is_some_and(|to| to.write_all(&line).is_err()) {
            self.stop();
        }
        self.say("\r\n");
    }

    fn take_questions(&mut self) {
        if self.lines.read(&mut self.questions).is_err() {
            return self.stop();
        }
        while let Some(line) = self.lines.next() {
            // The gateway is hostile once its guest has taken it over.
            let Ok(question) = serde_json::from_slice::<Question>(&line) else {
                return self.stop();
            };
            let seconds = question.seconds.min(super::LONGEST.as_secs());
            let until = Instant::now() + Duration::from_secs(seconds);
            if self.waiting.len() < super::table::MOST_OPEN {
                self.waiting.push_back((question, until));
            }
        }
    }

    /// Ends a question whose time is over, and asks the next one.
    fn next_question(&mut self) {
        let now = Instant::now();
        if self.asked.as_ref().is_some_and(|asked| asked.until <= now) {
            self.asked = None;
            self.say("\r\nno answer in time: refused\r\n");
        }
        while self.asked.is_none() {
            let Some((question, until)) = self.waiting.pop_front() else { return };
            if until > now {
                let what = what(&question);
                self.say(&format!("{VISIBLE}\r\nfulmar run: reach {what}? [{HELP}] "));
                let (id, from) = (question.id, Instant::now() + UNSEEN);
                self.asked = Some(Asked { id, until, from, typed: String::new() });
            }
        }
    }
}

/// The destination of a question, as a user writes it.
fn what(question: &Question) -> String {
    let Question { protocol, name, address, port, .. } = question;
    let address = address.map(|address| match port {
        Some(_) if address.is_ipv6() => format!("[{address}]"),
        _ => address.to_string(),
    });
    let host = name.as_deref().map(shown).or(address).unwrap_or_default();
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    match protocol.as_str() {
        is if is == Protocol::Tcp.name() => format!("{host}{port}"),
        is if is == Protocol::Icmp.name() => format!("{host} (ping)"),
        other => format!("{host}{port} ({})", printable(other).to_uppercase()),
    }
}

/// A name that fits into a line.
fn shown(name: &str) -> String {
    let name = printable(name);
    let length = name.chars().count();
    if length <= MOST_SHOWN {
        return name;
    }
    format!("...{}", name.chars().skip(length - MOST_SHOWN + 3).collect::<String>())
}

/// Checks that the program's output cannot reach the user's terminal but by its own.
fn check_output() -> Outcome {
    let streams: [(&str, &dyn AsFd); 2] =
        [("standard output", &io::stdout()), ("standard error", &io::stderr())];
    for (name, stream) in streams {
        let about = fstat(stream.as_fd()).map_err(io::Error::from);
        let kind = about.during("cannot look at a standard stream")?.st_mode;
        let kind = SFlag::from_bits_truncate(kind) & SFlag::S_IFMT;
        if kind == SFlag::S_IFIFO || kind == SFlag::S_IFSOCK {
            return Err(Failure::new(format!(
                "cannot ask: {name} is a pipe, by which the program could draw over a question; redirect it to a file, \
                 or use --ask-socket PATH"
            )));
        }
    }
    Ok(())
}

/// Makes a pty the terminal of this process, which is to become the program, in a session of its own.
///
/// # Errors
/// The step that failed.
pub(in crate::gateway) fn enter(path: &Path) -> io::Result<()> {
    nix::unistd::setsid()?;
    // The first terminal that the leader of a session opens is that of the session.
    let pty = OpenOptions::new().read(true).write(true).open(path)?;
    if io::stdin().is_terminal() {
        nix::unistd::dup2_stdin(&pty)?;
    }
    if io::stdout().is_terminal() {
        nix::unistd::dup2_stdout(&pty)?;
    }
    if io::stderr().is_terminal() {
        nix::unistd::dup2_stderr(&pty)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_shows_its_end() {
        assert_eq!(shown("registry.npmjs.org"), "registry.npmjs.org");
        let long = format!("registry.npmjs.org.{}.evil.example", "_".repeat(60));
        let seen = shown(&long);
        assert!(seen.starts_with("...") && seen.ends_with(".evil.example"), "{seen}");
        assert_eq!(seen.len(), MOST_SHOWN);
    }
}
