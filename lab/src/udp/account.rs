//! Cost of a datagram by stage, call by call: a short round over stacks that keep an account.

use std::io;
use std::time::Instant;

use super::rig::{Ours, Rig, Shards};
use super::{Device, Method, Options};
use crate::account::{self, Figures, Keeping, ROUND};
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use fulmar_nic::thread_hardware_ns;

/// The accounts of what the options measure of fulmar's, of the smallest payload and by one thread. What
/// cannot be opened here has none.
///
/// # Errors
/// No CPU to run on; a device that fails.
pub fn accounts(options: &Options) -> io::Result<Vec<Figures>> {
    let bytes = options.bytes().into_iter().min().unwrap_or(super::SMALL);
    let methods: Vec<Method> =
        Method::ALL.into_iter().filter(|m| *m != Method::Apart || bytes > 1).collect();
    of_calls(&options.devices(), &methods, bytes)
}

/// The accounts of these calls over these devices.
///
/// # Errors
/// As [`accounts`].
pub(super) fn of_calls(
    devices: &[Device],
    methods: &[Method],
    bytes: usize,
) -> io::Result<Vec<Figures>> {
    let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    on_pinned_thread(cpu, || {
        let mut found = Vec::new();
        for device in devices.iter().filter(|d| **d != Device::Veth) {
            match opened(*device) {
                Ok((_shards, mut ours)) => {
                    for method in methods.iter().filter(|m| device.can(**m)) {
                        found.extend(of_call(&mut ours, *device, *method, bytes)?);
                    }
                }
                Err(e) => eprintln!("not measured: the stages of {}: {e}", device.name()),
            }
        }
        Ok(found)
    })
}

/// A stack that keeps an account, with its sockets; on the simulated device also its shards.
fn opened(device: Device) -> io::Result<(Option<Shards>, Ours)> {
    let _keeping = Keeping::new();
    if device == Device::Tap {
        return Ok((None, Ours::tap()?));
    }
    let shards = Shards::open(1)?;
    let ours = shards.rig(0)?;
    Ok((Some(shards), ours))
}

/// Makes calls for a while, and returns their cost.
fn of_call(
    ours: &mut Ours,
    device: Device,
    method: Method,
    bytes: usize,
) -> io::Result<Option<Figures>> {
    let section = ours.section_of(method);
    let once = |ours: &mut Ours| {
        ours.prepare(method, bytes)?;
        ours.send(method, bytes, section)?;
        ours.drain(bytes, section).map(drop)
    };
    // The first warms: caches, templates, the pool's stacks.
    once(ours)?;
    let before = account::begin(ours.stack())?;
    let (start, hardware) = (Instant::now(), thread_hardware_ns());
    while start.elapsed() < ROUND {
        once(ours)?;
    }
    let hardware = (thread_hardware_ns() - hardware) as f64;
    let Some(found) = ours.stack().account()?.map(|now| now.since(&before)) else {
        return Ok(None);
    };
    let title = format!("{}: {}, {bytes} bytes", device.name(), method.title(device));
    let figures = Figures::of(&found, device.name(), &title);
    Ok(figures.map(|f| Figures { hardware_ns: (device == Device::Sim).then_some(hardware), ..f }))
}
