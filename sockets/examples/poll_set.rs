//! A chat on one thread: each line of a client is sent to all others. One poll set has the connections, the terminal
//! and a waker for another thread.
//!
//! ```text
//! cargo run --example poll_set -- link             # with three clients in this process
//! cargo run --example poll_set -- fulmar0          # in a shell of `fulmar sandbox`; lines typed here are sent
//!     # to all clients, end of input ends the chat. Join from another shell of that sandbox:
//!     nc 10.77.0.2 7000
//! ```

mod common;

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use common::{Outcome, Place};
use fulmar::{PollSet, Ready, Stack, TcpListener, TcpStream};

const PORT: u16 = 7000;
/// Tokens of the sources other than connections; the tokens of connections start at `FIRST`.
const LISTENER: usize = 0;
const STOP: usize = 1;
const TERMINAL: usize = 2;
const FIRST: usize = 3;
/// Bytes that may be queued for a client.
const MOST_UNSENT: usize = 64 * 1024;

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let [device] = arguments else {
        return Err(format!("usage: poll_set DEVICE\n\n{}", common::DEVICE_HELP).into());
    };
    match common::open(device, None)? {
        Place::Demo(stack, peer) => demo(&stack, peer),
        Place::Network(stack) => {
            let mut chat = Chat::new(&stack)?;
            chat.set.add_fd(io::stdin(), TERMINAL, Ready::READABLE)?;
            println!("chat on port {PORT}; end of input ends it");
            chat.run()
        }
    }
}

/// Three clients on the other stack; each sends one line and receives the lines of all.
fn demo(stack: &Stack, peer: Stack) -> Outcome {
    let mut chat = Chat::new(stack)?;
    let own: fulmar::Cidr = common::OURS.parse()?;
    // Any thread can end a wait on the set.
    let waker = chat.set.waker(STOP);
    let clients = thread::spawn(move || {
        let heard = talk(&peer, SocketAddr::new(own.address, PORT));
        waker.wake();
        heard
    });
    chat.run()?;
    let heard = clients.join().map_err(|_| "the clients panicked")??;
    print!("{heard}");
    Ok(())
}

fn talk(stack: &Stack, to: SocketAddr) -> io::Result<String> {
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect_timeout(stack, &to, Duration::from_secs(10))?;
        // After the greeting the client receives all lines.
        client.read_exact(&mut [0; b"welcome\n".len()])?;
        clients.push(client);
    }
    for (n, client) in clients.iter_mut().enumerate() {
        client.write_all(format!("line {n}\n").as_bytes())?;
    }
    let mut heard = vec![0; "line n\n".len() * clients.len()];
    let mut last = String::new();
    for client in &mut clients {
        client.read_exact(&mut heard)?;
        last = String::from_utf8_lossy(&heard).into_owned();
    }
    Ok(last)
}

struct Member {
    stream: TcpStream,
    /// Bytes queued for the connection.
    unsent: Vec<u8>,
}

struct Chat {
    set: PollSet,
    listener: TcpListener,
    members: HashMap<usize, Member>,
    next_token: usize,
}

impl Chat {
    fn new(stack: &Stack) -> io::Result<Chat> {
        let listener = TcpListener::bind(stack, ("::", PORT))?;
        listener.set_nonblocking(true)?;
        let set = stack.poll_set()?;
        set.add(&listener, LISTENER, Ready::READABLE)?;
        Ok(Chat { set, listener, members: HashMap::new(), next_token: FIRST })
    }

    fn run(&mut self) -> Outcome {
        let mut events = Vec::new();
        loop {
            // This thread runs the stack while it waits here.
            self.set.wait(&mut events, None)?;
            for event in &events {
                match event.token {
                    LISTENER => self.accept()?,
                    STOP => return Ok(()),
                    TERMINAL => {
                        // As large as std's buffer, so that no input stays in it.
                        let mut bytes = [0; 8192];
                        match io::stdin().read(&mut bytes)? {
                            0 => return Ok(()),
                            n => self.say(&bytes[..n]),
                        }
                    }
                    token => self.serve(token, event.ready),
                }
            }
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let (stream, _) = match self.listener.accept() {
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                accepted => accepted?,
            };
            stream.set_nonblocking(true)?;
            let token = self.next_token;
            self.next_token += 1;
            self.set.add(&stream, token, Ready::READABLE)?;
            let unsent = b"welcome\n".to_vec();
            self.members.insert(token, Member { stream, unsent });
            self.send(token);
        }
    }

    /// End of stream and errors are reported as readable; the read returns them.
    fn serve(&mut self, token: usize, ready: Ready) {
        if ready.is_writable() {
            self.send(token);
        }
        if !ready.is_readable() {
            return;
        }
        let mut bytes = [0; 4096];
        let Some(member) = self.members.get_mut(&token) else { return };
        match member.stream.read(&mut bytes) {
            Ok(n @ 1..) => self.say(&bytes[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // Dropping the connection removes it from the set.
            Ok(_) | Err(_) => drop(self.members.remove(&token)),
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let tokens: Vec<usize> = self.members.keys().copied().collect();
        for token in tokens {
            if let Some(member) = self.members.get_mut(&token) {
                member.unsent.extend_from_slice(bytes);
            }
            self.send(token);
        }
    }

    /// Sends the bytes that fit, and registers for writability if bytes remain.
    fn send(&mut self, token: usize) {
        let Some(member) = self.members.get_mut(&token) else { return };
        let had = member.unsent.len();
        let sent = match member.stream.write(&member.unsent) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => had,
            Ok(n) => n,
        };
        member.unsent.drain(..sent);
        let interest = match member.unsent.is_empty() {
            true => Ready::READABLE,
            false => Ready::READABLE | Ready::WRITABLE,
        };
        let is_told = self.set.modify(&member.stream, token, interest).is_ok();
        if !is_told || member.unsent.len() > MOST_UNSENT {
            self.members.remove(&token);
        }
    }
}
