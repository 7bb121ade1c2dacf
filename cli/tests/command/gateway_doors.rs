//! The ways of a program of `fulmar run` to the host beside its network: ports of the host's loopback that are given.

use std::net::{TcpListener, UdpSocket};
use std::process::Command;
use std::thread;

use crate::FULMAR;
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
