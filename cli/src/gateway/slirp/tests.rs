//! The command line of slirp4netns, its requests and its answers.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use clap::error::ErrorKind;
use fulmar_gateway::attach::Target;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::forwards::{Forwards, Guest as Addresses, Publisher};
use super::*;
use crate::gateway::slirp::api::{MOST_BYTES, serve as serve_client};

fn parse(line: &str) -> Result<Options, clap::Error> {
    Options::try_parse_from([NAME].into_iter().chain(line.split_whitespace()))
}

fn plan(line: &str) -> Plan {
    parse(line).unwrap_or_else(|e| panic!("{line}: {e}")).plan().unwrap()
}

fn refusal(line: &str) -> String {
    match parse(line) {
        Ok(options) => options.plan().expect_err(line).to_string(),
        Err(e) => e.to_string(),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn the_defaults_are_those_of_slirp4netns() {
    let plan = plan("-c 4242 tap0");
    assert_eq!(plan.guest, Guest::Existing(Target::Process { pid: 4242, userns: None }));
    assert_eq!(plan.options.addresses, [(ip("10.0.2.100"), Some(24))]);
    assert_eq!(plan.options.gateways, [ip("10.0.2.2")]);
    assert_eq!((plan.options.mtu, plan.options.name.as_deref()), (Some(1500), Some("tap0")));
    assert!(plan.configures && plan.options.without_v6 && plan.process.foreground);
    assert_eq!(plan.map.dns_forward, [ip("10.0.2.3")]);
    assert_eq!(plan.map.map_host_loopback, [OrNone::Is(ip("10.0.2.2"))]);
    assert_eq!(plan.link, [(ip("10.0.2.0"), 24)]);
    assert!(!plan.outlives_file);
    let ports = [&plan.ports.tcp, &plan.ports.udp, &plan.ports.tcp_ns, &plan.ports.udp_ns];
    assert!(ports.into_iter().all(|spec| *spec == PortSpec::None));
}

#[test]
fn podmans_line_is_understood() {
    let line = "--disable-host-loopback --mtu=65520 --enable-sandbox --enable-seccomp --cidr=10.9.0.0/16 \
                --enable-ipv6 -c -r 3 -e 4 --api-socket /run/x.net --netns-type=path /run/user/1/netns/n tap0";
    let options = parse(line).unwrap();
    assert_eq!(options.descriptors(), [3, 4]);
    let plan = options.plan().unwrap();
    let netns = PathBuf::from("/run/user/1/netns/n");
    assert_eq!(plan.guest, Guest::Existing(Target::Path { netns, userns: None }));
    let own = [(ip("10.9.0.100"), Some(16)), (ip("fd00::64"), Some(64))];
    assert_eq!(plan.options.addresses, own);
    assert_eq!(plan.options.gateways, [ip("10.9.0.2"), ip("fe80::2")]);
    assert_eq!(plan.map.dns_forward, [ip("10.9.0.3"), ip("fd00::3")]);
    assert_eq!(plan.map.map_host_loopback, [OrNone::None]);
    assert_eq!(plan.link, [(ip("10.9.0.0"), 16), (ip("fd00::"), 64)]);
    assert!(plan.outlives_file, "its caller says when the end is");
}

#[test]
fn rootlesskits_lines_are_understood() {
    let common = "--mtu 65520 -r 3 --disable-host-loopback --cidr 10.0.3.0/24 --api-socket /x/s --enable-sandbox";
    let by_process = plan(&format!("{common} 4242 tap0"));
    assert!(!by_process.configures, "its child sets up the interface");
    let line = format!("{common} --userns-path=/proc/7/ns/user --netns-type=path /x/netns tap0");
    let userns = Some(PathBuf::from("/proc/7/ns/user"));
    let by_path = Guest::Existing(Target::Path { netns: "/x/netns".into(), userns });
    assert_eq!(plan(&line).guest, by_path);
}

/// By containerd-rootless.sh of nerdctl 2.3.5, with RootlessKit 3.3.0.
#[test]
fn nerdctls_line_is_understood() {
    let line = "--mtu 65520 -r 3 --disable-host-loopback --enable-seccomp --userns-path=/proc/57/ns/user \
                --netns-type=path /proc/57/root/run/user/1/containerd-rootless/netns tap0";
    let plan = plan(line);
    assert!(!plan.configures && plan.options.mtu == Some(65_520));
    assert_eq!(plan.map.map_host_loopback, [OrNone::None]);
}

/// By the supervisor of a private network of MXC 0.8.0 (@microsoft/mxc-sdk).
#[test]
fn mxcs_line_is_understood() {
    let options = parse("--configure --mtu=65520 --ready-fd 9 --exit-fd 4 4242 tap0").unwrap();
    assert_eq!(options.descriptors(), [9, 4]);
    let plan = options.plan().unwrap();
    assert!(plan.configures && plan.options.without_v6);
    assert_eq!(plan.map.map_host_loopback, [OrNone::Is(ip("10.0.2.2"))]);
    assert_eq!(parse("--version").unwrap_err().exit_code(), 0, "by which it is looked for");
}

#[test]
fn options_may_be_abbreviated_repeated_and_follow_the_target() {
    let options =
        parse("4242 -6cm9000 tap0 --mt=1400 --api-s /a -a/b --outbound-addr6=::1 more").unwrap();
    assert!(options.configure && options.enable_ipv6);
    assert_eq!((options.mtu, options.api_socket), (1400, Some("/b".into())));
    assert_eq!((options.outbound_addr, options.rest.len()), (None, 1));
    assert_eq!(plan("--netns-type=path x tap0").guest, {
        Guest::Existing(Target::Path { netns: "./x".into(), userns: None })
    });
}

#[test]
fn resolver_and_loopback_can_be_left_out() {
    let plan = plan("--disable-dns --disable-host-loopback -c 1 tap0");
    assert!(plan.map.dns_forward.is_empty() && !plan.addresses.dhcp_dns);
    assert_eq!(plan.map.map_host_loopback, [OrNone::None]);
}

#[test]
fn an_outbound_address_is_given_or_that_of_an_interface() {
    let plan = plan("--outbound-addr 192.0.2.1 --outbound-addr6 2001:db8::1 1 tap0");
    assert_eq!(plan.outbound.v4.map(IpAddr::from), Some(ip("192.0.2.1")));
    assert_eq!(plan.outbound.v6.map(IpAddr::from), Some(ip("2001:db8::1")));
    assert!(refusal("--outbound-addr ::1 1 tap0").contains("expected an IPv4 address"));
    assert!(refusal("--outbound-addr6 no-such0 1 tap0").contains("nor an interface"));
}

#[test]
fn what_callers_look_for_is_in_the_help_and_the_version() {
    let help = parse("--help").unwrap_err();
    assert_eq!((help.kind(), help.use_stderr()), (ErrorKind::DisplayHelp, false));
    let help = help.to_string();
    let words: BTreeSet<&str> = help.split([' ', '\n', ',', '<']).collect();
    for option in [
        "--configure",
        "--exit-fd",
        "--ready-fd",
        "--mtu",
        "--enable-ipv6",
        "--api-socket",
        "--cidr",
        "--disable-host-loopback",
        "--netns-type",
        "--userns-path",
        "--enable-sandbox",
        "--enable-seccomp",
        "--outbound-addr",
        "--outbound-addr6",
        "--disable-dns",
        "--macaddress",
        "--target-type",
    ] {
        assert!(words.contains(option), "{option}\n{help}");
    }
    for line in ["-v", "--version"] {
        let version = parse(line).unwrap_err();
        assert_eq!(version.kind(), ErrorKind::DisplayVersion);
        assert!(version.to_string().starts_with("slirp4netns version 1.3"), "{version}");
    }
}

#[test]
fn what_is_not_supported_or_wrong_is_refused_with_a_sentence() {
    for (line, why) in [
        ("--target-type=bess /x", "not supported: fulmar does not serve User Mode Linux"),
        ("--netns-type=tapfd 3 tap0", "give the namespace by `pid` or `path`"),
        ("--macaddress 02:00:00:00:00:01 1 tap0", "--configure"),
        ("1", "<TAPNAME>"),
        ("", "<PID|PATH>"),
        ("x tap0", "invalid process id `x`"),
        ("0 tap0", "invalid process id `0`"),
        ("--mtu 65522 1 tap0", "expected a number from 68 to 65521"),
        ("--mtu 1000 -6 1 tap0", "IPv6 requires an MTU of at least 1280"),
        ("--cidr 10.0.2.100/24 1 tap0", "the address of the network, 10.0.2.0/24"),
        ("--cidr 10.0.2.0/26 1 tap0", "from 1 to 25"),
        ("--cidr 10.0.2.0 1 tap0", "such as 10.0.2.0/24"),
        ("--cidr 127.0.0.0/8 1 tap0", "cannot be assigned"),
        ("--ready-fd -1 1 tap0", "-1"),
        ("--ready-fd x 1 tap0", "expected a number from 0"),
        ("1 a/b", "interface name"),
        ("--no-such 1 tap0", "--no-such"),
    ] {
        let said = refusal(line);
        assert!(said.contains(why), "{line}: {said}");
    }
}

#[test]
fn the_command_is_known_by_its_name_and_by_its_option() {
    let words = |text: &str| {
        let words = text.split(' ').map(OsString::from);
        line(words).map(|line| line.join(OsStr::new(" ")))
    };
    for (text, rest) in [
        ("/x/slirp4netns -c 1 tap0", "/x/slirp4netns -c 1 tap0"),
        ("fulmar --slirp4netns -c 1 tap0", "slirp4netns -c 1 tap0"),
        ("fulmar gateway --slirp4netns -c 1 tap0", "slirp4netns -c 1 tap0"),
    ] {
        assert_eq!(words(text), Some(rest.into()), "{text}");
    }
    for other in ["fulmar", "fulmar gateway", "fulmar gateway -f --slirp4netns", "pasta"] {
        assert_eq!(words(other), None, "{other}");
    }
}

/// The published ports, as a model. Port 1 is privileged.
#[derive(Default)]
struct Published(BTreeSet<(&'static str, IpAddr, u16, u16)>);

fn key(protocol: Protocol, forward: &Forward) -> (&'static str, IpAddr, u16, u16) {
    (protocol.name(), forward.bind.address.unwrap(), forward.from, forward.to)
}

impl Publisher for Published {
    fn publish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        let key = key(protocol, forward);
        let is_taken = self.0.iter().any(|has| (has.0, has.1, has.2) == (key.0, key.1, key.2));
        match (forward.from, is_taken) {
            (1, _) => Err(io::ErrorKind::PermissionDenied.into()),
            (_, true) => Err(io::ErrorKind::AddrInUse.into()),
            _ => {
                self.0.insert(key);
                Ok(())
            }
        }
    }

    fn unpublish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        assert!(self.0.remove(&key(protocol, forward)));
        Ok(())
    }
}

fn forwards() -> Forwards {
    Forwards::new(Addresses { v4: ip("10.0.2.100"), v6: Some(ip("fd00::64")) })
}

fn add(proto: &str, host: &str, guest: &str, ports: [u32; 2]) -> Value {
    json!({ "execute": "add_hostfwd", "arguments": {
        "proto": proto, "host_addr": host, "host_port": ports[0], "guest_addr": guest, "guest_port": ports[1],
    }})
}

#[test]
fn ports_are_added_listed_and_removed_by_their_ids() {
    let (mut forwards, mut published) = (forwards(), Published::default());
    let mut ask = |request: &Value| forwards.answer(request, &mut published);
    assert_eq!(ask(&add("tcp", "", "", [8080, 80])), json!({"return": {"id": 1}}));
    assert_eq!(
        ask(&add("udp4", "127.0.0.1", "10.0.2.100", [8080, 81])),
        json!({"return": {"id": 2}})
    );
    assert_eq!(ask(&add("tcp6", "", "", [8080, 82])), json!({"return": {"id": 3}}));
    let short = json!({"execute": "add_hostfwd", "arguments": {"proto": "tcp", "host_port": 9.0, "guest_port": 9}});
    assert_eq!(ask(&short), json!({"return": {"id": 4}}));
    let listed = ask(&json!({"execute": "list_hostfwd"}));
    assert_eq!(listed["entries"], listed["return"]["entries"]);
    let second = json!({"id": 2, "proto": "udp4", "host_addr": "127.0.0.1", "host_port": 8080,
        "guest_addr": "10.0.2.100", "guest_port": 81});
    assert_eq!(listed["entries"][1], second);
    assert_eq!(listed["entries"][2]["host_addr"], "::");
    assert_eq!(listed["entries"][2]["guest_addr"], "fd00::64");
    let remove = json!({"execute": "remove_hostfwd", "arguments": {"id": 1}});
    assert_eq!(ask(&remove), json!({"return": {}}));
    assert!(ask(&remove)["error"]["desc"].as_str().unwrap().contains("bad arguments.id"));
    assert_eq!(ask(&add("tcp", "0.0.0.0", "", [8080, 80])), json!({"return": {"id": 5}}));
    assert_eq!(published.0.len(), 4);
}

#[test]
fn a_port_may_lead_to_another_address_than_the_guests_own() {
    let (mut forwards, mut published) = (forwards(), Published::default());
    forwards.answer(&add("tcp", "", "10.0.2.99", [8080, 80]), &mut published);
    let listed = forwards.answer(&json!({"execute": "list_hostfwd"}), &mut published);
    assert_eq!(listed["entries"][0]["guest_addr"], "10.0.2.99");
}

#[test]
fn a_refusal_begins_with_the_words_of_slirp4netns() {
    let (mut forwards, mut published) = (forwards(), Published::default());
    let _ = forwards.answer(&add("tcp", "", "", [80, 80]), &mut published);
    let v4_only = Addresses { v4: ip("10.0.2.100"), v6: None };
    for (request, why) in [
        (json!([1]), "json_object() failed"),
        (json!({"a": 1}), "no execute found"),
        (json!({"execute": 1}), "no execute found"),
        (json!({"execute": "x"}), "unknown execute"),
        (json!({"execute": "add_hostfwd"}), "add_hostfwd: bad arguments.proto"),
        (add("sctp", "", "", [1, 1]), "add_hostfwd: bad arguments.proto"),
        (add("6", "", "", [1, 1]), "add_hostfwd: bad arguments.proto"),
        (add("tcp", "x", "", [2, 2]), "add_hostfwd: bad arguments.host_addr"),
        (add("tcp4", "::1", "", [2, 2]), "add_hostfwd: bad arguments.host_addr"),
        (add("tcp", "", "", [0, 2]), "add_hostfwd: bad arguments.host_port"),
        (add("tcp", "", "", [65_536, 2]), "add_hostfwd: bad arguments.host_port"),
        (add("tcp", "", "10.0.2", [2, 2]), "add_hostfwd: bad arguments.guest_addr"),
        (add("tcp", "", "fd00::64", [2, 2]), "add_hostfwd: bad arguments.guest_addr"),
        (add("tcp", "", "", [2, 0]), "add_hostfwd: bad arguments.guest_port"),
        (add("tcp", "", "", [80, 81]), "add_hostfwd: slirp_add_hostfwd failed"),
        (add("tcp", "", "", [1, 1]), "add_hostfwd: slirp_add_hostfwd failed: port 1 is privileged"),
        (json!({"execute": "remove_hostfwd"}), "remove_hostfwd: bad arguments.id"),
    ] {
        let answer = forwards.answer(&request, &mut published);
        let said = answer["error"]["desc"].as_str().unwrap_or_default();
        assert!(said.starts_with(&format!("bad request: {why}")), "{request}: {answer}");
    }
    let answer = Forwards::new(v4_only).answer(&add("tcp6", "", "", [2, 2]), &mut published);
    assert!(answer.to_string().contains("requires --enable-ipv6"), "{answer}");
    assert_eq!(published.0.len(), 1, "nothing else was published");
}

#[test]
fn the_ports_of_a_guest_are_bounded() {
    let (mut forwards, mut published) = (forwards(), Published::default());
    let mut refused = 0;
    for port in 1024..=6000 {
        let answer = forwards.answer(&add("tcp", "", "", [port, port]), &mut published);
        refused += usize::from(answer.get("error").is_some());
    }
    assert_eq!((published.0.len(), refused), (4096, 4977 - 4096));
}

/// The answer to a client that writes these parts, and closes its end or not.
fn answer_to(parts: &[&[u8]], closes: bool) -> String {
    let (mut client, server) = UnixStream::pair().unwrap();
    // Only a client that neither ends its request nor its stream is waited for.
    let patience = Duration::from_millis(if closes { 60_000 } else { 200 });
    let serving = thread::spawn(move || {
        serve_client(server, patience, &mut forwards(), &mut Published::default())
    });
    for part in parts {
        // The server does not read on once it has refused.
        let _ = client.write_all(part);
    }
    if closes {
        let _ = client.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    // The rest of a long request is not read: after the answer the stream may be reset.
    let _ = client.read_to_end(&mut answer);
    let _ = serving.join().unwrap();
    String::from_utf8(answer).unwrap()
}

#[test]
fn a_request_is_answered_when_it_is_whole_in_whatever_pieces_it_comes() {
    let request = add("tcp", "", "", [8080, 80]).to_string() + "\n";
    let bytes: Vec<&[u8]> = request.as_bytes().chunks(1).collect();
    for closes in [true, false] {
        assert_eq!(answer_to(&bytes, closes), r#"{"return":{"id":1}}"#);
        assert_eq!(answer_to(&[request.as_bytes()], closes), r#"{"return":{"id":1}}"#);
    }
}

#[test]
fn what_is_no_request_is_refused_whatever_its_length() {
    let request = add("tcp", "", "", [8080, 80]).to_string();
    for end in 0..request.len() {
        let answer = answer_to(&[&request.as_bytes()[..end]], true);
        assert!(
            answer.starts_with(r#"{"error":{"desc":"bad request: cannot parse JSON"#),
            "{answer}"
        );
    }
    assert!(answer_to(&[b"bad"], false).contains("cannot parse JSON"));
    assert!(answer_to(&[b"\xff\0"], false).contains("cannot parse JSON"));
    assert!(answer_to(&[], false).contains("the request is not complete"));
    let long = vec![b' '; MOST_BYTES - 1];
    assert!(answer_to(&[&long], true).contains("cannot parse JSON"));
    assert!(answer_to(&[&long, b" "], true).contains("too large message"));
    let deep = vec![b'['; MOST_BYTES - 1];
    assert!(answer_to(&[&deep], true).contains("cannot parse JSON"));
}

/// The ports that a list has, as the model has them.
fn listed(
    forwards: &mut Forwards,
    published: &mut Published,
) -> BTreeSet<(String, IpAddr, u64, u64)> {
    let list = forwards.answer(&json!({"execute": "list_hostfwd"}), published);
    let entries = list["entries"].as_array().unwrap().iter();
    let entry = |entry: &Value| {
        let proto = entry["proto"].as_str().unwrap().trim_end_matches(['4', '6']).to_owned();
        let ports = ["host_port", "guest_port"].map(|name| entry[name].as_u64().unwrap());
        (proto, ip(entry["host_addr"].as_str().unwrap()), ports[0], ports[1])
    };
    entries.map(entry).collect()
}

/// A request to add a port, or to remove an id.
fn requests() -> impl Strategy<Value = Value> {
    let protos = prop::sample::select(vec!["tcp", "udp", "tcp4", "udp6", "sctp"]);
    let hosts = prop::sample::select(vec!["", "127.0.0.1", "::1", "x"]);
    let added = (protos, hosts, 0u32..5, 0u32..3)
        .prop_map(|(proto, host, from, to)| add(proto, host, "", [from, to]));
    let removed =
        (0u64..12).prop_map(|id| json!({"execute": "remove_hostfwd", "arguments": {"id": id}}));
    prop_oneof![2 => added, 1 => removed]
}

proptest! {
    #[test]
    fn the_list_has_the_published_ports_and_an_id_is_given_once(
        requests in prop::collection::vec(requests(), 0..40),
    ) {
        let (mut forwards, mut published, mut last_id) = (forwards(), Published::default(), 0);
        for request in requests {
            let before = published.0.clone();
            let answer = forwards.answer(&request, &mut published);
            if let Some(id) = answer["return"]["id"].as_u64() {
                prop_assert!(id > last_id);
                last_id = id;
            }
            if answer.get("error").is_some() {
                prop_assert_eq!(&before, &published.0, "a refusal changes nothing");
            }
            let model: BTreeSet<_> = published.0.iter().map(|(proto, host, from, to)| {
                ((*proto).to_owned(), *host, u64::from(*from), u64::from(*to))
            }).collect();
            prop_assert_eq!(listed(&mut forwards, &mut published), model);
        }
    }

    #[test]
    fn whatever_a_client_sends_it_gets_one_answer(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        let answer: Value = serde_json::from_str(&answer_to(&[&bytes], true)).unwrap();
        prop_assert!(answer["error"]["desc"].is_string(), "{}", answer);
    }
}
