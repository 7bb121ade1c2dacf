//! `--metrics ADDR`: the figures of `fulmar stat` for Prometheus (text exposition format, version 0.0.4).
//!
//! The listener belongs to the host's kernel. A thread accepts; each connection has a thread of its own, and
//! [`TIMEOUT`] in all: a client that stalls delays no other. Beyond [`MOST_CONNECTIONS`] a new client replaces the
//! oldest that has not sent its request yet, else one that does not read its answer. Without such a client the new one
//! is closed at once. A connection has one request, of [`MOST_REQUEST_BYTES`] at most.

mod exposition;

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::Shutdown;

use crate::failure::{Failure, Outcome};
pub use exposition::exposition;

/// Connections that are answered at the same time.
const MOST_CONNECTIONS: usize = 4;
/// Most threads: the threads of replaced clients are about to end.
const MOST_THREADS: usize = 4 * MOST_CONNECTIONS;
/// Time limit of a client for its request and for reading the answer. A silent client keeps its place for a second.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of a request: Prometheus sends some hundred.
const MOST_REQUEST_BYTES: usize = 8192;
/// Pause after `accept` failed, such as for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// A thread formats one answer and does nothing deep.
const THREAD_STACK_BYTES: usize = 256 * 1024;
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Where metrics are served: `PORT` of the loopback interface, or `ADDRESS:PORT`.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let alone = text.parse().map(|port: u16| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
    let address = alone.ok().or_else(|| text.parse().ok()).filter(|a| a.port() != 0);
    address.ok_or_else(|| "expected PORT (on 127.0.0.1) or ADDRESS:PORT".to_owned())
}

/// A listener that is bound and not served yet.
#[derive(Debug)]
pub struct Bound(Arc<TcpListener>);

impl Bound {
    /// Binds the address in the network namespace of the calling thread.
    ///
    /// # Errors
    /// A sentence: the address is in use, privileged or not the host's.
    pub fn new(at: SocketAddr) -> Outcome<Bound> {
        let listener = TcpListener::bind(at).map_err(|e| {
            let hint = match e.kind() {
                io::ErrorKind::AddrInUse => "; another program uses the port: choose another port",
                io::ErrorKind::PermissionDenied => "; choose a port of 1024 or above",
                io::ErrorKind::AddrNotAvailable => "; the address does not belong to this host",
                _ => "",
            };
            Failure::new(format!("cannot serve metrics on {at}: {e}{hint}"))
        })?;
        Ok(Bound(Arc::new(listener)))
    }

    /// Closes the listener later, once it is served.
    pub fn closer(&self) -> Closer {
        Closer(Arc::downgrade(&self.0))
    }

    /// Starts the thread that answers. `text` makes the metrics, for several clients at a time; `None`: the stack is
    /// ending. The thread stays until its [`Closer`] or the process ends it.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(
        self,
        text: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> io::Result<()> {
        let text: Arc<Text> = Arc::new(text);
        named("fulmar-metrics").spawn(move || accept(self.0, &text)).map(drop)
    }
}

/// Ends the thread that serves, and with it the listener: the address is free again. It holds neither.
#[derive(Clone, Debug)]
pub struct Closer(Weak<TcpListener>);

impl Closer {
    /// Ends it. Clients that are being answered have their answer.
    pub fn close(&self) {
        if let Some(listener) = self.0.upgrade() {
            // `accept` fails from now on (shutdown(2) of a listener, on Linux).
            let _ = nix::sys::socket::shutdown(listener.as_raw_fd(), Shutdown::Both);
        }
    }
}

type Text = dyn Fn() -> Option<String> + Send + Sync;

fn named(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.to_owned()).stack_size(THREAD_STACK_BYTES)
}

/// A client that is served.
struct Client {
    stream: TcpStream,
    begun: Instant,
    has_asked: AtomicBool,
}

impl Client {
    fn new(stream: TcpStream) -> Client {
        Client { stream, begun: Instant::now(), has_asked: AtomicBool::new(false) }
    }
}

/// The clients that are served, the oldest first, and the threads that serve them or have just done so.
#[derive(Default)]
struct Clients {
    list: Mutex<Vec<Arc<Client>>>,
    threads: AtomicUsize,
}

impl Clients {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client, which may replace another. `None`: there are too many.
    fn add(self: &Arc<Self>, stream: TcpStream) -> Option<Served> {
        let mut list = self.list();
        if self.threads.load(Ordering::Acquire) >= MOST_THREADS {
            return None;
        }
        if list.len() >= MOST_CONNECTIONS {
            let is_silent = |c: &Arc<Client>| !c.has_asked.load(Ordering::Acquire);
            let is_slow = |c: &Arc<Client>| c.begun.elapsed() > REQUEST_TIMEOUT;
            let at = list.iter().position(is_silent).or_else(|| list.iter().position(is_slow))?;
            // Its thread reads the end of its request.
            let _ = list.remove(at).stream.shutdown(std::net::Shutdown::Both);
        }
        let client = Arc::new(Client::new(stream));
        list.push(Arc::clone(&client));
        self.threads.fetch_add(1, Ordering::AcqRel);
        Some(Served { client, clients: Arc::clone(self) })
    }
}

/// A client on the list, while this exists.
struct Served {
    client: Arc<Client>,
    clients: Arc<Clients>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.clients.list().retain(|c| !Arc::ptr_eq(c, &self.client));
        self.clients.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

fn accept(listener: Arc<TcpListener>, text: &Arc<Text>) {
    // Signals are for the other threads. The threads of connections inherit the mask.
    let _ = nix::sys::signal::SigSet::all().thread_block();
    let clients = Arc::new(Clients::default());
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Closed by its closer.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => return,
            Err(_) => {
                thread::sleep(ACCEPT_RETRY);
                continue;
            }
        };
        let Some(served) = clients.add(stream) else { continue };
        let text = Arc::clone(text);
        // Without memory for a thread the client is closed.
        let _ = named("metrics").spawn(move || {
            // A client that disconnects early, or stalls, is not an error.
            let _ = answer(&served.client, Instant::now() + TIMEOUT, &*text);
            drop(served);
        });
    }
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Request {
    Metrics,
    /// Only the head of the answer.
    Head,
    /// By a name that is not this host's: a web page whose name leads here.
    Forbidden,
    NotFound,
    MethodNotAllowed,
    Malformed,
}

fn answer(served: &Client, deadline: Instant, text: &Text) -> io::Result<()> {
    let mut client = &served.stream;
    let head = read_head(client, deadline.min(Instant::now() + REQUEST_TIMEOUT))?;
    served.has_asked.store(true, Ordering::Release);
    let is_local = client.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback());
    let request = match parse_request(&head) {
        Request::Metrics | Request::Head if is_local && !names_this_host(&head) => {
            Request::Forbidden
        }
        request => request,
    };
    let (status, body) = match request {
        Request::Metrics | Request::Head => match text() {
            Some(text) => ("200 OK", text),
            None => ("503 Service Unavailable", "the stack is ending\n".to_owned()),
        },
        Request::Forbidden => {
            ("403 Forbidden", "use an IP address or localhost as the host name\n".to_owned())
        }
        Request::NotFound => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        Request::MethodNotAllowed => ("405 Method Not Allowed", "use GET or HEAD\n".to_owned()),
        Request::Malformed => ("400 Bad Request", "not an HTTP/1 request\n".to_owned()),
    };
    let length = body.len();
    let mut all = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    if request != Request::Head {
        all += &body;
    }
    let mut rest = all.as_bytes();
    while !rest.is_empty() {
        client.set_write_timeout(Some(left_until(deadline)?))?;
        match client.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => rest = &rest[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads to the empty line, the end, or the bound, whichever is first.
fn read_head(mut client: &TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let (mut head, mut chunk) = (Vec::new(), [0; 1024]);
    while !is_whole(&head) && head.len() < MOST_REQUEST_BYTES {
        client.set_read_timeout(Some(left_until(deadline)?))?;
        match client.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => head.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(head)
}

fn is_whole(head: &[u8]) -> bool {
    [&b"\r\n\r\n"[..], b"\n\n"].iter().any(|end| head.windows(end.len()).any(|w| w == *end))
}

/// Whether the Host field of a request is an address or `localhost`, or is missing (HTTP/1.0).
fn names_this_host(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    let fields = text.lines().skip(1).filter_map(|line| line.split_once(':'));
    let mut hosts = fields.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
    hosts.all(|(_, host)| {
        let host = host.trim();
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let is_address = |text: &str| text.parse::<IpAddr>().is_ok();
        host.parse::<SocketAddr>().is_ok()
            || is_address(name)
            || is_address(host.trim_matches(['[', ']']))
            || name.eq_ignore_ascii_case("localhost")
    })
}

fn parse_request(head: &[u8]) -> Request {
    let line = head.split(|b| *b == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Request::Malformed };
    let words: Vec<&str> = line.split_whitespace().collect();
    let [method, target, version] = words[..] else { return Request::Malformed };
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        _ if !is_whole(head) || !version.starts_with("HTTP/1.") => Request::Malformed,
        ("GET", "/" | "/metrics") => Request::Metrics,
        ("HEAD", "/" | "/metrics") => Request::Head,
        ("GET" | "HEAD", _) => Request::NotFound,
        _ => Request::MethodNotAllowed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(text: impl Fn() -> Option<String> + Send + Sync + 'static) -> SocketAddr {
        let bound = Bound::new("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = bound.0.local_addr().unwrap();
        bound.serve(text).unwrap();
        at
    }

    fn ask(at: SocketAddr, request: &[u8]) -> String {
        let mut client = TcpStream::connect(at).unwrap();
        let _ = client.write_all(request);
        let mut answer = Vec::new();
        // If the request exceeds the bound, the close of the socket resets the connection, because bytes are unread.
        let _ = client.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn an_address_is_of_the_loopback_unless_it_says_otherwise() {
        assert_eq!(address("9100").unwrap().to_string(), "127.0.0.1:9100");
        assert_eq!(address("[::1]:9100").unwrap().to_string(), "[::1]:9100");
        assert_eq!(address("192.0.2.1:1").unwrap().to_string(), "192.0.2.1:1");
        for wrong in ["", "host:1", "65536", "127.0.0.1", "0"] {
            assert!(address(wrong).unwrap_err().contains("ADDRESS:PORT"), "{wrong}");
        }
    }

    #[test]
    fn a_name_that_leads_to_the_loopback_is_not_served() {
        let at = served(|| Some("fulmar_up 1\n".to_owned()));
        for (host, status) in [
            ("localhost", "200"),
            ("LOCALHOST:9100", "200"),
            ("127.0.0.1:9100", "200"),
            ("[::1]:9100", "200"),
            ("[::1]", "200"),
            ("10.0.2.2", "200"),
            ("rebound.example", "403"),
            ("rebound.example:9100", "403"),
            ("localhost.example", "403"),
        ] {
            let got = ask(at, format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
            assert!(got.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {got}");
        }
        assert!(ask(at, b"GET /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn metrics_are_served_at_their_path_only() {
        let at = served(|| Some("fulmar_up 1\n".to_owned()));
        let got = ask(at, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(
            got.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"),
            "{got}"
        );
        assert!(
            got.ends_with("Content-Length: 12\r\nConnection: close\r\n\r\nfulmar_up 1\n"),
            "{got}"
        );
        assert!(ask(at, b"HEAD / HTTP/1.0\r\n\r\n").ends_with("\r\n\r\n"));
        assert!(ask(at, b"GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(at, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    }

    #[test]
    fn garbage_is_answered_with_400_or_not_at_all() {
        for garbage in [
            &b"\x16\x03\x01\x02\x00\n\n"[..],
            b"GET\r\n\r\n",
            b"GET /metrics SPDY/3\r\n\r\n",
            b"a b c d\n\n",
            b"\xff\xfe HTTP/1.1 x\r\n\r\n",
        ] {
            assert_eq!(parse_request(garbage), Request::Malformed, "{garbage:?}");
        }
        let at = served(|| Some(String::new()));
        let endless = vec![b'x'; 4 * MOST_REQUEST_BYTES];
        let answer = ask(at, &endless);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
        assert!(ask(at, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn the_oldest_silent_client_is_replaced() {
        let at = served(|| Some("fulmar_up 1\n".to_owned()));
        let silent: Vec<_> =
            (0..2 * MOST_CONNECTIONS).map(|_| TcpStream::connect(at).unwrap()).collect();
        // All of them have been accepted when one of the first ends, before its time.
        let begun = Instant::now();
        silent[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!((&silent[0]).read(&mut [0]).is_ok_and(|n| n == 0), "it is closed");
        for _ in 0..20 {
            assert!(ask(at, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        }
        assert!(begun.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn clients_and_their_threads_are_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = listener.local_addr().unwrap();
        let (mut far, clients) = (Vec::new(), Arc::new(Clients::default()));
        let mut add = || {
            far.push(TcpStream::connect(near).unwrap());
            clients.add(listener.accept().unwrap().0)
        };
        let silent: Vec<_> = (0..MOST_THREADS).map(|_| add().unwrap()).collect();
        assert_eq!(clients.list().len(), MOST_CONNECTIONS, "the oldest have given way");
        assert!(add().is_none(), "their threads have not ended");
        drop(silent);
        let busy: Vec<_> = (0..MOST_CONNECTIONS).map(|_| add().unwrap()).collect();
        busy.iter().for_each(|c| c.client.has_asked.store(true, Ordering::Release));
        assert!(add().is_none(), "who is being answered does not give way");
        drop(busy);
        assert_eq!((clients.list().len(), clients.threads.load(Ordering::Acquire)), (0, 0));
    }

    #[test]
    fn a_client_that_says_nothing_is_given_up_at_its_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let client = Client::new(listener.accept().unwrap().0);
        let error = answer(&client, Instant::now(), &|| Some(String::new())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Nor is one that does not read.
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(read_head(&client.stream, deadline).is_err());
    }

    #[test]
    fn the_address_is_free_after_the_close_whether_it_was_served_or_not() {
        let bound = Bound::new("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, closer) = (bound.0.local_addr().unwrap(), bound.closer());
        bound.serve(|| Some(String::new())).unwrap();
        assert!(ask(at, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        closer.close();
        let begin = Instant::now();
        while TcpListener::bind(at).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(60), "the address is free");
            thread::sleep(Duration::from_millis(1));
        }
        closer.close();
        let never_served = Bound::new(at).unwrap();
        never_served.closer().close();
        drop(never_served);
        TcpListener::bind(at).unwrap();
    }

    #[test]
    fn an_address_in_use_is_refused_with_a_sentence() {
        let first = Bound::new("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = Bound::new(first.0.local_addr().unwrap()).unwrap_err().to_string();
        assert!(error.contains("another program uses the port"), "{error}");
    }
}
