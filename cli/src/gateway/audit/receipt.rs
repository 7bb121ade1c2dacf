//! The receipt at the end of an audit: the gateway's CPU time by destination and stage.
//!
//! The time is that of the process by the kernel, since the network was up. The account of the gateway samples in which
//! stages it was spent, the time of the writer is measured, and the destinations share the rest by their work: bytes,
//! and [`FLOW_BYTES`] for each flow. So the sums are exact, and the shares an estimate.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fulmar::stat::ledger::{Account, Stage};
use fulmar_gateway::policy::Protocol;
use nix::time::{ClockId, clock_gettime};

/// The work of a flow without its bytes, as bytes: a connection costs about as much CPU time as 64 KiB.
const FLOW_BYTES: u64 = 64 << 10;

/// The CPU time of the process.
pub(super) fn of_process() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// The CPU time of the calling thread.
pub(super) fn of_thread() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// What a guest did at one destination.
#[derive(Clone, Debug, Default)]
pub(in crate::gateway) struct Work {
    /// Its transport and address as the guest wrote it; `None`: destinations that are counted together.
    pub to: Option<(Protocol, SocketAddr)>,
    pub name: Option<String>,
    pub flows: u64,
    pub denied: u64,
    pub bytes_out: u64,
    pub bytes_in: u64,
}

impl Work {
    fn weight(&self) -> f64 {
        (self.bytes_out + self.bytes_in + FLOW_BYTES * (self.flows + self.denied)) as f64
    }
}

/// Microseconds by stage.
pub(super) type Stages = BTreeMap<&'static str, f64>;

/// The stages of the whole gateway, of which `writer` is the audit's thread.
pub(super) fn stages(account: Option<&Account>, all: Duration, writer: Duration) -> Stages {
    let relay_us = all.saturating_sub(writer).as_secs_f64() * 1e6;
    let sampled = account.map(|account| account.stages.as_slice()).unwrap_or_default();
    let sampled = || sampled.iter().filter(|time| time.stage != Stage::Slept && time.ns > 0.0);
    let sum: f64 = sampled().map(|time| time.ns).sum();
    let mut stages: Stages =
        sampled().map(|time| (time.stage.name(), time.ns / sum * relay_us)).collect();
    if stages.is_empty() {
        stages.insert("not_sampled", relay_us);
    }
    stages.insert("audit", writer.min(all).as_secs_f64() * 1e6);
    stages
}

/// The shares of the destinations in the stages of the gateway.
pub(super) fn shares(work: &[Work], all: &Stages) -> Vec<Stages> {
    let sum: f64 = work.iter().map(Work::weight).sum();
    let share = |one: &Work| {
        let part = one.weight() / sum;
        all.iter().map(|(stage, us)| (*stage, us * part)).collect()
    };
    if sum > 0.0 { work.iter().map(share).collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar::stat::ledger::StageTime;

    #[test]
    fn the_shares_add_up_to_the_measured_time() {
        let time = |stage, ns| StageTime { stage, passes: 1.0, ns };
        let mut account = Account::default();
        account.stages =
            vec![time(Stage::HostSent, 3e6), time(Stage::Relayed, 1e6), time(Stage::Slept, 1e9)];
        let (measured, writer) = (Duration::from_micros(5000), Duration::from_micros(1000));
        let all = stages(Some(&account), measured, writer);
        assert_eq!(all["host_sent"], 3000.0);
        assert_eq!((all["audit"], all.len()), (1000.0, 3));
        let work = |flows, bytes_in| Work { flows, bytes_in, ..Work::default() };
        let shares = shares(&[work(1, 0), work(0, FLOW_BYTES), work(2, 0)], &all);
        let sums: Vec<f64> = shares.iter().map(|stages| stages.values().sum()).collect();
        assert_eq!(sums, [1250.0, 1250.0, 2500.0]);
        let without = stages(None, measured, writer);
        assert_eq!(without["not_sampled"] + without["audit"], 5000.0);
        assert!(super::shares(&[], &all).is_empty());
    }
}
