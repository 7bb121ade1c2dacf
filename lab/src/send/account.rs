//! What the stages of a write cost: a short round over simulated devices, by stacks that keep an account.

use super::sim::Simulated;
use super::{Caller, Load, Method, Rig, Target};
use crate::account::{self, Figures, Keeping, ROUND};
use fulmar::stat::ledger::Account;
use std::io;

const METHODS: [Method; 4] = [Method::Old, Method::Published, Method::Ours, Method::Owned];

/// The accounts of writes of 64 KiB, with and without super-segments.
///
/// # Errors
/// Too many open descriptors; a connection that fails.
pub fn accounts() -> io::Result<Vec<Figures>> {
    let load = Load::of_writes(64 << 10);
    let mut found = Vec::new();
    for (super_segments, group) in [(true, "sim, super-segments"), (false, "sim, single segments")]
    {
        let mut rig = {
            let _keeping = Keeping::new();
            Simulated::new(super_segments, None)?
        };
        for method in METHODS {
            let inner = method.caller(&load);
            let own_copies = inner.copies_per_byte() as f64;
            let mut caller = Accounted { inner, left: load.warm_bytes, before: None, found: None };
            let transfer = rig.stream(&load, &mut caller, ROUND)?;
            let title = format!("{group}: {}, 64 KiB", method.title());
            let figures = caller.found.take().and_then(|f| Figures::of(&f, group, &title));
            let hardware_ns = Some(transfer.hardware.as_nanos() as f64);
            found.extend(figures.map(|f| {
                let copies_per_byte = f.copies_per_byte + own_copies;
                Figures { hardware_ns, copies_per_byte, ..f }
            }));
        }
    }
    Ok(found)
}

/// A caller whose stack keeps an account: that begins behind the warm-up and is taken at the end.
struct Accounted {
    inner: Box<dyn Caller>,
    /// Bytes before it begins.
    left: u64,
    before: Option<Account>,
    found: Option<Account>,
}

impl Caller for Accounted {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        if self.left == 0 && self.before.is_none() {
            self.before = Some(account::begin(to.stack)?);
        }
        let n = self.inner.call(to)?;
        self.left = self.left.saturating_sub(n);
        Ok(n)
    }

    fn copies_per_byte(&self) -> u64 {
        self.inner.copies_per_byte()
    }

    fn finish(&mut self, to: &Target<'_>) -> io::Result<()> {
        let now = to.stack.account()?;
        self.found = now.zip(self.before.take()).map(|(now, before)| now.since(&before));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_writing_has_its_stages_and_copies() {
        let found = accounts().expect("simulated devices");
        assert_eq!(found.len(), 2 * METHODS.len());
        let of = |title: &str| {
            found.iter().find(|f| f.title.contains(title)).expect("it is there").copies_per_byte
        };
        assert!(of("send_owned") < 0.1 && of("fulmar write") > 0.9);
        assert!(found.iter().all(|f| f.packets > 0.0 && !f.parts.is_empty()));
    }
}
