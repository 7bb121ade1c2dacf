//! The tables against lines that netperf 2.7.1 printed for the same numbers.

use super::*;
use crate::netperf::client::{Outcome, Side};
use crate::netperf::meter::{METHOD_PROC_STAT, Usage};
use crate::netperf::socket::Buffers;
use crate::netperf::transfer::Tally;

fn side(send: usize, recv: usize) -> Side {
    Side {
        buffers: (Buffers { send, recv }, Buffers { send, recv }),
        send_bytes: 16_384,
        cpu_method: METHOD_PROC_STAT,
        cpus: 2,
        usage: Usage { cpu_percent: 99.5, ..Usage::default() },
        ..Side::default()
    }
}

fn summary(rate: f64) -> Summary {
    let last = Outcome {
        elapsed: 1.0,
        units: rate,
        local: side(16_384, 131_072),
        remote: side(16_384, 131_072),
        segment_bytes: Some(65_483),
    };
    Summary {
        last,
        runs: 1,
        elapsed: 1.0,
        rate,
        cpu_percent: (99.5, 99.5),
        service_demand: (0.584, 0.584),
        widths: [f64::INFINITY; 3],
        is_sure: true,
    }
}

fn text(test: Test, cpu: bool, style: Style, summary: &Summary) -> String {
    let options =
        TestOptions { measures_local: cpu, measures_remote: cpu, ..TestOptions::new(test) };
    Shown { options: &options, goal: &Goal::once(), summary, style }.text()
}

const PLAIN: Style = Style { unit: Unit::Bits('m'), has_headings: false, verbosity: 1 };
const RATE: Style = Style { unit: Unit::Transactions, ..PLAIN };

fn last_line(text: &str) -> &str {
    text.trim_end_matches('\n').lines().last().unwrap_or_default()
}

#[test]
fn lines_of_streams_are_netperfs() {
    let plain = text(Test::TcpStream, false, PLAIN, &summary(26_196.99e6 / 8.0));
    assert_eq!(plain, "131072  16384  16384    1.00     26196.99   \n");
    let cpu = text(Test::TcpStream, true, PLAIN, &summary(27_916.46e6 / 8.0));
    assert_eq!(
        cpu,
        "131072  16384  16384    1.00       27916.46   99.50    99.50    0.584   0.584  \n"
    );
}

#[test]
fn lines_of_transactions_are_netperfs() {
    let plain = text(Test::TcpRr, false, RATE, &summary(119_725.12));
    assert_eq!(plain, "16384  131072 1        1       1.00     119725.12   \n16384  131072\n");
    let mut measured = summary(93_481.55);
    measured.cpu_percent = (100.0, 100.0);
    measured.service_demand = (21.395, 21.395);
    assert_eq!(
        text(Test::TcpRr, true, RATE, &measured),
        "16384  131072 1       1      1.00    93481.55  100.00 100.00 21.395  21.395 \n\
         16384  131072\n"
    );
}

#[test]
fn lines_of_datagrams_are_netperfs() {
    let mut s = summary(43_009.01e6 / 8.0);
    s.last.local.buffers.0.send = 212_992;
    s.last.remote.buffers.0.recv = 212_992;
    s.last.local.send_bytes = 65_507;
    s.last.local.tally =
        Tally { bytes_sent: 5_729_513_750, send_calls: 87_470, ..Tally::default() };
    s.last.remote.tally = Tally { recv_calls: 82_075, ..Tally::default() };
    assert_eq!(
        text(Test::UdpStream, false, PLAIN, &s),
        "212992   65507   1.00        87470      0    45836.11\n\
         212992           1.00        82075           43009.01\n\n"
    );
}

#[test]
fn one_number_is_throughput_or_the_service_demand_that_was_measured() {
    let style = Style { verbosity: 0, ..PLAIN };
    let s = summary(28_718.58e6 / 8.0);
    assert_eq!(text(Test::TcpStream, false, style, &s), "28718.58 \n");
    assert_eq!(text(Test::TcpStream, true, style, &s), " 0.584 S \n");
}

#[test]
fn headings_stand_over_their_columns() {
    let style = Style { has_headings: true, ..PLAIN };
    let stream = text(Test::TcpMaerts, true, style, &summary(1e9));
    assert!(stream.contains("Elapsed              Recv     Send     Recv    Send\n"), "{stream}");
    assert!(stream.contains("secs.    10^6bits/s  % S      % S      us/KB   us/KB\n\n"));
    let rr = text(Test::TcpRr, true, Style { has_headings: true, ..RATE }, &summary(1e4));
    assert!(rr.contains("Elapsed Trans.   CPU    CPU    S.dem   S.dem\n"), "{rr}");
    assert!(rr.contains("Time    Rate     local  remote local   remote\n"), "{rr}");
    let udp = text(Test::UdpStream, true, style, &summary(1e9));
    assert!(udp.contains("10^6bits/sec % SS     us/KB\n\n"), "{udp}");
}

#[test]
fn transactions_can_be_shown_as_throughput_of_both_messages() {
    let kilobits = Style { unit: Unit::Bits('k'), ..PLAIN };
    let line = text(Test::TcpRr, false, kilobits, &summary(1000.0));
    assert!(line.contains("  16.00   \n"), "{line}");
}

#[test]
fn details_show_calls_and_segment_size() {
    let mut s = summary(1e9);
    s.last.local.tally =
        Tally { bytes_sent: 3_222_634_496, send_calls: 196_694, ..Tally::default() };
    s.last.remote.tally =
        Tally { bytes_received: 3_222_634_496, recv_calls: 56_646, ..Tally::default() };
    let style = Style { verbosity: 2, ..PLAIN };
    let stream = text(Test::TcpStream, false, style, &s);
    let line = "    8       8      0       0 3222634496  16384.00    196694   56890.77  56646\n";
    assert!(stream.contains(line), "{stream}");
    assert!(stream.contains("\nSize (bytes)\n 65483\n"), "{stream}");
    let rr = text(Test::TcpRr, false, Style { verbosity: 2, ..RATE }, &summary(41_447.2));
    assert_eq!(last_line(&rr), "    8      0       0      0   24.127   41447.200 0.332     0.332 ");
}

#[test]
fn a_goal_that_was_missed_is_told_before_the_table() {
    let mut s = summary(1e9);
    s.is_sure = false;
    s.widths = [0.115_59, 0.295_38, 0.295_38];
    let shown = text(Test::TcpStream, false, PLAIN, &s);
    assert!(shown.starts_with("!!! WARNING\n"));
    assert!(shown.contains("Throughput      : 11.559%\n"), "{shown}");
}

#[test]
fn the_banner_names_test_peer_and_conditions() {
    let mut options = TestOptions::new(Test::TcpRr);
    options.local.tuning.nodelay = true;
    let goal = Goal::from_options(None, Some((95, Some(1.0)))).expect("a goal");
    assert_eq!(
        banner(&options, &goal, "fulmar", "10.77.0.1", true),
        "MIGRATED TCP REQUEST/RESPONSE TEST from 0.0.0.0 (0.0.0.0) port 0 AF_INET to 10.77.0.1 () \
         port 0 AF_INET : +/-0.500% @ 95% conf.  : nodelay : first burst 0 : fulmar"
    );
}

#[test]
fn every_default_key_has_a_value_and_no_key_stands_twice() {
    let options = TestOptions::new(Test::TcpRr);
    let s = summary(1e4);
    let keys = Shown { options: &options, goal: &Goal::once(), summary: &s, style: RATE }.keys();
    for name in DEFAULT_KEYS {
        assert!(keys.iter().any(|(k, _)| *k == name), "{name}");
    }
    for (i, (name, _)) in keys.iter().enumerate() {
        assert!(keys.iter().skip(i + 1).all(|(other, _)| other != name), "{name} twice");
    }
}

#[test]
fn units_are_those_of_f() {
    let mega = 1_048_576.0;
    for (letter, name, value) in
        [("M", "MBytes", 1.0), ("k", "10^3bits", mega * 8.0 / 1e3), ("B", "Bytes", mega)]
    {
        let unit = Unit::from_letter(letter).expect("a unit");
        assert_eq!(unit.name(), name);
        assert!((unit.of(mega) - value).abs() < 1e-6);
    }
    assert!(Unit::from_letter("z").is_err());
}

#[test]
fn banner_and_details_say_by_which_calls_bytes_were_sent_and_received() {
    let s = summary(1e9);
    let style = Style { verbosity: 2, ..RATE };
    let shown = |given, posted| {
        let mut options = TestOptions::new(Test::TcpStream);
        (options.local_given, options.remote_posted) = (given, posted);
        let table = Shown { options: &options, goal: &Goal::once(), summary: &s, style }.text();
        (banner(&options, &Goal::once(), "", "there", true), table)
    };
    let (line, table) = shown(false, false);
    assert!(!line.contains("reference") && !line.contains("posted"), "{line}");
    assert!(table.ends_with("\nSent by copy, received by copy\n"), "{table}");
    let (line, table) = shown(true, true);
    assert!(line.contains(" : sent by reference : received into posted buffers"), "{line}");
    let ways = "\nSent by reference (-a), received into posted buffers (-A)\n";
    assert!(table.ends_with(ways), "{table}");
}
