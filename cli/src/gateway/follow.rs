//! The process that follows the host's network, and what the gateway does with what it hears.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use fulmar_gateway::config::Config;
use fulmar_gateway::follow::message::States;
use fulmar_gateway::guest::GuestNetwork;
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::{FdHandler, Gateway, Handle, contain, follow};
use nix::sys::signal::{SigSet, Signal};

use super::detach;
use super::log::Log;
use super::plan::Plan;
use crate::failure::{During, Failure, Outcome};

/// Signals that a terminal or a service manager sends to all processes: this one ends with the gateway.
const IGNORED: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Follows the network of this process, and writes its states to standard output until the pipe has no reader.
///
/// # Errors
/// A sentence: it could not be contained, or rtnetlink does not work.
pub fn run(plan: &Plan) -> Outcome<ExitCode> {
    let _ = nix::unistd::setsid();
    let _ = IGNORED.into_iter().collect::<SigSet>().thread_block();
    // By it a guest of the same user could open connections of the host.
    let _ = nix::sys::prctl::set_dumpable(false);
    contain::contain_reader().map_err(|e| Failure::new(e.to_string()))?;
    let followed = follow::follow(plan.upstream.as_deref(), io::stdout());
    followed.during("cannot follow the network")?;
    Ok(ExitCode::SUCCESS)
}

/// What the gateway needs to follow its host.
pub struct Follower {
    /// From the process that follows.
    states: Option<OwnedFd>,
    plan: Plan,
    network: GuestNetwork,
    /// The gateway's Ethernet address.
    router: [u8; 6],
}

/// Starts the process that follows the network of this one. `None`: it could not be started.
pub fn start(log: &Log) -> Option<OwnedFd> {
    let failed = |e: &Failure| log.fail(&format!("cannot read changes of the host's network: {e}"));
    detach::start_follower().inspect_err(failed).ok()
}

impl Follower {
    /// Of a gateway that is about to be built.
    pub fn new(states: Option<OwnedFd>, plan: &Plan, config: &Config) -> Follower {
        let router = config.queues.first().map_or([0; 6], |queue| queue.caps().ether.0);
        Follower { states, plan: plan.clone(), network: config.network.clone(), router }
    }

    /// Lets the gateway take over each state.
    ///
    /// # Errors
    /// The descriptor cannot be watched.
    pub fn watch(mut self, gateway: &mut Gateway, log: &Log) -> io::Result<()> {
        let Some(states) = self.states.take() else { return Ok(()) };
        let mut pipe = File::from(states.try_clone()?);
        let (mut reader, mut last, log) = (States::default(), None, log.clone());
        let handler: FdHandler = Box::new(move |_, handle| {
            match reader.read(&mut pipe) {
                Ok(Some(host)) if last.as_ref() != Some(&host) => {
                    self.apply(&host, handle);
                    log.say(&sentence(&host));
                    last = Some(host);
                }
                Ok(_) => {}
                Err(e) => {
                    log.fail(&format!("no longer following changes of the host's network: {e}"));
                    handle.forget();
                }
            }
            ControlFlow::Continue(())
        });
        gateway.on_readable(states, handler)
    }

    fn apply(&self, host: &HostNetwork, handle: &mut Handle<'_>) {
        let Follower { plan, network, router, .. } = self;
        handle.set_mapping(plan.mapping(host, network, *router));
        let (dhcp_v6, advertisement) = plan.lease_v6(host, network, *router);
        let late = || plan.late_advertisement(host, network, *router);
        handle.set_answers(plan.lease(host, network), dhcp_v6, advertisement.or_else(late));
    }
}

fn sentence(host: &HostNetwork) -> String {
    let upstream = |version: &Option<fulmar_gateway::host::Upstream>| {
        version.as_ref().map_or("none".to_owned(), |u| u.interface.name.clone())
    };
    let servers: Vec<String> = host.nameservers.iter().map(ToString::to_string).collect();
    let (v4, v6, servers) = (upstream(&host.v4), upstream(&host.v6), servers.join(" "));
    format!(
        "the host's upstream interface is {v4} (IPv4), {v6} (IPv6); its resolvers are {servers}"
    )
}
