//! `verdicts.txt`: why scripts do not pass. A line is `suite class pattern reason`; in a pattern `*` stands for
//! anything. The first line that fits counts.

use std::fs;
use std::path::Path;

/// Why a script does not pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// fulmar lacks the feature that the script tests.
    Absent,
    /// It expects what another system does where RFCs allow what fulmar does.
    Choice,
    /// A fault of fulmar that is known.
    Fails,
}

struct Line {
    suite: String,
    class: Class,
    pattern: String,
}

/// The lines of the file.
pub struct Verdicts {
    lines: Vec<Line>,
}

impl Verdicts {
    /// Those of the repository.
    ///
    /// # Errors
    /// A file that cannot be read, or a line that makes no sense.
    pub fn of_the_repository() -> Result<Verdicts, String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("verdicts.txt");
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Verdicts::parse(&text)
    }

    fn parse(text: &str) -> Result<Verdicts, String> {
        let told = text.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
        let lines = told.map(|line| {
            let wrong = || format!("verdicts.txt: {line}: not `suite class pattern reason`");
            let mut words = line.split_whitespace();
            let (suite, class, pattern) = (words.next(), words.next(), words.next());
            let (Some(suite), Some(class), Some(pattern), Some(_reason)) =
                (suite, class, pattern, words.next())
            else {
                return Err(wrong());
            };
            let class = match class {
                "absent" => Class::Absent,
                "choice" => Class::Choice,
                "fails" => Class::Fails,
                _ => return Err(wrong()),
            };
            Ok(Line { suite: suite.to_owned(), class, pattern: pattern.to_owned() })
        });
        Ok(Verdicts { lines: lines.collect::<Result<_, _>>()? })
    }

    /// The class of a script; `None`: it passes.
    pub fn class_of(&self, suite: &str, script: &str) -> Option<Class> {
        let line = self.lines.iter().find(|l| l.suite == suite && fits(&l.pattern, script))?;
        Some(line.class)
    }
}

/// Whether a path fits a pattern.
fn fits(pattern: &str, path: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| path.strip_prefix(first)) else {
        return false;
    };
    let mut last = "";
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = part;
    }
    rest.is_empty() || (pattern.contains('*') && (last.is_empty() || path.ends_with(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_fits_counts() {
        let text = "# comment\ngoogle choice a/b.pkt RFC 9293\ngoogle absent a/* no such thing\n";
        let verdicts = Verdicts::parse(text).unwrap();
        assert_eq!(verdicts.class_of("google", "a/b.pkt"), Some(Class::Choice));
        assert_eq!(verdicts.class_of("google", "a/c.pkt"), Some(Class::Absent));
        assert_eq!(verdicts.class_of("freebsd", "a/c.pkt"), None);
        assert!(Verdicts::parse("google maybe a/b.pkt why\n").is_err());
        assert!(Verdicts::parse("google choice a/b.pkt\n").is_err());
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, path, does) in [
            ("a/*", "a/b.pkt", true),
            ("a/*-v4.pkt", "a/b-v4.pkt", true),
            ("a/*-v4.pkt", "a/b-v6.pkt", false),
            ("a/b", "a/b.pkt", false),
            ("*/x*.pkt", "q/xy.pkt", true),
        ] {
            assert_eq!(fits(pattern, path), does, "{pattern} {path}");
        }
    }

    #[test]
    fn the_file_of_the_repository_can_be_read() {
        assert!(Verdicts::of_the_repository().is_ok());
    }
}
