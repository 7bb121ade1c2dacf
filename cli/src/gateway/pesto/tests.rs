//! Clients of the socket, and what their changes open and close.

use std::sync::{Arc, Mutex};

use fulmar_gateway::ports::Forward;

use super::published::Publisher;
use super::*;
use crate::gateway::auto::SharedGiven;

/// Notes what is asked for; port 22 is refused, as to a gateway without rights.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }
}

impl Publisher for Notes {
    fn publish(&self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        if forward.from == 22 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.note(format!("+{} {}", protocol.name(), forward.from));
        Ok(())
    }

    fn unpublish(&self, protocol: Protocol, forward: &Forward) {
        self.note(format!("-{} {}", protocol.name(), forward.from));
    }

    fn publish_on_guest(&self, protocol: Protocol, forward: &Forward) -> io::Result<Vec<u64>> {
        self.note(format!("+{} {} of the guest", protocol.name(), forward.from));
        Ok(vec![u64::from(forward.from)])
    }

    fn unpublish_on_guest(&self, sockets: &[u64]) {
        self.note(format!("-{sockets:?}"));
    }
}

const ALL: Capabilities = Capabilities { v4: true, v6: true, tcp: true, udp: true, auto: true };

fn tables(tcp: &str, tcp_ns: &str) -> Tables {
    let specs = Specs { capabilities: ALL, ephemeral: 32_768..=60_999 };
    let rules = |spec: &str| specs.rules(Protocol::Tcp, &spec.parse().unwrap());
    Tables { host: rules(tcp), guest: rules(tcp_ns) }
}

/// What is published by these options, and what is asked for from then on.
fn published(tcp: &str, tcp_ns: &str) -> (Published, Notes, SharedGiven) {
    let (notes, given, tables) = (Notes::default(), SharedGiven::default(), tables(tcp, tcp_ns));
    let id = |forward: Forward| (Protocol::Tcp, forward.clone(), u64::from(forward.from));
    let opened = tables.guest.iter().flat_map(|rule| rule.forwards()).map(id).collect();
    let shared = [given.clone(), SharedGiven::default()];
    (Published::new(ALL, tables, opened, Box::new(notes.clone()), shared), notes, given)
}

fn quiet() -> Log {
    Log::to_stderr("pesto", true)
}

#[test]
fn only_what_a_client_has_changed_is_opened_and_closed() {
    let (mut published, notes, _) = published("80,443", "53");
    let sent = published.tables();
    published.change(&sent, &tables("80,8080-8081", "54"), &quiet());
    assert_eq!(
        notes.take(),
        ["-tcp 443", "-[53]", "+tcp 8080", "+tcp 8081", "+tcp 54 of the guest"]
    );
    published.change(&published.tables(), &tables("80,8080-8081", "none"), &quiet());
    assert_eq!(notes.take(), ["-[54]"]);
    // Another client had the first tables: its change is made, and undoes none.
    published.change(&sent, &tables("80,443,9000", "53"), &quiet());
    assert_eq!(notes.take(), ["+tcp 9000"]);
    assert_eq!(published.tables().host, tables("80,8080-8081,9000", "none").host);
}

#[test]
fn a_port_that_cannot_be_bound_stays_in_its_table_until_it_is_removed() {
    let (mut published, notes, _) = published("none", "none");
    let wanted = tables("22-23", "none");
    published.change(&Tables::default(), &wanted, &quiet());
    assert_eq!((notes.take(), published.tables()), (vec!["+tcp 23".into()], wanted.clone()));
    published.change(&wanted, &Tables::default(), &quiet());
    assert_eq!(notes.take(), ["-tcp 22", "-tcp 23"]);
}

#[test]
fn rules_that_meet_others_and_tables_that_are_full_are_refused() {
    let (mut published, notes, _) = published("80-90", "none");
    published.change(&Tables::default(), &tables("85", "none"), &quiet());
    assert_eq!(notes.take(), Vec::<String>::new());
    let many: Vec<String> = (0..300).map(|n| (1000 + 2 * n).to_string()).collect();
    published.change(&Tables::default(), &tables(&many.join(","), "none"), &quiet());
    assert_eq!(published.tables().host.len(), pesto::MOST_RULES);
    let each = |n: u16| format!("127.0.0.{n}/1-65535");
    let (mut published, ..) = self::published("none", "none");
    for n in 1..5 {
        published.change(&Tables::default(), &tables(&each(n), "none"), &quiet());
    }
    assert_eq!(published.tables().host.len(), 2, "ports have a bound, too");
}

#[test]
fn auto_is_switched_and_leaves_out_what_is_given() {
    let (mut published, notes, given) = published("none", "none");
    published.change(&Tables::default(), &tables("auto", "none"), &quiet());
    assert!(notes.take().is_empty());
    assert_eq!(given.ranges(), [1..=32_767, 61_000..=65_535]);
    let sent = published.tables();
    published.change(&sent, &tables("8080", "none"), &quiet());
    assert_eq!((given.ranges(), notes.take()), (vec![], vec!["+tcp 8080".into()]));
}

/// A socket with its clients in this thread.
struct Server {
    socket: Socket,
    clients: Clients,
    published: Published,
    notes: Notes,
    path: std::path::PathBuf,
}

impl Server {
    fn new(name: &str) -> Server {
        let path = std::env::temp_dir().join(format!("fulmar-{name}-{}", std::process::id()));
        let socket = Socket::bind(&path).unwrap();
        let (published, notes, _) = published("80", "none");
        Server { socket, clients: Clients::default(), published, notes, path }
    }

    fn turn_if(&mut self, is_due: bool) {
        if is_due {
            self.turn();
        }
    }

    fn turn(&mut self) {
        self.clients.turn(&self.socket, &mut self.published, &quiet());
    }

    /// A client that has its greeting.
    fn client(&mut self) -> UnixStream {
        let mut client = UnixStream::connect(&self.path).unwrap();
        self.turn();
        self.turn();
        let mut greeting = vec![0; pesto::greeting(ALL, &self.published.tables()).len()];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, pesto::greeting(ALL, &self.published.tables()));
        client
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn silent_and_slow_clients_hold_up_no_other() {
    let mut server = Server::new("slow");
    let message = pesto::update(&tables("80,81", "none"));
    let silent = server.client();
    let mut slow = server.client();
    for byte in &message[..message.len() - 1] {
        slow.write_all(&[*byte]).unwrap();
        server.turn();
    }
    let mut quick = server.client();
    quick.write_all(&pesto::update(&tables("80,82", "none"))).unwrap();
    server.turn();
    assert_eq!(server.notes.take(), ["+tcp 82"]);
    slow.write_all(&[0]).unwrap();
    server.turn();
    assert_eq!((server.notes.take(), server.clients.0.len()), (vec!["+tcp 81".into()], 1));
    drop(silent);
    server.turn();
    assert!(server.clients.0.is_empty());
}

#[test]
fn clients_have_a_bound_and_a_deadline() {
    let mut server = Server::new("many");
    let mut all: Vec<UnixStream> = (0..=MOST_CLIENTS).map(|_| server.client()).collect();
    assert_eq!(server.clients.0.len(), MOST_CLIENTS);
    assert_eq!(all[0].read(&mut [0]).unwrap(), 0, "the oldest gave way");
    server.clients.0.iter_mut().for_each(|client| client.until = Instant::now());
    server.turn();
    assert!(server.clients.0.is_empty());
    assert_eq!(all[1].read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_message_without_a_meaning_changes_nothing_and_ends_its_client() {
    let mut server = Server::new("garbage");
    for message in [&b"GET / HTTP/1.1"[..], &[1, 255, 255, 255, 255], &[0xff; 4096]] {
        let mut client = server.client();
        client.write_all(message).unwrap();
        server.turn();
        assert!(server.clients.0.is_empty(), "{message:?}");
    }
    // It has only looked, or has sent half a message.
    for half in [&[][..], &[1, 0, 0, 0, 2, 7]] {
        let mut client = server.client();
        client.write_all(half).unwrap();
        server.turn_if(!half.is_empty());
        drop(client);
        server.turn();
        assert!(server.clients.0.is_empty());
    }
    assert!(server.notes.take().is_empty());
}

#[test]
fn a_path_that_a_process_serves_is_refused_and_one_that_is_left_is_taken() {
    let server = Server::new("taken");
    let refused = Socket::bind(&server.path).err().unwrap().to_string();
    assert!(refused.contains("another process serves it"), "{refused}");
    let path = server.path.with_extension("left");
    drop(UnixListener::bind(&path).unwrap());
    assert!(Socket::bind(&path).is_ok());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "kept").unwrap();
    assert!(Socket::bind(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"kept");
    std::fs::remove_file(&path).unwrap();
}
