//! A connection of either stack, and its statistics while it runs.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

/// A connection of fulmar or of the kernel.
pub(super) enum Conn {
    Fulmar(fulmar::TcpStream),
    Linux(TcpStream),
}

/// TCP_INFO at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Progress {
    /// Since the watch began.
    pub at: Duration,
    pub acked_bytes: u64,
    pub sent_bytes: u64,
    pub retransmitted_bytes: u64,
    pub cwnd_bytes: u64,
    pub rtt: Duration,
}

impl Conn {
    /// How long a read or a write waits.
    pub fn set_timeouts(&self, time: Duration) -> io::Result<()> {
        match self {
            Conn::Fulmar(s) => s.set_read_timeout(Some(time))?,
            Conn::Linux(s) => s.set_read_timeout(Some(time))?,
        }
        match self {
            Conn::Fulmar(s) => s.set_write_timeout(Some(time)),
            Conn::Linux(s) => s.set_write_timeout(Some(time)),
        }
    }

    /// Has the close reset the connection.
    pub fn reset_on_close(&self) -> io::Result<()> {
        match self {
            Conn::Fulmar(s) => s.set_linger(Some(Duration::ZERO)),
            Conn::Linux(s) => sys::reset_on_close(s.as_fd()),
        }
    }

    /// The current statistics of the stack.
    pub fn progress(&self) -> io::Result<Progress> {
        match self {
            Conn::Fulmar(s) => s.info().map(|i| Progress {
                at: Duration::ZERO,
                acked_bytes: i.acked_bytes,
                sent_bytes: i.sent_bytes,
                retransmitted_bytes: i.retransmitted_bytes,
                cwnd_bytes: i.cwnd_bytes,
                rtt: i.rtt,
            }),
            Conn::Linux(s) => {
                let mut info = [0; LINUX_INFO_BYTES];
                let (tcp, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
                match sys::getsockopt(s.as_fd(), tcp, name, &mut info)? {
                    LINUX_INFO_BYTES => Ok(linux_progress(&info)),
                    _ => Err(io::Error::other("the TCP_INFO of this kernel is too short")),
                }
            }
        }
    }

    /// Notes the state as often as `every` says until `over`, or until there is none.
    pub fn watch(&self, every: Duration, over: &AtomicBool) -> Vec<Progress> {
        let (begun, mut course) = (Instant::now(), Vec::new());
        while !over.load(Ordering::Relaxed) {
            let Ok(now) = self.progress() else { break };
            course.push(Progress { at: begun.elapsed(), ..now });
            thread::sleep(every);
        }
        course
    }
}

/// As much of `struct tcp_info` (linux/tcp.h) as is read here: up to `tcpi_bytes_retrans`.
const LINUX_INFO_BYTES: usize = 216;

fn linux_progress(info: &[u8; LINUX_INFO_BYTES]) -> Progress {
    let word = |at: usize| u64::from(u32::from_ne_bytes(*part(info, at)));
    let long = |at: usize| u64::from_ne_bytes(*part(info, at));
    let (snd_mss, snd_cwnd) = (word(16), word(80));
    Progress {
        at: Duration::ZERO,
        acked_bytes: long(120),
        sent_bytes: long(200),
        retransmitted_bytes: long(208),
        cwnd_bytes: snd_cwnd * snd_mss,
        rtt: Duration::from_micros(word(68)),
    }
}

fn part<const N: usize>(info: &[u8; LINUX_INFO_BYTES], at: usize) -> &[u8; N] {
    info[at..].first_chunk().expect("invariant: every offset is of a field within the structure")
}

impl Read for &Conn {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Conn::Fulmar(s) => (&*s).read(buffer),
            Conn::Linux(s) => (&*s).read(buffer),
        }
    }
}

impl Write for &Conn {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Conn::Fulmar(s) => (&*s).write(bytes),
            Conn::Linux(s) => (&*s).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_kernel_connection_are_read_where_they_are() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let mut server = listener.accept().expect("connected").0;
        let conn = Conn::Linux(client);
        (&conn).write_all(&[1; 5000]).expect("fits");
        server.read_exact(&mut [0; 5000]).expect("arrives");
        // The ACK of the read bytes may be in flight.
        let mut now = conn.progress().expect("TCP_INFO");
        while now.acked_bytes < 5000 {
            thread::yield_now();
            now = conn.progress().expect("TCP_INFO");
        }
        assert_eq!((now.sent_bytes, now.retransmitted_bytes), (5000, 0));
        // linux/tcp.h counts the SYN among the acknowledged bytes.
        assert!((5000..=5001).contains(&now.acked_bytes));
        assert!(
            now.cwnd_bytes > 5000 && now.rtt > Duration::ZERO && now.rtt < Duration::from_secs(9)
        );
    }
}
