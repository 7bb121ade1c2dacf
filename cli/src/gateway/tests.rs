//! The command line of pasta: what it takes, and what it refuses with which sentence.

use super::*;
use fulmar_gateway::config::BindAddresses;
use fulmar_gateway::ports::PortSpec;
use plan::Ports;
use std::path::PathBuf;

fn parse(line: &str) -> Result<Args, clap::Error> {
    let words = ["pasta"].into_iter().chain(line.split_whitespace());
    Pasta::try_parse_from(words).map(|pasta| pasta.args)
}

fn plan(line: &str) -> Plan {
    Plan::new(&parse(line).unwrap_or_else(|e| panic!("{line}: {e}"))).unwrap()
}

fn refusal(line: &str) -> String {
    match parse(line) {
        Ok(args) => Plan::new(&args).expect_err(line).to_string(),
        Err(e) => e.to_string(),
    }
}

fn ports(line: &str) -> Ports {
    plan(line).ports
}

#[test]
fn podmans_line_is_understood() {
    let plan = plan(
        "--config-net -t 127.0.0.1/8080-8080:80-80 -u 5353-5354:53-54 --dns-forward 169.254.1.1 -T none \
         -U none --no-map-gw --quiet --netns /run/user/1000/netns/netns-1 --map-guest-addr 169.254.1.2",
    );
    let netns = PathBuf::from("/run/user/1000/netns/netns-1");
    assert_eq!(plan.guest, Guest::Existing(Target::Path { netns, userns: None }));
    assert!(plan.configures && plan.process.quiet && plan.map.no_map_gw);
    let forwards = plan.ports.tcp.forwards();
    assert_eq!((forwards[0].from, forwards[0].to), (8080, 80));
    assert_eq!(forwards[0].bind.address, Some("127.0.0.1".parse().unwrap()));
    assert_eq!(plan.ports.udp.forwards().len(), 2);
    assert_eq!((plan.ports.tcp_ns, plan.ports.udp_ns), (PortSpec::None, PortSpec::None));
}

#[test]
fn rootlesskits_lines_are_understood() {
    let common = "--stderr --ns-ifname=tap0 --mtu=65520 --config-net --address=10.0.2.100 --netmask=24 \
                  --gateway=10.0.2.2 --dns-forward=10.0.2.3 --no-map-gw --ipv4-only --tcp-ports=auto \
                  --udp-ports=none --host-lo-to-ns-lo";
    let by_process = plan(&format!("{common} 4242"));
    assert_eq!(by_process.guest, Guest::Existing(Target::Process { pid: 4242, userns: None }));
    assert_eq!(by_process.options.addresses, [("10.0.2.100".parse().unwrap(), None)]);
    assert_eq!((by_process.options.prefix_len, by_process.options.mtu), (Some(24), Some(65520)));
    assert!(by_process.options.without_v6 && by_process.ports.is_to_loopback);
    assert_eq!((by_process.ports.tcp, by_process.ports.udp), (PortSpec::Auto, PortSpec::None));
    let by_path = plan(&format!("{common} --userns=/proc/7/ns/user --netns=/x/netns"));
    let userns = Some(PathBuf::from("/proc/7/ns/user"));
    assert_eq!(by_path.guest, Guest::Existing(Target::Path { netns: "/x/netns".into(), userns }));
}

/// The lines as RootlessKit 2.0.2 (Debian) and 3.3.0 start them; containerd-rootless.sh of nerdctl 2.3.5 has 3.3.0 start
/// the last two.
#[test]
fn lines_of_rootlesskit_of_2026_are_understood() {
    let common = "--ns-ifname=tap0 --mtu=65520 --address=10.0.2.100 --netmask=24 --gateway=10.0.2.2 \
                  --dns-forward=10.0.2.3";
    let v2 = plan(&format!(
        "--foreground --stderr {common} --no-dhcp --no-ra --no-map-gw --ipv4-only --tcp-ports=auto --udp-ports=auto 7"
    ));
    assert!(v2.process.foreground && !v2.configures && !v2.serves.dhcp);
    let by_path = "--userns=/proc/7/ns/user --netns=/proc/7/root/run/rk/netns";
    let v6 = "--address=fd00::100 --gateway=fd00::2 --dns-forward=fd00::3";
    let implicit = plan(&format!(
        "{common} --config-net {v6} --tcp-ports=auto --udp-ports=auto --host-lo-to-ns-lo {by_path}"
    ));
    assert_eq!((implicit.options.addresses.len(), implicit.map.dns_forward.len()), (2, 2));
    let closed = "--no-map-gw --tcp-ns=none --udp-ns=none --ipv4-only";
    let none = "--tcp-ports=none --udp-ports=none";
    let pesto = plan(&format!(
        "{common} --config-net {closed} {none} --conf-path=/run/rk/.pasta.sock {by_path}"
    ));
    assert_eq!(pesto.conf_path, Some("/run/rk/.pasta.sock".into()));
    assert_eq!((pesto.ports.tcp, pesto.ports.tcp_ns), (PortSpec::None, PortSpec::None));
    let auto = "--tcp-ports=auto --udp-ports=auto";
    let implicit =
        plan(&format!("{common} --config-net {closed} {auto} --host-lo-to-ns-lo {by_path}"));
    assert!(implicit.ports.is_to_loopback && implicit.conf_path.is_none());
}

#[test]
fn loopback_alone_needs_splicing() {
    let ports = ports("--splice-only -t 8080:80 1");
    assert!(ports.is_splice_only && ports.has_splice);
    assert!(refusal("--splice-only --no-splice 1").contains("conflicts with --no-splice"));
    let away = refusal("--splice-only -T 127.0.0.1/5000:203.0.113.66/80 1");
    assert!(away.contains("to loopback addresses only"), "{away}");
}

#[test]
fn the_version_is_printed_whatever_stands_before() {
    // RootlessKit 3.3.0 asks by the second one and the third one for what pasta can do.
    for line in ["--version", "--host-lo-to-ns-lo --version", "--conf-path=/dev/null --version"] {
        let e = parse(line).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::DisplayVersion, "{line}");
        assert!(e.to_string().starts_with("pasta 0."), "{e}");
        assert!(!e.use_stderr());
    }
}

#[test]
fn a_number_is_a_process_and_anything_else_a_program() {
    assert_eq!(plan("").guest, Guest::Program(vec![]));
    assert_eq!(
        plan("ip -6 addr").guest,
        Guest::Program(vec!["ip".into(), "-6".into(), "addr".into()])
    );
    assert_eq!(plan("-f -- 12 13").guest, Guest::Program(vec!["12".into(), "13".into()]));
    assert_eq!(plan("12").guest, Guest::Existing(Target::Process { pid: 12, userns: None }));
    let netns = PathBuf::from("/proc/12/ns/net");
    assert_eq!(
        plan("--netns-only 12").guest,
        Guest::Existing(Target::Path { netns, userns: None })
    );
    assert!(["0", "99999999999"].iter().all(|pid| refusal(pid).contains("invalid process id")));
}

#[test]
fn repeated_ports_add_up_and_other_options_count_last() {
    let ports = ports("-t 22 --tcp-ports 80:8080 -m 1500 -m 9000 -q -q 1");
    assert_eq!(ports.tcp.forwards().len(), 2);
    assert_eq!(plan("-m 1500 -m 9000 -q -q 1").options.mtu, Some(9000));
    assert_eq!(plan("-a 10.0.0.2 -a fd00::2 1").options.addresses.len(), 2);
    assert_eq!(plan("-m 0 1").options.mtu, None);
}

#[test]
fn ports_are_looked_up_unless_they_are_given() {
    let by_default = ports("1");
    let auto = [by_default.tcp, by_default.udp, by_default.tcp_ns, by_default.udp_ns];
    assert!(auto.iter().all(|spec| *spec == PortSpec::Auto));
    assert_eq!(ports("--no-tcp 1").tcp, PortSpec::None);
    assert!(ports("1").has_splice && !ports("--no-splice 1").has_splice);
}

#[test]
fn ports_of_the_guests_loopback_and_foreign_addresses_are_taken() {
    let ports = ports("-T 8080:80 -U 53,5000-5001 --freebind -t 198.51.100.9/80 1");
    let pairs =
        |spec: &PortSpec| -> Vec<_> { spec.forwards().iter().map(|f| (f.from, f.to)).collect() };
    assert_eq!(pairs(&ports.tcp_ns), [(8080, 80)]);
    assert_eq!(pairs(&ports.udp_ns), [(53, 53), (5000, 5000), (5001, 5001)]);
    assert_eq!(ports.addresses, BindAddresses::Any);
    assert_eq!(plan("1").ports.addresses, BindAddresses::Own);
}

#[test]
fn a_configured_guest_does_not_autoconfigure_addresses() {
    let serves = |line: &str| plan(line).serves;
    assert!(serves("1").advertisements && serves("1").dhcp && serves("1").dhcp_v6);
    let set_up = serves("--config-net 1");
    assert!(!set_up.advertisements && set_up.dhcp && set_up.dhcp_v6);
    assert!(!serves("--no-ra 1").advertisements && !serves("-4 1").advertisements);
}

#[test]
fn long_options_can_be_shortened_and_short_ones_joined() {
    let args = parse("-fq4t 22 --config 1").unwrap();
    assert!(args.process.foreground && args.process.quiet && args.attach.config_net);
    assert!(args.guest.ipv4_only && args.ports.tcp_ports.len() == 1);
}

#[test]
fn contradictions_are_refused_with_a_sentence() {
    for (line, what) in [
        ("-4 -6 1", "--ipv6-only"),
        ("--netns x 1", "--netns conflicts with"),
        ("--netns x ip addr", "--netns conflicts with"),
        ("--userns /x", "--userns requires"),
        ("--userns /x --netns-only --netns y", "--netns-only conflicts with --userns"),
        ("-4 -a fd00::1 1", "fd00::1 conflicts with --ipv4-only"),
        ("-6 -g 10.0.0.1 1", "10.0.0.1 conflicts with --ipv6-only"),
        ("--no-tcp -t 80 1", "--tcp-ports conflicts with --no-tcp"),
        ("--no-udp -U 53 1", "--udp-ns conflicts with --no-udp"),
        ("-t none -t 22 1", "cannot be combined"),
        ("-t 22 -t auto 1", "cannot be combined"),
        ("--no-copy-routes 1", "--config-net"),
        ("-m 1000 1", "--ipv4-only"),
        ("--no-ndp 1", "--ipv4-only"),
        ("--outbound-if4 a --outbound-if6 b 1", "several outbound interfaces"),
    ] {
        let refusal = refusal(line);
        assert!(refusal.contains(what), "{line}: {refusal}");
    }
}

#[test]
fn values_out_of_range_are_refused_with_what_would_do() {
    for (line, what) in [
        ("-t 0 1", "invalid port `0`: expected 1-65535"),
        ("-t 22-20 1", "invalid range"),
        ("-u x 1", "invalid port"),
        ("-m 67 1", "from 68 to 65535"),
        ("-m 65536 1", "from 68 to 65535"),
        ("-a 10.0.0.1/33 1", "from 1 to 32"),
        ("-a 127.0.0.1 1", "cannot be assigned to a host"),
        ("-a ten 1", "invalid IP address"),
        ("-n 33 1", "from 1 to 32"),
        ("-n 255.0.255.0 1", "invalid netmask"),
        ("-I 0123456789abcdef 1", "1 to 15 bytes"),
        ("-I a/b 1", "1 to 15 bytes"),
        ("--ns-mac-addr 01:00:00:00:00:01 1", "unicast"),
        ("--ns-mac-addr 2:0:0:0:0:1 1", "unicast"),
        ("--dns-forward x 1", "invalid"),
        ("--map-guest-addr nothing 1", "invalid"),
        ("--log-size 1 1", "from 4096"),
    ] {
        let refusal = refusal(line);
        assert!(refusal.contains(what), "{line}: {refusal}");
    }
    assert_eq!(parse("-n 255.255.240.0 1").unwrap().guest.netmask, Some(20));
}

#[test]
fn the_name_makes_it_pasta() {
    let line = |words: &[&str]| {
        let line = pasta_line(words.iter().map(OsString::from))?;
        Some(line.iter().map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>())
    };
    assert_eq!(line(&["/usr/bin/pasta", "-f"]), Some(vec!["/usr/bin/pasta".into(), "-f".into()]));
    assert_eq!(line(&["fulmar", "--pasta", "-f"]), Some(vec!["fulmar".into(), "-f".into()]));
    assert_eq!(line(&["fulmar", "ping", "--pasta"]), None);
    assert_eq!(line(&[]), None);
}

#[test]
fn special_addresses_lead_to_the_host_by_default() {
    use fulmar_gateway::host::HostNetwork;
    let host = HostNetwork::default();
    let mapping = |line: &str| {
        let args = parse(line).unwrap();
        let plan = Plan::new(&args).unwrap();
        let network = plan.network(&host);
        plan.mapping(&host, &network, [2, 0, 0, 0, 0, 1])
    };
    let loopback = |line: &str| mapping(line).host_loopback.len();
    assert_eq!(loopback("1"), 2, "the routers of both IP versions");
    assert_eq!(loopback("-4 1"), 1);
    assert_eq!(loopback("--no-map-gw 1"), 0);
    assert_eq!(loopback("--map-host-loopback none 1"), 0);
    assert_eq!(loopback("--no-map-gw --map-host-loopback 10.9.9.9 1"), 1);
    let dns = mapping("--dns-forward 10.0.2.3 --dns-host 192.0.2.53 1");
    assert_eq!(dns.resolvers, ["192.0.2.53:53".parse().unwrap()]);
    assert_eq!(dns.dns, ["10.0.2.3".parse::<std::net::IpAddr>().unwrap()]);
    let routed = mapping("-a fd00::2 -g fd00::1 1").host_loopback;
    let routed: Vec<String> = routed.iter().map(ToString::to_string).collect();
    let wanted = ["169.254.2.2", "fd00::1", "fe80::ff:fe00:1"];
    assert_eq!(routed, wanted, "the router's address, and the one that advertises it");
}

#[test]
fn a_router_of_the_link_advertises_itself_and_another_one_by_the_gateways_own_address() {
    let host = fulmar_gateway::host::HostNetwork::default();
    let source = |line: &str| {
        let args = parse(line).unwrap();
        let plan = Plan::new(&args).unwrap();
        let network = plan.network(&host);
        plan.lease_v6(&host, &network, [2, 0, 0, 0, 0, 1]).1.unwrap().source.to_string()
    };
    assert_eq!(source("-a fd00::2 -g fe80::99 1"), "fe80::99");
    assert_eq!(source("-a fd00::2 -g fd00::1 1"), "fe80::ff:fe00:1");
}
