//! What a gateway tells its user: published ports in `fulmar stat`, rules in the summary, options that collide.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::support::{PATIENCE, in_sandbox, text};
use fulmar_gateway::netns::{Netns, Route};

/// A program under `fulmar run` that waits, gone with the value.
struct Running(Child);

impl Running {
    fn new(arguments: &[&str]) -> Running {
        let mut command = Command::new(FULMAR);
        command.arg("run").args(arguments).args(["--", "sleep", "1000"]).stdin(Stdio::null());
        Running(command.spawn().expect("it starts"))
    }

    /// The document of its gateway, once it answers and this is so.
    fn stat_when(&self, is_so: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let started = Instant::now();
        loop {
            let pid = self.0.id().to_string();
            let output = Command::new(FULMAR).args(["stat", "--json", &pid]).output().unwrap();
            let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if all[0].is_object() && is_so(&all[0]) {
                return all[0].clone();
            }
            assert!(started.elapsed() < PATIENCE, "{all:#} {}", text(&output.stderr));
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run_program(arguments: &[&str]) -> Output {
    Command::new(FULMAR).arg("run").args(arguments).output().expect("it starts")
}

#[test]
fn a_published_port_is_shown_with_the_clients_that_came_and_were_refused() {
    in_sandbox(|| {
        let ports =
            ["-p", "127.0.0.1/18080:80", "-p", "18090-18099:90", "--publish-udp", "18053:53"];
        let running = Running::new(&ports);
        let is_up = |d: &serde_json::Value| d["gateway"]["published"][0].is_object();
        let published = &running.stat_when(is_up)["gateway"]["published"];
        let line = |n: usize| {
            let p = &published[n];
            ["protocol", "address", "port", "last_port", "guest_port", "last_guest_port"]
                .map(|field| p[field].to_string())
                .join(" ")
        };
        let all: Vec<String> = (0..published.as_array().unwrap().len()).map(line).collect();
        assert_eq!(
            all,
            [
                "\"tcp\" null 18090 18099 90 99",
                "\"tcp\" \"127.0.0.1\" 18080 18080 80 80",
                "\"udp\" null 18053 18053 53 53"
            ]
        );
        // Nothing listens in the namespace: the splicer, which carries what comes from loopback, is refused.
        let mut client = TcpStream::connect("127.0.0.1:18080").unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let error = client.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let is_counted = |d: &serde_json::Value| d["gateway"]["published"][1]["refused"] == 1;
        assert_eq!(running.stat_when(is_counted)["gateway"]["published"][1]["connections"], 1);
        let pid = running.0.id().to_string();
        let shown = Command::new(FULMAR).args(["stat", &pid]).output().unwrap();
        let shown = text(&shown.stdout);
        let line = shown.lines().find(|line| line.contains("127.0.0.1:18080")).unwrap_or(&shown);
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words, ["tcp", "127.0.0.1:18080", "80", "1", "1"]);
        assert!(shown.contains("*:18090-18099"), "{shown}");
    });
}

#[test]
fn the_summary_names_the_rule_that_refused() {
    in_sandbox(|| {
        let host = Netns::current().unwrap();
        let index = host.if_index("kernel0").unwrap();
        let router = Route::default_through(index, "10.77.0.2".parse().unwrap());
        host.netlink().unwrap().add_route(&router).unwrap();
        let rules = std::env::temp_dir().join(format!("fulmar-named-rules-{}", std::process::id()));
        fs::write(&rules, "# local\ndeny 10.0.0.0/8\nallow 10.1.1.1\n").unwrap();
        let connect =
            "for to in 10.1.2.3 10.1.2.4 192.0.2.1; do (exec 3<>/dev/tcp/$to/80) 2>&1; done; true";
        let file = rules.display().to_string();
        let options = ["--summary", "--rules", &file, "--deny", "192.0.2.0/24:80"];
        let output = run_program(&[&options, ["--", "bash", "-c", connect].as_slice()].concat());
        fs::remove_file(&rules).unwrap();
        let said = text(&output.stderr);
        let expected = format!(
            "  3 not carried: The policy denies the flow.\n    2 by {file}:2: deny 10.0.0.0/8\n    \
             1 by --deny 192.0.2.0/24:80\n"
        );
        assert!(said.contains(&expected), "{said}{}", text(&output.stdout));
    });
}

#[test]
fn a_port_that_is_published_twice_is_refused_before_anything_starts() {
    let both = "port 18080 is also in `18080:80`; omit one of them";
    let refused = run_program(&["-p", "18080:80", "-p", "18000-18090", "--", "true"]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("`18000-18090`") && said.contains(both), "{said}");
    for option in ["-t", "-u", "-T", "-U"] {
        let mut command = Command::new(FULMAR);
        command.args(["--pasta", option, "18080:80", option, "18080:81", "--", "true"]);
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{option} {said}");
        assert!(said.starts_with("pasta: ") && said.contains(both), "{option} {said}");
    }
}
