//! Shared memory: two processes on one host, joined without a kernel network.

use std::time::Duration;

use fulmar_base::EtherAddr;

use crate::OpenError;

/// How two processes find each other, and what they share.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Where they meet: a path (with a slash) or an abstract name of the network namespace. Who
    /// comes first listens, who comes second connects.
    pub name: String,
    /// How long to wait for the other process. `None`: until it comes.
    pub wait: Option<Duration>,
    /// Largest IP packet that is not a super-frame, in bytes.
    pub mtu: usize,
    /// Station addresses: of the end that came first, of the end that came second.
    pub ether: [EtherAddr; 2],
    /// Memory that the stack's pool may have in the shared region, in bytes. Only what is used is
    /// ever touched.
    pub pool_bytes: usize,
}

impl Default for ShmConfig {
    /// MTU 1500, 256 MiB, and as long as it takes.
    fn default() -> ShmConfig {
        ShmConfig {
            name: String::new(),
            wait: None,
            mtu: 1500,
            ether: [EtherAddr([2, 0, 0, 0, 0, 1]), EtherAddr([2, 0, 0, 0, 0, 2])],
            pool_bytes: 256 << 20,
        }
    }
}

/// Which end a process has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// It came first and listened.
    First,
    /// It came second and connected.
    Second,
}

/// One end of the shared memory.
pub struct Shm {
    never: std::convert::Infallible,
}

impl Shm {
    /// Meets the other process and joins it.
    ///
    /// # Errors
    /// Nobody came in time, or the other process speaks another version; the error says what to do.
    pub fn open(config: &ShmConfig) -> Result<Shm, OpenError> {
        Err(OpenError::new(
            format!("cannot open shm:{}", config.name),
            std::io::ErrorKind::Unsupported.into(),
            "use another device",
        ))
    }

    /// Which end this is.
    pub fn side(&self) -> Side {
        match self.never {}
    }
}

impl fulmar_netdev::Device for Shm {
    fn caps(&self) -> &fulmar_netdev::Caps {
        match self.never {}
    }
    fn tx_burst(
        &mut self,
        _: fulmar_base::Instant,
        _: &mut fulmar_mbuf::Pool,
        _: &mut fulmar_netdev::Burst,
        _: &mut fulmar_base::Counters,
    ) -> usize {
        match self.never {}
    }
    fn rx_burst(
        &mut self,
        _: fulmar_base::Instant,
        _: &mut fulmar_mbuf::Pool,
        _: &mut fulmar_netdev::Burst,
        _: usize,
        _: &mut fulmar_base::Counters,
    ) -> usize {
        match self.never {}
    }
    fn arm(&mut self) -> bool {
        match self.never {}
    }
    fn wake_fd(&self) -> Option<std::os::fd::RawFd> {
        match self.never {}
    }
    fn next_deadline(&self) -> Option<fulmar_base::Instant> {
        match self.never {}
    }
    fn link_state(&self) -> fulmar_netdev::LinkState {
        match self.never {}
    }
}
