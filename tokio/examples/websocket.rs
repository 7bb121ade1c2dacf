//! A WebSocket echo over TLS, by tungstenite and rustls, each end over a stack of its own, joined in the process:
//! `cargo run -p fulmar-tokio --example websocket`. A stream of fulmar's stands wherever they take tokio's.

use std::sync::Arc;

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, TcpListener, TcpStream};
use futures_util::{SinkExt, StreamExt};
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_tungstenite::{accept_async, client_async};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const NAME: &str = "fulmar.example";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
    let mut trusted = RootCertStore::empty();
    trusted.add(certificate.clone())?;
    let acceptor = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivatePkcs8KeyDer::from(key).into())?;
    let connector = ClientConfig::builder().with_root_certificates(trusted).with_no_client_auth();

    let (a, b) = devices::link_pair()?;
    let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?)?;
    let client = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?)?;

    let listener = TcpListener::bind(&server, "10.0.0.1:443").await?;
    let echo = tokio::spawn(async move {
        let (stream, _) = listener.accept().await?;
        let stream = TlsAcceptor::from(Arc::new(acceptor)).accept(stream).await?;
        let (write, read) = accept_async(stream).await?.split();
        let messages =
            read.take_while(|m| std::future::ready(m.as_ref().is_ok_and(|m| !m.is_close())));
        messages.forward(write).await?;
        Ok::<_, Failure>(())
    });

    let stream = TcpStream::connect(&client, "10.0.0.1:443").await?;
    let stream = TlsConnector::from(Arc::new(connector)).connect(NAME.try_into()?, stream).await?;
    let (mut socket, _) = client_async(format!("wss://{NAME}/"), stream).await?;
    for text in ["hello", &"long ".repeat(100_000)] {
        socket.send(text.into()).await?;
        let echoed = socket.next().await.ok_or("closed")??.into_text()?;
        assert!(echoed == text);
        println!("{} bytes came back", echoed.len());
    }
    socket.close(None).await?;
    echo.await?
}
