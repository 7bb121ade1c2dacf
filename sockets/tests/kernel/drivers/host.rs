//! A station just clever enough to speak UDP and TCP with the kernel through a device.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant as Clock};

use fulmar_stack::base::{Counters, EtherAddr, Gso, GsoKind, Instant, Offload, SeqNum};
use fulmar_stack::device::{Burst, Device, Packet, offload};
use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, ipv4, protocol, tcp, udp};

/// No frame takes so long unless it is lost, on any machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a device that had nothing.
const PAUSE: Duration = Duration::from_micros(200);

pub const KERNEL: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const OURS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const L4: usize = eth::HEADER_BYTES + ipv4::HEADER_BYTES;

pub struct Host<D: Device> {
    pub device: D,
    pub pool: Pool,
    /// To be sent.
    pub burst: Burst,
    received: Burst,
    pub counters: Counters,
    /// The time that is passed to the device.
    pub now: Instant,
    kernel_ether: EtherAddr,
}

/// A received TCP segment or super-segment.
pub struct Segment {
    pub header: tcp::Header,
    pub payload: Vec<u8>,
    pub packet: Packet,
}

impl<D: Device> Host<D> {
    /// `interface`: the kernel's end.
    pub fn new(device: D, interface: &str) -> Host<D> {
        let path = format!("/sys/class/net/{interface}/address");
        // sysfs shows the namespace in which it was mounted, so ask `ip` if the file is not there.
        let text = std::fs::read_to_string(path).unwrap_or_else(|_| ether_by_ip(interface));
        let mut ether = [0; 6];
        for (to, from) in ether.iter_mut().zip(text.trim().split(':')) {
            *to = u8::from_str_radix(from, 16).expect("an Ethernet address");
        }
        Host {
            device,
            pool: Pool::new(PoolConfig::with_budget(32 << 20)).unwrap(),
            burst: Burst::with_capacity(64),
            received: Burst::with_capacity(64),
            counters: Counters::default(),
            now: Instant::ZERO,
            kernel_ether: EtherAddr(ether),
        }
    }

    fn frame(&mut self, protocol: u8, header: &[u8], csum_offset: usize, payload: &[u8]) -> Packet {
        let l4_bytes = header.len() + payload.len();
        let mut front = vec![0; L4];
        let src = self.device.caps().ether;
        let ether = eth::Header { dst: self.kernel_ether, src, ethertype: eth::IPV4 };
        ether.emit(&mut front).unwrap();
        let ip = ipv4::Header {
            src: OURS,
            dst: KERNEL,
            protocol,
            ttl: 64,
            dscp_ecn: 0,
            ident: 1,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            header_bytes: ipv4::HEADER_BYTES,
            total_bytes: ipv4::HEADER_BYTES + l4_bytes,
        };
        ip.emit(&mut front[eth::HEADER_BYTES..]).unwrap();
        front.extend(header);
        let mut sum = Sum::new();
        sum.add_pseudo(OURS.into(), KERNEL.into(), protocol, l4_bytes as u32);
        let at = L4 + csum_offset;
        front[at..at + 2].copy_from_slice(&sum.fold().to_be_bytes());
        let mut chain = self.pool.alloc_chain(front.len(), 0, Purpose::Control).unwrap();
        chain.copy_from(0, &front);
        for part in payload.chunks(5000) {
            let mut m = self.pool.alloc(part.len(), 0, Purpose::Send).unwrap();
            m.append(part.len()).unwrap().copy_from_slice(part);
            chain.push_back(m);
        }
        let offload = Offload {
            needs_csum: true,
            csum_start: L4 as u16,
            csum_offset: csum_offset as u16,
            ..Offload::default()
        };
        Packet { chain, offload }
    }

    /// A datagram, or a super-frame of several if `segment_bytes` says so.
    pub fn datagram(&mut self, port: u16, payload: &[u8], segment_bytes: Option<u16>) -> Packet {
        let length = (udp::HEADER_BYTES + payload.len()) as u16;
        let header = udp::Header { src_port: 7, dst_port: port, length, checksum: 0 };
        let mut bytes = [0; udp::HEADER_BYTES];
        header.emit(&mut bytes).unwrap();
        let mut p = self.frame(protocol::UDP, &bytes, udp::CHECKSUM_OFFSET, payload);
        p.offload.gso = segment_bytes.map(|segment_bytes| Gso {
            kind: GsoKind::Udp,
            segment_bytes,
            header_bytes: (L4 + udp::HEADER_BYTES) as u16,
            ecn: false,
        });
        p
    }

    /// A segment, or a super-segment if the payload is longer than the MSS.
    pub fn segment(&mut self, header: &tcp::Header, payload: &[u8]) -> Packet {
        let mut bytes = [0; tcp::MAX_HEADER_BYTES];
        let n = header.emit(&mut bytes).unwrap();
        let mut p = self.frame(protocol::TCP, &bytes[..n], tcp::CHECKSUM_OFFSET, payload);
        p.offload.gso = (payload.len() > 1460).then_some(Gso {
            kind: GsoKind::TcpV4,
            segment_bytes: 1460,
            header_bytes: (L4 + n) as u16,
            ecn: false,
        });
        p
    }

    pub fn send(&mut self, p: Packet) {
        self.burst.push(p).unwrap();
        self.flush(1);
    }

    /// Sends a frame as it is.
    pub fn send_bytes(&mut self, frame: &[u8]) {
        let mut chain = self.pool.alloc_chain(frame.len(), 0, Purpose::Control).unwrap();
        chain.copy_from(0, frame);
        self.send(Packet { chain, offload: Offload::default() });
    }

    /// Sends everything in the burst, `count` frames.
    pub fn flush(&mut self, count: usize) {
        let n = self.device.tx_burst(self.now, &mut self.pool, &mut self.burst, &mut self.counters);
        assert_eq!(n, count);
    }

    /// Receives what is there.
    pub fn poll(&mut self) {
        let (pool, counters) = (&mut self.pool, &mut self.counters);
        self.device.rx_burst(self.now, pool, &mut self.received, 16, counters);
    }

    /// Receives what is there: how many datagrams for us that is.
    pub fn datagrams_in(&mut self) -> usize {
        self.poll();
        let mut count = 0;
        while let Some(p) = self.received.pop_front() {
            count += usize::from(parse(&p, protocol::UDP).is_some());
            self.pool.free(p.chain);
        }
        count
    }

    /// The first frame within a minute of which `pick` makes something.
    pub fn wait_for<T>(&mut self, mut pick: impl FnMut(Packet) -> Option<T>) -> T {
        let end = Clock::now() + PATIENCE;
        while Clock::now() < end {
            if self.received.is_empty() {
                self.poll();
            }
            match self.received.pop_front().map(&mut pick) {
                Some(Some(found)) => return found,
                Some(None) => {}
                None => {
                    // The device looks at a queue that it spares only once time has passed.
                    std::thread::sleep(PAUSE);
                    self.now = self.now + PAUSE;
                }
            }
        }
        panic!("nothing came within a minute; {:?}", self.device.stats());
    }

    /// The next datagram for us: the kernel's port and the payload.
    pub fn datagram_in(&mut self) -> (u16, Vec<u8>) {
        let ours = self.device.caps().ether;
        self.wait_for(|p| {
            let (ip, l4) = parse(&p, protocol::UDP)?;
            let header = udp::Header::parse(&l4).ok()?;
            let is_ours = eth::Header::parse(&p.chain.to_vec()).ok()?.dst == ours;
            assert!(is_ours && ip.src == KERNEL && offload::verify(&p));
            Some((header.src_port, l4[udp::HEADER_BYTES..usize::from(header.length)].to_vec()))
        })
    }

    /// The next TCP segment for us.
    pub fn segment_in(&mut self) -> Segment {
        self.wait_for(|packet| {
            let (_, l4) = parse(&packet, protocol::TCP)?;
            let (header, n) = tcp::Header::parse(&l4).ok()?;
            Some(Segment { header, payload: l4[n..].to_vec(), packet })
        })
    }
}

fn ether_by_ip(interface: &str) -> String {
    let output =
        std::process::Command::new("ip").args(["-o", "link", "show", interface]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split("link/ether ").nth(1).unwrap()[..17].to_string()
}

fn parse(p: &Packet, protocol: u8) -> Option<(ipv4::Header, Vec<u8>)> {
    let frame = p.chain.to_vec();
    let ether = eth::Header::parse(&frame).ok()?;
    let l3 = &frame[eth::HEADER_BYTES..];
    let ip = ipv4::Header::parse(l3, l3.len()).ok()?;
    (ether.ethertype == eth::IPV4 && ip.protocol == protocol && ip.dst == OURS)
        .then(|| (ip, l3[ip.header_bytes..ip.total_bytes].to_vec()))
}

/// A header of our end of a connection.
pub fn header(to: &tcp::Header, flags: tcp::Flags, seq: SeqNum, ack: SeqNum) -> tcp::Header {
    tcp::Header {
        src_port: to.dst_port,
        dst_port: to.src_port,
        seq,
        ack,
        flags,
        window: 65_535,
        urgent: 0,
        options: tcp::Options::default(),
    }
}
