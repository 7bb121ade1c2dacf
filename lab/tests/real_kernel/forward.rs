//! A program in place of every server, whose guest is the kernel of another namespace.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use fulmar::{Stack, devices};
use fulmar_gateway::netns::{self, Netns, Route};
use fulmar_lab::embed::bare_tun;
use fulmar_tokio::{Net, forward, forward_udp};

const TUN: &str = "tun0";
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const FAR: &str = "192.0.2.7:443";
const BYTES: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Over a TUN with super-packets, and over the bare descriptor of one.
pub fn the_kernel_of_a_guest_reaches_servers_of_the_host() {
    netns::loopback_up().unwrap();
    serve(|| devices::tun(TUN).map_err(io::Error::other));
    serve(|| Ok(Box::new(devices::plain(bare_tun(TUN)?, 1500).map_err(io::Error::other)?)));
}

fn serve(open: impl FnOnce() -> io::Result<Box<dyn fulmar::device::Device>> + Send) {
    let guest = Netns::new().unwrap();
    let device = guest.run(open).unwrap();
    guest.set_address(TUN, GUEST.into(), 24).unwrap();
    guest.set_up(TUN).unwrap();
    let index = guest.if_index(TUN).unwrap();
    let through = Route::default_through(index, GATEWAY.into());
    guest.netlink().unwrap().add_route(&through).unwrap();

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let tcp = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
    });
    let echo = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let udp = echo.local_addr().unwrap();
    thread::spawn(move || {
        let mut buf = [0; 2000];
        let (n, from) = echo.recv_from(&mut buf).unwrap();
        echo.send_to(&buf[..n], from).unwrap();
    });

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stack = Stack::builder().device(device).any_ip(true).unlisted().build().unwrap();
        let net = Net::new(stack).unwrap();
        tokio::spawn(forward(&net, move |pending| {
            pending.proxy(tokio::net::TcpStream::connect(tcp))
        }));
        tokio::spawn(forward_udp(&net, move |flow| async move {
            let host = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            host.connect(udp).await?;
            flow.relay(host).await
        }));
        let program = tokio::task::spawn_blocking(move || guest.run(program));
        tokio::time::timeout(PATIENCE, program).await.expect("it hangs").unwrap().unwrap();
    });
}

/// What runs in the guest.
fn program() -> io::Result<()> {
    let sent: Vec<u8> = (0..BYTES).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
    let mut stream = TcpStream::connect(FAR)?;
    stream.write_all(&sent)?;
    stream.shutdown(Shutdown::Write)?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    assert!(all == sent);
    let socket = UdpSocket::bind((GUEST, 0))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send_to(b"a question", "192.0.2.8:53")?;
    let mut buf = [0; 100];
    let (n, from) = socket.recv_from(&mut buf)?;
    assert_eq!((&buf[..n], from.to_string().as_str()), (&b"a question"[..], "192.0.2.8:53"));
    Ok(())
}
