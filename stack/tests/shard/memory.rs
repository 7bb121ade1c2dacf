//! Memory under attack: peers that take nothing, or never end, do not stop a shard from serving others.

use fulmar::internals::drivers::link::{Impairments, LinkConfig, sim_pair};
use fulmar_stack::base::{Counter, DropReason, Duration, Instant, SlotId};
use fulmar_stack::mbuf::{PoolConfig, Purpose};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};
use fulmar_stack::socket::{Shutdown, SocketError};
use fulmar_stack::udp::BindOptions;
use fulmar_testbed::slow_peers::{ANSWER, ANSWERING, CLOSED, MS, Server, Service, at};
use fulmar_testbed::stations;
use fulmar_testbed::tamper::Tampered;
use fulmar_testbed::world::World;
use std::task::Poll;

/// A port whose clients offer no window, another one that answers.
fn world() -> Server {
    let mut w = Server::new();
    w.close_windows();
    w
}

fn udp_echo(w: &mut Server, bytes: usize) -> bool {
    let there = w.world.shards[0].udp().bind(at(0, 0), BindOptions::default()).unwrap();
    let to = w.world.shards[0].addresses(there).unwrap().0.unwrap();
    let here = w.world.shards[1].udp().open(to).unwrap();
    w.world.shards[1].udp().send(w.world.now, here, &[&vec![7; bytes]], None).unwrap();
    w.pass(10 * MS);
    let Ok(Poll::Ready(d)) = w.world.shards[0].udp().receive(there) else { return false };
    let payload = d.payload.to_vec();
    w.world.shards[0].free(d.payload);
    let sent =
        w.world.shards[0].udp().send_step(w.world.now, there, &[&payload], Some(d.src)).unwrap();
    let is_sent = matches!(sent, Poll::Ready(_));
    w.pass(10 * MS);
    let Ok(Poll::Ready(d)) = w.world.shards[1].udp().receive(here) else { return false };
    let is_whole = d.payload.len() == bytes;
    w.world.shards[1].free(d.payload);
    is_sent && is_whole
}

#[test]
fn beside_4000_peers_with_a_closed_window_new_connections_are_served_whole_within_a_second() {
    let mut w = Server::beside_closed_windows(4000, 1);
    assert!(w.used() >= 60 << 20, "the writers have filled what they may: {}", w.used());
    assert_eq!(w.ask(ANSWERING, 100, ANSWER, Duration::from_secs(1)), 100);
    assert!(udp_echo(&mut w, 5) && udp_echo(&mut w, 20_000));
    // No connection was reset for that.
    assert_eq!(w.count(Counter::TcpStalledReset), 0);
}

#[test]
fn beside_150_clients_who_pause_new_connections_are_served_whole_within_a_second() {
    let mut w = world();
    w.serve(82, Service::Flood);
    let paused = w.connect_many(82, 150);
    w.pass(Duration::from_secs(2));
    assert!(w.used() >= 60 << 20, "the writers have filled what they may: {}", w.used());
    assert_eq!(w.ask(ANSWERING, 100, ANSWER, Duration::from_secs(1)), 100);
    assert!(udp_echo(&mut w, 5) && udp_echo(&mut w, 20_000));
    // Who goes on to read finds what was sent, and more.
    for id in paused {
        let mut bytes = 0;
        for _ in 0..50 {
            while let Ok(Poll::Ready(chain)) = w.world.shards[1].tcp_take(id, 1 << 20) {
                bytes += chain.len();
                w.world.shards[1].tcp_read_done(w.world.now, id, chain);
            }
            w.pass(MS);
        }
        assert!(bytes > 1 << 20, "{bytes}");
    }
}

#[test]
fn a_thousand_peers_with_a_closed_window_cost_their_probes_and_nothing_else() {
    let mut w = world();
    w.connect_many(CLOSED, 1000);
    w.pass(Duration::from_secs(60));
    let probes = w.count(Counter::TcpWindowProbes);
    (w.program.steps, w.program.wakes) = (0, 0);
    w.pass(Duration::from_secs(600));
    let probes = w.count(Counter::TcpWindowProbes) - probes;
    assert!((9_000..=13_000).contains(&probes), "one a minute and connection: {probes}");
    assert_eq!(w.program.wakes, 0, "a writer was woken for nothing");
    assert!(
        w.program.steps <= 2 * probes + 10,
        "{} steps for {probes} probes and answers",
        w.program.steps
    );
    assert_eq!(w.count(Counter::TcpStalledReset), 0, "no writer that could use it lacked memory");
}

#[test]
fn beside_1300_orphans_new_connections_are_served_whole_within_a_second() {
    let mut w = world();
    w.serve(83, Service::Farewell(100_000));
    w.no_window(83);
    w.connect_many(83, 1300);
    w.pass(Duration::from_secs(2));
    assert!(w.used() >= 60 << 20);
    assert_eq!(w.ask(ANSWERING, 100, ANSWER, Duration::from_secs(1)), 100);
    assert!(udp_echo(&mut w, 20_000));
    // An orphan is not waited for without end.
    w.pass(Duration::from_secs(240));
    assert!(w.used() < 20 << 20, "{}", w.used());
}

/// As [`Server::connect_many`]. The first one asks for the server's Ethernet address, for which few packets may wait.
fn connect_in_order(w: &mut Server, port: u16, n: usize) -> Vec<SlotId> {
    let mut clients = w.connect_many(port, 1);
    clients.extend(w.connect_many(port, n - 1));
    clients
}

/// How many of these clients' connections the server has reset since this was asked last.
fn reset_of(w: &mut Server, clients: &[SlotId]) -> usize {
    let is_reset =
        |id: &&SlotId| w.world.shards[1].take_error(**id) == Ok(Some(SocketError::ConnectionReset));
    clients.iter().filter(is_reset).count()
}

#[test]
fn where_memory_is_scarce_orphans_go_after_ten_seconds_and_stalled_connections_after_a_minute() {
    let mut w = Server::with(|c| {
        c.pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) };
        // Who is given up is given up for memory.
        c.tcp.user_timeout = Duration::from_secs(100_000);
    });
    w.close_windows();
    w.serve(83, Service::Farewell(3_000));
    w.no_window(83);
    let groups = [(83, 10), (CLOSED, 60), (83, 10), (CLOSED, 200)];
    let groups = groups.map(|(port, n)| {
        let clients = w.connect_many(port, n);
        // The first two are five seconds older.
        w.pass(Duration::from_millis(if n == 60 { 5000 } else { 0 }));
        clients
    });
    let mut reset_after = |time| {
        w.pass(Duration::from_secs(time));
        // Their peer takes what they write, and they want more than their minimum.
        assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(1)), 20);
        groups.each_ref().map(|clients| reset_of(&mut w, clients))
    };
    assert_eq!(reset_after(3), [0, 0, 0, 0]);
    assert_eq!(reset_after(1), [10, 0, 0, 0], "orphans after ten seconds");
    assert_eq!(reset_after(4), [0, 0, 10, 0]);
    assert_eq!(reset_after(40), [0, 0, 0, 0]);
    let after_a_minute = reset_after(6);
    assert!(after_a_minute[1] > 0, "{after_a_minute:?}");
    assert_eq!(after_a_minute[3], 0, "the longest without progress first");
    assert_eq!(w.count(Counter::TcpOrphansReset), 20);
    assert_eq!(w.count(Counter::TcpStalledReset), after_a_minute[1] as u64);
    let share = w.world.shards[0].pool().share_of(Purpose::Send);
    let half = share.limit * 7 / 16..share.limit * 9 / 16;
    assert!(half.contains(&share.used), "until half is free, which others take: {share:?}");
}

#[test]
fn of_too_many_orphans_the_longest_without_progress_are_reset() {
    let mut w = Server::with(|c| c.max_orphans = 160);
    w.serve(83, Service::Farewell(10_000));
    w.no_window(83);
    let clients = connect_in_order(&mut w, 83, 500);
    w.pass(Duration::from_secs(1));
    let reset = w.count(Counter::TcpOrphansReset);
    assert!((340..=350).contains(&reset), "{reset}");
    assert_eq!(w.count(Counter::TcpResetsOut), reset, "each peer gets a reset");
    assert_eq!(w.world.shards[0].stat().connections() as u64, 500 - reset);
    // They came in steps of two hundred, after the first.
    assert_eq!(reset_of(&mut w, &clients[401..]), 0);
}

#[test]
fn beside_peers_that_fall_silent_new_connections_are_served_and_the_silent_ones_given_up() {
    let mut w = world();
    w.serve(84, Service::Flood);
    w.connect_many(84, 300);
    w.behaviour.lock().unwrap().mute.insert(84);
    w.pass(Duration::from_secs(3));
    assert_eq!(w.ask(ANSWERING, 100, ANSWER, Duration::from_secs(1)), 100);
    let resets = w.count(Counter::TcpResetsOut);
    w.pass(Duration::from_secs(200));
    assert!(w.count(Counter::TcpResetsOut) >= resets + 300, "each peer gets a reset");
    assert_eq!(w.used(), 0);
}

#[test]
fn when_not_even_minima_are_left_the_longest_stalled_make_room_for_new_connections() {
    let mut w = Server::with(|c| {
        c.pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) }
    });
    w.close_windows();
    // The share has minima for 240, beside half of it that the first ones hold.
    w.serve(83, Service::Farewell(3_000));
    w.no_window(83);
    let orphans = connect_in_order(&mut w, 83, 20);
    let clients = connect_in_order(&mut w, CLOSED, 1000);
    w.pass(Duration::from_secs(2));
    assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(1)), 20);
    let reset = w.count(Counter::TcpStalledReset) as usize;
    assert!((1..=800).contains(&reset), "{reset}");
    let (first, last) = clients.split_at(reset + 200);
    assert_eq!((reset_of(&mut w, first), reset_of(&mut w, last)), (reset, 0));
    assert_eq!(reset_of(&mut w, &orphans), 20, "orphans before all others");
    assert!(w.errors().iter().all(|e| *e == SocketError::TimedOut));
    assert_eq!(w.count(Counter::TcpResetsOut), w.count(Counter::TcpStalledReset) + 20);
}

#[test]
fn each_writer_gets_its_minimum_though_hundreds_of_silent_peers_came_first() {
    let mut w = Server::with(|c| {
        c.pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) }
    });
    w.close_windows();
    // Three times the clients for which the share has minima, all asked by at once, and none acknowledges.
    w.serve(86, Service::Answer(20_000));
    let clients = w.connect_many(86, 3000);
    for id in &clients {
        assert_eq!(stations::write(&mut w.world.shards[1], w.world.now, *id, &[1]), Some(1));
    }
    w.pass(MS / 2);
    w.behaviour.lock().unwrap().mute.insert(86);
    w.pass(100 * MS);
    let share = w.world.shards[0].pool().share_of(Purpose::Send);
    assert!(share.used > share.limit - 2048, "nothing is left: {share:?}");
    assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(30)), 20);
}

#[test]
fn sockets_that_nobody_reads_from_do_not_take_the_receive_memory_of_others() {
    let mut w = world();
    let here = w.world.shards[1].udp().bind(at(1, 0), BindOptions::default()).unwrap();
    // Each would keep 256 KiB, together 200 MB; and connections that are never read take the rest.
    let unread: Vec<_> = (0..800)
        .map(|_| w.world.shards[0].udp().bind(at(0, 0), BindOptions::default()).unwrap())
        .collect();
    for id in unread {
        let to = w.world.shards[0].addresses(id).unwrap().0.unwrap();
        for _ in 0..150 {
            w.world.shards[1].udp().send(w.world.now, here, &[&[0; 1400]], Some(to)).unwrap();
        }
        w.pass(3 * MS);
    }
    assert!(w.world.shards[0].counters().drops(DropReason::UdpBufferFull) > 0);
    assert!(udp_echo(&mut w, 3000), "a socket that is read from has its part");
    assert_eq!(w.ask(ANSWERING, 100, ANSWER, Duration::from_secs(1)), 100);
    assert_eq!(w.world.shards[0].counters().drops(DropReason::NoBuffer), 0);
}

/// A server with little memory whose program reads nothing of port 85.
fn small_world() -> Server {
    let mut w = Server::with(|c| {
        c.pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) }
    });
    w.close_windows();
    w.serve(85, Service::Idle);
    w
}

/// Such a server, to whose port 85 `n` clients have each sent a page.
fn beside_unread(n: usize) -> (Server, Vec<SlotId>) {
    let mut w = small_world();
    let ids = send_pages(&mut w, n);
    (w, ids)
}

fn send_pages(w: &mut Server, n: usize) -> Vec<SlotId> {
    let ids = w.connect_many(85, n);
    for chunk in ids.chunks(50) {
        for id in chunk {
            assert_eq!(
                stations::write(&mut w.world.shards[1], w.world.now, *id, &[0; 4000]),
                Some(4000)
            );
        }
        w.pass(5 * MS);
    }
    ids
}

#[test]
fn connections_that_nobody_reads_leave_others_the_receive_memory_the_longest_unread_are_reset() {
    let (mut w, clients) = beside_unread(1500);
    // What was dropped at first is sent again later and later.
    w.pass(Duration::from_secs(60));
    let reset = w.count(Counter::TcpUnreadReset);
    assert!((100..1500).contains(&reset), "{reset}");
    assert_eq!(w.count(Counter::TcpResetsOut), reset);
    let errors = w.errors();
    assert!(errors.len() as u64 == reset && errors.iter().all(|e| *e == SocketError::TimedOut));
    // Those whose bytes came first, as far as a step of the server tells them apart.
    let error_of = |id: &SlotId| w.world.shards[1].take_error(*id).unwrap();
    let errors: Vec<_> = clients.iter().map(error_of).collect();
    let (first, last) = errors.split_at(reset as usize);
    let is_reset = |e: &&Option<SocketError>| **e == Some(SocketError::ConnectionReset);
    assert_eq!(first.iter().chain(last).filter(is_reset).count() as u64, reset);
    assert!(last.iter().filter(is_reset).count() <= 50, "{errors:?}");
    // Others are served, also by frames that the control reserve has no place for.
    assert!(udp_echo(&mut w, 5) && udp_echo(&mut w, 3000));
    assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(1)), 20);
    let share = w.world.shards[0].pool().share_of(Purpose::Receive);
    assert!(share.used < share.limit / 8 * 7, "{share:?}");
    // No further one is reset once the share suffices.
    w.pass(Duration::from_secs(10));
    assert_eq!(w.count(Counter::TcpUnreadReset), reset);
}

#[test]
fn bytes_behind_gaps_give_way_before_a_connection_is_reset() {
    let (mut w, _) = beside_unread(200);
    w.pass(Duration::from_secs(2));
    w.serve(86, Service::Idle);
    w.behaviour.lock().unwrap().gap.insert(86);
    let ids = w.connect_many(86, 1500);
    for chunk in ids.chunks(50) {
        for id in chunk {
            // A segment of its own, which is lost as often as it is sent.
            assert_eq!(stations::write(&mut w.world.shards[1], w.world.now, *id, &[0]), Some(1));
            w.pass(MS / 50);
            assert_eq!(
                stations::write(&mut w.world.shards[1], w.world.now, *id, &[0; 3000]),
                Some(3000)
            );
        }
        w.pass(5 * MS);
    }
    w.pass(Duration::from_secs(4));
    assert!(w.count(Counter::TcpOutOfOrderDiscarded) > 100_000);
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
    assert!(udp_echo(&mut w, 5) && udp_echo(&mut w, 3000));
    assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(1)), 20);
    // What was discarded is sent again once the gap is filled.
    let port_86 =
        |w: &Server, id: &SlotId| w.world.shards[0].addresses(*id).unwrap().0 == Some(at(0, 86));
    let mut accepted = w.accepted();
    accepted.retain(|id| port_86(&w, id));
    assert_eq!(accepted.len(), ids.len());
    w.behaviour.lock().unwrap().gap.clear();
    let mut got = 0;
    for _ in 0..1200 {
        w.pass(100 * MS);
        for id in &accepted {
            let bytes = stations::read(&mut w.world.shards[0], w.world.now, *id, 1 << 20);
            got += bytes.map_or(0, |bytes| bytes.len());
        }
    }
    assert_eq!(got, 3001 * ids.len());
}

#[test]
fn a_program_that_reads_within_a_second_or_in_time_for_the_walk_loses_nothing() {
    let (mut w, _) = beside_unread(850);
    assert_eq!(w.world.shards[0].counters().drops(DropReason::NoBuffer), 0);
    let ids = send_pages(&mut w, 300);
    assert!(w.world.shards[0].counters().drops(DropReason::NoBuffer) > 0 && ids.len() == 300);
    // What was refused is sent again and again meanwhile.
    w.pass(Duration::from_millis(500));
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
    let read_all = |w: &mut Server| {
        for id in w.accepted() {
            stations::read(&mut w.world.shards[0], w.world.now, id, 1 << 20);
        }
    };
    for _ in 0..100 {
        w.pass(50 * MS);
        read_all(&mut w);
    }
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
    // Refused once more, and read before the walk.
    w.pass(Duration::from_secs(2));
    let pool = w.world.shards[0].pool();
    assert!(pool.alloc_chain(4 << 20, 0, Purpose::Receive).is_err());
    w.pass(Duration::from_secs(2));
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
}

#[test]
fn a_shard_that_did_not_run_for_a_while_resets_nothing_before_its_program_could_read() {
    let (mut w, ids) = beside_unread(700);
    let later = w.connect_many(85, 300);
    // Meanwhile all of it comes, more than there is memory for, and is an hour old.
    for id in later.iter().chain(&ids) {
        _ = stations::write(&mut w.world.shards[1], w.world.now, *id, &[0; 4000]);
    }
    w.world.now = w.world.now + Duration::from_secs(3600);
    w.pass(50 * MS);
    assert!(w.world.shards[0].counters().drops(DropReason::NoBuffer) > 0);
    // Nor where it stopped between the refusal and the walk.
    w.world.now = w.world.now + Duration::from_secs(3600);
    w.pass(50 * MS);
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
    // The program has read nothing.
    w.pass(300 * MS);
    assert!(w.count(Counter::TcpUnreadReset) > 0);
}

#[test]
fn connections_that_nobody_reads_stay_while_the_receive_share_suffices() {
    let (mut w, _) = beside_unread(600);
    w.pass(Duration::from_secs(100));
    assert!(w.world.shards[0].pool().share_of(Purpose::Receive).is_contended());
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
}

#[test]
fn connections_that_nobody_reads_stay_where_others_have_used_up_the_receive_share() {
    let (mut w, ids) = beside_unread(50);
    let pool = w.world.shards[0].pool();
    let others: Vec<_> =
        std::iter::from_fn(|| pool.alloc_chain(2048, 0, Purpose::Receive).ok()).collect();
    w.pass(Duration::from_secs(2));
    stations::write(&mut w.world.shards[1], w.world.now, ids[0], &[0]);
    w.pass(Duration::from_secs(100));
    assert_eq!(w.count(Counter::TcpUnreadReset), 0);
    others.into_iter().for_each(|chain| w.world.shards[0].free(chain));
}

#[test]
fn connections_that_nobody_reads_leave_memory_beside_datagrams_that_nobody_reads() {
    let mut w = small_world();
    w.serve(87, Service::Idle);
    let here = w.world.shards[1].udp().bind(at(1, 0), BindOptions::default()).unwrap();
    for _ in 0..60 {
        let there = w.world.shards[0].udp().bind(at(0, 0), BindOptions::default()).unwrap();
        let to = w.world.shards[0].addresses(there).unwrap().0.unwrap();
        for _ in 0..60 {
            w.world.shards[1].udp().send(w.world.now, here, &[&[0; 1400]], Some(to)).unwrap();
        }
        w.pass(3 * MS);
    }
    let share = w.world.shards[0].pool().share_of(Purpose::Receive);
    assert!(share.used > share.limit * 9 / 16, "{share:?}");
    send_pages(&mut w, 1000);
    w.pass(Duration::from_secs(10));
    // Others are served.
    assert!(w.count(Counter::TcpUnreadReset) > 10);
    assert_eq!(w.ask(ANSWERING, 20, ANSWER, Duration::from_secs(1)), 20);
    let ids = w.connect_many(87, 1);
    assert_eq!(
        stations::write(&mut w.world.shards[1], w.world.now, ids[0], &[0; 4000]),
        Some(4000)
    );
    w.pass(500 * MS);
    let there = *w.accepted().last().unwrap();
    let bytes = stations::read(&mut w.world.shards[0], w.world.now, there, 1 << 20);
    assert_eq!(bytes.map(|bytes| bytes.len()), Some(4000));
}

#[test]
fn connections_that_are_read_slowly_or_written_to_stay_beside_those_that_nobody_reads() {
    let mut w = small_world();
    w.serve(87, Service::Flood);
    let flooded = w.connect_many(87, 1)[0];
    assert_eq!(stations::write(&mut w.world.shards[1], w.world.now, flooded, &[0; 100]), Some(100));
    w.pass(10 * MS);
    send_pages(&mut w, 1500);
    let accepted = w.accepted();
    assert_eq!(accepted.len(), 1501);
    // Ten of the oldest, a few bytes each at a time: their queues are never empty.
    for _ in 0..40 {
        w.pass(100 * MS);
        for id in &accepted[1..11] {
            assert_eq!(
                stations::read(&mut w.world.shards[0], w.world.now, *id, 1).map(|b| b.len()),
                Some(1)
            );
        }
        // The oldest is not read, but it writes, and its peer takes all of it.
        assert!(stations::read(&mut w.world.shards[1], w.world.now, flooded, 1 << 20).is_some());
    }
    assert!(w.count(Counter::TcpUnreadReset) > 100);
}

#[test]
fn bytes_that_are_not_read_from_a_loopback_connection_do_not_take_the_memory_of_writers() {
    let (device, _far) = sim_pair(1, &Impairments::default(), &LinkConfig::default());
    let mut now = Instant::from_nanos(1);
    let mut shard = Shard::new(stations::config(0, 200 << 10), Box::new(device), now).unwrap();
    let pass = |shard: &mut Shard, now: &mut Instant| {
        for _ in 0..10 {
            *now = *now + MS;
            shard.step(*now, 64);
        }
    };
    let port = stations::at(0, 80);
    let listener = shard.tcp_listen(port, ListenOptions::default()).unwrap();
    let here = shard.tcp_connect(now, port, None).unwrap();
    pass(&mut shard, &mut now);
    let Poll::Ready((there, _)) = shard.tcp_accept(listener).unwrap() else { panic!("accepted") };
    // One end never reads, and both write.
    let (mut read, mut written) = (0, 0);
    for _ in 0..200 {
        while let Some(n) = stations::write(&mut shard, now, there, &[1; 1000])
            && n > 0
        {}
        written += stations::write(&mut shard, now, here, &[2; 1000]).unwrap_or(0);
        pass(&mut shard, &mut now);
        read += stations::read(&mut shard, now, there, 1 << 20).map_or(0, |bytes| bytes.len());
    }
    assert!(read == written && written > 100_000, "{read} of {written}");
}

#[test]
fn a_loopback_connection_goes_on_without_memory_to_receive() {
    let (device, _far) = sim_pair(1, &Impairments::default(), &LinkConfig::default());
    let mut now = Instant::from_nanos(1);
    let mut shard = Shard::new(stations::config(0, 200 << 10), Box::new(device), now).unwrap();
    // What others have not read: the share has no space for another large block.
    let unread = shard.pool().alloc_chain(60_000, 0, Purpose::Receive).unwrap();
    let port = stations::at(0, 80);
    let listener = shard.tcp_listen(port, ListenOptions::default()).unwrap();
    let here = shard.tcp_connect(now, port, None).unwrap();
    shard.step(now + MS, 64);
    let Poll::Ready((there, _)) = shard.tcp_accept(listener).unwrap() else { panic!("accepted") };
    // It discards, so that it offers more than it has memory for.
    shard.tcp_shutdown(now, there, Shutdown::Read).unwrap();
    let mut written = 0;
    for _ in 0..500 {
        written += stations::write(&mut shard, now, here, &[2; 44_000]).unwrap_or(0);
        now = now + 10 * MS;
        shard.step(now, 64);
    }
    assert!(written > 1_000_000, "{written}");
    assert_eq!(shard.counters().drops(DropReason::NoBuffer), 0);
    shard.free(unread);
}

/// A client with ample memory, station 0, and a server with little. The connections carry segments of 275 bytes, each
/// of which arrives in a buffer of 2 KiB.
struct ShortSegments {
    world: World,
    listener: SlotId,
}

impl ShortSegments {
    fn new(gro: bool) -> ShortSegments {
        let how = Impairments { delay: 5 * MS, ..Impairments::default() };
        let (near, far) = sim_pair(1, &how, &LinkConfig { tso: None, ..LinkConfig::default() });
        let devices = [Box::new(near) as _, Box::new(Tampered::new(far).copies()) as _];
        let budgets = [64 << 20, 192 << 10];
        let mut world = World::new(devices, |n| StackConfig {
            gro,
            ..stations::config(n, budgets[usize::from(n)])
        });
        let listener = world.listen(80);
        ShortSegments { world, listener }
    }

    /// The server runs every 20 ms only, so that it receives a whole window at once.
    fn pass(&mut self, ms: u64) {
        let World { now, shards: [client, server] } = &mut self.world;
        for n in 0..ms {
            *now = *now + MS;
            client.step(*now, 64);
            if n % 20 == 19 {
                server.step(*now, 64);
            }
        }
    }

    fn connect(&mut self) -> (SlotId, SlotId) {
        let client = &mut self.world.shards[0];
        let id = client.tcp_connect(self.world.now, stations::at(1, 80), None).unwrap();
        client.tcp_entry(id).unwrap().tcb.set_max_segment(Some(275));
        self.pass(100);
        (id, self.world.accept(self.listener).expect("accepted"))
    }

    fn write(&mut self, from: SlotId, bytes: usize) -> Option<usize> {
        let World { now, shards: [client, _] } = &mut self.world;
        stations::write(client, *now, from, &vec![7; bytes])
    }

    /// Whether `bytes` bytes reach the server within `seconds`.
    fn delivers(&mut self, (from, to): (SlotId, SlotId), bytes: usize, seconds: u64) -> bool {
        assert_eq!(self.write(from, bytes), Some(bytes));
        let mut got = 0;
        for _ in 0..seconds * 50 {
            self.pass(20);
            let World { now, shards: [_, server] } = &mut self.world;
            while let Some(some) = stations::read(server, *now, to, 1 << 20) {
                got += some.len();
            }
            if got == bytes {
                return true;
            }
        }
        false
    }
}

#[test]
fn short_segments_that_nobody_reads_leave_other_connections_their_minimum() {
    for gro in [false, true] {
        let mut w = ShortSegments::new(gro);
        let paused = w.connect();
        assert!(w.delivers(paused, 100_000, 100), "its window has grown");
        w.write(paused.0, 500_000);
        w.pass(20_000);
        let others: Vec<_> = (0..4).map(|_| w.connect()).collect();
        for other in others {
            assert!(w.delivers(other, 20_000, 10), "GRO {gro}");
        }
    }
}
