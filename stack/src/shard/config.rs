//! Configuration of a stack. Every default gives its reason.

use alloc::vec::Vec;

use crate::base::{Duration, Secrets};
use crate::device::moderation::ModerationConfig;
use crate::ip::IfAddr;
use crate::mbuf::PoolConfig;
use crate::route::Route;

use crate::shard::listen::sources::SourceLimits;

/// The least byte budget of a shard: 128 KiB. It serves a connection, a few packets at a time; many connections and
/// fast ones need megabytes.
pub const MIN_BUDGET_BYTES: usize = 128 << 10;

/// The configuration of a stack (of each of its shards alike).
#[derive(Clone, Debug)]
pub struct StackConfig {
    /// Addresses with their prefixes; each makes an on-link route.
    pub addresses: Vec<IfAddr>,
    /// Routes beside the on-link ones.
    pub routes: Vec<Route>,
    /// Accepts packets to every unicast address, answers ARP and neighbour solicitations for each, and lets sockets
    /// bind to and send from each, as a gateway does for its guests ([`Config::any_ip`](crate::ip::Config::any_ip);
    /// Linux: AnyIP and IP_TRANSPARENT). Default off.
    pub any_ip: bool,
    /// Memory: the byte budget and its shares. The default is 256 MiB, of which nothing is touched
    /// before it is needed; the least is [`MIN_BUDGET_BYTES`] for each shard.
    pub pool: PoolConfig,
    /// Tunables of TCP.
    pub tcp: crate::tcp::Config,
    /// Largest IP packet in bytes, at most the device's; `None`: the device's.
    pub mtu: Option<usize>,
    /// From these all keys are derived: of sequence numbers, ports, hash tables. `None`, the default: a
    /// stack with threads draws 256 bits from the operating system; a shard alone must be given them.
    pub secrets: Option<Secrets>,
    /// Sockets of all kinds at most, embryonic and closing ones included. Default 131,072: enough
    /// for 100,000 connections, at about 2 KiB each.
    pub max_sockets: usize,
    /// Limits for each source address of connections that come in, per shard. Default none: many
    /// hosts may share one address.
    pub source_limits: SourceLimits,
    /// Most TIME-WAIT entries; the oldest is removed. Default 16,384, which one peer makes in a minute at 270
    /// connections per second.
    pub max_time_wait: usize,
    /// Orphans at most: connections that the application has closed and that are not yet in CLOSED or TIME-WAIT;
    /// beyond it those without progress for longest are reset. Default 8,192; Linux has 65,536 on a
    /// machine with 8 GiB (tcp_max_orphans).
    pub max_orphans: usize,
    /// Most resets per second to segments without a connection, and the largest burst of them: a flood to closed ports
    /// is not doubled. Default 1,000, the rate of ICMP errors; a client that is refused more often sees some of its
    /// attempts time out instead.
    pub resets_per_s: u32,
    /// Frames per `tx_burst` at most. Default 64, the field's customary budget.
    pub burst_frames: usize,
    /// How threads wait for the device: how long they busy-poll, whether they coalesce in a flood. The
    /// default adapts; [`ModerationConfig::LATENCY`] and [`ModerationConfig::THROUGHPUT`] decide.
    pub moderation: ModerationConfig,
    /// Packets from the stack to itself that may wait. Default 256, a full window of super-frames.
    pub loopback_packets: usize,
    /// Join the TCP segments of a received burst in software, where they come as packets of MTU size
    /// ([`gro`](crate::device::gro)). Default on: worth a tenth to a sixth of the CPU where
    /// a kernel cuts its segments before they reach the device; elsewhere it costs parsing each frame's headers.
    pub gro: bool,
    /// How long the end of the process or of the stack waits until everything that was accepted is
    /// acknowledged. Default 5 s: longer than the retransmissions of a lossy path, short enough
    /// for a person.
    pub exit_drain: Duration,
}

impl Default for StackConfig {
    fn default() -> Self {
        StackConfig {
            addresses: Vec::new(),
            routes: Vec::new(),
            any_ip: false,
            pool: PoolConfig::default(),
            tcp: crate::tcp::Config::default(),
            mtu: None,
            secrets: None,
            max_sockets: 131_072,
            source_limits: SourceLimits::default(),
            max_time_wait: 16_384,
            max_orphans: 8192,
            resets_per_s: 1000,
            burst_frames: 64,
            moderation: ModerationConfig::ADAPTIVE,
            loopback_packets: 256,
            gro: true,
            exit_drain: Duration::from_secs(5),
        }
    }
}
