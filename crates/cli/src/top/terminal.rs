//! The terminal while `fulmar top` has it: raw, and on its alternate screen. It gets back what it was at the end, on
//! an error, on a panic, and when a signal ends the command.

use std::io::{self, Stdout, Write};
use std::panic;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

use super::app::App;
use super::screen;

/// The terminal, until it is dropped.
pub struct Screen(Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    /// Takes the terminal. A panic gives it back first, so that its message can be read.
    ///
    /// # Errors
    /// Standard output is no terminal that can be set.
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
