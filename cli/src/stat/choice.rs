//! The stacks that a process id or a name on the command line selects.

use fulmar::stat::{Document, Guest};
use std::os::unix::fs::MetadataExt;

/// Where `ip netns add` keeps the names of namespaces.
const NAMED_NAMESPACES: &str = "/run/netns";

/// Whether a process id or a name selects a stack: those of the stack, or of a gateway's guest.
pub fn matches(document: &Document, wanted: &str) -> bool {
    let pid = wanted.parse().ok();
    document.name == wanted
        || Some(document.pid) == pid
        || document.gateway.as_ref().is_some_and(|g| is_guest(&g.guest, pid, wanted))
}

fn is_guest(guest: &Guest, pid: Option<u32>, wanted: &str) -> bool {
    let is_path = guest.path.as_ref().is_some_and(|path| {
        path == wanted || path.strip_prefix(NAMED_NAMESPACES) == Some(&format!("/{wanted}"))
    });
    is_path || pid.is_some() && guest.pid == pid || is_in_guest(guest, pid, wanted)
}

/// Whether a process or a file is of the network namespace of a guest.
fn is_in_guest(guest: &Guest, pid: Option<u32>, wanted: &str) -> bool {
    let path = match pid {
        Some(pid) => format!("/proc/{pid}/ns/net"),
        None if wanted.contains('/') => wanted.to_owned(),
        None => format!("{NAMED_NAMESPACES}/{wanted}"),
    };
    std::fs::metadata(path).is_ok_and(|found| Some(found.ino()) == guest.network_namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[test]
    fn stacks_are_chosen_by_process_or_name() {
        let document = from_value(json!({"pid": 42, "name": "nc"})).unwrap();
        for (wanted, is_it) in [("42", true), ("nc", true), ("4", false), ("n", false)] {
            assert_eq!(matches(&document, wanted), is_it, "{wanted}");
        }
    }

    #[test]
    fn a_gateway_is_chosen_by_its_guest() {
        // This process stands for one of the guest's that the gateway does not know.
        let own = std::process::id();
        let namespace = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        let guest = json!({"pid": 0, "path": "/run/netns/blue", "network_namespace": namespace});
        let document = json!({"pid": 0, "name": "web", "gateway": {"guest": guest}});
        let document: Document = from_value(document).unwrap();
        for wanted in ["web", "0", "/run/netns/blue", "blue", "/proc/self/ns/net", &own.to_string()]
        {
            assert!(matches(&document, wanted), "{wanted}");
        }
        let mut other = document.clone();
        other.gateway.as_mut().unwrap().guest.network_namespace = Some(namespace + 1);
        assert!(!matches(&other, &own.to_string()) && !matches(&other, "green"));
    }
}
