//! What the rules of `fulmar run` hold against the program itself.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use crate::FULMAR;
use crate::guest::Scratch;
use crate::support::{in_sandbox, text};
use fulmar_gateway::netns::Netns;

fn run_in_home(home: &Scratch, arguments: &[&str]) -> Output {
    Command::new(FULMAR)
        .arg("run")
        .args(arguments)
        .env("HOME", &home.0)
        .env_remove("XDG_CONFIG_HOME")
        .output()
        .expect("it starts")
}

#[test]
fn a_program_does_not_write_the_rules_of_the_next_run() {
    in_sandbox(|| {
        let home = Scratch::new("rules-home");
        let folder = home.0.join(".config/fulmar");
        let file = folder.join("run.rules");
        fs::create_dir_all(&home.0).unwrap();
        let write = "echo 'allow *' > ~/.config/fulmar/run.rules; echo 'allow *' > ~/.config/fulmar/x; \
                     mv ~/.config/fulmar ~/.config/other; rm -f ~/.config/fulmar/run.rules; \
                     mkdir -p ~/.config/fulmar; echo kept > ~/.config/else; echo done";
        for before in [None, Some("deny 192.0.2.0/24\n")] {
            before.iter().for_each(|text| fs::write(&file, text).unwrap());
            let output = run_in_home(&home, &["--", "sh", "-c", write]);
            assert_eq!(text(&output.stdout), "done\n", "{}", text(&output.stderr));
            assert_eq!(fs::read_to_string(&file).ok().as_deref(), before);
            assert_eq!(fs::read_dir(&folder).unwrap().count(), usize::from(before.is_some()));
            assert_eq!(fs::read_to_string(home.0.join(".config/else")).unwrap(), "kept\n");
        }
        // The file of an option, too.
        let other = Scratch::new("rules-option");
        fs::create_dir_all(&other.0).unwrap();
        let rules = other.0.join("rules");
        fs::write(&rules, "no-network\n").unwrap();
        let write = format!("echo 'allow *' > {0}; mv {0} {0}x; echo done", rules.display());
        let rules_option = rules.to_str().unwrap();
        let output = run_in_home(&home, &["--rules", rules_option, "--", "sh", "-c", &write]);
        assert_eq!(text(&output.stdout), "done\n");
        assert_eq!(fs::read_to_string(&rules).unwrap(), "no-network\n");
        [home, other].iter().for_each(|folder| fs::remove_dir_all(&folder.0).unwrap());
    });
}

#[test]
fn a_program_cannot_inject_terminal_input() {
    in_sandbox(|| {
        let script = "import fcntl, errno\n\
                      for request in (0x5412, 0x541c, 0x5401):\n\
                      \x20try: fcntl.ioctl(0, request, b'x' * 64)\n\
                      \x20except OSError as e: print(errno.errorcode[e.errno])";
        let run = |before: &[&str]| {
            let mut command = Command::new(FULMAR);
            command.args(before).args(["python3", "-c", script]).stdin(std::process::Stdio::null());
            text(&command.output().expect("it starts").stdout)
        };
        // TIOCSTI, TIOCLINUX, and what is asked of a terminal otherwise.
        assert_eq!(run(&["run", "--"]), "EPERM\nEPERM\nENOTTY\n");
        assert_eq!(run(&["sandbox", "--"]), "ENOTTY\nENOTTY\nENOTTY\n");
    });
}

/// The program reads a line from the host, then waits for another one, and then connects again.
#[test]
fn a_new_policy_resets_what_it_denies_and_one_with_an_error_changes_nothing() {
    in_sandbox(|| {
        let own = "10.77.0.78";
        Netns::current().unwrap().set_address("lo", own.parse().unwrap(), 32).unwrap();
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let home = Scratch::new("reload");
        fs::create_dir_all(&home.0).unwrap();
        let policy = home.0.join("agent.toml");
        let write = |text: &str| fs::write(&policy, text).unwrap();
        write(&format!("allow = [\"{own}\"]\n"));
        let connect = format!("exec 3<>/dev/tcp/{own}/{port}");
        let script = format!(
            "{connect} && read -u 3 line && echo $line; read -u 3 line || echo reset; ({connect}) || echo refused"
        );
        let mut program = Command::new(FULMAR)
            .args(["run", "--policy", policy.to_str().unwrap(), "--", "bash", "-c", &script])
            .env("HOME", &home.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut said = BufReader::new(program.stderr.take().unwrap()).lines();
        let (mut connection, _) = listener.accept().unwrap();
        let mut reload = |expected: &str| {
            let pid = program.id().to_string();
            let asked = Command::new(FULMAR).args(["policy", "reload", &pid]).output().unwrap();
            assert!(asked.status.success(), "{}", text(&asked.stderr));
            let line = said.find(|line| line.as_ref().is_ok_and(|l| l.contains("policy"))).unwrap();
            assert!(line.as_ref().unwrap().contains(expected), "{line:?}");
        };
        write("alow = []\n");
        reload("agent.toml:1:1: unknown key `alow`; did you mean `allow`?");
        // The program could do so, too.
        fs::rename(&policy, home.0.join("aside")).unwrap();
        write("allow = [\"192.0.2.1\"]\n");
        reload("is another file than at the start");
        fs::rename(home.0.join("aside"), &policy).unwrap();
        connection.write_all(b"still here\n").unwrap();
        write("allow = [\"192.0.2.1\"]\n");
        reload("the policy was read again");
        let output = program.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout), "still here\nreset\nrefused\n");
        fs::remove_dir_all(&home.0).unwrap();
    });
}

#[test]
fn refusals_are_told_at_the_first_and_at_the_end() {
    in_sandbox(|| {
        let script = "echo >/dev/tcp/192.0.2.1/80; echo >/dev/tcp/192.0.2.1/80; echo >/dev/tcp/192.0.2.2/90; kill -9 $$";
        let run = |options: &[&str]| {
            let mut command = Command::new(FULMAR);
            command.arg("run").args(options).args(["--no-network", "--", "bash", "-c", script]);
            let output = command.output().expect("it starts");
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(9));
            let said = text(&output.stderr);
            said.lines()
                .filter(|line| line.starts_with("fulmar run: ") && line.contains("refused"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            run(&[]),
            [
                "fulmar run: refused 192.0.2.1:80 (--no-network); to allow it: --allow 192.0.2.1:80",
                "fulmar run: 3 connections to 2 destinations were refused: 192.0.2.1:80 (2), 192.0.2.2:90; \
                 to allow: --allow 192.0.2.1:80 --allow 192.0.2.2:90",
            ]
        );
        assert_eq!(run(&["--quiet"]), [""; 0]);
        // Without rules a default is reported, too, and the command becomes the program.
        let script = "echo >/dev/tcp/169.254.169.254/80";
        let output = Command::new(FULMAR).args(["run", "bash", "-c", script]).output().unwrap();
        assert!(text(&output.stderr).contains("to allow it: --allow 169.254.169.254:80"));
    });
}

#[test]
fn a_program_may_listen_on_every_port_of_its_network() {
    in_sandbox(|| {
        let first = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
        let output = Command::new(FULMAR).args(["run", "--", "cat", first]).output().unwrap();
        assert_eq!(text(&output.stdout), "0\n", "{}", text(&output.stderr));
    });
}

#[test]
fn other_addresses_of_the_host_are_refused_unless_a_rule_allows_them() {
    in_sandbox(|| {
        let own = "10.77.0.77";
        Netns::current().unwrap().set_address("lo", own.parse().unwrap(), 32).unwrap();
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = format!("exec 3<>/dev/tcp/{own}/{port} && echo reached");
        let run = |options: &[&str]| {
            let mut command = Command::new(FULMAR);
            command.arg("run").args(options).args(["--", "bash", "-c", &script]);
            command.output().expect("it starts")
        };
        let refused = run(&["--summary"]);
        assert_eq!(text(&refused.stdout), "", "{}", text(&refused.stderr));
        let said = text(&refused.stderr);
        assert!(said.contains("1 by default: the host's own addresses"), "{said}");
        let plain = run(&[]);
        assert_eq!(text(&plain.stdout), "");
        assert!(text(&plain.stderr).contains("refused"), "{}", text(&plain.stderr));
        let allowed = run(&["--allow", own]);
        assert_eq!(text(&allowed.stdout), "reached\n", "{}", text(&allowed.stderr));
    });
}

#[test]
fn an_audit_has_the_flows_and_is_not_the_programs_to_write() {
    in_sandbox(|| {
        let scratch = Scratch::new("audit");
        fs::create_dir_all(&scratch.0).unwrap();
        let file = scratch.0.join("audit.jsonl");
        let own = "10.77.0.78";
        Netns::current().unwrap().set_address("lo", own.parse().unwrap(), 32).unwrap();
        let listener = TcpListener::bind((own, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = format!(
            "exec 3<>/dev/tcp/{own}/{port}; exec 3>&-; echo >/dev/tcp/192.0.2.1/80; echo forged >> {}",
            file.display()
        );
        let mut command = Command::new(FULMAR);
        command.args(["run", "-q", "--allow", own, "--audit"]).arg(&file);
        let output = command.args(["bash", "-c", &script]).output().expect("it starts");
        assert!(text(&output.stderr).contains("Read-only file system"), "{}", text(&output.stderr));
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        let lines = fs::read_to_string(&file).unwrap();
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let of =
            |event: &str| lines.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
        for event in ["begin", "end"] {
            let [flow] = of(event)[..] else { panic!("{event}: {lines:?}") };
            assert_eq!((&flow["address"], &flow["port"]), (&own.into(), &port.into()));
        }
        let [refused] = of("refuse")[..] else { panic!("{lines:?}") };
        assert_eq!(refused["address"], "192.0.2.1");
        assert!(refused["rule"].as_str().unwrap().contains(own), "{refused}");
        let cpu = |line: &serde_json::Value| line["cpu_us"].as_f64().unwrap();
        let [total] = of("total")[..] else { panic!("{lines:?}") };
        let receipts: f64 = of("receipt").into_iter().map(cpu).sum();
        assert!((receipts / cpu(total) - 1.0).abs() < 0.05, "{receipts}, {total}");
        fs::remove_dir_all(&scratch.0).unwrap();
    });
}
