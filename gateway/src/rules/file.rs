//! Policy files: rules, their limits and the settings of a run, in TOML or as sandbox-runtime writes them in JSON.
//!
//! ```toml
//! names = "given"
//! allow = ["github.com:443", "*.npmjs.org", { to = "10.1.2.3:53", protocol = "udp", connections = 10 }]
//! deny = ["10.0.0.0/8"]
//! ```
//!
//! A file that cannot be understood in full is refused: [`PolicyError`] has the line and the column. In settings of
//! sandbox-runtime, which speak of files and processes as well, other keys are [`PolicyFile::notes`].

mod settings;
mod values;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::rule::Protocols;
use super::{Denial, Entry, Rule, Rules, Source, Why};
use crate::allowance::{Allowance, Bounds};
use crate::policy::Protocol;
pub use values::Proxy;

/// Most bytes of a policy file.
pub const MOST_BYTES: usize = 4 << 20;

/// The addresses that a guest gets for names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NamesMode {
    /// One of its own for each name.
    Given,
    /// The real ones.
    Real,
}

/// A part of a policy file: where it is and what it says.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Said<T> {
    /// Its line, from 1.
    pub line: usize,
    /// What it says.
    pub value: T,
}

/// What a policy file says.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PolicyFile {
    /// The rules, with their limits.
    pub rules: Rules,
    /// The addresses of names.
    pub names: Option<Said<NamesMode>>,
    /// Whether an encrypted ClientHello may pass.
    pub allows_encrypted_hello: Option<Said<bool>>,
    /// The proxy through which the rest of the network is reached.
    pub proxy: Option<Said<Proxy>>,
    /// Where the log of decisions is written, as the user of the file understands it.
    pub audit: Option<Said<String>>,
    /// Parts that have no meaning here, as sentences.
    pub notes: Vec<Said<String>>,
}

/// What is wrong with a policy file. `Display`: `FILE:LINE:COLUMN: sentence`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PolicyError {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PolicyError { file, line, column, what } = self;
        write!(f, "{}:{line}:{column}: {what}", file.display())
    }
}

impl std::error::Error for PolicyError {}

/// The keys of a file, and of a rule that is a table.
const KEYS: [&str; 7] =
    ["default", "allow", "deny", "names", "encrypted-client-hello", "proxy", "audit"];
const RULE_KEYS: [&str; 5] = ["to", "protocol", "connections", "bytes", "rate"];
const LIMIT_KEYS: [&str; 3] = ["connections", "bytes", "rate"];

impl PolicyFile {
    /// Reads the text of a file: JSON if it begins with a brace, else TOML. `file`: its name in messages.
    ///
    /// # Errors
    /// The first part that means nothing.
    pub fn parse(text: &str, file: &Path) -> Result<PolicyFile, PolicyError> {
        let breaks = text.bytes().enumerate().filter(|(_, b)| *b == b'\n');
        let lines = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1)).collect();
        let reader = Reader { text, file, lines };
        if text.len() > MOST_BYTES {
            return Err(reader.error(0, format!("the file has more than {} MiB", MOST_BYTES >> 20)));
        }
        if text.trim_start().starts_with('{') {
            return settings::read(&reader);
        }
        reader.read_toml()
    }
}

/// A file that is read.
struct Reader<'a> {
    text: &'a str,
    file: &'a Path,
    /// Where each line begins.
    lines: Vec<usize>,
}

type Table<'i> = Spanned<DeTable<'i>>;
type Value<'i> = Spanned<DeValue<'i>>;

impl Reader<'_> {
    /// The line and the column of a byte.
    fn position(&self, at: usize) -> (usize, usize) {
        let line = self.lines.partition_point(|begin| *begin <= at).max(1);
        let begin = self.lines.get(line - 1).copied().unwrap_or(0);
        // A character has one byte that does not continue another.
        let before = self.text.as_bytes().get(begin..at.min(self.text.len())).unwrap_or_default();
        (line, 1 + before.iter().filter(|b| **b & 0xc0 != 0x80).count())
    }

    fn error(&self, at: usize, what: impl Into<String>) -> PolicyError {
        let (line, column) = self.position(at);
        PolicyError { file: self.file.to_owned(), line, column, what: what.into() }
    }

    fn said<T>(&self, at: usize, value: T) -> Said<T> {
        Said { line: self.position(at).0, value }
    }

    fn source(&self, at: usize) -> Source {
        Source::Line { file: self.file.to_owned(), number: self.position(at).0 }
    }

    fn rule(&self, text: &str, span: &Range<usize>) -> Result<Rule, PolicyError> {
        text.parse().map_err(|e: super::ParseRuleError| self.error(span.start, e.to_string()))
    }

    fn read_toml(&self) -> Result<PolicyFile, PolicyError> {
        let parsed = DeTable::parse(self.text).map_err(|e| {
            let at = e.span().map_or(self.text.len(), |span| span.start);
            self.error(at, e.message().replace('\n', ", "))
        })?;
        let mut policy = PolicyFile::default();
        for (key, value) in in_order(parsed.get_ref()) {
            self.read_key(&mut policy, key, value)?;
        }
        if policy.rules.is_empty() {
            let what = "no rule and no default; add `default = \"deny\"` or `default = \"allow\"`";
            return Err(self.error(0, what));
        }
        Ok(policy)
    }

    fn read_key(
        &self,
        policy: &mut PolicyFile,
        key: &Spanned<impl AsRef<str>>,
        value: &Value<'_>,
    ) -> Result<(), PolicyError> {
        let at = value.span().start;
        match key.get_ref().as_ref() {
            "allow" => self.read_rules(policy, value, false)?,
            "deny" => self.read_rules(policy, value, true)?,
            "default" => self.read_default(&mut policy.rules, value)?,
            "names" => {
                let modes = [("given", NamesMode::Given), ("real", NamesMode::Real)];
                policy.names = Some(self.said(at, self.one_of(value, &modes)?));
            }
            "encrypted-client-hello" => {
                let is_allowed = self.one_of(value, &[("allow", true), ("deny", false)])?;
                policy.allows_encrypted_hello = Some(self.said(at, is_allowed));
            }
            "proxy" => {
                let proxy = self.text_of(value)?.parse().map_err(|e: String| self.error(at, e))?;
                policy.proxy = Some(self.said(at, proxy));
            }
            "audit" => {
                let target = self.text_of(value)?.to_owned();
                policy.audit = Some(self.said(at, target));
            }
            unknown => return Err(self.unknown(unknown, &KEYS, key.span().start)),
        }
        Ok(())
    }

    fn read_default(&self, rules: &mut Rules, value: &Value<'_>) -> Result<(), PolicyError> {
        let source = self.source(value.span().start);
        match self.one_of(value, &[("allow", true), ("deny", false)])? {
            true => rules.allow(self.rule("*", &value.span())?, source),
            false => rules.close_as("default = \"deny\"", source),
        }
        Ok(())
    }

    /// The value of `allow` or `deny`.
    fn read_rules(
        &self,
        policy: &mut PolicyFile,
        value: &Value<'_>,
        denies: bool,
    ) -> Result<(), PolicyError> {
        let Some(list) = value.get_ref().as_array() else {
            return Err(self.error(value.span().start, "expected a list of rules"));
        };
        for item in list {
            match item.get_ref() {
                DeValue::Table(table) => {
                    let table = Spanned::new(item.span(), table.clone());
                    self.read_rule_table(policy, &table, denies)?;
                }
                _ => {
                    let rule = self.rule(self.text_of(item)?, &item.span())?;
                    let source = self.source(item.span().start);
                    match denies {
                        true => policy.rules.deny(rule, source),
                        false => policy.rules.allow(rule, source),
                    }
                }
            }
        }
        Ok(())
    }

    /// A rule with more than its destination.
    fn read_rule_table(
        &self,
        policy: &mut PolicyFile,
        table: &Table<'_>,
        denies: bool,
    ) -> Result<(), PolicyError> {
        let (mut protocols, mut limits) = (Protocols::ALL, Bounds::default());
        let mut to = None;
        for (key, value) in in_order(table.get_ref()) {
            let at = value.span().start;
            let key_at = key.span().start;
            match key.get_ref().as_ref() {
                "to" => to = Some(self.texts_of(value)?),
                "protocol" => protocols = self.protocols(value)?,
                limit if denies && LIMIT_KEYS.contains(&limit) => {
                    return Err(self.error(
                        key_at,
                        format!("`{limit}` limits what is allowed; `deny` has no limit"),
                    ));
                }
                "connections" => {
                    let number = self.number(value, &[])?;
                    let what = "expected at most 4294967295 connections";
                    let number = number.try_into().map_err(|_| self.error(at, what))?;
                    limits.flows = Some(number);
                }
                "bytes" => limits.bytes = Some(self.number(value, &[""])?),
                "rate" => limits.bytes_per_second = Some(self.number(value, &["/s"])?),
                unknown => return Err(self.unknown(unknown, &RULE_KEYS, key_at)),
            }
        }
        let Some(to) = to.filter(|to| !to.is_empty()) else {
            return Err(self.error(
                table.span().start,
                "the rule has no destination; add `to = \"HOST[:PORTS]\"`",
            ));
        };
        let allowance = (limits != Bounds::default()).then(|| Allowance::new(limits));
        for (text, span) in to {
            let rule = Rule { protocols, ..self.rule(text, &span)? };
            let source = self.source(span.start);
            match denies {
                true => policy.rules.deny(rule, source),
                false => policy.rules.allow_within(rule, source, allowance.clone()),
            }
        }
        Ok(())
    }

    fn protocols(&self, value: &Value<'_>) -> Result<Protocols, PolicyError> {
        let mut protocols = Protocols::NONE;
        for (text, span) in self.texts_of(value)? {
            let all = [Protocol::Tcp, Protocol::Udp, Protocol::Icmp];
            let Some(protocol) = all.into_iter().find(|p| p.name() == text) else {
                let what = format!("unknown protocol `{text}`: expected tcp, udp or icmp");
                return Err(self.error(span.start, what));
            };
            protocols = protocols.with(protocol);
        }
        if protocols == Protocols::NONE {
            return Err(self.error(value.span().start, "expected tcp, udp or icmp"));
        }
        Ok(protocols)
    }

    fn text_of<'v>(&self, value: &'v Value<'_>) -> Result<&'v str, PolicyError> {
        let (at, kind) = (value.span().start, value.get_ref().type_str());
        let text = value.get_ref().as_str();
        text.ok_or_else(|| self.error(at, format!("expected a string, not a value of type {kind}")))
    }

    /// A text or a list of texts.
    fn texts_of<'v>(
        &self,
        value: &'v Value<'_>,
    ) -> Result<Vec<(&'v str, Range<usize>)>, PolicyError> {
        let list: Option<&DeArray<'_>> = value.get_ref().as_array();
        match list {
            Some(list) => list.iter().map(|v| Ok((self.text_of(v)?, v.span()))).collect(),
            None => Ok(vec![(self.text_of(value)?, value.span())]),
        }
    }

    fn one_of<T: Copy>(&self, value: &Value<'_>, all: &[(&str, T)]) -> Result<T, PolicyError> {
        let text = self.text_of(value)?;
        let found = all.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let names: Vec<String> = all.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            let what = format!("unknown value \"{text}\": expected {}", names.join(" or "));
            self.error(value.span().start, what)
        })
    }

    /// A number, or a text of bytes with a unit. `ends`: the ends of such a text; none: it is a bare number.
    fn number(&self, value: &Value<'_>, ends: &[&str]) -> Result<u64, PolicyError> {
        let number = match value.get_ref() {
            DeValue::Integer(n) => u64::from_str_radix(n.as_str(), n.radix()).ok(),
            DeValue::String(text) => {
                ends.iter().find_map(|end| values::bytes(text.strip_suffix(end)?))
            }
            _ => None,
        };
        number.filter(|n| *n > 0).ok_or_else(|| {
            let expected = match ends {
                [] => "a number from 1".to_owned(),
                [end, ..] => format!("a number of bytes, such as 500000 or \"10 MB{end}\""),
            };
            self.error(value.span().start, format!("expected {expected}"))
        })
    }

    fn unknown(&self, key: &str, known: &[&str], at: usize) -> PolicyError {
        let what = match values::nearest(key, known) {
            Some(nearest) => format!("unknown key `{key}`; did you mean `{nearest}`?"),
            None => format!("unknown key `{key}`: expected one of {}", known.join(", ")),
        };
        self.error(at, what)
    }
}

/// The keys of a table as they are written, so that the first error is the first of the file.
fn in_order<'t, 'i>(
    table: &'t DeTable<'i>,
) -> Vec<(&'t Spanned<toml::de::DeString<'i>>, &'t Value<'i>)> {
    let mut all: Vec<_> = table.iter().collect();
    all.sort_by_key(|(key, _)| key.span().start);
    all
}

impl Rules {
    fn allow_within(&mut self, rule: Rule, source: Source, allowance: Option<Arc<Allowance>>) {
        self.add(Entry { allowance, ..Entry::new(rule, source, None) });
    }

    /// Refuses what a rule names before all other rules are asked.
    fn deny_strictly(&mut self, rule: Rule, source: Source) {
        let denial = Some(Denial(Why::Rule(rule.clone(), source.clone())));
        self.add(Entry { is_strict: true, ..Entry::new(rule, source, denial) });
    }
}

#[cfg(test)]
mod tests;
