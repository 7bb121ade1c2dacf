//! Frames and pools for the tests of this room.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::base::{Counters, EtherAddr, FlowKey, Gso, GsoKind, Instant, Offload, SeqNum};
use crate::mbuf::{Chain, Pool, PoolConfig, Purpose, RecvBuf};
use crate::wire::checksum::{Sum, checksum};

use crate::device::{
    Burst, Caps, Device, DeviceStats, DirectPlacement, Packet, Tally, Unsupported, WakeFd,
    WritableRanges,
};

pub(super) fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(32 << 20)).unwrap()
}

pub(super) fn packet(pool: &mut Pool, bytes: &[u8]) -> Packet {
    Packet::new(chain(pool, bytes, &[]))
}

/// A chain of the bytes, cut at the given places.
pub(super) fn chain(pool: &mut Pool, bytes: &[u8], cuts: &[usize]) -> Chain {
    let mut ends: Vec<usize> = cuts.iter().map(|c| c % bytes.len().max(1)).collect();
    ends.push(bytes.len());
    ends.sort_unstable();
    let mut c = Chain::new();
    let mut at = 0;
    for end in ends {
        for part in bytes[at..end].chunks(60_000) {
            let mut m = pool.alloc(part.len(), 0, Purpose::Send).unwrap();
            m.append(part.len()).unwrap().copy_from_slice(part);
            c.push_back(m);
        }
        at = end;
    }
    c
}

fn ip_header(v6: bool, protocol: u8, l4_bytes: usize) -> (Vec<u8>, IpAddr, IpAddr) {
    let mut h = vec![0u8; 12];
    if v6 {
        let (s, d) = (
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1),
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
        );
        h.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        h.extend((l4_bytes as u16).to_be_bytes());
        h.extend([protocol, 64]);
        h.extend(s.octets());
        h.extend(d.octets());
        return (h, s.into(), d.into());
    }
    let (s, d) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    h.extend([0x08, 0x00, 0x45, 0]);
    h.extend(((l4_bytes + 20) as u16).to_be_bytes());
    h.extend([0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0]);
    h.extend(s.octets());
    h.extend(d.octets());
    let sum = checksum(&h[14..]);
    h[24..26].copy_from_slice(&sum.to_be_bytes());
    (h, s.into(), d.into())
}

/// Ethernet, IP and transport headers for a payload, with the partial checksum, and the request.
pub(super) fn headers(
    v6: bool,
    udp: bool,
    payload: usize,
    mss: u16,
    flags: u8,
) -> (Vec<u8>, Offload) {
    let (l4_header, protocol, csum_offset) = if udp { (8, 17, 6) } else { (32, 6, 16) };
    let (mut h, s, d) = ip_header(v6, protocol, l4_header + payload);
    let l4 = h.len();
    h.extend([0x10, 0x00, 0x20, 0x00]);
    if udp {
        h.extend(((8 + payload) as u16).to_be_bytes());
        h.extend([0, 0]);
    } else {
        h.extend([0xff, 0xff, 0xff, 0x00, 0, 0, 0, 9, 0x80, flags, 1, 0, 0, 0, 0, 0]);
        h.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    }
    let mut sum = Sum::new();
    sum.add_pseudo(s, d, protocol, (l4_header + payload) as u32);
    h[l4 + csum_offset..l4 + csum_offset + 2].copy_from_slice(&sum.fold().to_be_bytes());
    let kind = match (udp, v6) {
        (true, _) => GsoKind::Udp,
        (false, true) => GsoKind::TcpV6,
        (false, false) => GsoKind::TcpV4,
    };
    let gso =
        Gso { kind, segment_bytes: mss, header_bytes: h.len() as u16, ecn: flags & 0x80 != 0 };
    let offload = Offload {
        needs_csum: true,
        csum_start: l4 as u16,
        csum_offset: csum_offset as u16,
        csum_valid: false,
        gso: (payload > usize::from(mss)).then_some(gso),
    };
    (h, offload)
}

/// A frame for `payload` in several mbufs that still lacks its checksum, a super-frame if the
/// payload is longer than `mss`.
pub(super) fn frame(pool: &mut Pool, v6: bool, udp: bool, payload: &[u8], mss: u16) -> Packet {
    let (h, offload) = headers(v6, udp, payload.len(), mss, 0x99);
    let mut c = chain(pool, &h, &[]);
    c.append(chain(pool, payload, &[payload.len() / 3, payload.len() / 2]));
    Packet { chain: c, offload }
}

/// A device that returns each sent frame as a received one. It accepts at most `limit` frames per burst, and every
/// hint.
pub(super) struct Mirror {
    caps: Caps,
    queue: VecDeque<Packet>,
    pub limit: usize,
    stats: DeviceStats,
}

impl Mirror {
    pub(super) fn new() -> Mirror {
        Mirror::of(Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1])))
    }

    pub(super) fn plain_ip() -> Mirror {
        Mirror::of(Caps::plain_ip(1500))
    }

    fn of(mut caps: Caps) -> Mirror {
        (caps.tx_csum, caps.tso) = (true, Some(65_535));
        Mirror { caps, queue: VecDeque::new(), limit: usize::MAX, stats: DeviceStats::default() }
    }
}

impl Device for Mirror {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn tx_burst(&mut self, _: Instant, _: &mut Pool, b: &mut Burst, c: &mut Counters) -> usize {
        let mut tally = Tally::default();
        while (tally.frames as usize) < self.limit
            && let Some(p) = b.pop_front()
        {
            tally.add(&p);
            self.queue.push_back(p);
        }
        tally.sent(c, &mut self.stats);
        tally.frames as usize
    }
    fn rx_burst(
        &mut self,
        _: Instant,
        _: &mut Pool,
        out: &mut Burst,
        budget: usize,
        _: &mut Counters,
    ) -> usize {
        let count = budget.min(out.space()).min(self.queue.len());
        self.queue.drain(..count).for_each(|p| out.push(p).unwrap());
        count
    }
    fn arm(&mut self) -> bool {
        self.queue.is_empty()
    }
    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }
}

impl DirectPlacement for Mirror {
    fn place(&mut self, _: FlowKey, _: SeqNum, _: WritableRanges) -> Result<(), Unsupported> {
        Ok(())
    }
    fn revoke(&mut self, _: &FlowKey) -> WritableRanges {
        WritableRanges::default()
    }
}

/// A room of `bytes` bytes is placed for a flow; `None`: the device places nothing.
pub(super) fn place(device: &mut dyn Device, bytes: usize) -> Option<Result<(), Unsupported>> {
    let end = |host: u8| SocketAddr::from(([10, 0, 0, host], 80));
    let mut rooms = WritableRanges::default();
    rooms.push(RecvBuf::with_capacity(bytes).post().writable_range(0).unwrap()).unwrap();
    Some(device.placement()?.place(FlowKey::new(end(1), end(2)), SeqNum(0), rooms))
}
