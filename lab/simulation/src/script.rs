//! What befalls the stations and their routes, at instants that the scenario names.

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::route::Route;

use super::attack::Injected;
use super::gate::lock;
use super::scenario::{RouteChange, Scenario, Trouble};
use super::world::{START, World, address, host_prefix, link_prefix, own_address};

/// A change that the script makes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Dead([bool; 2]),
    Gone(usize),
    Mute(usize, bool),
    Route(usize, RouteChange),
    Jump(Duration),
}

impl World {
    /// Makes the changes that are due.
    pub(super) fn run_script(&mut self) {
        while let Some((at, change)) = self.script.first().copied() {
            if at > self.now {
                return;
            }
            self.script.remove(0);
            let mut network = lock(&self.network);
            network.log.line(self.now, || format!("  script: {change:?}"));
            match change {
                Change::Dead(of) => network.dead = of,
                Change::Jump(by) => {
                    self.now = at.max(self.now) + by;
                    // No frame can be seen while the clock jumps.
                    let now = self.now;
                    network.attention.iter_mut().for_each(|a| a.looked(now, None));
                }
                Change::Gone(station) => network.gone[station] = true,
                Change::Mute(station, on) => network.mute[station] = on,
                Change::Route(station, change) => {
                    drop(network);
                    self.change_route(station, change);
                }
            }
        }
    }

    fn change_route(&mut self, station: usize, change: RouteChange) {
        let v6 = self.scenario.v6;
        let (host, link) = (host_prefix(v6, 1 - station), link_prefix(v6));
        let (now, own) = (self.now, address(v6, station));
        let ip = self.sides[station].shard.ip();
        match change {
            RouteChange::Host(mtu) => {
                let route = Route { mtu: Some(mtu), ..Route::on_link(host) };
                ip.add_route(route).expect("invariant: a sound route");
            }
            RouteChange::NoHost => drop(ip.remove_route(host)),
            RouteChange::Cut => drop(ip.remove_route(link)),
            RouteChange::Mend => {
                ip.add_route(Route::on_link(link)).expect("invariant: a sound route");
            }
            RouteChange::PathMtu(mtu) => {
                ip.lower_path_mtu(now, address(v6, 1 - station), mtu);
            }
            RouteChange::Leave => _ = ip.remove_address(own),
            RouteChange::Return => {
                ip.add_address(own_address(v6, station)).expect("invariant: ours")
            }
            RouteChange::Move { is_announced } => {
                let mut network = lock(&self.network);
                network.station_addresses[station].move_on();
                let frame = network.station_addresses[station].announcement(own);
                if is_announced {
                    let injected = Injected { at: now, frame, is_strict: false };
                    network.injected[1 - station].push_back(injected);
                }
            }
        }
    }
}

/// All changes of a scenario in the order of time.
pub(super) fn plan(s: &Scenario) -> Vec<(Instant, Change)> {
    let at = |d: Duration| START + d;
    let jumps = s.swarm.jumps.iter().map(|(d, by)| (at(*d), Change::Jump(*by)));
    let mut script: Vec<(Instant, Change)> =
        troubles(&s.trouble).into_iter().chain(jumps).collect();
    script.sort_by_key(|c| c.0);
    script
}

fn troubles(trouble: &Trouble) -> Vec<(Instant, Change)> {
    let at = |d: Duration| START + d;
    match trouble {
        Trouble::None => Vec::new(),
        Trouble::Pause { at: from, lasts } => vec![
            (at(*from), Change::Dead([true; 2])),
            (at(*from + *lasts), Change::Dead([false; 2])),
        ],
        Trouble::Death { at: from, of } => vec![(at(*from), Change::Dead(*of))],
        Trouble::Gone { at: from, station } => vec![(at(*from), Change::Gone(*station))],
        Trouble::Mute { at: from, lasts, station } => vec![
            (at(*from), Change::Mute(*station, true)),
            (at(*from + *lasts), Change::Mute(*station, false)),
        ],
        Trouble::Routes(changes) => {
            changes.iter().map(|(d, s, c)| (at(*d), Change::Route(*s, *c))).collect()
        }
    }
}
