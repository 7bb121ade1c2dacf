//! Who is flooded: a listener of the kernel's behind a veth pair, or one of fulmar's behind a veth pair or a
//! TAP. Both have a SYN queue of the same length and a router that is not there.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fulmar::internals::runtime::draw_secrets;
use fulmar_stack::base::{DropReason, EtherAddr, Instant as StackInstant, SlotId};
use fulmar_stack::device::Device;
use fulmar_stack::ip::{IfAddr, Route};
use fulmar_stack::shard::{ListenOptions, Shard, StackConfig};

use super::flood::{Flooder, Frames, OPEN_PORT, ROUTER_IP, SECTION, Section, Target};
use crate::topology::{self, Topology};
use crate::{cpu, sys};
use fulmar_gateway::netns::Netns;

/// Connections in the accept queue and embryos in the SYN queue at most: std's choice on most systems.
const BACKLOG: usize = 128;
/// Sections at most until the SYN queue is full and every SYN is answered, and the time between them: a link
/// that has just been brought up drops frames for a moment.
const PATIENCE: usize = 200;
const PAUSE: Duration = Duration::from_millis(10);

/// Counters of a victim.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// SYNs that it answered with a cookie.
    pub cookies: u64,
    /// Segments that its TCP took in (kernel), or dropped since they match no socket (fulmar).
    pub segments: u64,
    /// Frames that came back to the flooder's interface.
    pub answers: u64,
}

impl Tally {
    /// The difference to `earlier`.
    pub fn since(self, earlier: Tally) -> Tally {
        Tally {
            cookies: self.cookies - earlier.cookies,
            segments: self.segments - earlier.segments,
            answers: self.answers - earlier.answers,
        }
    }
}

/// The TCP that is attacked.
enum Tcp {
    Kernel { netns: Netns, _listener: TcpListener },
    Fulmar { shard: Box<Shard>, listener: SlotId, began: Instant },
}

/// A victim and its flooder.
pub struct Victim {
    tcp: Tcp,
    flooder: Flooder,
    /// Where the flooder is.
    netns: Netns,
    interface: &'static str,
    /// The kernel does part of the victim's work inside the flooder's calls.
    is_flooder_charged: bool,
    _site: Option<Netns>,
}

impl Victim {
    /// The kernel's TCP behind veth.
    pub fn kernel() -> io::Result<Victim> {
        let topology = topology::packet(|_| Ok(()))?;
        let Topology { peer_netns, _our_netns: Some(near), .. } = topology else {
            return Err(io::Error::other("the veth pair has no near end"));
        };
        let listener = peer_netns.run(|| {
            let listener = TcpListener::bind((topology::PEER_IP, OPEN_PORT))?;
            sys::listen(listener.as_fd(), BACKLOG as i32)?;
            Ok(listener)
        })?;
        let index = peer_netns.if_index(topology::FAR_VETH)?;
        let route = fulmar_gateway::netns::Route::default_through(index, ROUTER_IP.into());
        peer_netns.netlink()?.add_route(&route)?;
        let target = Target { ether: EtherAddr(topology::PEER_MAC), ip: topology::PEER_IP };
        let flooder = Flooder::new(&near, topology::NEAR_VETH, target)?;
        Victim {
            tcp: Tcp::Kernel { netns: peer_netns, _listener: listener },
            flooder,
            netns: near,
            interface: topology::NEAR_VETH,
            is_flooder_charged: true,
            _site: None,
        }
        .filled()
    }

    /// fulmar's behind veth, with a packet socket.
    pub fn packet() -> io::Result<Victim> {
        let topology =
            topology::packet(|name| fulmar::devices::packet(name).map_err(io::Error::other))?;
        Victim::fulmar(topology, topology::FAR_VETH, true)
    }

    /// fulmar's behind a TAP. The kernel only queues what the flooder sends, so that all of the victim's
    /// work is in its own thread.
    pub fn tap() -> io::Result<Victim> {
        let topology = topology::tap(|name| fulmar::devices::tap(name).map_err(io::Error::other))?;
        Victim::fulmar(topology, topology::TAP, false)
    }

    fn fulmar(
        topology: Topology<Box<dyn Device>>,
        interface: &'static str,
        is_flooder_charged: bool,
    ) -> io::Result<Victim> {
        let Topology { device, peer_netns: netns, _our_netns } = topology;
        let target = Target { ether: device.caps().ether, ip: topology::OUR_IP };
        let config = StackConfig {
            addresses: vec![IfAddr { addr: topology::OUR_IP.into(), prefix_len: topology::PREFIX }],
            routes: vec![Route::default_via(ROUTER_IP.into())],
            secrets: Some(draw_secrets()?),
            ..StackConfig::default()
        };
        let shard = Shard::new(config, device, StackInstant::ZERO);
        let mut shard = Box::new(shard.map_err(|e| io::Error::other(e.to_string()))?);
        let options = ListenOptions { backlog: BACKLOG, ..ListenOptions::default() };
        let local = SocketAddr::from((topology::OUR_IP, OPEN_PORT));
        let listener = shard.tcp_listen(local, options);
        let listener = listener.map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let flooder = Flooder::new(&netns, interface, target)?;
        let tcp = Tcp::Fulmar { shard, listener, began: Instant::now() };
        Victim { tcp, flooder, netns, interface, is_flooder_charged, _site: _our_netns }.filled()
    }

    /// Floods it until its SYN queue is full and it knows its router.
    fn filled(mut self) -> io::Result<Victim> {
        for _ in 0..PATIENCE {
            let before = self.tally()?;
            for section in &mut self.make(Frames::Syns, 1)? {
                self.run(section)?;
            }
            let Tally { cookies, answers, .. } = self.tally()?.since(before);
            if cookies.min(answers) == SECTION as u64 {
                return Ok(self);
            }
            self.meet_router()?;
            std::thread::sleep(PAUSE);
        }
        Err(io::Error::other("a listener on the link does not answer SYNs"))
    }

    /// Makes `sections` sections of frames for it.
    pub fn make(&mut self, what: Frames, sections: usize) -> io::Result<Vec<Section>> {
        self.flooder.make(what, sections)
    }

    /// Has its router answer an ARP request, if there is one.
    pub fn meet_router(&mut self) -> io::Result<()> {
        self.flooder.answer_for_router()?;
        self.tcp.poll();
        Ok(())
    }

    /// Sends it a section and lets it do all that it does about that; CPU time of the calling thread, as
    /// far as it is charged.
    pub fn run(&mut self, section: &mut Section) -> io::Result<Duration> {
        let before = cpu::thread_cpu()?;
        self.flooder.send(section)?;
        let flooded = cpu::thread_cpu()?;
        self.tcp.poll();
        let begin = if self.is_flooder_charged { before } else { flooded };
        Ok(cpu::thread_cpu()?.saturating_sub(begin))
    }

    /// Its counters.
    pub fn tally(&mut self) -> io::Result<Tally> {
        let devices = self.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        let answers = received_frames(&devices, self.interface);
        let answers = answers.ok_or_else(|| missing(self.interface))?;
        let (cookies, segments) = self.tcp.tally()?;
        Ok(Tally { cookies, segments, answers })
    }
}

impl Tcp {
    /// Processes the received frames. The kernel has done so already.
    fn poll(&mut self) {
        if let Tcp::Fulmar { shard, began, .. } = self {
            while shard.step(StackInstant::ZERO + began.elapsed(), 2 * SECTION) > 0 {}
        }
    }

    fn tally(&mut self) -> io::Result<(u64, u64)> {
        match self {
            Tcp::Kernel { netns, .. } => netns.run(|| {
                let read =
                    |name: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{name}"));
                let counter = |text: &str, group, name| {
                    counter(text, group, name).ok_or_else(|| missing(name))
                };
                let cookies = counter(&read("netstat")?, "TcpExt", "SyncookiesSent")?;
                Ok((cookies, counter(&read("snmp")?, "Tcp", "InSegs")?))
            }),
            Tcp::Fulmar { shard, listener, .. } => {
                let stat = shard.listener(*listener).map(|l| l.stat());
                let stat = stat.map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
                let strays = shard.counters().drops(DropReason::TcpNoSocket);
                Ok((stat.cookies_sent, strays))
            }
        }
    }
}

fn missing(what: &str) -> io::Error {
    io::Error::other(format!("the kernel has no counters for {what}"))
}

/// Frames that an interface has received, of the text of /proc/net/dev.
fn received_frames(text: &str, interface: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|l| l.trim_start().split_once(':'));
    let (_, numbers) = lines.find(|(name, _)| *name == interface)?;
    numbers.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// A counter of /proc/net/snmp or /proc/net/netstat: a line of names, below it one of values.
fn counter(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|l| l.strip_prefix(group)?.strip_prefix(':'));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut pairs = names.split_ascii_whitespace().zip(values.split_ascii_whitespace());
    pairs.find(|(n, _)| *n == name)?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_kernel_are_found_by_group_and_name() {
        let text =
            "TcpExt: SyncookiesSent SyncookiesRecv\nTcpExt: 7 8\nIpExt: InOctets\nIpExt: 9\n";
        assert_eq!(counter(text, "TcpExt", "SyncookiesRecv"), Some(8));
        assert_eq!(counter(text, "IpExt", "InOctets"), Some(9));
        assert_eq!(counter(text, "Tcp", "SyncookiesSent"), None);
    }

    #[test]
    fn received_frames_are_the_second_number_of_the_interface() {
        let text = "Inter-| Receive\n face |bytes packets\n    lo: 1 2 3\n veth0:11   12 13\n";
        assert_eq!(received_frames(text, "veth0"), Some(12));
        assert_eq!(received_frames(text, "veth1"), None);
    }
}
