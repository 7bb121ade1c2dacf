//! `fulmar run --ask`: questions on a terminal and over a socket, and what a program tries to do about them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::gateway_host::own_etc;
use crate::guest::Scratch;
use crate::support::{PATIENCE, in_sandbox, text, wait};
use fulmar_gateway::netns::{Netns, VethEnd};
use nix::pty::openpty;

/// The address outside to which every name leads.
const OUTSIDE: &str = "192.0.2.7";
/// Keys do not count before.
const UNSEEN: Duration = Duration::from_millis(800);
/// What comes last of a question.
const ASKED: &str = "no more questions] ";

/// A namespace behind a router, with a server that greets its clients. Returns its port.
fn outside() -> u16 {
    let (here, there) = (Netns::current().unwrap(), Netns::new().unwrap());
    let near = VethEnd { name: "out0", mac: [2, 0, 0, 0, 1, 1], mtu: 1500 };
    let far = VethEnd { name: "far0", mac: [2, 0, 0, 0, 1, 2], mtu: 1500 };
    here.add_veth(&near, &there, &far).unwrap();
    here.set_address("out0", "198.51.100.1".parse().unwrap(), 30).unwrap();
    there.set_address("far0", "198.51.100.2".parse().unwrap(), 30).unwrap();
    there.set_address("lo", OUTSIDE.parse().unwrap(), 32).unwrap();
    there.set_up("lo").unwrap();
    here.set_up("out0").unwrap();
    there.set_up("far0").unwrap();
    let route = Command::new("ip").args(["route", "add", OUTSIDE, "via", "198.51.100.2"]).status();
    assert!(route.unwrap().success());
    let listener = there.run(|| TcpListener::bind("0.0.0.0:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        // As long as the sandbox is there.
        let _there = there;
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(b"greetings\n");
        }
    });
    port
}

/// A DNS server by which every name leads to [`OUTSIDE`], for as long as the sandbox is there. Returns how often it was
/// asked.
fn serve_names() -> Arc<AtomicUsize> {
    let socket = UdpSocket::bind("127.0.0.2:53").unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    thread::spawn(move || {
        let mut buf = [0; 512];
        while let Ok((n, from)) = socket.recv_from(&mut buf) {
            count.fetch_add(1, Relaxed);
            let name = buf[12..n].iter().position(|byte| *byte == 0).unwrap_or(0);
            let question = &buf[12..12 + name + 5];
            let is_v4 = question[name + 2] == 1;
            let counts = [0, 1, 0, u8::from(is_v4), 0, 0, 0, 0];
            let record = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7];
            let record = if is_v4 { &record[..] } else { &[] };
            let answer = [&buf[..2], &[0x81, 0x80], &counts, question, record].concat();
            let _ = socket.send_to(&answer, from);
        }
    });
    asked
}

/// A shell's line that reads the greeting of a host.
fn greet(host: &str, port: u16) -> String {
    format!("(exec 3<>/dev/tcp/{host}/{port} && cat <&3) 2>/dev/null || echo refused; ")
}

/// A command at a terminal of its own.
struct AtTerminal {
    child: Child,
    terminal: File,
    seen: String,
}

impl AtTerminal {
    fn run(options: &[&str], script: &str) -> AtTerminal {
        let pty = openpty(None, None).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = Command::new("setsid");
        // The test may have been started with SIGINT ignored, as a job in the background is.
        command.args(["--ctty", "--wait", "env", "--default-signal=INT"]);
        command.args([FULMAR, "run", "--ask", "--quiet"]).args(options);
        command.args(["--", "bash", "-c", script]);
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("setsid(1)");
        AtTerminal { child, terminal: File::from(pty.master), seen: String::new() }
    }

    /// Waits until a text is on the terminal, and returns what came before it since the last one.
    fn until(&mut self, what: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some((before, after)) = self.seen.split_once(what) {
                let (before, after) = (before.to_owned(), after.to_owned());
                self.seen = after;
                if what == ASKED {
                    thread::sleep(UNSEEN);
                }
                return before;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}: {:?}", self.seen);
            let mut bytes = [0; 4096];
            let n = self.terminal.read(&mut bytes).unwrap_or(0);
            assert!(n > 0, "{what}: {:?}", self.seen);
            self.seen += &text(&bytes[..n]);
        }
    }

    fn types(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    /// What is seen to the end.
    fn ended(mut self) -> String {
        let mut rest = Vec::new();
        // EIO: nothing has the terminal any more.
        let _ = self.terminal.read_to_end(&mut rest);
        assert!(wait(self.child).status.success(), "{}{}", self.seen, text(&rest));
        self.seen + &text(&rest)
    }
}

#[test]
fn the_terminal_is_asked_once_for_a_name_that_is_then_looked_up() {
    in_sandbox(|| {
        let _etc = own_etc();
        let port = outside();
        std::fs::write("/etc/resolv.conf", "nameserver 127.0.0.2\nsearch b.example\n").unwrap();
        let asked = serve_names();
        let greets = greet("good.example", port);
        let mut run = AtTerminal::run(&[], &format!("{greets}{greets}{}", greet("x", port)));
        let before = run.until(ASKED);
        assert!(before.contains(&format!("fulmar run: reach good.example:{port}? [")), "{before}");
        run.types("y\r");
        run.until("type one of");
        assert_eq!(asked.load(Relaxed), 0, "the resolver does not know the name yet");
        run.types("alwayz\x7fs\r");
        run.until("greetings");
        run.until("greetings");
        let before = run.until(ASKED);
        assert!(before.contains(&format!("reach x:{port}?")), "no domain completes it: {before}");
        run.types("never\r");
        assert!(run.ended().contains("refused"));
        assert_eq!(asked.load(Relaxed), 2, "A and AAAA of one name");
    });
}

#[test]
fn a_program_neither_reads_an_answer_nor_draws_over_a_question() {
    in_sandbox(|| {
        let port = outside();
        let script = format!(
            "(while :; do echo FORGED; sleep 0.01; done) & \
             (read -t 60 word </dev/tty; echo \"read: $word\") & {}kill %1; wait; true",
            greet(OUTSIDE, port)
        );
        let mut run = AtTerminal::run(&[], &script);
        run.until(ASKED);
        thread::sleep(Duration::from_millis(200));
        run.types("once\r");
        assert_eq!(run.until("\n"), "once\r", "what the program wrote has waited");
        run.until("greetings");
        run.types("for the program\r");
        assert!(run.ended().contains("read: for the program"));
    });
}

#[test]
fn keys_that_were_typed_before_a_question_could_be_read_do_not_count() {
    in_sandbox(|| {
        let port = outside();
        let mut run = AtTerminal::run(&[], &greet(OUTSIDE, port));
        run.until("fulmar run: reach ");
        run.types("always\r");
        run.until(ASKED);
        run.types("no\r");
        let seen = run.ended();
        assert!(seen.contains("refused") && !seen.contains("greetings"), "{seen}");
    });
}

#[test]
fn the_users_terminal_is_out_of_the_programs_reach_and_ctrl_c_is_not() {
    in_sandbox(|| {
        let outer = "tty=$(ps -o tty= -p $PPID 2>/dev/null); \
                     test -c /dev/tty && tty && { test -r /dev/$tty && echo hijacked >/dev/$tty; }; \
                     echo \"ptys:\" $(ls /dev/pts); ";
        // Bash runs a trap of SIGINT at once only while it waits for a job.
        let greet = greet(OUTSIDE, 9);
        let script =
            format!("{outer}trap 'echo interrupted' INT; {{ {greet} }} & wait; wait; true");
        let mut run = AtTerminal::run(&[], &script);
        let before = run.until(ASKED);
        assert!(!before.contains("hijacked") && before.contains("ptys: ptmx\r\n"), "{before}");
        run.types("\x03");
        let seen = run.ended();
        assert!(seen.contains("refused") && seen.contains("interrupted"), "{seen}");
        // Without a terminal the command does not start.
        let mut command = Command::new("setsid");
        command.args(["--wait", FULMAR, "run", "--ask", "--", "true"]).stdin(Stdio::null());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("use --ask-socket PATH"), "{}", text(&output.stderr));
    });
}

/// A run whose questions this end of a socket gets, and what each is answered by.
fn answered(
    options: &[&str],
    script: &str,
    mut answer: impl FnMut(&serde_json::Value, &mut UnixStream),
) -> Output {
    let scratch = Scratch::new("ask");
    let listener = UnixListener::bind(&scratch.0).unwrap();
    let mut command = Command::new(FULMAR);
    command.args(["run", "--ask-socket"]).arg(&scratch.0).args(options);
    command.args(["--", "bash", "-c", script]).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let (mut stream, _) = listener.accept().unwrap();
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        // The end of a run may reset the socket.
        let Ok(line) = line else { break };
        answer(&serde_json::from_str(&line).unwrap(), &mut stream);
    }
    wait(child)
}

fn say(stream: &mut UnixStream, id: &serde_json::Value, answer: &str) {
    writeln!(stream, "{{\"id\": {id}, \"answer\": \"{answer}\"}}").unwrap();
}

#[test]
fn a_socket_is_asked_about_what_nothing_allows_or_refuses() {
    in_sandbox(|| {
        let port = outside();
        let denied = greet("192.0.2.8", port) + &greet("169.254.169.254", 80);
        let script = format!("{denied}{}{}", greet(OUTSIDE, port), greet("192.0.2.9", 80));
        let mut asked = Vec::new();
        let options = ["--deny", "192.0.2.8", "--summary"];
        let output = answered(&options, &script, |question, stream| {
            // Numbers that were not asked, and a second answer.
            say(stream, &99.into(), "always");
            let answer = if question["port"] == 80 { "no" } else { "once" };
            say(stream, &question["id"], answer);
            say(stream, &question["id"], "always");
            asked.push(question.clone());
        });
        assert_eq!(text(&output.stdout), "refused\nrefused\ngreetings\nrefused\n");
        let expected = [(OUTSIDE, port), ("192.0.2.9", 80)].map(|(address, port)| {
            serde_json::json!({
                "id": if port == 80 { 2 } else { 1 },
                "protocol": "tcp", "address": address, "port": port, "seconds": 60
            })
        });
        assert_eq!(asked, expected);
        let said = text(&output.stderr);
        assert!(said.contains("1 by --ask: refused by the user"), "{said}");
    });
}

#[test]
fn without_answers_all_is_refused_at_once() {
    in_sandbox(|| {
        let script = greet("192.0.2.1", 80) + &greet("192.0.2.2", 80);
        let mut asked = 0;
        let output = answered(&[], &script, |_, stream| {
            asked += 1;
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
        assert_eq!((asked, text(&output.stdout).as_str()), (1, "refused\nrefused\n"));
        let said = text(&output.stderr);
        assert!(said.contains("no further questions: what no rule allows is refused"), "{said}");
        let output = answered(&[], &script, |_, stream| {
            let _ = stream.write_all(b"{\"id\": 1, \"answer\": \"yes\x1b\"}\n");
        });
        assert_eq!(text(&output.stdout), "refused\nrefused\n");
        let said = text(&output.stderr);
        assert!(said.contains("invalid answer") && !said.contains('\x1b'), "{said}");
        let more = "for n in $(seq 1 17); do (echo >/dev/tcp/192.0.2.$n/80) 2>/dev/null & done; \
                    wait -n; kill $(jobs -p)";
        let mut asked = 0;
        let output = answered(&["--summary"], more, |_, _| asked += 1);
        let said = text(&output.stderr);
        assert_eq!(asked, 16, "{said}");
        assert!(said.contains("1 by --ask: too many questions are open"), "{said}");
    });
}
