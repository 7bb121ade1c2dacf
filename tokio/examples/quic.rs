//! QUIC by quinn, each end over a stack of its own, joined in the process; prints the throughput:
//! `cargo run --release -p fulmar-tokio --features quinn --example quic`. Over a TAP the server is
//! `devices::open("fulmar0")?` instead (`fulmar sandbox` has one).

use std::sync::Arc;
use std::time::Instant;

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, QuinnSocket, UdpSocket};
use quinn::rustls::{RootCertStore, pki_types::PrivatePkcs8KeyDer};
use quinn::{ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Bytes that the server sends.
const BYTES: usize = 256 << 20;

/// An end of QUIC over a stack.
async fn endpoint(
    net: &Net,
    address: &str,
    server: Option<ServerConfig>,
) -> Result<Endpoint, Failure> {
    let socket = QuinnSocket::new(UdpSocket::bind(net, address).await?)?;
    let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
    Ok(Endpoint::new_with_abstract_socket(config, server, socket, runtime)?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let made = rcgen::generate_simple_self_signed(["fulmar.example".to_owned()])?;
    let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
    let mut trusted = RootCertStore::empty();
    trusted.add(certificate.clone())?;
    let key = PrivatePkcs8KeyDer::from(key).into();
    let config = ServerConfig::with_single_cert(vec![certificate], key)?;

    let (a, b) = devices::link_pair()?;
    let near = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?)?;
    let far = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?)?;
    let server = endpoint(&near, "10.0.0.1:443", Some(config)).await?;
    let mut client = endpoint(&far, "10.0.0.2:0", None).await?;
    client.set_default_client_config(ClientConfig::with_root_certificates(Arc::new(trusted))?);

    tokio::spawn(async move {
        let connection = server.accept().await.ok_or("closed")?.await?;
        let mut stream = connection.open_uni().await?;
        let chunk = vec![0x5a; 1 << 20];
        for _ in 0..BYTES / chunk.len() {
            stream.write_all(&chunk).await?;
        }
        stream.finish()?;
        connection.closed().await;
        Ok::<_, Failure>(())
    });
    let connection = client.connect("10.0.0.1:443".parse()?, "fulmar.example")?.await?;
    let (begun, mut came) = (Instant::now(), 0);
    let mut stream = connection.accept_uni().await?;
    while let Some(chunk) = stream.read_chunk(usize::MAX, true).await? {
        came += chunk.bytes.len();
    }
    assert_eq!(came, BYTES);
    let gbps = came as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e9;
    let path = connection.stats().path;
    println!("{} MiB by QUIC: {gbps:.2} Gbit/s, {} lost", came >> 20, path.lost_packets);
    client.close(0u32.into(), b"");
    client.wait_idle().await;
    Ok(())
}
