use super::*;
use proptest::prelude::*;

const ALL: Capabilities = Capabilities { v4: true, v6: true, tcp: true, udp: true, auto: true };

fn specs() -> Specs {
    Specs { capabilities: ALL, ephemeral: 32_768..=60_999 }
}

fn tcp(spec: &str) -> Vec<Rule> {
    specs().rules(Protocol::Tcp, &spec.parse().unwrap())
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// What pasta of passt 0.0~git20261002.cba3570 sends for `-t 8080:80,9000-9003 -u auto -T none -U 53`.
fn pastas() -> Vec<u8> {
    let none = "00".repeat(16);
    let rule = |interface: &str, rest: &str| format!("{none}{none}{interface}{rest}");
    let lo = format!("6c6f{}", "00".repeat(14));
    let table = |number: &str, name: &str, rules: &[String]| {
        let name = format!("{name}{}", "00".repeat(NAME_BYTES - name.len() / 2));
        format!("{number}{name}0000003f{:08x}{}", rules.len(), rules.concat())
    };
    let host = [
        rule(&none, "1f901f9000500601"),
        rule(&none, "2328232b23280601"),
        rule(&none, "00017fff00011107"),
        rule(&none, "ee48ffffee481107"),
    ];
    let hello = "626173696c3a7300 00000002 00000080 00000010";
    bytes_of(&format!(
        "{hello}{}{}00",
        table("01", "484f5354", &host),
        table("03", "53504c494345", &[rule(&lo, "0035003500351101")])
    ))
}

fn tables() -> Tables {
    let udp = |spec: &str| specs().rules(Protocol::Udp, &spec.parse().unwrap());
    Tables { host: [tcp("8080:80,9000-9003"), udp("auto")].concat(), guest: udp("53") }
}

#[test]
fn pesto_is_greeted_as_by_pasta() {
    assert_eq!(greeting(ALL, &tables()), pastas());
}

#[test]
fn a_message_is_read_when_it_is_whole() {
    let tables = tables();
    let message = update(&tables);
    assert!(message.len() <= MOST_BYTES);
    for end in 0..message.len() {
        assert_eq!(read(&message[..end]), Ok(None), "{end}");
    }
    assert_eq!(read(&message), Ok(Some(tables.clone())));
    assert_eq!(read(&[message.as_slice(), b"more"].concat()), Ok(Some(tables)));
    assert_eq!(read(&[END]), Ok(Some(Tables::default())));
}

#[test]
fn a_table_has_a_bound_and_comes_once() {
    let full = Tables { host: vec![tcp("1").remove(0); MOST_RULES], guest: tcp("1") };
    let full = Tables { guest: full.host.clone(), ..full };
    assert_eq!(update(&full).len(), MOST_BYTES);
    assert_eq!(read(&update(&full)), Ok(Some(full)));
    for refused in [
        &[HOST.0, 0, 0, 1, 0][..],
        &[HOST.0, 255, 255, 255, 255],
        &[HOST.0, 0, 0, 0, 0, HOST.0, 0, 0, 0, 0, END],
        &[2],
        &[4],
        b"basil:s\0",
    ] {
        assert!(read(refused).is_err(), "{refused:?}");
    }
}

#[test]
fn a_rule_without_a_meaning_is_refused() {
    let read = |change: &dyn Fn(&mut [u8])| {
        let mut message = update(&Tables { host: tcp("80-81"), guest: vec![] });
        change(&mut message[1 + COUNT_BYTES..][..RULE_BYTES]);
        read(&message)
    };
    assert!(read(&|_| {}).is_ok());
    let ports: [&[u8]; 4] =
        [&[0, 0], &[0, 82, 0, 81], &[0, 80, 0, 81, 0, 0], &[0, 80, 0, 81, 255, 255]];
    for ports in ports {
        assert!(
            read(&|rule| rule[48..][..ports.len()].copy_from_slice(ports)).is_err(),
            "{ports:?}"
        );
    }
    assert!(read(&|rule| rule[54] = 132).is_err(), "SCTP");
    assert!(read(&|rule| rule[55] = 9).is_err(), "flags");
    assert!(read(&|rule| rule[0] = 1).is_err(), "both versions of one address");
    assert!(read(&|rule| rule[32..48].fill(b'x')).is_err(), "a name without an end");
    assert!(read(&|rule| rule[32..34].copy_from_slice(b"..")).is_err());
    assert!(read(&|rule| rule[16] = 0x20).is_err(), "both versions to one address");
    let multicast = |rule: &mut [u8]| {
        (rule[0], rule[55]) = (0xff, 0);
    };
    assert!(read(&multicast).is_err());
}

#[test]
fn specifications_become_the_rules_of_pesto() {
    let ranges = |rules: Vec<Rule>| -> Vec<_> {
        rules.iter().map(|r| (*r.from.start(), *r.from.end(), r.to)).collect()
    };
    assert_eq!(ranges(tcp("22-80:32-90")), [(22, 80, 32)]);
    assert_eq!(ranges(tcp("20-30:120,~25,~29-40")), [(20, 24, 120), (26, 28, 126)]);
    assert_eq!(ranges(tcp("20-30,~1-20,~30")), [(21, 29, 21)]);
    assert_eq!(ranges(tcp("~1-8000")), [(8001, 32_767, 8001), (61_000, 65_535, 61_000)]);
    assert!(tcp("all").iter().all(|rule| rule.is_optional && !rule.is_auto));
    assert!(tcp("auto").iter().all(|rule| rule.is_optional && rule.is_auto));
    assert_eq!(tcp("auto").iter().flat_map(Rule::forwards).count(), 0);
    let to_itself: PortSpec = "127.0.0.1%eth0/5000-5001:192.0.2.5/6000".parse().unwrap();
    let rules = specs().rules(Protocol::Tcp, &to_itself);
    assert_eq!(rules[0].forwards().collect::<Vec<_>>(), to_itself.forwards());
    let v4 = Specs { capabilities: Capabilities { v6: false, ..ALL }, ..specs() };
    let rules = v4.rules(Protocol::Tcp, &"80".parse().unwrap());
    assert_eq!(rules[0].bind.address, Some(Ipv4Addr::UNSPECIFIED.into()));
}

#[test]
fn a_rule_needs_what_the_gateway_has_and_ports_of_its_own() {
    let check = |caps: Capabilities, spec: &str, others: &str| {
        tcp(spec).remove(0).check(caps, tcp(others).iter())
    };
    assert_eq!(check(ALL, "80", "81"), Ok(()));
    assert!(check(ALL, "80", "70-90:170").is_err());
    assert!(check(ALL, "127.0.0.1/80", "80").is_err());
    assert_eq!(check(ALL, "127.0.0.1/80", "127.0.0.2/80"), Ok(()));
    assert!(check(Capabilities { tcp: false, ..ALL }, "80", "81").is_err());
    assert!(check(Capabilities { v6: false, ..ALL }, "80", "81").is_err());
    assert!(check(Capabilities { v6: false, ..ALL }, "[::1]/80", "81").is_err());
    assert_eq!(check(Capabilities { v6: false, ..ALL }, "0.0.0.0/80", "81"), Ok(()));
    assert_eq!(check(ALL, "auto", "40000"), Ok(()));
    assert!(check(Capabilities { auto: false, ..ALL }, "auto", "40000").is_err());
    let mut bound = tcp("127.0.0.1/80").remove(0);
    bound.is_auto = true;
    assert!(bound.check(ALL, [].iter()).is_err());
}

proptest! {
    /// Arbitrary bytes do not panic; what is read is written as it was read.
    #[test]
    fn a_hostile_message_is_read_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 0..3 * RULE_BYTES),
        rules in 0u8..4,
        is_framed: bool,
    ) {
        if is_framed {
            bytes.splice(..0, [HOST.0, 0, 0, 0, rules]);
        }
        if let Ok(Some(tables)) = read(&bytes) {
            prop_assert_eq!(read(&update(&tables)), Ok(Some(tables)));
        }
    }
}
