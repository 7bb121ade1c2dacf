//! The middleboxes that the swarm puts on a path: those that change ECN fields, and those that remove options of SYNs.

use fulmar_stack::tcp::EcnPolicy;

use super::middlebox::{self, Action, Middlebox, Segments};
use super::scenario::{Draw, Scenario};
use super::swarm::limit_bytes;
use super::world::START;

impl Scenario {
    /// ECN that is asked for, and one to three middleboxes that do not want it.
    pub(super) fn draw_ecn_manglers(&mut self, d: &mut Draw) {
        for s in &mut self.stations {
            s.tcp.ecn = d.pick(&[EcnPolicy::Accept, EcnPolicy::Ask, EcnPolicy::Ask]);
        }
        for _ in 0..=d.below(3) {
            let which =
                d.pick(&[Segments::Syns, Segments::SynAcks, Segments::Others, Segments::All]);
            let action = d.pick(&[
                Action::DropEcn,
                Action::Strip(middlebox::ACCECN[0]),
                Action::Strip(middlebox::ACCECN[1]),
                Action::ClearEcnFlags,
                Action::Bleach,
                Action::MarkCapable,
                Action::MarkAll,
                Action::SwapCapable,
            ]);
            // Segments with data are never without flags: no connection goes through a path that eats those.
            let segments = match action {
                Action::DropEcn if !matches!(which, Segments::Syns | Segments::SynAcks) => {
                    Segments::Syns
                }
                _ => which,
            };
            let station = d.below(2) as usize;
            self.add_middlebox(d, station, action, segments);
        }
        // Where every packet is marked, or the answer to a mark is lost, the window stays at its least.
        self.flows.iter_mut().for_each(|f| limit_bytes(f, 30_000));
    }

    /// Options that a path removes. A connection does not work if one end alone has negotiated window scale or
    /// timestamps (RFC 7323 sections 2.2 and 3.2). So the path always removes these two options from the SYNs of both
    /// ends, for the sake of simultaneous opens.
    pub(super) fn draw_path_options(&mut self, d: &mut Draw) {
        for _ in 0..=d.below(3) {
            let (kind, segments) = d.pick(&[
                (middlebox::MSS, Segments::Syns),
                (middlebox::MSS, Segments::SynAcks),
                (middlebox::SACK_PERMITTED, Segments::Syns),
                (middlebox::SACK_PERMITTED, Segments::SynAcks),
                (middlebox::WINDOW_SCALE, Segments::Syns),
                (middlebox::TIMESTAMPS, Segments::Syns),
            ]);
            if matches!(kind, middlebox::WINDOW_SCALE | middlebox::TIMESTAMPS) {
                let everywhere = Middlebox { action: Action::Strip(kind), segments, from: START };
                self.swarm.middleboxes.iter_mut().for_each(|m| m.push(everywhere));
            } else {
                let station = d.below(2) as usize;
                self.add_middlebox(d, station, Action::Strip(kind), segments);
            }
        }
    }

    /// Whether a middlebox may leave a connection with the least window.
    pub(super) fn has_ecn_manglers(&self) -> bool {
        let changes_ecn = |action| {
            matches!(
                action,
                Action::ClearEcnFlags | Action::Bleach | Action::MarkCapable | Action::MarkAll
            )
        };
        self.swarm.middleboxes.iter().flatten().any(|m| changes_ecn(m.action))
    }

    /// Whether a middlebox removes the MSS option.
    pub(super) fn has_no_mss(&self) -> bool {
        let action = Action::Strip(middlebox::MSS);
        self.swarm.middleboxes.iter().flatten().any(|m| m.action == action)
    }
}
