//! axum's listener.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::{TcpListener, TcpStream};

/// How long it waits after an error that is not of one connection, as axum does for its own.
const AFTER_ERROR: Duration = Duration::from_secs(1);

impl axum::serve::Listener for TcpListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match TcpListener::accept(self).await {
                Ok(accepted) => return accepted,
                Err(_) => tokio::time::sleep(AFTER_ERROR).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        TcpListener::local_addr(self)
    }
}
