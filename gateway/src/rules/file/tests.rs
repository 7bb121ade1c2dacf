use super::*;
use crate::rules::Destination;
use proptest::prelude::*;

fn parse(text: &str) -> Result<PolicyFile, String> {
    PolicyFile::parse(text, Path::new("agent.toml")).map_err(|e| e.to_string())
}

fn verdict(policy: &PolicyFile, protocol: Protocol, to: &str, name: &str) -> String {
    let names = [name.to_owned()];
    let names = if name.is_empty() { &[][..] } else { &names };
    let d = Destination { names, ..Destination::new(protocol, to.parse().unwrap()) };
    policy.rules.verdict(&d).to_string()
}

#[test]
fn rules_of_a_file_decide_by_name_prefix_port_and_protocol() {
    let policy = parse(
        "# an agent\n\
         names = \"real\"\n\
         allow = [\n  \"github.com:443\",\n  { to = [\"10.1.2.3:53\", \"example.org\"], protocol = \"udp\" },\n]\n\
         deny = [\"10.0.0.0/8\"]\n",
    )
    .unwrap();
    assert_eq!(policy.names, Some(Said { line: 2, value: NamesMode::Real }));
    let tcp = |to: &str, name: &str| verdict(&policy, Protocol::Tcp, to, name);
    assert_eq!(tcp("192.0.2.1:443", "github.com"), "agent.toml:4: allow github.com:443");
    assert_eq!(
        tcp("192.0.2.1:22", "github.com"),
        "default: closed by agent.toml:4: allow github.com:443"
    );
    assert_eq!(tcp("10.1.2.3:53", ""), "agent.toml:7: deny 10.0.0.0/8");
    let udp = |to: &str, name: &str| verdict(&policy, Protocol::Udp, to, name);
    assert_eq!(udp("10.1.2.3:53", ""), "agent.toml:5: allow 10.1.2.3:53");
    assert_eq!(udp("192.0.2.1:9", "example.org"), "agent.toml:5: allow example.org");
    assert!(tcp("192.0.2.1:9", "example.org").starts_with("default: closed by"));
}

#[test]
fn a_default_is_said_or_follows_from_the_rules() {
    let to = |text: &str| verdict(&parse(text).unwrap(), Protocol::Tcp, "192.0.2.1:80", "");
    assert_eq!(to("default = \"allow\""), "agent.toml:1: allow *");
    assert_eq!(to("\ndefault = \"deny\"\n"), "agent.toml:2: default = \"deny\"");
    assert_eq!(to("default = \"allow\"\nallow = [\"github.com\"]"), "agent.toml:1: allow *");
    assert_eq!(to("deny = [\"10.0.0.0/8\"]"), "default: open");
    let tables = "[[deny]]\nto = \"10.0.0.0/8\"\n[[allow]]\nto = \"10.1.2.3\"\n";
    assert_eq!(to(tables), "default: open", "an exception closes nothing");
}

#[test]
fn limits_are_shared_by_the_destinations_of_a_rule() {
    let policy = parse(
        "allow = [{ to = [\"a.example\", \"b.example\"], connections = 10, bytes = \"10 GB\", rate = \"5 MB/s\" },\n\
         { to = \"c.example\", bytes = 1_000 }, \"d.example\"]",
    )
    .unwrap();
    let of = |name: &str| {
        let names = [name.to_owned()];
        let to = "192.0.2.1:80".parse().unwrap();
        let d = Destination { names: &names, ..Destination::new(Protocol::Tcp, to) };
        policy.rules.verdict(&d).allowance().cloned()
    };
    let [a, b, c] = ["a.example", "b.example", "c.example"].map(|name| of(name).unwrap());
    assert!(Arc::ptr_eq(&a, &b) && !Arc::ptr_eq(&a, &c) && of("d.example").is_none());
    let all =
        Bounds { flows: Some(10), bytes: Some(10_000_000_000), bytes_per_second: Some(5_000_000) };
    let one = Bounds { bytes: Some(1000), ..Bounds::default() };
    assert_eq!((a.bounds(), c.bounds()), (all, one));
}

#[test]
fn settings_are_read() {
    let policy = parse(
        "default = \"deny\"\nproxy = \"socks5://me:pw@proxy.corp:1080\"\n\
         encrypted-client-hello = \"deny\"\naudit = \"audit.jsonl\"\n",
    )
    .unwrap();
    assert_eq!(policy.proxy.map(|p| (p.line, p.value.host)), Some((2, "proxy.corp".into())));
    assert_eq!(policy.allows_encrypted_hello, Some(Said { line: 3, value: false }));
    assert_eq!(policy.audit, Some(Said { line: 4, value: "audit.jsonl".into() }));
}

#[test]
fn an_error_names_line_and_column() {
    for (text, error) in [
        ("", "1:1: no rule and no default; add `default = \"deny\"` or `default = \"allow\"`"),
        ("# only this\n", "1:1: no rule and no default"),
        ("alow = []", "1:1: unknown key `alow`; did you mean `allow`?"),
        (
            "include = [\"agent.toml\"]",
            "1:1: unknown key `include`: expected one of default, allow",
        ),
        ("allow = [\"a.example\",\n  \"1.2.3\"]", "2:3: invalid rule `1.2.3`"),
        ("allow = [\"é\", 5]", "1:10: invalid rule `é`"),
        ("allow = [\"a.é\"]", "1:10: invalid rule"),
        ("allow = \"a.example\"", "1:9: expected a list of rules"),
        ("allow = [5]", "1:10: expected a string, not a value of type integer"),
        ("allow = [{ to = \"a\", port = 5 }]", "1:22: unknown key `port`"),
        (
            "allow = [{ to = \"a\", protocols = \"tcp\" }]",
            "1:22: unknown key `protocols`; did you mean `protocol`?",
        ),
        ("allow = [{ protocol = \"tcp\" }]", "1:10: the rule has no destination"),
        ("allow = [{ to = [] }]", "1:10: the rule has no destination"),
        ("allow = [{ to = \"a\", protocol = \"sctp\" }]", "1:33: unknown protocol `sctp`"),
        ("allow = [{ to = \"a\", connections = 0 }]", "1:36: expected a number from 1"),
        ("allow = [{ to = \"a\", connections = 5000000000 }]", "1:36: expected at most"),
        (
            "allow = [{ to = \"a\", rate = \"5 MB\" }]",
            "1:29: expected a number of bytes, such as 500000 or \"10 MB/s\"",
        ),
        ("deny = [{ to = \"a\", bytes = 5 }]", "1:21: `bytes` limits what is allowed"),
        ("names = \"fake\"", "1:9: unknown value \"fake\": expected \"given\" or \"real\""),
        ("default = \"deny\"\nproxy = \"http://me:secret@\"", "2:9: invalid proxy"),
        ("default = \"deny\"\ndefault = \"deny\"", "2:1: duplicate key"),
        ("allow = [\"github.com\",\n\"a.exa", "2:7: "),
        ("allow = [\"github.com\",", "1:23: unclosed array"),
    ] {
        let said = parse(text).unwrap_err();
        assert!(said.starts_with(&format!("agent.toml:{error}")), "{text}: {said}");
        assert!(!said.contains('\n') && !said.contains("secret"), "{said}");
    }
    let huge = format!("default = \"deny\"\n#{}", "x".repeat(MOST_BYTES));
    assert_eq!(parse(&huge).unwrap_err(), "agent.toml:1:1: the file has more than 4 MiB");
}

#[test]
fn settings_of_sandbox_runtime_are_read_as_they_are() {
    let text = r#"{
  "network": {
    "allowedDomains": ["github.com", "*.npmjs.org:443", "www.example.org"],
    "deniedDomains": ["*.example.org", "*:22"],
    "allowLocalBinding": true,
    "newKey": 1
  },
  "filesystem": { "denyRead": [] }
}"#;
    let policy = parse(text).unwrap();
    let to =
        |port: u16, name: &str| verdict(&policy, Protocol::Tcp, &format!("192.0.2.1:{port}"), name);
    assert_eq!(to(443, "github.com"), "agent.toml:3: allow github.com");
    assert_eq!(to(443, "registry.npmjs.org"), "agent.toml:3: allow *.npmjs.org:443");
    assert!(to(80, "registry.npmjs.org").starts_with("agent.toml:3: allowedDomains"));
    assert!(to(443, "npmjs.org").starts_with("agent.toml:3: allowedDomains"));
    // The more specific allowance does not count.
    assert_eq!(to(443, "www.example.org"), "agent.toml:4: deny *.example.org");
    assert_eq!(to(443, "WWW.Example.Org."), "agent.toml:4: deny *.example.org");
    assert_eq!(to(22, "github.com"), "agent.toml:4: deny *:22");
    assert!(policy.rules.name_denial("www.example.org", 1).is_some());
    let notes: Vec<_> = policy.notes.iter().map(|n| (n.line, n.value.as_str())).collect();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert!(notes[0].0 == 5 && notes[0].1.starts_with("`network.allowLocalBinding` has no effect"));
    assert!(notes[1].0 == 6 && notes[1].1.contains("`network.newKey`"));
    assert!(notes[2].0 == 8 && notes[2].1.contains("`filesystem` is not about the network"));
    let all = r#"{"network": {"allowedDomains": ["a.example"], "deniedDomains": ["*"]}}"#;
    let all = parse(all).unwrap();
    assert_eq!(verdict(&all, Protocol::Tcp, "192.0.2.1:80", "a.example"), "agent.toml:1: deny *");
    let proxy =
        r#"{"network": {"allowedDomains": [], "parentProxy": {"http": "http://proxy:3128"}}}"#;
    assert_eq!(parse(proxy).unwrap().proxy.unwrap().value.port, 3128);
}

#[test]
fn an_error_of_settings_names_line_and_column() {
    for (text, error) in [
        ("{", "1:1: EOF while parsing an object"),
        ("{\"a\": 1}", "1:1: `network` is missing"),
        ("{\"network\": {}}", "1:13: `network.allowedDomains` is missing"),
        (
            "{\"network\": {\n\"allowedDomains\": [\"a.example\", \"x y\"]}}",
            "2:33: invalid rule `x y`",
        ),
        (
            "{\"network\": {\n\"allowedDomains\": [\"a.example\", 5]}}",
            "2:33: invalid type: integer `5`, expected a string",
        ),
        (
            "{\"network\": {\n\"allowedDomains\": {}}}",
            "2:19: invalid type: map, expected a sequence",
        ),
        ("{\"network\": {\"allowedDomains\": [\"a.exa", "1:"),
    ] {
        let said = parse(text).unwrap_err();
        assert!(said.starts_with(&format!("agent.toml:{error}")), "{text}: {said}");
    }
}

/// A file that ends too early may lack a denial: an allow list alone stays closed.
#[test]
fn a_file_cut_short_opens_nothing() {
    let text = "default = \"deny\"\nallow = [\n  \"github.com:443\",\n  \"pypi.org\",\n]\n";
    let whole = parse(text).unwrap();
    for end in 0..text.len() {
        let Ok(cut) = parse(&text[..end]) else { continue };
        for name in ["github.com", "pypi.org", "other.example"] {
            let is_allowed = |policy: &PolicyFile| policy.rules.name_denial(name, 1).is_none();
            assert!(is_allowed(&whole) || !is_allowed(&cut), "{end}: {name}");
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(
        text in "[ {}\\[\\]\",:=\n#.*/0-9a-c]{0,60}|(default|allow|deny|names|proxy) = \\PC{0,40}",
    ) {
        for text in [text.clone(), format!("{{\"network\": {text}"), format!("allow = [{text}]")] {
            if let Ok(policy) = parse(&text) {
                let _ = verdict(&policy, Protocol::Tcp, "192.0.2.1:80", "a.b");
            }
        }
    }
}
