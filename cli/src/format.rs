//! Numbers for people: bytes, rates, times, digests.

use std::time::Duration;

/// `n` bytes with a binary unit: `512 B`, `1.50 KiB`, `1.00 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.2} {unit}")
}

/// How many things there are: `0 flows`, `1 flow`.
pub fn count(n: u64, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// A rate in bits per second with a decimal unit, as network people count: `2.50 Gb/s`.
pub fn rate(bytes: u64, elapsed: Duration) -> String {
    let bits = bytes as f64 * 8.0 / elapsed.as_secs_f64().max(1e-9);
    match bits {
        b if b >= 1e9 => format!("{:.2} Gb/s", b / 1e9),
        b if b >= 1e6 => format!("{:.2} Mb/s", b / 1e6),
        b if b >= 1e3 => format!("{:.2} kb/s", b / 1e3),
        b => format!("{b:.0} b/s"),
    }
}

/// Milliseconds with three decimals, as ping and ss print them.
pub fn millis(d: Duration) -> String {
    format!("{:.3}", d.as_secs_f64() * 1e3)
}

/// A time in the unit that suits it: `120us`, `1.5ms`, `1.65s`.
pub fn time(us: f64) -> String {
    let (value, unit) = match us {
        us if us >= 999_500.0 => (us / 1e6, "s"),
        us if us >= 999.5 => (us / 1e3, "ms"),
        us => (us, "us"),
    };
    let decimals = if value >= 100.0 { 0 } else { 2 };
    let text = format!("{value:.decimals$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

/// Columns of the terminal: COLUMNS if set, else the width of standard output. `None`: standard output is not a
/// terminal.
pub fn terminal_columns() -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    said.or_else(|| terminal_size::terminal_size().map(|(columns, _)| usize::from(columns.0)))
}

/// A line broken at spaces so that none is longer than `columns`, if its words are not; what follows the first
/// stands below its `hang`-th column.
pub fn wrapped(line: &str, columns: usize, hang: usize) -> String {
    let mut text = String::new();
    let mut rest = line.to_owned();
    while rest.chars().count() > columns {
        let indent = if text.is_empty() { 0 } else { hang };
        let fits = rest.char_indices().nth(columns + 1).map_or(rest.len(), |(at, _)| at);
        // Not within the indentation: that would gain nothing.
        let is_within = |at: &usize| *at > indent && !rest[..*at].trim().is_empty();
        let Some(at) = rest[..fits].rfind(' ').filter(is_within) else { break };
        text += rest[..at].trim_end();
        text.push('\n');
        rest = format!("{:hang$}{}", "", rest[at..].trim_start());
    }
    text + &rest
}

/// Bytes as lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A table whose columns are as wide as their widest cell; numbers stand right, words left.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count());
        cells.chain([head[i].chars().count()]).max().unwrap_or(0)
    };
    let numeric = |i: usize| rows.iter().filter_map(|r| r.get(i)).all(|c| c.parse::<f64>().is_ok());
    let line = |cells: &[String]| {
        let padded = cells.iter().enumerate().map(|(i, c)| {
            let w = width(i);
            if numeric(i) { format!("{c:>w$}") } else { format!("{c:<w$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    std::iter::once(line(&head)).chain(rows.iter().map(|r| line(r))).collect()
}

/// Whether a terminal shows the character, and does nothing else: no control characters, and none that
/// change the direction of what follows.
pub fn is_shown(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !turns
}

/// A text from elsewhere for a terminal.
pub fn printable(text: &str) -> String {
    let escape =
        |c: char| if is_shown(c) { String::from(c) } else { c.escape_default().to_string() };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_carry_binary_units() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1 << 30, "1.00 GiB")];
        for (n, text) in cases {
            assert_eq!(bytes(n), text);
        }
        assert_eq!(bytes(u64::MAX), "16384.00 PiB");
    }

    #[test]
    fn rates_count_bits_in_decimal_units() {
        assert_eq!(rate(125_000_000, Duration::from_secs(1)), "1.00 Gb/s");
        assert_eq!(rate(1, Duration::from_secs(1)), "8 b/s");
        assert_eq!(rate(0, Duration::ZERO), "0 b/s");
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        let cases = [
            (0.0, "0us"),
            (0.25, "0.25us"),
            (120.0, "120us"),
            (999.9, "1ms"),
            (1500.0, "1.5ms"),
            (200_000.0, "200ms"),
            (1_646_579.632, "1.65s"),
        ];
        for (us, text) in cases {
            assert_eq!(time(us), text);
        }
    }

    #[test]
    fn a_long_line_is_broken_at_spaces_and_hangs_below_its_column() {
        assert_eq!(wrapped("  why  one two three", 12, 7), "  why  one\n       two\n       three");
        assert_eq!(wrapped("short", 12, 2), "short");
        // A word that does not fit stays whole.
        assert_eq!(wrapped("  abcdefghijklm no", 8, 2), "  abcdefghijklm no");
        assert_eq!(wrapped("ab abcdefghijklm", 8, 4), "ab\n    abcdefghijklm");
    }

    #[test]
    fn hex_has_two_digits_per_byte() {
        assert_eq!(hex(&[0, 0x0f, 0xff]), "000fff");
    }

    #[test]
    fn table_columns_line_up_and_numbers_stand_right() {
        let rows = vec![vec!["a".into(), "7".into()], vec!["long".into(), "1234".into()]];
        assert_eq!(table(&["name", "n"], &rows), "name     n\na        7\nlong  1234\n");
    }
}
