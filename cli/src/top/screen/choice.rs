//! The list of stacks and gateways to choose from.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row as TableRow, Table};

use super::{ALARM, BOLD, Column, DIM, HEAD, cell, per_second, shortened, spread};
use crate::top::app::App;
use crate::top::model::Model;

/// Columns of a name at most.
const NAME_WIDTH: u16 = 18;

/// The columns; what a stack or gateway attends to has what the others leave.
fn columns(width: u16) -> Vec<Column<Model>> {
    type Text = fn(&Model, usize) -> String;
    let number =
        |head, width, text: Text| Column { head, width, sort: None, is_number: true, text };
    let word = |head, width, text: Text| Column { head, width, sort: None, is_number: false, text };
    let mut all: Vec<Column<Model>> = vec![
        word("NAME", NAME_WIDTH.min(width / 4), |m, width| shortened(&m.name, width)),
        word("ATTENDS TO", 0, |m, width| shortened(&m.attends, width)),
        number("FLOWS", 6, |m, _| m.rows.len().to_string()),
        number("OUT/s", 6, |m, _| per_second(m.out())),
        number("IN/s", 6, |m, _| per_second(m.back())),
        number("CPU", 6, |m, _| m.cpu.map_or("-".into(), |cpu| format!("{:.1}%", cpu * 100.0))),
    ];
    let used: u16 = all.iter().map(|c| c.width + 1).sum::<u16>() - 1;
    all[1].width = width.saturating_sub(used);
    all
}

/// Draws the list, the one under the cursor in bold.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let parts = [Constraint::Length(2), Constraint::Min(2), Constraint::Length(1)];
    let [head, list, foot] = Layout::vertical(parts).areas(frame.area());
    let title = format!("fulmar top: {} stacks and gateways", app.count());
    let title = spread(title, app.status(), usize::from(head.width));
    frame.render_widget(Paragraph::new(vec![title.style(BOLD), Line::default()]), head);
    if app.count() == 0 {
        frame.render_widget(Paragraph::new(app.notice.clone()).style(ALARM), list);
    } else {
        draw_rows(frame, app, list);
    }
    let keys = "Up Down, Enter choose  p pause  q quit";
    frame.render_widget(Paragraph::new(Line::styled(keys, DIM)), foot);
}

fn draw_rows(frame: &mut Frame<'_>, app: &App, area: ratatui::layout::Rect) {
    let visible = usize::from(area.height.saturating_sub(1)).max(1);
    let first = (app.position() + 1).saturating_sub(visible);
    let columns = columns(area.width);
    let head = columns.iter().map(|c| cell(c, c.head.to_owned()));
    let head = TableRow::new(head.collect::<Vec<_>>()).style(HEAD);
    let shown = app.models().enumerate().skip(first).take(visible);
    let rows = shown.map(|(at, model)| {
        let cells = columns.iter().map(|c| cell(c, (c.text)(model, usize::from(c.width))));
        let row = TableRow::new(cells.collect::<Vec<_>>());
        if at == app.position() { row.style(BOLD) } else { row }
    });
    let widths = columns.iter().map(|c| Constraint::Length(c.width));
    frame.render_widget(Table::new(rows, widths).header(head).column_spacing(1), area);
}
