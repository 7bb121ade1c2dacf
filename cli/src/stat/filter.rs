//! Which sockets are shown: a part of the filters of ss(8).
//!
//! ```text
//!   FILTER = TERM { ["and"] TERM }
//!   TERM   = ["not"] ( "tcp" | "udp" | "state" NAME | ("sport" | "dport") OP [":"]PORT | ("src" | "dst") ADDRESS )
//!   OP     = "=" | "!=" | "<" | ">" | "<=" | ">="
//! ```

use fulmar::stat::{Flow, Socket};
use std::cmp::Ordering;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// All of its terms.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Filter(Vec<Term>);

#[derive(Clone, PartialEq, Eq, Debug)]
struct Term {
    is_negated: bool,
    test: Test,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Test {
    Protocol(&'static str),
    State(&'static str),
    Port(End, Comparison, u16),
    Address(End, IpAddr),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Local,
    Remote,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    Greater,
    AtMost,
    AtLeast,
}

const SYNTAX: &str = "expected terms such as `dport = :80`, `sport < 1024`, `src 10.77.0.2`, `dst fd77::1`, `state \
    established`, `tcp`, `udp`, `not ...`, which must all match";

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let mut words = text.split_whitespace();
        let mut terms = Vec::new();
        while let Some(word) = words.next() {
            if word == "and" {
                continue;
            }
            let is_negated = word == "not";
            let word = if is_negated { words.next() } else { Some(word) };
            let test = word.and_then(|w| test(w, &mut words));
            let test = test.ok_or_else(|| format!("invalid filter `{text}`: {SYNTAX}"))?;
            terms.push(Term { is_negated, test });
        }
        Ok(Filter(terms))
    }
}

fn test<'a>(word: &str, words: &mut impl Iterator<Item = &'a str>) -> Option<Test> {
    let end = match word {
        "sport" | "src" => End::Local,
        _ => End::Remote,
    };
    Some(match word {
        "tcp" => Test::Protocol("tcp"),
        "udp" => Test::Protocol("udp"),
        "state" => Test::State(state(words.next()?)?),
        "sport" | "dport" => {
            let comparison = comparison(words.next()?)?;
            let port = words.next()?;
            Test::Port(end, comparison, port.strip_prefix(':').unwrap_or(port).parse().ok()?)
        }
        "src" | "dst" => Test::Address(end, words.next()?.parse().ok()?),
        _ => return None,
    })
}

/// The states of sockets and of a gateway's flows, as a document has them.
const STATES: [&str; 15] = [
    "LISTEN",
    "SYN-SENT",
    "SYN-RECEIVED",
    "ESTABLISHED",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "CLOSE-WAIT",
    "CLOSING",
    "LAST-ACK",
    "TIME-WAIT",
    "CLOSED",
    "UNCONNECTED",
    "connecting",
    "open",
    "half-closed",
];

/// The state that is meant: ss(8) spells some otherwise.
fn state(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase().replace('_', "-");
    let full = match word.as_str() {
        "estab" => "established",
        "syn-recv" => "syn-received",
        "listening" => "listen",
        "unconn" => "unconnected",
        other => other,
    };
    STATES.into_iter().find(|state| state.eq_ignore_ascii_case(full))
}

fn comparison(word: &str) -> Option<Comparison> {
    Some(match word {
        "=" | "==" | "eq" => Comparison::Equal,
        "!=" | "ne" => Comparison::NotEqual,
        "<" | "lt" => Comparison::Less,
        ">" | "gt" => Comparison::Greater,
        "<=" | "le" => Comparison::AtMost,
        ">=" | "ge" => Comparison::AtLeast,
        _ => return None,
    })
}

/// What a filter looks at. Of a gateway's flow the guest's end is the local one.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// `tcp`, `udp` or `icmp`.
    pub protocol: &'a str,
    /// Its state.
    pub state: &'a str,
    /// The local end.
    pub local: Option<SocketAddr>,
    /// The remote end.
    pub remote: Option<SocketAddr>,
}

impl<'a> From<&'a Socket> for Ends<'a> {
    fn from(s: &'a Socket) -> Ends<'a> {
        Ends { protocol: &s.protocol, state: &s.state, local: s.local, remote: s.remote }
    }
}

impl<'a> From<&'a Flow> for Ends<'a> {
    fn from(f: &'a Flow) -> Ends<'a> {
        Ends { protocol: &f.protocol, state: &f.state, local: f.guest, remote: f.peer }
    }
}

impl Filter {
    /// Whether a socket or flow is to be shown.
    pub fn admits(&self, ends: Ends<'_>) -> bool {
        self.0.iter().all(|term| term.test.holds(ends) != term.is_negated)
    }
}

impl Test {
    fn holds(&self, ends: Ends<'_>) -> bool {
        let address = |end: End| match end {
            End::Local => ends.local,
            End::Remote => ends.remote,
        };
        match self {
            Test::Protocol(name) => ends.protocol == *name,
            Test::State(name) => ends.state == *name,
            Test::Port(end, comparison, port) => {
                address(*end).is_some_and(|a| comparison.holds(a.port().cmp(port)))
            }
            Test::Address(end, ip) => address(*end).is_some_and(|a| a.ip() == *ip),
        }
    }
}

impl Comparison {
    fn holds(self, found: Ordering) -> bool {
        match self {
            Comparison::Equal => found.is_eq(),
            Comparison::NotEqual => found.is_ne(),
            Comparison::Less => found.is_lt(),
            Comparison::Greater => found.is_gt(),
            Comparison::AtMost => found.is_le(),
            Comparison::AtLeast => found.is_ge(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[test]
    fn a_socket_is_shown_if_every_term_holds() {
        let socket: Socket = from_value(json!({"protocol": "tcp", "state": "TIME-WAIT",
            "local": "10.77.0.2:1000", "remote": "10.77.0.1:80"}))
        .unwrap();
        let admits = |filter: &str| filter.parse::<Filter>().unwrap().admits((&socket).into());
        for filter in [
            "",
            "tcp",
            "dport = :80",
            "dport eq 80 and sport >= 1000",
            "state time-wait",
            "state TIME_WAIT",
            "not state estab",
            "src 10.77.0.2 dst 10.77.0.1",
            "not udp and not state established",
            "sport != 80",
        ] {
            assert!(admits(filter), "{filter}");
        }
        for filter in ["udp", "dport > 80", "sport < 1000", "tcp and state listen", "dst ::1"] {
            assert!(!admits(filter), "{filter}");
        }
    }

    #[test]
    fn the_local_end_of_a_flow_is_the_guests() {
        let flow: Flow =
            from_value(json!({"protocol": "tcp", "state": "open", "guest": "10.0.0.2:1000",
            "peer": "10.0.0.1:80", "host": "127.0.0.1:80"}))
            .unwrap();
        let admits = |filter: &str| filter.parse::<Filter>().unwrap().admits((&flow).into());
        assert!(admits("sport = 1000 and dst 10.0.0.1 and state open"));
        assert!(!admits("dst 127.0.0.1"));
    }

    #[test]
    fn a_socket_without_a_peer_has_no_port_there() {
        let mut socket = Socket::default();
        socket.local = Some("0.0.0.0:53".parse().unwrap());
        assert!(!"dport != 80".parse::<Filter>().unwrap().admits((&socket).into()));
    }

    #[test]
    fn an_invalid_filter_is_refused_with_the_syntax() {
        for text in
            ["dport", "dport 80", "dport = x", "port = 80", "state", "state foo", "not", "src 10"]
        {
            assert!(text.parse::<Filter>().unwrap_err().contains("dport = :80"), "{text}");
        }
    }
}
