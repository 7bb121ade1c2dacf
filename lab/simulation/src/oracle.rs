//! The properties that must hold, and the messages about violations.

use fulmar::internals::runtime::WatchedShard;
use fulmar_stack::base::{Counter, DropReason, Duration, Instant};
use fulmar_stack::shard::{SocketStat, Stat};
use fulmar_stack::socket::SocketError;
use fulmar_stack::tcp::State;

use super::app::{End, Phase};
use super::attack::{Attack, AttackKind};
use super::{Case, Scenario};

/// The largest packet of a station to itself, bytes.
const LOOPBACK_MTU: usize = 65_535;

/// The report of a simulation without a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// Over every frame and every result of a call: equal for equal runs.
    pub digest: u64,
    /// Virtual time that passed, nanoseconds.
    pub virtual_ns: u64,
    /// Steps of the shards.
    pub steps: u64,
    /// Frames given to the wire.
    pub frames: u64,
    /// Bytes that readers got.
    pub bytes: u64,
    /// Bytes that TCP sent again.
    pub retransmitted_bytes: u64,
    /// Retransmission time-outs.
    pub timeouts: u64,
    /// Connections.
    pub connections: u64,
    /// Ends that reported an error, with a cause.
    pub errors: u64,
    /// The slowest honest connection, in thousandths of its bound.
    pub slowest_permille: u64,
    /// Steps that moved neither frame nor byte.
    pub idle_steps: u64,
}

/// A promise that was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Violation {
    /// A byte differs from what was written at its place.
    WrongByte {
        /// Which end read it: flow, and 0 for the opener's.
        end: (usize, usize),
        /// Its place in the stream.
        at: u64,
    },
    /// More bytes than were written.
    TooManyBytes {
        /// Which end.
        end: (usize, usize),
        /// Bytes read.
        read: u64,
        /// Bytes accepted from the writer.
        written: u64,
    },
    /// The end of the stream before its last byte, or without the writer's leave.
    EarlyEof {
        /// Which end.
        end: (usize, usize),
        /// Bytes read.
        read: u64,
        /// Bytes accepted from the writer.
        written: u64,
    },
    /// Something after the end of the stream.
    AfterEof {
        /// Which end.
        end: (usize, usize),
    },
    /// An error without a cause in the scenario.
    Uncaused {
        /// Which end.
        end: (usize, usize),
        /// The error.
        error: SocketError,
    },
    /// No error although the link has been dead for longer than the documented time.
    NoError {
        /// Which end.
        end: (usize, usize),
    },
    /// Nothing is under way, no timer runs, and an end still waits.
    Stall(String),
    /// Time stands still.
    Livelock(String),
    /// A frame waited for longer than the station holds any.
    Late {
        /// Which station.
        station: usize,
        /// How long it waited.
        by: Duration,
    },
    /// Not through after the longest time that the scenario can take.
    TooLong(String),
    /// Everything is closed, yet a stack still holds something.
    Leak {
        /// Which station.
        station: usize,
        /// What.
        what: String,
    },
    /// A counter that has no reason to count.
    Counter {
        /// Which station.
        station: usize,
        /// Its name.
        name: &'static str,
        /// Its value.
        value: u64,
    },
    /// More connections, or more of them lost, than the SYNs and cookies that arrived can be the cause of.
    Handshakes {
        /// Which station.
        station: usize,
        /// What.
        what: String,
    },
    /// A call failed that cannot fail here.
    Call(&'static str, SocketError),
    /// A datagram or an echo that was not sent.
    ForgedDatagram(String),
    /// An honest connection was not served within the bound of its scenario.
    Unserved {
        /// Which flow.
        flow: usize,
        /// From its beginning on.
        within: Duration,
    },
    /// Steps that did nothing, beyond what the scenario has timers for.
    Polls(String),
    /// More storage in use than the budget.
    OverBudget {
        /// Which station.
        station: usize,
        /// Bytes in use.
        used: usize,
        /// The budget.
        budget: usize,
    },
    /// A panic, with its message.
    Panic(String),
}

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which case.
    pub case: Case,
    /// The violated property.
    pub violation: Violation,
    /// The last events of a second playing.
    pub trace: Vec<String>,
    /// The second playing was the same, to the byte.
    pub replays: bool,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}: {:?}", self.case.seed, self.violation)?;
        writeln!(f, "{}", Scenario::of(self.case))?;
        if !self.replays {
            writeln!(f, "AND the second run differed from the first")?;
        }
        if !self.trace.is_empty() {
            writeln!(f, "the last events:")?;
            self.trace.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        }
        write!(f, "replay: fulmar-lab sim {} --verbose", self.case)
    }
}

impl std::error::Error for Failure {}

impl End {
    /// Whether something that it gave the stack is not acknowledged.
    pub fn has_pending(&self, shard: &mut WatchedShard) -> bool {
        let info = self.id.and_then(|id| shard.tcp_entry(id).ok()).map(|e| e.tcb.info());
        self.phase != Phase::Done
            && info.is_some_and(|i| {
                // One that is closed has an error, which an end that never calls is not told.
                i.state != State::Closed && (i.send_queue_bytes > 0 || i.in_flight_bytes > 0)
            })
    }
}

/// Whether a stack is empty: `None`, or what it still holds.
pub fn leftover(stat: &Stat) -> Option<String> {
    let held = [
        ("sockets", stat.sockets.len()),
        ("connections in TIME-WAIT", stat.time_wait),
        ("mbufs", stat.pool.mbufs_in_use),
        ("bytes of storage", stat.pool.used_bytes.iter().sum()),
        ("bytes of receive window", stat.window.granted_bytes),
    ];
    let told: Vec<String> =
        held.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")).collect();
    if told.is_empty() {
        return None;
    }
    let states: Vec<String> =
        stat.sockets.iter().map(|s| format!("{:?}>{:?} {}", s.local, s.remote, s.state)).collect();
    Some(format!("{}; {}", told.join(", "), states.join("; ")))
}

/// Whether an error can come of what the peer, the network or the device does. No scenario is a cause for the
/// others: they are answers to a call that the application may make.
pub fn is_of_the_network(error: SocketError) -> bool {
    use SocketError as E;
    let ends = [E::ConnectionReset, E::ConnectionRefused, E::ConnectionAborted, E::BrokenPipe];
    let silence = [E::TimedOut, E::HostUnreachable, E::NetworkUnreachable, E::NetworkDown];
    ends.contains(&error) || silence.contains(&error)
}

/// Counters that count without a reason. `mixed`: datagrams that reassembly may have mixed with others.
pub fn check_counters(
    s: &Scenario,
    station: usize,
    stats: &[Stat; 2],
    mixed: u64,
) -> Result<(), Violation> {
    let c = &stats[station].counters;
    let other = &s.paths[1 - station];
    let never = |name, value| {
        if value == 0 { Ok(()) } else { Err(Violation::Counter { station, name, value }) }
    };
    let drops = |r: DropReason| never(r.name(), c.drops(r));
    // A stack sends valid packets whatever it receives.
    [DropReason::FrameTooBig, DropReason::BadOffload, DropReason::DeviceRefused]
        .into_iter()
        .try_for_each(drops)?;
    // Whatever else is injected has sound headers.
    let takes_garbage = |a: &Attack| a.victim == station && a.kind == AttackKind::Garbage;
    if other.corrupt == 0.0 && !s.swarm.attacks.iter().any(takes_garbage) {
        [DropReason::TcpChecksum, DropReason::IpChecksum].into_iter().try_for_each(drops)?;
        [DropReason::TcpHeader, DropReason::IpHeader, DropReason::Truncated]
            .into_iter()
            .try_for_each(drops)?;
        let wrong = [DropReason::UdpChecksum, DropReason::UdpHeader].map(|r| c.drops(r));
        never("udp_checksum, udp_header", wrong.iter().sum::<u64>().saturating_sub(mixed))?;
    }
    if !s.is_clean() || !s.swarm.attacks.is_empty() || (0..s.flows.len()).any(|f| s.may_fail(f)) {
        return Ok(());
    }
    // A receiver of references counts the whole block behind each, and refuses some (see
    // `RecvQueue::storage_bytes`): that costs a retransmission, where there are no super-frames.
    // So does a full accept queue, which drops data with the last ACK of the handshake.
    let drops_acks = stats.iter().any(|s| s.counters.drops(DropReason::AcceptQueueFull) > 0);
    if !drops_acks && s.stations.iter().all(|st| st.copies) {
        // A receiver that pauses for longer than the probe time-out is probed (RFC 8985 section 7.2).
        let largest = if s.flows.iter().any(|f| f.to_self) { LOOPBACK_MTU } else { s.mtu };
        let probed = c.value(Counter::TcpTailLossProbes) * largest as u64;
        let sent_again = c.value(Counter::TcpRetransmitBytes);
        never("tcp_retransmit_bytes", sent_again.saturating_sub(probed))?;
        never("tcp_fast_retransmits", c.value(Counter::TcpFastRetransmits))?;
        drops(DropReason::TcpReassemblyFull)?;
    }
    drops(DropReason::NoBuffer)?;
    if s.flows.iter().all(|f| f.again.is_none()) {
        // A SYN into TIME-WAIT that may be an old duplicate is answered with an old ACK.
        drops(DropReason::TcpBadAck)?;
    }
    // Not `TcpOutOfWindow`: window probes are meant to be. The ACK of a tail loss probe in LAST-ACK finds the
    // connection gone, if that of the first transmission was only late.
    let bad_flags = c.drops(DropReason::TcpBadFlags);
    never("tcp_bad_flags", bad_flags.saturating_sub(c.value(Counter::TcpTailLossProbes)))?;
    drops(DropReason::TcpPaws)
}

/// Adds what a stack counted.
pub fn add_counters(report: &mut Report, stat: &Stat) {
    let value = |c: Counter| stat.counters.value(c);
    report.frames += value(Counter::TxFrames);
    report.retransmitted_bytes += value(Counter::TcpRetransmitBytes);
    report.timeouts += value(Counter::TcpTimeouts);
}

/// The values that are not zero, in words.
pub fn counters(stat: &Stat) -> String {
    let value = |c: &Counter| stat.counters.value(*c);
    let counts =
        Counter::ALL.iter().filter(|c| value(c) > 0).map(|c| format!("{} {}", c.name(), value(c)));
    let drops = DropReason::ALL.iter().filter(|r| stat.counters.drops(**r) > 0);
    let drops = drops.map(|r| format!("dropped {} {}", r.name(), stat.counters.drops(*r)));
    let told: Vec<String> = counts.chain(drops).collect();
    format!("{}; {:?}; {:?}", told.join(", "), stat.pool, stat.window)
}

/// A socket with what waits in it, in words.
pub fn socket(s: &SocketStat) -> String {
    let [local, remote] = [s.local, s.remote].map(|a| a.map(|a| a.port()).unwrap_or_default());
    let (unread, unsent) = (s.recv_queue, s.send_queue);
    let windows = s.tcp.as_ref().map(|i| (i.rcv_wnd_bytes, i.snd_wnd_bytes));
    format!(
        "{} {local}>{remote} {}: {unread} unread, {unsent} not acknowledged, windows {windows:?}",
        s.protocol, s.state
    )
}

/// Seconds, for messages.
pub fn seconds(t: Instant) -> String {
    format!("{:.6} s", t.as_nanos() as f64 / 1e9)
}
