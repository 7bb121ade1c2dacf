//! A TCP server that sends back the received bytes, with a thread per connection.
//!
//! ```text
//! cargo run --example echo_server -- link                # server and client in one process
//! cargo run --example echo_server -- tap:fulmar0 7000    # as root; then, in another terminal:
//!     ip addr add 10.77.0.1/24 dev fulmar0 && ip link set fulmar0 up
//!     nc 10.77.0.2 7000
//! ```

mod common;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::process::ExitCode;
use std::thread;

use common::{Outcome, Place};
use fulmar::{TcpListener, TcpStream};

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (device, port, address) = match words[..] {
        [device] => (device, "7000", None),
        [device, port] => (device, port, None),
        [device, port, address] => (device, port, Some(address)),
        _ => {
            let usage = "usage: echo_server DEVICE [PORT [ADDRESS/PREFIX]]";
            return Err(format!("{usage}\n\n{}", common::DEVICE_HELP).into());
        }
    };
    let port: u16 = port.parse().map_err(|_| format!("invalid port `{port}`"))?;
    match common::open(device, address)? {
        Place::Network(stack) => {
            // On every address of the stack, of both IP versions.
            let listener = TcpListener::bind(&stack, ("::", port))?;
            println!("listening on port {port} of {device}; Ctrl-C ends it");
            serve(&listener)
        }
        Place::Demo(stack, peer) => {
            let listener = TcpListener::bind(&stack, ("::", port))?;
            // The thread ends with the link, when the client has closed.
            thread::spawn(move || serve(&listener).is_ok());
            let own: fulmar::Cidr = address.unwrap_or(common::OURS).parse()?;
            let stream = TcpStream::connect(&peer, (own.address, port))?;
            say_and_hear(stream)
        }
    }
}

fn serve(listener: &TcpListener) -> Outcome {
    loop {
        let (stream, peer) = listener.accept()?;
        println!("{peer} connected");
        thread::spawn(move || match echo(stream) {
            Ok(bytes) => println!("{peer} closed after {bytes} bytes"),
            Err(e) => println!("{peer}: {e}"),
        });
    }
}

/// Sends back the received bytes until the peer closes its direction.
fn echo(mut stream: TcpStream) -> io::Result<u64> {
    let mut buffer = [0; 64 * 1024];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(total),
            n => {
                stream.write_all(&buffer[..n])?;
                total += n as u64;
            }
        }
    }
}

/// The client for `link`.
fn say_and_hear(mut stream: TcpStream) -> Outcome {
    for line in ["hello", "is anybody there?", "good bye"] {
        stream.write_all(line.as_bytes())?;
        let mut answer = vec![0; line.len()];
        stream.read_exact(&mut answer)?;
        println!("sent {line:?}, received {:?}", String::from_utf8_lossy(&answer));
    }
    stream.shutdown(Shutdown::Write)?;
    match stream.read(&mut [0; 1])? {
        0 => Ok(()),
        _ => Err("the server sent more than it received".into()),
    }
}
