//! Where the two programs of a run stand: who waits is the *near* end and is what is measured, who
//! asks or sends is the *far* end, always a process of its own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fulmar::config::ModerationConfig;
use fulmar::devices::{Shm, ShmConfig};
use fulmar::{Cidr, Stack};
use serde_json::{Value, json};

use super::program::{self, Account, Flow, Socket};
use super::{Device, Mode, sim};
use crate::child::Handle;
use crate::cpu::{self, Placement};
use crate::kernel::Pair;
use crate::on_pinned_thread;
use crate::stream::{Over, Testbed, build};
use crate::sys;
use crate::topology::{MTU, OUR_IP, PEER_IP};
use fulmar_gateway::netns::Netns;

/// The role of the children.
pub(crate) const ROLE: &str = "wake";
/// Time that a child may take beyond its run.
const PATIENCE: Duration = Duration::from_secs(8);
const SHM: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 72, 4, 1)), IpAddr::V4(Ipv4Addr::new(10, 72, 4, 2))];

/// The work of the far end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// Asks, and waits for the answer.
    Ask {
        /// How long.
        time: Duration,
    },
    /// Sends at a rate.
    Send(Flow),
}

impl Load {
    fn time(&self) -> Duration {
        match self {
            Load::Ask { time } => *time,
            Load::Send(flow) => flow.time,
        }
    }

    fn to_json(self) -> Value {
        match self {
            Load::Ask { time } => json!({ "ask": true, "time_ns": time.as_nanos() as u64 }),
            Load::Send(f) => json!({
                "pps": f.pps, "bytes": f.bytes, "time_ns": f.time.as_nanos() as u64,
                "may_spin": f.may_spin,
            }),
        }
    }

    fn from_json(v: &Value) -> Load {
        let n = |key: &str| v[key].as_u64().unwrap_or(0);
        let time = Duration::from_nanos(n("time_ns"));
        if v["ask"].as_bool() == Some(true) {
            return Load::Ask { time };
        }
        let may_spin = v["may_spin"].as_bool() == Some(true);
        Load::Send(Flow { pps: n("pps"), bytes: n("bytes") as usize, time, may_spin })
    }
}

/// Both ends of one run.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The end that waits.
    pub near: Account,
    /// The end that asks or sends.
    pub far: Account,
}

impl Sample {
    /// 50, 99 and 99.9 % of the latencies, in ns: of the far end's questions, else of what arrived.
    pub fn latency_ns(&self) -> Option<[u64; 3]> {
        self.far.latency_ns.or(self.near.latency_ns)
    }
}

/// The open ends for a device and a placement.
pub struct Rig {
    /// The device of the datagrams.
    pub device: Device,
    /// Where the ends run.
    pub placement: Placement,
    carrier: Carrier,
}

enum Carrier {
    /// TAP or AF_PACKET: a stack in this process.
    Real(Box<Testbed>),
    Shm,
    Sim,
    Veth(Pair),
    Loopback,
}

impl Rig {
    /// Opens it.
    ///
    /// # Errors
    /// The error of the device or the namespaces.
    pub fn open(device: Device, placement: Placement, pcap: Option<&PathBuf>) -> io::Result<Rig> {
        let carrier = match device {
            Device::Tap => Carrier::Real(Box::new(Testbed::new(Over::Tap, placement, pcap)?)),
            Device::Packet => Carrier::Real(Box::new(Testbed::new(Over::Packet, placement, pcap)?)),
            Device::Shm => Carrier::Shm,
            Device::Sim => Carrier::Sim,
            Device::Veth => Carrier::Veth(Pair::new(MTU, true)?),
            Device::Loopback => Carrier::Loopback,
        };
        Ok(Rig { device, placement, carrier })
    }

    /// Runs one load; `mode` is how fulmar's ends wait.
    ///
    /// # Errors
    /// The error of either end.
    pub fn run(&self, mode: Mode, load: Load) -> io::Result<Sample> {
        let (near_cpu, far_cpu) = self.placement.cpus(&cpu::allowed_cpus()?)?;
        match &self.carrier {
            Carrier::Real(testbed) => {
                let stack = &testbed.stack;
                stack.set_moderation(mode.config())?;
                let near = Socket::fulmar(stack, SocketAddr::new(IpAddr::V4(OUR_IP), 0))?;
                let far = Far { stack: "kernel", from: IpAddr::V4(PEER_IP), cpu: far_cpu };
                let sample =
                    beside(near, near_cpu, &far, &testbed.topology.peer_netns, load, json!({}));
                // Between runs no thread waits.
                stack.set_moderation(ModerationConfig::ADAPTIVE)?;
                sample
            }
            Carrier::Shm => shm(mode, load, near_cpu, far_cpu),
            Carrier::Sim => match load {
                Load::Send(flow) => sim::run(mode, &flow, near_cpu, far_cpu),
                Load::Ask { .. } => Err(io::Error::other("a modelled sender sends no requests")),
            },
            Carrier::Veth(pair) => {
                let ends = [Pair::NEAR, Pair::FAR];
                kernel([pair.near(), pair.far()], ends, load, near_cpu, far_cpu)
            }
            Carrier::Loopback => {
                let here = Netns::current()?;
                let lo = [IpAddr::V4(Ipv4Addr::LOCALHOST); 2];
                kernel([&here, &here], lo, load, near_cpu, far_cpu)
            }
        }
    }
}

/// The far end's program.
struct Far<'a> {
    stack: &'a str,
    from: IpAddr,
    cpu: Option<usize>,
}

impl Far<'_> {
    fn start(&self, to: SocketAddr, load: Load, netns: &Netns, more: Value) -> io::Result<Handle> {
        let mut spec = json!({
            "role": ROLE, "stack": self.stack, "from": self.from.to_string(),
            "cpu": self.cpu, "to": to.to_string(), "load": load.to_json(),
        });
        if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
            spec.extend(more.clone());
        }
        Handle::spawn(&spec, netns)
    }
}

/// The near end in this process, the far one in a child.
fn beside(
    near: Socket,
    near_cpu: Option<usize>,
    far: &Far<'_>,
    netns: &Netns,
    load: Load,
    more: Value,
) -> io::Result<Sample> {
    let mut child = far.start(near.local_addr()?, load, netns, more)?;
    let near = on_pinned_thread(near_cpu, || wait(&near, load))?;
    let far = Account::from_json(&child.report(load.time() + PATIENCE)?);
    Ok(Sample { near, far })
}

fn wait(socket: &Socket, load: Load) -> io::Result<Account> {
    match load {
        Load::Ask { .. } => program::answer(socket),
        Load::Send(_) => program::receive(socket),
    }
}

/// Both ends in children of the kernel's.
fn kernel(
    [near_netns, far_netns]: [&Netns; 2],
    [near_ip, far_ip]: [IpAddr; 2],
    load: Load,
    near_cpu: Option<usize>,
    far_cpu: Option<usize>,
) -> io::Result<Sample> {
    let spec = json!({
        "role": ROLE, "stack": "kernel", "from": near_ip.to_string(), "cpu": near_cpu,
        "load": load.to_json(),
    });
    let mut near = Handle::spawn(&spec, near_netns)?;
    let hello = near.report(PATIENCE)?;
    let to = hello["at"].as_str().and_then(|a| a.parse().ok());
    let to: SocketAddr = to.ok_or_else(|| io::Error::other("the child has no address"))?;
    let far = Far { stack: "kernel", from: far_ip, cpu: far_cpu };
    let mut far = far.start(to, load, far_netns, json!({}))?;
    let limit = load.time() + PATIENCE;
    let far = Account::from_json(&far.report(limit)?);
    Ok(Sample { near: Account::from_json(&near.report(limit)?), far })
}

/// Two processes over shared memory, met for this run.
fn shm(
    mode: Mode,
    load: Load,
    near_cpu: Option<usize>,
    far_cpu: Option<usize>,
) -> io::Result<Sample> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("fulmar-wake-{}-{number}", std::process::id());
    let (here, to) = (Netns::current()?, SocketAddr::new(SHM[0], 9));
    let far = Far { stack: "shm", from: SHM[1], cpu: far_cpu };
    let more = json!({ "name": name, "mode": mode.name() });
    let mut child = far.start(to, load, &here, more)?;
    let near = on_pinned_thread(near_cpu, || {
        let stack = meet(&name, mode, SHM[0])?;
        let socket = Socket::fulmar(&stack, to)?;
        wait(&socket, load)
    })?;
    let far = Account::from_json(&child.report(load.time() + PATIENCE)?);
    Ok(Sample { near, far })
}

/// Joins the other process and builds a stack on the shared memory.
fn meet(name: &str, mode: Mode, address: IpAddr) -> io::Result<Stack> {
    let config = ShmConfig { name: name.to_owned(), wait: Some(PATIENCE), ..ShmConfig::default() };
    let end = Shm::open(&config).map_err(io::Error::other)?;
    let stack = build(Box::new(end), Cidr { address, prefix_len: 24 }, "wake")?;
    stack.set_moderation(mode.config())?;
    Ok(stack)
}

/// A child's part: waits if it gets no address, else sends requests or a flow; prints its account.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    if let Some(cpu) = spec["cpu"].as_u64() {
        cpu::pin_to(cpu as usize)?;
    }
    // Without it a sleep between two datagrams is 50 µs longer than asked for.
    sys::exact_timers()?;
    let ip = |key: &str| spec[key].as_str().and_then(|a| a.parse::<IpAddr>().ok());
    let from = ip("from").ok_or_else(|| io::Error::other("no address"))?;
    let load = Load::from_json(&spec["load"]);
    let socket = match spec["stack"].as_str() {
        Some("shm") => {
            let mode = Mode::named(spec["mode"].as_str().unwrap_or_default());
            let stack = meet(spec["name"].as_str().unwrap_or_default(), mode, from)?;
            Socket::fulmar(&stack, SocketAddr::new(from, 0))?
        }
        _ => Socket::kernel(SocketAddr::new(from, 0))?,
    };
    let to = spec["to"].as_str().and_then(|a| a.parse::<SocketAddr>().ok());
    let account = match (to, load) {
        (None, load) => {
            crate::peer::print_line(&json!({ "at": socket.local_addr()?.to_string() }))?;
            wait(&socket, load)?
        }
        (Some(to), Load::Ask { time }) => program::ask(&socket, to, time)?,
        (Some(to), Load::Send(flow)) => program::send(&socket, to, &flow)?,
    };
    crate::peer::print_line(&account.to_json())
}
