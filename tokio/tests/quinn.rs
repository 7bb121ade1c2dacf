//! quinn over two stacks that are joined in the process, and its socket alone.

#![cfg(feature = "quinn")]

use std::future::poll_fn;
use std::io::IoSliceMut;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, QuinnSocket, UdpSocket};
use quinn::rustls::RootCertStore;
use quinn::rustls::pki_types::PrivatePkcs8KeyDer;
use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime};
use tokio::runtime::Builder;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

fn net(device: Box<dyn fulmar::device::Device>, number: u8) -> Net {
    let stack = Stack::builder()
        .device(device)
        .address(format!("10.0.0.{number}/24").parse().unwrap())
        .address(format!("fd00::{number}/64").parse().unwrap());
    Net::new(stack.build().unwrap()).unwrap()
}

async fn socket(net: &Net, address: &str) -> Arc<QuinnSocket> {
    QuinnSocket::new(UdpSocket::bind(net, address).await.unwrap()).unwrap()
}

/// Runs a test with both ends of a link, in each flavour of the runtime.
fn in_each<F: Future<Output = ()> + Send + 'static>(test: impl Fn(Net, Net) -> F) {
    let two = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    for runtime in [Builder::new_current_thread().enable_all().build().unwrap(), two.unwrap()] {
        runtime.block_on(async {
            let (a, b) = devices::link_pair().unwrap();
            let test = tokio::spawn(test(net(a, 1), net(b, 2)));
            timeout(PATIENCE, test).await.expect("it hangs").unwrap();
        });
    }
}

/// A server and a client that trusts it.
async fn endpoints(a: &Net, b: &Net) -> [Endpoint; 2] {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let certificate = made.cert.der().clone();
    let server = ServerConfig::with_single_cert(vec![certificate.clone()], key.into()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::with_root_certificates(Arc::new(roots)).unwrap();
    let end = |config, socket| {
        let runtime = Arc::new(TokioRuntime);
        let options = EndpointConfig::default();
        Endpoint::new_with_abstract_socket(options, config, socket, runtime).unwrap()
    };
    let server = end(Some(server), socket(a, "10.0.0.1:443").await);
    let mut asking = end(None, socket(b, "10.0.0.2:0").await);
    asking.set_default_client_config(client);
    [server, asking]
}

#[test]
fn streams_of_several_connections_pass_whole_and_in_long_runs() {
    in_each(|a, b| async move {
        let [server, client] = endpoints(&a, &b).await;
        let to = server.local_addr().unwrap();
        let echo = tokio::spawn(async move {
            while let Some(incoming) = server.accept().await {
                tokio::spawn(async move {
                    let connection = incoming.await.unwrap();
                    let (mut write, mut read) = connection.accept_bi().await.unwrap();
                    let bytes = read.read_to_end(8 << 20).await.unwrap();
                    write.write_all(&bytes).await.unwrap();
                    write.finish().unwrap();
                    connection.closed().await;
                });
            }
        });
        let clients = (0..4u8).map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                let connection = client.connect(to, "localhost").unwrap().await.unwrap();
                let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i >> 4) as u8 ^ n).collect();
                let (mut write, mut read) = connection.open_bi().await.unwrap();
                write.write_all(&bytes).await.unwrap();
                write.finish().unwrap();
                assert!(read.read_to_end(8 << 20).await.unwrap() == bytes);
                connection.stats().udp_tx
            })
        });
        for client in clients.collect::<Vec<_>>() {
            let sent = client.await.unwrap();
            assert!(sent.datagrams > 2 * sent.ios, "no runs: {sent:?}");
        }
        client.close(0u32.into(), b"");
        client.wait_idle().await;
        echo.abort();
    });
}

async fn received(socket: &QuinnSocket) -> Vec<(RecvMeta, Vec<u8>)> {
    let mut space = vec![vec![0; 65_535]; 3];
    let mut meta = [RecvMeta::default(); 3];
    let mut bufs: Vec<_> = space.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
    let came = poll_fn(|cx| socket.poll_recv(cx, &mut bufs, &mut meta)).await.unwrap();
    let read = meta.iter().zip(&space).take(came);
    read.map(|(meta, bytes)| (*meta, bytes[..meta.len].to_vec())).collect()
}

fn transmit(destination: SocketAddr, contents: &[u8]) -> Transmit<'_> {
    Transmit { destination, ecn: None, contents, segment_size: None, src_ip: None }
}

#[test]
fn a_run_is_received_with_its_stride_its_ecn_and_both_addresses() {
    in_each(|a, b| async move {
        let any = socket(&a, "[::]:443").await;
        for (from, to) in [("10.0.0.2:5", "10.0.0.1:443"), ("[fd00::2]:5", "[fd00::1]:443")] {
            let (sender, to) = (socket(&b, from).await, to.parse().unwrap());
            let ends = |as_seen: &str| -> (SocketAddr, _) {
                let ip: SocketAddr = from.parse().unwrap();
                let seen = |ip: std::net::IpAddr| match ip {
                    std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().into(),
                    ip => ip,
                };
                let dst: SocketAddr = as_seen.parse().unwrap();
                (SocketAddr::new(seen(ip.ip()), ip.port()), seen(dst.ip()))
            };
            for (ecn, bytes, segment_size, stride) in [
                (Some(EcnCodepoint::Ect0), 2500, Some(1000), 1000),
                (Some(EcnCodepoint::Ce), 700, None, 700),
                (None, 700, Some(1000), 700),
            ] {
                let contents = vec![7; bytes];
                let run = Transmit { ecn, segment_size, ..transmit(to, &contents) };
                sender.try_send(&run).unwrap();
                let came = received(&any).await;
                let [(meta, payload)] = &came[..] else { panic!("{came:?}") };
                let (addr, dst_ip) = ends(&to.to_string());
                assert!(*payload == contents);
                assert_eq!((meta.stride, meta.ecn, meta.addr), (stride, ecn, addr));
                assert_eq!(meta.dst_ip, Some(dst_ip));
                // The answer leaves from the address that was asked.
                let src_ip = meta.dst_ip;
                any.try_send(&Transmit { src_ip, ..transmit(meta.addr, b"answer") }).unwrap();
                let answer = received(&sender).await;
                assert_eq!((answer[0].0.addr, &answer[0].1[..]), (to, &b"answer"[..]));
            }
        }
    });
}

#[test]
fn more_than_a_packet_holds_is_sent_in_parts_and_what_cannot_go_is_lost() {
    in_each(|a, b| async move {
        let (to, sender) = (socket(&a, "10.0.0.1:443").await, socket(&b, "10.0.0.2:5").await);
        let address = to.local_addr().unwrap();
        let contents = vec![7; 60 * 1400];
        let run = Transmit { segment_size: Some(1400), ..transmit(address, &contents) };
        sender.try_send(&run).unwrap();
        let mut left = contents.len();
        while left > 0 {
            left -= received(&to).await.iter().map(|(meta, _)| meta.len).sum::<usize>();
        }
        // Longer than the path, and to nowhere: as over the kernel.
        sender.try_send(&transmit(address, &contents[..9000])).unwrap();
        sender.try_send(&transmit("192.0.2.1:5".parse().unwrap(), b"x")).unwrap();
        sender.try_send(&transmit(address, b"next")).unwrap();
        assert_eq!(received(&to).await[0].1, b"next");
    });
}

#[test]
fn every_task_that_waits_for_space_is_woken() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (a, b) = devices::link_pair().unwrap();
        let sender = net(a, 1);
        let socket = socket(&sender, "10.0.0.1:443").await;
        socket.get_ref().get_ref().set_broadcast(true).unwrap();
        // The other end has no stack yet.
        let full = transmit("255.255.255.255:5".parse().unwrap(), &[7; 1000]);
        while socket.try_send(&full).is_ok() {
            tokio::task::yield_now().await;
        }
        let wait = || {
            let mut poller = Arc::clone(&socket).create_io_poller();
            tokio::spawn(async move { poll_fn(|cx| poller.as_mut().poll_writable(cx)).await })
        };
        let gone = wait();
        let waiting = [wait(), wait(), wait()];
        tokio::task::yield_now().await;
        assert!(waiting.iter().all(|task| !task.is_finished()));
        gone.abort();
        let _receiver = net(b, 2);
        for task in waiting {
            timeout(PATIENCE, task).await.expect("it is not woken").unwrap().unwrap();
        }
        socket.try_send(&full).unwrap();
    });
}
