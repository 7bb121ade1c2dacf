//! What root does in the namespaces of another user: nothing by which that user gets at root. Runs as root alone.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::FULMAR;
use crate::guest::{detached, is_running, wait_until};
use crate::support::{skip, text};

/// A user who need not exist.
const OTHER: u32 = 12_345;

/// A process of another user in a user and a network namespace of its own.
struct Foreign(Child);

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Foreign {
    fn new(test: &str) -> Option<Foreign> {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap();
        if !nix::unistd::geteuid().is_root() || !map.contains("4294967295") {
            skip_unless_root(test);
            return None;
        }
        let mut unshare = Command::new("unshare");
        unshare.args(["-rn", "sleep", "120"]).uid(OTHER).gid(OTHER).stderr(Stdio::null());
        let child = unshare.spawn().expect("unshare(1) of util-linux");
        let mut foreign = Foreign(child);
        let mapped = format!("/proc/{}/uid_map", foreign.0.id());
        for _ in 0..1000 {
            // Its own id, alone.
            if fs::read_to_string(&mapped).is_ok_and(|m| m.split_whitespace().last() == Some("1")) {
                return Some(foreign);
            }
            if foreign.0.try_wait().unwrap().is_some() {
                skip(test, "user namespaces are for root alone here");
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no namespace within ten seconds");
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

/// Others than root have nothing to lose here.
fn skip_unless_root(test: &str) {
    eprintln!("SKIPPED {test}: it is about root");
}

#[test]
fn root_starts_no_program_in_the_sandbox_of_another_user() {
    let Some(foreign) = Foreign::new("root_starts_no_program") else { return };
    let mut join = Command::new(FULMAR);
    let output = join.args(["sandbox", "--join", &foreign.pid(), "--", "true"]).output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("belongs to user 12345"), "{said}");
    // The other user does.
    let copied = std::env::temp_dir().join(format!("fulmar-foreign-{}", std::process::id()));
    fs::copy(FULMAR, &copied).unwrap();
    let mut join = Command::new(&copied);
    join.args(["sandbox", "--join", &foreign.pid(), "--", "true"]).uid(OTHER).gid(OTHER);
    let output = join.output().unwrap();
    fs::remove_file(&copied).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_gateway_of_root_does_not_stay_root_in_the_namespace_of_another_user() {
    let Some(foreign) = Foreign::new("a_gateway_of_root_does_not_stay_root") else { return };
    let ports = ["-t", "none", "-u", "none", "-T", "none", "-U", "none"];
    let gateway = detached(&[&["--config-net"], &ports[..], &[&foreign.pid()]].concat());
    let status = fs::read_to_string(format!("/proc/{gateway}/status")).unwrap();
    drop(foreign);
    wait_until("the gateway ends with its guest", || !is_running(gateway));
    let groups = status.lines().find_map(|l| l.strip_prefix("Groups:")).unwrap();
    assert_eq!(groups.trim(), "");
    for name in ["Uid", "Gid"] {
        let ids = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        let ids: Vec<u32> = ids.split_whitespace().filter_map(|id| id.parse().ok()).collect();
        assert_eq!(ids, [OTHER; 4], "{name}");
    }
}
