use super::*;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::stat::Direction;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::UNIX_EPOCH;

fn ask(audit: &Audit, name: &str) {
    audit.asked(name, 1, true, "--allow *".into());
}

fn writer_to(fd: OwnedFd) -> (Audit, Writer) {
    let shared = Arc::<Shared>::default();
    let writer = Writer { shared: Arc::clone(&shared), file: File::from(fd) };
    (Audit { shared }, writer)
}

/// A connection of 10.0.0.2 to `example.org`.
fn flow() -> FlowStat {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    FlowStat {
        id: Some(1),
        protocol: Protocol::Tcp,
        direction: Direction::Out,
        guest: at("10.0.0.2:1000"),
        peer: at("198.18.0.1:443"),
        host: at("192.0.2.7:443"),
        name: Some("example.org".into()),
        rule: Some("--allow example.org".into()),
        state: "open",
        bytes_out: 3,
        bytes_in: 4,
        age: Duration::from_millis(1500),
        idle: Duration::ZERO,
        tcp: None,
        host_tcp: None,
    }
}

/// The same before it begins.
fn new_flow() -> NewFlow<'static> {
    let FlowStat { protocol, guest, peer, host, .. } = flow();
    NewFlow {
        protocol,
        from: guest,
        to: peer,
        leads_to: host,
        name: Some("example.org"),
        names: &[],
        claimed_names: &[],
        is_host: false,
        host_network: None,
    }
}

fn quiet() -> Log {
    let log = Log::to_stderr("t", true);
    log.use_system();
    log
}

#[test]
fn times_are_those_of_rfc_3339() {
    let at = |seconds, nanos| document::rfc3339(UNIX_EPOCH + Duration::new(seconds, nanos));
    assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000Z");
    assert_eq!(at(951_782_400, 1000), "2000-02-29T00:00:00.000001Z");
    assert_eq!(at(1_709_251_199, 999_999_999), "2024-02-29T23:59:59.999999Z");
    assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
    assert_eq!(document::rfc3339(UNIX_EPOCH - Duration::from_secs(5)), at(0, 0));
}

#[test]
fn lines_are_json_whatever_a_guest_asks_for() {
    let (mut reader, to) = io::pipe().unwrap();
    let (audit, writer) = writer_to(to.into());
    let written = writer.start(&quiet()).unwrap();
    ask(&audit, "a\"b\n\u{1b}\\.example");
    assert_eq!(written.finish(), None);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().count(), 1);
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line["name"], "a\"b\n\u{1b}\\.example");
    assert_eq!((&line["event"], &line["verdict"]), (&"question".into(), &"allow".into()));
    assert!(line["rule"] == "--allow *" && line["time"].as_str().unwrap().ends_with('Z'));
}

#[test]
fn a_full_disk_is_counted_and_the_rest_goes_on() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (audit, writer) = writer_to(full.into());
    let written = writer.start(&quiet()).unwrap();
    (0..3).for_each(|n| ask(&audit, &format!("n{n}.example")));
    let said = written.finish().unwrap();
    assert_eq!(said, "the audit lacks 3 lines: No space left on device (os error 28)");
}

#[test]
fn a_reader_that_does_not_read_delays_neither_the_relay_nor_the_end_for_long() {
    let (_reader, to) = io::pipe().unwrap();
    let (audit, writer) = writer_to(to.into());
    let written = writer.start(&quiet()).unwrap();
    let (begun, name) = (Instant::now(), "x".repeat(200));
    for _ in 0..2 * MOST_WAITING {
        ask(&audit, &name);
    }
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let said = written.finish().unwrap();
    assert!(begun.elapsed() < LONGEST_END + Duration::from_secs(1));
    assert!(
        said.starts_with("the audit lacks at least ")
            && said.contains(" lines: its reader does not read"),
        "{said}"
    );
}

#[test]
fn questions_leave_places_for_flows_and_the_receipt() {
    let shared = Arc::<Shared>::default();
    let audit = Audit { shared: Arc::clone(&shared) };
    let waiting = || {
        let queue = shared.lock();
        (queue.lines.len(), queue.lost)
    };
    (0..=MOST_REFUSALS).for_each(|_| ask(&audit, "n.example"));
    assert_eq!(waiting(), (MOST_REFUSALS, 1));
    let rest = MOST_WAITING - MOST_REFUSALS;
    (0..=rest).for_each(|_| shared.push(Event::Begin(document::Flow::of(&flow(), 1))));
    assert_eq!(waiting(), (MOST_WAITING, 2));
    (0..=MOST_RECEIPTS).for_each(|_| shared.push(Event::Total(receipt::Stages::default())));
    assert_eq!(waiting(), (MOST_WAITING + MOST_RECEIPTS, 3));
}

#[test]
fn a_reader_that_is_gone_is_counted() {
    let (reader, to) = io::pipe().unwrap();
    drop(reader);
    let (audit, writer) = writer_to(to.into());
    let written = writer.start(&quiet()).unwrap();
    ask(&audit, "a.example");
    assert_eq!(written.finish().unwrap(), "the audit lacks 1 line: Broken pipe (os error 32)");
}

#[test]
fn a_target_is_a_file_or_a_descriptor_beyond_the_standard_streams() {
    assert_eq!("fd:3".parse(), Ok(Target::Fd(3)));
    assert_eq!("audit.jsonl".parse(), Ok(Target::File("audit.jsonl".into())));
    for wrong in ["fd:", "fd:2", "fd:x", "fd:-1", "fd:99999999999"] {
        assert!(wrong.parse::<Target>().is_err(), "{wrong}");
    }
}

#[test]
fn the_lines_of_a_flow_have_one_number_and_the_rule_that_allowed_it() {
    let (mut reader, to) = io::pipe().unwrap();
    let (audit, writer) = writer_to(to.into());
    let written = writer.start(&quiet()).unwrap();
    let (new, flow) = (new_flow(), flow());
    audit.began(&flow);
    audit.ended(&flow);
    audit.ended(&FlowStat { id: None, ..flow });
    audit.refused(&new, Refusal::TimedOut, None);
    audit.refused(&new, Refusal::Policy, Some("--deny *".into()));
    assert_eq!(written.finish(), None);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [begin, end, fail, refuse] = lines.as_slice() else { panic!("{text}") };
    assert_eq!((&begin["event"], &end["event"]), (&"begin".into(), &"end".into()));
    assert!(begin["id"] == 1 && end["id"] == 1 && begin["bytes_in"].is_null());
    assert!(end["bytes_out"] == 3 && end["bytes_in"] == 4 && end["seconds"] == 1.5);
    for line in [begin, end] {
        assert_eq!(line["rule"], "--allow example.org");
        assert_eq!(line["name"], "example.org");
        assert_eq!((&line["address"], &line["port"]), (&"192.0.2.7".into(), &443.into()));
        assert_eq!(line["used_address"], "198.18.0.1");
    }
    assert_eq!((&fail["event"], &fail["reason"]), (&"fail".into(), &"timed_out".into()));
    assert_eq!((&refuse["event"], &refuse["rule"]), (&"refuse".into(), &"--deny *".into()));
    assert!(refuse["address"].is_null(), "the address of a name's own is not the real one");
}
