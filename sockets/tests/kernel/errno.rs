//! The same failing call on Linux's sockets and on ours: the same errno.

use std::io::{self, Read, Write};
use std::net::{self, Shutdown, SocketAddr};
use std::time::Duration;

use fulmar::{Stack, TcpListener, TcpStream, UdpSocket};

use crate::support::eventually;
use crate::{KERNEL, OURS, in_namespace, stack};

const SHORT: Option<Duration> = Some(Duration::from_millis(20));

/// Two worlds with the same calls: Linux's sockets at 10.77.0.1, ours at 10.77.0.2.
macro_rules! world {
    ($module:ident, $listener:ty, $stream:ty, $udp:ty, $me:expr, $peer:expr,
     $cx:ty, |$s:ident| $($bind:ident)::+, $($connect:ident)::+, $($ubind:ident)::+, ($($pre:tt)*)) => {
        mod $module {
            use super::*;

            pub const ME: &str = $me;
            pub const PEER: &str = $peer;

            fn bind($s: &$cx, a: &str) -> io::Result<$listener> {
                $($bind)::+($($pre)* a)
            }

            fn connect($s: &$cx, a: &str) -> io::Result<$stream> {
                $($connect)::+($($pre)* a)
            }

            fn udp($s: &$cx, a: &str) -> io::Result<$udp> {
                $($ubind)::+($($pre)* a)
            }

            /// Both ends of a connection to itself.
            fn pair(s: &$cx) -> ($stream, $stream) {
                let listener = bind(s, &format!("{ME}:0")).unwrap();
                let to = listener.local_addr().unwrap().to_string();
                let c = connect(s, &to).unwrap();
                (c, listener.accept().unwrap().0)
            }

            /// A connection that its peer has reset.
            fn reset(s: &$cx) -> $stream {
                let (mut c, p) = pair(s);
                c.write_all(b"unread").unwrap();
                eventually("it is there", || p.peek(&mut [0; 8]).unwrap() == 6);
                drop(p);
                eventually("the reset has come", || c.peer_addr().is_err());
                c
            }

            /// A connection whose peer had closed it before it was written to.
            fn abandoned(s: &$cx) -> $stream {
                let (mut c, p) = pair(s);
                drop(p);
                assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
                c.write_all(b"too late").unwrap();
                eventually("the reset has come", || c.peer_addr().is_err());
                c
            }

            /// A connection that both have closed.
            fn closed(s: &$cx) -> $stream {
                let (mut c, p) = pair(s);
                c.shutdown(Shutdown::Write).unwrap();
                drop(p);
                assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
                eventually("it is over", || c.peer_addr().is_err());
                c
            }

            fn failed<T>(r: io::Result<T>) -> Result<(), Option<i32>> {
                r.map(drop).map_err(|e| e.raw_os_error())
            }

            /// Every call with its name and what it answered.
            pub fn answers(s: &$cx) -> Vec<(&'static str, Result<(), Option<i32>>)> {
                let mut all = Vec::new();
                let mut note = |name, r| all.push((name, r));
                connecting(s, &mut note);
                binding(s, &mut note);
                streams(s, &mut note);
                datagrams(s, &mut note);
                all
            }

            type Note<'a> = dyn FnMut(&'static str, Result<(), Option<i32>>) + 'a;

            fn connecting(s: &$cx, note: &mut Note) {
                note("connect to a closed port", failed(connect(s, &format!("{PEER}:9"))));
                note("connect to oneself, closed", failed(connect(s, &format!("{ME}:9"))));
                note("connect without a route", failed(connect(s, "192.0.2.1:9")));
                note("connect without a v6 route", failed(connect(s, "[2001:db8::1]:9")));
                note("connect to nobody", failed(connect(s, "10.77.0.99:9")));
                note("connect to port 0", failed(connect(s, &format!("{PEER}:0"))));
                note("connect to port 0 of oneself", failed(connect(s, &format!("{ME}:0"))));
                note("connect to all", failed(connect(s, "10.77.0.255:9")));
                note("connect to a group", failed(connect(s, "224.0.0.1:9")));
            }

            fn binding(s: &$cx, note: &mut Note) {
                note("listen elsewhere", failed(bind(s, "192.0.2.1:80")));
                let first = bind(s, &format!("{ME}:80"));
                note("listen twice", failed(bind(s, &format!("{ME}:80"))));
                note("listen everywhere beside it", failed(bind(s, "0.0.0.0:80")));
                note("listen everywhere with both versions", failed(bind(s, "[::]:80")));
                drop(first);
                let any = bind(s, "0.0.0.0:80");
                note("listen here beside everywhere", failed(bind(s, &format!("{ME}:80"))));
                drop(any);
                let l = bind(s, &format!("{ME}:80")).unwrap();
                l.set_nonblocking(true).unwrap();
                note("accept nobody", failed(l.accept()));
                note("datagrams elsewhere", failed(udp(s, "192.0.2.1:53")));
                let first = udp(s, &format!("{ME}:53"));
                note("datagrams twice", failed(udp(s, &format!("{ME}:53"))));
                note("datagrams everywhere beside it", failed(udp(s, "0.0.0.0:53")));
                drop(first);
            }

            fn streams(s: &$cx, note: &mut Note) {
                let (mut c, _p) = pair(s);
                c.set_read_timeout(SHORT).unwrap();
                note("read nothing", failed(c.read(&mut [0; 1])));
                note("peek nothing", failed(c.peek(&mut [0; 1])));
                c.shutdown(Shutdown::Write).unwrap();
                note("write after shutdown", failed(c.write(b"x")));
                note("shut down twice", failed(c.shutdown(Shutdown::Write)));
                let mut c = reset(s);
                note("write after a reset", failed(c.write(b"x")));
                note("write again", failed(c.write(b"x")));
                note("read after that", failed(c.read(&mut [0; 1])));
                let mut c = reset(s);
                note("read after a reset", failed(c.read(&mut [0; 1])));
                note("read again", failed(c.read(&mut [0; 1])));
                note("write after that", failed(c.write(b"x")));
                note("shut down after a reset", failed(c.shutdown(Shutdown::Both)));
                let c = reset(s);
                let told = c.take_error().unwrap().and_then(|e| e.raw_os_error());
                note("the pending error", Err(told));
                note("no error any more", failed(c.take_error().map(|e| assert!(e.is_none()))));
                let mut c = abandoned(s);
                note("write after the peer's end and a reset", failed(c.write(b"x")));
                note("write once more", failed(c.write(b"x")));
                let end = c.read(&mut [0; 1]).map(|n| assert_eq!(n, 0));
                note("read behind the end", failed(end));
                let mut c = abandoned(s);
                let end = c.read(&mut [0; 1]).map(|n| assert_eq!(n, 0));
                note("read after the peer's end and a reset", failed(end));
                note("write after the read", failed(c.write(b"x")));
                let c = abandoned(s);
                let told = c.take_error().unwrap().and_then(|e| e.raw_os_error());
                note("the pending error of a reset behind the end", Err(told));
                let c = closed(s);
                note("shut down after both ends", failed(c.shutdown(Shutdown::Both)));
                note("the peer of a closed connection", failed(c.peer_addr()));
            }

            fn datagrams(s: &$cx, note: &mut Note) {
                let u = udp(s, &format!("{ME}:0")).unwrap();
                u.set_read_timeout(SHORT).unwrap();
                note("receive nothing", failed(u.recv_from(&mut [0; 1])));
                note("send to nobody named", failed(u.send(b"x")));
                note("the peer of no connection", failed(u.peer_addr()));
                note("send too much", failed(u.send_to(&[0; 65_508], (PEER, 9))));
                note("send to port 0", failed(u.send_to(b"x", (PEER, 0))));
                note("send without a route", failed(u.send_to(b"x", "192.0.2.1:9")));
                note("send to all", failed(u.send_to(b"x", "10.77.0.255:9")));
                note("send to all of the link", failed(u.send_to(b"x", "255.255.255.255:9")));
                note("connect to all", failed(u.connect("10.77.0.255:9")));
                note("connect without a route", failed(u.connect("192.0.2.1:9")));
                note("connect datagrams to port 0", failed(u.connect((PEER, 0))));
                note("send with the other version", failed(u.send_to(b"x", "[fd77::1]:9")));
                u.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                u.connect((PEER, 9)).unwrap();
                u.send(b"x").unwrap();
                note("receive from a closed port", failed(u.recv(&mut [0; 1])));
                u.send(b"x").unwrap();
                eventually("the answer has come", || u.take_error().unwrap().is_some());
                u.send(b"x").unwrap();
            }
        }
    };
}

world!(
    linux,
    net::TcpListener,
    net::TcpStream,
    net::UdpSocket,
    KERNEL,
    OURS,
    (),
    |_s| net::TcpListener::bind,
    net::TcpStream::connect,
    net::UdpSocket::bind,
    ()
);

world!(
    ours,
    TcpListener,
    TcpStream,
    UdpSocket,
    OURS,
    KERNEL,
    Stack,
    |s| TcpListener::bind,
    TcpStream::connect,
    UdpSocket::bind,
    (s,)
);

#[test]
fn the_same_failing_call_has_the_errno_of_linux() {
    in_namespace!(|| {
        let stack = stack();
        let linux = linux::answers(&());
        let fulmar = ours::answers(&stack);
        assert_eq!(linux.len(), fulmar.len());
        let wrong: Vec<_> = linux
            .iter()
            .zip(&fulmar)
            .filter(|(l, f)| l != f)
            .map(|(l, f)| format!("{}: Linux {:?}, fulmar {:?}", l.0, l.1, f.1))
            .collect();
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
        let _: SocketAddr = format!("{}:1", linux::ME).parse().unwrap();
        assert_eq!(linux::PEER, ours::ME);
    });
}
