//! Programs as people run them, unchanged, under `fulmar run`: clients in the namespace with a server of Python's
//! outside, and servers in the namespace behind `--publish`. A program that is not installed is skipped aloud.

#[allow(dead_code, reason = "what only tests of sockets need")]
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use support::{PATIENCE, in_sandbox, text};

const FULMAR: &str = env!("CARGO_BIN_EXE_fulmar");
/// An address of the host that no guest has: the guest gets those of the interface with the default route.
const HOST: &str = "10.88.0.1";
const PORT: u16 = 8081;
const FILE_BYTES: usize = 300_000;

/// A process that ends with the value, with what it has started.
struct Server(Child);

impl Server {
    fn start(mut command: Command) -> Server {
        // A run passes SIGTERM on to its program.
        Server(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// A folder with a file and a repository, of which nothing is left at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = std::env::temp_dir().join(format!("fulmar-programs-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        // nginx as root reads it as another user.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let bytes: Vec<u8> = (0..FILE_BYTES).map(|i| (i * i / 7) as u8).collect();
        fs::write(path.join("file"), bytes).unwrap();
        Folder(path)
    }

    fn file(&self) -> Vec<u8> {
        fs::read(self.0.join("file")).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = Path::new(program).is_absolute() && Path::new(program).exists()
        || std::env::split_paths(&path).any(|folder| folder.join(program).exists());
    if !is_there {
        // Not `eprintln`: the harness hides what a passing test prints by it.
        let _ = writeln!(std::io::stderr(), "SKIPPED {program} under `fulmar run`: not installed");
    }
    is_there
}

/// A host with a default route and an address beside it.
fn host() {
    for line in ["route add default via 10.77.0.2", &format!("addr add {HOST}/32 dev lo")] {
        let status = Command::new("ip").args(line.split(' ')).status().expect("ip(8)");
        assert!(status.success(), "ip {line}");
    }
}

fn run(options: &[&str], folder: &Folder, program: &[&str]) -> Command {
    let mut command = Command::new(FULMAR);
    command.arg("run").args(options).arg("--").args(program).current_dir(&folder.0);
    command
}

fn output(options: &[&str], folder: &Folder, program: &[&str]) -> Output {
    run(options, folder, program).output().expect("it starts")
}

/// What a server answers to a question, once it listens.
fn ask(port: u16, question: &str) -> Vec<u8> {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let started = Instant::now();
    let mut answer = Vec::new();
    while answer.is_empty() {
        assert!(started.elapsed() < PATIENCE, "port {port} does not answer {question:?}");
        // Before it listens in the namespace, a connection is reset.
        let asked = TcpStream::connect(to).and_then(|mut s| {
            s.write_all(question.as_bytes())?;
            s.read_to_end(&mut answer)
        });
        if asked.is_err() || answer.is_empty() {
            thread::sleep(Duration::from_millis(50));
        }
    }
    answer
}

fn get(port: u16) -> Vec<u8> {
    let answer = ask(port, "GET /file HTTP/1.0\r\nHost: localhost\r\n\r\n");
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n").expect("a header");
    answer[head + 4..].to_vec()
}

/// Python's server of files, outside.
fn file_server(folder: &Folder) -> Server {
    let mut command = Command::new("python3");
    command.args(["-m", "http.server", "-b", HOST, &PORT.to_string()]).stderr(Stdio::null());
    let server = Server::start({
        command.current_dir(&folder.0);
        command
    });
    let started = Instant::now();
    while TcpStream::connect((HOST, PORT)).is_err() {
        assert!(started.elapsed() < PATIENCE, "python3 -m http.server");
        thread::sleep(Duration::from_millis(20));
    }
    server
}

/// A repository that is served as files.
fn repository(folder: &Folder) {
    let script = "git init -q work && cd work && git add ../file 2>/dev/null; \
                  git -c user.name=a -c user.email=a@b commit -q --allow-empty -m one && cd .. && \
                  git clone -q --bare work one.git && cd one.git && git update-server-info";
    let status = Command::new("sh").args(["-c", script]).current_dir(&folder.0).status();
    assert!(status.unwrap().success());
}

#[test]
fn clients_in_the_namespace_fetch_over_http() {
    in_sandbox(|| {
        if !is_installed("python3") {
            return;
        }
        host();
        let folder = Folder::new();
        let _server = file_server(&folder);
        let url = format!("http://{HOST}:{PORT}/file");
        let to_file = folder.0.join("got").display().to_string();
        let node = format!(
            "require('http').get('{url}', r => {{ r.pipe(require('fs').createWriteStream('got')) }})"
        );
        let python = format!(
            "import asyncio\nasync def f():\n r, w = await asyncio.open_connection('{HOST}', {PORT})\n \
             w.write(b'GET /file HTTP/1.0\\r\\n\\r\\n')\n a = await r.read(-1)\n \
             open('got', 'wb').write(a.split(b'\\r\\n\\r\\n', 1)[1])\nasyncio.run(f())"
        );
        let helper = "/usr/lib/apt/apt-helper";
        let clients: [&[&str]; 4] = [
            &["curl", "-sS", "-m", "60", "-o", "got", &url],
            &[helper, "-o", "APT::Sandbox::User=root", "download-file", &url, &to_file],
            &["node", "-e", &node],
            &["python3", "-c", &python],
        ];
        for client in clients.into_iter().filter(|c| is_installed(c[0])) {
            let done = output(&[], &folder, client);
            assert!(done.status.success(), "{client:?}: {}", text(&done.stderr));
            assert_eq!(fs::read(folder.0.join("got")).unwrap(), folder.file(), "{client:?}");
            fs::remove_file(folder.0.join("got")).unwrap();
        }
        if is_installed("git") {
            repository(&folder);
            let url = format!("http://{HOST}:{PORT}/one.git");
            let done = output(&[], &folder, &["git", "clone", "-q", &url, "cloned"]);
            assert!(done.status.success(), "{}", text(&done.stderr));
        }
    });
}

#[test]
fn servers_in_the_namespace_are_reached_by_their_published_ports() {
    in_sandbox(|| {
        host();
        let folder = Folder::new();
        let root = folder.0.display();
        let nginx = format!(
            "daemon off; error_log stderr; pid {root}/pid; events {{}} \
             http {{ access_log off; client_body_temp_path {root}/b; proxy_temp_path {root}/p; \
             fastcgi_temp_path {root}/f; uwsgi_temp_path {root}/u; scgi_temp_path {root}/s; \
             server {{ listen 8091; root {root}; }} }}"
        );
        fs::write(folder.0.join("nginx.conf"), nginx).unwrap();
        let conf = folder.0.join("nginx.conf").display().to_string();
        let node = "require('http').createServer((q, a) => \
                    require('fs').createReadStream('file').pipe(a)).listen(8092)";
        let servers: [(u16, &[&str]); 3] = [
            (8090, &["python3", "-m", "http.server", "8090"]),
            (8091, &["nginx", "-e", "stderr", "-c", &conf]),
            (8092, &["node", "-e", node]),
        ];
        for (port, server) in servers.into_iter().filter(|(_, s)| is_installed(s[0])) {
            let mut command = run(&["--publish", &port.to_string()], &folder, server);
            command.stderr(Stdio::null());
            let _server = Server::start(command);
            for _ in 0..3 {
                assert!(get(port) == folder.file(), "{server:?}");
            }
        }
        if is_installed("redis-server") {
            let redis = ["redis-server", "--port", "8093", "--save", "", "--protected-mode", "no"];
            let _server = Server::start(run(&["--publish", "8093"], &folder, &redis));
            let answer = ask(8093, "SET a b\r\nGET a\r\nQUIT\r\n");
            assert_eq!(text(&answer), "+OK\r\n$1\r\nb\r\n+OK\r\n");
        }
    });
}

#[test]
fn iperf3_carries_its_bytes_both_ways() {
    in_sandbox(|| {
        if !is_installed("iperf3") {
            return;
        }
        host();
        let folder = Folder::new();
        for way in [&[][..], &["-R"]] {
            let mut command = Command::new("iperf3");
            command.args(["-s", "-1", "-B", HOST]);
            let _server = Server::start(command);
            let client = [&["iperf3", "-c", HOST, "-n", "20M", "-J"], way].concat();
            let started = Instant::now();
            let document = loop {
                let done = output(&[], &folder, &client);
                let document: serde_json::Value =
                    serde_json::from_slice(&done.stdout).expect("iperf3 -J");
                if done.status.success() {
                    break document;
                }
                assert!(started.elapsed() < PATIENCE, "{document}");
                thread::sleep(Duration::from_millis(50));
            };
            let bytes = |end: &str| document["end"][end]["bytes"].as_u64().unwrap_or(0);
            assert!(bytes("sum_sent") >= 20_000_000, "{document}");
            // iperf3's receiver counts no byte that is under way when the sender says that it is done.
            assert!(bytes("sum_received") >= 5_000_000, "{document}");
        }
    });
}
