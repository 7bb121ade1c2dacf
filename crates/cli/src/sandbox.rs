//! `fulmar sandbox`: a program in a user and network namespace of its own, where everything that
//! this command does can be tried without root.
//!
//! Inside stand `lo` and a veth pair: `fulmar0`, which fulmar drives, and `kernel0`, which the
//! kernel has under 10.77.0.1 and fd77::1. All of it is gone with the last program inside.

use crate::failure::{During, Failure, Outcome};
use fulmar_netns::{Netns, VethEnd};
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The interface that fulmar drives where the user names none.
pub const DEFAULT_INTERFACE: &str = "fulmar0";
/// The kernel's end of the sandbox's cable.
const KERNEL_INTERFACE: &str = "kernel0";
/// The kernel's addresses beside fulmar, with their prefix lengths.
pub const KERNEL_ADDRESSES: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1)), 24),
    (IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1)), 64),
];
/// fulmar's addresses where the user gives none.
pub const FULMAR_ADDRESSES: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)), 24),
    (IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2)), 64),
];
/// Locally administered station addresses for the two ends.
const MACS: [[u8; 6]; 2] = [[0x02, 0x66, 0x75, 0x6c, 0, 2], [0x02, 0x66, 0x75, 0x6c, 0, 1]];
const MTU: u32 = 1500;

/// Run a program where fulmar needs no root: own user and network namespace
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar sandbox -- fulmar ping 10.77.0.1     ping the kernel inside
  fulmar sandbox                              a shell; the kernel is 10.77.0.1 and fd77::1,
                                              fulmar is 10.77.0.2 and fd77::2")]
pub struct Args {
    /// The program and its arguments (default: your shell)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Makes the namespace and becomes the program. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    build().map_err(|e| {
        Failure::new(format!(
            "cannot make a sandbox: {e}; allow it with \
             `sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1`, \
             or run as root"
        ))
    })?;
    let shell = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let (program, rest) = match args.command.split_first() {
        Some((program, rest)) => (program.clone(), rest),
        None => (shell, &[][..]),
    };
    if args.command.is_empty() && io::stderr().is_terminal() {
        eprintln!("sandbox: the kernel is 10.77.0.1 and fd77::1, fulmar 10.77.0.2 and fd77::2");
    }
    let error = Command::new(&program).args(rest).exec();
    Err(error).during(format_args!("cannot run `{}`", program.to_string_lossy()))
}

fn build() -> io::Result<()> {
    fulmar_netns::enter()?;
    let here = Netns::current()?;
    let end = |name, mac| VethEnd { name, mac, mtu: MTU };
    let (near, far) = (end(DEFAULT_INTERFACE, MACS[0]), end(KERNEL_INTERFACE, MACS[1]));
    here.add_veth(&near, &here, &far)?;
    for (address, prefix) in KERNEL_ADDRESSES {
        here.set_address(KERNEL_INTERFACE, address, prefix)?;
    }
    here.set_up(DEFAULT_INTERFACE)
}
