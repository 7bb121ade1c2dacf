//! `fulmar policy`: policy files, read as `fulmar run --policy` reads them.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use clap::Subcommand;
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::mapping::Mapping;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::rules::file::{MOST_BYTES, NamesMode, PolicyFile};
use fulmar_gateway::rules::{Destination, Rule, Rules, Verdict};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::failure::{During, Failure, Outcome};
use crate::format::printable;
use crate::stat;

/// Record type of IPv4 addresses.
const TYPE_A: u16 = 1;

/// Check a policy file, and show what it decides
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Subcommand, Debug)]
enum PolicyCommand {
    Check(CheckArgs),
    Explain(ExplainArgs),
    Reload(ReloadArgs),
}

/// Read a policy file, and report errors and parts that have no effect
#[derive(clap::Args, Debug)]
#[command(after_help = "Example of a policy file (TOML):
  # Everything else is refused: an allow list closes the rest.
  allow = [
    \"github.com:443\",
    \"*.npmjs.org:443\",
    { to = \"10.1.2.3:53\", protocol = \"udp\" },
  ]
  deny = [\"ads.example.com\"]

Keys: default (\"allow\" or \"deny\"), allow, deny, names (\"given\" or
\"real\"), encrypted-client-hello (\"allow\" or \"deny\").

A file that begins with a brace is read as the settings of sandbox-runtime
(JSON): network.allowedDomains and network.deniedDomains.

Exit status: 0 if `fulmar run --policy FILE` accepts the file, otherwise 2.")]
pub struct CheckArgs {
    /// The policy file
    file: PathBuf,
}

/// Show whether a policy file allows a destination, and the line that decides
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar policy explain agent.toml github.com:443
  fulmar policy explain agent.toml 169.254.169.254:80
  fulmar policy explain agent.toml '[2001:db8::1]:53' --protocol udp
  fulmar policy explain agent.toml intranet.corp:443 --address 10.1.2.3

Exit status: 0 if the destination is allowed, 1 if it is refused, 2 on an
error.")]
pub struct ExplainArgs {
    /// The policy file
    file: PathBuf,
    /// The destination; without a port for icmp
    #[arg(value_name = "NAME:PORT|ADDRESS:PORT")]
    destination: String,
    /// The transport
    #[arg(long, value_enum, default_value_t)]
    protocol: Transport,
    /// An address to which the name leads
    #[arg(long)]
    address: Option<IpAddr>,
}

/// Let a running `fulmar run --policy` read its policy file again
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The gateway of the run reads the file again. It says on the standard error of
the program what has become of it, and keeps its rules if the file has an
error. Connections that the new policy denies are reset. SIGHUP to the
gateway's process has the same effect.

Exit status: 0 if a gateway was asked, 2 on an error."
)]
pub struct ReloadArgs {
    /// The process of the run, of its program or of its gateway, or a name; needed if several run
    #[arg(value_name = "PID|NAME")]
    stack: Option<String>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Transport {
    #[default]
    Tcp,
    Udp,
    Icmp,
}

impl From<Transport> for Protocol {
    fn from(transport: Transport) -> Protocol {
        match transport {
            Transport::Tcp => Protocol::Tcp,
            Transport::Udp => Protocol::Udp,
            Transport::Icmp => Protocol::Icmp,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// A sentence about the file or the destination.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    match &args.command {
        PolicyCommand::Check(args) => check(args),
        PolicyCommand::Explain(args) => explain(args),
        PolicyCommand::Reload(args) => reload(args),
    }
}

/// Reads the text of a policy file. One that changes while it is read is refused: half of it may be missing.
///
/// # Errors
/// A sentence: the file cannot be read.
pub fn read_text(path: &Path) -> Outcome<String> {
    let file = File::open(path).map_err(|e| Failure::file("cannot read the policy", path, &e))?;
    read_open(&file, path)
}

/// The same of a file that was opened before. Another file at the path is refused: the program can put one there.
///
/// # Errors
/// A sentence: the file cannot be read, or is another one.
pub fn read_again(file: &File, path: &Path) -> Outcome<String> {
    let id = |m: std::fs::Metadata| (m.dev(), m.ino());
    let about = file.metadata().map_err(|e| Failure::file("cannot read the policy", path, &e))?;
    if about.nlink() > 1 {
        return Err(Failure::new(format!(
            "{} has a second name (a hard link), by which the program may have written to it; copy it to a file of its own",
            path.display()
        )));
    }
    let own = id(about);
    if !std::fs::metadata(path).is_ok_and(|there| id(there) == own) {
        return Err(Failure::new(format!(
            "{} is another file than at the start, which the program may have put there; write a new policy into the \
             file itself, as `cat NEW > {}` does",
            path.display(),
            path.display()
        )));
    }
    (&*file).rewind().during("cannot read the policy again")?;
    read_open(file, path)
}

fn read_open(mut file: &File, path: &Path) -> Outcome<String> {
    let failed = |e: &io::Error| Failure::file("cannot read the policy", path, e);
    let state = |file: &File| file.metadata().map(|m| (m.is_file(), m.len(), m.modified().ok()));
    let before = state(file).map_err(|e| failed(&e))?;
    if !before.0 {
        let what = "not a regular file; the policy is read more than once";
        return Err(Failure::new(format!("cannot read the policy {}: {what}", path.display())));
    }
    let mut bytes = Vec::new();
    let mut limited = (&mut file).take(MOST_BYTES as u64 + 1);
    limited.read_to_end(&mut bytes).map_err(|e| failed(&e))?;
    if state(file).map_err(|e| failed(&e))? != before {
        return Err(Failure::new(format!(
            "the policy {} changed while it was read; try again",
            path.display()
        )));
    }
    String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()]
            .iter()
            .filter(|b| **b == b'\n')
            .count();
        Failure::new(format!("{}:{line}: the text is not UTF-8", path.display()))
    })
}

/// Reads the text as a policy.
///
/// # Errors
/// What is wrong with it, with line and column.
pub fn parse(text: &str, path: &Path) -> Outcome<PolicyFile> {
    PolicyFile::parse(text, path).map_err(|e| Failure::new(e.to_string()))
}

fn read(path: &Path) -> Outcome<PolicyFile> {
    parse(&read_text(path)?, path)
}

fn check(args: &CheckArgs) -> Outcome<ExitCode> {
    let (path, policy) = (&args.file, read(&args.file)?);
    let mut text = String::new();
    for note in &policy.notes {
        text += &format!("{}:{}: note: {}\n", path.display(), note.line, printable(&note.value));
    }
    text += &format!("{}: {}\n", path.display(), summary(&policy));
    print(&text);
    Ok(ExitCode::SUCCESS)
}

fn reload(args: &ReloadArgs) -> Outcome<ExitCode> {
    let mut found = stat::documents();
    found.retain(|document| {
        let Some(gateway) = &document.gateway else { return false };
        let is_wanted = args.stack.as_ref().is_none_or(|wanted| {
            let command = || gateway.guest.pid.and_then(parent).is_some_and(|pid| pid == *wanted);
            stat::matches(document, wanted) || command()
        });
        is_wanted && has_policy(document.pid)
    });
    let pids: Vec<u32> = found.iter().map(|document| document.pid).collect();
    let pid = match pids[..] {
        [pid] => pid,
        [] => {
            let which = if args.stack.is_some() { "no such run" } else { "no run" };
            return Err(Failure::new(format!(
                "{which} with --policy is running; `fulmar stat` lists the gateways"
            )));
        }
        _ => return Err(Failure::new(format!("several runs have a policy; give one of {pids:?}"))),
    };
    let raw = i32::try_from(pid).map(Pid::from_raw).map_err(|e| Failure::new(e.to_string()))?;
    kill(raw, Signal::SIGHUP).map_err(io::Error::from).during("cannot signal the gateway")?;
    print(&format!(
        "asked the gateway {pid} to read its policy again; it reports errors on the standard error of its program\n"
    ));
    Ok(ExitCode::SUCCESS)
}

/// The parent of a process: of a program, the command that waits for it.
fn parent(pid: u32) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Some(line.trim().to_owned())
}

/// Whether a process is the gateway of a run with a policy file: SIGHUP ends others.
fn has_policy(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|b| *b == 0).skip(1);
    words.next() == Some(b"run")
        && words.take_while(|word| *word != b"--").any(|word| word.starts_with(b"--policy"))
}

fn summary(policy: &PolicyFile) -> String {
    let rules = match policy.rules.len() {
        1 => "1 rule".to_owned(),
        number => format!("{number} rules"),
    };
    let rest = if policy.rules.is_closed() { "refused" } else { "allowed" };
    let names = match policy.names.as_ref().map(|said| said.value) {
        _ if !policy.rules.have_names() => "",
        Some(NamesMode::Real) => "; names have their real addresses",
        _ => "; names have addresses of their own",
    };
    format!("{rules}; what no rule names is {rest}{names}")
}

/// Prints a text. A closed pipe is ignored.
fn print(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}

/// A destination as the user writes it.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Target {
    Address(SocketAddr),
    Name(String, u16),
}

impl Target {
    fn parse(text: &str, protocol: Protocol) -> Outcome<Target> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Target::Address(address));
        }
        let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
        let has_ports = protocol != Protocol::Icmp;
        if let (false, Ok(address)) = (has_ports, bare.parse::<IpAddr>()) {
            return Ok(Target::Address(SocketAddr::new(address, 0)));
        }
        let (name, port) = match text.rsplit_once(':') {
            Some((name, port)) => (name, port.parse::<u16>().ok().filter(|p| *p != 0)),
            None => (text, (!has_ports).then_some(0)),
        };
        let is_name = !name.contains(['*', '/', ':', '[']) && Rule::from_str(name).is_ok();
        match port.filter(|_| is_name) {
            Some(port) => Ok(Target::Name(name.trim_end_matches('.').to_ascii_lowercase(), port)),
            None => Err(Failure::new(format!(
                "invalid destination `{text}`: expected NAME:PORT, ADDRESS:PORT or [IPV6]:PORT; the port is 1-65535"
            ))),
        }
    }
}

fn explain(args: &ExplainArgs) -> Outcome<ExitCode> {
    let policy = read(&args.file)?;
    let protocol = args.protocol.into();
    let target = Target::parse(&args.destination, protocol)?;
    if let (Target::Address(_), Some(_)) = (&target, args.address) {
        return Err(Failure::new("--address requires a destination by name"));
    }
    let own = || {
        let HostNetwork { addresses, networks, .. } = HostNetwork::read(None).unwrap_or_default();
        Mapping { host_addresses: addresses, host_networks: networks, ..Mapping::default() }
    };
    let (is_allowed, text) = explained(&policy.rules, protocol, &target, args.address, own);
    print(&text);
    Ok(ExitCode::from(u8::from(!is_allowed)))
}

/// Whether a destination is allowed, and why. `own`: the host's addresses and networks.
fn explained(
    rules: &Rules,
    protocol: Protocol,
    target: &Target,
    address: Option<IpAddr>,
    own: impl FnOnce() -> Mapping,
) -> (bool, String) {
    let (name, port) = match target {
        Target::Address(at) => {
            let d =
                Destination { is_host: own().is_host(*at, *at), ..Destination::new(protocol, *at) };
            return said(&rules.verdict(&d), "");
        }
        Target::Name(name, port) => (name, *port),
    };
    let question = rules.name_verdict(name, TYPE_A);
    if question.denial.is_some() {
        return said(&question, "  the name is refused when the program asks for its address\n");
    }
    let names = [name.clone()];
    let at = SocketAddr::new(address.unwrap_or([0, 0, 0, 0].into()), port);
    let d = Destination { names: &names, ..Destination::new(protocol, at) };
    match address {
        None => said(&rules.verdict_of_name(&d), ADDRESS_UNKNOWN),
        Some(_) => {
            let own = own();
            let (is_host, host_network) = (own.is_host(at, at), own.host_network(at, at));
            let d = Destination { is_host, host_network, is_by_name: true, ..d };
            said(&rules.verdict(&d), "")
        }
    }
}

/// Further decisions about a name that is allowed.
const ADDRESS_UNKNOWN: &str = "  the address of the name is checked as well when the program connects: a rule that denies it, or a\n  private, link-local or metadata address, refuses the connection (--address ADDRESS shows it)\n";

fn said(verdict: &Verdict<'_>, more: &str) -> (bool, String) {
    let is_allowed = verdict.denial.is_none();
    let word = if is_allowed { "allowed" } else { "refused" };
    let by = verdict.to_string();
    let more = if is_allowed || more != ADDRESS_UNKNOWN { more } else { "" };
    (is_allowed, format!("{word} by {}\n  {}\n{more}", printable(&by), verdict.step.sentence()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> PolicyFile {
        PolicyFile::parse(text, Path::new("agent.toml")).unwrap()
    }

    #[test]
    fn the_line_that_decides_is_named() {
        let policy = policy(
            "allow = [\n\"github.com:443\",\n\"10.1.2.3\",\n{ to = \"dns.example\", protocol = \"udp\" } ]\n\
             deny = [\"10.0.0.0/8\", \"evil.github.com\"]\n",
        );
        let explain = |text: &str, protocol, address: Option<&str>| {
            let target = Target::parse(text, protocol).unwrap();
            let address = address.map(|a| a.parse().unwrap());
            explained(&policy.rules, protocol, &target, address, || Mapping {
                host_addresses: vec!["192.0.2.7".parse().unwrap()],
                host_networks: vec![("203.0.113.0".parse().unwrap(), 24)],
                ..Mapping::default()
            })
        };
        let tcp = |text: &str| explain(text, Protocol::Tcp, None);
        let (is_allowed, said) = tcp("GitHub.com.:443");
        assert!(
            is_allowed && said.starts_with("allowed by agent.toml:2: allow github.com:443\n"),
            "{said}"
        );
        assert!(said.contains("--address ADDRESS"), "{said}");
        for (text, decides) in [
            ("github.com:22", "default: closed by agent.toml:2: allow github.com:443"),
            ("evil.github.com:443", "agent.toml:5: deny evil.github.com"),
            ("10.9.9.9:80", "agent.toml:5: deny 10.0.0.0/8"),
            ("169.254.169.254:80", "default: addresses of cloud metadata services"),
            ("192.0.2.7:80", "default: the host's own addresses"),
            ("[2001:db8::1]:80", "default: closed by"),
        ] {
            let (is_allowed, said) = tcp(text);
            assert!(
                !is_allowed && said.starts_with(&format!("refused by {decides}")),
                "{text}: {said}"
            );
        }
        assert!(tcp("10.1.2.3:80").0);
        assert!(explain("dns.example:53", Protocol::Udp, None).0 && !tcp("dns.example:53").0);
        assert!(explain("10.1.2.3", Protocol::Icmp, None).0);
        let (is_allowed, said) = explain("github.com:443", Protocol::Tcp, Some("10.9.9.9"));
        assert!(!is_allowed && said.contains("deny 10.0.0.0/8"), "{said}");
        let (is_allowed, said) = explain("github.com:443", Protocol::Tcp, Some("192.168.1.1"));
        assert!(!is_allowed && said.contains("private addresses"), "{said}");
        let (is_allowed, said) = explain("github.com:443", Protocol::Tcp, Some("203.0.113.9"));
        assert!(!is_allowed && said.contains("the host's own network"), "{said}");
    }

    #[test]
    fn destinations_are_names_or_addresses_with_a_port() {
        for text in [
            "",
            "github.com",
            ":443",
            "a:0",
            "a:x",
            "*:80",
            "*.a:80",
            "10.0.0.0/8:80",
            "1.2.3:80",
            "::1",
            "a b:1",
        ] {
            assert!(Target::parse(text, Protocol::Tcp).is_err(), "{text}");
        }
        assert!(Target::parse("[::1]:80", Protocol::Tcp).is_ok());
        assert!(Target::parse("::1", Protocol::Icmp).is_ok());
        assert!(Target::parse("example.org", Protocol::Icmp).is_ok());
    }

    #[test]
    fn a_file_is_read_as_a_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("fulmar-policy-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("p.toml");
        std::fs::write(&path, "default = \"deny\"\n").unwrap();
        assert_eq!(summary(&read(&path).unwrap()), "0 rules; what no rule names is refused");
        let error = |path: &Path| read(path).unwrap_err().to_string();
        std::fs::write(&path, b"default = \"deny\"\n# \xff\n").unwrap();
        assert!(error(&path).ends_with("p.toml:2: the text is not UTF-8"));
        let huge = File::create(&path).unwrap();
        huge.set_len(1 << 40).unwrap();
        assert!(error(&path).contains("more than 4 MiB"), "{}", error(&path));
        assert!(error(&folder).contains("not a regular file"));
        assert!(error(&folder.join("none")).contains("no such file"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
