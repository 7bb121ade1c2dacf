//! `fulmar top`: a live view of a gateway or of a running stack.
//!
//! ```text
//!   control sockets ─► sampler (thread) ─► Sample ─► App ─► screen
//!                                          keys ────►
//! ```
//!
//! The sampler may wait for a stack that does not answer; the screen and the keys do not.

mod app;
mod model;
mod screen;
mod terminal;

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::stat::Document;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event};

use crate::bounds;
use crate::failure::{During, Failure, Outcome};
use crate::format::terminal_columns;
use crate::interrupt;
use crate::stat::{self, Filter};
use app::App;
use model::{Sample, Sort};

/// How long a key is waited for before the screen is drawn again; a signal is noticed within it.
const TICK: Duration = Duration::from_millis(100);
/// Ticks of /proc/PID/stat per second: USER_HZ, 100 on every architecture that Linux supports (proc(5)).
const TICKS_PER_SECOND: u64 = 100;
/// Columns and lines of a snapshot where there is no terminal.
const SNAPSHOT: (u16, u16) = (100, 40);

/// Watch a gateway or a running stack: flows, rates, drops
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar top                       the only stack, or a list to choose from
  fulmar top $(pgrep -n nginx)     the gateway of a process
  fulmar top --sort rtt curl       by round-trip time

Keys: q quits, h lists the others.

CPU by stage is shown for programs started with FULMAR_LEDGER=64 in their
environment.

Exit status: 0, or 1 with --once if no stack is running, or 2 on an error.")]
pub struct Args {
    /// Interval between two samples
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = bounds::budget)]
    delay: Duration,
    /// Print one snapshot and exit
    #[arg(long)]
    once: bool,
    /// Column to sort by at the start
    #[arg(short, long, value_name = "COLUMN", default_value = "rate", value_parser = sort)]
    sort: Sort,
    /// Show only matching flows and sockets, as in `fulmar stat -f`
    #[arg(short, long, value_name = "FILTER", value_parser = filter)]
    filter: Option<(String, Filter)>,
    /// Process or name of a stack, as in `fulmar stat`
    #[arg(value_name = "PID|NAME")]
    stack: Option<String>,
}

fn sort(text: &str) -> Result<Sort, String> {
    let names: Vec<&str> = Sort::ALL.iter().map(|s| s.name()).collect();
    let found = Sort::ALL.into_iter().find(|s| s.name() == text);
    found.ok_or_else(|| format!("expected one of {}", names.join(", ")))
}

fn filter(text: &str) -> Result<(String, Filter), String> {
    Ok((text.to_owned(), text.parse()?))
}

/// Runs the command.
///
/// # Errors
/// No stack has that name, or the terminal failed.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let (samples, complaints) = sample(args.stack.as_deref());
    if let (Some(wanted), true) = (&args.stack, samples.is_empty()) {
        return Err(Failure::new(format!(
            "no running stack or gateway has the process id or name `{wanted}`{}; `fulmar stat` lists the running ones",
            complaints.first().map(|why| format!(" ({why})")).unwrap_or_default()
        )));
    }
    complaints.iter().for_each(|complaint| eprintln!("fulmar: {complaint}"));
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    let mut app = App::with(args.sort, args.filter.clone());
    if args.once || !is_terminal {
        if !args.once {
            eprintln!(
                "fulmar top: standard input or output is not a terminal; printing one snapshot"
            );
        }
        return once(args, app, samples);
    }
    app.update(samples);
    watch(args, &mut app)
}

/// Prints the screen as it is after one interval.
fn once(args: &Args, mut app: App, samples: Vec<Sample>) -> Outcome<ExitCode> {
    if samples.is_empty() {
        eprintln!("no stack or gateway of this user is running");
        return Ok(ExitCode::from(1));
    }
    app.update(samples);
    app.leave_list();
    thread::sleep(args.delay);
    app.update(sample(args.stack.as_deref()).0);
    let columns = terminal_columns().and_then(|c| u16::try_from(c).ok()).unwrap_or(SNAPSHOT.0);
    let mut out = io::stdout().lock();
    for _ in 0..app.count() {
        let backend = TestBackend::new(columns, SNAPSHOT.1);
        let mut terminal = Terminal::new(backend).expect("invariant: nothing of it can fail");
        terminal.draw(|frame| screen::draw(frame, &mut app)).expect("invariant: as above");
        let text = picture(terminal.backend());
        // A closed pipe (`fulmar top --once | head`) is not an error.
        if out.write_all(text.as_bytes()).is_err() {
            break;
        }
        app.next();
    }
    Ok(ExitCode::SUCCESS)
}

/// The lines of a drawn screen without the empty ones and without the keys.
fn picture(screen: &TestBackend) -> String {
    let buffer = screen.buffer();
    let columns = usize::from(buffer.area.width).max(1);
    let lines = buffer.content.chunks(columns).map(|line| {
        let text: String = line.iter().map(|cell| cell.symbol()).collect();
        text.trim_end().to_owned()
    });
    let lines: Vec<String> = lines.collect();
    let shown = lines.iter().take(lines.len().saturating_sub(1)).filter(|line| !line.is_empty());
    shown.fold(String::new(), |text, line| text + line + "\n")
}

/// The screen until the user quits, or a signal comes.
fn watch(args: &Args, app: &mut App) -> Outcome<ExitCode> {
    let stop = interrupt::stop_flag()?;
    let samples = start_sampler(args.stack.clone(), args.delay).during("cannot start a thread")?;
    terminal::end_when_gone().during("cannot start a thread")?;
    let mut screen = terminal::Screen::open().during("cannot use the terminal")?;
    let ended = loop {
        if stop.load(Ordering::SeqCst) {
            break Ok(ExitCode::from(interrupt::last_status()));
        }
        match samples.try_recv() {
            Ok((samples, complaints)) => {
                app.notice = complaints.into_iter().next().unwrap_or_else(|| {
                    "no stack or gateway of this user is running; waiting for one".to_owned()
                });
                app.update(samples);
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => break Ok(ExitCode::FAILURE),
        }
        let step = screen.draw(app).and_then(|()| next_key(app));
        match step {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break Ok(ExitCode::SUCCESS),
            Err(e) => break Err(e),
        }
    };
    drop(screen);
    ended.during("cannot use the terminal")
}

/// Waits for a key for a moment, and takes those that are there.
fn next_key(app: &mut App) -> io::Result<ControlFlow<()>> {
    let mut wait = TICK;
    while event::poll(wait)? {
        wait = Duration::ZERO;
        if let Event::Key(key) = event::read()?
            && app.key(key).is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The documents of the stacks, and the errors to show.
type Samples = (Vec<Sample>, Vec<String>);

/// Reads the documents in a thread of its own, which ends with the receiver.
fn start_sampler(stack: Option<String>, delay: Duration) -> io::Result<Receiver<Samples>> {
    let (give, samples) = sync_channel(1);
    thread::Builder::new().name("sampler".into()).spawn(move || {
        loop {
            thread::sleep(delay);
            if give.send(sample(stack.as_deref())).is_err() {
                return;
            }
        }
    })?;
    Ok(samples)
}

/// The documents of the selected stacks.
fn sample(stack: Option<&str>) -> Samples {
    let (documents, complaints) = stat::ask_all();
    let is_wanted = |d: &Document| stack.is_none_or(|wanted| stat::matches(d, wanted));
    let at = Instant::now();
    let wanted = documents.into_iter().filter(is_wanted);
    let samples = wanted.map(|document| Sample { at, cpu: cpu_of(document.pid), document });
    (samples.collect(), complaints)
}

/// CPU time of a process (proc(5), /proc/PID/stat utime and stime).
fn cpu_of(pid: u32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have spaces, utime and stime are the 12th and 13th field.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let all = ticks()? + ticks()?;
    Some(Duration::from_millis(all.saturating_mul(1000 / TICKS_PER_SECOND)))
}
