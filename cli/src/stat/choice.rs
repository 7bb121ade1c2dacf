//! The stacks that a process id or a name on the command line selects.

use serde_json::Value;
use std::os::unix::fs::MetadataExt;

/// Where `ip netns add` keeps the names of namespaces.
const NAMED_NAMESPACES: &str = "/run/netns";

/// Whether a process id or a name selects a stack: the stack's own, or a gateway's guest's.
pub fn matches(document: &Value, wanted: &str) -> bool {
    let guest = &document["gateway"]["guest"];
    let is_process = wanted.parse().is_ok_and(|pid: u64| {
        document["pid"].as_u64() == Some(pid) || guest["pid"].as_u64() == Some(pid)
    });
    let is_name = document["name"].as_str() == Some(wanted);
    let is_path = guest["path"].as_str().is_some_and(|path| {
        path == wanted || path.strip_prefix(NAMED_NAMESPACES) == Some(&format!("/{wanted}"))
    });
    is_process || is_name || is_path || is_in_guest(guest, wanted)
}

/// Whether a process or a file is of the network namespace of a guest.
fn is_in_guest(guest: &Value, wanted: &str) -> bool {
    let Some(namespace) = guest["network_namespace"].as_u64() else { return false };
    let path = match wanted.parse::<u32>() {
        Ok(pid) => format!("/proc/{pid}/ns/net"),
        Err(_) if wanted.contains('/') => wanted.to_owned(),
        Err(_) => format!("{NAMED_NAMESPACES}/{wanted}"),
    };
    std::fs::metadata(path).is_ok_and(|found| found.ino() == namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stacks_are_chosen_by_process_or_name() {
        let document = json!({"pid": 42, "name": "nc"});
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
        for wanted in ["web", "0", "/run/netns/blue", "blue", "/proc/self/ns/net", &own.to_string()]
        {
            assert!(matches(&document, wanted), "{wanted}");
        }
        let mut other = document.clone();
        other["gateway"]["guest"]["network_namespace"] = json!(namespace + 1);
        assert!(!matches(&other, &own.to_string()) && !matches(&other, "green"));
    }
}
