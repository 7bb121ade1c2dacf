use super::rule::Host;
use super::*;
use proptest::prelude::*;

fn rules(text: &str) -> Rules {
    let mut rules = Rules::default();
    rules.add_file(text, Path::new("/etc/rules")).unwrap();
    rules
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| n.to_string()).collect()
}

fn destination(to: &str, port: u16) -> Destination<'static> {
    Destination::new(Protocol::Tcp, SocketAddr::new(to.parse().unwrap(), port))
}

fn denial<'a>(rules: &'a Rules, to: &str, port: u16, names: &[&str]) -> Option<&'a Denial> {
    let names = owned(names);
    rules.denial(&Destination { names: &names, ..destination(to, port) })
}

fn allows(rules: &Rules, to: &str, port: u16, names: &[&str]) -> bool {
    denial(rules, to, port, names).is_none()
}

fn allows_name(rules: &Rules, name: &str) -> bool {
    rules.name_denial(name, TYPE_A).is_none()
}

/// How the rules meet a name of the destination.
#[derive(Clone, Copy, PartialEq, Debug)]
enum ByName {
    /// The guest wrote to the address, which has no name.
    None,
    /// The guest wrote to the name (`--names given`).
    Given,
    /// The guest wrote to the address, which its resolvers have told it of the name (`--names real`).
    Real,
}

/// A combination of rules and destination.
struct Case<'a> {
    by_address: &'a str,
    by_name: &'a str,
    any: &'a str,
    closing: &'a str,
    to: &'a str,
    name: ByName,
}

impl Case<'_> {
    /// The table of docs/gateway.md: the first row that says something about the destination, and what it says.
    fn row(&self) -> (usize, bool) {
        let has_names = !self.by_name.is_empty();
        let is_private = ["10.1.2.3", "203.0.113.7"].contains(&self.to);
        let private = is_private && self.name != ByName::None;
        let is_guarded = match (self.to, self.name) {
            ("169.254.169.254" | "169.254.9.9" | "192.0.2.77", _) => true,
            (_, ByName::Given) => private,
            (_, ByName::Real) => private && has_names,
            (_, ByName::None) => false,
        };
        // The shorter prefix opens none of the guarded ranges.
        match self.by_address {
            "allow TO" | "deny TO/4 allow TO" => return (1, true),
            "deny TO" | "allow TO/4 deny TO" | "deny TO/4" => return (1, false),
            "allow TO/4" if !is_guarded => return (1, true),
            _ if is_guarded => return (2, false),
            _ => {}
        }
        match self.by_name {
            _ if self.name == ByName::None => {}
            "deny NAME" | "allow BELOW deny NAME" | "deny NAME allow NAME" => return (3, false),
            "allow NAME" | "deny BELOW allow NAME" => return (4, true),
            _ => {}
        }
        match self.any {
            "deny *:80" | "allow *:80 deny *:80" => return (5, false),
            "allow *:80" => return (5, true),
            _ => {}
        }
        (6, !self.is_closed())
    }

    /// An allowance closes the rest unless it is an exception.
    fn is_closed(&self) -> bool {
        let said = [self.by_address, self.by_name, self.any];
        let has_list = said.iter().any(|text| match *text {
            "deny TO/4 allow TO" | "deny BELOW allow NAME" => false,
            text => text.contains("allow"),
        });
        match self.closing {
            "no-network" | "deny *" => true,
            "allow *" => false,
            _ => has_list,
        }
    }

    fn decide(&self) -> Option<Denial> {
        let all = [self.by_address, self.by_name, self.any, self.closing].join(" ");
        let mut words = all.split_whitespace();
        let mut rules = Rules::default();
        while let Some(verb) = words.next() {
            if verb == "no-network" {
                rules.close(Source::Option);
                continue;
            }
            let text = words.next().unwrap().replace("TO", self.to);
            let text = text.replace("BELOW", "*.example.org").replace("NAME", "www.example.org");
            let rule = text.parse().unwrap();
            match verb {
                "allow" => rules.allow(rule, Source::Option),
                _ => rules.deny(rule, Source::Option),
            }
        }
        let own = owned(&["www.example.org"]);
        let d = Destination {
            names: if self.name == ByName::None { &[] } else { &own },
            is_host: self.to == "192.0.2.77",
            host_network: (self.to == "203.0.113.7").then(|| ("203.0.113.0".parse().unwrap(), 24)),
            is_by_name: self.name == ByName::Given,
            ..destination(self.to, 80)
        };
        rules.denial(&d).cloned()
    }
}

/// Walks the table of docs/gateway.md: all combinations of a rule by address, one by name, one with `*` and a default,
/// for each kind of address, reached by number, by a name of its own address, and by a name of its real address.
#[test]
fn the_first_row_of_the_table_that_names_a_destination_decides() {
    const BY_ADDRESS: [&str; 7] = [
        "",
        "allow TO",
        "deny TO",
        "allow TO/4",
        "deny TO/4",
        "deny TO/4 allow TO",
        "allow TO/4 deny TO",
    ];
    const BY_NAME: [&str; 6] = [
        "",
        "allow NAME",
        "deny NAME",
        "deny BELOW allow NAME",
        "allow BELOW deny NAME",
        "deny NAME allow NAME",
    ];
    const ANY: [&str; 4] = ["", "allow *:80", "deny *:80", "allow *:80 deny *:80"];
    const CLOSING: [&str; 4] = ["", "no-network", "deny *", "allow *"];
    // One elsewhere, private, link-local, of a metadata service, of the host, of its network.
    const TO: [&str; 6] =
        ["192.0.2.1", "10.1.2.3", "169.254.9.9", "169.254.169.254", "192.0.2.77", "203.0.113.7"];
    let mut decided = [[0; 2]; 7];
    for (by_address, by_name, any, closing, to, name) in BY_ADDRESS
        .iter()
        .flat_map(|a| BY_NAME.map(|n| (a, n)))
        .flat_map(|(a, n)| ANY.map(|y| (a, n, y)))
        .flat_map(|(a, n, y)| CLOSING.map(|c| (a, n, y, c)))
        .flat_map(|(a, n, y, c)| TO.map(|t| (a, n, y, c, t)))
        .flat_map(|(a, n, y, c, t)| {
            [ByName::None, ByName::Given, ByName::Real].map(|by| (a, n, y, c, t, by))
        })
    {
        let case = Case { by_address, by_name, any, closing, to, name };
        let (row, is_allowed) = case.row();
        let denial = case.decide();
        assert_eq!(
            denial.is_none(),
            is_allowed,
            "row {row}: {by_address}, {by_name}, {any}, {closing}, to {to} by {name:?}: {denial:?}"
        );
        decided[row][usize::from(is_allowed)] += 1;
    }
    // Row 2 refuses, row 3 refuses, row 4 allows.
    let can = [[1, 1], [1, 0], [1, 0], [0, 1], [1, 1], [1, 1]];
    for (row, (times, can)) in (1..).zip(decided[1..].iter().zip(can)) {
        assert_eq!(times.map(|t: i32| t.min(1)), can, "row {row}");
    }
}

/// Specific rules and ports, within a row.
#[test]
fn within_a_row_the_more_specific_rule_decides() {
    const AT: &str = "10.1.2.3";
    const NAME: &[&str] = &["www.example.org"];
    for (text, is_allowed) in [
        ("allow 10.1.2.3:80\ndeny 10.1.2.3:81", true),
        ("allow 10.0.0.0/8\ndeny *:80", true),
        ("allow 10.0.0.0/8\nno-network", true),
        ("deny 0.0.0.0/0\nallow www.example.org", false),
        ("allow *:81\nno-network", false),
        ("allow *:80\ndeny *:1-100", false),
        ("deny *:81", true),
        ("", true),
    ] {
        assert_eq!(allows(&rules(text), AT, 80, NAME), is_allowed, "{text}");
    }
    for (text, is_allowed) in [
        ("deny *.org\nallow *.example.org", true),
        ("deny *.example.org\nallow *.org", false),
        ("allow www.example.org\ndeny www.example.org:81", true),
        ("allow www.example.org\ndeny *:80", true),
        ("deny www.example.org\nallow *", false),
    ] {
        assert_eq!(allows(&rules(text), "192.0.2.1", 80, NAME), is_allowed, "{text}");
    }
}

#[test]
fn an_allowance_closes_the_rest_unless_it_is_an_exception() {
    for (text, is_closed) in [
        ("allow github.com:443", true),
        ("allow 10.0.0.0/8", true),
        ("allow 169.254.169.254", true),
        ("allow *:443", true),
        ("allow ::/0", true),
        ("allow github.com\nallow *", false),
        ("allow *", false),
        ("", false),
        ("deny 10.0.0.0/8", false),
        // An exception decides before the denial that it is one from.
        ("deny 10.0.0.0/8\nallow 10.1.2.3", false),
        ("allow 10.1.2.3\ndeny 10.0.0.0/8", false),
        ("deny *.example.net\nallow www.example.net", false),
        ("deny *.net\nallow *.example.net:443", false),
        ("deny *:25\nallow mail.example.net:25", false),
        ("deny 10.0.0.0/8:80\nallow 10.1.2.3:80", false),
        ("deny 10.0.0.0/8:80\nallow 10.1.2.3", true),
        ("deny 10.1.2.3\nallow 10.0.0.0/8", true),
        ("deny 10.1.2.3\nallow 10.1.2.3", true),
        ("deny ads.example.net\nallow *.example.net", true),
        ("deny 10.0.0.0/8\nallow github.com", true),
        ("deny 10.0.0.0/8\nallow 10.1.2.3\nallow github.com", true),
        ("deny *:25\nallow mail.example.net", true),
    ] {
        let rules = rules(text);
        assert_eq!(!allows(&rules, "192.0.2.1", 8080, &["other.example"]), is_closed, "{text}");
        assert_eq!(
            !allows_name(&rules, "other.example"),
            is_closed && text != "allow *:443",
            "{text}"
        );
    }
    let refused = |rules: &Rules| denial(rules, "192.0.2.1", 80, &[]).map(Denial::to_string);
    let file = rules("deny 10.0.0.0/8\nallow 10.1.2.3\nallow github.com:443");
    let by_file = refused(&file).unwrap();
    assert_eq!(by_file, "default: closed by /etc/rules:3: allow github.com:443");
    let mut both = file.clone();
    both.allow("*".parse().unwrap(), Source::Option);
    assert_eq!(refused(&both), None, "options come before the file");
    both = rules("allow *");
    both.allow("pypi.org".parse().unwrap(), Source::Option);
    assert_eq!(refused(&both).unwrap(), "default: closed by --allow pypi.org");
    let mut elsewhere = rules("deny 10.0.0.0/8");
    elsewhere.allow("10.1.2.3".parse().unwrap(), Source::Option);
    assert!(refused(&elsewhere).is_some(), "no exception from a denial of the file");
}

#[test]
fn a_denial_of_one_name_decides_against_an_allowance_of_another_at_the_address() {
    let rules = rules("allow www.example.org\ndeny ads.example.net:80\nno-network");
    assert!(allows(&rules, "192.0.2.1", 80, &["www.example.org"]));
    assert!(!allows(&rules, "192.0.2.1", 80, &["www.example.org", "ads.example.net"]));
    assert!(allows(&rules, "192.0.2.1", 443, &["www.example.org", "ads.example.net"]));
}

#[test]
fn guarded_addresses_are_opened_by_a_rule_by_address_that_is_as_long() {
    for (text, link_local, metadata) in [
        ("", false, false),
        ("allow *\nallow www.example.org", false, false),
        ("allow 0.0.0.0/0", false, false),
        ("allow 169.254.0.0/16", true, false),
        ("allow 169.254.169.254\nallow 169.254.9.9", true, true),
        ("allow 169.254.169.254:81", false, false),
    ] {
        let rules = rules(text);
        let reaches = |to: &str| allows(&rules, to, 80, &["www.example.org"]);
        assert_eq!(
            (reaches("169.254.9.9"), reaches("169.254.169.254")),
            (link_local, metadata),
            "{text}"
        );
        assert!(!reaches("fd00:ec2::254") && !reaches("64:ff9b::169.254.169.254"), "{text}");
    }
    let of_host = |text: &str, to: &str| {
        let d = Destination { is_host: true, ..destination(to, 80) };
        rules(text).denial(&d).map(Denial::to_string)
    };
    let refused = of_host("allow 192.0.2.0/24", "192.0.2.1").unwrap();
    assert!(refused.starts_with("default: the host's own addresses"), "{refused}");
    assert_eq!(of_host("allow 192.0.2.1:80", "192.0.2.1"), None);
}

#[test]
fn a_network_of_the_host_is_opened_to_a_name_by_a_prefix_that_is_as_long() {
    let reaches = |text: &str, to: &str, network: (&str, u8), is_by_name| {
        let names = owned(&["www.example.org"]);
        let host_network = Some((network.0.parse().unwrap(), network.1));
        let d = Destination { names: &names, host_network, is_by_name, ..destination(to, 80) };
        rules(&format!("allow *\n{text}")).denial(&d).map(Denial::to_string)
    };
    let (v4, v6) = (("203.0.113.0", 24), ("2001:db8:7::", 64));
    let refused = reaches("", "203.0.113.7", v4, true).unwrap();
    assert!(refused.starts_with("default: addresses of the host's own network"), "{refused}");
    assert!(reaches("allow 203.0.0.0/16", "203.0.113.7", v4, true).is_some());
    assert_eq!(reaches("allow 203.0.113.0/24", "203.0.113.7", v4, true), None);
    assert!(reaches("allow 2001:db8::/32", "2001:db8:7::9", v6, true).is_some());
    assert_eq!(reaches("allow 2001:db8:7::/64", "2001:db8:7::9", v6, true), None);
    assert_eq!(reaches("", "203.0.113.7", v4, false), None, "no rule names a name");
}

#[test]
fn options_come_before_the_file() {
    let with = |file: &str, options: &[&str]| {
        let mut rules = rules(file);
        for option in options {
            match option.split_once(' ') {
                None => rules.close(Source::Option),
                Some(("allow", rule)) => rules.allow(rule.parse().unwrap(), Source::Option),
                Some((_, rule)) => rules.deny(rule.parse().unwrap(), Source::Option),
            }
        }
        rules
    };
    let names = &["www.example.org"];
    let reaches =
        |file: &str, options: &[&str]| allows(&with(file, options), "198.51.100.3", 80, names);
    for allowed in ["allow *", "allow *:80", "allow 198.51.100.3", "allow www.example.org"] {
        assert!(reaches(allowed, &["deny 192.0.2.1"]), "{allowed}");
        for closes in ["no-network", "deny *", "allow 192.0.2.1"] {
            assert!(!reaches(allowed, &[closes]), "{allowed}, {closes}");
            assert!(!allows_name(&with(allowed, &[closes]), "www.example.org"), "{allowed}");
        }
    }
    assert!(reaches("deny *\nno-network", &["allow www.example.org"]));
    assert!(reaches("deny 198.51.100.3", &["allow 198.51.100.0/24"]));
    assert!(!reaches("allow 198.51.100.3", &["deny 198.51.100.0/24"]));
    assert!(reaches("deny www.example.org", &["allow *.example.org"]));
    assert!(!reaches("deny 198.51.100.0/24", &["allow www.example.org"]), "another step");
    assert!(!reaches("deny www.example.org", &["no-network", "allow *:80"]), "denials count");
}

#[test]
fn a_refusal_names_the_rule_and_its_line_or_option() {
    let mut rules = rules("# first\ndeny 10.0.0.0/8 # ours\nno-network\nallow 10.1.1.1\n");
    rules.deny("*.Example.Org:80-90".parse().unwrap(), Source::Option);
    let denial = |to: &str, names: &[&str]| denial(&rules, to, 80, names).map(Denial::to_string);
    assert_eq!(denial("10.1.1.1", &[]), None);
    assert_eq!(denial("10.1.1.2", &[]).as_deref(), Some("/etc/rules:2: deny 10.0.0.0/8"));
    let by_name = denial("192.0.2.1", &["www.example.org"]);
    assert_eq!(by_name.as_deref(), Some("--deny *.Example.Org:80-90"));
    assert_eq!(denial("192.0.2.1", &[]).as_deref(), Some("/etc/rules:3: no-network"));
    let mut named = Rules::default();
    named.deny("example.com".parse().unwrap(), Source::Option);
    let refused = named.name_denial("example.com", TYPE_A).map(Denial::to_string);
    assert_eq!(refused.as_deref(), Some("--deny example.com"));
    named.close(Source::Option);
    let other = named.name_denial("example.net", TYPE_A).map(Denial::to_string);
    assert_eq!(other.as_deref(), Some("--no-network"));
    let metadata = self::denial(&named, "169.254.169.254", 80, &[]).unwrap().to_string();
    assert_eq!(
        metadata,
        "default: addresses of cloud metadata services; permit an address with --allow ADDRESS"
    );
}

#[test]
fn a_denied_ipv4_address_is_not_reached_by_an_ipv6_one_that_leads_there() {
    let rules = rules(
        "deny 10.0.0.0/8:80\ndeny ::ffff:192.0.2.0/120\nallow 10.9.9.9\nallow 64:ff9b::/96\nallow *",
    );
    for to in [
        "10.1.2.3",
        "::ffff:10.1.2.3",
        "64:ff9b::10.1.2.3",
        "2002:a01:203:7::1",
        "64:ff9b:1::10.1.2.3",
    ] {
        assert!(!allows(&rules, to, 80, &[]), "{to}");
        assert!(allows(&rules, to, 81, &[]), "{to}");
    }
    assert!(!allows(&rules, "192.0.2.1", 443, &[]) && allows(&rules, "192.0.3.1", 443, &[]));
    // It cannot allow: who translates is not known.
    assert!(allows(&rules, "10.9.9.9", 80, &[]));
    assert!(!allows(&rules, "64:ff9b::10.9.9.9", 80, &[]));
    assert!(
        allows(&rules, "64:ff9b::11.1.2.3", 80, &[]) && allows(&rules, "2001:a01:203::1", 80, &[])
    );
    let closed = self::rules("no-network\nallow 10.9.9.9");
    assert!(!allows(&closed, "64:ff9b::10.9.9.9", 80, &[]));
}

#[test]
fn a_question_that_cannot_be_read_is_refused_where_a_name_may_be() {
    let is_refused = |text: &str| rules(text).hidden_name_denial().is_some();
    for text in [
        "no-network",
        "no-network\nallow example.org",
        "allow example.org",
        "no-network\nallow 10.0.0.0/8",
        "no-network\nallow *:53",
        "deny *.example.org",
        "deny example.org:80\nallow 192.0.2.1",
        "deny *",
    ] {
        assert!(is_refused(text), "{text}");
    }
    for text in ["", "deny 10.0.0.0/8", "deny *:25", "allow example.org\nallow *"] {
        assert!(!is_refused(text), "{text}");
    }
}

#[test]
fn without_a_network_only_what_is_allowed_is_reached() {
    let rules = rules("no-network\nallow *.example.org:80-90\nallow [2001:db8::/32]:22");
    assert!(allows(&rules, "192.0.2.1", 80, &["www.example.org"]));
    assert!(!allows(&rules, "192.0.2.1", 91, &["www.example.org"]));
    assert!(!allows(&rules, "192.0.2.1", 80, &["example.org", "badexample.org"]));
    assert!(allows(&rules, "2001:db8::5", 22, &[]));
    let ping = Destination::new(Protocol::Icmp, "192.0.2.1:0".parse().unwrap());
    assert!(rules.denial(&ping).is_some());
}

#[test]
fn a_server_of_the_guests_own_choice_can_deny_but_not_allow() {
    let rules = rules("no-network\ndeny ads.example.net\nallow *.example.org");
    let is_allowed = |names: &[&str], claimed: &[&str]| {
        let (names, claimed) = (owned(names), owned(claimed));
        let d = Destination { names: &names, claimed: &claimed, ..destination("192.0.2.1", 80) };
        rules.denial(&d).is_none()
    };
    assert!(is_allowed(&["www.example.org"], &[]));
    assert!(!is_allowed(&[], &["www.example.org"]));
    assert!(!is_allowed(&["www.example.org"], &["ads.example.net"]));
}

#[test]
fn a_name_is_refused_if_nothing_under_it_can_be_reached() {
    let closed = rules("no-network\nallow Example.Org:443");
    assert!(allows_name(&closed, "example.org.") && !allows_name(&closed, "example.com"));
    let open = rules("deny example.com\ndeny ads.example.net:80");
    assert!(!allows_name(&open, "EXAMPLE.com") && allows_name(&open, "ads.example.net"));
    // An address needs no name; and a denied name stays denied.
    let address = rules("no-network\nallow 192.0.2.0/24");
    assert!(!allows_name(&address, "anything.example"));
    assert!(!allows_name(&rules("deny ads.example.net\nallow 192.0.2.1"), "ads.example.net"));
    let excepted = rules("deny *.example.net\nallow www.example.net:443");
    assert!(allows_name(&excepted, "www.example.net") && !allows_name(&excepted, "x.example.net"));
    let ports = rules("no-network\nallow *:443\ndeny example.com");
    assert!(allows_name(&ports, "example.org") && !allows_name(&ports, "example.com"));
    assert!(Rules::default().is_empty() && !open.is_empty());
}

#[test]
fn a_closed_guest_asks_for_no_records_of_free_content() {
    const TXT: u16 = 16;
    const NULL: u16 = 10;
    let closed = rules("no-network\nallow *.example.org");
    let asks = |rules: &Rules, kind| rules.name_denial("www.example.org", kind).is_none();
    assert!(USUAL_TYPES.iter().all(|kind| asks(&closed, *kind)));
    assert!(
        !asks(&closed, TXT) && !asks(&closed, NULL) && !asks(&rules("no-network\nallow *"), TXT)
    );
    assert!(asks(&rules("deny example.com"), TXT));
}

#[test]
fn a_client_is_refused_where_a_rule_denies_its_address_or_it_is_a_metadata_service() {
    let admits = |text: &str, from: &str, port| {
        let from = SocketAddr::new(from.parse().unwrap(), port);
        rules(text).client_denial(Protocol::Udp, from).is_none()
    };
    assert!(!admits("deny 10.0.0.0/8", "10.1.2.3", 40_000));
    assert!(!admits("deny 10.0.0.0/8", "::ffff:10.1.2.3", 40_000));
    assert!(admits("deny 10.0.0.0/8\nallow 10.1.2.3", "10.1.2.3", 40_000));
    assert!(admits("deny 10.0.0.0/8:53", "10.1.2.3", 40_000));
    assert!(!admits("deny 10.0.0.0/8:53", "10.1.2.3", 53));
    assert!(!admits("", "169.254.169.254", 53));
    // A published port accepts clients.
    assert!(admits("no-network", "192.0.2.1", 40_000) && admits("", "169.254.9.9", 40_000));
}

#[test]
fn a_name_is_kept_for_each_denial_once() {
    let rules = rules("deny *.example.org:80\ndeny ads.example.net:80\nallow *.example.com");
    let keeps = |name: &str, known: &[&str]| rules.keeps_name(name, &owned(known));
    assert!(keeps("a.example.org", &[]) && !keeps("b.example.org", &["a.example.org"]));
    assert!(keeps("ads.example.net", &["a.example.org"]));
    assert!(!keeps("www.example.com", &[]) && !keeps("other.example", &[]));
}

#[test]
fn rules_that_mean_nothing_are_refused_with_their_line() {
    for text in
        ["", "1.2.3", "10.0.0.0/33", "a b", "[::1", "[::1]80", "x:0", "x:9-1", "x:y", "-.*", "*.*"]
    {
        assert!(text.parse::<Rule>().is_err(), "{text}");
    }
    let error = Rules::default().add_file("allow *\npermit x\n", Path::new("r")).unwrap_err();
    assert!(error.starts_with("line 2: "), "{error}");
    let error = Rules::default().add_file("allow 1.2.3.4.5", Path::new("r")).unwrap_err();
    assert!(error.contains("line 1: invalid rule `1.2.3.4.5`"), "{error}");
}

#[test]
fn an_ipv6_address_needs_no_brackets_without_a_port() {
    let host = |text: &str| text.parse::<Rule>().unwrap().host;
    assert_eq!(host("2001:db8::/32"), Host::Prefix("2001:db8::".parse().unwrap(), 32));
    assert_eq!(host("[::1]:80"), Host::Prefix("::1".parse().unwrap(), 128));
    assert_eq!(host("localhost:80"), Host::Name("localhost".into()));
    assert_eq!(host("::ffff:10.0.0.0/104"), Host::Prefix("10.0.0.0".parse().unwrap(), 8));
    assert_eq!(host("::ffff:0:0/80"), Host::Prefix("::ffff:0:0".parse().unwrap(), 80));
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in "[a-z0-9.:/\\[\\]*-]{0,24}") {
        if let Ok(rule) = text.parse::<Rule>() {
            let mut rules = Rules::default();
            rules.deny(rule, Source::Option);
            let _ = allows(&rules, "10.0.0.1", 80, &["a.b"]);
        }
    }
}

#[test]
fn prefixes_cover_what_shares_their_bits() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert!(covers(ip("10.0.2.100"), 24, ip("10.0.2.2")));
    assert!(!covers(ip("10.0.2.100"), 32, ip("10.0.2.2")));
    assert!(covers(ip("10.0.2.100"), 0, ip("192.0.2.1")));
    assert!(covers(ip("fd00::1"), 64, ip("fd00::2")));
    assert!(!covers(ip("fd00::1"), 64, ip("10.0.0.1")));
}

#[test]
fn rules_that_are_closed_to_ask_keep_those_of_a_file_and_an_option_that_closes_does_not() {
    let at = |rules: &Rules, to: &str| {
        let to = SocketAddr::new(to.parse().unwrap(), 80);
        let verdict = rules.verdict(&Destination::new(Protocol::Tcp, to));
        (verdict.step, verdict.denial.map(ToString::to_string))
    };
    let mut rules = Rules::default();
    rules.add_file("deny 10.0.0.0/8\nallow 10.1.2.3", Path::new("/r")).unwrap();
    rules.close_to_ask();
    assert_eq!(at(&rules, "10.1.2.3"), (Step::Address, None));
    assert_eq!(at(&rules, "9.9.9.9"), (Step::Default, Some("--ask".to_owned())));
    assert_eq!(at(&rules, "10.0.0.1").0, Step::Address);
    assert_eq!(at(&rules, "169.254.169.254").0, Step::Guarded);
    let mut open = rules.clone();
    open.allow("*".parse().unwrap(), Source::Option);
    assert_eq!(at(&open, "9.9.9.9"), (Step::Any, None), "nothing is left to ask about");
    rules.allow("192.0.2.1".parse().unwrap(), Source::Option);
    assert_eq!(at(&rules, "9.9.9.9").0, Step::Default);
    assert_eq!(at(&rules, "10.1.2.3").0, Step::Address);
    assert!(at(&rules, "10.1.2.3").1.is_some(), "options close, so that the file allows nothing");
}
