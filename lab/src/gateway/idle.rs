//! Idle flows: the host's ends are held by a child, the guest's by this process.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use fulmar_gateway::netns::Netns;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::program::{HOST_IP, Instance};
use crate::child::Handle;
use crate::harness::Sample;
use crate::sys;

/// The role of the child.
pub(crate) const ROLE: &str = "hold";
/// How long a connection may take, and all of them together.
const CONNECT: Duration = Duration::from_secs(3);
const ALL: Duration = Duration::from_secs(60);
/// The time that a gateway gets to finish its work after the last connection.
const SETTLE: Duration = Duration::from_millis(1500);
/// How long the CPU time of idle flows is measured.
const IDLE: Duration = Duration::from_secs(2);
/// Descriptors for everything else.
const OTHER_DESCRIPTORS: u64 = 500;

/// Memory after the start, KB.
pub const START_KB: &str = "resident_start_kb";
/// Memory that an idle flow takes.
pub const PER_FLOW: &str = "resident_bytes_per_flow";
/// CPU of the gateway with all flows idle, percent of one CPU.
pub const CPU_PCT: &str = "idle_cpu_pct";

/// Raises the limit of descriptors, for this process and its children, to what the system permits.
pub fn raise_limit() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// Cost of `flows` idle flows in a gateway that has just started.
pub fn measure(gateway: &Instance, flows: usize) -> io::Result<Sample> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let flows = flows.min(limit.saturating_sub(OTHER_DESCRIPTORS) as usize);
    let start_bytes = gateway.resident_bytes()?;
    let mut holder = Handle::spawn(&json!({ "role": ROLE, "flows": flows }), &Netns::current()?)?;
    let port = holder.report(CONNECT)?["port"].as_u64().unwrap_or(0) as u16;
    let to = SocketAddr::new(IpAddr::V4(HOST_IP), port);
    let connect = || (0..flows).map(|_| TcpStream::connect_timeout(&to, CONNECT)).collect();
    let held: Vec<TcpStream> = gateway.guest.run(connect)?;
    holder.report(ALL)?;
    std::thread::sleep(SETTLE);
    let cpu = gateway.cpu()?;
    std::thread::sleep(IDLE);
    let cpu = gateway.cpu()?.saturating_sub(cpu);
    let grown = gateway.resident_bytes()?.saturating_sub(start_bytes);
    // Without a reset a minute of TIME-WAIT would follow, in which ports are missing.
    held.iter().try_for_each(|s| sys::reset_on_close(s.as_fd()))?;
    Ok(Sample::of(START_KB, start_bytes as f64 / 1024.0)
        .with(PER_FLOW, grown as f64 / flows as f64)
        .with(CPU_PCT, cpu.as_secs_f64() * 100.0 / IDLE.as_secs_f64())
        .with("idle_flows", flows as f64))
}

/// The child's part: accepts the number of connections in `spec` and keeps them.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    let flows = spec["flows"].as_u64().unwrap_or(0);
    let listener = TcpListener::bind((HOST_IP, 0))?;
    crate::peer::print_line(&json!({ "port": listener.local_addr()?.port() }))?;
    let held: io::Result<Vec<_>> = (0..flows).map(|_| listener.accept()).collect();
    let held = held?;
    crate::peer::print_line(&json!({ "flows": held.len() }))?;
    // Until the parent ends us.
    std::thread::sleep(ALL);
    Ok(())
}
