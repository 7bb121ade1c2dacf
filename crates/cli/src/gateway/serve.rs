//! The process that is the gateway: set-up, containment, the loop, the end.
//!
//! The order matters. The host's network is read, and ports are published, in the host's namespace with the user's
//! rights; then the user namespace of the guest is joined, the interface made, and everything opened that is
//! needed later; then the file system and all rights are given up; then the network is reported as ready.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use fulmar::Device;
use fulmar::devices;
use fulmar_gateway::attach::{ExitWatch, Target};
use fulmar_gateway::config::{Config, OnLoopback, Publish};
use fulmar_gateway::contain::{self, Containment};
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::ports::PortSpec;
use fulmar_gateway::published::PublishedPort;
use fulmar_gateway::splice::{self, Side, Splicer};
use fulmar_gateway::stat::Summary;
use fulmar_gateway::{FdHandler, Gateway};
use fulmar_netns::{Netns, OpenPorts};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::args::AttachArgs;
use super::auto::{Auto, loopback, loopback_of, on_loopback_of_guest};
use super::capture::CaptureFile;
use super::detach::say_ready;
use super::document::About;
use super::fault::{self, Faults};
use super::log::{DEFAULT_BYTES, Log};
use super::plan::Plan;
use super::report::{Reporter, rules_policy};
use super::snapshot::Snapshots;
use super::visible::Visible;
use super::{interface, runas, wait};
use crate::failure::{During, Failure, Outcome};
use crate::metrics;

/// Signals that end a gateway in order.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// How long the guest's programs have for what they have left on loopback connections, as the relay gives them.
const LONGEST_DELIVERY: Duration = Duration::from_secs(60);

/// For a summary one turn in so many is measured: most programs are short, and end after some hundred turns.
const SUMMARY_EVERY: u32 = 4;

/// Where a gateway runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Where the command was started.
    Foreground,
    /// In the background: its messages go to the system's log.
    Detached,
    /// In the background: its messages go to the process that has started it.
    Watched,
}

impl Place {
    /// Tells the process that waits for a gateway in the background.
    fn say_ready(self, out: &mut impl Write) {
        if self != Place::Foreground {
            say_ready(out);
        }
    }
}

/// What is open from the start, because nothing can be opened later.
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

    /// The standard streams lead nowhere from now on: a caller that reads them to their end waits for the set-up,
    /// not for the guest.
    fn leave(&self, log: &Log, place: Place) -> io::Result<()> {
        if place == Place::Foreground {
            return Ok(());
        }
        nix::unistd::dup2_stdin(&self.null)?;
        nix::unistd::dup2_stdout(&self.null)?;
        if place == Place::Watched {
            // The gateway does not wait for a watcher that does not read.
            fcntl(&self.stderr, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            return Ok(());
        }
        log.use_system();
        Ok(nix::unistd::dup2_stderr(&self.null)?)
    }
}

/// Threads that splice: one connects in the guest's namespace, one in the host's.
#[derive(Default)]
struct Splicers {
    guest: Option<Splicer>,
    host: Option<Splicer>,
    host_loop: Option<splice::Loop>,
    /// Lets the guest's thread contain itself and begin, and what came of it.
    begin: Option<(Sender<()>, Receiver<io::Result<Containment>>)>,
}

impl Splicers {
    /// Delivers what the programs of a guest that is gone have left, for a while at most.
    fn finish_after(&self, gateway: &Gateway) {
        if !gateway.has_guest_exited() {
            return;
        }
        // The relay, which has read them, is over: a signal ends the process at once.
        let _ = ending_signals().thread_unblock();
        let ends = [(&self.guest, Side::Connected), (&self.host, Side::Accepted)];
        let finish =
            |(splicer, side): (&Option<Splicer>, Side)| Some(splicer.as_ref()?.finish(side));
        for is_done in ends.into_iter().filter_map(finish).collect::<Vec<_>>() {
            // Nothing is sent: the thread ends, or has ended.
            let _ = is_done.recv_timeout(LONGEST_DELIVERY);
        }
    }

    fn all(&self) -> Vec<Splicer> {
        [&self.guest, &self.host].into_iter().flatten().cloned().collect()
    }
}

/// Is the gateway of a guest until its end.
///
/// # Errors
/// A sentence about the step of the set-up that failed.
pub fn serve(
    plan: &Plan,
    attach: &AttachArgs,
    target: &Target,
    name: &str,
    place: Place,
) -> Outcome<ExitCode> {
    leave_terminal(place);
    let stdio = Stdio::open().during("cannot open /dev/null")?;
    let log = open_log(plan, name)?;
    let host = HostNetwork::read(plan.upstream.as_deref()).map_err(say)?;
    let end = if plan.outlives_file { None } else { Some(target.exit_watch().map_err(say)?) };
    let signals = catch_signals().during("cannot catch signals")?;
    let pcap = plan.process.pcap.as_deref().map(|file| capture_to(file, &log)).transpose()?;
    let pid_file = plan.process.pid.as_deref().map(create).transpose()?;
    let last_words = wait::last_words().during("cannot open the pipe for the summary")?;
    let visible = Visible::open(plan.process.metrics, &log)?;
    let mut auto = start_auto(plan, &log);

    let netns = target.attach().map_err(say)?;
    refuse_own(visible.namespaces(&netns))?;
    let identity = runas::wanted(plan.process.runas.as_deref()).map_err(Failure::new)?;
    let network = plan.network(&host, attach);
    let devices = make_interface(plan, &netns, &network, pcap, &log)?;
    watch_guest_ports(plan, &netns, &mut auto, &log).map_err(say)?;
    let mut splicers = make_splicers(plan, &netns).map_err(say)?;
    let (config, reporter) = configure(plan, &host, network, devices, &splicers);
    describe(plan, &config, &log);
    let namespaces = visible.namespaces(&netns);
    let about = About::new(plan, target, &config.network, namespaces, splicers.all());
    let mut gateway = Gateway::new(config).map_err(|e| Failure::new(e.to_string()))?;
    (auto.in_guest, auto.in_host) = (splicers.guest.clone(), splicers.host.clone());
    let ending = Ending { guest: end, signals, metrics: visible.closer() };
    attend(&mut gateway, ending, auto).during("cannot watch for the end of the guest")?;
    let snapshots = Snapshots::of(&mut gateway).map_err(say)?;
    write_pid(pid_file, plan.process.pid.as_deref())?;
    stdio.leave(&log, place).during("cannot detach")?;
    let faults = Faults::watch(&log).during("cannot watch for faults")?;
    faults.end(&mut gateway).during("cannot watch for faults")?;
    let contained = give_up_rights(&mut splicers, identity).map_err(|e| {
        // Standard error may lead nowhere already.
        let _ = writeln!(&stdio.stderr, "{name}: {e}");
        say(e)
    })?;
    log.say(&format!("the network is up; {contained}"));
    let failed = |e| log.fail(&format!("nothing answers `fulmar stat` and --metrics: {e}"));
    let _answers = visible.serve(about, snapshots).map_err(failed);
    let Stdio { null, mut ready, stderr } = stdio;
    place.say_ready(&mut ready);
    drop((null, ready, stderr, netns));
    let Some(ended) = fault::run(&mut gateway, &faults) else {
        // At once: what was left halfway is not to be dropped.
        std::process::exit(fault::STATUS)
    };
    splicers.finish_after(&gateway);
    if let (Some(mut out), Ok(summary)) = (last_words, &ended) {
        reporter.print(&mut out, &gateway.stat(), summary, &splicers_counters(&splicers));
    }
    Ok(status_of(&ended, &log))
}

/// The file of `--pcap`.
fn capture_to(file: &Path, log: &Log) -> Outcome<CaptureFile> {
    Ok(CaptureFile::new(create(file)?, log))
}

/// A guest in the caller's own network namespace has no need of a gateway, which would set up the caller's network.
fn refuse_own([own, guests]: [Option<u64>; 2]) -> Outcome {
    if own.is_none() || own != guests {
        return Ok(());
    }
    Err(Failure::new(
        "the guest is in the network namespace of this command, not in one of its own: start it by \
         `unshare -rn PROGRAM`, and give its process id once it runs",
    ))
}

/// The terminal's signals are not for a gateway in the background.
fn leave_terminal(place: Place) {
    if place != Place::Foreground {
        let _ = nix::unistd::setsid();
    }
}

fn status_of(ended: &io::Result<Summary>, log: &Log) -> ExitCode {
    let Err(e) = ended else { return ExitCode::SUCCESS };
    log.fail(&format!("the gateway ends: {e}"));
    ExitCode::FAILURE
}

/// The errors of a set-up are sentences already.
fn say(e: io::Error) -> Failure {
    Failure::new(e.to_string())
}

fn create(path: &Path) -> Outcome<File> {
    File::create(path).map_err(|e| Failure::file("cannot write", path, &e))
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
    let interface = interface::open(network, netns, plan.mac, plan.queues).map_err(say)?;
    log.say(&format!("the guest's interface is {}", interface.what));
    let devices = interface.queues;
    if plan.configures {
        network.configure(netns).map_err(say)?;
    } else if let Some(mac) = network.mac {
        let set =
            netns.if_index(&network.name).and_then(|index| netns.netlink()?.set_mac(index, mac));
        set.during("cannot set the Ethernet address in the namespace")?;
    }
    let Some(file) = pcap else { return Ok(devices) };
    Ok(devices.into_iter().map(|device| devices::capture(device, file.clone())).collect())
}

/// What `auto` knows in the host's namespace.
fn start_auto(plan: &Plan, log: &Log) -> Auto {
    let given = |spec: &PortSpec| spec.forwards().iter().map(|f| f.from).collect();
    let mut auto = Auto::default();
    if plan.ports.tcp_ns == PortSpec::Auto {
        auto.tcp.host = told(OpenPorts::tcp(), log);
    }
    if plan.ports.udp_ns == PortSpec::Auto {
        auto.udp.host = told(OpenPorts::udp(), log);
    }
    auto.tcp.given_host = given(&plan.ports.tcp);
    auto.tcp.given_guest = given(&plan.ports.tcp_ns);
    auto.udp.given_host = given(&plan.ports.udp);
    auto.udp.given_guest = given(&plan.ports.udp_ns);
    auto
}

fn watch_guest_ports(plan: &Plan, netns: &Netns, auto: &mut Auto, log: &Log) -> io::Result<()> {
    let (tcp, udp) = (plan.ports.tcp == PortSpec::Auto, plan.ports.udp == PortSpec::Auto);
    if !tcp && !udp {
        return Ok(());
    }
    let open = || Ok((tcp.then(OpenPorts::tcp), udp.then(OpenPorts::udp)));
    let (tcp, udp) = netns.run(open)?;
    auto.tcp.guest = tcp.and_then(|ports| told(ports, log));
    auto.udp.guest = udp.and_then(|ports| told(ports, log));
    Ok(())
}

fn told(ports: io::Result<OpenPorts>, log: &Log) -> Option<OpenPorts> {
    let missing = |e: &io::Error| {
        log.say(&format!(
            "auto publishes no ports: the kernel does not list its sockets (sock_diag): {e}; name \
             the ports to publish instead"
        ));
    };
    ports.inspect_err(missing).ok()
}

/// The threads that the ports need. That of the guest's namespace enters it here and waits.
fn make_splicers(plan: &Plan, netns: &Netns) -> io::Result<Splicers> {
    let ports = &plan.ports;
    let mut splicers = Splicers::default();
    let leads_out = [&ports.tcp_ns, &ports.udp_ns].into_iter().any(|spec| *spec != PortSpec::None);
    if leads_out {
        let (host, run) = splice::splicer()?;
        for bound in netns.run(|| bind_in_guest(&ports.tcp_ns, TcpListener::bind))? {
            host.listen(bound.socket, loopback(bound.to.port()).to_vec(), bound.port);
        }
        for bound in netns.run(|| bind_in_guest(&ports.udp_ns, UdpSocket::bind))? {
            host.listen_datagrams(bound.socket, bound.to, bound.port);
        }
        (splicers.host, splicers.host_loop) = (Some(host), Some(run));
    }
    let leads_in = ports.has_splice && ports.tcp != PortSpec::None;
    if leads_in || [&ports.tcp_ns, &ports.udp_ns].into_iter().any(|spec| *spec == PortSpec::Auto) {
        let (guest, run) = splice::splicer()?;
        let (entered, has_entered) = channel();
        let (begin, begins) = channel();
        let (report, reported) = channel();
        let own = File::from(netns.as_fd().try_clone_to_owned()?);
        thread::Builder::new().name("guest".into()).spawn(move || {
            let done = nix::sched::setns(&own, nix::sched::CloneFlags::CLONE_NEWNET);
            drop(own);
            let _ = entered.send(done);
            if begins.recv().is_ok() {
                let contained = contain::contain_thread();
                let is_contained = contained.is_ok();
                let _ = report.send(contained);
                if is_contained {
                    run.run().expect("invariant: epoll_wait of its own set cannot fail");
                }
            }
        })?;
        has_entered.recv().map_err(|_| io::Error::other("the guest's thread has ended"))??;
        (splicers.guest, splicers.begin) = (Some(guest), Some((begin, reported)));
    }
    Ok(splicers)
}

/// A socket on the loopback interface of the guest.
struct Bound<S> {
    socket: S,
    /// Where on that of the host it leads.
    to: SocketAddr,
    port: Arc<PublishedPort>,
}

/// Sockets on the loopback interface of the guest.
fn bind_in_guest<S>(
    spec: &PortSpec,
    bind: fn(SocketAddr) -> io::Result<S>,
) -> io::Result<Vec<Bound<S>>> {
    let mut made = Vec::new();
    for forward in spec.forwards() {
        let addresses = match forward.bind.address {
            Some(address) => vec![SocketAddr::new(address, forward.from)],
            None => loopback(forward.from).to_vec(),
        };
        let bound: Vec<_> = addresses.iter().map(|at| (bind(*at), at.is_ipv4())).collect();
        let port = on_loopback_of_guest(&forward);
        let is_bound = bound.iter().any(|(bound, _)| bound.is_ok());
        for (socket, is_v4) in bound {
            match socket {
                Ok(socket) => {
                    let (to, port) = (loopback_of(forward.to, is_v4), Arc::clone(&port));
                    made.push(Bound { socket, to, port });
                }
                Err(e) if !is_bound && !forward.is_optional => {
                    let port = forward.from;
                    let what = format!("cannot bind port {port} of the namespace's loopback: {e}");
                    return Err(io::Error::new(e.kind(), what));
                }
                Err(_) => {}
            }
        }
    }
    Ok(made)
}

fn configure(
    plan: &Plan,
    host: &HostNetwork,
    network: GuestNetwork,
    queues: Vec<Box<dyn Device>>,
    splicers: &Splicers,
) -> (Config, Reporter) {
    let router = queues.first().map_or([0; 6], |queue| queue.caps().ether.0);
    let (dhcp_v6, advertisement) = plan.lease_v6(host, &network, router);
    let reporter = Reporter::default();
    let config = Config {
        carries: plan.carries,
        mapping: plan.mapping(host, &network),
        outbound: plan.outbound.clone(),
        dhcp: plan.lease(host, &network),
        dhcp_v6,
        advertisement,
        publish: Publish {
            tcp: plan.ports.tcp.forwards(),
            udp: plan.ports.udp.forwards(),
            addresses: plan.ports.addresses,
        },
        account: account_of(plan),
        policy: rules_policy(plan, &reporter),
        on_loopback: on_loopback(plan, &network, splicers),
        ..Config::new(queues, network)
    };
    (config, reporter)
}

/// How often a turn of the loop is measured: as the environment says, or often where there is a summary to make.
fn account_of(plan: &Plan) -> Option<u32> {
    let said = std::env::var("FULMAR_LEDGER").ok().and_then(|n| n.trim().parse().ok());
    said.filter(|n| *n > 0).or(plan.has_summary.then_some(SUMMARY_EVERY))
}

/// Connections from the host's loopback are spliced to the guest's loopback, or to its address: there they come
/// from the guest's own address, so that what listens on loopback inside is not exposed.
fn on_loopback(plan: &Plan, network: &GuestNetwork, splicers: &Splicers) -> Option<OnLoopback> {
    let splicer = splicers.guest.clone().filter(|_| plan.ports.has_splice)?;
    let own: Vec<IpAddr> = network.addresses.iter().map(|(a, _)| *a).collect();
    let is_to_loopback = plan.ports.is_to_loopback;
    Some(Box::new(move |accepted: TcpStream, published| {
        let port = published.forward.to;
        let is_v4 = accepted.peer_addr().is_ok_and(|a| a.ip().to_canonical().is_ipv4());
        let mut to: Vec<SocketAddr> = if is_to_loopback {
            loopback(port).to_vec()
        } else {
            own.iter().map(|a| SocketAddr::new(*a, port)).collect()
        };
        // The same version first; a server may listen on one only.
        to.sort_by_key(|a| a.is_ipv4() != is_v4);
        if to.is_empty() {
            return Some(accepted);
        }
        splicer.carry(accepted, to, Arc::clone(published));
        None
    }))
}

fn describe(plan: &Plan, config: &Config, log: &Log) {
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

/// What ends a gateway, and what ends with its guest.
struct Ending {
    guest: Option<ExitWatch>,
    signals: SignalFd,
    /// What the guest has left is delivered yet, when its ports are free already.
    metrics: Option<metrics::Closer>,
}

/// The guest's end and the signals break the loop; the timer of `auto` does not.
fn attend(gateway: &mut Gateway, ending: Ending, auto: Auto) -> io::Result<()> {
    let Ending { guest, signals, metrics } = ending;
    if let Some(end) = guest {
        let fd = end.as_fd().try_clone_to_owned()?;
        let handler: FdHandler = Box::new(move |_, handle| {
            if !end.has_exited() {
                return ControlFlow::Continue(());
            }
            metrics.iter().for_each(metrics::Closer::close);
            handle.note_guest_exited();
            ControlFlow::Break(())
        });
        gateway.on_readable(fd, handler)?;
    }
    let fd: OwnedFd = signals.as_fd().try_clone_to_owned()?;
    let handler: FdHandler = Box::new(move |_, _| {
        let came = matches!(signals.read_signal(), Ok(Some(_)));
        break_if(came)
    });
    gateway.on_readable(fd, handler)?;
    if auto.is_needed() {
        let (timer, handler) = auto.handler()?;
        gateway.on_readable(timer, handler)?;
    }
    Ok(())
}

fn break_if(ends: bool) -> ControlFlow<()> {
    if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn write_pid(file: Option<File>, path: Option<&Path>) -> Outcome {
    let (Some(mut file), Some(path)) = (file, path) else { return Ok(()) };
    let written = writeln!(file, "{}", std::process::id());
    written.map_err(|e| Failure::file("cannot write", path, &e))
}

/// Gives up the file system, the identity of root and all rights, on every thread. Without the right to mount the
/// root directory stays, out of reach by the other means.
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

fn splicers_counters(splicers: &Splicers) -> Vec<&splice::Counters> {
    [&splicers.guest, &splicers.host].into_iter().flatten().map(Splicer::counters).collect()
}
