//! The reader of policy files: nothing panics, an error is within the text and on one line, and what the rules decide
//! about a name they decide about it in every notation.

use std::net::SocketAddr;
use std::path::Path;

use fulmar_gateway::policy::Protocol;
use fulmar_gateway::rules::Destination;
use fulmar_gateway::rules::file::PolicyFile;

const TO: [&str; 4] = ["192.0.2.1:443", "10.1.2.3:80", "169.254.169.254:80", "[2001:db8::1]:53"];
const NAMES: [&str; 3] = ["github.com", "www.example.org", "a"];

/// The text of a file.
pub fn policy_file(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let policy = match PolicyFile::parse(text, Path::new("p")) {
        Ok(policy) => policy,
        Err(error) => {
            let lines = 1 + text.matches('\n').count();
            assert!((1..=lines).contains(&error.line), "{error}");
            assert!((1..=text.chars().count() + 1).contains(&error.column), "{error}");
            return;
        }
    };
    for to in TO {
        let to: SocketAddr = to.parse().expect("an address");
        let plain = Destination::new(Protocol::Tcp, to);
        let _ = policy.rules.verdict(&plain).to_string();
        let _ = policy.rules.client_denial(Protocol::Udp, to);
        for name in NAMES {
            let decided =
                [name.to_owned(), format!("{}.", name.to_ascii_uppercase())].map(|name| {
                    let names = [name];
                    let verdict = policy.rules.verdict(&Destination { names: &names, ..plain });
                    assert!(verdict.denial.is_none() || verdict.allowance().is_none());
                    verdict.to_string()
                });
            assert_eq!(decided[0], decided[1]);
        }
    }
}
