use super::*;
use alloc::collections::BTreeSet;
use core::net::Ipv4Addr;
use proptest::prelude::*;

const A: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0xa]);
const B: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 0xb]);

fn ip(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, n])
}

fn s(seconds: u64) -> Instant {
    Instant::from_millis(seconds * 1000)
}

/// The solicitation is sent now.
const ASKED: Resolution = Resolution::Queue { solicit: true, displaced: None };
/// The solicitation was sent before.
const WAITS: Resolution = Resolution::Queue { solicit: false, displaced: None };

fn table() -> Neighbours {
    Neighbours::new(NeighbourConfig::default())
}

fn answer(ether: EtherAddr) -> Advertisement {
    Advertisement { ether: Some(ether), solicited: true, replaces: true, is_router: false }
}

fn unsolicited(ether: EtherAddr, replaces: bool) -> Advertisement {
    Advertisement { ether: Some(ether), solicited: false, replaces, is_router: false }
}

fn state(t: &Neighbours, n: u8) -> NeighbourState {
    t.find(ip(n)).unwrap().state
}

fn due(t: &mut Neighbours, now: Instant) -> Vec<Action> {
    let mut actions = Vec::new();
    t.on_timer(now, &mut actions);
    actions
}

/// A table with neighbour 1 REACHABLE at address A since time 0.
fn reachable() -> Neighbours {
    let mut t = table();
    t.resolve(ip(1), Traffic::Own, s(0));
    t.on_advertisement(ip(1), answer(A), s(0));
    t
}

#[test]
fn the_first_packet_solicits_and_later_ones_are_queued() {
    let mut t = table();
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(0)), ASKED);
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(0)), WAITS);
    assert_eq!(t.next_deadline(), Some(s(1)));
}

#[test]
fn an_unanswered_solicitation_is_repeated_twice_and_then_fails() {
    let mut t = table();
    t.resolve(ip(1), Traffic::Own, s(0));
    let ask = Action::Solicit { ip: ip(1), unicast: None };
    assert_eq!(due(&mut t, Instant::from_millis(999)), []);
    assert_eq!(due(&mut t, s(1)), [ask]);
    assert_eq!(due(&mut t, s(2)), [ask]);
    assert_eq!(due(&mut t, s(3)), [Action::Failed { ip: ip(1) }]);
    assert_eq!(t.next_deadline(), None);
}

#[test]
fn a_solicitation_for_replies_only_is_not_repeated_and_the_next_packet_asks_again() {
    let mut t = table();
    t.resolve(ip(1), Traffic::Reply, s(0));
    assert_eq!(due(&mut t, s(1)), [Action::Failed { ip: ip(1) }]);
    assert_eq!(t.resolve(ip(1), Traffic::Reply, s(1)), ASKED);
    // Once own traffic waits for it, it is repeated.
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(1)), WAITS);
    assert_eq!(due(&mut t, s(2)), [Action::Solicit { ip: ip(1), unicast: None }]);
}

#[test]
fn a_failed_neighbour_is_solicited_again_after_the_hold_time() {
    let mut t = table();
    t.resolve(ip(1), Traffic::Own, s(0));
    (1..=3).for_each(|n| drop(due(&mut t, s(n))));
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(3)), Resolution::Failed);
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(4)), ASKED);
}

#[test]
fn an_answer_makes_a_neighbour_reachable_for_the_reachable_time() {
    let mut t = reachable();
    let known = Resolution::Known { ether: A, fresh_until: s(30), awaits_confirmation: false };
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(29)), known);
    // An idle neighbour needs no timer.
    t.on_timer(s(29), &mut Vec::new());
    assert_eq!(t.next_deadline(), None);
}

#[test]
fn use_of_a_stale_neighbour_starts_probing_and_an_answer_ends_it() {
    let mut t = reachable();
    let known = Resolution::Known { ether: A, fresh_until: s(105), awaits_confirmation: true };
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(100)), known);
    assert_eq!(state(&t, 1), NeighbourState::Delay);
    let ask = Action::Solicit { ip: ip(1), unicast: Some(A) };
    assert_eq!(due(&mut t, s(105)), [ask]);
    assert_eq!(state(&t, 1), NeighbourState::Probe);
    assert_eq!(due(&mut t, s(106)), [ask]);
    t.on_advertisement(ip(1), answer(A), s(106));
    assert_eq!(state(&t, 1), NeighbourState::Reachable);
    assert_eq!(due(&mut t, s(107)), []);
}

#[test]
fn a_neighbour_that_stops_answering_fails_after_three_unicast_probes() {
    let mut t = reachable();
    let before = t.generation();
    t.resolve(ip(1), Traffic::Own, s(100));
    (105..=107).for_each(|n| assert_eq!(due(&mut t, s(n)).len(), 1));
    assert_eq!(due(&mut t, s(108)), [Action::Failed { ip: ip(1) }]);
    assert_ne!(t.generation(), before);
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(108)), Resolution::Failed);
}

#[test]
fn an_upper_layer_confirmation_prevents_and_ends_probing() {
    let mut t = reachable();
    assert!(!t.confirm(ip(1), s(1)) && !t.awaits_confirmation(), "it is known to be reachable");
    t.resolve(ip(1), Traffic::Own, s(100));
    assert!(t.awaits_confirmation() && t.confirm(ip(1), s(101)));
    assert_eq!((state(&t, 1), t.awaits_confirmation()), (NeighbourState::Reachable, false));
    assert_eq!(due(&mut t, s(105)), []);
    t.resolve(ip(1), Traffic::Own, s(200));
    assert_eq!(due(&mut t, s(205)).len(), 1);
    assert!(t.confirm(ip(1), s(205)));
    assert_eq!((state(&t, 1), due(&mut t, s(206))), (NeighbourState::Reachable, vec![]));
    // A confirmation does not resolve an address.
    t.resolve(ip(2), Traffic::Own, s(206));
    assert!(!t.confirm(ip(2), s(206)));
    assert_eq!(state(&t, 2), NeighbourState::Incomplete);
}

#[test]
fn an_unsolicited_advertisement_creates_no_entry() {
    let mut t = table();
    assert_eq!(t.on_advertisement(ip(1), unsolicited(A, true), s(0)), Learned::Nothing);
    assert!(t.is_empty());
}

const ASK_A: Action =
    Action::Solicit { ip: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), unicast: Some(A) };
const ASK_B: Action =
    Action::Solicit { ip: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), unicast: Some(B) };

fn ms(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn ether_of(t: &Neighbours) -> EtherAddr {
    t.find(ip(1)).unwrap().ether
}

#[test]
fn a_claim_is_not_adopted_while_the_known_address_answers() {
    let mut t = reachable();
    let before = t.generation();
    assert_eq!(t.on_advertisement(ip(1), unsolicited(B, true), s(1)), Learned::Claim);
    // Cached addresses are invalidated; packets are still sent to A.
    assert_ne!(t.generation(), before);
    assert_eq!(due(&mut t, s(1)), [ASK_A]);
    assert!(matches!(t.resolve(ip(1), Traffic::Own, s(1)), Resolution::Known { ether: A, .. }));
    assert_eq!(t.on_advertisement(ip(1), answer(A), s(1)), Learned::Usable);
    assert_eq!((state(&t, 1), ether_of(&t)), (NeighbourState::Reachable, A));
    assert_eq!(due(&mut t, s(5)), []);
    assert_eq!(ether_of(&t), A);
}

#[test]
fn a_moved_station_is_followed_within_a_second() {
    let mut t = reachable();
    t.on_advertisement(ip(1), unsolicited(B, true), ms(1000));
    assert_eq!(due(&mut t, ms(1000)), [ASK_A]);
    assert_eq!(due(&mut t, ms(1500)), [ASK_A]);
    let before = t.generation();
    assert_eq!(due(&mut t, ms(2000)), [ASK_B]);
    assert_ne!(t.generation(), before);
    assert!(matches!(t.resolve(ip(1), Traffic::Own, ms(2000)), Resolution::Known { ether: B, .. }));
    t.on_advertisement(ip(1), answer(B), ms(2001));
    assert_eq!((state(&t, 1), ether_of(&t)), (NeighbourState::Reachable, B));
}

#[test]
fn a_claimed_address_that_does_not_answer_fails() {
    let mut t = reachable();
    t.on_advertisement(ip(1), unsolicited(B, true), s(1));
    for n in [1000, 1500] {
        assert_eq!(due(&mut t, ms(n)), [ASK_A]);
    }
    for n in [2, 3, 4] {
        assert_eq!(due(&mut t, s(n)), [ASK_B]);
    }
    assert_eq!(due(&mut t, s(5)), [Action::Failed { ip: ip(1) }]);
}

#[test]
fn an_unsolicited_reply_is_a_claim() {
    let mut t = reachable();
    assert_eq!(t.on_advertisement(ip(1), answer(B), s(1)), Learned::Claim);
    // Nor does the answer to the resulting probe come from the claimant.
    due(&mut t, s(1));
    assert_eq!(t.on_advertisement(ip(1), answer(B), s(1)), Learned::Claim);
    assert_eq!(ether_of(&t), A);
}

#[test]
fn a_second_answer_to_one_solicitation_is_a_claim() {
    let mut t = reachable();
    assert_eq!(t.on_advertisement(ip(1), answer(B), s(0)), Learned::Claim);
    assert_eq!(ether_of(&t), A);
}

#[test]
fn an_upper_layer_confirmation_does_not_end_the_probing_of_a_claim() {
    let mut t = reachable();
    t.on_advertisement(ip(1), unsolicited(B, true), s(1));
    assert!(!t.confirm(ip(1), s(1)));
    assert_eq!(state(&t, 1), NeighbourState::Probe);
}

#[test]
fn claims_cause_at_most_one_probe_per_second() {
    let mut t = reachable();
    let mut asked = 0;
    for n in 0..3000 {
        t.on_advertisement(ip(1), unsolicited(B, true), ms(n));
        if due(&mut t, ms(n)) == [ASK_A] {
            asked += 1;
            t.on_advertisement(ip(1), answer(A), ms(n));
        }
    }
    assert_eq!((asked, ether_of(&t)), (3, A));
}

#[test]
fn an_entry_without_own_traffic_is_overwritten_without_a_probe() {
    let mut t = table();
    t.on_solicit(ip(1), A, s(0));
    assert_eq!(t.on_solicit(ip(1), B, s(0)), Learned::Usable);
    assert_eq!((ether_of(&t), due(&mut t, s(9))), (B, vec![]));
}

#[test]
fn a_flood_of_spoofed_solicitations_evicts_no_neighbour_in_use() {
    let config = NeighbourConfig { max_entries: 4, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    t.on_solicit(ip(1), A, s(0));
    t.resolve(ip(1), Traffic::Own, s(0));
    t.resolve(ip(2), Traffic::Own, s(0));
    t.on_advertisement(ip(2), answer(A), s(0));
    t.on_advertisement(ip(2), Advertisement { replaces: false, ..unsolicited(B, false) }, s(0));
    assert_eq!(state(&t, 2), NeighbourState::Stale);
    for n in 10..200 {
        t.on_solicit(ip(n), B, s(n.into()));
    }
    assert_eq!(t.len(), 4);
    assert!(t.find(ip(1)).is_some() && t.find(ip(2)).is_some());
}

#[test]
fn an_advertisement_without_override_makes_the_entry_stale() {
    let mut t = reachable();
    t.resolve(ip(1), Traffic::Own, s(0));
    let before = t.generation();
    t.on_advertisement(ip(1), unsolicited(B, false), s(1));
    assert_eq!((state(&t, 1), t.find(ip(1)).unwrap().ether), (NeighbourState::Stale, A));
    // Cached addresses are invalidated.
    assert_ne!(t.generation(), before);
    t.on_advertisement(ip(1), unsolicited(B, false), s(1));
    assert_eq!(t.find(ip(1)).unwrap().ether, A);
}

#[test]
fn an_advertisement_without_address_confirms_but_does_not_resolve() {
    let mut t = table();
    t.resolve(ip(1), Traffic::Own, s(0));
    let bare = Advertisement { ether: None, ..answer(A) };
    assert_eq!(t.on_advertisement(ip(1), bare, s(0)), Learned::Nothing);
    t.on_advertisement(ip(1), unsolicited(A, true), s(0));
    assert_eq!(state(&t, 1), NeighbourState::Stale);
    // Unsolicited: it confirms nothing.
    t.on_advertisement(ip(1), bare, s(0));
    assert_eq!(state(&t, 1), NeighbourState::Stale);
    t.resolve(ip(1), Traffic::Own, s(0));
    assert_eq!(due(&mut t, s(5)).len(), 1);
    t.on_advertisement(ip(1), bare, s(5));
    assert_eq!(state(&t, 1), NeighbourState::Reachable);
}

#[test]
fn a_soliciting_neighbour_is_learned_as_stale() {
    let mut t = table();
    assert_eq!(t.on_solicit(ip(1), A, s(0)), Learned::Usable);
    assert_eq!(state(&t, 1), NeighbourState::Stale);
    let mut t = reachable();
    t.on_solicit(ip(1), A, s(1));
    assert_eq!(state(&t, 1), NeighbourState::Reachable);
    assert_eq!(t.on_solicit(ip(1), B, s(1)), Learned::Claim);
    assert_eq!((state(&t, 1), ether_of(&t)), (NeighbourState::Probe, A));
}

#[test]
fn a_full_table_evicts_the_least_recently_used_stale_neighbour() {
    let config = NeighbourConfig { max_entries: 4, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    for n in 1..=3 {
        t.on_solicit(ip(n), A, s(n.into()));
    }
    t.resolve(ip(4), Traffic::Own, s(4));
    t.on_advertisement(ip(4), answer(A), s(4));
    t.on_solicit(ip(5), A, s(5));
    let left: Vec<IpAddr> = t.iter().map(|n| n.ip).collect();
    assert_eq!(left, [ip(2), ip(3), ip(4), ip(5)]);
}

#[test]
fn a_scan_of_unused_addresses_leaves_half_of_the_table() {
    let config = NeighbourConfig { max_entries: 8, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    (1..=4).for_each(|n| assert_eq!(t.on_solicit(ip(n), A, s(0)), Learned::Usable));
    for n in 100..200 {
        // The oldest resolution is displaced.
        let displaced = (n >= 104).then(|| ip(n - 4));
        let queued = Resolution::Queue { solicit: true, displaced };
        assert_eq!(t.resolve(ip(n), Traffic::Own, s(1)), queued);
    }
    assert_eq!(t.len(), 8);
    assert_eq!((1..=4).filter(|&n| t.find(ip(n)).is_some()).count(), 4);
}

#[test]
fn replies_resolve_a_quarter_of_the_table_and_displace_only_replies() {
    let config = NeighbourConfig { max_entries: 16, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    (1..=4).for_each(|n| assert_eq!(t.resolve(ip(n), Traffic::Own, s(0)), ASKED));
    for n in 100..200 {
        let displaced = (n >= 104).then(|| ip(n - 4));
        let queued = Resolution::Queue { solicit: true, displaced };
        assert_eq!(t.resolve(ip(n), Traffic::Reply, s(1)), queued);
    }
    assert!((1..=4).all(|n| state(&t, n) == NeighbourState::Incomplete));
    // Own traffic displaces all of them.
    for n in 5..=8 {
        let queued = Resolution::Queue { solicit: true, displaced: Some(ip(n + 191)) };
        assert_eq!(t.resolve(ip(n), Traffic::Own, s(1)), queued);
    }
    assert_eq!(t.resolve(ip(200), Traffic::Reply, s(1)), Resolution::Failed);
    let queued = Resolution::Queue { solicit: true, displaced: Some(ip(1)) };
    assert_eq!(t.resolve(ip(9), Traffic::Own, s(1)), queued);
}

#[test]
fn a_resolution_used_by_own_traffic_gets_its_priority() {
    let config = NeighbourConfig { max_entries: 16, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    assert_eq!(t.resolve(ip(1), Traffic::Reply, s(0)), ASKED);
    assert_eq!(t.resolve(ip(1), Traffic::Own, s(0)), WAITS);
    for n in 100..200 {
        t.resolve(ip(n), Traffic::Reply, s(0));
    }
    assert_eq!(state(&t, 1), NeighbourState::Incomplete);
}

#[test]
fn a_neighbour_used_only_by_replies_is_idle() {
    let config = NeighbourConfig { max_entries: 4, ..NeighbourConfig::default() };
    let mut t = Neighbours::new(config);
    for n in [1, 2] {
        t.on_solicit(ip(n), A, s(0));
    }
    t.resolve(ip(1), Traffic::Own, s(0));
    t.resolve(ip(2), Traffic::Reply, s(9));
    assert_eq!(t.on_solicit(ip(2), B, s(9)), Learned::Usable, "no claim");
    for n in 10..100 {
        t.on_solicit(ip(n), B, s(n.into()));
    }
    assert!(t.find(ip(1)).is_some() && t.find(ip(2)).is_none());
}

#[test]
fn a_flood_of_spoofed_solicitations_does_not_advance_the_generation() {
    let mut t = reachable();
    assert!(matches!(t.resolve(ip(1), Traffic::Own, s(0)), Resolution::Known { .. }));
    let before = t.generation();
    for n in 0..5000_u16 {
        let [high, low] = n.to_be_bytes();
        let forged = IpAddr::from([10, 1, high, low]);
        t.on_solicit(forged, A, s(1));
        t.on_solicit(forged, B, s(1));
    }
    assert_eq!((t.len(), t.generation()), (1024, before));
    assert!(t.idle.len() <= 2048);
}

#[derive(Clone, Debug)]
enum Step {
    Resolve(u8, bool),
    Confirm(u8),
    Solicit(u8, bool),
    Advertisement(u8, Option<bool>, bool, bool),
    Wait(u16),
    Remove(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    let n = 0u8..12;
    prop_oneof![
        4 => (n.clone(), any::<bool>()).prop_map(|(n, is_own)| Step::Resolve(n, is_own)),
        1 => n.clone().prop_map(Step::Confirm),
        2 => (n.clone(), any::<bool>()).prop_map(|(n, e)| Step::Solicit(n, e)),
        3 => (n.clone(), any::<Option<bool>>(), any::<bool>(), any::<bool>())
            .prop_map(|(n, e, s, r)| Step::Advertisement(n, e, s, r)),
        3 => (1u16..20_000).prop_map(Step::Wait),
        1 => n.prop_map(Step::Remove),
    ]
}

fn ether(second: bool) -> EtherAddr {
    if second { B } else { A }
}

proptest! {
    /// For any sequence of steps: the bounds hold, the deadline is never later than that of a timed
    /// entry, and a cached address stays correct while the generation is unchanged.
    #[test]
    fn bounds_deadlines_and_cached_addresses_hold(
        steps in prop::collection::vec(any_step(), 1..200),
    ) {
        let config = NeighbourConfig { max_entries: 8, ..NeighbourConfig::default() };
        let (mut t, mut now) = (Neighbours::new(config), Instant::ZERO);
        let mut remembered: BTreeMap<IpAddr, (EtherAddr, Instant, u64)> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Confirm(n) => {
                    t.confirm(ip(n), now);
                }
                Step::Resolve(n, is_own) => {
                    let traffic = if is_own { Traffic::Own } else { Traffic::Reply };
                    let resolution = t.resolve(ip(n), traffic, now);
                    if let Resolution::Known { ether, fresh_until, .. } = resolution {
                        remembered.insert(ip(n), (ether, fresh_until, t.generation()));
                    }
                }
                Step::Solicit(n, e) => {
                    t.on_solicit(ip(n), ether(e), now);
                }
                Step::Advertisement(n, e, solicited, replaces) => {
                    let ether = e.map(ether);
                    let advert = Advertisement { ether, solicited, replaces, is_router: false };
                    t.on_advertisement(ip(n), advert, now);
                }
                Step::Wait(ms) => {
                    now = now + Duration::from_millis(ms.into());
                    let mut actions = Vec::new();
                    t.on_timer(now, &mut actions);
                    prop_assert!(t.next_deadline().is_none_or(|d| now < d));
                }
                Step::Remove(n) => {
                    t.remove(ip(n));
                }
            }
            prop_assert!(t.len() <= 8 && t.idle.len() <= 16);
            prop_assert_eq!(t.unconfirmed.0, t.iter().filter(|n| n.awaits_confirmation()).count());
            let has_place = |n: &Neighbour| t.idle.contains(&n.ip) || !n.is_idle();
            prop_assert!(t.iter().all(has_place));
            let asked = |wanted| {
                let asked = |e: &&Neighbour| {
                    e.state == NeighbourState::Incomplete && e.used_by_own_traffic == wanted
                };
                t.iter().filter(asked).map(|e| e.ip).collect::<BTreeSet<_>>()
            };
            let listed = |of: &VecDeque<IpAddr>| of.iter().copied().collect::<BTreeSet<_>>();
            prop_assert_eq!(asked(true), listed(&t.resolving.own));
            prop_assert_eq!(asked(false), listed(&t.resolving.replies));
            prop_assert!(t.resolving.len() <= 4 && t.resolving.replies.len() <= 2);
            prop_assert_eq!(asked(true).len() + asked(false).len(), t.resolving.len());
            for e in t.iter().filter(|e| e.is_timed()) {
                prop_assert!(t.next_deadline().is_some_and(|d| d <= e.deadline));
            }
            for (ip, (ether, fresh_until, generation)) in &remembered {
                if *generation == t.generation() && now < *fresh_until {
                    let entry = t.find(*ip);
                    prop_assert!(entry.is_some_and(|e| is_usable(e.state) && e.ether == *ether));
                }
            }
        }
    }
}
