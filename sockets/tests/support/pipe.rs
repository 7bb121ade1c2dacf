//! A device of one's own: frames as datagrams of a Unix socket, so that two processes can be joined
//! without any right; and a switch with which it goes away.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use fulmar::device::Device;
use fulmar::device::{Burst, Caps, Interest, Packet, WakeFd};
use fulmar::device::{Counters, EtherAddr, Instant};
use fulmar::device::{Pool, Purpose};
use fulmar::stat::DropReason;

const FRAME_BYTES: usize = 1514;

pub struct Pipe {
    socket: UnixDatagram,
    caps: Caps,
    /// The errno with which it was lost; 0 while it is there.
    lost: Arc<AtomicI32>,
    /// The last burst was refused.
    is_full: bool,
    /// The device has no descriptor that signals frames.
    has_no_fd: bool,
}

/// Ends a [`Pipe`], as pulling a card does.
pub struct Plug {
    lost: Arc<AtomicI32>,
    /// The other end, whose frame wakes the thread that sleeps on the device.
    bell: UnixDatagram,
}

impl Plug {
    pub fn pull(&self) {
        self.pull_with(libc::ENODEV);
    }

    /// The device is lost with `errno`.
    pub fn pull_with(&self, errno: i32) {
        self.lost.store(errno, Ordering::Release);
        self.bell.send(&[0; 60]).unwrap();
    }
}

impl Pipe {
    /// One end of a pair; `side` makes the station address.
    pub fn new(socket: UnixDatagram, side: u8) -> Pipe {
        socket.set_nonblocking(true).unwrap();
        let ether = EtherAddr([2, 0, 0, 0, 9, side]);
        Pipe {
            socket,
            caps: Caps::plain(1500, ether),
            lost: Arc::default(),
            is_full: false,
            has_no_fd: false,
        }
    }

    /// The same device, which has to be polled.
    #[must_use]
    pub fn without_fd(self) -> Pipe {
        Pipe { has_no_fd: true, ..self }
    }

    pub fn pair() -> (Pipe, Pipe) {
        let (a, b) = UnixDatagram::pair().unwrap();
        (Pipe::new(a, 1), Pipe::new(b, 2))
    }

    pub fn from_fd(fd: OwnedFd, side: u8) -> Pipe {
        Pipe::new(UnixDatagram::from(fd), side)
    }

    /// How to make this end vanish, given the other end.
    pub fn plug(&self, peer: &Pipe) -> Plug {
        let bell = peer.socket.try_clone().unwrap();
        Plug { lost: Arc::clone(&self.lost), bell }
    }
}

impl Device for Pipe {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(&mut self, _: Instant, pool: &mut Pool, b: &mut Burst, c: &mut Counters) -> usize {
        let mut taken = 0;
        self.is_full = false;
        while let Some(p) = b.front() {
            match self.socket.send(&p.chain.to_vec()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.is_full = true;
                    break;
                }
                Err(_) => c.drop_packet(DropReason::DeviceGone),
                Ok(_) => {}
            }
            if let Some(p) = b.pop_front() {
                pool.free(p.chain);
            }
            taken += 1;
        }
        taken
    }

    fn rx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        c: &mut Counters,
    ) -> usize {
        let mut bytes = [0; FRAME_BYTES];
        let mut taken = 0;
        while taken < budget.min(out.space()) {
            let Ok(n) = self.socket.recv(&mut bytes) else { break };
            let Ok(mut chain) = pool.alloc_chain(n, 0, Purpose::Receive) else {
                c.drop_packet(DropReason::NoBuffer);
                continue;
            };
            chain.copy_from(0, &bytes[..n]).unwrap();
            out.push(Packet::new(chain)).unwrap();
            taken += 1;
        }
        taken
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest = if self.is_full { Interest::ReadableOrWritable } else { Interest::Readable };
        (!self.has_no_fd).then(|| WakeFd { fd: self.socket.as_raw_fd(), interest })
    }

    fn lost(&self) -> Option<i32> {
        Some(self.lost.load(Ordering::Acquire)).filter(|errno| *errno != 0)
    }
}
