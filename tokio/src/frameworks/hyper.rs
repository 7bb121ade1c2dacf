//! A connector for hyper's clients.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;

use crate::{Net, TcpStream};

/// Connects a client of hyper over a stack: a tower `Service<Uri>`. The URI has host and port; names are resolved by the
/// host's resolver.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Connector, Net};
/// use http_body_util::Empty;
/// use hyper_util::client::legacy::Client;
/// use hyper_util::rt::TokioExecutor;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let net = Net::new(Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// let client = Client::builder(TokioExecutor::new()).build::<_, Empty<&[u8]>>(Connector::new(&net));
/// let response = client.get("http://10.0.0.1/".parse().expect("a URI"));
/// // `response.await`
/// # drop(response);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Connector(Net);

impl Connector {
    /// Over this stack.
    pub fn new(net: &Net) -> Connector {
        Connector(net.clone())
    }
}

/// A connection that is under way.
type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<TcpStream>>> + Send>>;

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Connecting;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Connecting {
        let net = self.0.clone();
        Box::pin(async move {
            let no_host =
                || io::Error::new(io::ErrorKind::InvalidInput, format!("no host in {uri}"));
            let host = uri.host().ok_or_else(no_host)?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let is_tls = uri.scheme_str() == Some("https");
            let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
            let stream = TcpStream::connect(&net, (host, port)).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(stream))
        })
    }
}

impl Connection for TcpStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}
