//! The interface: its tables, and the doors to them.

use core::net::{IpAddr, SocketAddr};
use fulmar_base::{Counters, Instant, Offload, Zone};
use fulmar_mbuf::{Chain, Pool};
use fulmar_route::{Neighbour, Prefix, Route};

use crate::*;

/// IPv4 and IPv6 on one interface.
pub struct Ip {
    config: Config,
}

#[allow(unused_variables, clippy::too_many_arguments, missing_docs)]
impl Ip {
    pub fn new(config: Config, seed: u64) -> Result<Ip, ConfigError> { Ok(Ip { config }) }
    pub fn input<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, frame: Chain, offload: Offload, out: &mut S) -> Verdict { Verdict::Consumed }
    pub fn output<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, packet: Outgoing, out: &mut S) -> Result<(), OutputError> { Err(OutputError::NoRoute) }
    pub fn route(&mut self, now: Instant, dst: IpAddr, zone: Zone) -> Result<PathChoice, NoRoute> { Err(NoRoute) }
    pub fn generation(&self) -> u64 { 0 }
    pub fn lower_path_mtu(&mut self, now: Instant, dst: IpAddr, mtu: usize) {}
    pub fn confirm(&mut self, now: Instant, dst: IpAddr) {}
    pub fn on_timer<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, out: &mut S) {}
    pub fn next_deadline(&self) -> Option<Instant> { None }
    pub fn drain_failed(&mut self) -> impl Iterator<Item = QuotedError> + '_ { core::iter::empty() }
    pub fn port_unreachable<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, about: &SavedHeader, out: &mut S) {}
    pub fn echo_request<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, to: SocketAddr, echo: (u16, u16), payload: Chain, out: &mut S) -> Result<(), OutputError> { Err(OutputError::NoRoute) }
    pub fn announce<S: FrameSink>(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters, out: &mut S) {}
    pub fn is_local(&self, ip: IpAddr) -> bool { false }
    pub fn is_broadcast(&self, ip: IpAddr) -> bool { false }
    pub fn mtu(&self) -> usize { self.config.mtu }
    pub fn neighbours(&self) -> impl Iterator<Item = &Neighbour> { core::iter::empty() }
    pub fn routes(&self) -> impl Iterator<Item = &Route> { core::iter::empty() }
    pub fn addresses(&self) -> impl Iterator<Item = &IfAddr> { core::iter::empty() }
    pub fn add_address(&mut self, address: IfAddr) -> Result<(), ConfigError> { Ok(()) }
    pub fn remove_address(&mut self, addr: IpAddr) -> bool { false }
    pub fn add_route(&mut self, route: Route) -> Result<(), ConfigError> { Ok(()) }
    pub fn remove_route(&mut self, dst: Prefix) -> Option<Route> { None }
    pub fn release(&mut self, pool: &mut Pool) {}
}
