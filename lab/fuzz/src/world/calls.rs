//! The program's calls between the frames.

use fulmar_stack::base::Duration;
use fulmar_stack::shard::Reserved;
use fulmar_stack::socket::{Attempt, Least, Shutdown};
use std::task::Poll;

use super::{World, build};
use crate::script::Call;

/// Connections that the program opens at most.
pub(super) const MAX_CONNECTIONS: usize = 24;
/// Loans that it holds at most.
const MAX_LOANS: usize = 16;

impl World {
    fn connection(&self, n: u8) -> Option<fulmar_stack::base::SlotId> {
        let i = usize::from(n).checked_rem(self.connections.len())?;
        self.connections.get(i).copied()
    }

    /// Makes a call, whatever comes of it.
    pub(super) fn call(&mut self, call: Call) {
        match call {
            Call::Accept => self.accept(),
            Call::Connect { v6, port } => self.connect(v6, port),
            Call::Read { socket, bytes } => self.read(socket, bytes.into()),
            Call::Lend { socket, bytes } => self.lend(socket, bytes.into()),
            Call::GiveBack => {
                if let Some((id, chain, lent)) = self.loans.pop() {
                    self.shard.take_back(self.now, id, chain, lent);
                }
            }
            Call::Write { socket, bytes } => self.write(socket, bytes.into()),
            Call::Shutdown { socket, read, write } => {
                let how = match (read, write) {
                    (true, true) => Shutdown::Both,
                    (true, false) => Shutdown::Read,
                    (false, true) => Shutdown::Write,
                    (false, false) => return,
                };
                if let Some(id) = self.connection(socket) {
                    let _ = self.shard.tcp_shutdown(self.now, id, how);
                }
            }
            Call::Close { socket } => self.close(socket, None),
            Call::Abort { socket } => self.close(socket, Some(Duration::ZERO)),
            Call::NoDelay { socket, on } => self.tune(socket, |tcb| tcb.set_nodelay(on)),
            Call::Cork { socket, on } => self.tune(socket, |tcb| tcb.set_cork(on)),
            Call::SendBuffer { socket, bytes } => {
                self.tune(socket, |tcb| {
                    let _ = tcb.set_send_buffer(bytes.into());
                });
            }
            Call::RecvBuffer { socket, bytes } => {
                self.tune(socket, |tcb| {
                    let _ = tcb.set_recv_buffer(bytes.into());
                });
            }
            Call::UdpSend { v6, bytes, is_connected } => self.udp_send(v6, bytes, is_connected),
            Call::UdpReceive => self.udp_receive(),
            Call::Ping { v6, bytes } => {
                let (to, data) = (build::peer(v6, 2, 0), vec![7; usize::from(bytes)]);
                let _ = self.shard.icmp().send_request(self.now, self.ping, to, 1, &data);
            }
            Call::PingReceive => {
                while let Ok(Poll::Ready(echo)) = self.shard.icmp().receive_reply(self.ping) {
                    if let Ok(chain) = echo.outcome {
                        self.shard.free(chain);
                    }
                }
            }
        }
    }

    fn accept(&mut self) {
        for &listener in &self.listeners {
            if let Ok(Poll::Ready((id, _))) = self.shard.tcp_accept(listener) {
                self.connections.push(id);
            }
        }
    }

    fn connect(&mut self, v6: bool, port: u8) {
        if self.connections.len() < MAX_CONNECTIONS {
            let to = build::peer(v6, 2, 3000 + u16::from(port));
            if let Ok(id) = self.shard.tcp_connect(self.now, to, None) {
                self.connections.push(id);
            }
        }
    }

    fn read(&mut self, socket: u8, bytes: usize) {
        let Some(id) = self.connection(socket) else { return };
        if let Ok(Poll::Ready(chain)) = self.shard.tcp_take(id, bytes.max(1)) {
            self.shard.tcp_read_done(self.now, id, chain);
        }
    }

    fn lend(&mut self, socket: u8, bytes: usize) {
        let Some(id) = self.connection(socket) else { return };
        if self.loans.len() >= MAX_LOANS {
            return;
        }
        let step = self.shard.tcp_lend(self.now, id, bytes.max(1), Least::OneByte);
        if let Ok(Poll::Ready((chain, lent))) = step {
            self.loans.push((id, chain, lent));
        }
    }

    fn write(&mut self, socket: u8, bytes: usize) {
        let Some(id) = self.connection(socket) else { return };
        let data = vec![9; bytes.max(1)];
        if let Ok(Poll::Ready(Reserved::Space(mut r))) =
            self.shard.sosend(id).reserve(self.now, &data, data.len(), Attempt::First)
        {
            let n = r.chain.len();
            r.chain.copy_from(0, &data[..n]);
            self.shard.sosend(id).commit(self.now, r);
        }
    }

    fn close(&mut self, socket: u8, linger: Option<Duration>) {
        let Some(id) = self.connection(socket) else { return };
        self.connections.retain(|c| *c != id);
        if let Ok(entry) = self.shard.tcp_entry(id) {
            entry.linger = linger;
        }
        self.shard.close(self.now, id);
    }

    fn tune(&mut self, socket: u8, how: impl FnOnce(&mut fulmar_stack::tcp::Tcb)) {
        let Some(id) = self.connection(socket) else { return };
        if let Ok(entry) = self.shard.tcp_entry(id) {
            how(&mut entry.tcb);
        }
    }

    fn udp_send(&mut self, v6: bool, bytes: u16, is_connected: bool) {
        let data = vec![5; usize::from(bytes)];
        let (id, to) = if is_connected {
            (self.udp[2], None)
        } else {
            (self.udp[usize::from(v6)], Some(build::peer(v6, 2, 53)))
        };
        let _ = self.shard.udp().send(self.now, id, &[&data], to);
    }

    fn udp_receive(&mut self) {
        let any = self.any_address.iter().flat_map(|sockets| &sockets[..2]);
        for &id in self.udp.iter().chain(any) {
            while let Ok(Poll::Ready(d)) = self.shard.udp().receive(id) {
                self.shard.free(d.payload);
            }
        }
    }
}
