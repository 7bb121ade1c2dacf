//! A fixed range of seeds of the whole-stack simulation. `fulmar-lab sim` plays any others.

use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_simulation::{Case, Feature, Summary, run, run_many};

const FIRST: u64 = 1;
const SEEDS: u64 = 3_000;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn told(summary: &Summary) -> String {
    let stories: Vec<String> = summary.failures.iter().take(3).map(ToString::to_string).collect();
    let seeds: Vec<u64> = summary.failures.iter().map(|f| f.case.seed).collect();
    format!("seeds {seeds:?} failed\n\n{}", stories.join("\n\n"))
}

const SWARM_SEEDS: u64 = 1_000;

/// `FULMAR_SWARM_FIRST` and `FULMAR_SWARM_SEEDS` play others.
#[test]
fn every_seed_of_the_swarm_holds_every_promise() {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let failed = AtomicU64::new(0);
    let first = number("FULMAR_SWARM_FIRST", FIRST);
    let seeds = number("FULMAR_SWARM_SEEDS", SWARM_SEEDS);
    let summary = run_many(Case::swarm(first), seeds, jobs, |_, outcome| {
        outcome.is_ok() || failed.fetch_add(1, Ordering::Relaxed) < 10
    });
    assert!(summary.failures.is_empty(), "{}", told(&summary));
    let total = &summary.total;
    println!("{seeds} seeds, {:.0} virtual seconds: {total:?}", total.virtual_ns as f64 / 1e9);
    assert!(total.bytes > seeds * 1_000 && total.connections > seeds);
}

/// `FULMAR_SIM_FIRST` and `FULMAR_SIM_SEEDS` play others.
#[test]
fn every_seed_holds_every_promise() {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let failed = AtomicU64::new(0);
    let (first, seeds) = (number("FULMAR_SIM_FIRST", FIRST), number("FULMAR_SIM_SEEDS", SEEDS));
    let summary = run_many(Case::network(first), seeds, jobs, |_, outcome| {
        outcome.is_ok() || failed.fetch_add(1, Ordering::Relaxed) < 10
    });
    assert!(summary.failures.is_empty(), "{}", told(&summary));
    assert_eq!(summary.seeds, seeds);
    let total = &summary.total;
    println!("{seeds} seeds, {:.0} virtual seconds: {total:?}", total.virtual_ns as f64 / 1e9);
    // Scenarios that do nothing would hold every promise too.
    assert!(total.bytes > seeds * 10_000 && total.connections > seeds);
    assert!(total.retransmitted_bytes > 0 && total.timeouts > 0 && total.errors > 0);
}

/// The case of a seed that was found before the swarm had the feature `first` and later features.
fn before(first: Feature, seed: u64) -> Case {
    let without = Feature::ALL.into_iter().skip_while(|f| *f != first).collect();
    Case { without, ..Case::swarm(seed) }
}

fn holds(case: Case) {
    if let Err(failure) = run(case) {
        panic!("{failure}");
    }
}

#[test]
fn small_segments_to_a_reader_that_pauses_do_not_stall() {
    holds(Case::network(900_044_798));
}

#[test]
fn small_segments_to_a_reader_that_pauses_do_not_time_out() {
    holds(Case::network(900_052_463));
}

#[test]
fn writers_without_memory_do_not_poll() {
    holds(Case::network(900_059_903));
}

#[test]
fn a_forged_timestamp_does_not_shut_the_peer_out() {
    holds(before(Feature::Options, 49));
}

#[test]
fn a_shut_down_reader_does_not_hold_the_receive_share() {
    holds(before(Feature::Options, 80058535));
}

#[test]
fn unread_bytes_of_a_loopback_connection_do_not_stop_its_writers() {
    holds(before(Feature::Options, 80056727));
}

#[test]
fn a_posted_buffer_that_cannot_be_filled_yet_is_not_polled_without_a_pause() {
    holds(before(Feature::Options, 80152201));
}

#[test]
fn a_cookie_that_finds_the_accept_queue_full_leaves_a_silent_client_waiting() {
    holds(before(Feature::Options, 200023643));
}

#[test]
fn the_ack_of_a_probe_that_finds_its_connection_closed_is_no_error() {
    holds(before(Feature::Options, 210219859));
}

#[test]
fn a_loopback_segment_larger_than_the_receive_share_is_delivered() {
    holds(before(Feature::Options, 230140557));
}

#[test]
fn old_segments_are_not_read_in_a_new_connection_without_timestamps() {
    holds(before(Feature::Options, 250060237));
}

#[test]
fn a_loopback_segment_that_cannot_be_copied_is_delivered() {
    holds(before(Feature::Options, 1795532594765165));
}

#[test]
fn partial_acks_without_sack_do_not_cut_retransmissions_shorter() {
    holds(before(Feature::Options, 1795532595190367));
}

#[test]
fn two_fragments_whose_flipped_bits_cancel_each_other_are_no_forged_datagram() {
    holds(before(Feature::Options, 1795532595116718));
}

#[test]
fn the_error_of_a_posted_buffer_that_is_abandoned_is_reported_all_the_same() {
    holds(before(Feature::FastOpen, 1795539579312436));
}

#[test]
fn loopback_segments_that_nobody_reads_leave_writers_their_minima() {
    holds(before(Feature::FastOpen, 1795545308967763));
}

#[test]
fn a_black_hole_behind_a_jump_of_the_clock_is_served_late() {
    holds(before(Feature::FastOpen, 1795545309022945));
}

#[test]
fn a_flow_of_the_same_addresses_as_one_that_was_never_accepted_does_not_begin() {
    holds(before(Feature::FastOpen, 1795545309055751));
}

#[test]
fn round_trips_that_a_jump_of_the_clock_has_lengthened_delay_recovery() {
    holds(before(Feature::FastOpen, 1795547797702019));
    holds(before(Feature::FastOpen, 1795547798112330));
}

#[test]
fn unread_bytes_are_freed_when_receiving_is_shut_down() {
    holds(before(Feature::FastOpen, 1795547797704809));
}

#[test]
fn the_end_of_a_stream_comes_behind_the_bytes_of_an_abandoned_buffer() {
    holds(before(Feature::FastOpen, 1795547798125255));
}

#[test]
fn a_doubled_syn_may_open_a_connection_that_was_short() {
    holds(before(Feature::FastOpen, 1795547798192177));
}

#[test]
fn a_connection_that_was_given_up_before_it_was_accepted_is_reset() {
    holds(before(Feature::FastOpen, 1795547798249741));
}

#[test]
fn a_reset_of_early_data_that_is_lost_lets_the_connection_come_again() {
    holds(before(Feature::Pending, 5000002943));
}

#[test]
fn an_end_that_never_calls_is_not_told_that_its_early_connection_is_over() {
    holds(before(Feature::Pending, 5000014398));
}

#[test]
fn early_data_of_a_server_is_not_paced_by_the_age_of_the_clock() {
    holds(before(Feature::Pending, 5000028281));
}

#[test]
fn forged_sources_do_not_stop_a_station_from_answering_for_every_address() {
    holds(before(Feature::Files, 245));
}

#[test]
fn a_window_that_closed_below_the_flight_reopens_after_the_user_timeout() {
    holds(before(Feature::Pending, 1795551790779707));
}

#[test]
fn the_syn_of_an_early_end_whose_reset_was_lost_opens_again() {
    holds(before(Feature::Pending, 1795551790754714));
}

#[test]
fn a_late_syn_with_data_after_a_syn_cookie_opens_a_second_connection() {
    holds(before(Feature::Pending, 1795553425354115));
}

#[test]
fn syns_repeated_together_are_taken_a_few_at_a_time_where_few_may_be_pending() {
    holds(before(Feature::Files, 1795558821063269));
}

#[test]
fn a_connection_that_a_failed_attempt_opened_early_is_reset_by_the_next_attempt() {
    holds(before(Feature::Files, 1795558821346394));
    holds(before(Feature::Files, 1795558821427526));
}

#[test]
fn a_late_syn_of_fast_open_after_a_syn_cookie_opens_a_second_connection() {
    holds(before(Feature::Files, 1795558821335680));
}

#[test]
fn handshakes_that_begin_together_take_turns_in_a_short_accept_queue() {
    holds(before(Feature::Files, 1795558821521974));
}

#[test]
fn corked_writes_that_wait_for_what_is_unsent_are_slow() {
    holds(before(Feature::Files, 1795558821434506));
}

#[test]
fn a_decision_that_comes_after_its_syn_was_given_up_is_none() {
    holds(before(Feature::Files, 1795558821445734));
}

#[test]
fn lost_sacks_do_not_lengthen_timeouts_by_each_other() {
    holds(before(Feature::Files, 1795558821611350));
}

/// Solicitations for the forged sources of a SYN flood, repeated all at once, filled the device's queue each time that
/// the answer to an honest solicitation was due.
#[test]
fn solicitations_for_forged_sources_leave_the_device_to_others() {
    holds(before(Feature::Files, 1795566166664207));
    holds(before(Feature::Files, 1795558821260095));
}

/// Two that connected to each other and missed once tried again each at its own time, for ever.
#[test]
fn two_that_connect_to_each_other_and_miss_meet_the_next_time() {
    holds(before(Feature::Files, 1795566166879480));
}

/// A program that dropped late SYNs, each of which comes after the double time, outlasted the user time-out.
#[test]
fn a_program_that_decides_drops_only_early_syns() {
    holds(before(Feature::Files, 1795566167036143));
    holds(before(Feature::Files, 1795558822362204));
}

/// A reader that paused held bursts of short segments, each in a buffer of its own, for which the receive share had no
/// block left to copy them to. No frame of four other connections found a buffer.
#[test]
fn short_segments_that_are_not_read_leave_others_their_minimum() {
    let without = ["forged-icmp", "forged-segments", "options", "ecn-manglers", "any-address"];
    let without = Feature::ALL.into_iter().filter(|f| without.contains(&f.name())).collect();
    holds(Case { without, ..Case::swarm(1795615837375864) });
    holds(Case::swarm(1795615837375864));
}

/// Copies of an ACK with a cookie were counted as valid ones, so that no cookie seemed to be out that two minutes without
/// a clock made too old.
#[test]
fn a_cookie_that_failed_was_out() {
    holds(before(Feature::Files, 1795615837013424));
}

/// Cookies that were sent excused the failure of every opener with first data, and one that is excused does not ask for
/// an Ethernet address again.
#[test]
fn an_opener_that_finds_no_ethernet_address_is_not_lost_by_the_listener() {
    holds(before(Feature::Files, 1795623056769597));
    holds(before(Feature::Files, 1795623056835738));
    holds(before(Feature::Files, 1795623056844591));
}

/// A fragment that the path had doubled was left when another datagram drew the same identification.
#[test]
fn fragments_of_two_datagrams_with_one_identification_are_dropped() {
    holds(before(Feature::Files, 1795615837648983));
}

/// A call that sends a file waited for half of a send buffer that autotuning then made smaller than that.
#[test]
fn a_sender_of_a_file_is_woken_in_a_buffer_that_became_smaller() {
    let without = ["paused-readers"];
    let without = Feature::ALL.into_iter().filter(|f| without.contains(&f.name())).collect();
    holds(Case { without, ..Case::swarm(1795634568557203) });
    holds(Case::swarm(1795634568628352));
    holds(Case::swarm(1795634568946000));
}

/// The replayed ACK of a FIN met by chance the initial sequence number of a connection that a replayed SYN had opened
/// 7.06 ms later, before its SYN,ACK had left.
#[test]
fn a_replayed_ack_may_meet_the_number_of_a_syn_ack_that_waits_for_the_device() {
    let without = Feature::ALL.into_iter().filter(|f| f.name() == "forged-icmp").collect();
    holds(Case { without, ..Case::swarm(1795638271375170) });
    holds(Case::swarm(1795638271375170));
}

/// A reader of a byte each 95 ms left its window closed for half an hour, one update was lost, and its peer gave up.
#[test]
fn a_reader_opens_its_window_before_its_peer_gives_up() {
    holds(Case::swarm(1795640650912958));
}

#[test]
fn openers_in_step_find_few_places_where_connections_are_pending() {
    holds(Case::swarm(1795841683947329));
}

#[test]
fn a_connection_that_a_program_accepts_again_was_given_up_before() {
    holds(Case::swarm(1795841684146138));
}

#[test]
fn a_program_that_drops_each_syn_while_the_clock_jumps_is_not_reached() {
    holds(Case::swarm(1795834561076897));
}

#[test]
fn a_server_that_aborts_before_its_syn_ack_has_left_is_not_connected_to_twice() {
    holds(Case::swarm(1795856200813325));
}

#[test]
fn posted_buffers_that_were_given_up_keep_their_places_until_the_device_is_done() {
    holds(Case::swarm(1795856200860706));
}

/// The two segments of a write over loopback were less than two full ones. A reader that paused let their ACK wait, and
/// the sender probed with 64 KiB.
#[test]
fn two_segments_of_which_one_is_short_are_acknowledged_before_their_sender_probes() {
    holds(Case::network(875160018373));
    holds(Case::network(875160053004));
}

/// Five embryos of eight were given up while no frame passed, and their peers took themselves for connected.
#[test]
fn a_pause_outlasts_the_embryos_of_a_short_syn_queue() {
    holds(Case::network(875160050267));
    holds(Case::network(875160069766));
    holds(Case::network(875160086622));
}

/// Unread writes of one to three bytes over loopback held all descriptors of a small pool.
#[test]
fn tiny_segments_over_loopback_that_nobody_reads_leave_writers_their_descriptors() {
    holds(Case::network(1795884579048634));
}

/// The peer had no SACK. After a time-out BBR took seven bytes in two seconds for the rate of the path, and paced the next
/// segment by it. The user time-out came first.
#[test]
fn seven_bytes_that_took_two_seconds_do_not_stop_a_sender() {
    holds(Case::network(1795907506444817516));
}

/// The FIN of a closed socket waited for a window that was closed for longer than the user time-out.
#[test]
fn a_sender_waits_for_the_ack_of_its_fin_before_it_closes_where_the_reader_is_late() {
    holds(Case::network(1795907506445163062));
}

/// A program read a full buffer slowly, and the window stayed closed until half of the memory for windows was free. The
/// peer's closed socket was given up before.
#[test]
fn a_slow_reader_in_a_small_pool_opens_its_window_before_the_peer_gives_up() {
    holds(Case::network(1795928863173222993));
    holds(Case::network(1795928863173337339));
}
