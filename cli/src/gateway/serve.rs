//! The process that is the gateway: set-up, containment, the loop, the end.
//!
//! The order matters. The host's network is read, and ports are published, in the host's namespace with the user's
//! rights; then the user namespace of the guest is joined, the interface made, and everything opened that is
//! needed later; then the file system and all rights are given up; then the network is reported as ready.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::ToSocketAddrs;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{ExitCode, exit};
use std::thread;

use fulmar::device::Device;
use fulmar::devices;
use fulmar_gateway::absent::Absent;
use fulmar_gateway::attach::{ExitWatch, Target};
use fulmar_gateway::config::{Config, Publish};
use fulmar_gateway::contain::{self, Containment};
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::netns::{Netns, OpenPorts};
use fulmar_gateway::policy::{Policy, Protocol};
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::rules::file::Proxy;
use fulmar_gateway::stat::Summary;
use fulmar_gateway::upstream::Upstream;
use fulmar_gateway::{FdHandler, Gateway};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::auto::{AutoPorts, Given};
use super::capture::CaptureFile;
use super::detach::say_ready;
use super::document::About;
use super::endpoints::Endpoints;
use super::follow::{self, Follower};
use super::guard::rules_policy;
use super::learn::Learnt;
use super::log::{DEFAULT_BYTES, Log};
use super::panics::{self, Panics};
use super::pesto::{PortControl, given_by};
use super::plan::Plan;
use super::publish::HostPorts;
use super::refused::{LastWords, Refused};
use super::report::Reporter;
use super::slirp::Caller;
use super::snapshot::Snapshots;
use super::splicers::{self, Splicers, forwards, on_loopback};
use super::{audit, interface, output, reload, runas, wait};
use crate::failure::{During, Failure, Outcome};
use crate::metrics;

/// Signals that end a gateway in order.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// One turn in this number is measured for a summary: most programs are short, and exit after some hundred turns.
const SUMMARY_EVERY: u32 = 4;
/// The same for an audit, which is to cost little.
const AUDIT_EVERY: u32 = 16;

/// How a gateway runs, and where its messages go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunMode {
    /// In the foreground: messages go to standard error.
    Foreground,
    /// In the background: messages go to the system's log.
    Detached,
    /// In the background: messages go to the process that has started it.
    Watched,
}

impl RunMode {
    /// The signals of the terminal are not for a gateway in the background.
    fn leave_terminal(self) {
        if self != RunMode::Foreground {
            let _ = nix::unistd::setsid();
        }
    }

    /// Tells the process that waits for a gateway in the background that the network is up.
    fn say_ready(self, out: &mut impl Write) {
        if self != RunMode::Foreground {
            say_ready(out);
        }
    }
}

/// Descriptors that are opened at the start, because a contained process can open none.
struct Stdio {
    null: File,
    ready: File,
    stderr: File,
}

impl Stdio {
    fn open() -> io::Result<Stdio> {
        Ok(Stdio {
            null: OpenOptions::new().read(true).write(true).open("/dev/null")?,
            ready: File::from(io::stdout().as_fd().try_clone_to_owned()?),
            stderr: File::from(io::stderr().as_fd().try_clone_to_owned()?),
        })
    }

    /// Replaces the standard streams by /dev/null: a caller that reads them to their end waits for the set-up alone.
    fn detach(&self, log: &Log, mode: RunMode) -> io::Result<()> {
        if mode == RunMode::Foreground {
            return Ok(());
        }
        nix::unistd::dup2_stdin(&self.null)?;
        nix::unistd::dup2_stdout(&self.null)?;
        if mode == RunMode::Watched {
            // A watcher that does not read must not block the gateway.
            fcntl(&self.stderr, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            return Ok(());
        }
        log.use_system();
        Ok(nix::unistd::dup2_stderr(&self.null)?)
    }

    /// Tells the process that waits that the network is up, and closes the descriptors.
    fn finish(mut self, mode: RunMode) {
        mode.say_ready(&mut self.ready);
    }
}

/// Runs the gateway of a guest to its end.
///
/// # Errors
/// A sentence about the step of the set-up that failed.
pub fn serve(
    plan: &Plan,
    target: &Target,
    name: &str,
    mode: RunMode,
    caller: Caller,
) -> Outcome<ExitCode> {
    mode.leave_terminal();
    let stdio = Stdio::open().during("cannot open /dev/null")?;
    let log = open_log(plan, name)?;
    let host = HostNetwork::read(plan.upstream.as_deref()).map_err(sentence)?;
    let end = if plan.outlives_file { None } else { Some(target.exit_watch().map_err(sentence)?) };
    let signals = catch_signals().during("cannot catch signals")?;
    let capture_to = |file| CaptureFile::create(file, &log);
    let pcap = plan.process.pcap.as_deref().map(capture_to).transpose()?;
    let (audit, writer) = plan.audit.as_ref().map(audit::open).transpose()?.unzip();
    let learnt = plan.learn.as_deref().map(Learnt::open).transpose()?;
    let pid_file = plan.process.pid.as_deref().map(create).transpose()?;
    let pipes = wait::open_pipes().during("cannot open the pipes of the command")?;
    let (summary_file, ask) = (pipes.summary, pipes.ask.map(|pipes| pipes.of(&log)));
    let (ask, answers) = ask.unzip();
    let endpoints = Endpoints::open(plan.process.metrics, &log)?;
    let is_splice_only = plan.ports.is_splice_only;
    let states = if is_splice_only { None } else { follow::start(&log) };
    let reader = reload::start(plan, &log);
    let control = PortControl::open(plan)?;
    let mut auto = start_auto(plan, control.as_ref(), &log);
    let (netns, identity) = attach_to(target, plan, &endpoints)?;
    let network = plan.network(&host);
    let devices = make_interface(plan, &netns, &network, pcap, &log)?;
    watch_guest_ports(plan, &netns, &mut auto, &log).map_err(sentence)?;
    let mut splicers = splicers::make(plan, control.as_ref(), &netns).map_err(sentence)?;
    let refused = Refused::of(plan, &log, name);
    let policy =
        |reporter: &Reporter| rules_policy(plan, reporter, refused.as_ref(), audit, ask.clone());
    let (mut config, reporter) = configure(plan, &host, network, devices, &splicers, policy);
    let published = published_by(plan, control.as_ref());
    if is_splice_only {
        auto.ports = splicers.guest.clone().map(HostPorts::spliced).unwrap_or_default();
        auto.ports.publish_first(&published)?;
    } else {
        config.publish = published;
    }
    config.upstream = plan.proxy.as_ref().map(upstream).transpose()?;
    log_configuration(plan, &config, &log);
    let namespaces = endpoints.namespaces(&netns);
    let about = About::new(plan, target, &config.network, namespaces, splicers.both());
    let follower = Follower::new(states, plan, &config);
    let mut gateway = Gateway::new(config).map_err(|e| Failure::new(e.to_string()))?;
    (auto.in_guest, auto.in_host) = (splicers.guest.clone(), splicers.host.clone());
    let opened = std::mem::take(&mut splicers.opened);
    let control = control.map(|control| control.join(&mut gateway, opened, &auto));
    let control = control.transpose().during("cannot prepare the socket of --conf-path")?;
    let reload = reader.map(|reader| reader.watch(&mut gateway, plan, &log)).transpose();
    let reload = reload.during("cannot watch for a new policy")?;
    let watched = ask.zip(answers).map_or(Ok(()), |(ask, from)| ask.watch(&mut gateway, from));
    watched.during("cannot watch for answers")?;
    let last_words = refused.and_then(|refused| refused.last_words(plan));
    // Reports need the end; what was refused is known when the program exits.
    let (summary_file, farewell) = match summary_file {
        Some(file) if plan.reports_end() => (Some(file), None),
        file => (None, file.zip(last_words.clone())),
    };
    let ending = Ending { guest: end, signals, metrics: endpoints.closer(), farewell, ask: reload };
    add_handlers(&mut gateway, ending, auto).during("cannot watch for the end of the guest")?;
    follower.watch(&mut gateway, &log).during("cannot follow the host's network")?;
    let snapshots = Snapshots::of(&mut gateway).map_err(sentence)?;
    let caller = caller.join(&mut gateway)?;
    write_pid(pid_file, plan.process.pid.as_deref())?;
    stdio.detach(&log, mode).during("cannot detach")?;
    let panics = Panics::watch(&log).during("cannot watch for panics")?;
    panics.end_relay(&mut gateway).during("cannot watch for panics")?;
    let contained = give_up_rights(&mut splicers, identity).map_err(|e| {
        // Standard error may lead nowhere already.
        let _ = writeln!(&stdio.stderr, "{name}: {e}");
        sentence(e)
    })?;
    log.say(&format!("the network is up; {contained}"));
    let _served = endpoints.serve(about, snapshots, &log);
    let written = writer.map(|writer| writer.start(&log)).transpose();
    let written = written.during("cannot start the thread of the audit")?;
    let controlled = control.map(|control| control.start(&log)).transpose();
    controlled.during("cannot start the thread of --conf-path")?;
    caller.start(&log).during("cannot start the thread of the API socket")?;
    stdio.finish(mode);
    drop(netns);
    // After a panic without destructors: the state that it has left is unknown.
    let ended = panics::run(&mut gateway, &panics).unwrap_or_else(|| exit(panics::STATUS));
    if gateway.has_guest_exited() {
        // The relay has ended, which has read the signals: now a signal ends the process.
        let _ = ending_signals().thread_unblock();
        splicers.finish();
    }
    let learnt = learnt.map(|learnt| learnt.write(&reporter.work(), &plan.map.dns_forward));
    let missing = written.and_then(|written| {
        written.add_receipt(reporter.work(), gateway.stat().account.as_ref());
        written.finish()
    });
    if let (Some(mut out), Ok(summary)) = (summary_file, &ended) {
        if plan.has_summary {
            reporter.print(&mut out, &gateway.stat(), summary, &splicers.counters());
        }
        last_words.iter().for_each(|last| last.write(&mut out));
        // The reader may have given up.
        missing.iter().chain(&learnt).for_each(|what| drop(writeln!(out, "{name}: {what}")));
    }
    Ok(status_of(&ended, &log))
}

/// Leaves the caller's groups, attaches to the guest, and finds whose identity is assumed then.
fn attach_to(
    target: &Target,
    plan: &Plan,
    endpoints: &Endpoints,
) -> Outcome<(Netns, Option<runas::Identity>)> {
    let was_root = runas::is_system_root();
    if was_root {
        runas::leave_groups().map_err(sentence)?;
    }
    let netns = target.attach().map_err(sentence)?;
    refuse_own(endpoints.namespaces(&netns))?;
    let identity = runas::wanted(plan.process.runas.as_deref(), was_root).map_err(Failure::new)?;
    Ok((netns, identity))
}

/// A guest in the caller's own network namespace has no need of a gateway, which would set up the caller's network.
fn refuse_own([own, guests]: [Option<u64>; 2]) -> Outcome {
    if own.is_none() || own != guests {
        return Ok(());
    }
    Err(Failure::new(
        "the guest shares the network namespace of this command; start it with `unshare -rn PROGRAM`, then give its \
         process id",
    ))
}

fn status_of(ended: &io::Result<Summary>, log: &Log) -> ExitCode {
    let Err(e) = ended else { return ExitCode::SUCCESS };
    log.fail(&format!("the gateway is ending: {e}"));
    ExitCode::FAILURE
}

/// An error of the set-up that is a sentence already.
fn sentence(e: io::Error) -> Failure {
    Failure::new(e.to_string())
}

fn create(path: &Path) -> Outcome<File> {
    let created = output::open(path, 0o644, false).and_then(|file| {
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        Ok(file)
    });
    created.map_err(|e| Failure::file("cannot write", path, &e))
}

fn open_log(plan: &Plan, name: &str) -> Outcome<Log> {
    let is_talkative = (plan.process.debug || plan.process.trace) && !plan.process.quiet;
    let log = Log::to_stderr(name, !is_talkative);
    if let Some(path) = &plan.process.log_file {
        let bytes = plan.process.log_size.unwrap_or(DEFAULT_BYTES);
        log.use_file(path, bytes).map_err(|e| Failure::file("cannot write", path, &e))?;
    }
    Ok(log)
}

fn ending_signals() -> SigSet {
    ENDING.into_iter().collect()
}

fn catch_signals() -> io::Result<SignalFd> {
    let set = ending_signals();
    set.thread_block()?;
    Ok(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

/// Makes the guest's interface, and configures it if that is wanted.
fn make_interface(
    plan: &Plan,
    netns: &Netns,
    network: &GuestNetwork,
    pcap: Option<CaptureFile>,
    log: &Log,
) -> Outcome<Vec<Box<dyn Device>>> {
    if plan.ports.is_splice_only {
        let made = netns.run(fulmar_gateway::netns::loopback_up).and_then(|()| Absent::new());
        let device = made.during("cannot prepare the namespace's loopback")?;
        return Ok(vec![Box::new(device)]);
    }
    let interface = interface::open(network, netns, plan.mac, plan.queues).map_err(sentence)?;
    log.say(&format!("the guest's interface is {}", interface.what));
    let devices = interface.queues;
    if plan.configures {
        let refused = network.configure(netns).map_err(sentence)?;
        refused.iter().for_each(|sentence| log.fail(sentence));
    } else if let Some(mac) = network.mac {
        let set =
            netns.if_index(&network.name).and_then(|index| netns.netlink()?.set_mac(index, mac));
        set.during("cannot set the Ethernet address in the namespace")?;
    }
    let Some(file) = pcap else { return Ok(devices) };
    Ok(devices.into_iter().map(|device| devices::capture(device, file.clone())).collect())
}

/// The ports of the host that are published from the start.
fn published_by(plan: &Plan, control: Option<&PortControl>) -> Publish {
    let of = |protocol, spec| forwards(spec, control.map(|c| c.tables.host.as_slice()), protocol);
    Publish {
        tcp: of(Protocol::Tcp, &plan.ports.tcp),
        udp: of(Protocol::Udp, &plan.ports.udp),
        addresses: plan.ports.addresses,
    }
}

/// Opens what `auto` queries in the host's namespace.
fn start_auto(plan: &Plan, control: Option<&PortControl>, log: &Log) -> AutoPorts {
    let (ports, mut auto) = (&plan.ports, AutoPorts::default());
    if ports.tcp_ns == PortSpec::Auto || control.is_some() {
        auto.tcp.host = or_logged(OpenPorts::tcp(), log);
    }
    if ports.udp_ns == PortSpec::Auto || control.is_some() {
        auto.udp.host = or_logged(OpenPorts::udp(), log);
    }
    let given = |host, guest, protocol| match control {
        Some(control) => given_by(&control.tables, protocol),
        None => Given::of(host, guest),
    };
    auto.tcp.given.set(given(&ports.tcp, &ports.tcp_ns, Protocol::Tcp));
    auto.udp.given.set(given(&ports.udp, &ports.udp_ns, Protocol::Udp));
    auto
}

/// Opens what `auto` queries in the guest's namespace.
fn watch_guest_ports(
    plan: &Plan,
    netns: &Netns,
    auto: &mut AutoPorts,
    log: &Log,
) -> io::Result<()> {
    let may_be = |spec: &PortSpec| *spec == PortSpec::Auto || plan.conf_path.is_some();
    let (tcp, udp) = (may_be(&plan.ports.tcp), may_be(&plan.ports.udp));
    if !tcp && !udp {
        return Ok(());
    }
    let open = || Ok((tcp.then(OpenPorts::tcp), udp.then(OpenPorts::udp)));
    let (tcp, udp) = netns.run(open)?;
    auto.tcp.guest = tcp.and_then(|ports| or_logged(ports, log));
    auto.udp.guest = udp.and_then(|ports| or_logged(ports, log));
    Ok(())
}

/// `None`, and a message, where the kernel does not list its sockets.
fn or_logged(ports: io::Result<OpenPorts>, log: &Log) -> Option<OpenPorts> {
    let missing = |e: &io::Error| {
        log.say(&format!(
            "`auto` publishes no ports because the kernel does not list its sockets (sock_diag): {e}; list the ports \
                 instead"
        ));
    };
    ports.inspect_err(missing).ok()
}

fn configure(
    plan: &Plan,
    host: &HostNetwork,
    network: GuestNetwork,
    queues: Vec<Box<dyn Device>>,
    splicers: &Splicers,
    policy: impl FnOnce(&Reporter) -> Option<Box<dyn Policy>>,
) -> (Config, Reporter) {
    let router = queues.first().map_or([0; 6], |queue| queue.caps().ether.0);
    let (dhcp_v6, advertisement) = plan.lease_v6(host, &network, router);
    let reporter = Reporter::default();
    let config = Config {
        carries: plan.carries,
        mapping: plan.mapping(host, &network, router),
        outbound: plan.outbound.clone(),
        dhcp: plan.lease(host, &network),
        dhcp_v6,
        advertisement,
        udp_filter: plan.ports.udp_filter,
        account: account_of(plan),
        names: plan.names,
        encrypted_hello: plan.encrypted_hello,
        policy: policy(&reporter),
        on_loopback: on_loopback(plan, &network, splicers),
        ..Config::new(queues, network)
    };
    (config, reporter)
}

/// One turn of the loop in this number is measured: as FULMAR_LEDGER says, [`SUMMARY_EVERY`] for a summary, or
/// [`AUDIT_EVERY`] for the receipt of an audit.
fn account_of(plan: &Plan) -> Option<u32> {
    let said = std::env::var("FULMAR_LEDGER").ok().and_then(|n| n.trim().parse().ok());
    let for_summary = plan.has_summary.then_some(SUMMARY_EVERY);
    let for_audit = plan.audit.as_ref().map(|_| AUDIT_EVERY);
    said.filter(|n| *n > 0).or(for_summary).or(for_audit)
}

/// The proxy at its address: the first, if its name has several.
fn upstream(proxy: &Proxy) -> Outcome<Upstream> {
    let Proxy { kind, host, port, credentials, .. } = proxy;
    let found = (host.as_str(), *port).to_socket_addrs();
    let mut found = found.during(format!("cannot find the address of the proxy {host}"))?;
    let address = found
        .next()
        .ok_or_else(|| Failure::new(format!("the name of the proxy {host} has no address")))?;
    Ok(Upstream { kind: *kind, address, credentials: credentials.clone() })
}

fn log_configuration(plan: &Plan, config: &Config, log: &Log) {
    let network = &config.network;
    let addresses = network.addresses.iter().map(|(a, length)| format!("{a}/{length}"));
    let routers = network.gateway_v4.map(|a| a.to_string()).into_iter();
    let routers = routers.chain(network.gateway_v6.map(|a| a.to_string()));
    log.say(&format!(
        "interface {}, MTU {}, addresses {}, routers {}{}",
        network.name,
        network.mtu,
        addresses.collect::<Vec<_>>().join(" "),
        routers.collect::<Vec<_>>().join(" "),
        if plan.configures { "" } else { " (by DHCP, NDP)" },
    ));
    log.say(&format!("published: tcp {}, udp {}", plan.ports.tcp, plan.ports.udp));
}

/// What ends a gateway, and what is closed when its guest exits.
struct Ending {
    guest: Option<ExitWatch>,
    signals: SignalFd,
    /// Closed before the delivery of what the guest has sent, so that its port is free at once.
    metrics: Option<metrics::Closer>,
    /// What was refused, and the pipe to the command that waits for it.
    farewell: Option<(File, LastWords)>,
    /// Asks for the policy to be read again: SIGHUP does not end the gateway then.
    ask: Option<File>,
}

/// Registers the handlers of the guest's exit, of signals and of the timer of `auto`.
fn add_handlers(gateway: &mut Gateway, ending: Ending, auto: AutoPorts) -> io::Result<()> {
    let Ending { guest, signals, metrics, mut farewell, mut ask } = ending;
    if let Some(exit) = guest {
        let fd = exit.as_fd().try_clone_to_owned()?;
        let handler: FdHandler = Box::new(move |_, handle| {
            if !exit.has_exited() {
                return ControlFlow::Continue(());
            }
            metrics.iter().for_each(metrics::Closer::close);
            if let Some((mut out, last)) = farewell.take() {
                last.write(&mut out);
            }
            handle.note_guest_exited();
            ControlFlow::Break(())
        });
        gateway.on_readable(fd, handler)?;
    }
    let fd: OwnedFd = signals.as_fd().try_clone_to_owned()?;
    let handler: FdHandler = Box::new(move |_, _| {
        let Ok(Some(signal)) = signals.read_signal() else { return ControlFlow::Continue(()) };
        match &mut ask {
            Some(ask) if signal.ssi_signo == Signal::SIGHUP as u32 => {
                // A full pipe asks already.
                let _ = ask.write(&[0]);
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Break(()),
        }
    });
    gateway.on_readable(fd, handler)?;
    if auto.is_needed() {
        let (timer, handler) = auto.handler()?;
        gateway.on_readable(timer, handler)?;
    }
    Ok(())
}

fn write_pid(file: Option<File>, path: Option<&Path>) -> Outcome {
    let (Some(mut file), Some(path)) = (file, path) else { return Ok(()) };
    let written = writeln!(file, "{}", std::process::id());
    written.map_err(|e| Failure::file("cannot write", path, &e))
}

/// Gives up the file system, root's identity and all capabilities, on every thread. Without the right to mount, the
/// root directory stays; Landlock and seccomp keep it out of reach.
fn give_up_rights(
    splicers: &mut Splicers,
    identity: Option<runas::Identity>,
) -> io::Result<Containment> {
    let root = contain::empty_root();
    if let Some(identity) = identity {
        identity.assume()?;
    }
    if let Some((begin, reported)) = splicers.begin.take() {
        let _ = begin.send(());
        reported.recv().map_err(|_| io::Error::other("the guest's thread has ended"))??;
    }
    let contained = contain::contain_thread()?;
    if let Some(run) = splicers.host_loop.take() {
        thread::Builder::new().name("host".into()).spawn(move || run.run())?;
    }
    root.map(|()| contained)
}
