//! `fulmar-lab netserver` on a TAP, and who measures it: the protocol by hand, and a stock
//! netperf where one is installed.

use crate::skip;
use fulmar_gateway::netns::Netns;
use fulmar_lab::netperf::CONTROL_PORT;
use fulmar_lab::netperf::message::{
    FAMILY_V4, MESSAGE_BYTES, Message, OmniRequest, OmniResponse, OmniResults, SIZE_UNSET,
    direction, kind,
};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);
const FULMAR: &str = env!("CARGO_BIN_EXE_fulmar-lab");

/// A TAP of its own for the server.
const TAP: &str = "--device tap:fulmar8 --addr 10.79.0.2/24";
const SERVER: &str = "10.79.0.2";

/// A netserver; it goes with a test that fails.
struct Netserver(Option<Child>);

impl Drop for Netserver {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a netserver and waits until it listens; `None` where there are no TAPs.
fn netserver() -> Option<Netserver> {
    if let Err(e) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        skip("netserver", &format!("/dev/net/tun: {e}"));
        return None;
    }
    let mut command = Command::new(FULMAR);
    command.arg("netserver").args(TAP.split_whitespace()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut line = String::new();
    let err = child.stderr.as_mut().expect("a pipe");
    io::BufRead::read_line(&mut io::BufReader::with_capacity(1, err), &mut line)
        .expect("it speaks");
    let server = Netserver(Some(child));
    assert!(line.starts_with("netserver: listening on "), "{line}");
    let here = Netns::current().expect("here");
    here.set_address("fulmar8", [10, 79, 0, 1].into(), 24).expect("the kernel's end");
    Some(server)
}

/// Interrupts the server, which must end in order.
fn end(mut server: Netserver) {
    let child = server.0.take().expect("it runs");
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stderr, b"", "it had nothing to complain about");
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((SERVER, port)).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

fn answer(control: &mut TcpStream, expected: u32) -> Message {
    let mut bytes = [0; MESSAGE_BYTES];
    control.read_exact(&mut bytes).expect("an answer");
    let message = Message::from_bytes(bytes);
    assert_eq!((message.kind(), message.second()), (expected, 0));
    message
}

pub fn counts_what_a_client_on_the_kernel_sends_and_ends_on_an_interrupt() {
    let Some(server) = netserver() else { return };
    let mut control = connect(CONTROL_PORT);
    let request = OmniRequest {
        protocol: 6,
        direction: direction::RECEIVE,
        recv_bytes: SIZE_UNSET,
        request_bytes: -1,
        response_bytes: -1,
        length: 10,
        family: FAMILY_V4,
        ..OmniRequest::default()
    };
    let message = Message::new(kind::OMNI, u32::MAX, &request);
    control.write_all(message.as_bytes()).expect("sent");
    let response: OmniResponse = answer(&mut control, kind::OMNI_RESPONSE).body();
    let mut stream = connect(response.data_port.try_into().expect("a port"));
    stream.write_all(&[7; 3_000_000]).expect("sent");
    stream.shutdown(Shutdown::Write).expect("ended");
    assert_eq!(stream.read(&mut [0]).expect("the other end"), 0);
    let results: OmniResults = answer(&mut control, kind::OMNI_RESULTS).body();
    assert_eq!(results.bytes_received, 3_000_000);
    drop(control);
    end(server);
}

pub fn is_measured_by_a_stock_netperf_with_every_test() {
    if Command::new("netperf").arg("-V").output().is_err() {
        // Debian and others do not distribute it: its absence is not a failure.
        println!("SKIPPED a stock netperf: none is installed; other tests speak its protocol");
        return;
    }
    let Some(server) = netserver() else { return };
    for (test, length, more) in [
        ("TCP_STREAM", "-3000000", ""),
        ("TCP_MAERTS", "-3000000", ""),
        ("TCP_SENDFILE", "1", ""),
        ("TCP_SENDFILE", "1", "-A"),
        ("TCP_RR", "-200", ""),
        ("TCP_CRR", "-50", ""),
        ("TCP_CC", "-50", ""),
        ("UDP_STREAM", "1", ""),
        ("UDP_RR", "1", ""),
    ] {
        let mut netperf = Command::new("netperf");
        netperf.args(["-H", SERVER, "-t", test, "-l", length, "-v", "0", "-P", "0", "-F", FULMAR]);
        let output = netperf.arg("--").args(more.split_whitespace()).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        let out = String::from_utf8_lossy(&output.stdout);
        let rate = out.split_whitespace().last().map(str::parse::<f64>);
        assert!(matches!(rate, Some(Ok(n)) if n > 0.0), "{test} {more}: {output:?}");
    }
    end(server);
}
