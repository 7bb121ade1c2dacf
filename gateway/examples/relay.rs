//! A shell command in a namespace whose only way out is a gateway, beside one in the host's.
//!
//! `relay MTU 'command of the host' 'command of the guest'`: the host is 192.0.2.1, the guest 10.0.0.2, which ends
//! it. Both namespaces are made for it and gone with it.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar_gateway::config::Config;
use fulmar_gateway::guest::{GuestNetwork, GuestOptions};
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::netns::Netns;
use fulmar_gateway::{Gateway, Handle};
use fulmar_stack::base::DropReason;

fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command);
    shell
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, mtu, of_host, of_guest] = &args[..] else {
        return Err("usage: relay MTU 'command of the host' 'command of the guest'".into());
    };
    let mtu: u32 = mtu.parse()?;
    fulmar_gateway::netns::enter()?;
    Netns::current()?.set_address("lo", "192.0.2.1".parse()?, 32)?;
    let guest = Netns::new()?;
    let options = GuestOptions {
        name: Some("eth0".into()),
        mtu: Some(mtu),
        addresses: vec![("10.0.0.2".parse()?, Some(24))],
        gateways: vec!["10.0.0.1".parse()?],
        ..GuestOptions::default()
    };
    let network = GuestNetwork::like(&HostNetwork::default(), &options);
    let named = TapConfig { name: "eth0".into(), predict: false, ..TapConfig::default() };
    let fd = guest.run(|| Tap::open(&named).map(Tap::into_fd).map_err(std::io::Error::other))?;
    network.configure(&guest)?;
    let tap = TapConfig { mtu: Some(mtu as usize), ..named };
    let mut config = Config::new(vec![Box::new(Tap::from_fd(fd, &tap)?)], network);
    config.publish.tcp = "5301".parse::<fulmar_gateway::ports::PortSpec>()?.forwards();
    let mut gateway = Gateway::new(config)?;
    let (stop, stopped) = UnixStream::pair()?;
    let end = Box::new(|_: &OwnedFd, _: &mut Handle<'_>| ControlFlow::Break(()));
    gateway.on_readable(stopped.into(), end)?;
    let mut host = shell(of_host).spawn()?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    std::thread::scope(|scope| -> Result<(), Box<dyn std::error::Error>> {
        let guests = scope.spawn(move || {
            let done = guest.run(|| shell(of_guest).status());
            drop(stop);
            done
        });
        let summary = gateway.run()?;
        guests.join().map_err(|_| "the guest's thread panicked")??;
        for (why, count) in summary.totals.refusals.iter() {
            println!("{}: {count}", why.name());
        }
        for reason in DropReason::ALL.iter().filter(|r| summary.counters.drops(**r) > 0) {
            println!("dropped, {}: {}", reason.name(), summary.counters.drops(*reason));
        }
        Ok(())
    })?;
    host.kill()?;
    host.wait()?;
    Ok(())
}
