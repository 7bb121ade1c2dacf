//! tonic's server.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::{TcpListener, TcpStream};

impl Connected for TcpStream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        let (local_addr, remote_addr) = (self.local_addr().ok(), self.peer_addr().ok());
        TcpConnectInfo { local_addr, remote_addr }
    }
}

/// The connections that it accepts, for `serve_with_incoming`. It never ends.
impl Stream for TcpListener {
    type Item = io::Result<TcpStream>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_accept(cx).map(|accepted| Some(accepted.map(|(stream, _)| stream)))
    }
}
