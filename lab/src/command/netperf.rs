//! `fulmar-lab netperf`: netperf's client, with netperf's options and tables.
//!
//! As with netperf, the options of the test itself stand behind `--`.

use crate::network::NetworkArgs;
use clap::{ArgAction, Parser};
use fulmar_cli::failure::{During, Failure, Outcome};
use fulmar_cli::interrupt;
use fulmar_cli::resolve::{Family, resolve};
use fulmar_cli::say::say;
use fulmar_lab::cpu::pin_to;
use fulmar_lab::netperf::CONTROL_PORT;
use fulmar_lab::netperf::client::{Client, Summary, TESTS, Test, TestOptions};
use fulmar_lab::netperf::confidence::Goal;
use fulmar_lab::netperf::pace::Length;
use fulmar_lab::netperf::socket::Network;
use fulmar_lab::netperf::tables::{self, DEFAULT_KEYS, Style, Unit};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// What a shell expects of a command that ended by SIGINT.
const INTERRUPTED: u8 = 130;

/// Measure against a netserver, stock or our own: the client side of netperf's tests
#[derive(clap::Args, Debug)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:
  netserver                                              on the peer, stock, or `fulmar-lab netserver`
  fulmar-lab netperf -H 10.77.0.1 -t TCP_STREAM -c -C        bulk data to it, with CPU on both sides
  fulmar-lab netperf -H 10.77.0.1 -t TCP_RR -i 10,3 -I 95,5 -- -r 64,1024
  fulmar-lab netperf -H 10.77.0.1 -t TCP_STREAM -- -m 65536 -k THROUGHPUT,LOCAL_SD
  fulmar-lab netperf -H 10.77.0.1 -t TCP_STREAM -- -A -M 1M          they read asynchronously
docs/netperf.md has more."
)]
pub struct Args {
    /// The host with the netserver
    #[arg(short = 'H', long, value_name = "HOST")]
    host: String,
    /// The port of its control connection
    #[arg(short, long, default_value_t = CONTROL_PORT)]
    port: u16,
    /// TCP_STREAM, TCP_MAERTS, TCP_SENDFILE, TCP_RR, TCP_CRR, TCP_CC, UDP_STREAM, UDP_RR, OMNI
    #[arg(short, long, value_parser = test, default_value = "TCP_STREAM")]
    test: Chosen,
    /// Seconds; a negative number is bytes or transactions
    #[arg(short, long, default_value = "10", allow_hyphen_values = true, value_parser = length)]
    length: Length,
    /// Measure CPU here
    #[arg(short = 'c', long)]
    cpu: bool,
    /// Measure CPU there
    #[arg(short = 'C', long)]
    remote_cpu: bool,
    /// Fill the buffers from this file, or send it with TCP_SENDFILE
    #[arg(short = 'F', long = "fill", value_name = "FILE[,REMOTE]")]
    fill: Option<String>,
    /// Do the test at most and at least so often, until the result is sure
    #[arg(short, long, value_name = "MAX,MIN", value_parser = pair)]
    iterations: Option<(usize, usize)>,
    /// How sure: 95 or 99 percent that the mean lies in an interval of this width, in percent
    #[arg(short = 'I', long, value_name = "LEVEL[,WIDTH]", value_parser = confidence)]
    interval: Option<(u32, Option<f64>)>,
    /// The unit: B K M G bytes, b k m g bits, x transactions
    #[arg(short, long, value_parser = Unit::from_letter)]
    format: Option<Unit>,
    /// Banner and headings: 0 or 1
    #[arg(short = 'P', long = "headings", default_value_t = 1)]
    headings: u8,
    /// 0: one number; 1: the table; 2: more
    #[arg(short, long, default_value_t = 1)]
    verbosity: u32,
    /// Show interim results every this many seconds
    #[arg(short = 'D', long = "demo", value_name = "SECONDS", value_parser = fulmar_cli::bounds::seconds)]
    demo: Option<Duration>,
    /// Run on this CPU here, and on that there
    #[arg(short = 'T', long, value_name = "CPU[,CPU]", value_parser = cpus)]
    cpus: Option<(Option<usize>, Option<u32>)>,
    /// Buffers in the ring that is sent from, and received into
    #[arg(short = 'W', long, value_name = "SEND,RECV", value_parser = pair)]
    widths: Option<(usize, usize)>,
    /// Print help (netperf's -h means the same)
    #[arg(short, long, action = ArgAction::Help)]
    help: Option<bool>,
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    network: NetworkArgs,
    /// Options of the test: see `-- --help`
    #[arg(last = true, value_name = "TEST OPTIONS")]
    rest: Vec<String>,
}

/// The options of a test, behind `--`
#[derive(Parser, Debug, Default)]
#[command(name = "fulmar-lab netperf ... --", no_binary_name = true)]
struct TestArgs {
    /// Socket buffers here: send and receive bytes, one number for both
    #[arg(short = 's', value_name = "SEND[,RECV]", value_parser = size_pair)]
    local_buffers: Option<(usize, usize)>,
    /// Socket buffers there
    #[arg(short = 'S', value_name = "SEND[,RECV]", value_parser = size_pair)]
    remote_buffers: Option<(usize, usize)>,
    /// Bytes per send, here and there
    #[arg(short = 'm', value_name = "HERE[,THERE]", value_parser = size_pair)]
    send_bytes: Option<(usize, usize)>,
    /// Bytes per receive, there and here
    #[arg(short = 'M', value_name = "THERE[,HERE]", value_parser = size_pair)]
    recv_bytes: Option<(usize, usize)>,
    /// Bytes of a request and of a response
    #[arg(short = 'r', value_name = "REQUEST[,RESPONSE]", value_parser = size_pair)]
    exchange: Option<(usize, usize)>,
    /// Requests ahead of the answers
    #[arg(short = 'b', default_value_t = 0)]
    burst: u32,
    /// Disable the Nagle algorithm on both sides
    #[arg(short = 'D')]
    nodelay: bool,
    /// The server receives into posted buffers (TCP_STREAM, TCP_SENDFILE)
    #[arg(short = 'A')]
    posted: bool,
    /// We send memory that is given away, without a copy (TCP_STREAM)
    #[arg(short = 'a')]
    given: bool,
    /// Print KEY=VALUE: all that are usual, or those named
    #[arg(short = 'k', value_name = "KEYS", num_args = 0..=1, default_missing_value = "")]
    keys: Option<String>,
    /// Print the same as comma-separated values
    #[arg(short = 'o', value_name = "KEYS", num_args = 0..=1, default_missing_value = "")]
    csv: Option<String>,
    /// With OMNI: send, recv, or rr
    #[arg(short = 'd', value_name = "DIRECTION", value_parser = ["send", "recv", "rr"], ignore_case = true)]
    direction: Option<String>,
    /// With OMNI: tcp or udp
    #[arg(short = 'T', value_name = "PROTOCOL", value_parser = ["tcp", "udp"], ignore_case = true)]
    protocol: Option<String>,
}

/// What -t chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Chosen {
    Test(Test),
    Omni,
}

fn test(text: &str) -> Result<Chosen, String> {
    let name = text.to_ascii_uppercase();
    if name == "OMNI" {
        return Ok(Chosen::Omni);
    }
    let known = TESTS.iter().find(|t| t.1 == name).map(|t| Chosen::Test(t.0));
    known.ok_or_else(|| {
        let names: Vec<_> = TESTS.iter().map(|t| t.1).collect();
        format!("`{text}` is not a test that is built here: {}, OMNI", names.join(", "))
    })
}

fn length(text: &str) -> Result<Length, String> {
    match number(text.strip_prefix('-').unwrap_or(text)) {
        Ok(n) if text.starts_with('-') => Ok(Length::from_number(n.saturating_neg())),
        Ok(n) if n <= 1_000_000 => Ok(Length::from_number(n)),
        _ => Err(format!("`{text}` is not a number of seconds, nor a negative one of units")),
    }
}

/// A number with netperf's suffixes: K M G for 1024, k m g for 1000.
fn number(text: &str) -> Result<i64, String> {
    let wrong = || format!("`{text}` is not a number");
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'K')) => (&text[..at], 1 << 10),
        Some((at, 'M')) => (&text[..at], 1 << 20),
        Some((at, 'G')) => (&text[..at], 1 << 30),
        Some((at, 'k')) => (&text[..at], 1_000),
        Some((at, 'm')) => (&text[..at], 1_000_000),
        Some((at, 'g')) => (&text[..at], 1_000_000_000),
        _ => (text, 1),
    };
    digits.parse::<i64>().ok().and_then(|n| n.checked_mul(factor)).ok_or_else(wrong)
}

fn size(text: &str) -> Result<usize, String> {
    let bytes = number(text)?;
    usize::try_from(bytes).map_err(|_| format!("`{text}` is not a size"))
}

/// Two numbers; one alone stands for both.
fn size_pair(text: &str) -> Result<(usize, usize), String> {
    match text.split_once(',') {
        Some((a, b)) => Ok((size(a)?, size(b)?)),
        None => size(text).map(|n| (n, n)),
    }
}

fn pair(text: &str) -> Result<(usize, usize), String> {
    size_pair(text)
}

fn confidence(text: &str) -> Result<(u32, Option<f64>), String> {
    let (level, width) = match text.split_once(',') {
        Some((level, width)) => (level, Some(width)),
        None => (text, None),
    };
    let wrong = |_| format!("`{text}` is not LEVEL,WIDTH such as 95,5");
    let width = width.map(|w| w.parse::<f64>().map_err(|_| wrong(()))).transpose()?;
    if width.is_some_and(|w| !(w > 0.0 && w.is_finite())) {
        return Err(wrong(()));
    }
    Ok((level.parse().map_err(|_| wrong(()))?, width))
}

/// `1,0`: here and there; `1` is for both; a side may be left out.
fn cpus(text: &str) -> Result<(Option<usize>, Option<u32>), String> {
    let wrong = || format!("`{text}` is not a CPU, nor two");
    let (here, there) = text.split_once(',').unwrap_or((text, text));
    let one =
        |t: &str| if t.is_empty() { Ok(None) } else { t.parse().map(Some).map_err(|_| wrong()) };
    Ok((one(here)?.map(|n: u32| n as usize), one(there)?))
}

impl TestArgs {
    fn omni(&self) -> Outcome<Test> {
        let is = |value: &Option<String>, word: &str| {
            value.as_ref().is_some_and(|v| v.eq_ignore_ascii_case(word))
        };
        let is_udp = is(&self.protocol, "udp");
        match (is(&self.direction, "rr"), is(&self.direction, "recv"), is_udp) {
            (true, _, false) => Ok(Test::TcpRr),
            (true, _, true) => Ok(Test::UdpRr),
            (_, true, false) => Ok(Test::TcpMaerts),
            (_, true, true) => Err(Failure::new(
                "OMNI over UDP sends or makes requests; receiving alone is not built",
            )),
            (_, _, true) => Ok(Test::UdpStream),
            _ => Ok(Test::TcpStream),
        }
    }
}

impl Args {
    fn options(&self, test_args: &TestArgs) -> Outcome<TestOptions> {
        let test = match self.test {
            Chosen::Test(test) => test,
            Chosen::Omni => test_args.omni()?,
        };
        let mut w = TestOptions::new(test);
        w.length = self.length;
        if test.is_udp() && matches!(w.length, Length::Units(_)) {
            return Err(Failure::new(
                "a UDP test has a length in seconds, since datagrams get lost",
            ));
        }
        (w.measures_local, w.measures_remote) = (self.cpu, self.remote_cpu);
        if let Some(fill) = &self.fill {
            let (here, there) = fill.split_once(',').unwrap_or((fill, fill));
            w.fill = (!here.is_empty()).then(|| PathBuf::from(here));
            w.remote_fill = (!there.is_empty()).then(|| there.to_owned());
        }
        w.widths = self.widths.unwrap_or_default();
        w.remote_cpu = self.cpus.and_then(|c| c.1);
        let positive = |n: usize| (n > 0).then_some(n);
        for (side, buffers) in
            [(&mut w.local, test_args.local_buffers), (&mut w.remote, test_args.remote_buffers)]
        {
            side.tuning.send_buffer = buffers.and_then(|b| positive(b.0));
            side.tuning.recv_buffer = buffers.and_then(|b| positive(b.1));
            side.tuning.nodelay = test_args.nodelay;
        }
        w.local.send_bytes = test_args.send_bytes.and_then(|b| positive(b.0));
        w.remote.send_bytes = test_args.send_bytes.and_then(|b| positive(b.1));
        w.remote.recv_bytes = test_args.recv_bytes.and_then(|b| positive(b.0));
        w.local.recv_bytes = test_args.recv_bytes.and_then(|b| positive(b.1));
        w.exchange_bytes = test_args.exchange.unwrap_or((1, 1));
        if w.exchange_bytes.0 == 0 || w.exchange_bytes.1 == 0 {
            return Err(Failure::new("a request and a response have at least one byte"));
        }
        w.burst = test_args.burst;
        (w.remote_posted, w.local_given) = (test_args.posted, test_args.given);
        if w.local_given && test != Test::TcpStream
            || w.remote_posted && !matches!(test, Test::TcpStream | Test::TcpSendfile)
        {
            return Err(Failure::new(
                "-a (asynchronous write) is for TCP_STREAM, -A (asynchronous read at the other \
                 side) for TCP_STREAM and TCP_SENDFILE: choose one of them with -t",
            ));
        }
        Ok(w)
    }

    fn style(&self, test: Test) -> Style {
        let own = if test.is_transactional() { Unit::Transactions } else { Unit::Bits('m') };
        Style {
            unit: self.format.unwrap_or(own),
            has_headings: self.headings != 0,
            verbosity: self.verbosity,
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let test_args = match TestArgs::try_parse_from(&args.rest) {
        Ok(test_args) => test_args,
        Err(e) => e.exit(),
    };
    let options = args.options(&test_args)?;
    let goal = Goal::from_options(args.iterations, args.interval)
        .map_err(|e| Failure::new(format!("-I: {e}")))?;
    let server = *resolve(&args.host, args.port, args.family)?
        .first()
        .ok_or_else(|| Failure::new(format!("`{}` has no address", args.host)))?;
    let stop = interrupt::stop_flag()?;
    if let Some(cpu) = args.cpus.and_then(|c| c.0) {
        pin_to(cpu).during(format_args!("cannot run on CPU {cpu}"))?;
    }
    let opened = interrupt::exiting_at_once(|| args.network.open())?;
    let style = args.style(options.test);
    if style.has_headings {
        let stack = opened.network.name();
        say(tables::banner(&options, &goal, stack, &args.host, server.is_ipv4()))?;
    }
    let measured = measure(args, &*opened.network, server, &options, &goal, &stop);
    opened.close();
    if stop.load(Ordering::Relaxed) {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let summary = measured?;
    let result = tables::Shown { options: &options, goal: &goal, summary: &summary, style };
    say(show(args, &test_args, &result)?.trim_end_matches('\n'))?;
    Ok(ExitCode::SUCCESS)
}

fn measure(
    args: &Args,
    network: &dyn Network,
    server: SocketAddr,
    options: &TestOptions,
    goal: &Goal,
    stop: &AtomicBool,
) -> Outcome<Summary> {
    let client = Client::connect(network, server, stop)
        .during(format_args!("cannot reach a netserver at {server}"))?;
    let style = args.style(options.test);
    let (request, response) = options.exchange_bytes;
    let mut show = |units: u64, time: Duration| {
        let bytes_each = match style.unit {
            Unit::Transactions => 1,
            _ if options.test.is_transactional() => request + response,
            _ => 1,
        };
        let rate = style.unit.of(units as f64 * bytes_each as f64 / time.as_secs_f64());
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        let (unit, time) = (style.unit.name(), time.as_secs_f64());
        println!("Interim result: {rate:7.2} {unit}/s over {time:.3} seconds ending at {now:.3}");
    };
    let interim = args.demo.map(|every| (every, &mut show as &mut dyn FnMut(u64, Duration)));
    client.measure(options, goal, interim).during("the test failed")
}

/// The table, or the keys that -k or -o ask for.
fn show(args: &Args, test_args: &TestArgs, result: &tables::Shown<'_>) -> Outcome<String> {
    let wanted = match (&test_args.keys, &test_args.csv, args.test) {
        (Some(names), _, _) | (None, Some(names), _) => names.as_str(),
        (None, None, Chosen::Omni) => "",
        _ => return Ok(result.text()),
    };
    let all = result.keys();
    let names: Vec<String> = match wanted {
        "" => DEFAULT_KEYS.iter().map(|n| n.to_string()).collect(),
        "all" => all.iter().map(|k| k.0.to_owned()).collect(),
        list => list.split(',').map(|n| n.trim().to_ascii_uppercase()).collect(),
    };
    let mut chosen = Vec::new();
    for name in names {
        let value = all.iter().find(|k| k.0 == name).map(|k| k.1.clone());
        let value = value.ok_or_else(|| {
            Failure::new(format!(
                "there is no output called `{name}`; `-k all` shows those there are"
            ))
        })?;
        chosen.push((name, value));
    }
    let warning =
        if result.summary.is_sure { String::new() } else { tables::warning(result.summary) };
    if test_args.csv.is_none() || test_args.keys.is_some() {
        let lines: String = chosen.iter().map(|(k, v)| format!("{k}={v}\n")).collect();
        return Ok(warning + &lines);
    }
    let line = |of: fn(&(String, String)) -> &str| {
        chosen.iter().map(of).collect::<Vec<_>>().join(",") + "\n"
    };
    let headings = if result.style.has_headings { line(|c| &c.0) } else { String::new() };
    Ok(warning + &headings + &line(|c| &c.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str) -> Outcome<TestOptions> {
        let words = std::iter::once("netperf").chain(line.split_whitespace());
        let args: Args = fulmar_cli::options::parse(words).expect("it parses");
        let test_args = TestArgs::try_parse_from(&args.rest).expect("the rest parses");
        args.options(&test_args)
    }

    #[test]
    fn a_line_of_netperfs_means_the_same_here() {
        let w = options(
            "-H h -t TCP_RR -l -500 -c -C -F a,b -T 1,0 -W 4,5 -- -r 64,1K -s 32K -S 1M,2M -D -b 3",
        )
        .expect("sound");
        assert_eq!((w.test, w.length), (Test::TcpRr, Length::Units(500)));
        assert!(w.measures_local && w.measures_remote && w.local.tuning.nodelay);
        assert_eq!(w.exchange_bytes, (64, 1024));
        assert_eq!(w.local.tuning.send_buffer, Some(32 << 10));
        assert_eq!(w.local.tuning.recv_buffer, Some(32 << 10));
        assert_eq!(w.remote.tuning.recv_buffer, Some(2 << 20));
        assert_eq!((w.burst, w.widths, w.remote_cpu), (3, (4, 5), Some(0)));
        assert_eq!((w.fill, w.remote_fill), (Some("a".into()), Some("b".into())));
    }

    #[test]
    fn message_sizes_are_ours_and_theirs_in_netperfs_order() {
        let w = options("-H h -- -m 1,2 -M 3,4").expect("sound");
        assert_eq!((w.local.send_bytes, w.remote.send_bytes), (Some(1), Some(2)));
        assert_eq!((w.remote.recv_bytes, w.local.recv_bytes), (Some(3), Some(4)));
        assert_eq!(w.length, Length::Time(Duration::from_secs(10)));
    }

    #[test]
    fn omni_is_the_test_that_its_directions_make() {
        for (line, test) in [
            ("", Test::TcpStream),
            ("-d recv", Test::TcpMaerts),
            ("-d RR -T udp", Test::UdpRr),
            ("-T UDP", Test::UdpStream),
        ] {
            let line = format!("-H h -t omni -- {line}");
            assert_eq!(options(&line).expect("sound").test, test, "{line}");
        }
        assert!(options("-H h -t omni -- -d recv -T udp").is_err());
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        assert!(options("-H h -t UDP_STREAM -l -5").is_err());
        assert!(options("-H h -t TCP_RR -- -r 0,1").is_err());
        assert!(test("SCTP_STREAM").is_err() && length("x").is_err() && size_pair("-1").is_err());
        assert!(confidence("95,0").is_err() && confidence("x").is_err() && cpus("a").is_err());
        assert_eq!(number("9223372036854775807K").ok(), None);
    }
}
