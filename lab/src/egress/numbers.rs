//! What rules cost: the start of a run, connections, throughput, and the same by way of a proxy.
//!
//! Every run of a scenario starts a gateway. Inside it this program, in another role ([`serve`]), is the client; a thread
//! of the bench, in the namespace of the servers, is the server.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use serde_json::{Value, json};

use super::world::{As, Inside, World};
use crate::cpu;
use crate::harness::report::{Column, label, number};
use crate::harness::{Ratio, Sample, Scenario, Term};
use crate::transfer::GBPS;

/// The role of the client.
pub(crate) const ROLE: &str = "egress";
/// The allowed name. It has an IPv4 address only, so that both sides of a ratio use the same IP version.
const ALLOWED: &str = "v4.test";
const SERVER: &str = "45.10.0.10";
const PORT: u16 = 8080;
/// Bytes of the large transfer.
const LARGE_BYTES: u64 = 300_000_000;
/// Short requests of one client, each on a connection of its own.
const REQUESTS: u32 = 300;
const CHUNK_BYTES: usize = 128 << 10;
/// Names in the rules of the largest table.
const MANY_RULES: usize = 10_000;
/// Part of a load that is not measured.
const WARM_UP: f64 = 0.2;
/// How long a load may take, in seconds.
const PATIENCE: u32 = 60;

const START_MS: &str = "start_ms";
const RATE: &str = "connections_per_s";
const GATEWAY_US: &str = "gateway_us_per_connection";
const WALL_S: &str = "wall_s";
/// The time of the transfer as curl says, without the start of the sandbox.
const CURL_S: &str = "curl_s";

/// The columns of the tables.
pub(super) const COLUMNS: &[Column] = &[
    label("title", "way"),
    number(START_MS, "start\nms", 1, "from the command until `true` has ended").with_interval(),
    number(RATE, "connections\nper s", 0, "connect, request, response, close").with_interval(),
    number(GATEWAY_US, "gateway\nus each", 1, "CPU time of the gateway").with_interval(),
    number(GBPS, "Gb/s", 2, "bytes that the client has written or read").with_interval(),
    number(WALL_S, "wall\ns", 3, "from the start of the sandbox to its end").with_interval(),
    number(CURL_S, "curl\ns", 3, "without the start of the sandbox").with_interval(),
    number("runs", "runs", 0, "number of measurements"),
];

/// Rules of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum With {
    /// None.
    Nothing,
    /// So many names, the allowed one the last of them.
    Names(usize),
    /// The same, and a file of connections.
    Audited(usize),
}

impl With {
    fn name(self) -> String {
        match self {
            With::Nothing => "open".to_owned(),
            With::Names(n) => format!("rules_{n}"),
            With::Audited(n) => format!("rules_{n}_audit"),
        }
    }

    fn title(self) -> String {
        let rules = |n| if n == 1 { "1 rule".to_owned() } else { format!("{n} rules") };
        match self {
            With::Nothing => "no rules".to_owned(),
            With::Names(n) => rules(n),
            With::Audited(n) => format!("{}, audit", rules(n)),
        }
    }

    fn options(self, world: &World) -> io::Result<Vec<String>> {
        let (names, is_audited) = match self {
            With::Nothing => return Ok(vec!["--rules".to_owned(), "/dev/null".to_owned()]),
            With::Names(n) => (n, false),
            With::Audited(n) => (n, true),
        };
        let file = world.path(&format!("{names}.rules"));
        if !file.exists() {
            let others = (1..names).map(|n| format!("allow n{n}.example.org:443\n"));
            fs::write(&file, others.chain([format!("allow {ALLOWED}\n")]).collect::<String>())?;
        }
        let mut options = vec!["--rules".to_owned(), file.display().to_string()];
        if is_audited {
            options.extend(["--audit".to_owned(), world.path("audit.jsonl").display().to_string()]);
        }
        Ok(options)
    }

    /// Where the server is: without rules a name is the host's affair.
    fn host(self) -> &'static str {
        if self == With::Nothing { SERVER } else { ALLOWED }
    }
}

/// The rule tables that are compared; audited ones where this fulmar can.
fn kinds(world: &World) -> Vec<With> {
    let mut all = vec![With::Nothing, With::Names(1), With::Names(100), With::Names(MANY_RULES)];
    if world.knows("--audit") {
        all.extend([With::Audited(1), With::Audited(MANY_RULES)]);
    }
    all
}

/// Starts the server in its namespace; it ends with this process.
///
/// # Errors
/// It cannot listen.
pub(super) fn start_server(world: &World) -> io::Result<()> {
    let listener = world.internet().run(|| TcpListener::bind((SERVER, PORT)))?;
    thread::spawn(move || {
        let chunk: Arc<[u8]> = vec![0x5a; CHUNK_BYTES].into();
        for connection in listener.incoming().flatten() {
            let _ = answer(connection, &chunk);
        }
    });
    Ok(())
}

/// Answers a short request here, a long one on a thread of its own.
fn answer(connection: TcpStream, chunk: &Arc<[u8]>) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let chunk = Arc::clone(chunk);
    let path = request.split(' ').nth(1).unwrap_or_default();
    let bytes = match path {
        "/large" => LARGE_BYTES,
        "/endless" => 1 << 50,
        "/sink" => {
            thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
            return Ok(());
        }
        _ => {
            let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
            return reader.get_mut().write_all(text.as_bytes());
        }
    };
    thread::spawn(move || send(reader.into_inner(), bytes, &chunk));
    Ok(())
}

fn send(mut to: TcpStream, bytes: u64, chunk: &[u8]) -> io::Result<()> {
    write!(to, "HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n")?;
    let mut left = bytes;
    while left > 0 {
        let n = left.min(chunk.len() as u64) as usize;
        to.write_all(&chunk[..n])?;
        left -= n as u64;
    }
    Ok(())
}

// ---- scenarios ----

/// The scenarios in the order of a round; compared ones are side by side.
pub(super) fn scenarios<'a>(world: &'a World, is_quick: bool) -> Vec<Scenario<'a>> {
    let kinds = kinds(world);
    let mut all = Vec::new();
    for with in [With::Nothing, With::Names(1)] {
        all.push(scenario(world, "start", with, START_TABLE));
    }
    let is_main = |with: &With| {
        matches!(with, With::Nothing | With::Audited(_)) || *with == With::Names(MANY_RULES)
    };
    for with in kinds.iter().copied().filter(|with| !is_quick || is_main(with)) {
        all.push(scenario(world, "crr", with, CRR_TABLE));
    }
    let last =
        kinds.iter().copied().find(|with| *with == With::Audited(1)).unwrap_or(With::Names(1));
    for direction in ["out", "in"].into_iter().filter(|_| !is_quick) {
        for with in [With::Nothing, last] {
            all.push(scenario(world, direction, with, BULK_TABLE));
        }
    }
    let ways: &[&str] =
        if world.srt_version().is_some() { &["fulmar", "srt"] } else { &["fulmar"] };
    for load in ["300mb", "requests"].into_iter().filter(|_| !is_quick) {
        all.extend(ways.iter().map(|way| proxied(world, way, load)));
    }
    all
}

const START_TABLE: &str = "Start: fulmar run ... -- true";
const CRR_TABLE: &str = "Connections with one HTTP request";
const BULK_TABLE: &str = "One stream: an HTTP upload and download";
const PROXY_TABLE: &str = "curl, start included: 300 MB, and 300 requests on a connection each";

fn scenario<'a>(world: &'a World, what: &'static str, with: With, table: &str) -> Scenario<'a> {
    let run = move |time: Duration| load(world, what, with, time);
    let title = match what {
        "out" | "in" => format!("{what}, {}", with.title()),
        _ => with.title(),
    };
    Scenario::new(format!("{what}.{}", with.name()), title, run).in_table(table).label("load", what)
}

/// Runs the client inside, and reads what it measured.
fn load(world: &World, what: &str, with: With, time: Duration) -> io::Result<Sample> {
    let options = with.options(world)?;
    let id = super::new_mark();
    let spec = json!({
        "role": ROLE, "what": what, "ms": time.as_millis() as u64, "host": with.host(), "id": id,
        "fulmar": world.fulmar(), "options": options,
    });
    let lab = env::current_exe()?;
    let script = format!("exec {} lab-child '{spec}'", lab.display());
    let inside = if what == "start" { Inside::Host } else { Inside::Fulmar(&options) };
    let said = world.run(&world.words(&inside, As::User, &script)?, PATIENCE, &id, None)?;
    let line = said.output.lines().find(|line| line.starts_with('{'));
    let found: Value = line.and_then(|line| serde_json::from_str(line).ok()).ok_or_else(|| {
        io::Error::other(format!("no figures: {}", super::last_line(&said.output)))
    })?;
    let value = |key: &'static str| found[key].as_f64().unwrap_or(f64::NAN);
    Ok([START_MS, RATE, GATEWAY_US, GBPS]
        .into_iter()
        .fold(Sample::default(), |s, key| s.with(key, value(key))))
}

/// curl as a user starts it, in `fulmar run` or sandbox-runtime.
fn proxied<'a>(world: &'a World, way: &'static str, load: &'static str) -> Scenario<'a> {
    let url = match load {
        "300mb" => format!("http://{ALLOWED}:{PORT}/large"),
        _ => format!("http://{ALLOWED}:{PORT}/small?[1-{REQUESTS}]"),
    };
    let script = format!(
        "curl -sS -H 'Connection: close' -o /dev/null -w '%{{time_total}} %{{http_code}}\\n' '{url}'"
    );
    let times = if load == "300mb" { 1 } else { REQUESTS as usize };
    let run = move |_| {
        let names = [ALLOWED.to_owned()];
        let options = ["--rules", "/dev/null", "--allow", ALLOWED].map(str::to_owned);
        let inside = if way == "srt" { Inside::Srt(&names) } else { Inside::Fulmar(&options) };
        let words = world.words(&inside, As::User, &script)?;
        let start = Instant::now();
        let said = world.run(&words, PATIENCE, "", None)?;
        let wall = start.elapsed();
        let seconds: Vec<f64> =
            said.output.lines().filter_map(|l| l.strip_suffix(" 200")?.parse().ok()).collect();
        if seconds.len() != times {
            return Err(io::Error::other(format!(
                "curl failed: {}",
                super::last_line(&said.output)
            )));
        }
        Ok(Sample::of(WALL_S, wall.as_secs_f64()).with(CURL_S, seconds.iter().sum()))
    };
    let title = match (way, world.srt_version()) {
        ("srt", Some(version)) => format!("{load}, sandbox-runtime {version}"),
        _ => format!("{load}, fulmar run"),
    };
    Scenario::new(format!("{way}.{load}"), title, run).in_table(PROXY_TABLE).label("load", load)
}

// ---- figures ----

/// The figures of what is measured.
pub(super) fn ratios(scenarios: &[Scenario<'_>]) -> Vec<Ratio> {
    let has = |name: &str| scenarios.iter().any(|s| s.name == name);
    let audited = |rules: usize| {
        let name = format!("crr.rules_{rules}_audit");
        if has(&name) { name } else { format!("crr.rules_{rules}") }
    };
    let (many, one) = (audited(MANY_RULES), audited(1));
    let bulk = if has("out.rules_1_audit") { "rules_1_audit" } else { "rules_1" };
    let suffix = if many.ends_with("audit") { " and audit" } else { "" };
    let of = |name: &str, key| -> Term { (name.to_owned(), key) };
    let mut all = vec![
        Ratio::over(
            "egress.start_ms",
            "start with a rule ÷ without",
            START_MS,
            ["start.rules_1", "start.open"],
        )
        .goals(1.2, 1.0),
        Ratio::over(
            "egress.crr.10k_rules",
            format!("connections per second with 10,000 rules{suffix} ÷ without"),
            RATE,
            [many.as_str(), "crr.open"],
        )
        .goals(0.97, 0.99)
        .more_is_better(),
        Ratio::over(
            "egress.crr.10k_rules_vs_1",
            format!("connections per second with 10,000 rules ÷ with one{suffix}"),
            RATE,
            [many.as_str(), one.as_str()],
        )
        .more_is_better(),
        Ratio::new(
            "egress.us_per_connection",
            format!("CPU of the gateway in us per connection with a rule{suffix}, minus without"),
            vec![of(&one, GATEWAY_US), of("crr.open", GATEWAY_US)],
            |t| t[0] - t[1],
        )
        .goals(15.0, 5.0),
    ];
    for direction in ["out", "in"] {
        let ratio = Ratio::over(
            format!("egress.bulk.{direction}"),
            format!("throughput with a rule{suffix} ÷ without, {direction}"),
            GBPS,
            [format!("{direction}.{bulk}"), format!("{direction}.open")],
        );
        all.push(ratio.goals(0.97, 1.0).more_is_better());
    }
    for (load, (reach, aim)) in [("300mb", (4.0, 6.0)), ("requests", (5.0, 10.0))] {
        for (key, end, what) in
            [(WALL_S, "", "whole command"), (CURL_S, ".curl", "without the start of the sandbox")]
        {
            let ways = [format!("srt.{load}"), format!("fulmar.{load}")];
            let sentence = format!("{load}, {what}: sandbox-runtime ÷ fulmar run");
            let ratio = Ratio::over(format!("egress.vs_proxy.{load}{end}"), sentence, key, ways)
                .more_is_better();
            all.push(if end.is_empty() { ratio.goals(reach, aim) } else { ratio });
        }
    }
    all.retain(|r| r.is_measured(scenarios));
    all
}

// ---- the client ----

/// The child's part: runs the load of `spec` and prints its figures.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    let word = |key: &str| spec[key].as_str().unwrap_or_default();
    let time = Duration::from_millis(spec["ms"].as_u64().unwrap_or(0));
    let host = word("host");
    let figures = match word("what") {
        "start" => {
            let options =
                spec["options"].as_array().into_iter().flatten().filter_map(Value::as_str);
            starts(word("fulmar"), &options.collect::<Vec<_>>(), time)?
        }
        "crr" => connections(host, &gateways(word("id")), time)?,
        direction => stream(host, direction, time)?,
    };
    crate::peer::print_line(&figures)
}

/// The processes of the gateway around this one: their arguments contain the id of the load.
fn gateways(id: &str) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_gateway = |pid: &u32| {
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        read("comm").starts_with(b"fulmar\n")
            && String::from_utf8_lossy(&read("cmdline")).contains(id)
    };
    pids.filter(is_gateway).collect()
}

fn cpu_of(processes: &[u32]) -> io::Result<Duration> {
    processes.iter().map(|pid| cpu::process_cpu(Some(*pid))).sum()
}

fn starts(fulmar: &str, options: &[&str], time: Duration) -> io::Result<Value> {
    let once = || {
        let mut command = Command::new(fulmar);
        command.arg("run").args(options).args(["--", "true"]).stdin(Stdio::null());
        match command.status()?.success() {
            true => Ok(()),
            false => Err(io::Error::other("`fulmar run -- true` failed")),
        }
    };
    once()?;
    let (start, mut count) = (Instant::now(), 0);
    while count == 0 || start.elapsed() < time {
        once()?;
        count += 1;
    }
    Ok(json!({ START_MS: start.elapsed().as_secs_f64() * 1000.0 / f64::from(count) }))
}

fn connections(host: &str, gateways: &[u32], time: Duration) -> io::Result<Value> {
    let to = (host, PORT).to_socket_addrs()?.find(|to| to.is_ipv4());
    let to = to.ok_or_else(|| io::Error::other("no address"))?;
    let mut bytes = Vec::new();
    let mut once = || {
        let mut connection = TcpStream::connect(to)?;
        connection.write_all(format!("GET / HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n").as_bytes())?;
        bytes.clear();
        connection.read_to_end(&mut bytes)
    };
    let warm = Instant::now();
    while warm.elapsed() < time.mul_f64(WARM_UP) {
        once()?;
    }
    let (start, before, mut count) = (Instant::now(), cpu_of(gateways)?, 0_u32);
    while count == 0 || start.elapsed() < time {
        once()?;
        count += 1;
    }
    let (elapsed, cpu) = (start.elapsed(), cpu_of(gateways)?.saturating_sub(before));
    let count = f64::from(count);
    Ok(json!({
        RATE: count / elapsed.as_secs_f64(),
        GATEWAY_US: (!gateways.is_empty()).then(|| cpu.as_secs_f64() * 1e6 / count),
    }))
}

fn stream(host: &str, direction: &str, time: Duration) -> io::Result<Value> {
    let mut connection = TcpStream::connect((host, PORT))?;
    let is_out = direction == "out";
    let request = match is_out {
        true => format!(
            "PUT /sink HTTP/1.1\r\nHost: {ALLOWED}\r\nContent-Length: {}\r\n\r\n",
            1_u64 << 50
        ),
        false => format!("GET /endless HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n"),
    };
    connection.write_all(request.as_bytes())?;
    let mut chunk = vec![0x5a; CHUNK_BYTES];
    let mut moved = |until: Instant| {
        let mut bytes = 0_u64;
        while bytes == 0 || Instant::now() < until {
            bytes += if is_out { connection.write(&chunk)? } else { connection.read(&mut chunk)? }
                as u64;
        }
        io::Result::Ok(bytes)
    };
    moved(Instant::now() + time.mul_f64(WARM_UP))?;
    let start = Instant::now();
    let bytes = moved(start + time)?;
    Ok(json!({ GBPS: bytes as f64 * 8.0 / start.elapsed().as_nanos() as f64 }))
}
