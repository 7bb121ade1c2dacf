//! Protocols that the gateway answers on the guest's link itself: DHCP, DHCPv6 and router solicitations.
//!
//! [`Services`] stands between the device and the stack. It takes frames of these protocols out of received
//! bursts and sends the answers; other frames pass after a few of their bytes were compared. So the stack needs no
//! sockets for broadcasts of hosts without an address. An answer takes a buffer of the control reserve; without one, or
//! if the device is full, it is dropped, and the client asks again.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_stack::base::{Counters, EtherAddr, Instant};
use fulmar_stack::device::{Burst, Device, DirectPlacement, Packet, forward_device};
use fulmar_stack::mbuf::{Pool, Purpose};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, icmpv6, ipv4, ipv6, protocol, udp};

use crate::dhcp::{self, Lease, LeaseV6};
use crate::ra::{self, link_local};

/// Bytes of a frame that a request may have; longer ones are none.
const LONGEST_REQUEST: usize = 1514;
/// Most answers to one burst.
const ANSWERS: usize = 8;
const ROUTER_SOLICITATION: u8 = 133;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Its Ethernet address (RFC 2464 section 7).
const ALL_NODES_ETHER: EtherAddr = EtherAddr([0x33, 0x33, 0, 0, 0, 1]);

/// The answers.
#[derive(Clone, Default)]
pub(crate) struct Answers {
    pub dhcp: Option<Lease>,
    pub dhcp_v6: Option<LeaseV6>,
    pub advertisement: Option<ra::Link>,
}

/// The answers on all queues of a guest's interface. They can be replaced.
#[derive(Clone)]
pub(crate) struct SharedAnswers(Arc<Latest>);

struct Latest {
    answers: Mutex<Arc<Answers>>,
    /// Counts the replacements.
    generation: AtomicU64,
    /// The advertisement is new, and not sent yet.
    is_news: AtomicBool,
}

impl SharedAnswers {
    pub(crate) fn new(answers: Answers) -> SharedAnswers {
        let (generation, is_news) = (AtomicU64::new(0), AtomicBool::new(false));
        SharedAnswers(Arc::new(Latest {
            answers: Mutex::new(Arc::new(answers)),
            generation,
            is_news,
        }))
    }

    /// Replaces them. An advertisement that is new is sent to the guest without being asked for.
    pub(crate) fn set(&self, answers: Answers) {
        let mut current = self.0.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news =
            answers.advertisement.is_some() && answers.advertisement != current.advertisement;
        *current = Arc::new(answers);
        // Before the generation: a thread that sees the new one finds the news.
        if is_news {
            self.0.is_news.store(true, Release);
        }
        self.0.generation.fetch_add(1, Release);
    }

    fn latest(&self) -> Arc<Answers> {
        Arc::clone(&self.0.answers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A device whose guest is served.
pub(crate) struct Services {
    device: Box<dyn Device>,
    shared: SharedAnswers,
    /// Those of a generation.
    answers: Arc<Answers>,
    generation: u64,
    /// Requests that were taken out of a received burst.
    requests: Burst,
}

impl Services {
    /// The device, served.
    pub(crate) fn before(device: Box<dyn Device>, shared: SharedAnswers) -> Services {
        let (answers, generation) = (shared.latest(), 0);
        Services { device, shared, answers, generation, requests: Burst::with_capacity(ANSWERS) }
    }

    /// Takes answers that are new, and sends an advertisement that is.
    fn bring_up_to_date(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        let generation = self.shared.0.generation.load(Acquire);
        if generation == self.generation {
            return;
        }
        // Before the answers: news of later ones stay.
        let is_news = self.shared.0.is_news.swap(false, AcqRel);
        (self.answers, self.generation) = (self.shared.latest(), generation);
        if !is_news {
            return;
        }
        let own = self.device.caps().ether;
        let news = self.answers.advertisement.as_ref().and_then(|link| {
            let ether = eth::Header { dst: ALL_NODES_ETHER, src: own, ethertype: eth::IPV6 };
            advertise(link, ether, ALL_NODES)
        });
        self.send(news, now, pool, counters);
    }

    /// Sends frames; frames without space are dropped.
    fn send(
        &mut self,
        frames: impl IntoIterator<Item = Vec<u8>>,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let mut burst = Burst::with_capacity(ANSWERS);
        for frame in frames {
            let Ok(mut chain) = pool.alloc_chain(frame.len(), 0, Purpose::Control) else {
                continue;
            };
            chain.fill([&frame[..]]);
            if let Err(p) = burst.push(Packet::new(chain)) {
                pool.free(p.chain);
            }
        }
        self.device.tx_burst(now, pool, &mut burst, counters);
        burst.clear(pool);
    }

    /// Whether a frame is a request of a protocol that is served; it may still be malformed.
    fn is_request(&self, p: &Packet) -> bool {
        let Some(frame) = p.chain.slices().find(|s| !s.is_empty()) else { return false };
        let ports = |at: usize| frame.get(at + 2..at + 4);
        match frame.get(12..14) {
            // A fragment has no ports here.
            Some([0x08, 0x00]) if frame.get(23) == Some(&protocol::UDP) && is_whole(frame) => {
                let header = usize::from(frame.get(14).copied().unwrap_or(0) & 15) * 4;
                let is_dhcp = ports(14 + header) == Some(&dhcp::SERVER_PORT.to_be_bytes()[..]);
                self.answers.dhcp.is_some() && is_dhcp
            }
            Some([0x86, 0xdd]) => match frame.get(20) {
                Some(&protocol::UDP) => {
                    let is_dhcp = ports(54) == Some(&dhcp::SERVER_PORT_V6.to_be_bytes()[..]);
                    self.answers.dhcp_v6.is_some() && is_dhcp
                }
                Some(&protocol::ICMPV6) => {
                    let is_solicitation = frame.get(54) == Some(&ROUTER_SOLICITATION);
                    self.answers.advertisement.is_some() && is_solicitation
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// Takes the requests out of a burst, from index `from` on.
    #[cold]
    fn take_requests(&mut self, from: usize, out: &mut Burst, pool: &mut Pool) {
        let mut kept = Vec::new();
        while out.len() > from {
            let Some(p) = out.pop_back() else { break };
            if !self.is_request(&p) {
                kept.push(p);
            } else if let Err(p) = self.requests.push(p) {
                pool.free(p.chain);
            }
        }
        for p in kept.into_iter().rev() {
            // It has space: the packet came out of it.
            let _ = out.push(p);
        }
    }

    fn answer_all(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        let mut replies = Vec::new();
        while let Some(p) = self.requests.pop_back() {
            let mut request = [0; LONGEST_REQUEST];
            let n = p.chain.copy_to(0, &mut request);
            pool.free(p.chain);
            let own = self.device.caps().ether;
            let request = request.get(..n).unwrap_or(&[]);
            replies.extend(answer(&self.answers, own, request));
        }
        self.send(replies, now, pool, counters);
    }
}

/// Whether an IPv4 packet is unfragmented: it has neither MF nor an offset.
fn is_whole(frame: &[u8]) -> bool {
    frame.get(20..22).is_some_and(|field| field[0] & 0x3f == 0 && field[1] == 0)
}

impl Device for Services {
    forward_device!(self => self.device, except rx_burst, next_deadline, placement);

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.bring_up_to_date(now, pool, counters);
        let from = out.len();
        let came = self.device.rx_burst(now, pool, out, budget, counters);
        let is_any = out.iter().skip(from).any(|p| self.is_request(p));
        if !is_any {
            return came;
        }
        self.take_requests(from, out, pool);
        self.answer_all(now, pool, counters);
        out.len() - from
    }

    /// Now, where an advertisement waits.
    fn next_deadline(&self) -> Option<Instant> {
        let is_news = self.shared.0.is_news.load(Acquire);
        if is_news { Some(Instant::ZERO) } else { self.device.next_deadline() }
    }

    /// The relay posts no buffers.
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }
}

/// The frame that answers a frame.
fn answer(answers: &Answers, own: EtherAddr, frame: &[u8]) -> Option<Vec<u8>> {
    let ether = eth::Header::parse(frame).ok()?;
    let packet = frame.get(eth::HEADER_BYTES..)?;
    let reply_to = eth::Header { dst: ether.src, src: own, ethertype: ether.ethertype };
    match ether.ethertype {
        eth::IPV4 => answer_v4(answers.dhcp.as_ref()?, reply_to, packet),
        eth::IPV6 => answer_v6(answers, reply_to, packet),
        _ => None,
    }
}

fn answer_v4(lease: &Lease, ether: eth::Header, packet: &[u8]) -> Option<Vec<u8>> {
    let ip = ipv4::Header::parse(packet, packet.len()).ok()?;
    if ip.is_fragment() || !ipv4::checksum_ok(packet, ip.header_bytes) {
        return None;
    }
    let datagram = packet.get(ip.header_bytes..ip.total_bytes)?;
    let request = payload_of(datagram)?;
    let reply = dhcp::answer(request, lease)?;
    let is_unicast = !ip.src.is_unspecified();
    let to = if is_unicast { ip.src } else { Ipv4Addr::BROADCAST };
    let server = SocketAddr::from((lease.server, dhcp::SERVER_PORT));
    let udp = datagram_of(server, SocketAddr::from((to, dhcp::CLIENT_PORT)), &reply)?;
    frame_v4(ether, lease.server, to, &udp)
}

fn answer_v6(answers: &Answers, ether: eth::Header, packet: &[u8]) -> Option<Vec<u8>> {
    let ip = ipv6::Header::parse(packet, packet.len()).ok()?;
    let end = ipv6::HEADER_BYTES.checked_add(ip.payload_bytes)?;
    let upper = packet.get(ipv6::HEADER_BYTES..end)?;
    let mut sum = Sum::new();
    sum.add_bytes(upper);
    sum.add_pseudo(ip.src.into(), ip.dst.into(), ip.next_header, upper.len() as u32);
    let own = link_local(ether.src);
    match ip.next_header {
        protocol::UDP => {
            let reply = dhcp::answer_v6(payload_of(upper)?, answers.dhcp_v6.as_ref()?)?;
            let server = SocketAddr::from((own, dhcp::SERVER_PORT_V6));
            let client = SocketAddr::from((ip.src, dhcp::CLIENT_PORT_V6));
            let udp = datagram_of(server, client, &reply)?;
            frame_v6(ether, header_v6(own, ip.src, protocol::UDP, 64), &udp)
        }
        // RFC 4861 section 6.1.1: a solicitation from beyond the link is none.
        protocol::ICMPV6 if ip.hop_limit == 255 && sum.is_valid() => {
            let to = if ip.src.is_unspecified() { ALL_NODES } else { ip.src };
            advertise(answers.advertisement.as_ref()?, ether, to)
        }
        _ => None,
    }
}

/// The frame of a router advertisement.
fn advertise(link: &ra::Link, ether: eth::Header, to: Ipv6Addr) -> Option<Vec<u8>> {
    let mut message = link.advertisement();
    let mut sum = Sum::new();
    sum.add_bytes(&message);
    sum.add_pseudo(link.source.into(), to.into(), protocol::ICMPV6, message.len() as u32);
    let at = icmpv6::CHECKSUM_OFFSET;
    message.get_mut(at..at + 2)?.copy_from_slice(&sum.finish().to_be_bytes());
    frame_v6(ether, header_v6(link.source, to, protocol::ICMPV6, 255), &message)
}

/// The payload of a datagram. Its checksum may be left to the device, so it is not looked at: what crosses a
/// TAP is not damaged.
fn payload_of(datagram: &[u8]) -> Option<&[u8]> {
    let header = udp::Header::parse(datagram).ok()?;
    datagram.get(udp::HEADER_BYTES..usize::from(header.length))
}

fn datagram_of(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(payload.len() + udp::HEADER_BYTES).ok()?;
    let mut bytes = vec![0; udp::HEADER_BYTES];
    let header = udp::Header { src_port: src.port(), dst_port: dst.port(), length, checksum: 0 };
    header.emit(&mut bytes).ok()?;
    bytes.extend_from_slice(payload);
    let mut sum = Sum::new();
    sum.add_bytes(&bytes);
    sum.add_pseudo(src.ip(), dst.ip(), protocol::UDP, u32::from(length));
    let at = udp::CHECKSUM_OFFSET;
    bytes.get_mut(at..at + 2)?.copy_from_slice(&sum.finish_udp().to_be_bytes());
    Some(bytes)
}

fn frame_v4(ether: eth::Header, src: Ipv4Addr, dst: Ipv4Addr, upper: &[u8]) -> Option<Vec<u8>> {
    let headers = eth::HEADER_BYTES + ipv4::HEADER_BYTES;
    let mut frame = vec![0; headers];
    ether.emit(&mut frame).ok()?;
    let header = ipv4::Header {
        src,
        dst,
        protocol: protocol::UDP,
        ttl: 64,
        dscp_ecn: 0,
        ident: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + upper.len(),
    };
    header.emit(frame.get_mut(eth::HEADER_BYTES..)?).ok()?;
    frame.extend_from_slice(upper);
    Some(frame)
}

/// A header without its payload length, which [`frame_v6`] sets.
fn header_v6(src: Ipv6Addr, dst: Ipv6Addr, next_header: u8, hop_limit: u8) -> ipv6::Header {
    let (traffic_class, flow_label, payload_bytes) = (0, 0, 0);
    ipv6::Header { src, dst, next_header, hop_limit, traffic_class, flow_label, payload_bytes }
}

fn frame_v6(ether: eth::Header, header: ipv6::Header, upper: &[u8]) -> Option<Vec<u8>> {
    let mut frame = vec![0; eth::HEADER_BYTES + ipv6::HEADER_BYTES];
    ether.emit(&mut frame).ok()?;
    let header = ipv6::Header { payload_bytes: upper.len(), ..header };
    header.emit(frame.get_mut(eth::HEADER_BYTES..)?).ok()?;
    frame.extend_from_slice(upper);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 7]);
    const OWN: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);

    fn answers() -> Answers {
        Answers {
            dhcp: Some(Lease {
                address: [10, 0, 0, 2].into(),
                prefix_len: 24,
                server: [10, 0, 0, 1].into(),
                router: Some([10, 0, 0, 1].into()),
                mtu: Some(1500),
                nameservers: vec![],
                search: vec![],
            }),
            dhcp_v6: None,
            advertisement: Some(ra::Link {
                router: OWN,
                source: "fe80::99".parse().unwrap(),
                address: "fd00::2".parse().unwrap(),
                mtu: None,
                has_dhcp: false,
                nameservers: vec![],
                search: vec![],
            }),
        }
    }

    fn discover() -> Vec<u8> {
        let mut message = vec![0; 240];
        (message[0], message[1], message[2]) = (1, 1, 6);
        message[28..34].copy_from_slice(&GUEST.0);
        message[236..240].copy_from_slice(&[99, 130, 83, 99]);
        message.extend([53, 1, 1, 255]);
        let all = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST);
        let udp = datagram_of((all.0, 68).into(), (all.1, 67).into(), &message).unwrap();
        let ether = eth::Header { dst: EtherAddr([255; 6]), src: GUEST, ethertype: eth::IPV4 };
        frame_v4(ether, all.0, all.1, &udp).unwrap()
    }

    #[test]
    fn a_client_without_an_address_is_offered_one_by_broadcast() {
        let reply = answer(&answers(), OWN, &discover()).unwrap();
        let ether = eth::Header::parse(&reply).unwrap();
        assert_eq!((ether.src, ether.dst), (OWN, GUEST));
        let ip = ipv4::Header::parse(&reply[14..], reply.len() - 14).unwrap();
        assert_eq!((ip.src, ip.dst), ([10, 0, 0, 1].into(), Ipv4Addr::BROADCAST));
        let message = payload_of(&reply[34..]).unwrap();
        assert_eq!((message[0], &message[16..20]), (2, &[10, 0, 0, 2][..]));
    }

    #[test]
    fn a_solicitation_of_the_link_is_answered_and_one_from_beyond_is_not() {
        let message = [ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        let from = link_local(GUEST);
        let to: Ipv6Addr = "ff02::2".parse().unwrap();
        let mut sum = Sum::new();
        sum.add_bytes(&message);
        sum.add_pseudo(from.into(), to.into(), protocol::ICMPV6, 8);
        let mut message = message;
        message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        let ether = eth::Header { dst: OWN, src: GUEST, ethertype: eth::IPV6 };
        let ask =
            |hops| frame_v6(ether, header_v6(from, to, protocol::ICMPV6, hops), &message).unwrap();
        let reply = answer(&answers(), OWN, &ask(255)).unwrap();
        let ip = ipv6::Header::parse(&reply[14..], reply.len() - 14).unwrap();
        assert_eq!((ip.src.to_string(), ip.dst, ip.hop_limit), ("fe80::99".into(), from, 255));
        let mut sum = Sum::new();
        sum.add_bytes(&reply[54..]);
        sum.add_pseudo(ip.src.into(), ip.dst.into(), protocol::ICMPV6, reply.len() as u32 - 54);
        assert!(sum.is_valid());
        assert_eq!(answer(&answers(), OWN, &ask(64)), None);
    }

    #[test]
    fn frames_that_end_early_are_not_answered() {
        let whole = discover();
        for n in 0..whole.len() {
            let _ = answer(&answers(), OWN, &whole[..n]);
        }
        assert_eq!(answer(&answers(), OWN, &whole[..100]), None);
    }
}
