//! Two whole TCP/IP stacks without an operating system below them: packets are vectors of bytes, and time is
//! a number.
//!
//! A shard only has to be called. This program passes packets and the time to the shards, and calls again at
//! [`Shard::next_deadline`]. The list of events has the sockets that became ready.
//!
//! The only crate is `fulmar-stack`. Run it with `cargo run -p
//! fulmar-stack --example two_shards`.

use std::net::SocketAddr;
use std::task::Poll;

use fulmar_stack::base::{Instant, Secrets, SlotId};
use fulmar_stack::device::Caps;
use fulmar_stack::device::memory::{MemoryDevice, MemoryPort};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::shard::{Event, ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::Attempt;
use fulmar_stack::socket::{Ready, SocketError};

fn at(host: u8, port: u16) -> SocketAddr {
    ([10, 0, 0, host], port).into()
}

fn stack(host: u8, now: Instant) -> (Shard, MemoryPort) {
    // IP packets; `Caps::plain` is Ethernet.
    let (device, port) = MemoryDevice::new(Caps::plain_ip(1500));
    let config = StackConfig {
        addresses: vec![IfAddr { addr: at(host, 0).ip(), prefix_len: 24 }],
        // On a real network: 32 random bytes.
        secrets: Some(Secrets::for_simulation(host.into())),
        ..StackConfig::default()
    };
    (Shard::new(config, Box::new(device), now).expect("a sound configuration"), port)
}

/// Carries what one has sent to the other; returns the number of packets.
fn carry(from: &MemoryPort, to: &MemoryPort) -> usize {
    std::iter::from_fn(|| from.pop()).filter(|packet| to.push(packet)).count()
}

fn clock(now: Instant) -> String {
    format!("{:>4} ms", now.as_nanos() / 1_000_000)
}

/// Writes a few bytes; false if there is no space yet.
fn write(shard: &mut Shard, now: Instant, id: SlotId, bytes: &[u8]) -> Result<bool, SocketError> {
    match shard.sosend(id).reserve(now, bytes, bytes.len(), Attempt::First)? {
        Poll::Ready(Reserved::Sent(n)) => Ok(n == bytes.len()),
        // A long write returns a reservation to copy into; these writes are short.
        Poll::Ready(Reserved::Space(room)) => {
            shard.sosend(id).abandon(now, room);
            Ok(false)
        }
        Poll::Pending => Ok(false),
    }
}

/// The received bytes; `None`: none yet, empty: the end of the stream.
fn read(shard: &mut Shard, now: Instant, id: SlotId) -> Result<Option<Vec<u8>>, SocketError> {
    let Poll::Ready(chain) = shard.tcp_take(id, 4096)? else { return Ok(None) };
    let bytes = chain.to_vec();
    shard.tcp_read_done(now, id, chain);
    Ok(Some(bytes))
}

/// The server's program: accepts, and answers requests.
fn serve(server: &mut Shard, now: Instant, listener: SlotId) -> Result<(), SocketError> {
    let mut events = Vec::new();
    server.take_events(&mut events);
    for event in events {
        match event {
            Event::Ready(id, _) if id == listener => {
                while let Poll::Ready((connection, from)) = server.tcp_accept(listener)? {
                    println!("{}  server: a connection from {from}", clock(now));
                    server.watch(connection, Some(Ready::READABLE));
                    server.notify(connection);
                }
            }
            Event::Ready(id, _) => {
                let Some(received) = read(server, now, id)? else { continue };
                println!(
                    "{}  server: received {:?}",
                    clock(now),
                    String::from_utf8_lossy(&received)
                );
                if received.is_empty() {
                    server.close(now, id);
                } else {
                    write(server, now, id, &received.to_ascii_uppercase())?;
                }
            }
            Event::Closed(_) | Event::Down => {}
        }
    }
    Ok(())
}

fn main() -> Result<(), SocketError> {
    let mut now = Instant::from_millis(1);
    let (mut client, near) = stack(1, now);
    let (mut server, far) = stack(2, now);

    let listener = server.tcp_listen(at(2, 7), ListenOptions::default())?;
    server.watch(listener, Some(Ready::READABLE));
    let connection = client.tcp_connect(now, at(2, 7), None)?;
    client.watch(connection, Some(Ready::READABLE | Ready::WRITABLE));

    let (mut has_written, mut answer) = (false, Vec::new());
    while answer.is_empty() {
        client.step(now, 64);
        server.step(now, 64);
        serve(&mut server, now, listener)?;
        client.take_events(&mut Vec::new());
        if !has_written && matches!(client.tcp_connected(connection)?, Poll::Ready(())) {
            has_written = write(&mut client, now, connection, b"hello")?;
        }
        answer.extend(read(&mut client, now, connection)?.unwrap_or_default());
        // Packets cross without delay; if none crosses, the clock advances to the next timer.
        if carry(&near, &far) + carry(&far, &near) == 0 {
            let due = [client.next_deadline(), server.next_deadline()].into_iter().flatten().min();
            now = due.expect("something is always due while a connection opens").max(now);
        }
    }
    println!("{}  client: received {:?}", clock(now), String::from_utf8_lossy(&answer));
    assert_eq!(answer, b"HELLO");
    Ok(())
}
