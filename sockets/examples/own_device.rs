//! A custom device: Ethernet frames as datagrams of a Unix socket, with a stack at each end.
//!
//! ```text
//! cargo run --example own_device -- link
//! ```
//!
//! `Wire` is the whole device. It has no offloads (`Caps::plain`), so the stack passes it complete frames of at
//! most `mtu` + 14 bytes.

mod common;

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::process::ExitCode;
use std::thread;

use common::Outcome;
use fulmar::device::{
    Burst, Caps, Counters, Device, DeviceStats, EtherAddr, Instant, Interest, Packet, Pool,
    Purpose, Tally, Wake, WakeFd,
};
use fulmar::stat::DropReason;
use fulmar::{Stack, TcpListener, TcpStream};

const MTU: usize = 1500;

/// One end of the wire.
struct Wire {
    socket: UnixDatagram,
    caps: Caps,
    /// The socket refused the first frame of the burst.
    is_full: bool,
    /// The errno with which the other end was lost.
    lost: Option<i32>,
    stats: DeviceStats,
}

impl Wire {
    fn pair() -> io::Result<[Wire; 2]> {
        let (a, b) = UnixDatagram::pair()?;
        Ok([Wire::new(a, 1)?, Wire::new(b, 2)?])
    }

    fn new(socket: UnixDatagram, station: u8) -> io::Result<Wire> {
        socket.set_nonblocking(true)?;
        // The two Ethernet addresses must differ. The socket is readable while datagrams are queued.
        let ether = EtherAddr([2, 0, 0, 0, 0, station]);
        let caps = Caps { wake: Wake::Level, ..Caps::plain(MTU, ether) };
        let stats = DeviceStats { name: format!("wire{station}"), ..DeviceStats::default() };
        Ok(Wire { socket, caps, is_full: false, lost: None, stats })
    }
}

impl Device for Wire {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let (mut taken, mut tally, mut frame) = (0, Tally::default(), [0; MTU + 14]);
        self.is_full = false;
        while let Some(p) = burst.front() {
            let n = p.chain.copy_to(0, &mut frame);
            match self.socket.send(&frame[..n]) {
                Ok(_) => tally.add(p),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // The frame stays in the burst and is offered again.
                    self.is_full = true;
                    break;
                }
                Err(e) => {
                    self.lost = e.raw_os_error();
                    counters.drop_packet(DropReason::DeviceGone);
                }
            }
            // A frame taken from the burst belongs to the device, which frees it.
            burst.pop_front().into_iter().for_each(|p| pool.free(p.chain));
            taken += 1;
        }
        tally.sent(counters, &mut self.stats);
        taken
    }

    fn rx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let (mut tally, mut frame) = (Tally::default(), [0; MTU + 14]);
        for _ in 0..budget.min(out.space()) {
            let Ok(n) = self.socket.recv(&mut frame) else { break };
            let Ok(mut chain) = pool.alloc_chain(n, 0, Purpose::Receive) else {
                counters.drop_packet(DropReason::NoBuffer);
                continue;
            };
            chain.copy_from(0, &frame[..n]);
            tally.receive(Packet::new(chain), out);
        }
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest = if self.is_full { Interest::ReadableOrWritable } else { Interest::Readable };
        Some(WakeFd { fd: self.socket.as_raw_fd(), interest })
    }

    fn lost(&self) -> Option<i32> {
        self.lost
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}

fn main() -> ExitCode {
    common::run(|_| example())
}

fn example() -> Outcome {
    let [near, far] = Wire::pair()?;
    let near = Stack::builder().device(near).address(common::OURS.parse()?).build()?;
    let far = Stack::builder().device(far).address(common::PEER.parse()?).build()?;
    let listener = TcpListener::bind(&far, "10.77.0.1:7000")?;
    let server = thread::spawn(move || -> io::Result<u64> {
        let (mut stream, _) = listener.accept()?;
        io::copy(&mut stream, &mut io::sink())
    });
    let mut stream = TcpStream::connect(&near, "10.77.0.1:7000")?;
    let sent = io::copy(&mut io::repeat(7).take(1 << 20), &mut stream)?;
    stream.flush()?;
    drop(stream);
    let received = server.join().map_err(|_| "the server failed")??;
    println!("sent {sent} bytes, {received} arrived");
    let stat = near.stat()?;
    let device = stat.device();
    println!("{}: {} frames sent, {} received", device.name, device.tx_frames, device.rx_frames);
    if received == sent { Ok(()) } else { Err("bytes are missing".into()) }
}
