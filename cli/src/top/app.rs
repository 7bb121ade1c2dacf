//! The state of `fulmar top`: the samples, the selection, and the changes by keys.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::ops::ControlFlow;

use super::model::{Model, Row, Sample, Sort};
use crate::stat::{self, Filter};

/// Most characters of a filter.
const MAX_FILTER: usize = 200;

/// The mode, which decides the meaning of the keys.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// The keys of the help.
    #[default]
    Normal,
    /// A filter is typed; this is its text so far.
    Filter(String),
    /// The help is shown.
    Help,
    /// Stacks and gateways are listed to choose from.
    List,
    /// One row is shown with all of its figures: its identity.
    Details([String; 3]),
}

/// A stack or gateway that is shown.
struct Shown {
    before: Option<Sample>,
    latest: Sample,
    model: Model,
    /// It did not answer the last request.
    is_gone: bool,
}

/// The state.
#[derive(Default)]
pub struct App {
    shown: Vec<Shown>,
    at: usize,
    /// Meaning of the keys.
    pub mode: Mode,
    /// The order of the rows.
    pub sort: Sort,
    /// The order is the other way round.
    pub is_reversed: bool,
    /// The filter as it was typed.
    pub filter_text: Option<String>,
    filter: Option<Filter>,
    /// Why the text that is being typed is not a valid filter.
    pub filter_error: Option<String>,
    /// The message while there is nothing to show.
    pub notice: String,
    is_paused: bool,
    first_row: usize,
    /// The row that Enter opens, in the order of the rows.
    chosen: usize,
}

fn is_same(a: &Sample, b: &Sample) -> bool {
    stat::is_same(&a.document, &b.document)
}

impl App {
    /// Takes the present documents of the stacks. While paused only the presence of stacks changes.
    pub fn update(&mut self, samples: Vec<Sample>) {
        for shown in &mut self.shown {
            shown.is_gone = !samples.iter().any(|s| is_same(s, &shown.latest));
        }
        if self.is_paused {
            return;
        }
        let was_empty = self.shown.is_empty();
        let chosen = self.shown.get(self.at).map(|s| s.latest.clone());
        for sample in samples {
            let known = self.shown.iter().position(|s| is_same(&s.latest, &sample));
            let before = known.map(|at| self.shown.remove(at).latest);
            let model = Model::new(before.as_ref(), &sample, self.filter.as_ref());
            self.shown.push(Shown { before, latest: sample, model, is_gone: false });
        }
        // A stack that has ended stays while it is shown.
        let is_listed = self.mode == Mode::List;
        let is_chosen = |s: &Shown| chosen.as_ref().is_some_and(|c| is_same(c, &s.latest));
        self.shown.retain(|s| !s.is_gone || is_chosen(s) && !is_listed);
        self.shown.sort_by_key(|s| (!s.model.is_gateway, s.latest.document.pid));
        self.at = self.shown.iter().position(is_chosen).unwrap_or(0);
        if was_empty && self.shown.len() > 1 && self.mode == Mode::Normal {
            self.mode = Mode::List;
        }
    }

    /// Shows one of them, without the list.
    pub fn leave_list(&mut self) {
        if self.mode == Mode::List {
            self.mode = Mode::Normal;
        }
    }

    /// The figures of all of them, in order.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.shown.iter().map(|s| &s.model)
    }

    /// The figures of the stack that is shown.
    pub fn model(&self) -> Option<&Model> {
        self.shown.get(self.at).map(|s| &s.model)
    }

    /// The number of stacks.
    pub fn count(&self) -> usize {
        self.shown.len()
    }

    /// Shows the next stack.
    pub fn next(&mut self) {
        if !self.shown.is_empty() {
            self.look_at((self.at + 1) % self.shown.len());
        }
    }

    /// The index of the stack that is shown.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Unusual states, for the screen's corner.
    pub fn status(&self) -> String {
        let is_gone = self.shown.get(self.at).is_some_and(|s| s.is_gone);
        match (is_gone, self.is_paused) {
            (true, _) => "ENDED".to_owned(),
            (false, true) => "PAUSED".to_owned(),
            (false, false) => String::new(),
        }
    }

    /// The rows in their order.
    pub fn rows(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.model().into_iter().flat_map(|m| &m.rows).collect();
        rows.sort_by(|a, b| {
            let order = self.sort.compare(a, b);
            if self.is_reversed { order.reverse() } else { order }
        });
        rows
    }

    /// The first row on a screen with room for `visible`: the chosen one is on it, and the last rows fill it.
    pub fn scroll_to_fit(&mut self, visible: usize) -> usize {
        let rows = self.model().map_or(0, |m| m.rows.len());
        self.chosen = self.chosen.min(rows.saturating_sub(1));
        let least = (self.chosen + 1).saturating_sub(visible);
        self.first_row = self.first_row.clamp(least, self.chosen.max(least));
        self.first_row = self.first_row.min(rows.saturating_sub(visible));
        self.first_row
    }

    /// The row that Enter opens, in the order of the rows.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// Every figure of the row that is shown with them by its name, if it still is there.
    pub fn details(&self) -> Option<Vec<(String, String)>> {
        let Mode::Details(identity) = &self.mode else { return None };
        let shown = self.shown.get(self.at)?;
        let row = shown.model.rows.iter().find(|r| r.identity() == *identity)?;
        Some(row.details(&shown.latest.document))
    }

    /// A key was pressed. `Break`: the user wants to quit.
    pub fn key(&mut self, key: KeyEvent) -> ControlFlow<()> {
        if key.kind == KeyEventKind::Release {
            return ControlFlow::Continue(());
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            return ControlFlow::Break(());
        }
        match &self.mode {
            Mode::Normal => return self.normal_key(key.code),
            Mode::Filter(_) => self.filter_key(key.code),
            Mode::Help => self.mode = Mode::Normal,
            Mode::List => return self.list_key(key.code),
            Mode::Details(_) => return self.details_key(key.code),
        }
        ControlFlow::Continue(())
    }

    fn normal_key(&mut self, key: KeyCode) -> ControlFlow<()> {
        const PAGE: usize = 10;
        match key {
            KeyCode::Char('q') => return ControlFlow::Break(()),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('S') => self.sort = self.sort.previous(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Char('/') => {
                self.mode = Mode::Filter(self.filter_text.clone().unwrap_or_default());
            }
            KeyCode::Char('h' | '?') => self.mode = Mode::Help,
            KeyCode::Up => self.chosen = self.chosen.saturating_sub(1),
            KeyCode::Down => self.chosen += 1,
            KeyCode::PageUp => self.chosen = self.chosen.saturating_sub(PAGE),
            KeyCode::PageDown => self.chosen += PAGE,
            KeyCode::Home => self.chosen = 0,
            KeyCode::Enter => self.open(),
            KeyCode::Tab => self.next(),
            KeyCode::Char('l') => self.mode = Mode::List,
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn list_key(&mut self, key: KeyCode) -> ControlFlow<()> {
        let last = self.shown.len().saturating_sub(1);
        match key {
            KeyCode::Char('q') => return ControlFlow::Break(()),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Up => self.look_at(self.at.saturating_sub(1)),
            KeyCode::Down => self.look_at(last.min(self.at + 1)),
            KeyCode::Home => self.look_at(0),
            KeyCode::End => self.look_at(last),
            KeyCode::Tab => self.next(),
            KeyCode::Enter | KeyCode::Esc | KeyCode::Char('l') => self.leave_list(),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn look_at(&mut self, at: usize) {
        (self.at, self.chosen) = (at, 0);
    }

    fn open(&mut self) {
        let chosen = self.rows().get(self.chosen).map(|row| row.identity());
        self.mode = chosen.map_or(Mode::Normal, Mode::Details);
    }

    fn details_key(&mut self, key: KeyCode) -> ControlFlow<()> {
        match key {
            KeyCode::Char('q') => return ControlFlow::Break(()),
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Enter | KeyCode::Esc => self.mode = Mode::Normal,
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn filter_key(&mut self, key: KeyCode) {
        let Mode::Filter(text) = &mut self.mode else { return };
        self.filter_error = None;
        match key {
            KeyCode::Char(c) if text.len() < MAX_FILTER => text.push(c),
            KeyCode::Backspace => drop(text.pop()),
            KeyCode::Esc => self.mode = Mode::Normal,
            KeyCode::Enter => {
                let text = text.trim().to_owned();
                self.set_filter(text);
            }
            _ => {}
        }
    }

    /// Applies a filter. An invalid filter shows its error and stays for correction.
    fn set_filter(&mut self, text: String) {
        match text.parse::<Filter>() {
            Ok(filter) => {
                self.filter = (!text.is_empty()).then_some(filter);
                self.filter_text = (!text.is_empty()).then_some(text);
                self.mode = Mode::Normal;
                self.chosen = 0;
                for shown in &mut self.shown {
                    let before = shown.before.as_ref();
                    shown.model = Model::new(before, &shown.latest, self.filter.as_ref());
                }
            }
            Err(_) => self.filter_error = Some("invalid filter; example: dport = :443".to_owned()),
        }
    }

    /// An order, and a filter, from the command line.
    pub fn with(sort: Sort, filter: Option<(String, Filter)>) -> App {
        let (filter_text, filter) = filter.unzip();
        App { sort, filter, filter_text, ..App::default() }
    }
}
