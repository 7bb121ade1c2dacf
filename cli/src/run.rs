//! `fulmar run`: a program in a namespace of its own, with a gateway to the host's network.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use fulmar_gateway::first::EncryptedHello;
use fulmar_gateway::names::Ranges;
use fulmar_gateway::netns::User;
use fulmar_gateway::ports::{Bind, ParsePortsError, PortSpec};
use fulmar_gateway::rules::file::{self, Proxy};
use fulmar_gateway::rules::{Rule, Rules, Source};

use crate::bounds::within;
use crate::failure::{During, Failure, Outcome};
use crate::gateway::Session;
use crate::gateway::args::Args as GatewayArgs;
use crate::gateway::ask::Whom;
use crate::gateway::audit::Target;
use crate::gateway::outside::Outside;
use crate::gateway::plan::Plan;
use crate::policy;

/// The address at which the program reaches the host's resolver.
const DNS: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
/// A policy that allows nothing.
const CLOSED: &str = "default = \"deny\"";
/// Rules that hold for every run, below the folder of the user's configuration.
const RULES_FILE: &str = "fulmar/run.rules";

/// Run a program in a network of its own, without root: access rules, published ports, capture, summary
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  fulmar run -- curl https://example.org
  fulmar run --summary --pcap page.pcapng -- wget -p example.org
  fulmar run --publish 8080:80 -- nginx -g 'daemon off;'
  fulmar run --allow '*.debian.org:80' -- apt-get download hello
  fulmar run --deny 10.0.0.0/8 -- npm install
  fulmar run --no-network --host-port 5432 -- psql -h localhost
  fulmar run --ask --allow '*.debian.org' -- ./installer

A rule is HOST[:PORTS]; HOST is an address, a prefix, a name, *.name or *.
Write an IPv6 address with a port in brackets: [2001:db8::1]:443. A rule
applies to echo requests regardless of its ports.

An --allow closes the rest: only what an --allow names is reached. Two
exceptions: an --allow that is an exception from a --deny closes nothing
(--deny 10.0.0.0/8 --allow 10.1.2.3), and --allow '*' keeps the rest open.

Order of evaluation: rules by address (the longest prefix; --deny before
--allow of the same length), --deny by name, --allow by name, `*:PORTS`, the
default. Link-local addresses, cloud metadata services and the host's own
addresses are refused unless a rule by address allows them. If a rule names a
name, names resolve to addresses of their own (198.18.0.0/15 and an IPv6
prefix), each of which leads to that name only; a name does not lead to a
private address, unless a rule by address allows it.

Rules for every run are read from ~/.config/fulmar/run.rules, with lines such
as `deny 10.0.0.0/8`, `allow example.org:443`, `no-network`. A line means what
the option means, so an `allow` line closes the rest for every run. Options
take precedence over the file; if they close the rest, the `allow` lines of
the file are ignored.

Rules do not cover Unix sockets, inherited descriptors and root: --strict does.
Of the host's loopback interface the program reaches the ports of --host-port
and --host-port-udp only; no rule refuses them.

The first refused destination is reported on standard error with the option
that allows it, and all of them in one line at the end; not with --quiet.

The program runs as the same user, with the same files and terminal.

Exit status: that of the program. Of the command itself: 2 (invalid option or
rule), 125 (no network), 126 (not executable), 127 (no such program).")]
pub struct Args {
    /// TCP ports of the host to forward to the program: [ADDRESS/]FIRST[-LAST][:TO]
    #[arg(short, long, value_name = "PORTS")]
    publish: Vec<PortSpec>,
    /// UDP ports of the host to forward to the program
    #[arg(long, value_name = "PORTS")]
    publish_udp: Vec<PortSpec>,
    /// TCP ports of the host's loopback interface that the program reaches at its own, 127.0.0.1 and ::1:
    /// FIRST[-LAST][:TO], where TO is the host's first port
    #[arg(long, value_name = "PORTS", value_parser = chosen_ports)]
    host_port: Vec<PortSpec>,
    /// UDP ports of the host's loopback interface that the program reaches at its own
    #[arg(long, value_name = "PORTS", value_parser = chosen_ports)]
    host_port_udp: Vec<PortSpec>,
    /// Deliver datagrams to a UDP port of the program only from hosts that the port has sent to (address-dependent
    /// filtering)
    #[arg(long)]
    udp_filter: bool,
    /// Allow a destination, and refuse what no --allow matches
    #[arg(long, value_name = "RULE")]
    allow: Vec<Rule>,
    /// Refuse a destination
    #[arg(long, value_name = "RULE")]
    deny: Vec<Rule>,
    /// Refuse every destination that no --allow matches; needed only without --allow
    #[arg(long)]
    no_network: bool,
    /// Close the ways to other processes, which rules do not cover: Unix sockets, inherited descriptors, root's
    /// capabilities, signals, io_uring
    #[arg(long)]
    strict: bool,
    /// Leave this Unix socket, or the sockets of this folder, to the program
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,
    /// Report neither what the rules do not cover nor refused destinations
    #[arg(short, long)]
    quiet: bool,
    /// Addresses that names resolve to [default: that of --policy, or given]
    #[arg(long, value_enum)]
    names: Option<NamesMode>,
    /// Read rules from this file instead of ~/.config/fulmar/run.rules
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Read rules and settings from this policy file (TOML, or the JSON settings of sandbox-runtime) instead of
    /// ~/.config/fulmar/run.rules; `fulmar policy check --help` has an example
    #[arg(long, value_name = "FILE", conflicts_with = "rules")]
    policy: Option<PathBuf>,
    /// Write the program's packets to this file (pcapng)
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Ask on the terminal about what no rule allows or refuses, while the connection waits: once, always (in this run),
    /// no, never, stop (no more questions); includes --strict
    #[arg(long)]
    ask: bool,
    /// As --ask, but ask the program that listens at this Unix socket, by JSON lines
    #[arg(long, value_name = "PATH", conflicts_with = "ask")]
    ask_socket: Option<PathBuf>,
    /// Append what the program asks for and reaches to this file, as JSON lines; fd:N: to an open descriptor
    #[arg(long, value_name = "FILE|fd:N")]
    audit: Option<Target>,
    /// Allow all destinations but guarded ones, and write the smallest policy that would have sufficed to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["allow", "no_network", "rules", "policy"])]
    learn: Option<PathBuf>,
    /// Print a summary at the end: connections, bytes, time and refused destinations
    #[arg(long)]
    summary: bool,
    /// Serve Prometheus metrics on this port of the host's loopback interface, or on this address of the host
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = crate::metrics::address)]
    metrics: Option<SocketAddr>,
    /// MTU of the program's interface in bytes
    #[arg(long, value_name = "BYTES", value_parser = within(1280u32, 65_535))]
    mtu: Option<u32>,
    /// Queues of the program's interface, each served by its own thread; at most one per CPU [default: 1]
    #[arg(long, value_name = "N", value_parser = crate::gateway::args::queues)]
    queues: Option<u16>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// The addresses that the program gets of names.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum NamesMode {
    /// One of its own for each name, if a rule names a name
    Given,
    /// The real ones, which other names may share
    Real,
}

/// Runs the program.
///
/// # Errors
/// A sentence about an option.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let gateway = gateway_args(args);
    let mut plan = Plan::new(&gateway)?;
    plan.guest = crate::gateway::plan::Guest::Program(args.command.clone());
    let wanted = wanted(args)?;
    plan.ask = args.whom();
    if plan.ask.is_some() && wanted.names == NamesMode::Real {
        let what = "cannot ask about names that have their real addresses; omit --names real";
        return Err(Failure::new(what));
    }
    let is_open = args.learn.is_some() || plan.ask.is_some();
    if wanted.has_given_names() || (is_open && wanted.names == NamesMode::Given) {
        plan.names = Some(Ranges::of_global_id(global_id()?));
    }
    let Wanted { rules, encrypted_hello, proxy, audit, text, .. } = wanted;
    plan.proxy = proxy;
    plan.encrypted_hello = encrypted_hello;
    plan.reload = text.map(|text| (Arc::new(args.clone()), text));
    let has_rules = !rules.is_empty();
    // The last line about refusals comes after the program.
    let writes = audit.is_some() || args.learn.is_some();
    let waits = args.summary || writes || plan.ask.is_some() || !args.quiet && has_rules;
    plan.rules = Some(rules);
    plan.protected = protected(args);
    if let Some(target) = &audit {
        plan.protected.extend(target.prepare()?);
    }
    plan.audit = audit;
    if let Some(path) = &args.learn {
        crate::gateway::learn::open(path)?;
        plan.protected.extend(path.canonicalize().ok());
    }
    plan.learn = args.learn.clone();
    plan.outside = outside(args, has_rules)?;
    plan.has_summary = args.summary;
    plan.covered = plan.ask.as_ref().and_then(Whom::covered);
    let session = Session { plan, name: "fulmar run", user: User::Same };
    if waits { session.run_and_wait() } else { session.run() }
}

fn outside(args: &Args, has_rules: bool) -> Outcome<Outside> {
    let full = |path: &PathBuf| {
        path.canonicalize().map_err(|e| Failure::file("cannot find the Unix socket", path, &e))
    };
    Ok(Outside {
        has_rules,
        // By another way to the terminal the program could answer itself, or kill who asks.
        is_strict: args.strict || args.ask,
        is_quiet: args.quiet,
        unix: args.unix.iter().map(full).collect::<Outcome<_>>()?,
    })
}

/// The random bits of a unique local prefix (RFC 4193 section 3.2.2).
fn global_id() -> Outcome<[u8; 5]> {
    let mut id = [0; 5];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut id))
        .during("cannot read /dev/urandom")?;
    Ok(id)
}

/// The options of the gateway behind a run.
fn gateway_args(args: &Args) -> GatewayArgs {
    let mut gateway = GatewayArgs::default();
    let or_none = |list: &[PortSpec]| match list {
        [] => vec![PortSpec::None],
        list => list.to_vec(),
    };
    gateway.attach.config_net = true;
    gateway.guest.mtu = args.mtu;
    gateway.map.dns_forward = vec![DNS];
    // No address leads to the host's loopback: its chosen ports are reached at the guest's own.
    gateway.map.no_map_gw = true;
    gateway.ports.tcp_ports = or_none(&args.publish);
    gateway.ports.udp_ports = or_none(&args.publish_udp);
    gateway.ports.tcp_ns = or_none(&args.host_port);
    gateway.ports.udp_ns = or_none(&args.host_port_udp);
    gateway.process.quiet = args.quiet;
    gateway.process.pcap = args.pcap.clone();
    gateway.process.metrics = args.metrics;
    gateway.process.queues = args.queues;
    gateway.ports.udp_filter = args.udp_filter;
    gateway
}

/// Reads a list of ports. `all` and `auto` are refused: they would open ports that the user has not chosen.
fn chosen_ports(text: &str) -> Result<PortSpec, String> {
    let spec: PortSpec = text.parse().map_err(|e: ParsePortsError| e.to_string())?;
    match &spec {
        PortSpec::Ports(ranges) if ranges.iter().all(|ports| ports.bind == Bind::default()) => {
            Ok(spec)
        }
        _ => Err("expected ports such as 5432, 8000-8010 or 15432:5432".into()),
    }
}

fn rules_path(args: &Args) -> Option<PathBuf> {
    args.rules.clone().or_else(rules_file)
}

/// What the program may not write to: the folder of the rules of every run, and the file of an option.
fn protected(args: &Args) -> Vec<PathBuf> {
    let folder = rules_file().and_then(|file| Some(file.parent()?.to_owned()));
    let named = args.policy.as_deref().or(args.rules.as_deref());
    let file = named.filter(|file| *file != Path::new("/dev/null"));
    folder.into_iter().chain(file.and_then(|file| file.canonicalize().ok())).collect()
}

/// What the options and the file say about the program's network.
pub struct Wanted {
    pub rules: Rules,
    names: NamesMode,
    pub encrypted_hello: EncryptedHello,
    pub proxy: Option<Proxy>,
    pub audit: Option<Target>,
    /// The text of the policy file.
    text: Option<Arc<str>>,
}

impl Wanted {
    /// Whether names get addresses of their own.
    pub fn has_given_names(&self) -> bool {
        self.names == NamesMode::Given && self.rules.have_names()
    }
}

impl Args {
    /// Who is asked about what no rule names.
    fn whom(&self) -> Option<Whom> {
        let socket = self.ask_socket.clone().map(Whom::Socket);
        socket.or(self.ask.then_some(Whom::Terminal))
    }

    /// The policy file.
    pub fn policy(&self) -> Option<&Path> {
        self.policy.as_deref()
    }
}

fn wanted(args: &Args) -> Outcome<Wanted> {
    if let Some(path) = &args.policy {
        // The reader serves a gateway whose policy was valid; the file may have an error by now.
        let text = match crate::gateway::is_policy_reader() {
            true => CLOSED.to_owned(),
            false => policy::read_text(path)?,
        };
        return wanted_by(args, &text);
    }
    let mut rules = Rules::default();
    // A run that learns is open.
    let path = if args.learn.is_some() { None } else { rules_path(args) };
    if let Some(path) = path {
        add_file(&mut rules, &path, args.rules.is_some())?;
    }
    add_options(&mut rules, args);
    let names = args.names.unwrap_or(NamesMode::Given);
    let (encrypted_hello, audit) = (EncryptedHello::default(), args.audit.clone());
    Ok(Wanted { rules, names, encrypted_hello, proxy: None, audit, text: None })
}

/// As [`wanted`], by the text of the policy file.
///
/// # Errors
/// A sentence about the text.
pub fn wanted_by(args: &Args, text: &str) -> Outcome<Wanted> {
    let path = args.policy().unwrap_or(Path::new(""));
    let mut policy = policy::parse(text, path)?;
    add_options(&mut policy.rules, args);
    let names = policy.names.map(|said| match said.value {
        file::NamesMode::Real => NamesMode::Real,
        _ => NamesMode::Given,
    });
    let encrypted_hello = match policy.allows_encrypted_hello.is_some_and(|said| said.value) {
        true => EncryptedHello::Pass,
        false => EncryptedHello::Refuse,
    };
    let names = args.names.or(names).unwrap_or(NamesMode::Given);
    let proxy = policy.proxy.map(|said| said.value);
    let audit = policy.audit.map(|said| {
        let path = path.display();
        let parsed = said.value.parse::<Target>();
        parsed.map_err(|e| Failure::new(format!("{path}:{}: invalid `audit`: {e}", said.line)))
    });
    let audit = args.audit.clone().map(Ok).or(audit).transpose()?;
    let (rules, text) = (policy.rules, Some(Arc::from(text)));
    Ok(Wanted { rules, names, encrypted_hello, proxy, audit, text })
}

fn add_options(rules: &mut Rules, args: &Args) {
    args.allow.iter().for_each(|rule| rules.allow(rule.clone(), Source::Option));
    args.deny.iter().for_each(|rule| rules.deny(rule.clone(), Source::Option));
    if args.no_network {
        rules.close(Source::Option);
    }
    if args.whom().is_some() {
        rules.close_to_ask();
    }
}

/// `$XDG_CONFIG_HOME/fulmar/run.rules`, by default below `~/.config`.
fn rules_file() -> Option<PathBuf> {
    let configured = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".config"));
    Some(configured.filter(|p| p.is_absolute()).or_else(home)?.join(RULES_FILE))
}

fn add_file(rules: &mut Rules, path: &Path, must_exist: bool) -> Outcome {
    // Each process of the gateway reads them: the second one would find a pipe empty, and no rule in it.
    let is_null = path == Path::new("/dev/null");
    if !is_null && std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        let what = "not a regular file; the rules are read more than once";
        return Err(Failure::new(format!("cannot read the rules of {}: {what}", path.display())));
    }
    match std::fs::read_to_string(path) {
        Ok(text) => rules
            .add_file(&text, path)
            .map_err(|e| Failure::new(format!("cannot use the rules of {}: {e}", path.display()))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must_exist => Ok(()),
        // Rules that cannot be read must not be taken for none.
        Err(e) => Err(Failure::file("cannot read the rules of", path, &e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_gateway::policy::Protocol;
    use fulmar_gateway::rules::Destination;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        crate::options::parse(["run"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn options_of_the_program_are_the_programs() {
        let args = parse("--publish 8080:80 -p 90 -- nginx -p x --summary").unwrap();
        assert_eq!(args.command, ["nginx", "-p", "x", "--summary"]);
        assert!(!args.summary && args.publish.len() == 2);
        assert_eq!(parse("curl --no-network").unwrap().command, ["curl", "--no-network"]);
        assert!(parse("--summary").is_err(), "a program is needed");
        assert!(parse("--nonsense curl").is_err(), "an unknown option is no program");
        assert!(parse("--allow 1.2.3 x").is_err() && parse("--mtu 500 x").is_err());
    }

    #[test]
    fn rules_in_what_can_be_read_once_only_are_refused() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        for path in [path.as_str(), "/tmp"] {
            let refused = wanted(&parse(&format!("--rules {path} x")).unwrap());
            assert!(refused.err().unwrap().to_string().contains("not a regular file"));
        }
        assert!(wanted(&parse("--rules /dev/null x").unwrap()).is_ok(), "no rules");
    }

    #[test]
    fn rules_come_from_the_file_and_the_options() {
        let path = std::env::temp_dir().join(format!("fulmar-rules-{}", std::process::id()));
        std::fs::write(&path, "deny 10.0.0.0/8\n").unwrap();
        let line = format!("--rules {} --allow 10.1.1.1 --no-network x", path.display());
        let rules = wanted(&parse(&line).unwrap()).unwrap().rules;
        let denial = |to: &str| {
            let to = SocketAddr::new(to.parse().unwrap(), 80);
            rules.denial(&Destination::new(Protocol::Tcp, to))
        };
        assert_eq!(denial("10.1.1.1"), None);
        let of_file = denial("10.1.1.2").unwrap().to_string();
        assert_eq!(of_file, format!("{}:1: deny 10.0.0.0/8", path.display()));
        assert_eq!(denial("192.0.2.1").unwrap().to_string(), "--no-network");
        std::fs::write(&path, "permit x\n").unwrap();
        let error = wanted(&parse(&line).unwrap()).err().unwrap().to_string();
        assert!(error.contains("line 1"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(wanted(&parse(&line).unwrap()).err().unwrap().to_string().contains("no such file"));
    }

    #[test]
    fn a_policy_file_has_the_rules_and_the_names_mode_and_options_come_before_it() {
        let path = std::env::temp_dir().join(format!("fulmar-run-{}.toml", std::process::id()));
        let of = |text: &str, options: &str| {
            std::fs::write(&path, text).unwrap();
            wanted(&parse(&format!("--policy {} {options} x", path.display())).unwrap())
        };
        let text =
            "names = \"real\"\nencrypted-client-hello = \"allow\"\nallow = [\"github.com:443\"]\n";
        let Wanted { rules, names, encrypted_hello, .. } = of(text, "").unwrap();
        assert!(rules.have_names() && rules.is_closed() && names == NamesMode::Real);
        assert_eq!(encrypted_hello, EncryptedHello::Pass);
        let Wanted { rules, names, .. } = of(text, "--names given --allow *").unwrap();
        let to = SocketAddr::from(([192, 0, 2, 1], 80));
        assert!(rules.denial(&Destination::new(Protocol::Tcp, to)).is_none());
        assert!(names == NamesMode::Given);
        let error = of("allow = [5]", "").err().unwrap().to_string();
        assert!(error.ends_with(".toml:1:10: expected a string, not a value of type integer"));
        let audit = of("default = \"deny\"\naudit = \"x\"", "").unwrap().audit;
        assert_eq!(audit, "x".parse().ok());
        assert!(parse("--policy a --rules b x").is_err());
        std::fs::remove_file(&path).unwrap();
        let missing = parse(&format!("--policy {} x", path.display())).unwrap();
        assert!(wanted(&missing).err().unwrap().to_string().contains("no such file"));
    }

    #[test]
    fn ports_of_the_hosts_loopback_are_listed_one_by_one() {
        let line = "--host-port 5432 --host-port 80-81:8080 --host-port-udp 53 x";
        let ports = Plan::new(&gateway_args(&parse(line).unwrap())).unwrap().ports;
        assert_eq!(
            (ports.tcp_ns, ports.udp_ns),
            ("5432,80-81:8080".parse().unwrap(), "53".parse().unwrap())
        );
        for open in ["auto", "all", "none", "~80", "127.0.0.1/80", "%lo/80", "80x", "0"] {
            assert!(parse(&format!("--host-port {open} x")).is_err(), "{open}");
        }
    }

    #[test]
    fn publishing_and_loopback_access_are_off_by_default() {
        let gateway = gateway_args(&parse("x").unwrap());
        let ports = Plan::new(&gateway).unwrap().ports;
        for spec in [ports.tcp, ports.udp, ports.tcp_ns, ports.udp_ns] {
            assert_eq!(spec, PortSpec::None);
        }
        assert!(gateway.map.no_map_gw);
    }
}
