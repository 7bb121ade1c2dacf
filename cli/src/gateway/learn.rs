//! `--learn`: the smallest policy that would have sufficed for a run, as a policy file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Seek, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fulmar_gateway::policy::Protocol;

use super::audit::receipt::Work;
use super::output;
use crate::failure::{Failure, Outcome};
use crate::format;

/// The file of a policy that is to be written.
pub(super) struct Learnt {
    file: File,
    path: PathBuf,
}

/// Makes the file, or opens it; what is in it stays until the end of the run.
///
/// # Errors
/// A sentence: it cannot be opened.
pub(crate) fn open(path: &Path) -> Outcome<File> {
    output::open(path, 0o600, false).map_err(|e| Failure::file("cannot write", path, &e))
}

impl Learnt {
    pub(super) fn open(path: &Path) -> Outcome<Learnt> {
        Ok(Learnt { file: open(path)?, path: path.to_owned() })
    }

    /// Writes the policy of what was reached. `resolvers`: always reached. Returns a sentence for the user.
    pub(super) fn write(mut self, work: &[Work], resolvers: &[IpAddr]) -> String {
        let (text, rules) = policy(work, resolvers);
        let written = self
            .file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .and_then(|()| self.file.write_all(text.as_bytes()));
        let path = self.path.display();
        match written {
            Ok(()) => {
                let allow = if rules == 1 { "allows" } else { "allow" };
                let rules = format::count(rules as u64, "rule");
                format!("{path} has {rules}, which {allow} what this run has reached")
            }
            Err(e) => format!("cannot write {path}: {e}"),
        }
    }
}

/// What was done at one destination under one rule.
#[derive(Default)]
struct Use {
    flows: u64,
    bytes_out: u64,
    bytes_in: u64,
}

/// A destination: host, port and transport.
type Destination = (String, u16, &'static str);

/// The policy file and the number of its rules. A name without flows has been refused, or has not answered.
fn policy(work: &[Work], resolvers: &[IpAddr]) -> (String, usize) {
    let (mut reached, mut others) = (BTreeMap::<Destination, Use>::new(), BTreeMap::new());
    let mut is_whole = true;
    for one in work {
        let Some((protocol, to)) = one.to else {
            is_whole = false;
            continue;
        };
        if resolvers.contains(&to.ip()) {
            continue;
        }
        let host = one.name.clone().unwrap_or_else(|| address(to.ip(), protocol));
        let all = if one.flows > 0 { &mut reached } else { &mut others };
        let used = all.entry((host, to.port(), protocol.name())).or_insert_with(Use::default);
        used.flows += one.flows.max(one.denied);
        used.bytes_out += one.bytes_out;
        used.bytes_in += one.bytes_in;
    }
    let mut text =
        String::from("# The destinations that a run has reached (fulmar run --learn).\n");
    // A run that has reached nothing makes a policy, too.
    text.push_str("default = \"deny\"\nallow = [\n");
    for ((host, port, protocol), used) in &reached {
        let Use { flows, bytes_out, bytes_in } = used;
        let (out, received) = (format::bytes(*bytes_out), format::bytes(*bytes_in));
        let rule = rule(host, *port, protocol);
        let flows = format::count(*flows, "flow");
        let _ = writeln!(text, "  {rule}, # {flows}, {out} out, {received} in");
    }
    text.push_str("]\n");
    for (host, port, protocol) in others.keys() {
        let _ = writeln!(text, "# not reached: {}", rule(host, *port, protocol));
    }
    if !is_whole {
        text.push_str("# There were more destinations; those of fewest bytes are missing.\n");
    }
    (text, reached.len())
}

fn address(ip: IpAddr, protocol: Protocol) -> String {
    match ip {
        IpAddr::V6(v6) if protocol != Protocol::Icmp => format!("[{v6}]"),
        ip => ip.to_string(),
    }
}

/// A rule as an inline table. A name of the guest's choice is a string of TOML in any case.
fn rule(host: &str, port: u16, protocol: &str) -> String {
    let to = if protocol == "icmp" { host.to_owned() } else { format!("{host}:{port}") };
    // Strings of JSON are strings of TOML, but for one character.
    let to = serde_json::Value::from(to).to_string().replace('\u{7f}', "\\u007f");
    format!("{{ to = {to}, protocol = \"{protocol}\" }}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use fulmar_gateway::rules::file::PolicyFile;

    use super::*;

    fn work(protocol: Protocol, to: &str, name: Option<&str>, flows: u64) -> Work {
        let (to, name) = (Some((protocol, to.parse().unwrap())), name.map(str::to_owned));
        Work { to, name, flows, denied: 1, bytes_out: flows, bytes_in: 2048 * flows }
    }

    #[test]
    fn each_destination_that_was_reached_has_one_rule_by_its_name() {
        let (text, rules) = policy(
            &[
                work(Protocol::Tcp, "198.18.0.2:443", Some("example.org"), 2),
                work(Protocol::Tcp, "[fd00::2]:443", Some("example.org"), 1),
                work(Protocol::Udp, "198.18.0.2:443", Some("example.org"), 1),
                work(Protocol::Tcp, "[2001:db8::1]:22", None, 1),
                work(Protocol::Icmp, "192.0.2.1:0", None, 1),
                work(Protocol::Udp, "169.254.1.1:53", None, 9),
                work(Protocol::Tcp, "169.254.169.254:80", None, 0),
            ],
            &["169.254.1.1".parse().unwrap()],
        );
        assert_eq!(
            text,
            "# The destinations that a run has reached (fulmar run --learn).\n\
             default = \"deny\"\n\
             allow = [\n\
             \x20 { to = \"192.0.2.1\", protocol = \"icmp\" }, # 1 flow, 1 B out, 2.00 KiB in\n\
             \x20 { to = \"[2001:db8::1]:22\", protocol = \"tcp\" }, # 1 flow, 1 B out, 2.00 KiB in\n\
             \x20 { to = \"example.org:443\", protocol = \"tcp\" }, # 3 flows, 3 B out, 6.00 KiB in\n\
             \x20 { to = \"example.org:443\", protocol = \"udp\" }, # 1 flow, 1 B out, 2.00 KiB in\n\
             ]\n\
             # not reached: { to = \"169.254.169.254:80\", protocol = \"tcp\" }\n"
        );
        assert_eq!(rules, 4);
    }

    #[test]
    fn what_was_learned_is_a_policy_even_if_nothing_was_reached() {
        let one = [work(Protocol::Tcp, "198.18.0.2:443", Some("example.org"), 2)];
        for reached in [&one[..], &[]] {
            let (text, rules) = policy(reached, &[]);
            assert_eq!(rules, reached.len());
            let read = PolicyFile::parse(&text, Path::new("learned.toml"));
            assert!(read.is_ok(), "{:?} of {text}", read.err());
        }
    }

    #[test]
    fn a_name_of_the_guests_adds_no_rule() {
        let name = "a\"], [\n\u{7f}\u{1b}.example";
        let (text, rules) =
            policy(&[work(Protocol::Tcp, "198.18.0.2:443", Some(name), 1), Work::default()], &[]);
        assert!(text.contains("to = \"a\\\"], [\\n\\u007f\\u001b.example:443\""), "{text}");
        assert!(text.lines().all(|line| line.chars().all(|c| !c.is_control())));
        assert!(rules == 1 && text.ends_with("are missing.\n"));
    }
}
