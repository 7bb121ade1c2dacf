//! A snapshot of a shard for people and tools: what `ss`, `ip` and `netstat -s` show.

use alloc::vec::Vec;
use core::net::SocketAddr;

use crate::base::{Counter, Counters, Instant};
use crate::device::DeviceStats;
use crate::ip::{IfAddr, Neighbour, Route};
use crate::mbuf::PoolStats;
use crate::tcp::{Info, WindowBudget};

use crate::shard::listen::syn_queue::ListenerStat;
use crate::shard::sockets::Socket;
use crate::shard::world::Shard;

/// One socket.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SocketStat {
    /// `tcp`, `udp` or `icmp`.
    pub protocol: &'static str,
    /// Of a connection the state by its name in RFC 9293. Of a listener `LISTEN`; of other sockets `ESTABLISHED` with a
    /// peer and `UNCONNECTED` without.
    pub state: &'static str,
    /// Bytes not yet read; for a listener, connections not yet accepted.
    pub recv_queue: usize,
    /// Bytes not yet acknowledged; for a listener, its backlog.
    pub send_queue: usize,
    /// This end.
    pub local: Option<SocketAddr>,
    /// The other end.
    pub remote: Option<SocketAddr>,
    /// Of a connection: its variables (Linux: `tcp_info`).
    pub tcp: Option<Info>,
    /// The numbers of a listener.
    pub listener: Option<ListenerStat>,
}

/// One shard, or several together.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stat {
    /// Addresses of the stack.
    pub addresses: Vec<IfAddr>,
    /// Sockets, by slot.
    pub sockets: Vec<SocketStat>,
    /// Connections in TIME-WAIT.
    pub time_wait: usize,
    /// Counters and drops.
    pub counters: Counters,
    /// Buffers.
    pub pool: PoolStats,
    /// Receive windows granted.
    pub window: WindowBudget,
    /// The device.
    pub device: DeviceStats,
    /// Neighbours with their states.
    pub neighbours: Vec<Neighbour>,
    /// Routes.
    pub routes: Vec<Route>,
}

impl Stat {
    /// How many of the sockets are connections.
    pub fn connections(&self) -> usize {
        self.sockets.iter().filter(|s| s.tcp.is_some()).count()
    }

    /// This and another shard of the same stack together.
    #[must_use]
    pub fn with(mut self, other: Stat) -> Stat {
        self.sockets.extend(other.sockets);
        self.time_wait += other.time_wait;
        self.counters.merge(&other.counters);
        self.pool.add(&other.pool);
        self.window.limit_bytes += other.window.limit_bytes;
        self.window.granted_bytes += other.window.granted_bytes;
        self.device.add(&other.device);
        for n in other.neighbours {
            if !self.neighbours.iter().any(|known| known.ip == n.ip) {
                self.neighbours.push(n);
            }
        }
        self
    }
}

impl Shard {
    /// A snapshot of the shard.
    pub fn stat(&mut self) -> Stat {
        self.stat_at(self.core.net.link.now())
    }

    /// A snapshot of the shard at a time.
    pub fn stat_at(&mut self, now: Instant) -> Stat {
        self.core.net.pool.drain_remote();
        let pool = self.core.net.pool.stats();
        let ip = &self.core.net.ip;
        Stat {
            addresses: ip.addresses().copied().collect(),
            sockets: self.core.sockets.iter().map(|(_, s)| describe(s, now)).collect(),
            time_wait: self.tcp.time_wait.len(),
            counters: with_buffers(&self.core.net.counters, &pool),
            pool,
            window: self.core.net.window,
            device: self.core.net.link.device_ref().stats(),
            neighbours: ip.neighbours().cloned().collect(),
            routes: ip.routes().collect(),
        }
    }
}

/// The counters of a shard with those that its pool keeps.
fn with_buffers(counters: &Counters, pool: &PoolStats) -> Counters {
    let mut all = counters.clone();
    all.add(Counter::BufferFast, pool.fast_allocs);
    all.add(Counter::BufferSlow, pool.slow_allocs);
    all.add(Counter::BufferEmpty, pool.empty_allocs);
    all.add(Counter::BufferRefill, pool.refills);
    all
}

fn describe(s: &Socket, now: Instant) -> SocketStat {
    let empty = SocketStat {
        protocol: "tcp",
        state: "",
        recv_queue: 0,
        send_queue: 0,
        local: None,
        remote: None,
        tcp: None,
        listener: None,
    };
    match s {
        Socket::Tcp(t) => {
            let info = t.tcb.info_at(now);
            SocketStat {
                state: state_name(info.state),
                recv_queue: info.recv_queue_bytes,
                send_queue: info.send_queue_bytes,
                local: Some(t.tcb.key().local()),
                remote: Some(t.tcb.key().remote()),
                tcp: Some(info),
                ..empty
            }
        }
        Socket::Listener(l) => SocketStat {
            state: "LISTEN",
            recv_queue: l.accept.len(),
            send_queue: l.backlog,
            local: Some(l.local),
            listener: Some(l.stat()),
            ..empty
        },
        Socket::Udp(u) => SocketStat {
            protocol: "udp",
            state: if u.socket.remote.is_some() { "ESTABLISHED" } else { "UNCONNECTED" },
            recv_queue: u.socket.queued_bytes(),
            local: u.socket.local,
            remote: u.socket.remote,
            ..empty
        },
        Socket::EchoListener(e) => {
            SocketStat { protocol: "icmp", state: "LISTEN", recv_queue: e.len(), ..empty }
        }
        Socket::Ping(p) => {
            SocketStat { protocol: "icmp", state: "UNCONNECTED", recv_queue: p.queued(), ..empty }
        }
    }
}

fn state_name(s: crate::tcp::State) -> &'static str {
    use crate::tcp::State as S;
    match s {
        S::SynSent => "SYN-SENT",
        S::SynReceived => "SYN-RECEIVED",
        S::Established => "ESTABLISHED",
        S::FinWait1 => "FIN-WAIT-1",
        S::FinWait2 => "FIN-WAIT-2",
        S::CloseWait => "CLOSE-WAIT",
        S::Closing => "CLOSING",
        S::LastAck => "LAST-ACK",
        S::TimeWait => "TIME-WAIT",
        S::Closed => "CLOSED",
    }
}
