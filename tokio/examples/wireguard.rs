//! A WireGuard client in user space: fetches a page through the tunnel, without a device of the kernel and without root.
//!
//! ```text
//! wireguard PRIVATE_KEY PEER_PUBLIC_KEY ENDPOINT OUR_ADDRESS SERVER
//! wireguard "$(cat key)" "$PEER" 203.0.113.5:51820 10.8.0.2/24 10.8.0.1:80
//! ```
//!
//! Without arguments a peer in the same process serves the page. WireGuard itself is boringtun's.

use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519::{PublicKey, StaticSecret};
use fulmar::{Cidr, Stack};
use fulmar_tokio::{Net, PacketReceiver, PacketSender, TcpListener, TcpStream, channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::time::interval;

/// What WireGuard leaves of 1,500 bytes.
const MTU: usize = 1420;
/// The longest datagram, and space for WireGuard's header.
const BUFFER_BYTES: usize = 65_535 + 32;
/// Datagrams that are passed to the stack together at most. Its answers wait meanwhile.
const BATCH: usize = 64;
/// How often WireGuard looks at its timers.
const TICK: Duration = Duration::from_millis(250);
const PAGE: &str = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello through the tunnel\n";

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(page) => {
            print!("{page}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("wireguard: {e}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Outcome<String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    Ok(match &arguments[..] {
        [] => with_own_peer().await?,
        [private, peer, endpoint, address, server] => {
            let socket = UdpSocket::bind("0.0.0.0:0").await?;
            socket.connect(endpoint).await?;
            let (private, peer) = (StaticSecret::from(key(private)?), PublicKey::from(key(peer)?));
            fetch(&tunnel(private, peer, socket, address.parse()?)?, server).await?
        }
        _ => return Err("usage: wireguard PRIVATE_KEY PEER_KEY ENDPOINT ADDRESS SERVER".into()),
    })
}

/// A key as WireGuard's files have it.
fn key(text: &str) -> Outcome<[u8; 32]> {
    let key = STANDARD.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok());
    // Not the text: it may be the private one.
    key.ok_or_else(|| "invalid key: expected 32 bytes in base64, as `wg genkey` prints them".into())
}

/// A stack whose packets go through a tunnel.
fn tunnel(own: StaticSecret, peer: PublicKey, socket: UdpSocket, address: Cidr) -> Outcome<Net> {
    let (device, sender, receiver) = channel(MTU)?;
    let tunn = Tunn::new(own, peer, None, None, 0, None);
    tokio::spawn(carry(tunn, socket, sender, receiver));
    Ok(Net::new(Stack::builder().device(device).address(address).build()?)?)
}

/// Carries packets between a stack and the peer.
async fn carry(
    mut tunn: Tunn,
    socket: UdpSocket,
    mut to_stack: PacketSender,
    mut from_stack: PacketReceiver,
) -> io::Result<()> {
    let (mut datagram, mut out) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
    let mut tick = interval(TICK);
    loop {
        tokio::select! {
            packet = from_stack.recv() => send(&socket, tunn.encapsulate(packet?, &mut out)).await?,
            received = socket.recv(&mut datagram) => {
                decapsulate(&mut tunn, &socket, &datagram[..received?], &mut out, &mut to_stack).await?;
                // The datagrams that are there are passed to the stack together.
                for _ in 1..BATCH {
                    let Ok(bytes) = socket.try_recv(&mut datagram) else { break };
                    decapsulate(&mut tunn, &socket, &datagram[..bytes], &mut out, &mut to_stack).await?;
                }
                to_stack.flush().await?;
            }
            _ = tick.tick() => send(&socket, tunn.update_timers(&mut out)).await?,
        }
    }
}

async fn send(socket: &UdpSocket, result: TunnResult<'_>) -> io::Result<()> {
    if let TunnResult::WriteToNetwork(datagram) = result {
        socket.send(datagram).await?;
    }
    Ok(())
}

async fn decapsulate(
    tunn: &mut Tunn,
    socket: &UdpSocket,
    mut datagram: &[u8],
    out: &mut [u8],
    to_stack: &mut PacketSender,
) -> io::Result<()> {
    loop {
        match tunn.decapsulate(None, datagram, out) {
            TunnResult::WriteToTunnelV4(packet, _) | TunnResult::WriteToTunnelV6(packet, _) => {
                return to_stack.push(packet).await;
            }
            // A handshake: packets that waited for it follow.
            TunnResult::WriteToNetwork(answer) => drop(socket.send(answer).await?),
            TunnResult::Done | TunnResult::Err(_) => return Ok(()),
        }
        datagram = &[];
    }
}

async fn fetch(net: &Net, server: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(net, server).await?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

/// Both ends of a tunnel over the loopback of the host.
async fn with_own_peer() -> Outcome<String> {
    let keys = [[1; 32], [2; 32]].map(StaticSecret::from);
    let [ours, theirs] = keys.each_ref().map(PublicKey::from);
    let [our_key, their_key] = keys;
    let near = UdpSocket::bind("127.0.0.1:0").await?;
    let far = UdpSocket::bind("127.0.0.1:0").await?;
    near.connect(far.local_addr()?).await?;
    far.connect(near.local_addr()?).await?;
    let server = tunnel(their_key, ours, far, "10.8.0.1/24".parse()?)?;
    let client = tunnel(our_key, theirs, near, "10.8.0.2/24".parse()?)?;
    let listener = TcpListener::bind(&server, "10.8.0.1:80").await?;
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let _ = stream.read(&mut [0; 1024]).await?;
        stream.write_all(PAGE.as_bytes()).await
    });
    Ok(fetch(&client, "10.8.0.1:80").await?)
}
