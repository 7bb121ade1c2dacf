//! The configuration. What the stack has its own way for is accepted and has no effect.

use std::sync::Arc;
use std::time::Duration;

use crate::{IpStackError, Result};

/// RFC 8200 section 5.
const MIN_MTU: u16 = 1280;

/// The configuration of an [`IpStack`](crate::IpStack).
#[non_exhaustive]
#[derive(Debug, Clone)]
pub struct IpStackConfig {
    /// Longest packet in bytes. Default 1280.
    pub mtu: u16,
    /// Whether 4 bytes precede each packet of the device (flags and EtherType). Default off.
    pub packet_information: bool,
    /// TCP.
    pub tcp_config: Arc<TcpConfig>,
    /// Time without a datagram after which reads of a UDP stream fail. Default 30 s.
    pub udp_timeout: Duration,
}

impl Default for IpStackConfig {
    fn default() -> Self {
        IpStackConfig {
            mtu: MIN_MTU,
            packet_information: false,
            tcp_config: Arc::default(),
            udp_timeout: Duration::from_secs(30),
        }
    }
}

impl IpStackConfig {
    /// Sets [`IpStackConfig::tcp_config`].
    pub fn with_tcp_config(&mut self, config: TcpConfig) -> &mut Self {
        self.tcp_config = Arc::new(config);
        self
    }

    /// Sets [`IpStackConfig::udp_timeout`].
    pub fn udp_timeout(&mut self, timeout: Duration) -> &mut Self {
        self.udp_timeout = timeout;
        self
    }

    /// Sets [`IpStackConfig::mtu`].
    ///
    /// # Errors
    /// [`IpStackError::InvalidMtuSize`]: less than 1280, the least of IPv6.
    pub fn mtu(&mut self, mtu: u16) -> Result<&mut Self, IpStackError> {
        if mtu < MIN_MTU {
            return Err(IpStackError::InvalidMtuSize(mtu));
        }
        Ok(self.mtu_unchecked(mtu))
    }

    /// Sets [`IpStackConfig::mtu`]. With less than 68 no stack starts, which [`accept`](crate::IpStack::accept) reports.
    pub fn mtu_unchecked(&mut self, mtu: u16) -> &mut Self {
        self.mtu = mtu;
        self
    }

    /// Sets [`IpStackConfig::packet_information`].
    pub fn packet_information(&mut self, packet_information: bool) -> &mut Self {
        self.packet_information = packet_information;
        self
    }
}

/// The configuration of TCP.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// No effect.
    pub last_ack_max_retries: usize,
    /// No effect.
    pub last_ack_timeout: Duration,
    /// No effect.
    pub close_wait_timeout: Duration,
    /// Time without a byte after which reads fail and the connection is reset. Default 60 s.
    pub timeout: Duration,
    /// Length of TIME-WAIT. Default 2 s.
    pub two_msl: Duration,
    /// No effect.
    pub max_unacked_bytes: u32,
    /// No effect.
    pub read_buffer_size: usize,
    /// No effect.
    pub max_count_for_dup_ack: usize,
    /// No effect.
    pub rto: Duration,
    /// No effect.
    pub max_retransmit_count: usize,
    /// Options of the SYN,ACK.
    pub options: Option<Vec<TcpOptions>>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            last_ack_max_retries: 3,
            last_ack_timeout: Duration::from_millis(500),
            close_wait_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(60),
            two_msl: Duration::from_secs(2),
            max_unacked_bytes: 16 << 10,
            read_buffer_size: 16 << 10,
            max_count_for_dup_ack: 3,
            rto: Duration::from_secs(1),
            max_retransmit_count: 3,
            options: None,
        }
    }
}

impl TcpConfig {
    pub(crate) fn max_segment(&self) -> Option<u16> {
        let options = self.options.iter().flatten();
        options.map(|TcpOptions::MaximumSegmentSize(bytes)| *bytes).next_back()
    }
}

/// An option of the SYN,ACK.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub enum TcpOptions {
    /// The longest segment to receive and to send.
    MaximumSegmentSize(u16),
}
