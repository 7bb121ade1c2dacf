//! What the stages of a received packet's way cost: a short round over stacks that keep an account.

use super::bench::{Options, Testbeds, is_wanted};
use super::{Load, Method, Reader, Target, Use, size_name};
use crate::account::{self, Figures, Keeping, ROUND};
use crate::harness::options::Stack;
use crate::matrix::Device;
use fulmar::stat::ledger::Account;
use std::io;

/// The accounts of what the options measure of fulmar's: of the first size, use and placement, with
/// aggregation where both are measured; `is_isolated` says whether this process has namespaces of its own.
/// What cannot be opened here has none.
///
/// # Errors
/// A connection that fails.
pub fn accounts(options: &Options, is_isolated: bool) -> io::Result<Vec<Figures>> {
    let aggregation = match &options.aggregations()[..] {
        [only] => *only,
        _ => true,
    };
    let first = Options {
        stack: Stack::Fulmar,
        pcap: None,
        aggregation: Some(aggregation),
        placement: options.placements().into_iter().take(1).collect(),
        ..options.clone()
    };
    let testbeds = {
        let _keeping = Keeping::new();
        let devices = first.devices().into_iter();
        let device: Vec<Device> =
            devices.filter(|d| is_isolated || matches!(d, Device::Sim | Device::Shm)).collect();
        if device.is_empty() {
            return Ok(Vec::new());
        }
        Testbeds::open(&Options { device, ..first.clone() }, Ok(()))?
    };
    let usage = options.uses().first().copied().unwrap_or(Use::Touched);
    let load = Load::of_buffers(options.sizes().first().copied().unwrap_or(64 << 10), usage);
    let mut found = Vec::new();
    for rig in testbeds.rigs() {
        let rig = &mut *rig.borrow_mut();
        let config = rig.config();
        for method in Method::ALL {
            if !method.fits(config.offloads) || !is_wanted(options, method.name()) {
                continue;
            }
            let mut reader = Accounted {
                inner: method.reader(&load)?,
                load,
                came: 0,
                before: None,
                found: None,
            };
            let sample = rig.stream(&load, &mut reader, ROUND)?;
            let title = format!(
                "{}: {}, 2 x {}",
                config.device,
                method.title(),
                size_name(load.buffer_bytes)
            );
            let hardware = sample.hardware.as_nanos() as f64;
            let figures = reader.found.take().and_then(|f| Figures::of(&f, config.device, &title));
            let hardware_ns = (hardware > 0.0).then_some(hardware);
            let own_copies = reader.inner.copies_per_byte() as f64;
            found.extend(figures.map(|f| {
                let copies_per_byte = f.copies_per_byte + own_copies;
                Figures { hardware_ns, copies_per_byte, ..f }
            }));
        }
    }
    Ok(found)
}

/// A reader whose stack keeps an account: that begins behind the warm-up and is taken at the end.
struct Accounted {
    inner: Box<dyn Reader>,
    load: Load,
    came: u64,
    before: Option<Account>,
    found: Option<Account>,
}

impl Reader for Accounted {
    fn begin(&mut self, from: &Target<'_>) -> io::Result<()> {
        self.inner.begin(from)
    }

    fn call(&mut self, from: &Target<'_>) -> io::Result<u64> {
        if self.came >= self.load.warm_bytes && self.before.is_none() {
            self.before = Some(account::begin(from.stack)?);
        }
        let n = self.inner.call(from)?;
        self.came += n;
        Ok(n)
    }

    fn finish(&mut self, from: &Target<'_>) -> io::Result<()> {
        let now = from.stack.account()?;
        self.found = now.zip(self.before.take()).map(|(now, before)| now.since(&before));
        self.inner.finish(from)
    }

    fn copies_per_byte(&self) -> u64 {
        self.inner.copies_per_byte()
    }
}
