//! A transparent proxy: for each connection of the guest, to any address, the proxy first connects to the host's server
//! and then accepts or refuses the guest's connection accordingly. Both stacks are in this process.
//!
//! ```text
//! cargo run --example proxy
//! ```

mod common;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream as HostStream};
use std::process::ExitCode;
use std::thread;

use common::Outcome;
use fulmar::tcp::ConditionalAccept;
use fulmar::{ListenOptions, PendingConnection, Stack, TcpListener, TcpStream, devices};

fn main() -> ExitCode {
    common::run(example)
}

fn example(_: &[String]) -> Outcome {
    let (near, far) = devices::link_pair()?;
    let guest = Stack::builder()
        .device(near)
        .address("10.77.0.2/24".parse()?)
        .gateway("10.77.0.1".parse()?)
        .build()?;
    let gateway =
        Stack::builder().device(far).address("10.77.0.1/24".parse()?).any_ip(true).build()?;
    let options = ListenOptions {
        any_port: true,
        conditional_accept: Some(ConditionalAccept::default()),
        ..ListenOptions::default()
    };
    let listener = TcpListener::bind_with(&gateway, "[::]:0", options)?;
    let server = std::net::TcpListener::bind("127.0.0.1:0")?;
    let host = server.local_addr()?;
    thread::spawn(move || greet(&server));
    thread::spawn(move || serve(&listener, host));

    for to in ["192.0.2.7:80", "198.51.100.1:81"] {
        let to: SocketAddr = to.parse()?;
        match TcpStream::connect(&guest, to) {
            Ok(mut stream) => {
                let mut greeting = String::new();
                stream.read_to_string(&mut greeting)?;
                println!("{to}: {greeting}");
            }
            Err(e) => println!("{to}: {e}"),
        }
    }
    Ok(())
}

/// The server of the host.
fn greet(server: &std::net::TcpListener) {
    for stream in server.incoming().flatten() {
        let _ = (&stream).write_all(b"hello from the host");
    }
}

/// Port 80 of every address leads to the host's server; all other ports are closed.
fn serve(listener: &TcpListener, host: SocketAddr) -> io::Result<()> {
    loop {
        let pending = listener.pending()?;
        if pending.local_addr().port() != 80 {
            pending.refuse()?;
            continue;
        }
        match HostStream::connect(host) {
            Ok(server) => drop(thread::spawn(move || relay(pending, &server))),
            Err(_) => pending.refuse()?,
        }
    }
}

/// Copies from the host's server to the guest until the end of the stream.
fn relay(pending: PendingConnection, server: &HostStream) -> io::Result<()> {
    let mut guest = pending.accept()?;
    io::copy(&mut &*server, &mut guest)?;
    guest.shutdown(Shutdown::Write)
}
