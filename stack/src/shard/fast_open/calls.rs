//! Connections with first data.

use core::net::SocketAddr;

use crate::base::{Instant, SlotId};
use crate::socket::{SocketError, sosend};
use crate::tcp::FastOpenSyn;

use crate::shard::sockets::TcpEntry;
use crate::shard::world::Shard;

/// The first data of a connection: see `TcpStream::connect_first`, and [`Shard::tcp_connect_fast`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FirstData<'a> {
    /// Sent with the SYN as far as a cookie and the size of a segment allow, and the rest after the handshake.
    pub bytes: &'a [u8],
    /// Sends it without a cookie (Linux: bit 4 of `tcp_fastopen`), for a server that asks for none.
    pub without_cookie: bool,
}

/// With a cookie alone.
impl<'a> From<&'a [u8]> for FirstData<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        FirstData { bytes, without_cookie: false }
    }
}

/// With a cookie alone.
impl<'a, const N: usize> From<&'a [u8; N]> for FirstData<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        FirstData::from(bytes.as_slice())
    }
}

impl Shard {
    /// As [`Shard::tcp_connect_with`], with first data: it goes with the SYN if the server's cookie is known (RFC 7413),
    /// and otherwise the SYN asks for one. Returns the connection and how much of the data it has accepted: all
    /// that its send buffer and the memory for sending allow. The program may read at once; it may write once the
    /// handshake is complete.
    ///
    /// The data may reach the server twice, in two connections: see RFC 7413 section 2.1.
    ///
    /// # Errors
    /// As [`Shard::tcp_connect`].
    pub fn tcp_connect_fast(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        first: FirstData<'_>,
        set_options: impl FnOnce(&mut TcpEntry),
    ) -> Result<(SlotId, usize), SocketError> {
        let mut entry = self.new_connection(now, remote, local)?;
        set_options(&mut entry);
        self.set_fast_open(now, &mut entry, first);
        let pool = &mut self.core.net.pool;
        let accepted = sosend::append_first(&mut entry.tcb, pool, first.bytes);
        Ok((self.start_connection(now, entry), accepted))
    }

    /// Bytes of first data that the SYN to a server would carry now; `None`: its cookie is not known.
    ///
    /// # Errors
    /// As [`Shard::tcp_connect`].
    pub fn fast_open_space(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        first: FirstData<'_>,
        set_options: impl FnOnce(&mut TcpEntry),
    ) -> Result<Option<usize>, SocketError> {
        let mut entry = self.new_connection(now, remote, local)?;
        set_options(&mut entry);
        self.set_fast_open(now, &mut entry, first);
        Ok(Some(entry.tcb.syn_data_limit()).filter(|most| *most > 0))
    }

    fn set_fast_open(&mut self, now: Instant, entry: &mut TcpEntry, first: FirstData<'_>) {
        let known = self.tcp.fast_opens.syn_for(now, entry.tcb.key());
        let syn = if first.without_cookie { Some(FastOpenSyn::WithoutCookie) } else { known };
        if let Some(syn) = syn {
            entry.tcb.set_fast_open(syn);
        }
    }
}
