//! Options that a program sets: ECN over a queue that marks, path MTU discovery by probes, keepalive,
//! TCP_NOTSENT_LOWAT.

use fulmar_stack::base::{Duration, SlotId};
use fulmar_stack::device::impair::Aqm;
use fulmar_stack::tcp::{EcnPolicy, Keepalive, MtuProbing};

use super::app::Cx;
use super::fast_open::FirstPlan;
use super::filing::FilePlan;
use super::oracle::Violation;
use super::scenario::{Draw, EndPlan, Scenario};

const MS: Duration = Duration::from_millis(1);

/// Options of a socket beside those that every scenario has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SocketPlan {
    /// Probes of an idle peer.
    pub keepalive: Option<Keepalive>,
    /// TCP_NOTSENT_LOWAT, bytes.
    pub notsent_low_water: Option<u32>,
    /// First data of the opener.
    pub first: Option<FirstPlan>,
    /// Sends files instead of writing; `None`: writes.
    pub file: Option<FilePlan>,
}

impl EndPlan {
    /// Sets the options on the socket of a new connection.
    pub(super) fn set_options(&self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        if !self.cork && self.options == SocketPlan::default() {
            return Ok(());
        }
        let set = cx.shard.with_tcb(cx.now, id, |t| {
            t.tcb.set_cork(self.cork);
            t.tcb.set_keepalive(self.options.keepalive);
            t.tcb.set_notsent_low_water(self.options.notsent_low_water);
        });
        set.map_err(|e| Violation::Call("with_tcb", e))
    }
}

impl Scenario {
    pub(super) fn draw_options(&mut self, d: &mut Draw) {
        let is_black_hole = self.paths.iter().any(|w| w.mtu.is_some());
        for s in &mut self.stations {
            s.tcp.ecn =
                d.pick(&[EcnPolicy::Off, EcnPolicy::Accept, EcnPolicy::Ask, EcnPolicy::Ask]);
            let probing = d.pick(&[MtuProbing::Off, MtuProbing::BlackHole, MtuProbing::Always]);
            if probing != MtuProbing::Off || !is_black_hole {
                s.tcp.mtu_probing = probing;
            }
        }
        for w in &mut self.paths {
            if let Some(rate) = w.rate_bps
                && d.percent(60)
            {
                // A packet that waits for one other packet is not a standing queue (RFC 8289 section 4.3).
                let one = Duration::from_nanos(self.mtu as u64 * 8_000_000_000 / rate);
                let target = (MS * d.log(1, 20) as u32).max(one * 2);
                (w.ecn, w.aqm) = (true, Aqm::CoDel { target, interval: target * 20 });
            }
        }
        for e in self.flows.iter_mut().flat_map(|f| &mut f.ends) {
            // Enough probes that no outage outlasts them.
            let (idle, interval) = (MS * d.log(1_000, 100_000) as u32, MS * 20_000);
            e.options.keepalive = d.percent(40).then_some(Keepalive { idle, interval, count: 200 });
            e.options.notsent_low_water = d.percent(30).then(|| d.log(1, 200_000) as u32);
        }
    }
}
