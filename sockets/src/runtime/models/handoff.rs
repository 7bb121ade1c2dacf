//! Packets that come on another shard's queue.

use std::sync::Arc;

use fulmar_stack::models::{Model, model, spawn};

use super::wire::{self, PORTS, Wire};
use super::{bind, read};
use crate::runtime::account::Ledger;
use crate::runtime::handoff::handoffs;
use crate::runtime::host::Host;
use crate::runtime::watched::WatchedShard;

pub const MODELS: &[Model] =
    fulmar_stack::models![a_reader_is_woken_by_what_another_shard_hands_over,];

fn a_reader_is_woken_by_what_another_shard_hands_over() {
    for is_level_triggered in [false, true] {
        model(3, move || {
            let wires = [0, 1].map(|_| Wire::new(is_level_triggered));
            let mut ends = handoffs(2).into_iter();
            let hosts = [0, 1].map(|id| {
                let shard = wire::shard(&wires[usize::from(id)], id, 2);
                let mut shard = WatchedShard::new(shard);
                shard.join(ends.next().unwrap());
                Arc::new(Host::new(shard, Ledger::off()).unwrap())
            });
            for host in &hosts {
                host.set_siblings(hosts.iter().map(Arc::downgrade).collect());
            }
            let socket = bind(&hosts[1], PORTS[0]);
            wires[0].deliver(PORTS[0]);
            let other = hosts[0].clone();
            let receiver = spawn(move || other.poll().unwrap());
            read(&hosts[1], socket).unwrap();
            receiver.join().unwrap();
        });
    }
}
