//! tonic's server.

use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::TcpStream;

impl Connected for TcpStream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        let (local_addr, remote_addr) = (self.local_addr().ok(), self.peer_addr().ok());
        TcpConnectInfo { local_addr, remote_addr }
    }
}
