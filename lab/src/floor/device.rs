//! The devices of the floor, each the plainest use of its kernel interface.
//!
//! A frame starts with its virtio-net header (12 bytes) in both directions. Nothing is copied here
//! but by the kernel, and no call is made beyond one per frame and one per wait.
//!
//! | device | send | receive |
//! |---|---|---|
//! | [`Tap`] | `writev` | `read` |
//! | [`Packet`] | `writev`, around the queueing discipline | `read` |

use super::segment::VNET_BYTES;
use crate::sys;
use fulmar_gateway::netns::context;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

/// The largest frame, with its virtio-net header: an IP packet of 65,535 bytes.
const FRAME_BYTES: usize = VNET_BYTES + 14 + 65_535;
/// Where frames start in a read buffer, so that the payload (78 bytes on) is aligned to 64.
const ALIGN_BYTES: usize = 50;
/// After this long without a frame the flow counts as broken: no pause of a working one is a tenth of it.
const SILENCE_MS: i32 = 2_000;

/// The operations that the floor needs of a device.
pub trait FrameDevice: Send {
    /// Sends the frame that `header` and `payload` make together.
    fn send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()>;

    /// The next frame, valid until the next call. With `wait` it sleeps until there is one.
    ///
    /// # Errors
    /// TimedOut after two seconds of silence.
    fn receive(&mut self, wait: bool) -> io::Result<Option<&[u8]>>;
}

/// One `writev`; a frame is taken whole or not at all.
fn send_vectored(file: &mut File, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let n = file.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)])?;
    if n == header.len() + payload.len() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::WriteZero, "the device accepted only part of a frame"))
    }
}

/// A non-blocking descriptor that yields one frame per `read`.
struct Reader {
    buffer: Vec<u8>,
    frame_bytes: usize,
}

impl Reader {
    fn new() -> Reader {
        Reader { buffer: vec![0; ALIGN_BYTES + FRAME_BYTES], frame_bytes: 0 }
    }

    fn receive(&mut self, file: &mut File, wait: bool) -> io::Result<Option<&[u8]>> {
        loop {
            match file.read(&mut self.buffer[ALIGN_BYTES..]) {
                Ok(n) => {
                    self.frame_bytes = n;
                    return Ok(self.buffer.get(ALIGN_BYTES..ALIGN_BYTES + self.frame_bytes));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && wait => sleep_on(file)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }
}

fn sleep_on(file: &File) -> io::Result<()> {
    if sys::wait_readable(file.as_fd(), SILENCE_MS)? {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "no frame was received for two seconds"))
}

/// A TAP interface with virtio-net header and every TCP offload.
pub struct Tap {
    file: File,
    reader: Reader,
}

impl Tap {
    /// Makes the interface `name` in the calling thread's namespace.
    ///
    /// # Errors
    /// PermissionDenied when `/dev/net/tun` may not be opened.
    pub fn open(name: &str) -> io::Result<Tap> {
        /// CSUM, TSO4, TSO6, TSO_ECN, USO4, USO6; the last two only come together.
        const OFFLOADS: u32 = 0x6f;
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = context("cannot open /dev/net/tun", options.open("/dev/net/tun"))?;
        let flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        let name = CString::new(name)?;
        context("cannot create a TAP interface", sys::tun_set_iff(file.as_fd(), &name, flags))?;
        sys::tun_set_vnet_len(file.as_fd(), VNET_BYTES as i32)?;
        context("cannot enable TAP offloads", sys::tun_set_offload(file.as_fd(), OFFLOADS))?;
        Ok(Tap { file, reader: Reader::new() })
    }
}

impl FrameDevice for Tap {
    fn send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        send_vectored(&mut self.file, header, payload)
    }

    fn receive(&mut self, wait: bool) -> io::Result<Option<&[u8]>> {
        self.reader.receive(&mut self.file, wait)
    }
}

/// An AF_PACKET socket on one interface, with virtio-net header.
pub struct Packet {
    file: File,
    reader: Reader,
}

impl Packet {
    /// Binds to the interface `name` of the calling thread's namespace.
    pub fn open(name: &str) -> io::Result<Packet> {
        /// More than a window of super-frames: a lost one would stall the flow.
        const BUFFER_BYTES: i32 = 4 << 20;
        const PACKET_QDISC_BYPASS: i32 = 20;
        const PACKET_IGNORE_OUTGOING: i32 = 23;
        const PACKET_VNET_HDR_SZ: i32 = 24;
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK;
        let fd = context("cannot open an AF_PACKET socket", sys::socket(libc::AF_PACKET, kind, 0))?;
        let set = |level, name, value: i32| {
            sys::setsockopt(fd.as_fd(), level, name, &value.to_ne_bytes())
        };
        context(
            "cannot set PACKET_VNET_HDR_SZ",
            set(libc::SOL_PACKET, PACKET_VNET_HDR_SZ, VNET_BYTES as i32),
        )?;
        context(
            "cannot set PACKET_IGNORE_OUTGOING",
            set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1),
        )?;
        context("cannot set PACKET_QDISC_BYPASS", set(libc::SOL_PACKET, PACKET_QDISC_BYPASS, 1))?;
        for (forced, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            if set(libc::SOL_SOCKET, forced, BUFFER_BYTES).is_err() {
                set(libc::SOL_SOCKET, plain, BUFFER_BYTES)?;
            }
        }
        let index = context("cannot find the interface", sys::if_index(&CString::new(name)?))?;
        context(
            "cannot bind the AF_PACKET socket",
            sys::bind_packet(fd.as_fd(), index, libc::ETH_P_ALL),
        )?;
        Ok(Packet { file: File::from(fd), reader: Reader::new() })
    }
}

impl FrameDevice for Packet {
    fn send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        send_vectored(&mut self.file, header, payload)
    }

    fn receive(&mut self, wait: bool) -> io::Result<Option<&[u8]>> {
        self.reader.receive(&mut self.file, wait)
    }
}
