//! The gateways, and the namespaces on both sides of each.
//!
//! ```text
//! [ guest ]== TAP ==[ gateway ]-- sockets --[ host, HOST_IP ]== veth ==[ a router that is silent ]
//! [ guest ]=========== veth =================[ host, HOST_IP ]            (the ceiling: needs root)
//! ```
//! The host is the namespace of this process. Both ends of every load are here, one in the host and one in the
//! guest: what a gateway carries is between two sockets of one kernel.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use fulmar_gateway::netns::{Netns, Route, VethEnd};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::{cpu, sys};

/// The host's address, to which guests connect.
pub const HOST_IP: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 1);
const ROUTER_IP: Ipv4Addr = Ipv4Addr::new(10, 90, 0, 2);
/// The guest's address and its gateway's, for the programs whose addresses can be set. They are slirp4netns's defaults.
const GUEST_IP: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 100);
const GATEWAY_IP: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The guest of gvisor-tap-vsock, whose network is fixed.
const GVISOR_IP: Ipv4Addr = Ipv4Addr::new(192, 168, 127, 3);
const GVISOR_GATEWAY_IP: Ipv4Addr = Ipv4Addr::new(192, 168, 127, 1);
const GVISOR_MAC: &str = "5a:94:ef:e4:0c:ee";
/// The guest's interface.
const INTERFACE: &str = "tap0";
/// How long a gateway may take until its guest has a default route.
const START: Duration = Duration::from_secs(10);

/// The gateway between guest and host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `fulmar gateway`
    Fulmar,
    /// `fulmar gateway --queues 2`
    FulmarTwoQueues,
    /// pasta of the passt project.
    Pasta,
    /// slirp4netns, on libslirp.
    Slirp4netns,
    /// gvproxy and its `vm`, on gVisor's netstack.
    Gvisor,
    /// A veth pair that root made: no gateway.
    Veth,
}

impl Kind {
    /// All, in the order in which a round runs them.
    pub const ALL: [Kind; 6] = [
        Kind::Fulmar,
        Kind::FulmarTwoQueues,
        Kind::Pasta,
        Kind::Slirp4netns,
        Kind::Gvisor,
        Kind::Veth,
    ];
    /// The gateways that fulmar is compared with.
    pub const PEERS: [Kind; 3] = [Kind::Pasta, Kind::Slirp4netns, Kind::Gvisor];

    /// The name in scenarios and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Fulmar => "fulmar",
            Kind::FulmarTwoQueues => "fulmar-queues-2",
            Kind::Pasta => "pasta",
            Kind::Slirp4netns => "slirp4netns",
            Kind::Gvisor => "gvisor",
            Kind::Veth => "veth",
        }
    }

    /// The name in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Kind::Fulmar => "fulmar gateway",
            Kind::FulmarTwoQueues => "fulmar, 2 queues",
            Kind::Pasta => "pasta",
            Kind::Slirp4netns => "slirp4netns",
            Kind::Gvisor => "gvisor-tap-vsock",
            Kind::Veth => "veth (root)",
        }
    }

    /// The program to start.
    const fn program(self) -> &'static str {
        match self {
            Kind::FulmarTwoQueues => Kind::Fulmar.name(),
            Kind::Gvisor => "gvproxy",
            _ => self.name(),
        }
    }
}

/// Where programs are.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// Given on the command line, by name.
    pub given: Vec<(String, PathBuf)>,
}

impl Programs {
    /// The name and the version of a gateway, as it says by `--version`.
    pub fn title(&self, kind: Kind) -> String {
        let said = self.find(kind.program()).ok().and_then(|program| {
            Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()
        });
        let said =
            said.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        let is_version =
            |word: &&str| word.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit());
        match said.split_whitespace().find(is_version) {
            Some(version) => format!("{} {version}", kind.title()),
            None => kind.title().to_owned(),
        }
    }

    /// The file of a program: given, beside this one (of `fulmar`), of `scripts/peers`, or in PATH.
    pub(crate) fn find(&self, name: &str) -> io::Result<PathBuf> {
        let given = self.given.iter().find(|(n, _)| n == name).map(|(_, path)| path.clone());
        let own = || {
            let beside = env::current_exe().ok()?.with_file_name(name);
            (name == Kind::Fulmar.name() && beside.is_file()).then_some(beside)
        };
        let current = || {
            let target = env::current_exe().ok()?.parent()?.parent()?.to_owned();
            Some(target.join("peers/bin").join(name)).filter(|file| file.is_file())
        };
        let in_path = || {
            let path = env::var_os("PATH")?;
            env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
        };
        given.or_else(own).or_else(current).or_else(in_path).ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("`{name}` is not installed"))
        })
    }
}

/// The host's side: an interface with a default route, which gateways copy and listen on.
pub struct Host {
    _router: Netns,
    /// Sockets of gateways.
    folder: PathBuf,
}

impl Host {
    /// Sets the calling process's namespace up.
    pub fn new() -> io::Result<Host> {
        let (host, router) = (Netns::current()?, Netns::new()?);
        let end = |name, last| VethEnd { name, mac: [2, 0, 0, 0, 0x90, last], mtu: 65_535 };
        host.add_veth(&end("uplink0", 1), &router, &end("uplink1", 2))?;
        host.set_address("uplink0", IpAddr::V4(HOST_IP), 24)?;
        router.set_address("uplink1", IpAddr::V4(ROUTER_IP), 24)?;
        add_default_route(&host, "uplink0", ROUTER_IP)?;
        let folder = env::temp_dir().join(format!("fulmar-lab-gateway-{}", std::process::id()));
        fs::create_dir(&folder)?;
        // Gateways drop their capabilities before they open a namespace, so they cannot open this process's namespaces
        // below /proc. They get files instead, in a mount namespace that ends with this process.
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
        Ok(Host { _router: router, folder })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn add_default_route(netns: &Netns, interface: &str, through: Ipv4Addr) -> io::Result<()> {
    let index = netns.if_index(interface)?;
    netns.netlink()?.add_route(&Route::default_through(index, IpAddr::V4(through)))
}

/// A gateway at work, with its guest.
pub struct Instance {
    /// Which.
    pub kind: Kind,
    /// The guest's interface's, in bytes.
    pub mtu: u32,
    /// The guest's namespace.
    pub guest: Netns,
    /// Published to the guest: TCP and UDP of this number.
    pub port: u16,
    /// Where other processes open it.
    netns_path: PathBuf,
    children: Vec<Child>,
}

impl Instance {
    /// Starts one whose published port is `port`.
    ///
    /// # Errors
    /// It is not installed, or does not start; with its output.
    pub fn start(
        kind: Kind,
        mtu: u32,
        port: u16,
        host: &Host,
        programs: &Programs,
    ) -> io::Result<Instance> {
        let guest = Netns::new()?;
        let netns_path = host.folder.join(format!("netns-{port}"));
        fs::File::create(&netns_path)?;
        let fd = format!("/proc/self/fd/{}", guest.raw_fd());
        let none: Option<&str> = None;
        mount(Some(fd.as_str()), &netns_path, none, MsFlags::MS_BIND, none)?;
        let mut instance = Instance { kind, mtu, guest, netns_path, port, children: Vec::new() };
        match kind {
            Kind::Veth => instance.join_by_veth()?,
            Kind::Fulmar | Kind::FulmarTwoQueues | Kind::Pasta => {
                let mut command = Command::new(programs.find(kind.program())?);
                match kind {
                    Kind::Fulmar => command.arg("gateway"),
                    Kind::FulmarTwoQueues => command.args(["gateway", "--queues", "2"]),
                    _ => &mut command,
                };
                instance.start_pasta(command, host)?;
            }
            Kind::Slirp4netns => instance.start_slirp(&programs.find(kind.program())?, host)?,
            Kind::Gvisor => instance.start_gvisor(programs, host)?,
        }
        Ok(instance)
    }

    /// Where clients of the host reach the published port.
    pub fn published(&self) -> SocketAddr {
        let ip = match self.kind {
            Kind::Veth => self.veth_address(2),
            _ => HOST_IP,
        };
        SocketAddr::new(IpAddr::V4(ip), self.port)
    }

    /// CPU time of its processes so far.
    pub fn cpu(&self) -> io::Result<Duration> {
        self.children.iter().map(|c| cpu::process_cpu(Some(c.id()))).sum()
    }

    /// Resident memory of its processes, in bytes; zero without any.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        self.children.iter().map(|c| cpu::resident_bytes(c.id())).sum()
    }

    fn veth_address(&self, last: u8) -> Ipv4Addr {
        // A network for each instance: ports are counted in tens.
        Ipv4Addr::new(10, 91, (self.port / 10) as u8, last)
    }

    fn join_by_veth(&mut self) -> io::Result<()> {
        let (host, near) = (Netns::current()?, format!("veth{}", self.port));
        let mtu = self.mtu;
        let ours = VethEnd { name: &near, mac: [2, 0, 0, 0, 0x91, 1], mtu };
        let theirs = VethEnd { name: INTERFACE, mac: [2, 0, 0, 0, 0x91, 2], mtu };
        host.add_veth(&ours, &self.guest, &theirs)?;
        host.set_address(&near, IpAddr::V4(self.veth_address(1)), 24)?;
        self.guest.set_address(INTERFACE, IpAddr::V4(self.veth_address(2)), 24)?;
        add_default_route(&self.guest, INTERFACE, self.veth_address(1))
    }

    /// pasta, or a program with its options.
    fn start_pasta(&mut self, mut command: Command, host: &Host) -> io::Result<()> {
        let port = self.port.to_string();
        command.args(["--config-net", "--foreground", "--quiet", "--no-map-gw", "--ipv4-only"]);
        command.args(["--ns-ifname", INTERFACE, "--mtu", &self.mtu.to_string()]);
        command.args(["--address", &GUEST_IP.to_string(), "--netmask", "255.255.255.0"]);
        command.args(["--gateway", &GATEWAY_IP.to_string()]);
        command.args(["-t", &port, "-u", &port, "-T", "none", "-U", "none"]);
        if self.kind == Kind::Pasta && geteuid_is_root() {
            command.args(["--runas", "0:0"]);
        }
        command.arg("--netns-only").arg("--netns").arg(&self.netns_path);
        self.spawn(command, host)?;
        self.wait_for_guest(host)
    }

    fn start_slirp(&mut self, program: &Path, host: &Host) -> io::Result<()> {
        let api = host.folder.join(format!("slirp-{}", self.port));
        let mut command = Command::new(program);
        command.args(["--configure", "--netns-type=path", "--disable-host-loopback"]);
        command.args([format!("--mtu={}", self.mtu), format!("--api-socket={}", api.display())]);
        command.arg(&self.netns_path).arg(INTERFACE);
        self.spawn(command, host)?;
        self.wait_for_guest(host)?;
        wait_until("slirp4netns did not create its API socket", || Ok(api.exists()))?;
        for protocol in ["tcp", "udp"] {
            let call = serde_json::json!({ "execute": "add_hostfwd", "arguments": {
                "proto": protocol, "host_addr": "0.0.0.0", "host_port": self.port,
                "guest_addr": GUEST_IP.to_string(), "guest_port": self.port,
            }});
            let answer = asked(&api, &call.to_string())?;
            if !answer.contains("return") {
                return Err(io::Error::other(format!(
                    "slirp4netns did not publish the port: {answer}"
                )));
            }
        }
        Ok(())
    }

    /// gvproxy beside the host, its `vm` beside the guest. `vm` asks `dhclient` to configure the interface; the
    /// one that it finds does nothing, and the interface is configured here.
    fn start_gvisor(&mut self, programs: &Programs, host: &Host) -> io::Result<()> {
        let (proxy, vm) = (programs.find("gvproxy")?, programs.find("vm")?);
        let socket = host.folder.join(format!("gvisor-{}", self.port));
        let at = format!("unix://{}", socket.display());
        let mut command = Command::new(proxy);
        command.args(["-listen", &at, "-mtu", &self.mtu.to_string(), "-ssh-port", "-1"]);
        self.spawn(command, host)?;
        wait_until("gvproxy does not listen", || Ok(socket.exists()))?;
        let tools = host.folder.join("bin");
        if !tools.exists() {
            fs::create_dir(&tools)?;
            let script = tools.join("dhclient");
            fs::write(&script, "#!/bin/sh\nexec sleep 1000000\n")?;
            let mode = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
            fs::set_permissions(&script, mode)?;
        }
        let mut command = Command::new(vm);
        command.args(["-url", &at, "-iface", INTERFACE, "-mac", GVISOR_MAC]);
        command.args(["-mtu", &self.mtu.to_string()]);
        command
            .env("PATH", format!("{}:{}", tools.display(), env::var("PATH").unwrap_or_default()));
        self.spawn_in(command, host, Some(self.guest.raw_fd()))?;
        wait_until("vm did not create its interface", || {
            Ok(self.guest.if_index(INTERFACE).is_ok())
        })?;
        self.guest.set_address(INTERFACE, IpAddr::V4(GVISOR_IP), 24)?;
        add_default_route(&self.guest, INTERFACE, GVISOR_GATEWAY_IP)?;
        for protocol in ["tcp", "udp"] {
            let body = format!(
                r#"{{"local":"0.0.0.0:{0}","remote":"{GVISOR_IP}:{0}","protocol":"{protocol}"}}"#,
                self.port
            );
            let answer = posted(&socket, "/services/forwarder/expose", &body)?;
            if !answer.starts_with("HTTP/1.1 200") {
                return Err(io::Error::other(format!(
                    "gvproxy did not publish the port: {answer}"
                )));
            }
        }
        Ok(())
    }

    fn spawn(&mut self, command: Command, host: &Host) -> io::Result<()> {
        self.spawn_in(command, host, None)
    }

    fn spawn_in(
        &mut self,
        mut command: Command,
        host: &Host,
        netns: Option<i32>,
    ) -> io::Result<()> {
        let log = fs::File::create(self.log(host))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        sys::die_with_parent(&mut command, netns);
        self.children.push(command.spawn()?);
        Ok(())
    }

    fn log(&self, host: &Host) -> PathBuf {
        host.folder.join(format!("{}-{}.log", self.kind.name(), self.port))
    }

    /// Until the guest has a default route, which the gateway gives it last.
    fn wait_for_guest(&mut self, host: &Host) -> io::Result<()> {
        let end = Instant::now() + START;
        loop {
            let ended = self.children.iter_mut().find_map(|c| c.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(io::Error::other(format!(
                    "the gateway ended with {status}: {}",
                    self.said(host)
                )));
            }
            if self.guest.netlink()?.routes()?.iter().any(Route::is_default) {
                return Ok(());
            }
            if Instant::now() > end {
                let said = format!("the guest has no route: {}", self.said(host));
                return Err(io::Error::new(io::ErrorKind::TimedOut, said));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The last output of the program, in one line.
    fn said(&self, host: &Host) -> String {
        let text = fs::read_to_string(self.log(host)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(3)..];
        last.join("; ")
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = umount2(&self.netns_path, MntFlags::MNT_DETACH);
    }
}

fn geteuid_is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

fn wait_until(failure: &str, is_so: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    let end = Instant::now() + START;
    while !is_so()? {
        if Instant::now() > end {
            return Err(io::Error::new(io::ErrorKind::TimedOut, failure));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The answer of a program that listens on a path and closes after its answer.
fn asked(path: &Path, question: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(START))?;
    stream.write_all(question.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The answer to an HTTP POST over a path.
fn posted(path: &Path, url: &str, body: &str) -> io::Result<String> {
    let mut request = format!("POST {url} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n");
    write!(request, "Content-Length: {}\r\n\r\n{body}", body.len()).map_err(io::Error::other)?;
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(START))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
