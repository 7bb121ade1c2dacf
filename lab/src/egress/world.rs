//! The world of `bench egress`: a host with an internet of test servers, and the programs that run on the host.
//!
//! ```text
//! [ program ]== fulmar run ==[ host: 45.10.0.1, loopback ]-- veth --[ internet: every server ]
//! ```
//! The host is the namespace of this process, with a resolver, a certificate and `/run` of its own. Programs run in a
//! user namespace below it, as a user without capabilities or, if the attack needs frames of its own, with those over
//! the program's namespaces only. Everything ends with this process.

use std::io::{self, BufRead, BufReader};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, thread};

use fulmar_gateway::netns::{Netns, Route, VethEnd};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::sys;

/// The name that rules allow.
pub(crate) const ALLOWED: &str = "ok.test";
const SERVERS: &str = include_str!("guest/servers.py");
const ATTACKS: &str = include_str!("guest/attacks.py");
const CLIENTS: &[(&str, &str)] = &[
    ("Get.java", include_str!("guest/Get.java")),
    ("get.go", include_str!("guest/get.go")),
    ("grpc_client.py", include_str!("guest/grpc_client.py")),
    ("http3_client.py", include_str!("guest/http3_client.py")),
];
/// Its link has no server, since a name must not lead there.
const HOST_ADDRESSES: [(&str, u8); 3] = [("45.10.0.1", 29), ("2a0a::1", 125), ("45.10.0.2", 29)];
/// The routers, of the host's link, and the servers: all of them are at one interface.
const INTERNET_ADDRESSES: [(&str, u8); 14] = [
    ("45.10.0.6", 29),
    ("2a0a::6", 125),
    ("45.10.0.10", 32),
    ("2a0a::10", 128),
    ("45.10.0.66", 32),
    ("2a0a::66", 128),
    ("45.10.0.53", 32),
    ("10.20.0.5", 32),
    ("fd12::5", 128),
    ("169.254.169.254", 32),
    ("fd00:ec2::254", 128),
    ("64:ff9b::a9fe:a9fe", 128),
    ("64:ff9b::a14:5", 128),
    ("45.10.0.67", 32),
];

/// What a program runs in.
#[derive(Clone, Debug)]
pub(crate) enum Inside<'a> {
    /// The host itself.
    Host,
    /// `fulmar run` with these options.
    Fulmar(&'a [String]),
    /// sandbox-runtime, with these names allowed.
    Srt(&'a [String]),
}

/// As whom it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum As {
    /// A user without capabilities.
    User,
    /// With all capabilities over its own namespaces.
    Capable,
    /// In a process namespace of its own.
    AmongOwnProcesses,
    /// With a connection to another server as descriptor 3.
    Heir,
}

/// What a program said, and whether it exited with 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    pub(crate) output: String,
    pub(crate) is_success: bool,
}

/// The namespaces, servers and files.
pub(crate) struct World {
    folder: PathBuf,
    /// Programs that `scripts/setup egress` has installed.
    tools: PathBuf,
    fulmar: PathBuf,
    internet: Netns,
    servers: Vec<Child>,
    next: AtomicU32,
}

impl World {
    /// Makes the world in the calling process's network namespace.
    ///
    /// # Errors
    /// The step that failed.
    pub(crate) fn new(fulmar: PathBuf) -> io::Result<World> {
        let folder = env::temp_dir().join(format!("fulmar-lab-egress-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let target = env::current_exe()?.parent().and_then(Path::parent).map(Path::to_owned);
        let tools = target.unwrap_or_default().join("egress");
        let internet = connected()?;
        let mut world =
            World { folder, tools, fulmar, internet, servers: Vec::new(), next: AtomicU32::new(0) };
        world.write_files()?;
        world.own_mounts()?;
        world.start_servers()?;
        Ok(world)
    }

    /// A file of the world.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The program fulmar.
    pub(crate) fn fulmar(&self) -> &Path {
        &self.fulmar
    }

    /// The namespace of the servers.
    pub(crate) fn internet(&self) -> &Netns {
        &self.internet
    }

    /// Whether a program is there: in PATH, or installed by `scripts/setup egress`.
    pub(crate) fn has(&self, program: &str) -> bool {
        if let Some(module) = program.strip_prefix("python:") {
            let import = format!("import {module}");
            return self.command(&self.python(), &["-c", &import]).is_ok_and(|s| s.success());
        }
        if let Some(module) = program.strip_prefix("npm:") {
            return self.tools.join("node_modules").join(module).exists();
        }
        if program == "sshd" {
            return sshd().is_some() && fs::metadata("/proc/self").is_ok_and(|_| is_root());
        }
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).any(|folder| folder.join(program).is_file())
    }

    /// Whether `fulmar run` has this option.
    pub(crate) fn knows(&self, option: &str) -> bool {
        let output = Command::new(&self.fulmar).args(["run", "--help"]).output();
        output.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains(option))
    }

    /// The sandbox-runtime of `scripts/setup egress`, with its version.
    pub(crate) fn srt_version(&self) -> Option<String> {
        let about = self.tools.join("node_modules/@anthropic-ai/sandbox-runtime/package.json");
        let text = fs::read_to_string(about).ok()?;
        let about: serde_json::Value = serde_json::from_str(&text).ok()?;
        about["version"].as_str().map(str::to_owned)
    }

    /// Lines `PLACE MARK` of everything that has been reached.
    pub(crate) fn reached(&self, mark: &str) -> Vec<String> {
        let log = fs::read_to_string(self.path("reached")).unwrap_or_default();
        let mut places: Vec<String> = log
            .lines()
            .filter_map(|line| line.rsplit_once(' '))
            .filter(|(_, found)| *found == mark)
            .map(|(place, _)| place.to_owned())
            .collect();
        places.dedup();
        places
    }

    fn write_files(&self) -> io::Result<()> {
        fs::write(self.path("servers.py"), SERVERS)?;
        fs::write(self.path("attacks.py"), ATTACKS)?;
        for (name, text) in CLIENTS {
            fs::write(self.path(name), text)?;
        }
        fs::write(
            self.path("resolv.conf"),
            "nameserver 45.10.0.53\noptions timeout:2 attempts:1\n",
        )?;
        let certificate = format!(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN={ALLOWED} \
             -addext subjectAltName=DNS:{ALLOWED},DNS:evil.test,DNS:*.evil.test -keyout edge.key -out edge.pem"
        );
        self.prepare(&certificate)?;
        // Some clients need these; they fail without them.
        let optional = [
            "ssh-keygen -q -t ed25519 -N '' -f host_key && ssh-keygen -q -t ed25519 -N '' -f user_key",
            "git init -q --bare repo.git",
            "javac -d . Get.java",
            "GO111MODULE=off GOFLAGS= go build -o get get.go",
        ];
        thread::scope(|scope| {
            for script in optional {
                scope.spawn(move || self.prepare(script));
            }
        });
        Ok(())
    }

    /// Runs a script in the world's folder, before there are any servers.
    fn prepare(&self, script: &str) -> io::Result<()> {
        let output = Command::new("sh").args(["-c", script]).current_dir(&self.folder).output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(io::Error::other(format!("`{script}` failed: {said}")))
    }

    fn command(&self, program: &str, arguments: &[&str]) -> io::Result<std::process::ExitStatus> {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
    }

    /// A resolver's file and a `/run` of this process and its children, and what its namespace takes.
    fn own_mounts(&self) -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
        let resolv_conf = fs::canonicalize("/etc/resolv.conf")?;
        mount(Some("run"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=755"))?;
        fs::create_dir_all("/run/sshd")?;
        if resolv_conf.starts_with("/run") {
            fs::create_dir_all(resolv_conf.parent().unwrap_or(Path::new("/run")))?;
            fs::write(&resolv_conf, "")?;
        }
        // Echo requests of a gateway without capabilities.
        fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
        let own = self.path("resolv.conf");
        Ok(mount(Some(&own), &resolv_conf, none, MsFlags::MS_BIND, none)?)
    }

    fn python(&self) -> String {
        let own = self.tools.join("venv/bin/python");
        if own.is_file() { own.display().to_string() } else { "python3".to_owned() }
    }

    fn start_servers(&mut self) -> io::Result<()> {
        for (role, netns) in [("internet", Some(&self.internet)), ("host", None)] {
            let mut command = Command::new(self.python());
            command.arg("servers.py").arg(role).arg(&self.folder).current_dir(&self.folder);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            sys::die_with_parent(&mut command, netns.map(Netns::raw_fd));
            let mut child = command.spawn()?;
            let mut line = String::new();
            let out = child.stdout.take().ok_or_else(|| io::Error::other("no pipe"))?;
            BufReader::new(out).read_line(&mut line)?;
            self.servers.push(child);
            if line.trim() != "ready" {
                return Err(io::Error::other(format!("the servers of the {role} did not start")));
            }
        }
        if let Some(sshd) = sshd().filter(|_| is_root()) {
            self.start_sshd(&sshd)?;
        }
        Ok(())
    }

    fn start_sshd(&mut self, sshd: &Path) -> io::Result<()> {
        let at = |name: &str| self.path(name).display().to_string();
        let options = [
            "ListenAddress=45.10.0.10".to_owned(),
            format!("HostKey={}", at("host_key")),
            format!("AuthorizedKeysFile={}", at("user_key.pub")),
            "PermitRootLogin=yes".to_owned(),
            "StrictModes=no".to_owned(),
            "UsePAM=no".to_owned(),
            "PidFile=none".to_owned(),
        ];
        let mut command = Command::new(sshd);
        command.args(["-D", "-e", "-f", "/dev/null"]);
        command.args(options.iter().flat_map(|option| ["-o", option.as_str()]));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(at("sshd.log"))?);
        sys::die_with_parent(&mut command, Some(self.internet.raw_fd()));
        self.servers.push(command.spawn()?);
        Ok(())
    }

    /// The words with which a script of sh(1) runs.
    pub(crate) fn words(
        &self,
        inside: &Inside<'_>,
        as_user: As,
        script: &str,
    ) -> io::Result<Vec<String>> {
        let around: &[&str] = match as_user {
            As::User => &["unshare", "--user", "--map-user=1", "--map-group=1", "--"],
            As::Capable => &["unshare", "--user", "--map-root-user", "--"],
            As::AmongOwnProcesses => &[
                "unshare",
                "--user",
                "--map-user=1",
                "--map-group=1",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--",
                "env",
                "OWN_PROCESSES=1",
            ],
            As::Heir => &[
                "bash",
                "-c",
                "exec 3<>/dev/tcp/45.10.0.66/80; exec \"$@\"",
                "bash",
                "unshare",
                "--user",
                "--map-user=1",
                "--map-group=1",
                "--",
            ],
        };
        let mut words: Vec<String> = around.iter().map(|word| (*word).to_owned()).collect();
        match inside {
            Inside::Host => {}
            Inside::Fulmar(options) => {
                words.extend([self.fulmar.display().to_string(), "run".to_owned()]);
                words.extend(options.iter().cloned());
                words.push("--".to_owned());
            }
            Inside::Srt(names) => {
                words.extend([
                    self.node(),
                    self.tools.join("node_modules/.bin/srt").display().to_string(),
                ]);
                let settings = self.srt_settings(names)?;
                words.extend(["-s".to_owned(), settings, "-c".to_owned(), script.to_owned()]);
                return Ok(words);
            }
        }
        words.extend(["sh", "-c", script].map(str::to_owned));
        Ok(words)
    }

    fn node(&self) -> String {
        let own = self.tools.join("node_modules/node/bin/node");
        if own.is_file() { own.display().to_string() } else { "node".to_owned() }
    }

    fn srt_settings(&self, names: &[String]) -> io::Result<String> {
        let settings = serde_json::json!({
            "network": { "allowedDomains": names, "deniedDomains": [] },
            "filesystem": { "denyRead": [], "allowWrite": [self.folder, "/tmp"], "denyWrite": [] },
        });
        // One for each run: others read theirs meanwhile.
        let file = self.path(&format!("srt-{}.json", self.next.fetch_add(1, Ordering::Relaxed)));
        fs::write(&file, settings.to_string())?;
        Ok(file.display().to_string())
    }

    /// Runs words for at most `seconds`, in a folder of its own, with `mark` and `name` in its environment.
    pub(crate) fn run(
        &self,
        words: &[String],
        seconds: u32,
        mark: &str,
        name: Option<&str>,
    ) -> io::Result<Said> {
        let home = self.path(&format!("home-{}", self.next.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(home.join("work"))?;
        let said = home.join("said");
        let file = fs::File::create(&said)?;
        let mut command = Command::new("timeout");
        command.arg("--kill-after=1").arg(seconds.to_string()).args(words);
        self.set_environment(&mut command, &home, mark, name);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        sys::die_with_parent(&mut command, None);
        let status = command.status()?;
        let output = String::from_utf8_lossy(&fs::read(&said)?).into_owned();
        Ok(Said { output, is_success: status.success() })
    }

    fn set_environment(&self, command: &mut Command, home: &Path, mark: &str, name: Option<&str>) {
        let user_home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
        let certificate = self.path("edge.pem");
        command.current_dir(home.join("work")).env_clear();
        for name in [
            "SSL_CERT_FILE",
            "CURL_CA_BUNDLE",
            "REQUESTS_CA_BUNDLE",
            "NODE_EXTRA_CA_CERTS",
            "GIT_SSL_CAINFO",
            "PIP_CERT",
            "CARGO_HTTP_CAINFO",
        ] {
            command.env(name, &certificate);
        }
        let kept = |name: &str, default: &Path| {
            env::var_os(name).unwrap_or_else(|| default.as_os_str().to_owned())
        };
        command
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .env("LANG", "C.UTF-8")
            .env("HOME", home)
            .env("TMPDIR", home)
            .env("RUSTUP_HOME", kept("RUSTUP_HOME", &user_home.join(".rustup")))
            .env("CARGO_HOME", home.join("cargo"))
            .env("RUSTUP_TOOLCHAIN", kept("RUSTUP_TOOLCHAIN", Path::new("stable")))
            .env("NODE_PATH", self.tools.join("node_modules"))
            .env("PY", self.python())
            .env("W", &self.folder)
            .env("FULMAR", &self.fulmar)
            .env("MARK", mark);
        if let Some(name) = name {
            command.env("NAME", name);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn is_root() -> bool {
    // In a user namespace sshd cannot change to its own user.
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().nth(2) == Some("4294967295"))
        && nix::unistd::geteuid().is_root()
}

fn sshd() -> Option<PathBuf> {
    ["/usr/sbin/sshd", "/usr/bin/sshd"].map(PathBuf::from).into_iter().find(|file| file.is_file())
}

/// Joins the host to the internet, and returns that.
fn connected() -> io::Result<Netns> {
    let (host, internet) = (Netns::current()?, Netns::new()?);
    let end = |name, last| VethEnd { name, mac: [2, 0, 0, 0, 0x45, last], mtu: 1500 };
    host.add_veth(&end("uplink0", 1), &internet, &end("uplink1", 2))?;
    let address = |text: &str| -> io::Result<IpAddr> { text.parse().map_err(io::Error::other) };
    for (netns, name, all) in
        [(&host, "uplink0", &HOST_ADDRESSES[..]), (&internet, "uplink1", &INTERNET_ADDRESSES[..])]
    {
        for (text, prefix) in all {
            netns.set_address(name, address(text)?, *prefix)?;
        }
    }
    let index = host.if_index("uplink0")?;
    for router in ["45.10.0.6", "2a0a::6"] {
        host.netlink()?.add_route(&Route::default_through(index, address(router)?))?;
    }
    Ok(internet)
}
