//! Programs as people run them, unchanged, under `fulmar run`: clients in the namespace with a server of Python's
//! outside, and servers in the namespace behind `--publish`. A program that is not installed is skipped aloud.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::support::{PATIENCE, in_sandbox, text};

/// An address of the host that no guest has: the guest gets the addresses of the interface with the default route.
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

/// A host with a default route and one more address.
fn host() {
    for line in ["route add default via 10.77.0.2", &format!("addr add {HOST}/32 dev lo")] {
        let status = Command::new("ip").args(line.split(' ')).status().expect("ip(8)");
        assert!(status.success(), "ip {line}");
    }
}

fn run(options: &[&str], folder: &Folder, program: &[&str]) -> Command {
    let mut command = Command::new(FULMAR);
    command
        .args(["run", "--quiet", "--allow", HOST])
        .args(options)
        .arg("--")
        .args(program)
        .current_dir(&folder.0);
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
        if is_installed("hey") {
            // Go's own sockets and scheduler, four connections at a time.
            let done = output(&[], &folder, &["hey", "-n", "40", "-c", "4", &url]);
            let said = text(&done.stdout);
            assert!(said.contains("[200]\t40 responses"), "{said}{}", text(&done.stderr));
            assert!(said.contains(&format!("Size/request:\t{FILE_BYTES} bytes")), "{said}");
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
            "daemon off; master_process off; user root; error_log stderr; pid {root}/pid; events {{}} \
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
                // iperf3 -J exits with 0 after a refused connection, too.
                if done.status.success() && document["error"].is_null() {
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

/// The user of [`ordinary`].
const USER: &str = "guest";

/// The line that runs a program as an ordinary user with a shell: sshd accepts no other user, and PostgreSQL does not
/// run as root. The user exists in namespaces of the program's own, and files of the test are its files.
fn ordinary(folder: &Folder, program: &[&str]) -> Vec<String> {
    let home = folder.0.display();
    fs::write(folder.0.join("passwd"), format!("{USER}:x:1000:1000::{home}:/bin/sh\n")).unwrap();
    let script = "mount --bind \"$0/passwd\" /etc/passwd && \
                  exec unshare --user --map-user=1000 --map-group=1000 \"$@\"";
    let namespaces = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script];
    let home = home.to_string();
    [&namespaces[..], &[home.as_str()], program].concat().into_iter().map(str::to_owned).collect()
}

/// Whether that can be done here.
fn has_ordinary(folder: &Folder) -> bool {
    let line = ordinary(folder, &["true"]);
    let output = Command::new(&line[0]).args(&line[1..]).output().expect("unshare(1)");
    if !output.status.success() {
        crate::support::skip("programs of an ordinary user", &text(&output.stderr));
    }
    output.status.success()
}

/// A server of an ordinary user in a namespace, behind a published port.
fn ordinary_server(port: u16, folder: &Folder, program: &[&str]) -> Server {
    let line = ordinary(folder, program);
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let mut command = run(&["--publish", &port.to_string()], folder, &line);
    command.stderr(Stdio::null());
    Server::start(command)
}

/// Repeats a command in another namespace until the server behind the published port answers.
fn output_once_served(folder: &Folder, program: &[&str]) -> Output {
    let started = Instant::now();
    loop {
        let done = output(&[], folder, program);
        if done.status.success() {
            return done;
        }
        assert!(started.elapsed() < PATIENCE, "{program:?}: {}", text(&done.stderr));
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn ssh_runs_commands_and_copies_files_from_one_namespace_to_another() {
    const BYTES: usize = 8_000_000;
    in_sandbox(|| {
        let folder = Folder::new();
        // sshd starts itself by its path.
        let sshd = "/usr/sbin/sshd";
        if !is_installed(sshd) || !is_installed("ssh") || !has_ordinary(&folder) {
            return;
        }
        host();
        let file = |name: &str| folder.0.join(name).display().to_string();
        let (key, public) = (file("key"), file("key.pub"));
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &key]);
        assert!(keygen.status().unwrap().success());
        let authorized = format!("AuthorizedKeysFile={public}");
        let server = [sshd, "-D", "-e", "-f", "/dev/null", "-h", &key, "-p", "8094"];
        let settings = ["PidFile=none", "StrictModes=no", "Subsystem=sftp internal-sftp"];
        let settings = settings.into_iter().chain([authorized.as_str()]).flat_map(|s| ["-o", s]);
        let server: Vec<&str> = server.into_iter().chain(settings).collect();
        let _server = ordinary_server(8094, &folder, &server);

        let known = format!("UserKnownHostsFile={}", file("known"));
        let options = ["-q", "-F", "/dev/null", "-i", &key, "-o", "BatchMode=yes", "-o", &known];
        let options = [&options[..], &["-o", "StrictHostKeyChecking=no"]].concat();
        let at_host = format!("{USER}@{HOST}");
        let ssh = [&["ssh", "-p", "8094"], &options[..], &[&at_host]].concat();
        let said = output_once_served(&folder, &[&ssh[..], &["id -un; exec cat file"]].concat());
        assert!(said.stdout == [b"guest\n", folder.file().as_slice()].concat());
        let ended = output(&[], &folder, &[&ssh[..], &["exit 7"]].concat());
        assert_eq!(ended.status.code(), Some(7), "{}", text(&ended.stderr));

        let bytes: Vec<u8> = (0..BYTES).map(|i| (i * i / 11) as u8).collect();
        fs::write(file("large"), &bytes).unwrap();
        let remote = |name| format!("{at_host}:{}", file(name));
        for (from, to) in [(file("large"), remote("up")), (remote("up"), file("down"))] {
            let scp = [&["scp", "-P", "8094"], &options[..], &[&from, &to]].concat();
            let copied = output(&[], &folder, &scp);
            assert!(copied.status.success(), "{from} {to}: {}", text(&copied.stderr));
        }
        assert!(fs::read(file("down")).unwrap() == bytes, "a copy of the copy");
    });
}

/// A program of PostgreSQL: Debian has them in a folder of their version, which is not in PATH.
fn of_postgres(program: &str) -> String {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let paths = versions.map(|version| version.path().join("bin").join(program));
    let found = paths.filter(|path| path.exists()).max();
    found.map_or(program.to_owned(), |path| path.display().to_string())
}

#[test]
fn postgres_answers_clients_of_another_namespace() {
    in_sandbox(|| {
        let folder = Folder::new();
        let (initdb, postgres) = (of_postgres("initdb"), of_postgres("postgres"));
        if !is_installed(&postgres) || !is_installed("psql") || !has_ordinary(&folder) {
            return;
        }
        host();
        let data = folder.0.join("data").display().to_string();
        let options = ["-A", "trust", "-N", "--no-locale", "-E", "UTF8", "-U", USER];
        let line = ordinary(&folder, &[&[&initdb, "-D", &data], &options[..]].concat());
        let made = Command::new(&line[0]).args(&line[1..]).output().unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
        let access = folder.0.join("data/pg_hba.conf");
        let anybody = fs::read_to_string(&access).unwrap() + "host all all 0.0.0.0/0 trust\n";
        fs::write(access, anybody).unwrap();
        let settings = ["listen_addresses=0.0.0.0", "fsync=off", "unix_socket_directories="];
        let settings = settings.into_iter().flat_map(|s| ["-c", s]);
        let server = [&postgres, "-D", &data, "-p", "8095"].into_iter().chain(settings);
        let _server = ordinary_server(8095, &folder, &server.collect::<Vec<_>>());

        let psql = ["psql", "-h", HOST, "-p", "8095", "-U", USER, "-d", "postgres", "-AtqX", "-c"];
        let query = |sql| text(&output_once_served(&folder, &[&psql[..], &[sql]].concat()).stdout);
        assert_eq!(query("select 6 * 7"), "42\n");
        // Its client's address is that of the host where the client's gateway connected from.
        assert_eq!(query("select inet_client_addr()"), format!("{HOST}\n"));
        query(
            "create table t as select n, repeat(md5(n::text), 4) from generate_series(1, 20000) n",
        );
        let rows = query("copy t to stdout");
        assert_eq!((rows.lines().count(), rows.len()), (20_000, 88_894 + 20_000 * 130));
        assert!(rows.ends_with('\n') && rows.starts_with("1\tc4ca4238a0b923820dcc509a6f75849b"));
    });
}
