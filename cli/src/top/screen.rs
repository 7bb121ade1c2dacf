//! The screen of `fulmar top`: from 80 columns and 24 lines it shows all; below it leaves out what does not fit.
//!
//! ```text
//!   title, uptime, position
//!   rates, flows, CPU
//!   drops, retransmissions, buffers
//!   flows or sockets, sorted             as many as fit
//!   drops and refusals │ CPU by stage    below, if there are any
//!   keys
//! ```
//!
//! Where there are several stacks and gateways a list of them comes first ([`choice`]).

mod choice;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Clear, Paragraph, Row as TableRow, Table, Wrap};

use super::app::{App, Mode};
use super::model::{Model, Row, Sort};
use crate::format;

/// Smaller terminals show a message instead.
const LEAST: (u16, u16) = (40, 8);
/// Lines of the lower part, its title included.
const LOWER_LINES: u16 = 7;
/// A screen of fewer lines has no lower part.
const LEAST_FOR_LOWER: u16 = 18;

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const HEAD: Style = Style::new().add_modifier(Modifier::REVERSED);
const ALARM: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!(
            "terminal too small: {}x{}, need {}x{}",
            area.width, area.height, LEAST.0, LEAST.1
        );
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    if app.mode == Mode::List {
        return choice::draw(frame, app);
    }
    let has_entries = |m: &Model| !m.drops.is_empty() || !m.stages.is_empty();
    let has_lower = area.height >= LEAST_FOR_LOWER && app.model().is_some_and(has_entries);
    let lower = if has_lower { LOWER_LINES.max(area.height / 4) } else { 0 };
    let parts = Layout::vertical([
        Constraint::Length(3),
        Constraint::Min(2),
        Constraint::Length(lower),
        Constraint::Length(1),
    ]);
    let [head, rows, below, foot] = parts.areas(area);
    frame.render_widget(Paragraph::new(heading(app, usize::from(area.width))), head);
    match &app.mode {
        Mode::Details(identity) => draw_details(frame, app, identity, rows),
        _ => draw_rows(frame, app, rows),
    }
    if has_lower {
        draw_lower(frame, app, below);
    }
    frame.render_widget(Paragraph::new(footer(app)), foot);
    if app.mode == Mode::Help {
        draw_help(frame, area);
    }
}

/// A line with a part at its left and one at its right end.
fn spread(left: String, right: String, columns: usize) -> Line<'static> {
    let used = left.chars().count() + right.chars().count();
    if used + 1 > columns {
        return Line::from(left);
    }
    let gap = " ".repeat(columns - used);
    Line::from(left + &gap + &right)
}

fn heading(app: &App, columns: usize) -> Vec<Line<'static>> {
    let Some(model) = app.model() else {
        return vec![Line::styled("fulmar top", BOLD), Line::from(app.notice.clone())];
    };
    let mut place = model.uptime.map(|up| format!("up {}", span(up))).unwrap_or_default();
    if app.count() > 1 {
        place += &format!("  {} of {}", app.position() + 1, app.count());
    }
    let title = spread(format!("fulmar top: {}", model.title), place, columns);
    let second = format!(
        "out {}  in {}  {} packets/s  {}",
        bytes_rate(model.out()),
        bytes_rate(model.back()),
        model.packets.map_or("-".into(), short),
        tally(model),
    );
    let cpu = model.cpu.map_or(String::new(), |cpu| format!("CPU {:.1} %", cpu * 100.0));
    let third = format!(
        "dropped {}/s  resent {}  buffers {} of {}",
        short(model.drop_rate()),
        bytes_rate(model.again),
        format::bytes(model.buffers[0]),
        format::bytes(model.buffers[1]),
    );
    let status = app.status();
    vec![
        title.style(BOLD),
        spread(second, cpu, columns),
        spread(third, status.clone(), columns).style(if status.is_empty() {
            Style::new()
        } else {
            ALARM
        }),
    ]
}

fn tally(model: &Model) -> String {
    let what = if model.is_gateway { "flows" } else { "sockets" };
    let parts: Vec<String> = model.tally.iter().map(|(name, n)| format!("{n} {name}")).collect();
    match parts.is_empty() {
        true => format!("no {what}"),
        false => format!("{what}: {}", parts.join(", ")),
    }
}

/// A column: its head, its width, what is in it of a row, and whether it is written to the right.
struct Column<R> {
    head: &'static str,
    width: u16,
    sort: Option<Sort>,
    is_number: bool,
    text: fn(&R, usize) -> String,
}

/// Columns of an address at least: an IPv4 address without its port.
const LEAST_END: u16 = 15;

/// The columns that fit. Both addresses are as wide as the longest if the rest allows, which they share.
fn columns(width: u16, is_gateway: bool, longest: [u16; 2]) -> Vec<Column<Row>> {
    let ends = if is_gateway { ["GUEST", "HOST"] } else { ["LOCAL", "PEER"] };
    type Text = fn(&Row, usize) -> String;
    let number =
        |head, width, sort, text: Text| Column { head, width, sort, is_number: true, text };
    let word = |head, width, sort, text: Text| Column { head, width, sort, is_number: false, text };
    let mut all = vec![
        word("NET", 4, None, |r, _| r.protocol.clone()),
        word("STATE", 6, None, |r, _| r.state.clone()),
        word(ends[0], LEAST_END, Some(Sort::Near), |r, width| shortened(&r.near, width)),
        word(ends[1], LEAST_END, Some(Sort::Far), |r, width| shortened(&r.far, width)),
        number("OUT/s", 6, Some(Sort::Rate), |r, _| per_second(r.out)),
        number("IN/s", 6, Some(Sort::Rate), |r, _| per_second(r.back)),
        number("RTT", 6, Some(Sort::Rtt), |r, _| r.rtt_us.map_or("-".into(), rtt)),
        number("QUEUE", 5, Some(Sort::Queue), |r, _| {
            r.queue_bytes.map_or("-".into(), |n| short(n as f64))
        }),
        number("RETR", 5, Some(Sort::Retransmits), |r, _| {
            r.retransmits.map_or("-".into(), |n| short(n as f64))
        }),
    ];
    if width >= 100 {
        all.push(number("BYTES", 6, Some(Sort::Bytes), |r, _| {
            r.total_bytes.map_or("-".into(), |n| short(n as f64))
        }));
        all.push(number("AGE", 8, Some(Sort::Age), |r, _| r.age.map_or("-".into(), span)));
    }
    let least: u16 = all.iter().map(|c| c.width + 1).sum::<u16>() - 1;
    let spare = width.saturating_sub(least);
    let [near, far] = longest.map(|n| n.saturating_sub(LEAST_END));
    let near = near.min(spare.saturating_sub(far).max(spare / 2));
    (all[2].width, all[3].width) = (LEAST_END + near, LEAST_END + far.min(spare - near.min(spare)));
    all
}

fn draw_rows(frame: &mut Frame<'_>, app: &mut App, area: Rect) {
    let visible = usize::from(area.height.saturating_sub(1));
    let first = app.scroll_to_fit(visible);
    let (sort, is_reversed) = (app.sort, app.is_reversed);
    let Some(model) = app.model() else { return };
    let lengths = model.rows.iter().map(|r| [&r.near, &r.far].map(|end| end.chars().count()));
    let longest = lengths.fold([0, 0], |[a, b], [c, d]| [a.max(c), b.max(d)]);
    let longest = longest.map(|n| u16::try_from(n).unwrap_or(u16::MAX));
    let columns = columns(area.width, model.is_gateway, longest);
    let head = columns.iter().map(|c| {
        let mark = match c.sort == Some(sort) {
            true if is_reversed => "^",
            true => "*",
            false => "",
        };
        cell(c, format!("{}{mark}", c.head))
    });
    let head = TableRow::new(head.collect::<Vec<_>>()).style(HEAD);
    let shown = app.rows().into_iter().enumerate().skip(first).take(visible);
    let rows = shown.map(|(at, row)| {
        let cells = columns.iter().map(|c| cell(c, (c.text)(row, usize::from(c.width))));
        let style = match row.retransmits.unwrap_or(0) > 0 && row.rate().unwrap_or(0.0) > 0.0 {
            true => Style::new().fg(Color::Yellow),
            false => Style::new(),
        };
        let style = if at == app.chosen() { style.patch(BOLD) } else { style };
        TableRow::new(cells.collect::<Vec<_>>()).style(style)
    });
    let widths = columns.iter().map(|c| Constraint::Length(c.width));
    frame.render_widget(Table::new(rows, widths).header(head).column_spacing(1), area);
}

/// Columns of a figure at least: the longest name and a number.
const DETAIL_WIDTH: u16 = 40;

/// All figures of one row, down and then across; what does not fit is left out.
fn draw_details(frame: &mut Frame<'_>, app: &App, [protocol, near, far]: &[String; 3], area: Rect) {
    let title = format!(" {protocol}  {near}  {far} ");
    let block = Block::new().borders(Borders::TOP).title(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let Some(figures) = app.details() else {
        return frame.render_widget(Paragraph::new("The flow has ended. Enter: back"), inner);
    };
    let across = (inner.width / DETAIL_WIDTH).max(1);
    let parts = vec![Constraint::Ratio(1, u32::from(across)); usize::from(across)];
    let lines_each = usize::from(inner.height).max(1);
    let areas = Layout::horizontal(parts).split(inner);
    for (column, part) in areas.iter().zip(figures.chunks(lines_each)) {
        let line = |(name, said): &(String, String)| {
            Line::from(vec![Span::styled(format!("{name} "), DIM), Span::raw(said.clone())])
        };
        frame.render_widget(Paragraph::new(part.iter().map(line).collect::<Vec<_>>()), *column);
    }
}

fn cell<R>(column: &Column<R>, text: String) -> Cell<'static> {
    let alignment = if column.is_number { Alignment::Right } else { Alignment::Left };
    Cell::from(Line::from(text).alignment(alignment))
}

fn draw_lower(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some(model) = app.model() else { return };
    let drops_only = model.stages.is_empty();
    let stages_width = if drops_only { 0 } else { area.width / 3 };
    let stages_width = if model.drops.is_empty() { area.width } else { stages_width };
    let [drops, stages] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(stages_width)]).areas(area);
    if !model.drops.is_empty() {
        draw_drops(frame, model, drops);
    }
    if !drops_only {
        draw_stages(frame, model, stages);
    }
}

fn titled(title: &'static str) -> Block<'static> {
    Block::new().borders(Borders::TOP).title(title).border_style(DIM)
}

fn draw_drops(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let title = if model.is_gateway { " dropped and not carried " } else { " dropped " };
    let lines = model.drops.iter().map(|d| {
        let start = format!("{:>6} {:>6}/s ", short(d.total as f64), short(d.rate));
        let style = if d.rate > 0.0 { ALARM } else { Style::new() };
        let name = format!("{}: {}", d.layer, d.reason);
        Line::from(vec![
            Span::styled(start + &name, style),
            Span::styled(format!("  {}", d.sentence), DIM),
        ])
    });
    let lines: Vec<Line<'_>> = lines.take(usize::from(area.height)).collect();
    frame.render_widget(Paragraph::new(lines).block(titled(title)), area);
}

fn draw_stages(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let lines = model.stages.iter().map(|s| {
        let bar = "#".repeat((s.share * 10.0).round() as usize);
        Line::from(format!(" {:>4.1} % {:<17} {bar}", s.share * 100.0, s.name))
    });
    let lines: Vec<Line<'_>> = lines.take(usize::from(area.height)).collect();
    frame.render_widget(Paragraph::new(lines).block(titled(" CPU by stage ")), area);
}

fn footer(app: &App) -> Line<'static> {
    if let Mode::Filter(text) = &app.mode {
        return match &app.filter_error {
            Some(why) => Line::styled(format!("/{text}   {why}"), ALARM),
            None => Line::from(format!("/{text}_   Enter: apply  Esc: cancel")),
        };
    }
    if matches!(app.mode, Mode::Details(_)) {
        return Line::styled("Enter, Esc back  p pause  q quit", DIM);
    }
    let direction = if app.is_reversed { " reversed" } else { "" };
    let mut keys =
        format!("q quit  h help  p pause  s sort: {}{direction}  / filter", app.sort.name());
    if let Some(filter) = &app.filter_text {
        keys += &format!(": {filter}");
    }
    if app.count() > 1 {
        keys += "  Tab next  l list";
    }
    Line::styled(keys, DIM)
}

/// The keys, for the help and for the documentation.
pub const HELP: &[(&str, &str)] = &[
    ("q, Ctrl-C", "quit"),
    ("p, Space", "pause or resume"),
    ("s, S", "sort by the next, previous column"),
    ("r", "reverse the order"),
    ("/", "filter, as in `fulmar stat -f`: dport = :443"),
    ("Up, Down, PgUp, PgDn, Home", "choose a row"),
    ("Enter", "all figures of the chosen row, as in ss -ti; Enter or Esc: back"),
    ("Tab", "the next stack or gateway"),
    ("l", "the list of all stacks and gateways; Enter chooses one"),
    ("h, ?", "this help; any key: back"),
];

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let keys = HELP.iter().map(|(key, what)| Line::from(format!(" {key:<27}{what}")));
    let notes = [
        "",
        " OUT and IN: bytes as seen by the guest or the stack. RTT: round-trip time of the",
        " host's connection if known. QUEUE: queued bytes. RETR: retransmitted segments.",
        " CPU by stage: only for programs started with FULMAR_LEDGER=64.",
    ];
    let lines: Vec<Line<'_>> = keys.chain(notes.map(Line::from)).collect();
    let (width, height) = (80.min(area.width), (lines.len() as u16 + 2).min(area.height));
    let x = area.x + (area.width - width) / 2;
    let y = area.y + (area.height - height) / 2;
    let place = Rect { x, y, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys ")), place);
}

/// Bytes per second, as in the rows.
fn bytes_rate(bytes_per_second: Option<f64>) -> String {
    bytes_per_second.map_or("-".into(), |n| short(n) + "B/s")
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or("-".into(), short)
}

/// A number in five columns, with decimal units: `999`, `1.2k`, `34M`.
pub fn short(n: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.into_iter().find(|(size, _)| n >= size * 0.9995) {
        Some((size, unit)) if n < size * 9.95 => format!("{:.1}{unit}", n / size),
        Some((size, unit)) => format!("{:.0}{unit}", n / size),
        None => format!("{n:.0}"),
    }
}

/// A round-trip time in six columns.
fn rtt(us: f64) -> String {
    match us {
        us if us < 999.5 => format!("{us:.0}us"),
        us if us < 99_950.0 => format!("{:.1}ms", us / 1e3),
        us if us < 999_500.0 => format!("{:.0}ms", us / 1e3),
        us => format!("{:.1}s", us / 1e6),
    }
}

/// A time as `12s`, `3:07`, `1:02:03`, `12d 3h`.
fn span(time: std::time::Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}:{:02}", seconds % 60),
        3600..86_400 => format!("{hours}:{minutes:02}:{:02}", seconds % 60),
        _ => format!("{}d {}h", hours / 24, hours % 24),
    }
}

/// An address in at most `columns`: its middle is left out, since prefix and port tell more.
pub fn shortened(address: &str, columns: usize) -> String {
    let length = address.chars().count();
    if length <= columns || columns < 5 {
        return address.chars().take(columns).collect();
    }
    let tail = (columns - 1) * 2 / 3;
    let start: String = address.chars().take(columns - 1 - tail).collect();
    let end: String = address.chars().skip(length - tail).collect();
    format!("{start}~{end}")
}

#[cfg(test)]
mod tests;
