//! The ways of a program of `fulmar run` to the host and to other processes: ports of the host's loopback that are given,
//! Unix sockets, inherited descriptors.

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CloneFlags, unshare};

use crate::FULMAR;
use crate::gateway_host::shell;
use crate::guest::{Guest, detached, is_running, wait_until};
use crate::support::{in_sandbox, text};

/// What a Python script prints under `fulmar run` with these options.
fn python(options: &[&str], script: &str) -> (String, String) {
    let mut command = Command::new(FULMAR);
    command.arg("run").args(options).args(["--", "python3", "-c", script]);
    let output = command.output().expect("it starts");
    (text(&output.stdout), text(&output.stderr))
}

/// Asks TCP or UDP servers, as (family, address, port), for a word each.
fn asks(kind: &str, servers: &[(&str, u16)]) -> String {
    let list: Vec<String> = servers.iter().map(|(at, port)| format!("('{at}', {port})")).collect();
    format!(
        "import socket
for at, port in [{}]:
    family = socket.AF_INET6 if ':' in at else socket.AF_INET
    s = socket.socket(family, socket.SOCK_{kind})
    s.settimeout(20)
    try:
        s.connect((at, port))
        s.send(b'?')
        print(s.recv(9).decode())
    except OSError as e: print(type(e).__name__)",
        list.join(", ")
    )
}

/// Serves a word to each client for as long as the test runs.
fn serves_tcp(at: &str, word: &'static str) -> u16 {
    let listener = TcpListener::bind(at).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut &client, word.as_bytes());
        }
    });
    port
}

fn serves_udp(at: &str, word: &'static str) -> u16 {
    let socket = UdpSocket::bind(at).unwrap();
    let port = socket.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((_, from)) = socket.recv_from(&mut [0; 9]) {
            let _ = socket.send_to(word.as_bytes(), from);
        }
    });
    port
}

#[test]
fn a_program_reaches_the_chosen_ports_of_the_hosts_loopback_and_no_other() {
    in_sandbox(|| {
        let (v4, v6) = (serves_tcp("127.0.0.1:0", "four"), serves_tcp("[::1]:0", "six"));
        let closed = serves_tcp("127.0.0.1:0", "never");
        let (mapped, v4_port, v6_port) = (format!("77:{v4}"), v4.to_string(), v6.to_string());
        let servers =
            [("127.0.0.1", v4), ("::1", v6), ("::1", v4), ("127.0.0.1", 77), ("127.0.0.1", closed)];
        let script = asks("STREAM", &servers);
        let given = ["--host-port", &v4_port, "--host-port", &v6_port, "--host-port", &mapped];
        for rules in [&[][..], &["--no-network"], &["--deny", "127.0.0.0/8", "--deny", "::1"]] {
            let (said, errors) = python(&[&given, rules].concat(), &script);
            // A server that has one IP version is reached by both.
            assert_eq!(said, "four\nsix\nfour\nfour\nConnectionRefusedError\n", "{errors}");
        }
        let (said, _) = python(&[], &script);
        assert_eq!(said, "ConnectionRefusedError\n".repeat(5));
    });
}

#[test]
fn a_program_reaches_the_chosen_udp_ports_of_the_hosts_loopback_and_no_other() {
    in_sandbox(|| {
        let (v4, v6) = (serves_udp("127.0.0.1:0", "four"), serves_udp("[::1]:0", "six"));
        let closed = serves_udp("127.0.0.1:0", "never");
        let script = asks("DGRAM", &[("127.0.0.1", v4), ("::1", v6), ("127.0.0.1", closed)]);
        let (v4, v6) = (v4.to_string(), v6.to_string());
        let given = ["--no-network", "--host-port-udp", &v4, "--host-port-udp", &v6];
        let (said, errors) = python(&given, &script);
        assert_eq!(said, "four\nsix\nConnectionRefusedError\n", "{errors}");
    });
}

/// A folder in which a Python script of a test may make files, which is gone with the value.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("fulmar-doors-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Gives the calling thread a /run of its own, with what a script makes there.
fn own_run(script: &str) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    shell("mount --make-rprivate / && mount -t tmpfs run /run");
    shell(script);
}

fn connects_to(paths: &[&str]) -> String {
    format!(
        "import socket
for path in {paths:?}:
    s = socket.socket(socket.AF_UNIX)
    try: s.connect(path); print('reached')
    except OSError as e: print(type(e).__name__)"
    )
}

/// Listens at a path for as long as the test runs, and closes each client's connection: who asks such an nscd goes on.
fn listens(path: &str) {
    fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || listener.incoming().for_each(drop));
}

/// The same of a socket of packets, which std does not have.
fn listens_for_packets(path: &str) -> Child {
    let script = "import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1]); s.listen(9)
print(flush=True); sys.stdin.read()";
    let mut command = Command::new("python3");
    command.args(["-c", script, path]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    assert_eq!(child.stdout.as_mut().unwrap().read(&mut [0]).unwrap(), 1);
    child
}

#[test]
fn sockets_that_resolve_names_are_out_of_reach_where_there_are_rules() {
    in_sandbox(|| {
        own_run(
            "mkdir -p /run/lock /run/systemd/resolve; ln -s lock /run/link; echo file > /run/file
                 echo stub > /run/systemd/resolve/stub-resolv.conf; mkdir -p /run/user/0",
        );
        let paths = [
            "/run/nscd/socket",
            "/run/systemd/resolve/io.systemd.Resolve",
            "/run/dbus/system_bus_socket",
            "/run/avahi-daemon/socket",
            "/run/other/socket",
            "/run/systemd/private",
        ];
        paths.into_iter().for_each(listens);
        let script = connects_to(&paths);
        let (said, errors) = python(&[], &script);
        assert_eq!(said, "reached\n".repeat(6), "{errors}");
        let hidden = "FileNotFoundError\n".repeat(4);
        let (said, errors) = python(&["--deny", "192.0.2.1"], &script);
        assert_eq!(said, hidden.clone() + "reached\nreached\n", "{errors}");
        let bus = "/run/dbus/system_bus_socket";
        let (said, _) = python(&["--deny", "192.0.2.1", "--unix", bus], &script);
        assert_eq!(said.lines().filter(|line| *line == "reached").count(), 3, "{said}");
        // A service that starts anew, or later, is not seen either.
        let anew = "rm -r /run/nscd /run/avahi-daemon; mkdir -p /run/nscd /run/avahi-daemon; touch /run/nscd/anew";
        let wait = format!(
            "import time, os\nopen('/run/user/0/go', 'w')\nwhile not os.path.exists('/run/user/0/gone'): time.sleep(0.01)\n{script}\nprint(os.path.exists('/run/nscd/anew'), open('/run/link/../file').read(), open('/run/systemd/resolve/stub-resolv.conf').read())"
        );
        let renewer = thread::spawn(move || {
            shell(&format!(
                "while ! test -e /run/user/0/go; do sleep 0.01; done; {anew}; touch /run/user/0/gone"
            ));
        });
        let (said, errors) = python(&["--deny", "192.0.2.1"], &wait);
        renewer.join().unwrap();
        assert_eq!(said, hidden + "reached\nreached\nFalse file\n stub\n\n", "{errors}");
    });
}

#[test]
fn a_working_folder_below_what_is_hidden_leads_to_the_programs_view() {
    in_sandbox(|| {
        own_run("mkdir -p /run/user/0");
        listens("/run/nscd/socket");
        let script = connects_to(&["../../nscd/socket"]);
        let run = |options: &[&str]| {
            let mut command = Command::new(FULMAR);
            command.arg("run").args(options).args(["--", "python3", "-c", &script]);
            text(&command.current_dir("/run/user/0").output().expect("it starts").stdout)
        };
        assert_eq!(run(&[]), "reached\n");
        assert_eq!(run(&["--deny", "192.0.2.1"]), "FileNotFoundError\n");
    });
}

#[test]
fn what_the_rules_do_not_cover_is_told_once_and_by_name() {
    in_sandbox(|| {
        let folder = Folder::new("told");
        let agent = folder.file("agent");
        listens(&agent);
        let run = |options: &[&str]| {
            let mut command = Command::new(FULMAR);
            command.arg("run").args(options).args(["--", "true"]);
            let output = command.env("SSH_AUTH_SOCK", &agent).output().expect("it starts");
            assert!(output.status.success(), "{}", text(&output.stderr));
            text(&output.stderr)
        };
        let said = run(&["--deny", "192.0.2.1"]);
        assert!(
            said.contains("the rules do not cover the Unix sockets of")
                && said.lines().count() == 1
        );
        assert!(said.contains("ssh-agent") && said.contains("root's capabilities"), "{said}");
        assert_eq!(run(&[]), "", "there are no rules");
        assert_eq!(run(&["--deny", "192.0.2.1", "--quiet"]), "");
        assert!(!run(&["--deny", "192.0.2.1", "--unix", &agent]).contains("ssh-agent"));
        assert!(!run(&["--deny", "192.0.2.1", "--strict"]).contains("ssh-agent"));
    });
}

/// Each way out of the network namespace, as a line of the expected word under `--strict` and without it.
const WAYS: [(&str, &str, &str); 12] = [
    ("socket.socket(socket.AF_UNIX).connect(PATH)", "EAFNOSUPPORT", "ok"),
    ("socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', DGRAM)", "EAFNOSUPPORT", "ok"),
    ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', DGRAM)", "EPERM", "ok"),
    ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect(DGRAM)", "EPERM", "ok"),
    ("socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0].sendto(b'x', DGRAM)", "EPERM", "ok"),
    (
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)[0].connect(PATH)",
        "EISCONN",
        "EISCONN",
    ),
    (
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[0].connect(PACKETS)",
        "EISCONN",
        "EISCONN",
    ),
    ("socket.socket(38, socket.SOCK_SEQPACKET)", "EAFNOSUPPORT", "any"),
    ("socket.socket(40, socket.SOCK_STREAM)", "EAFNOSUPPORT", "any"),
    ("os.write(INHERITED, b'x')", "EBADF", "ok"),
    ("os.kill(OTHER, 0)", "EPERM", "ok"),
    ("check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))", "EPERM", "any"),
];

#[test]
fn every_way_to_other_processes_is_closed_by_strict_alone() {
    in_sandbox(|| {
        let folder = Folder::new("strict");
        let (stream, datagrams) = (folder.file("stream"), folder.file("datagrams"));
        let packets = folder.file("packets");
        let mut server = listens_for_packets(&packets);
        listens(&stream);
        let _receiving = UnixDatagram::bind(&datagrams).unwrap();
        let inherited = fs::File::create(folder.file("inherited")).unwrap();
        fcntl(&inherited, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let mut script = format!(
            "import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
PATH, DGRAM, PACKETS = {stream:?}, {datagrams:?}, {packets:?}
INHERITED, OTHER = {}, {}
def check(result):
    if result < 0: raise OSError(ctypes.get_errno(), '')
def word(way):
    try: way()
    except OSError as e: return errno.errorcode[e.errno]
    return 'ok'
",
            inherited.as_raw_fd(),
            std::process::id(),
        );
        for (way, ..) in WAYS {
            script += &format!("print(word(lambda: {way}))\n");
        }
        script += "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1) == b'x')
socket.socket(socket.AF_INET); socket.socket(socket.AF_INET6); socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
print([line for line in open('/proc/self/status') if line.startswith('Cap') and int(line.split()[1], 16)])";
        let (strict, errors) = python(&["--strict", "--quiet"], &script);
        let (open, _) = python(&[], &script);
        server.kill().and_then(|()| server.wait()).unwrap();
        for (n, (way, closed, otherwise)) in WAYS.iter().enumerate() {
            assert_eq!(strict.lines().nth(n), Some(*closed), "{way}\n{strict}{errors}");
            let word = open.lines().nth(n).unwrap();
            assert!(*otherwise == "any" || word == *otherwise, "{way}: {word}");
        }
        assert_eq!(strict.lines().skip(WAYS.len()).collect::<Vec<_>>(), ["True", "[]"]);
    });
}

#[test]
fn strict_leaves_the_network_and_the_unix_sockets_that_are_named() {
    in_sandbox(|| {
        own_run("mkdir -p /run/user/0");
        let folder = Folder::new("unix");
        let (named, other) = (folder.file("named"), folder.file("agent"));
        let paths =
            [named.as_str(), "/run/named/socket", &other, "/run/other/socket", "/run/user/0/bus"];
        paths.into_iter().for_each(listens);
        let port = serves_tcp("127.0.0.1:0", "four");
        let script = connects_to(&paths) + "\n" + &asks("STREAM", &[("127.0.0.1", port)]);
        let port = port.to_string();
        let options =
            ["--strict", "--quiet", "--unix", &named, "--unix", "/run/named", "--host-port", &port];
        let mut command = Command::new(FULMAR);
        command.arg("run").args(options).args(["--", "python3", "-c", &script]);
        let output = command.env("SSH_AUTH_SOCK", &other).output().expect("it starts");
        let hidden = "ConnectionRefusedError\nFileNotFoundError\nFileNotFoundError\n";
        let said = text(&output.stdout);
        assert_eq!(said, format!("reached\nreached\n{hidden}four\n"), "{}", text(&output.stderr));
    });
}

#[test]
fn strict_refuses_standard_streams_that_lead_elsewhere() {
    in_sandbox(|| {
        let run = |stdin: Stdio| {
            let mut command = Command::new(FULMAR);
            let output =
                command.args(["run", "--strict", "--quiet", "--", "true"]).stdin(stdin).output();
            let output = output.expect("it starts");
            (output.status.code(), text(&output.stderr))
        };
        let folder = run(fs::File::open("/").unwrap().into());
        assert_eq!(folder.0, Some(2));
        assert!(folder.1.contains("standard input is a folder"), "{}", folder.1);
        let (own, _other) = UnixDatagram::pair().unwrap();
        let datagrams = run(OwnedFd::from(own).into());
        assert!(
            datagrams.1.contains("standard input is a Unix datagram socket"),
            "{}",
            datagrams.1
        );
        // Each would connect or send to others from the host's own network.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        for internet in [
            OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap()),
            accepted.into(),
            listener.into(),
        ] {
            let (code, said) = run(internet.into());
            assert_eq!(code, Some(2), "{said}");
            assert!(said.contains("standard input is an Internet socket"), "{said}");
            assert!(said.contains("StandardInput=null"), "{said}");
        }
        let unconnected = UnixListener::bind(Folder::new("stdin").file("socket")).unwrap();
        let said = run(OwnedFd::from(unconnected).into()).1;
        assert!(said.contains("standard input is a Unix socket without a peer"), "{said}");
        let mut command = Command::new(FULMAR);
        command.args(["run", "--deny", "192.0.2.1", "--", "true"]);
        command.stdin(OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap()));
        let said = text(&command.output().expect("it starts").stderr);
        assert!(said.contains("the inherited sockets 0;"), "{said}");
        let (own, _other) = UnixStream::pair().unwrap();
        assert_eq!(run(OwnedFd::from(own).into()), (Some(0), String::new()));
    });
}

#[test]
fn a_published_port_leads_to_the_address_that_it_names() {
    in_sandbox(|| {
        let guest = Guest::new();
        let targets = ["0.0.0.0/5000:198.51.100.77/6000", "::/5001:2001:db8:7::7/6000"];
        let options = ["--config-net", "-t", targets[0], "-t", targets[1], "-u", targets[0]];
        let none = ["-I", "ns0", "-T", "none", "-U", "none", "--no-ra"];
        let gateway = detached(&[&options[..], &none, &[&guest.pid()]].concat());
        guest.see(
            "ip addr add 198.51.100.77/32 dev lo; ip addr add 2001:db8:7::7/128 dev ns0 nodad",
        );
        // One server at each address of the guest: only the target's answers.
        let script = "import socket, threading
def serve(at, port, kind):
    s = socket.socket(socket.AF_INET6 if ':' in at else socket.AF_INET, kind)
    s.bind((at, port))
    if kind == socket.SOCK_DGRAM:
        while 1: s.sendto(at.encode(), s.recvfrom(9)[1])
    s.listen(9)
    while 1:
        c = s.accept()[0]
        c.recv(9); c.send(at.encode())
for at in ('198.51.100.77', '2001:db8:7::7', '127.0.0.1'):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        threading.Thread(target=serve, args=(at, 6000, kind)).start()";
        let mut server = Command::new("nsenter");
        server.args(["-t", &guest.pid(), "-n", "python3", "-c", script]);
        let mut server = server.spawn().unwrap();
        wait_until("the servers listen", || guest.see("ss -Hltun").lines().count() == 6);
        let servers = [("127.0.0.1", 5000), ("10.77.0.1", 5000), ("::1", 5001), ("fd77::1", 5001)];
        let client = |script: &str| {
            let output = Command::new("python3").args(["-c", script]).output().unwrap();
            text(&output.stdout)
        };
        let streams = client(&asks("STREAM", &servers).replace("recv(9)", "recv(99)"));
        let datagrams = client(&asks("DGRAM", &servers[..2]).replace("recv(9)", "recv(99)"));
        server.kill().and_then(|()| server.wait()).unwrap();
        let (v4, v6) = ("198.51.100.77\n".repeat(2), "2001:db8:7::7\n".repeat(2));
        assert_eq!((streams, datagrams), (v4.clone() + &v6, v4));
        drop(guest);
        wait_until("the gateway ends with its guest", || !is_running(gateway));
    });
}
