//! Shared memory with a peer process that breaks the protocol: the errors that a program gets, and the bytes that it
//! reads.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::thread;

use fulmar::devices::{Shm, ShmConfig};
use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::{A, B, buffers_come_home, pattern, stack, within};

/// A process that speaks the protocol by hand: a mapped memory file, and the socket of the meeting.
struct Liar {
    socket: OwnedFd,
    base: *mut u8,
    sent: u64,
}

// SAFETY: an address; every access is a volatile one of the only owner.
unsafe impl Send for Liar {}

const BYTES: usize = 16 << 20;
/// Where frames may lie.
const FRAMES_AT: usize = 2 << 20;
const RECORDS_AT: usize = 4096;
const RECORD_BYTES: usize = 128;
const SENT_AT: usize = 0;
const HEADERS: usize = 42;

fn owned(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call that made the descriptor succeeded, and it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

impl Liar {
    /// Meets a stack that listens under this name.
    fn meet(name: &str) -> Liar {
        // SAFETY: the name ends with a zero; numbers otherwise.
        let file = owned(unsafe { libc::memfd_create(c"liar".as_ptr(), libc::MFD_ALLOW_SEALING) });
        File::from(file.try_clone().unwrap()).set_len(BYTES as u64).unwrap();
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), BYTES, both, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        let seals =
            libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: takes its argument by value.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        let socket = connect(name);
        send_with(&socket, &hello(), &file);
        let mut answer = [0; 36];
        assert_eq!(File::from(socket.try_clone().unwrap()).read(&mut answer).unwrap(), 36);
        Liar { socket, base: base.cast(), sent: 0 }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= BYTES);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: inside of the mapping, which is never unmapped.
            unsafe { self.base.add(at + i).write_volatile(*b) }
        }
    }

    fn word(&self, at: usize, value: u64) {
        // SAFETY: inside of the mapping, and aligned: every caller's `at` is a multiple of 8.
        unsafe { self.base.add(at).cast::<u64>().write_volatile(value) }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Puts a frame into the ring and wakes the stack.
    fn send(&mut self, frame: &[u8]) {
        self.write(FRAMES_AT, frame);
        let record = RECORDS_AT + self.sent as usize * RECORD_BYTES;
        // One piece in slot `sent`; the checksum at byte 6 of what begins at byte 34 is left to the device.
        self.word(record, self.sent | 1 << 32);
        self.word(record + 8, 1 | 34 << 48);
        self.word(record + 16, 6);
        self.word(record + 24, FRAMES_AT as u64 | (frame.len() as u64) << 32);
        self.sent += 1;
        self.word(SENT_AT, self.sent);
        self.ring();
    }

    fn ring(&self) {
        // SAFETY: the pointer is to one readable byte.
        let n = unsafe {
            libc::send(self.socket.as_raw_fd(), c"x".as_ptr().cast(), 1, libc::MSG_NOSIGNAL)
        };
        assert_eq!(n, 1);
    }
}

fn hello() -> [u8; 36] {
    let mut b = [0; 36];
    b[..8].copy_from_slice(b"fulmarsh");
    b[8] = 2;
    b[12..16].copy_from_slice(&1500u32.to_le_bytes());
    b[16..24].copy_from_slice(&(BYTES as u64).to_le_bytes());
    b[24..32].copy_from_slice(&(1024u64 << 32 | 13).to_le_bytes());
    b
}

fn connect(name: &str) -> OwnedFd {
    // SAFETY: plain numbers, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    let bytes = (mem::size_of::<libc::sa_family_t>() + 1 + name.len()) as u32;
    // SAFETY: takes no pointer.
    let socket = owned(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0) });
    // SAFETY: the address is as long as it says.
    while unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), bytes) } != 0 {
        thread::yield_now();
    }
    socket
}

fn send_with(socket: &OwnedFd, bytes: &[u8], file: &OwnedFd) {
    let mut control = [0u64; 3];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the control data has room for one header with one descriptor: 24 bytes.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = mem::size_of_val(&control) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(file.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)
    };
    assert_eq!(sent, bytes.len() as isize);
}

/// A stack and the liar at the other end of its memory.
fn victim(what: &str) -> (Stack, Liar) {
    let name = format!("fulmar-liar-{what}-{}", std::process::id());
    let config = ShmConfig { name: name.clone(), mtu: 65_535, ..ShmConfig::default() };
    let device = thread::spawn(move || Shm::open(&config).unwrap());
    let liar = Liar::meet(&name);
    (stack(1, Box::new(device.join().unwrap()), |s| s), liar)
}

/// A datagram to port 53 of the stack, as a frame.
fn datagram(payload: &[u8]) -> Vec<u8> {
    let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let (ip, udp) = ((payload.len() + 28) as u16, (payload.len() + 8) as u16);
    f.extend([0x45, 0, (ip >> 8) as u8, ip as u8, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    f.extend([10, 1, 0, 2, 10, 1, 0, 1]);
    let words = f[14..34].as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|w| u32::from(u16::from_be_bytes(*w))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    f[24..26].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    f.extend([0, 9, 0, 53, (udp >> 8) as u8, udp as u8, 0, 0]);
    f.extend(payload);
    f
}

fn is_told<T: std::fmt::Debug>(r: io::Result<T>) {
    assert_eq!(r.unwrap_err().raw_os_error(), Some(libc::EPROTO));
}

#[test]
fn a_protocol_violation_of_the_peer_process_is_eproto_and_the_device_names_it() {
    within(|| {
        let (stack, liar) = victim("eproto");
        let udp = UdpSocket::bind(&stack, (A, 53)).unwrap();
        let listener = TcpListener::bind(&stack, (A, 80)).unwrap();
        let (udp, listener) = (&udp, &listener);
        thread::scope(|threads| {
            let receiver = threads.spawn(|| udp.recv_from(&mut [0; 8]));
            let acceptor = threads.spawn(|| listener.accept());
            liar.word(SENT_AT, 5000);
            liar.ring();
            is_told(receiver.join().unwrap());
            is_told(acceptor.join().unwrap());
        });
        is_told(udp.send_to(b"x", (B, 53)));
        is_told(TcpStream::connect(&stack, (B, 80)));
        let path = stack.stat().unwrap().shard.device.path;
        assert!(path.contains("violated the protocol: a ring index"), "{path}");
    });
}

#[test]
fn a_loan_of_shared_memory_stays_as_it_was_first_seen() {
    within(|| {
        let (stack, mut liar) = victim("loan");
        let udp = UdpSocket::bind(&stack, (A, 53)).unwrap();
        let (sent, changed, again) = (pattern(1, 5000), pattern(2, 5000), pattern(3, 5000));
        liar.send(&datagram(&sent));
        let (mut loan, from) = udp.recv_owned().unwrap();
        assert_eq!((loan.len(), from.port()), (5000, 9));
        // A copy is a look at the bytes as they are now.
        assert!(loan.to_vec() == sent);
        liar.write(FRAMES_AT + HEADERS, &changed);
        assert!(loan.to_vec() == changed);
        let mut part = [0; 100];
        assert_eq!((loan.copy_to(4950, &mut part), &part[..50]), (50, &changed[4950..]));
        // A slice is a copy that stays.
        assert!(loan.slices().next().is_some_and(|s| s == changed));
        liar.write(FRAMES_AT + HEADERS, &again);
        assert!(loan == changed[..] && loan.to_vec() == changed);
        let rest = loan.split_off(2000);
        assert!(loan == changed[..2000] && rest == changed[2000..]);
        loan.advance(1000);
        loan.append(rest);
        let mut read = Vec::new();
        loan.read_to_end(&mut read).unwrap();
        assert!(read == changed[1000..]);
    });
}

#[test]
fn bytes_of_a_read_stay_valid_and_buffers_return_to_the_peer() {
    within(|| {
        let (stack, mut liar) = victim("read");
        let udp = UdpSocket::bind(&stack, (A, 53)).unwrap();
        for round in 0..20 {
            let payload = pattern(round, 3000 + round * 1000);
            liar.send(&datagram(&payload));
            let mut buf = vec![0; 64 << 10];
            let (n, _) = udp.recv_from(&mut buf).unwrap();
            liar.write(FRAMES_AT, &[0xff; 30_000]);
            assert!(buf[..n] == payload);
        }
        buffers_come_home(&[&stack]);
    });
}
