//! `fulmar sandbox`: a program in a user and network namespace of its own, where every subcommand of
//! `fulmar` can be tried without root.
//!
//! ```text
//!   fulmar0 ── port0 ─┐
//!   fulmar1 ── port1 ─┼─ kernel0: a bridge, and the kernel's interface with 10.77.0.1 and fd77::1
//!      ...            │
//! ```
//!
//! Each `fulmar` command takes the first free `fulmarN`. Where the kernel has no bridges there is `fulmar0`
//! alone, joined to `kernel0`. All of it is gone with the last program inside.

use crate::exec;
use crate::failure::{During, Failure, Outcome};
use fulmar_gateway::netns::{HOW_TO_ALLOW, Netns, VethEnd};
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::ExitCode;

/// The interface that fulmar drives where the user names none.
pub const DEFAULT_INTERFACE: &str = "fulmar0";
/// The kernel's interface in a sandbox.
const KERNEL_INTERFACE: &str = "kernel0";
/// Interfaces of a sandbox for fulmar, each for one command.
pub const INTERFACES: usize = 4;
/// The kernel's addresses beside fulmar, with their prefix lengths.
pub const KERNEL_ADDRESSES: [(IpAddr, u8); 2] = numbered(1);
/// fulmar's addresses where the user gives none.
pub const FULMAR_ADDRESSES: [(IpAddr, u8); 2] = numbered(2);
const MTU: u32 = 1500;
/// Set for the programs inside.
const INSIDE: &str = "FULMAR_SANDBOX";

const fn numbered(host: u8) -> [(IpAddr, u8); 2] {
    [
        (IpAddr::V4(Ipv4Addr::new(10, 77, 0, host)), 24),
        (IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, host as u16)), 64),
    ]
}

/// The name of an interface for fulmar, by its number.
pub fn interface(number: usize) -> String {
    format!("fulmar{number}")
}

/// The addresses of the stack on an interface, by its number.
pub fn addresses(number: usize) -> [(IpAddr, u8); 2] {
    numbered(2 + number as u8)
}

/// Whether this process was started inside a sandbox.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// A locally administered Ethernet address: `kind` is 0 for an interface of fulmar, 1 for the kernel's, 2 for a bridge
/// port.
fn mac(kind: u8, number: usize) -> [u8; 6] {
    [0x02, 0x66, 0x75, 0x6c, kind, number as u8]
}

/// Run a program in a user and network namespace of its own, in which fulmar works without root
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar sandbox -- fulmar ping 10.77.0.1     ping the kernel inside
  fulmar sandbox                              a shell
  fulmar sandbox --join 4242                  a shell in the sandbox of 4242

The kernel has the addresses 10.77.0.1 and fd77::1, fulmar 10.77.0.2 and
fd77::2, and a second fulmar command 10.77.0.3 and fd77::3.

Exit status: that of the program, or 2 if the sandbox cannot be created.")]
pub struct Args {
    /// Join the sandbox of this process instead of creating one
    #[arg(long, value_name = "PID")]
    join: Option<u32>,
    /// The program and its arguments (default: your shell)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Makes the namespace, or joins it, and becomes the program. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    match args.join {
        Some(pid) => join(pid).during(format_args!("cannot join the sandbox of process {pid}"))?,
        None => build()
            .map_err(|e| Failure::new(format!("cannot create a sandbox: {e}; {HOW_TO_ALLOW}")))?,
    }
    if args.command.is_empty() && args.join.is_none() && io::stderr().is_terminal() {
        let pid = std::process::id();
        eprintln!(
            "sandbox: the kernel has 10.77.0.1 and fd77::1, fulmar has 10.77.0.2 and fd77::2"
        );
        eprintln!("sandbox: join it from another terminal with `fulmar sandbox --join {pid}`");
    }
    Err(exec::become_program(&args.command, |program| program.env(INSIDE, "1")).1)
}

fn join(pid: u32) -> io::Result<()> {
    let namespace = |kind| PathBuf::from(format!("/proc/{pid}/ns/{kind}"));
    fulmar_gateway::netns::enter_own_user_namespace(&namespace("user"))?;
    Netns::open(&namespace("net"))?.enter()
}

fn build() -> io::Result<()> {
    fulmar_gateway::netns::enter()?;
    let here = Netns::current()?;
    match here.add_bridge(KERNEL_INTERFACE, mac(1, 0)) {
        Ok(()) => (0..INTERFACES).try_for_each(|n| {
            let port = format!("port{n}");
            add_cable(&here, n, &port, mac(2, n))?;
            disable_ipv6(&port);
            here.add_to_bridge(&port, KERNEL_INTERFACE)?;
            here.set_up(&port)
        })?,
        Err(_) => add_cable(&here, 0, KERNEL_INTERFACE, mac(1, 0))?,
    }
    for (address, prefix) in KERNEL_ADDRESSES {
        here.set_address(KERNEL_INTERFACE, address, prefix)?;
    }
    Ok(())
}

/// Disables the kernel's IPv6 on an interface: the kernel would make a link-local address and send multicasts.
fn disable_ipv6(interface: &str) {
    // A kernel without IPv6 has no such file.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1");
}

/// Joins an interface for fulmar to `far`, which is still down.
fn add_cable(here: &Netns, number: usize, far: &str, far_mac: [u8; 6]) -> io::Result<()> {
    let near = interface(number);
    let end = |name, mac| VethEnd { name, mac, mtu: MTU };
    here.add_veth(&end(&near, mac(0, number)), here, &end(far, far_mac))?;
    disable_ipv6(&near);
    here.set_up(&near)
}
