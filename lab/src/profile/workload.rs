//! The workload of the published profile: a stream sent at a fixed rate, then a stream received at the same rate.
//!
//! The rate is 100 Mbit/s, as in the publication. Packets are sent one by one (no segmentation offload), as in the
//! publication, so that the profile shows per-packet work. Both ends are threads of this process, so that one recording
//! has both; each result names the threads that count.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fulmar::stat::ledger::Account;
use fulmar::{Cidr, Stack, devices};

use super::Shares;
use super::halved::{self, Halved};
use super::perf::{Recording, Sample};
use super::symbols::Symbols;
use crate::cpu;
use crate::kernel::Pair;
use crate::topology::{self, OUR_IP, PEER_IP, PREFIX};
use crate::without_tso::WithoutTso;

/// The published line.
pub const RATE_BPS: u64 = 100_000_000;
/// Bytes of a write; at the rate one goes every 5.2 ms.
const WRITE_BYTES: usize = 64 << 10;
/// One visit in this many is in the ledger: enough in seconds, and hardly a load by itself.
const EVERY: u32 = 16;
/// Looks per second: the load is small, so it takes many to see something.
const FREQUENCY_HZ: u32 = 19_997;
pub(super) const NEAR: &str = "near-end";
pub(super) const FAR: &str = "far-end";

/// What one stack's run showed.
#[derive(Clone, Debug)]
pub struct Profile {
    /// `kernel`, `fulmar`.
    pub stack: &'static str,
    /// By sampling; `None`: why there are no samples.
    pub sampled: Result<Shares, String>,
    /// By the stages of the account; fulmar only.
    pub ledger: Option<Shares>,
    /// CPU of the threads that count while sending and while receiving, as a share of one CPU.
    pub load: [f64; 2],
    /// How many samples there were.
    pub samples: usize,
    /// The functions met most often.
    pub top: Vec<(String, u64)>,
    /// Bytes moved.
    pub bytes: u64,
    /// The receiving half with fewer wake-ups.
    pub halved: Halved,
}

/// Runs `time` of sending and `time` of receiving over the kernel's own stack, two namespaces joined
/// by veth. Both ends count: the work of one is partly done in the calls of the other.
///
/// # Errors
/// No namespaces, no veth.
pub fn kernel(time: Duration) -> io::Result<Profile> {
    let pair = Pair::new(topology::MTU, false)?;
    let (near, far) = (pair.near(), pair.far());
    let recording = Recording::start(FREQUENCY_HZ);
    let listener = far.run(|| std::net::TcpListener::bind((Pair::FAR, 0)))?;
    let to = listener.local_addr()?;
    let (mut load, mut bytes) = ([0.0; 2], 0);
    for (phase, load) in load.iter_mut().enumerate() {
        let near_stream = near.run(|| std::net::TcpStream::connect(to))?;
        let far_stream = listener.accept()?.0;
        let moved = move_bytes(near_stream, far_stream, phase == 0, time)?;
        *load = (moved.near + moved.far).as_secs_f64() / moved.elapsed.as_secs_f64();
        bytes += moved.bytes;
    }
    let threads = |thread: &str| thread == NEAR || thread == FAR;
    let mut profile = Profile::of("kernel", recording, threads, load, bytes, None);
    let connect = || near.run(|| std::net::TcpStream::connect(to));
    profile.halved = halved::kernel(connect, &listener, time)?;
    Ok(profile)
}

/// As [`kernel`], fulmar over a TAP against the kernel. Only fulmar's threads count; what the kernel
/// does for the device in their calls is theirs.
///
/// # Errors
/// No namespaces, no TAP.
pub fn fulmar(time: Duration) -> io::Result<Profile> {
    let topology = topology::tap(|name| devices::tap(name).map_err(io::Error::other))?;
    topology.peer_netns.set_offloads("tap0", false)?;
    let device = Box::new(WithoutTso::new(topology.device));
    let address = Cidr { address: IpAddr::V4(OUR_IP), prefix_len: PREFIX };
    let recording = Recording::start(FREQUENCY_HZ);
    let builder = Stack::builder().device(device).address(address).name("profile").unlisted();
    let stack = builder.account(EVERY).build().map_err(io::Error::other)?;
    let listener = topology.peer_netns.run(|| std::net::TcpListener::bind((PEER_IP, 0)))?;
    let to = listener.local_addr()?;
    let (mut load, mut bytes) = ([0.0; 2], 0);
    for (phase, load) in load.iter_mut().enumerate() {
        let near_stream = fulmar::TcpStream::connect(&stack, to)?;
        let far_stream = listener.accept()?.0;
        let moved = move_bytes(near_stream, far_stream, phase == 0, time)?;
        *load = moved.near.as_secs_f64() / moved.elapsed.as_secs_f64();
        bytes += moved.bytes;
    }
    let account = stack.account()?;
    let threads = |thread: &str| thread == NEAR || thread.starts_with("fulmar-profile");
    let mut profile = Profile::of("fulmar", recording, threads, load, bytes, account);
    profile.halved = halved::fulmar(&stack, &listener, time)?;
    Ok(profile)
}

impl Profile {
    fn of(
        stack: &'static str,
        recording: io::Result<Recording>,
        counts: impl Fn(&str) -> bool,
        load: [f64; 2],
        bytes: u64,
        account: Option<Account>,
    ) -> Profile {
        let ledger = account.as_ref().map(Shares::of_account);
        let samples = recording.and_then(Recording::finish);
        let mut symbols = Symbols::of_this_program();
        let own = std::process::id();
        let kept = samples.map(|all| {
            all.into_iter().filter(|s| s.pid == own && counts(&s.thread)).collect::<Vec<Sample>>()
        });
        let (sampled, top, n) = match &kept {
            Ok(kept) if kept.is_empty() => {
                (Err("perf has no samples of these threads".to_owned()), Vec::new(), 0)
            }
            Ok(kept) => (Ok(symbols.shares(kept)), symbols.top(kept, 12), kept.len()),
            Err(e) => (Err(e.to_string()), Vec::new(), 0),
        };
        let halved = Halved::default();
        Profile { stack, sampled, ledger, load, samples: n, top, bytes, halved }
    }
}

/// What a phase took.
struct Moved {
    near: Duration,
    far: Duration,
    elapsed: Duration,
    bytes: u64,
}

/// One phase: the sender keeps the rate, the receiver takes what comes.
fn move_bytes(
    near: impl Read + Write + Send,
    far: impl Read + Write + Send,
    near_sends: bool,
    time: Duration,
) -> io::Result<Moved> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let spawn = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let near = spawn(NEAR).spawn_scoped(scope, end_of(near, near_sends, time))?;
        let far = spawn(FAR).spawn_scoped(scope, end_of(far, !near_sends, time))?;
        let panicked = |_| Err(io::Error::other("a thread of the workload panicked"));
        let (bytes, near) = near.join().unwrap_or_else(panicked)?;
        let (_, far) = far.join().unwrap_or_else(panicked)?;
        Ok(Moved { near, far, elapsed: start.elapsed(), bytes })
    })
}

/// What one thread does.
fn end_of<'s>(
    stream: impl Read + Write + Send + 's,
    sends: bool,
    time: Duration,
) -> impl FnOnce() -> io::Result<(u64, Duration)> + Send + 's {
    move || {
        let before = cpu::thread_cpu()?;
        let bytes = if sends { send_paced(stream, time)? } else { take_all(stream)? };
        Ok((bytes, cpu::thread_cpu()?.saturating_sub(before)))
    }
}

fn send_paced(mut stream: impl Write, time: Duration) -> io::Result<u64> {
    let bytes = vec![0x5a; WRITE_BYTES];
    let start = Instant::now();
    let mut sent = 0;
    while start.elapsed() < time {
        stream.write_all(&bytes)?;
        sent += WRITE_BYTES as u64;
        let due = Duration::from_nanos(sent * 8 * 1_000_000_000 / RATE_BPS);
        if let Some(wait) = due.checked_sub(start.elapsed()) {
            std::thread::sleep(wait);
        }
    }
    Ok(sent)
}

fn take_all(mut stream: impl Read) -> io::Result<u64> {
    let mut room = vec![0; WRITE_BYTES];
    let mut taken = 0;
    loop {
        match stream.read(&mut room)? {
            0 => return Ok(taken),
            n => taken += n as u64,
        }
    }
}
