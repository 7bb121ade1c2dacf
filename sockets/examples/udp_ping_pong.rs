//! Measures the round-trip time of datagrams: one end sends requests one at a time, the other end answers.
//!
//! ```text
//! cargo run --release --example udp_ping_pong -- link                   # both ends, 100,000 requests
//! cargo run --release --example udp_ping_pong -- tap:fulmar0 serve 7000 # answers until Ctrl-C
//! cargo run --release --example udp_ping_pong -- tap:fulmar0 10.77.0.1:7000 10000
//!     # sends 10,000 requests; the kernel's end, in another terminal:
//!     ip addr add 10.77.0.1/24 dev fulmar0 && ip link set fulmar0 up
//!     socat -b 64 UDP4-RECVFROM:7000,fork EXEC:cat
//! ```

mod common;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use common::{Outcome, Place};
use fulmar::{Stack, UdpSocket};
use hdrhistogram::Histogram;

/// Time after which a datagram counts as lost.
const PATIENCE: Duration = Duration::from_secs(1);
const PORT: u16 = 7000;
const DEMO_ROUNDS: u64 = 100_000;

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let count = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number"));
    match words[..] {
        ["link"] => demo(DEMO_ROUNDS),
        ["link", rounds] => demo(count(rounds)?),
        [device, "serve", port] => {
            let Place::Network(stack) = common::open(device, None)? else {
                return Err("`link` has no other process to serve".into());
            };
            let port = port.parse().map_err(|_| format!("invalid port `{port}`"))?;
            println!("answering on port {port}; Ctrl-C ends it");
            serve(&UdpSocket::bind(&stack, ("::", port))?)
        }
        [device, peer, rounds] => {
            let Place::Network(stack) = common::open(device, None)? else {
                return Err("`link` has both ends in this process: omit the peer".into());
            };
            let peer: SocketAddr =
                peer.parse().map_err(|_| format!("`{peer}` is not of the form ADDRESS:PORT"))?;
            ask(&stack, peer, count(rounds)?)
        }
        _ => {
            let usage = "usage: udp_ping_pong link [ROUNDS], DEVICE serve PORT, \
                         or DEVICE PEER:PORT ROUNDS";
            Err(format!("{usage}\n\n{}", common::DEVICE_HELP).into())
        }
    }
}

fn demo(rounds: u64) -> Outcome {
    let Place::Demo(stack, peer) = common::open("link", None)? else {
        return Err("`link` is no demonstration".into());
    };
    let server = UdpSocket::bind(&peer, ("::", PORT))?;
    // The thread ends with the link, when the client has closed.
    thread::spawn(move || serve(&server).is_ok());
    let own: fulmar::Cidr = common::PEER.parse()?;
    ask(&stack, SocketAddr::new(own.address, PORT), rounds)
}

/// Sends every datagram back.
fn serve(socket: &UdpSocket) -> Outcome {
    let mut buffer = [0; 2048];
    loop {
        let (n, from) = socket.recv_from(&mut buffer)?;
        socket.send_to(&buffer[..n], from)?;
    }
}

fn ask(stack: &Stack, peer: SocketAddr, rounds: u64) -> Outcome {
    let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(stack, any)?;
    socket.connect(peer)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut times = Histogram::<u64>::new(3)?;
    let mut lost = 0;
    for round in 0..rounds {
        match ping(&socket, round) {
            Ok(time) => times.record(u64::try_from(time.as_nanos())?)?,
            Err(e) if e.kind() == ErrorKind::WouldBlock => lost += 1,
            Err(e) => return Err(format!("{peer}: {e}").into()),
        }
    }
    report(&times, lost);
    if times.is_empty() { Err(format!("{peer} never answered").into()) } else { Ok(()) }
}

/// One request and its answer.
fn ping(socket: &UdpSocket, round: u64) -> std::io::Result<Duration> {
    let mut answer = [0; 2048];
    let start = Instant::now();
    socket.send(&round.to_be_bytes())?;
    loop {
        let n = socket.recv(&mut answer)?;
        // A late answer belongs to an earlier round.
        if answer[..n] == round.to_be_bytes() {
            return Ok(start.elapsed());
        }
    }
}

fn report(times: &Histogram<u64>, lost: u64) {
    println!("{} answers, {lost} lost; round-trip time in microseconds:", times.len());
    let us = |ns: u64| ns as f64 / 1000.0;
    println!("  minimum {:10.1}", us(times.min()));
    for percent in [50.0, 90.0, 99.0, 99.9] {
        println!("  {percent:>5} % {:10.1}", us(times.value_at_percentile(percent)));
    }
    println!("  maximum {:10.1}", us(times.max()));
}
