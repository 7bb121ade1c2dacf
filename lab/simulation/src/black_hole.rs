//! Paths that lose large packets and do not say so.

use fulmar_stack::base::Duration;

use super::scenario::{Draw, Scenario, Trouble};

impl Scenario {
    /// Paths that lose large packets without a word (RFC 2923 section 2.1), drawn apart, so that all else of a seed is
    /// as it was before there were such. A connection needs three time-outs to notice.
    pub(super) fn draw_black_hole(&mut self) {
        let d = &mut Draw::new(self.seed ^ 0xb1ac_0000);
        let least = if self.v6 { 1280 } else { 576 };
        let open = self.mtu.saturating_sub(least) as u64;
        let is_patient =
            self.stations.iter().all(|s| s.tcp.user_timeout >= Duration::from_secs(100));
        if d.percent(6) && is_patient && open > 0 && self.trouble == Trouble::None {
            let mtu = least + d.below(open) as usize;
            let paths = if d.percent(50) { 2 } else { 1 };
            self.paths[..paths].iter_mut().for_each(|w| w.mtu = Some(mtu));
        }
    }
}
