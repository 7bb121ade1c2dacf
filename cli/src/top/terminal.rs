//! The terminal while `fulmar top` has it: raw, and on its alternate screen. It gets back what it was at the end, on
//! an error, on a panic, and when a signal ends the command.

use std::io::{self, Stdout, Write};
use std::os::fd::AsFd;
use std::{panic, thread};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::app::App;
use super::screen;
use crate::interrupt;

/// The terminal, until it is dropped.
pub struct Screen(Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    /// Takes the terminal. A panic gives it back first, so that its message can be read.
    ///
    /// # Errors
    /// Standard output is not a terminal, or its mode cannot be set.
    pub fn open() -> io::Result<Screen> {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |what| {
            give_back();
            report(what);
        }));
        enable_raw_mode()?;
        let opened = execute!(io::stdout(), EnterAlternateScreen)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match opened {
            Ok(terminal) => Ok(Screen(terminal)),
            Err(e) => {
                give_back();
                Err(e)
            }
        }
    }

    /// Draws the state; only what has changed is written.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn draw(&mut self, app: &mut App) -> io::Result<()> {
        self.0.draw(|frame| screen::draw(frame, app)).map(drop)
    }
}

/// Ends the process once the terminal of standard input is gone, whether or not SIGHUP says so (it comes to the
/// processes of the terminal's session alone). A thread of its own waits for that, since crossterm reads a terminal
/// that is gone again and again without end.
///
/// # Errors
/// No thread can be started.
pub fn end_when_gone() -> io::Result<()> {
    let wait = || {
        let stdin = io::stdin();
        // POLLHUP and POLLERR are reported unasked (poll(2)).
        let mut terminal = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
        while poll(&mut terminal, PollTimeout::NONE) != Ok(1) {}
        std::process::exit(interrupt::status_of(Signal::SIGHUP).into());
    };
    thread::Builder::new().name("terminal".into()).spawn(wait).map(drop)
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// A terminal that is gone needs nothing back.
fn give_back() {
    let mut out = io::stdout();
    let _ = execute!(out, LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    use nix::pty::openpty;
    use nix::sys::termios::tcgetattr;
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    const INSIDE: &str = "FULMAR_TEST_TERMINAL";
    const LEAVE_ALTERNATE_SCREEN: &str = "\x1b[?1049l";

    #[test]
    fn a_terminal_that_is_gone_ends_the_process() {
        let name = "top::terminal::tests::a_terminal_that_is_gone_ends_the_process";
        if std::env::var_os(INSIDE).is_some() {
            end_when_gone().unwrap();
            thread::park();
        }
        let pty = openpty(None, None).unwrap();
        fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
        // The terminal of no session: no signal comes.
        test.stdin(Stdio::from(pty.slave)).stdout(Stdio::null());
        let mut child = test.spawn().unwrap();
        drop((test, pty.master));
        assert_eq!(child.wait().unwrap().code(), Some(129));
    }

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_is_reported() {
        let name = "top::terminal::tests::a_panic_gives_the_terminal_back_before_it_is_reported";
        if std::env::var_os(INSIDE).is_some() {
            let _screen = Screen::open().unwrap();
            panic!("amid the picture");
        }
        let pty = openpty(None, None).unwrap();
        let before = tcgetattr(&pty.slave).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
        let mut child = test.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        drop(test);
        let reader = std::thread::spawn(move || {
            let (mut master, mut all, mut some) = (File::from(pty.master), Vec::new(), [0; 4096]);
            // EIO: the other end is closed.
            while let Ok(n @ 1..) = master.read(&mut some) {
                all.extend_from_slice(&some[..n]);
            }
            String::from_utf8_lossy(&all).into_owned()
        });
        assert!(!child.wait().unwrap().success());
        let after = tcgetattr(&pty.slave).unwrap();
        assert_eq!(after, before, "raw mode has ended");
        drop(pty.slave);
        let said = reader.join().unwrap();
        let left = said.find(LEAVE_ALTERNATE_SCREEN).expect("the alternate screen is left");
        let reported = said.find("amid the picture").expect("the message is seen");
        assert!(left < reported, "{said:?}");
    }
}
