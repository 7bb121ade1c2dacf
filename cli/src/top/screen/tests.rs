use super::*;
use crate::top::model::tests::sample;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};
use std::time::Instant;

fn flow(n: u64, host: &str, bytes: u64) -> Value {
    json!({"protocol": if n == 3 { "udp" } else { "tcp" }, "direction": "out", "state": "open",
           "guest": format!("10.0.0.2:{}", 40_000 + n), "peer": host, "host": host,
           "bytes_out": bytes, "bytes_in": bytes * 20, "recv_queue_bytes": 0,
           "send_queue_bytes": if n == 3 { json!(null) } else { json!(65_536 * n) },
           "host_rtt_us": if n == 3 { json!(null) } else { json!(700 * n * n * n) },
           "retransmits": 0, "host_retransmits": n / 2, "age_us": 3_723_000_000u64})
}

fn document(bytes: u64, drops: u64) -> Value {
    json!({
        "name": "curl", "pid": 4243, "addresses": ["10.0.0.1/32"],
        "flows": [
            flow(1, "93.184.216.34:443", bytes),
            flow(2, "[2001:db8:1234:5678:9abc:def0:1234:5678]:443", 30),
            flow(3, "169.254.1.1:53", 60),
        ],
        "drops": [
            {"reason": "ip_destination", "layer": "ip", "packets": 2, "sentence": "The destination is not local."},
            {"reason": "tcp_paws", "layer": "tcp", "packets": drops,
             "sentence": "The time stamp is older than the last one that was accepted (RFC 7323 section 5)."}],
        "device": {"name": "eth0", "tx_bytes": bytes * 20, "rx_bytes": bytes},
        "counters": {"tx_packets": bytes, "rx_packets": 0, "tcp_retransmit_bytes": 0},
        "pool": {"mapped_bytes": 4 << 20, "budget_bytes": 256 << 20},
        "gateway": {"guest": {"pid": 4242}, "uptime_us": 93_784_000_000u64,
                    "refusals": [{"reason": "policy", "count": 7, "sentence": "The policy denies the flow."}]},
        "ledger": null,
    })
}

/// Of a gateway after two readings, one second apart.
fn app() -> App {
    let mut app = App::default();
    let now = Instant::now();
    app.update(vec![sample(now, 0, document(0, 1))]);
    app.update(vec![sample(now, 1, document(125_000, 13))]);
    app
}

fn drawn(app: &mut App, columns: u16, lines: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
    terminal.draw(|frame| draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer();
    let lines = buffer.content.chunks(usize::from(columns)).map(|line| {
        let text: String = line.iter().map(|cell| cell.symbol()).collect();
        text.trim_end().to_owned() + "\n"
    });
    lines.collect()
}

fn press(app: &mut App, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\u{1b}' => KeyCode::Esc,
            '\u{8}' => KeyCode::Backspace,
            key => KeyCode::Char(key),
        };
        assert!(app.key(KeyEvent::new(code, KeyModifiers::NONE)).is_continue());
    }
}

#[test]
fn eighty_columns_and_twenty_four_lines_show_all() {
    let expected = "\
fulmar top: curl (process 4242), gateway 4243                           up 1d 2h
out 125kB/s  in 2.5MB/s  125k packets/s  flows: 2 tcp, 1 udp          CPU 25.0 %
dropped 12/s  resent 0B/s  buffers 4.00 MiB of 256.00 MiB
NET  STATE  GUEST           HOST                OUT/s*  IN/s*    RTT QUEUE  RETR
tcp  open   10.0.0.2:40001  93.184.216.34:443     125k   2.5M  700us   66k     0
tcp  open   10.0.0.2:40002  [2001:~34:5678]:443      0      0  5.6ms  131k     1
udp  open   10.0.0.2:40003  169.254.1.1:53           0      0      -     0     1









 dropped and not carried ───────────────────────────────────────────────────────
    13     12/s tcp: tcp_paws  The time stamp is older than the last one that wa
     7      0/s gateway: policy  The policy denies the flow.
     2      0/s ip: ip_destination  The destination is not local.



q quit  h help  p pause  s sort: rate  / filter
";
    assert_eq!(drawn(&mut app(), 80, 24), expected);
}

#[test]
fn a_wide_terminal_has_room_for_more_columns_and_whole_addresses() {
    let text = drawn(&mut app(), 140, 30);
    let expected = "[2001:db8:1234:5678:9abc:def0:1234:5678]:443";
    assert!(text.contains(expected) && text.contains("1:02:03"), "{text}");
}

#[test]
fn a_screen_of_every_size_is_drawn() {
    let mut app = app();
    for columns in 1..=90 {
        for lines in [1, 2, 5, 7, 8, 9, 17, 18, 19, 24, 60] {
            let text = drawn(&mut app, columns, lines);
            assert!(columns < 8 || !text.trim().is_empty(), "{columns}x{lines}");
        }
    }
    let small = drawn(&mut app, 20, 5);
    assert!(small.contains("20x5") && small.contains("40x8"), "{small}");
    press(&mut app, "h");
    assert!(drawn(&mut app, 40, 8).contains("quit"));
}

#[test]
fn nothing_to_show_is_said() {
    let mut app = App::with(Sort::Rate, None);
    app.notice = "no stack runs".into();
    assert!(drawn(&mut app, 80, 24).contains("no stack runs"));
    press(&mut app, "\tsSr/tcp\n");
    assert!(drawn(&mut app, 80, 24).contains("filter: tcp"));
}

#[test]
fn keys_sort_and_reverse() {
    let mut app = app();
    let first = |app: &App| app.rows()[0].near.clone();
    assert_eq!(first(&app), "10.0.0.2:40001", "the fastest");
    press(&mut app, "r");
    assert_ne!(first(&app), "10.0.0.2:40001");
    press(&mut app, "rssS");
    assert_eq!(app.sort, Sort::Bytes);
    press(&mut app, "s");
    assert_eq!(first(&app), "10.0.0.2:40002", "the longest round-trip time");
    assert!(drawn(&mut app, 80, 24).contains("RTT*"));
}

#[test]
fn a_filter_is_typed_corrected_and_taken_back() {
    let mut app = app();
    press(&mut app, "/dport = 5x\n");
    assert!(drawn(&mut app, 80, 24).contains("invalid filter"));
    press(&mut app, "\u{8}3\n");
    let text = drawn(&mut app, 80, 24);
    assert!(text.contains("169.254.1.1:53") && !text.contains("93.184"), "{text}");
    press(&mut app, "/xyz\u{1b}");
    assert_eq!(app.rows().len(), 1, "Esc leaves the filter as it was");
    let keys = "\u{8}".repeat("dport = 53".len());
    press(&mut app, &format!("/{keys}\n"));
    assert_eq!(app.rows().len(), 3);
}

#[test]
fn a_paused_screen_stays_and_one_whose_stack_has_ended_says_so() {
    let mut app = app();
    press(&mut app, "p");
    let paused = drawn(&mut app, 80, 24);
    assert!(paused.contains("PAUSED"));
    app.update(vec![sample(Instant::now(), 9, document(9_000_000, 500))]);
    assert_eq!(drawn(&mut app, 80, 24), paused);
    press(&mut app, "p");
    app.update(vec![]);
    let text = drawn(&mut app, 80, 24);
    assert!(text.contains("ENDED") && text.contains("93.184.216.34:443"), "{text}");
    // Another one can be looked at, and this one is gone then.
    let mut other = document(0, 0);
    other["pid"] = json!(5000);
    app.update(vec![sample(Instant::now(), 0, other)]);
    assert_eq!(app.count(), 2);
    press(&mut app, "\t");
    app.update(vec![]);
    assert_eq!(app.count(), 1);
}

/// Of two gateways and a stack, after two readings.
fn app_of_three() -> App {
    let at = |second, bytes| {
        let mut named = document(bytes, 1);
        named["pid"] = json!(5000);
        named["name"] = json!("a-program-with-a-long-name");
        named["gateway"]["guest"] = json!({"pid": null, "path": "/run/netns/blue"});
        let stack = json!({"name": "nc", "pid": 6000, "addresses": ["10.77.0.2/24"],
                           "device": {"name": "tap:fulmar0", "tx_bytes": bytes, "rx_bytes": 0}});
        let all = [document(2 * bytes, 1), named, stack];
        all.map(|d| sample(now(), second, d)).to_vec()
    };
    let mut app = App::default();
    app.update(at(0, 0));
    app.update(at(1, 1000));
    app
}

/// One instant for all readings of a test.
fn now() -> Instant {
    static NOW: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *NOW.get_or_init(Instant::now)
}

#[test]
fn several_stacks_begin_with_a_list_and_one_stack_does_not() {
    let mut app = app_of_three();
    let expected = "\
fulmar top: 3 stacks and gateways

NAME               ATTENDS TO                         FLOWS  OUT/s   IN/s    CPU
curl               process 4242                           3   2.0k    40k  25.0%
a-prog~a-long-name /run/netns/blue                        3   1.0k    20k  25.0%
nc                 tap:fulmar0 10.77.0.2/24               0   1.0k      0  25.0%




Up Down, Enter choose  p pause  q quit
";
    assert_eq!(drawn(&mut app, 80, 11), expected);
    let _ = app.key(KeyEvent::new(KeyCode::Down, KeyModifiers::NONE));
    press(&mut app, "\n");
    let text = drawn(&mut app, 80, 24);
    assert!(text.contains("a-program-with-a-long-name") && text.contains("l list"), "{text}");
    press(&mut app, "l");
    assert_eq!((&app.mode, app.position()), (&Mode::List, 1));
    assert_eq!(self::app().mode, Mode::Normal);
}

#[test]
fn an_ended_stack_leaves_the_list() {
    let mut app = app_of_three();
    app.update(vec![sample(now(), 2, document(0, 1))]);
    assert_eq!((app.count(), app.position()), (1, 0));
    app.update(vec![]);
    app.notice = "none runs".into();
    assert!(drawn(&mut app, 80, 24).contains("none runs"));
    for columns in 1..=90 {
        let _ = drawn(&mut app_of_three(), columns, 9);
    }
}

#[test]
fn rows_scroll_and_the_last_ones_fill_the_screen() {
    let mut app = App::default();
    let flows: Vec<Value> = (0..100).map(|n| flow(n, "192.0.2.1:1", 0)).collect();
    app.update(vec![sample(Instant::now(), 0, json!({"gateway": {}, "flows": flows}))]);
    for _ in 0..200 {
        let _ = app.key(KeyEvent::new(KeyCode::Down, KeyModifiers::NONE));
    }
    assert_eq!(app.scroll_to_fit(20), 80);
    let _ = app.key(KeyEvent::new(KeyCode::PageUp, KeyModifiers::NONE));
    assert_eq!((app.scroll_to_fit(20), app.chosen()), (80, 89), "it still is on the screen");
    for _ in 0..2 {
        let _ = app.key(KeyEvent::new(KeyCode::PageUp, KeyModifiers::NONE));
    }
    assert_eq!(app.scroll_to_fit(20), 69);
    let _ = app.key(KeyEvent::new(KeyCode::Home, KeyModifiers::NONE));
    assert_eq!(app.scroll_to_fit(20), 0);
}

#[test]
fn enter_shows_all_figures_of_the_chosen_row_until_it_has_ended() {
    let connection = json!({
        "protocol": "tcp", "state": "ESTABLISHED", "local": "10.0.0.2:9000", "remote": "192.0.2.1:80",
        "cwnd_bytes": 14_480, "ssthresh_bytes": null, "ecn": true,
        "tcp_info": {"reorderings": 3, "model": {"phase": "cruise"}},
    });
    let with = |sockets: Value| {
        sample(Instant::now(), 0, json!({"name": "x", "pid": 1, "sockets": sockets}))
    };
    let mut app = App::default();
    app.update(vec![with(json!([connection]))]);
    press(&mut app, "\n");
    let screen = drawn(&mut app, 160, 40);
    for figure in [
        "tcp  10.0.0.2:9000  192.0.2.1:80",
        "cwnd_bytes 14480",
        "ssthresh_bytes -",
        "ecn yes",
        "reorderings 3",
        "model.phase cruise",
        "Esc back",
    ] {
        assert!(screen.contains(figure), "{figure}:\n{screen}");
    }
    app.update(vec![with(json!([]))]);
    assert!(drawn(&mut app, 80, 24).contains("The flow has ended"));
    press(&mut app, "\n\n");
    assert_eq!(app.mode, Mode::Normal, "there is no row to open");
}

#[test]
fn q_and_control_c_quit() {
    let mut app = app();
    let q = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert!(app.key(q).is_break() && app.key(control_c).is_break());
    press(&mut app, "/q");
    assert!(app.key(control_c).is_break(), "also while a filter is typed");
}

#[test]
fn numbers_fit_their_columns() {
    for (n, text) in [
        (0.0, "0"),
        (999.0, "999"),
        (999.6, "1.0k"),
        (1234.0, "1.2k"),
        (9960.0, "10k"),
        (34_000_000.0, "34M"),
        (1.5e9, "1.5G"),
        (2e12, "2.0T"),
    ] {
        assert_eq!(short(n), text);
    }
    for (us, text) in [(12.0, "12us"), (1200.0, "1.2ms"), (120_000.0, "120ms"), (2e6, "2.0s")] {
        assert_eq!(rtt(us), text);
    }
    assert_eq!(shortened("10.0.0.2:40001", 15), "10.0.0.2:40001");
    assert_eq!(shortened("[2001:db8:1234:5678::1]:443", 15), "[2001~8::1]:443");
    for columns in 1..40 {
        assert!(shortened("[2001:db8:1234:5678::1]:443", columns).chars().count() <= columns);
    }
}
