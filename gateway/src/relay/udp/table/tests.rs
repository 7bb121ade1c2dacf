//! The table beside a list that is searched.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_stack::base::Duration;
use proptest::prelude::*;

use super::super::super::Endpoints;
use super::super::flow::HostSocket;
use super::*;
use crate::stat::Direction;

const MOST: usize = 16;

fn at(host: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host], port))
}

fn flow(fd: &Arc<OwnedFd>, direction: Direction, n: u16, now: Instant) -> Flow {
    let host = HostSocket { fd: Arc::clone(fd), local: None, port: None };
    let ends = Endpoints { guest: at(1, 1), peer: at(2, n), host: at(3, n) };
    Flow::new(host, direction, ends, now)
}

fn a_descriptor() -> Arc<OwnedFd> {
    Arc::new(File::open("/dev/null").unwrap().into())
}

#[test]
fn strangers_never_displace_the_flows_of_the_guest() {
    let (mut table, fd, now) = (Table::default(), a_descriptor(), Instant::from_nanos(1 << 30));
    for n in 0..MOST as u16 / 2 {
        table.insert(flow(&fd, Direction::Out, n, now), now);
    }
    for n in 100..1100 {
        if let Some(id) = table.victim(Class::Stranger, MOST, now) {
            assert_eq!(table.remove(id).unwrap().class(), Class::Stranger);
        }
        table.insert(flow(&fd, Direction::In, n, now), now);
    }
    assert_eq!(table.count, [MOST / 2, 0, MOST / STRANGERS]);
    assert!(table.order.iter().all(|order| order.len() <= 2 * MOST + 65));
}

#[test]
fn a_full_table_takes_from_the_direction_that_has_more_than_half() {
    let (mut table, fd, now) = (Table::default(), a_descriptor(), Instant::from_nanos(1 << 30));
    let mut n = 0;
    let mut add = |table: &mut Table, is_answered: bool| {
        n += 1;
        let direction = if is_answered { Direction::In } else { Direction::Out };
        let mut flow = flow(&fd, direction, n, now);
        flow.datagrams_out = 1;
        if let Some(id) = table.victim(flow.class(), MOST, now) {
            table.remove(id);
        }
        table.insert(flow, now);
    };
    (0..3 * MOST).for_each(|_| add(&mut table, true));
    assert_eq!(table.count, [0, MOST, 0], "what the guest does not use");
    (0..3 * MOST).for_each(|_| add(&mut table, false));
    assert_eq!(table.count, [MOST / 2, MOST / 2, 0]);
    (0..3 * MOST).for_each(|_| add(&mut table, true));
    assert_eq!(table.count, [MOST / 2, MOST / 2, 0]);
}

#[derive(Clone, Debug)]
enum Op {
    Begin { n: u16, is_out: bool },
    Move { n: u16, out: bool },
    Remove { n: u16 },
    Wait { seconds: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..40u16, any::<bool>()).prop_map(|(n, is_out)| Op::Begin { n, is_out }),
        6 => (0..40u16, any::<bool>()).prop_map(|(n, out)| Op::Move { n, out }),
        1 => (0..40u16).prop_map(|n| Op::Remove { n }),
        2 => (0..200u64).prop_map(|seconds| Op::Wait { seconds }),
    ]
}

/// The table as a list: the number of each flow with its class and when its time is over.
type Model = Vec<(u16, Class, Instant)>;

fn take_over(table: &Table, model: &mut Model, n: u16) {
    let id = table.find((at(1, 1), at(2, n))).unwrap();
    let flow = table.get(id).unwrap();
    model.retain(|(other, ..)| *other != n);
    model.push((n, flow.class(), flow.expires()));
}

proptest! {
    #[test]
    fn the_table_is_a_list_that_is_searched(ops in prop::collection::vec(op(), 0..300)) {
        let (mut table, fd) = (Table::default(), a_descriptor());
        let (mut model, mut now): (Model, _) = (Vec::new(), Instant::from_nanos(1 << 30));
        for op in ops {
            match op {
                Op::Begin { n, .. } if model.iter().any(|(other, ..)| *other == n) => {}
                Op::Begin { n, is_out } => {
                    let direction = if is_out { Direction::Out } else { Direction::In };
                    let new = flow(&fd, direction, n, now);
                    if let Some(id) = table.victim(new.class(), MOST, now) {
                        let gone = table.remove(id).unwrap().peer.port();
                        model.retain(|(other, ..)| *other != gone);
                    }
                    table.insert(new, now);
                    take_over(&table, &mut model, n);
                }
                Op::Move { n, out } => {
                    let Some(id) = table.find((at(1, 1), at(2, n))) else { continue };
                    let flow = table.get_mut(id).unwrap();
                    if out {
                        flow.datagrams_out += 1;
                        flow.moved = now;
                    } else {
                        flow.count_in(1, 1, now);
                    }
                    table.touched(id, now);
                    take_over(&table, &mut model, n);
                }
                Op::Remove { n } => {
                    let id = table.find_host((fd.as_raw_fd(), at(3, n), None));
                    let removed = id.and_then(|id| table.remove(id)).map(|flow| flow.peer.port());
                    prop_assert_eq!(removed, model.iter().find(|(m, ..)| *m == n).map(|(m, ..)| *m));
                    model.retain(|(other, ..)| *other != n);
                }
                Op::Wait { seconds } => {
                    now = now + Duration::from_secs(seconds);
                    while let Some(id) = table.expired(now) {
                        let over = table.remove(id).unwrap().peer.port();
                        prop_assert!(model.iter().any(|(n, _, at)| *n == over && *at <= now));
                        model.retain(|(n, ..)| *n != over);
                    }
                    // A timer fires in its tick.
                    let tick = Duration::from_millis(2);
                    prop_assert!(model.iter().all(|(.., at)| *at + tick > now));
                }
            }
            prop_assert!(model.len() <= MOST && table.iter().count() == model.len());
            for class in [Class::Out, Class::Answered, Class::Stranger] {
                let wanted = model.iter().filter(|(_, other, _)| *other == class).count();
                prop_assert_eq!(table.count[class as usize], wanted);
            }
            let is_written_to = model.iter().any(|(_, class, _)| *class != Class::Stranger);
            let name = table.name_of((fd.as_raw_fd(), at(3, 0).ip()));
            prop_assert_eq!(name, is_written_to.then_some(at(2, 0).ip()));
        }
    }
}
