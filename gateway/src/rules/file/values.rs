//! Values of a policy file: numbers of bytes, the proxy; and the key that a misspelt one is like.

use std::fmt;
use std::str::FromStr;

use crate::rules::Rule;
use crate::upstream::Kind;

/// A proxy through which connections leave.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proxy {
    /// How it is asked.
    pub kind: Kind,
    /// Its name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// User and password.
    pub credentials: Option<(String, String)>,
}

/// Without the password.
impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}:{}", self.kind, self.host, self.port)
    }
}

const PROXY_FORM: &str =
    "expected http://[USER:PASSWORD@]HOST:PORT or socks5://[USER:PASSWORD@]HOST:PORT";

impl FromStr for Proxy {
    type Err = String;

    /// The message does not repeat the text, which may have a password.
    fn from_str(text: &str) -> Result<Proxy, String> {
        let invalid = |what: &str| format!("invalid proxy: {what}");
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid(PROXY_FORM))?;
        let kind = match scheme.to_ascii_lowercase().as_str() {
            "http" => Kind::Http,
            "socks5" | "socks5h" => Kind::Socks5,
            "https" => return Err(invalid("TLS to the proxy is not supported")),
            _ => return Err(invalid(PROXY_FORM)),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (user, host) = match rest.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, rest),
        };
        let (host, port) = host_and_port(host).ok_or_else(|| invalid(PROXY_FORM))?;
        let credentials = user.map(credentials).transpose().map_err(|e| invalid(&e))?;
        Ok(Proxy { kind, host, port, credentials })
    }
}

fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    // One host, as in a rule.
    let is_host = !bare.contains(['*', '/']) && format!("[{bare}]").parse::<Rule>().is_ok();
    let port = port.parse().ok().filter(|p| *p != 0)?;
    is_host.then(|| (bare.to_ascii_lowercase(), port))
}

/// RFC 1929 and RFC 7617 bound and forbid alike: 255 bytes, no control characters; no colon in the user.
fn credentials(text: &str) -> Result<(String, String), String> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let decoded = [user, password].map(percent_decoded);
    let [Some(user), Some(password)] = decoded else {
        return Err("user or password is not percent-encoded UTF-8".to_owned());
    };
    let is_valid = |t: &str| t.len() <= 255 && !t.chars().any(char::is_control);
    if user.is_empty() || user.contains(':') || !is_valid(&user) || !is_valid(&password) {
        return Err("user and password have at most 255 bytes, and the user no colon".to_owned());
    }
    Ok((user, password))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            other => other,
        });
    }
    String::from_utf8(decoded).ok()
}

/// A number of bytes: `500000`, `10 MB`, `1GiB`.
pub(super) fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim_start() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// The known word from which a word has at most two differences.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let all = known.iter().map(|k| (distance(word, k), *k));
    all.min().filter(|(distance, _)| *distance <= 2).map(|(_, k)| k)
}

/// Characters to insert, remove or replace to make one word the other. Long words are far from all.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 40 {
        return usize::MAX;
    }
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut left_above = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = left_above + usize::from(x != *y);
            left_above = row[j + 1];
            row[j + 1] = replaced.min(left_above + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_read_with_its_user() {
        let proxy: Proxy = "http://me:p%40ss%3A@proxy.corp:3128/".parse().unwrap();
        assert_eq!((proxy.kind, proxy.host.as_str(), proxy.port), (Kind::Http, "proxy.corp", 3128));
        assert_eq!(proxy.credentials, Some(("me".into(), "p@ss:".into())));
        assert!(!format!("{proxy:?}").contains("p@ss"));
        let socks: Proxy = "SOCKS5://[2001:db8::1]:1080".parse().unwrap();
        assert_eq!((socks.kind, socks.host.as_str()), (Kind::Socks5, "2001:db8::1"));
        assert_eq!(socks.credentials, None);
        for text in [
            "",
            "proxy:80",
            "http://proxy",
            "http://proxy:0",
            "http://:80",
            "ftp://proxy:80",
            "https://proxy:443",
            "http://a b:80",
            "http://*.corp:80",
            "http://10.0.0.0/8:80",
            "http://:x@proxy:80",
            "http://a%0:x@proxy:80",
            "http://a%0ab:x@proxy:80",
            "http://a%ff@proxy:80",
        ] {
            let error = text.parse::<Proxy>().unwrap_err();
            assert!(error.starts_with("invalid proxy: "), "{text}: {error}");
        }
        let secret = "socks5://me:secret@proxy".parse::<Proxy>().unwrap_err();
        assert!(!secret.contains("secret"), "{secret}");
    }

    #[test]
    fn bytes_have_units() {
        for (text, number) in [
            ("500000", Some(500_000)),
            ("10 MB", Some(10_000_000)),
            ("1GiB", Some(1 << 30)),
            ("2 kB", Some(2000)),
            ("", None),
            ("MB", None),
            ("-1", None),
            ("1.5 GB", None),
            ("10 Mb", None),
            ("99999999999 TB", None),
        ] {
            assert_eq!(bytes(text), number, "{text}");
        }
    }

    #[test]
    fn the_nearest_word_is_within_two_differences() {
        let known = ["allow", "deny", "names"];
        assert_eq!(nearest("alow", &known), Some("allow"));
        assert_eq!(nearest("Deny", &known), Some("deny"));
        assert_eq!(nearest("block", &known), None);
        assert_eq!(nearest(&"a".repeat(100_000), &known), None);
    }
}
