//! A device of a few frames, for the models.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_stack::base::{Counters, EtherAddr, Instant, Secrets};
use fulmar_stack::device::moderation::ModerationConfig;
use fulmar_stack::device::{Burst, Caps, Device, Packet, Wake, WakeFd};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::{External, Pool, PoolConfig, Purpose};
use fulmar_stack::models::sync::{Condvar, Mutex};
use fulmar_stack::wire::{eth, ipv4, protocol, udp};

use crate::runtime::sys;
use fulmar_stack::shard::{Shard, StackConfig};

pub const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const ETHER: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
const PEER_ETHER: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);

/// Where datagrams may go.
pub const PORTS: [u16; 2] = [7, 9];

#[derive(Default)]
struct Queue {
    /// The ports that datagrams go to.
    frames: VecDeque<u16>,
    is_armed: bool,
}

/// A device's receive queue: filled by the kernel's thread, drained by the stack.
pub struct Wire {
    queue: Mutex<Queue>,
    taken: Condvar,
    wake: OwnedFd,
    is_level_triggered: bool,
}

impl Wire {
    pub fn new(is_level_triggered: bool) -> Arc<Wire> {
        let wake = sys::event_fd().expect("a descriptor");
        Arc::new(Wire { queue: Mutex::default(), taken: Condvar::new(), wake, is_level_triggered })
    }

    /// A datagram of one byte comes.
    pub fn deliver(&self, port: u16) {
        let mut queue = self.queue.lock().unwrap();
        queue.frames.push_back(port);
        let is_armed = std::mem::take(&mut queue.is_armed);
        if self.is_level_triggered {
            return sys::signal_event(self.wake.as_raw_fd());
        }
        drop(queue);
        if is_armed {
            sys::signal_event(self.wake.as_raw_fd());
        }
    }

    /// Waits until no frame is left.
    pub(crate) fn wait_until_taken(&self) {
        let mut queue = self.queue.lock().unwrap();
        while !queue.frames.is_empty() {
            queue = self.taken.wait(queue).unwrap();
        }
    }
}

struct End {
    wire: Arc<Wire>,
    caps: Caps,
}

impl Device for End {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        _: &mut Counters,
    ) -> usize {
        let frames = burst.len();
        burst.clear(pool);
        frames
    }

    fn rx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        _: &mut Counters,
    ) -> usize {
        let mut queue = self.wire.queue.lock().unwrap();
        let frames = queue.frames.len().min(budget);
        for port in queue.frames.drain(..frames) {
            let m = pool.external(Box::new(Frame::to(port)), Purpose::Receive).expect("a mbuf");
            let mut packet = Packet::new(m.into());
            packet.offload.csum_valid = true;
            out.push(packet).expect("room");
        }
        if self.wire.is_level_triggered && queue.frames.is_empty() {
            sys::clear_event(self.wire.wake.as_raw_fd());
        }
        self.wire.taken.notify_all();
        frames
    }

    fn arm(&mut self) -> bool {
        self.wire.queue.lock().unwrap().is_armed = true;
        // No check here: the thread polls after it arms.
        true
    }

    fn disarm(&mut self) {
        self.wire.queue.lock().unwrap().is_armed = false;
        if !self.wire.is_level_triggered {
            sys::clear_event(self.wire.wake.as_raw_fd());
        }
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(WakeFd::readable(self.wire.wake.as_raw_fd()))
    }
}

const UDP_BYTES: usize = udp::HEADER_BYTES + 1;
const IP_BYTES: usize = ipv4::HEADER_BYTES + UDP_BYTES;

struct Frame([u8; eth::HEADER_BYTES + IP_BYTES]);

impl Frame {
    fn to(port: u16) -> Frame {
        let mut frame = [0; eth::HEADER_BYTES + IP_BYTES];
        let (ether, ip) = frame.split_at_mut(eth::HEADER_BYTES);
        let (ip, udp) = ip.split_at_mut(ipv4::HEADER_BYTES);
        let header = eth::Header { dst: ETHER, src: PEER_ETHER, ethertype: eth::IPV4 };
        header.emit(ether).expect("room");
        let header = ipv4::Header {
            src: PEER,
            dst: OWN,
            protocol: protocol::UDP,
            ttl: 64,
            dscp_ecn: 0,
            ident: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            header_bytes: ipv4::HEADER_BYTES,
            total_bytes: IP_BYTES,
        };
        header.emit(ip).expect("room");
        let length = UDP_BYTES as u16;
        udp::Header { src_port: 1, dst_port: port, length, checksum: 1 }.emit(udp).expect("room");
        Frame(frame)
    }
}

impl External for Frame {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A shard over the wire, whose threads sleep at once.
pub fn shard(wire: &Arc<Wire>, id: u16, shards: u16) -> Shard {
    let config = StackConfig {
        addresses: vec![IfAddr { addr: OWN.into(), prefix_len: 24 }],
        pool: PoolConfig::with_budget(4 << 20),
        secrets: Some(Secrets::for_simulation(1)),
        moderation: ModerationConfig::NONE,
        gro: false,
        ..StackConfig::default()
    };
    let wake = if wire.is_level_triggered { Wake::Level } else { Wake::Armed };
    let caps = Caps { wake, ..Caps::plain(1500, ETHER) };
    let end = End { wire: Arc::clone(wire), caps };
    Shard::of_several(config, Box::new(end), sys::now(), id, shards).expect("a shard")
}
