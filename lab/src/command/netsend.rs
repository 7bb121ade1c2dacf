//! `fulmar-lab netsend` and `fulmar-lab netreceive`: numbered datagrams at a rate, and who counts them.
//!
//! The first four bytes of a payload are a counter, most significant byte first, as those who know the
//! programs of these names expect; the receiver tells losses by it.

use crate::network::NetworkArgs;
use fulmar_cli::failure::{Failure, Outcome};
use fulmar_cli::interrupt::Interrupt;
use fulmar_cli::resolve::{Family, resolve};
use fulmar_cli::say::say;
use fulmar_lab::cpu;
use fulmar_lab::harness::Progress;
use fulmar_lab::netperf::socket::Tuning;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Sends between two looks at the clock where no rate is to be kept.
const BATCH: u64 = 64;
/// How often the progress is shown.
const SHOWN_EVERY: Duration = Duration::from_millis(500);

/// Send numbered UDP datagrams at a rate, and print the cost of each
#[derive(clap::Args, Debug)]
#[command(
    after_help = "fulmar-lab netsend 10.77.0.1 5555 18 0 5       18 bytes, as fast as it goes, 5 s
fulmar-lab netsend --stack kernel 127.0.0.1 5555 18 1000 5"
)]
pub struct SendArgs {
    /// Address or name of the receiver
    host: String,
    /// UDP port of the receiver
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Bytes of payload, at least 4 for the counter
    #[arg(value_name = "BYTES", value_parser = clap::value_parser!(u32).range(4..=65_507))]
    size: u32,
    /// Datagrams per second; 0: no limit
    #[arg(value_name = "PER_SECOND")]
    rate: u64,
    /// Duration
    #[arg(value_parser = fulmar_cli::bounds::seconds)]
    seconds: Duration,
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    network: NetworkArgs,
}

/// Receive numbered UDP datagrams, and print rate and losses every second
#[derive(clap::Args, Debug)]
#[command(after_help = "fulmar-lab netreceive 5555 --seconds 10
fulmar-lab netreceive --stack kernel 5555      until it is interrupted")]
pub struct ReceiveArgs {
    /// Port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Stop after this time
    #[arg(long, value_parser = fulmar_cli::bounds::seconds)]
    seconds: Option<Duration>,
    /// Listen on IPv6 (fulmar: on its IPv6 addresses)
    #[arg(short = '6')]
    v6: bool,
    #[command(flatten)]
    network: NetworkArgs,
}

/// Runs `netsend`.
pub fn send(args: &SendArgs) -> Outcome<ExitCode> {
    let to = resolve(&args.host, args.port, args.family)?[0];
    let opened = args.network.open()?;
    let interrupt = Interrupt::catch()?;
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = opened.network.datagrams(SocketAddr::new(any, 0), &Tuning::default());
    let socket = socket.map_err(|e| Failure::io("cannot open a UDP socket", &e))?;
    socket.connect(to).map_err(|e| Failure::io(format_args!("cannot send to {to}"), &e))?;
    let mut sent = Sent::default();
    let mut payload = vec![0; args.size as usize];
    let (start, cpu) = (Instant::now(), Worked::start());
    let (progress, mut shown) = (Progress::new(1), start);
    while start.elapsed() < args.seconds && !interrupt.came() {
        for _ in 0..if args.rate == 0 { BATCH } else { 1 } {
            payload[..4].copy_from_slice(&(sent.tried as u32).to_be_bytes());
            sent.note(socket.send(&payload), to)?;
        }
        if shown.elapsed() >= SHOWN_EVERY {
            shown = Instant::now();
            let [done, all] = [start.elapsed(), args.seconds].map(|t| t.as_millis() as usize);
            progress.show(format!("{} datagrams sent", sent.good), done, all);
        }
        if let Some(ns) = sent.tried.saturating_mul(1_000_000_000).checked_div(args.rate) {
            let due = (start + Duration::from_nanos(ns)).min(start + args.seconds);
            if !interrupt.sleep_until(due) {
                break;
            }
        }
    }
    let elapsed = start.elapsed();
    drop(progress);
    say(sent.line(elapsed, cpu.each_ns(sent.good)))?;
    let silent = opened.silent_neighbour();
    if let Some(neighbour) = silent {
        eprintln!(
            "fulmar: nothing has left: {neighbour} does not answer; check it, --addr and --gateway"
        );
    }
    drop(socket);
    opened.close();
    Ok(ExitCode::from(u8::from(sent.good == 0 || silent.is_some())))
}

/// The CPU time that this program takes, all of its threads.
struct Worked(Option<Duration>);

impl Worked {
    fn start() -> Worked {
        Worked(cpu::process_cpu(None).ok())
    }

    /// ns for each of `count` units; 0 without an account.
    fn each_ns(&self, count: u64) -> f64 {
        let now = cpu::process_cpu(None).ok();
        let spent = now.zip(self.0).map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
        spent.as_nanos() as f64 / count.max(1) as f64
    }
}

/// What became of the calls.
#[derive(Debug, Default)]
struct Sent {
    tried: u64,
    good: u64,
    /// The port is closed (an ICMP error came back).
    refused: u64,
    /// No room, for buffers or in the device.
    full: u64,
}

impl Sent {
    fn note(&mut self, result: io::Result<usize>, to: SocketAddr) -> Outcome {
        self.tried += 1;
        match result {
            Ok(_) => self.good += 1,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => self.refused += 1,
            Err(e) if is_full(&e) => self.full += 1,
            Err(e) => return Err(Failure::io(format_args!("cannot send to {to}"), &e)),
        }
        Ok(())
    }

    fn line(&self, elapsed: Duration, cpu_ns: f64) -> String {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let costs = match self.good {
            0 => String::new(),
            n => {
                let (rate, each) = (n as f64 / seconds, elapsed.as_nanos() as f64 / n as f64);
                format!(
                    ": {rate:.0} datagrams/s, {each:.1} ns and {cpu_ns:.1} ns of CPU per datagram"
                )
            }
        };
        format!(
            "{} datagrams in {seconds:.3} s{costs}; {} refused (port closed), {} not sent (queue full)",
            self.good, self.refused, self.full
        )
    }
}

fn is_full(e: &io::Error) -> bool {
    const ENOBUFS: i32 = 105;
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
        || e.raw_os_error() == Some(ENOBUFS)
}

/// Runs `netreceive`.
pub fn receive(args: &ReceiveArgs) -> Outcome<ExitCode> {
    let opened = args.network.open_to_listen()?;
    let interrupt = Interrupt::catch()?;
    let any: IpAddr =
        if args.v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let at = SocketAddr::new(any, args.port);
    let socket = opened.network.datagrams(at, &Tuning::default());
    let socket =
        socket.map_err(|e| Failure::io(format_args!("cannot listen on port {}", args.port), &e))?;
    eprintln!("listening on UDP port {}", args.port);
    let mut room = vec![0; 65_536];
    let (mut all, mut second) = (Received::default(), Received::default());
    let (start, cpu, mut shown) = (Instant::now(), Worked::start(), Instant::now());
    let mut failed = None;
    while !interrupt.came() && args.seconds.is_none_or(|s| start.elapsed() < s) {
        match socket.recv_from(&mut room) {
            Ok((n, _)) => {
                all.note(&room[..n]);
                second.note(&room[..n]);
            }
            Err(e) if is_full(&e) || e.kind() == io::ErrorKind::Interrupted => {}
            // What came before is told all the same.
            Err(e) => {
                failed = Some(Failure::io("cannot receive any more", &e));
                break;
            }
        }
        if shown.elapsed() >= Duration::from_secs(1) {
            if second.count > 0 {
                say(second.line(shown.elapsed()))?;
            }
            second = second.next();
            shown = Instant::now();
        }
    }
    say(all.summary(cpu.each_ns(all.count)))?;
    drop(socket);
    opened.close();
    failed.map_or(Ok(ExitCode::from(u8::from(all.count == 0))), Err)
}

/// What has come, by the counters in the payload.
#[derive(Debug, Default)]
struct Received {
    count: u64,
    bytes: u64,
    lost: u64,
    late: u64,
    /// The counter that comes next if nothing is lost.
    expected: Option<u32>,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Received {
    fn note(&mut self, payload: &[u8]) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.count += 1;
        self.bytes += payload.len() as u64;
        let Some(number) = payload.first_chunk::<4>().map(|b| u32::from_be_bytes(*b)) else {
            return;
        };
        let ahead = number.wrapping_sub(self.expected.unwrap_or(number));
        // A sender that begins again counts from 0: neither loss nor delay.
        if number == 0 || ahead < 1 << 31 {
            self.lost += if number == 0 { 0 } else { u64::from(ahead) };
            self.expected = Some(number.wrapping_add(1));
        } else {
            // It was counted as lost when its successors came.
            self.late += 1;
            self.lost = self.lost.saturating_sub(1);
        }
    }

    /// The account of the next second, which goes on from here.
    fn next(&self) -> Received {
        Received { expected: self.expected, ..Received::default() }
    }

    /// From the first to the last datagram.
    fn time(&self) -> Duration {
        self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first)
    }

    /// Everything that came; what nothing costs is not said.
    fn summary(&self, cpu_ns: f64) -> String {
        match self.count {
            0 => "in all: 0 datagrams".to_owned(),
            _ => format!("in all: {}; {cpu_ns:.1} ns of CPU each", self.line(self.time())),
        }
    }

    fn line(&self, time: Duration) -> String {
        let seconds = time.as_secs_f64().max(1e-9);
        let each = time.as_nanos() as f64 / self.count.max(1) as f64;
        format!(
            "{} datagrams, {:.0} datagrams/s, {each:.1} ns each, {:.3} Mbit/s; {} lost, {} late",
            self.count,
            self.count as f64 / seconds,
            self.bytes as f64 * 8.0 / seconds / 1e6,
            self.lost,
            self.late
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(numbers: &[u32]) -> Received {
        let mut r = Received::default();
        numbers.iter().for_each(|n| r.note(&n.to_be_bytes()));
        r
    }

    #[test]
    fn gaps_are_losses_until_the_missing_come_late() {
        assert_eq!(after(&[0, 1, 2]).lost, 0);
        assert_eq!(after(&[0, 1, 4]).lost, 2);
        let late = after(&[0, 1, 4, 2]);
        assert_eq!((late.lost, late.late), (1, 1));
    }

    #[test]
    fn a_sender_that_begins_again_has_lost_nothing_and_the_counter_goes_round() {
        assert_eq!(after(&[100, 101, 0, 1, 2]).lost, 0);
        assert_eq!(after(&[u32::MAX - 1, u32::MAX, 0, 1]).lost, 0);
        assert_eq!(after(&[u32::MAX, 2]).lost, 2);
    }

    #[test]
    fn what_did_not_come_or_go_has_no_cost() {
        assert_eq!(Received::default().summary(5e6), "in all: 0 datagrams");
        assert!(after(&[0, 1]).summary(250.0).ends_with("250.0 ns of CPU each"));
        let none = Sent::default().line(Duration::from_secs(1), 3919.0);
        assert!(none.starts_with("0 datagrams in 1.000 s; 0 refused"), "{none}");
        let two = Sent { good: 2, ..Sent::default() }.line(Duration::from_secs(1), 250.0);
        assert!(
            two.contains("2 datagrams/s") && two.contains("250.0 ns of CPU per datagram"),
            "{two}"
        );
    }

    #[test]
    fn short_payloads_are_counted_without_a_number() {
        let mut r = Received::default();
        r.note(b"");
        r.note(b"abc");
        assert_eq!((r.count, r.lost), (2, 0));
    }

    #[test]
    fn what_the_network_says_is_counted_and_other_errors_end_it() {
        let to = SocketAddr::from(([10, 0, 0, 1], 5));
        let mut sent = Sent::default();
        sent.note(Ok(18), to).expect("sent");
        sent.note(Err(io::ErrorKind::ConnectionRefused.into()), to).expect("counted");
        sent.note(Err(io::Error::from_raw_os_error(105)), to).expect("counted");
        assert_eq!((sent.good, sent.refused, sent.full), (1, 1, 1));
        assert!(sent.note(Err(io::ErrorKind::NetworkUnreachable.into()), to).is_err());
    }
}
