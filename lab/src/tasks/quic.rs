//! QUIC by quinn: one stream of bulk data, both ends in one thread, over fulmar's link or the kernel's loopback.

use std::io;
use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_tokio::QuinnSocket;
use quinn::rustls::RootCertStore;
use quinn::rustls::pki_types::PrivatePkcs8KeyDer;
use quinn::{
    AsyncUdpSocket, ClientConfig, Endpoint, EndpointConfig, Runtime, ServerConfig, TokioRuntime,
};

use super::requests::{Begin, Cost};
use super::ways;

/// Bytes before the account begins: the congestion window and the path MTU are found.
const WARM_BYTES: u64 = 32 << 20;
/// Bytes of a write.
const WRITE_BYTES: usize = 1 << 20;
/// The name of the server.
const NAME: &str = "fulmar.example";

/// The sockets of a server and of a client.
pub(super) type Sockets = [Arc<dyn AsyncUdpSocket>; 2];

/// Over a link of fulmar's.
pub(super) async fn linked() -> io::Result<Sockets> {
    let [server, client] = ways::nets()?;
    let bind = async |net, address| {
        let socket = fulmar_tokio::UdpSocket::bind(net, address).await?;
        io::Result::Ok(QuinnSocket::new(socket)? as Arc<dyn AsyncUdpSocket>)
    };
    Ok([bind(&server, "10.0.0.1:0").await?, bind(&client, "10.0.0.2:0").await?])
}

/// Over the kernel's loopback.
pub(super) async fn loopback() -> io::Result<Sockets> {
    let bind = || TokioRuntime.wrap_udp_socket(UdpSocket::bind("127.0.0.1:0")?);
    Ok([bind()?, bind()?])
}

/// The server sends to the client; the CPU time of both, and the bytes that came.
pub(super) async fn bulk([server, client]: Sockets, time: Duration) -> io::Result<Cost> {
    let to = server.local_addr()?;
    let (serving, trusting) = configs().map_err(io::Error::other)?;
    let end = |config, socket| {
        let (options, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        Endpoint::new_with_abstract_socket(options, config, socket, runtime)
    };
    let (server, client) = (end(Some(serving), server)?, end(None, client)?);
    let accepting = server.clone();
    tokio::spawn(async move {
        let incoming = accepting.accept().await.ok_or(io::ErrorKind::NotConnected)?;
        let mut stream = incoming.await?.open_uni().await?;
        let chunk = vec![0x5a; WRITE_BYTES];
        // Until the client has enough.
        while stream.write_all(&chunk).await.is_ok() {}
        io::Result::Ok(())
    });
    let connecting = client.connect_with(trusting, to, NAME).map_err(io::Error::other)?;
    let connection = connecting.await?;
    let mut stream = connection.accept_uni().await?;
    let mut read = async |until: &dyn Fn(u64) -> bool| {
        let mut came = 0;
        while !until(came) {
            let chunk = stream.read_chunk(usize::MAX, true).await.map_err(io::Error::other)?;
            came += chunk.ok_or(io::ErrorKind::UnexpectedEof)?.bytes.len() as u64;
        }
        io::Result::Ok(came)
    };
    read(&|came| came >= WARM_BYTES).await?;
    let (begin, until) = (Begin::now()?, Instant::now() + time);
    let came = read(&|_| Instant::now() >= until).await?;
    let cost = begin.cost(came)?;
    connection.close(0u32.into(), b"");
    client.wait_idle().await;
    // With its stack the link of the client would have ended, for which quinn does not wait.
    drop(server);
    Ok(cost)
}

/// A certificate for the server, and trust in it.
fn configs() -> Result<(ServerConfig, ClientConfig), Box<dyn std::error::Error + Send + Sync>> {
    let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
    let mut trusted = RootCertStore::empty();
    trusted.add(certificate.clone())?;
    let key = PrivatePkcs8KeyDer::from(key).into();
    let server = ServerConfig::with_single_cert(vec![certificate], key)?;
    Ok((server, ClientConfig::with_root_certificates(Arc::new(trusted))?))
}
