//! Leads every TCP connection that the kernel routes to a TUN through a SOCKS5 proxy (RFC 1928).
//!
//! ```text
//! tun2socks tun0 127.0.0.1:1080 &
//! ip addr add 10.9.0.1/24 dev tun0 && ip link set tun0 up && ip route add 192.0.2.0/24 dev tun0
//! curl http://192.0.2.7/
//! ```

use std::error::Error;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, forward};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const USAGE: &str = "usage: tun2socks TUN PROXY, such as: tun2socks tun0 127.0.0.1:1080";
const VERSION: u8 = 5;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Err(e) = run().await else { return ExitCode::SUCCESS };
    eprintln!("tun2socks: {e}");
    ExitCode::FAILURE
}

async fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [tun, proxy] = &arguments[..] else { return Err(USAGE.into()) };
    let wrong = |_| format!("invalid proxy `{proxy}`: expected ADDRESS:PORT");
    let proxy: SocketAddr = proxy.parse().map_err(wrong)?;
    let stack = Stack::builder().device(devices::tun(tun)?).any_ip(true).build()?;
    forward(&Net::new(stack)?, move |pending| async move {
        let to = pending.local_addr();
        pending.proxy(connect(proxy, to)).await
    })
    .await
    .map_err(|e| format!("{tun}: {e}"))?;
    Ok(())
}

/// Connects to an address through the proxy.
async fn connect(proxy: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy).await?;
    // One method: no authentication.
    stream.write_all(&[VERSION, 1, 0]).await?;
    let mut method = [0; 2];
    stream.read_exact(&mut method).await?;
    if method != [VERSION, 0] {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "the proxy wants a password"));
    }
    let mut request = vec![VERSION, 1, 0];
    match to.ip() {
        IpAddr::V4(ip) => request.extend([&[1], &ip.octets()[..]].concat()),
        IpAddr::V6(ip) => request.extend([&[4], &ip.octets()[..]].concat()),
    }
    request.extend(to.port().to_be_bytes());
    stream.write_all(&request).await?;
    let mut reply = [0; 4];
    stream.read_exact(&mut reply).await?;
    match reply[1] {
        0 => {}
        5 => return Err(ErrorKind::ConnectionRefused.into()),
        _ => return Err(ErrorKind::HostUnreachable.into()),
    }
    // The proxy's own address.
    let bytes = if reply[3] == 4 { 18 } else { 6 };
    stream.read_exact(&mut [0; 18][..bytes]).await?;
    Ok(stream)
}
