//! Frames that a guest sends past its own kernel: spoofed, malformed, at any rate.

use fulmar::internals::drivers::packet::{PacketConfig, PacketSocket};
use fulmar_stack::base::{Counters, EtherAddr, Instant};
use fulmar_stack::device::{Burst, Device, Packet};
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};
use fulmar_stack::wire::checksum::{Sum, checksum};
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::relay::world::World;

/// A packet socket on the guest's interface.
pub struct Raw {
    socket: PacketSocket,
    pool: Pool,
    counters: Counters,
    router: EtherAddr,
}

const GUEST_ETHER: [u8; 6] = [2, 0, 0, 0, 0, 0x99];

impl Raw {
    pub fn new(world: &World) -> Raw {
        let config = PacketConfig { interface: "eth0".into(), ..PacketConfig::default() };
        let open = || PacketSocket::open(&config).map_err(|e| std::io::Error::other(e.to_string()));
        Raw {
            socket: world.guest.run(open).unwrap(),
            pool: Pool::new(PoolConfig::with_budget(8 << 20)).unwrap(),
            counters: Counters::default(),
            router: world.router,
        }
    }

    /// Sends a frame; waits while the gateway has no room for it.
    pub fn send(&mut self, frame: &[u8]) {
        let mut chain = self.pool.alloc_chain(frame.len(), 0, Purpose::Send).unwrap();
        chain.fill([frame]);
        let mut burst = Burst::with_capacity(1);
        burst.push(Packet::new(chain)).unwrap();
        loop {
            self.socket.tx_burst(Instant::ZERO, &mut self.pool, &mut burst, &mut self.counters);
            if burst.is_empty() {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn ether(&self, ethertype: u16) -> Vec<u8> {
        [&self.router.0[..], &GUEST_ETHER, &ethertype.to_be_bytes()].concat()
    }

    /// An IPv4 packet. The payload has its own checksum, or does not need one.
    pub fn v4(&self, from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let total = (20 + payload.len()) as u16;
        let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0];
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip.extend(from.octets());
        ip.extend(to.octets());
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        [self.ether(0x0800), ip, payload.to_vec()].concat()
    }

    /// An IPv6 packet.
    pub fn v6(&self, from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> Vec<u8> {
        let mut ip = vec![0x60, 0, 0, 0, 0, 0, next, 255];
        ip[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        ip.extend(from.octets());
        ip.extend(to.octets());
        [self.ether(0x86dd), ip, payload.to_vec()].concat()
    }

    /// An ARP request for the router.
    pub fn arp(&self, from: Ipv4Addr, for_whom: Ipv4Addr) -> Vec<u8> {
        let fixed = [0, 1, 8, 0, 6, 4, 0, 1];
        let message =
            [&fixed[..], &GUEST_ETHER, &from.octets(), &[0; 6], &for_whom.octets()].concat();
        [self.ether(0x0806), message].concat()
    }

    /// A SYN.
    pub fn syn(&self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), seq: u32) -> Vec<u8> {
        let mut tcp = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
        tcp.extend(seq.to_be_bytes());
        tcp.extend([0, 0, 0, 0, 0x60, 2, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 5, 0xb4]);
        let sum = transport_sum(from.0.into(), to.0.into(), 6, &tcp);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        self.v4(from.0, to.0, 6, &tcp)
    }

    /// A datagram of IPv4.
    pub fn udp(&self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
        let mut udp = [from.1, to.1, 8 + payload.len() as u16, 0].map(u16::to_be_bytes).concat();
        udp.extend(payload);
        let sum = transport_sum(from.0.into(), to.0.into(), 17, &udp);
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
        self.v4(from.0, to.0, 17, &udp)
    }

    /// A datagram of IPv6.
    pub fn udp_v6(&self, from: (Ipv6Addr, u16), to: (Ipv6Addr, u16), payload: &[u8]) -> Vec<u8> {
        let mut udp = [from.1, to.1, 8 + payload.len() as u16, 0].map(u16::to_be_bytes).concat();
        udp.extend(payload);
        let sum = transport_sum(from.0.into(), to.0.into(), 17, &udp);
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
        self.v6(from.0, to.0, 17, &udp)
    }

    /// A message of ICMPv6.
    pub fn icmp_v6(&self, from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> Vec<u8> {
        let mut message = message.to_vec();
        let sum = transport_sum(from.into(), to.into(), 58, &message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        self.v6(from, to, 58, &message)
    }

    /// A message of ICMP.
    pub fn icmp(&self, from: Ipv4Addr, to: Ipv4Addr, message: &[u8]) -> Vec<u8> {
        let mut message = message.to_vec();
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        self.v4(from, to, 1, &message)
    }
}

fn transport_sum(from: std::net::IpAddr, to: std::net::IpAddr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut sum = Sum::new();
    sum.add_bytes(bytes);
    sum.add_pseudo(from, to, protocol, bytes.len() as u32);
    sum.finish()
}
