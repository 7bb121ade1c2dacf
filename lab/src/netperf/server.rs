//! netserver: one thread per client, which speaks the control protocol and conducts the tests.
//!
//! A client is not trusted. Their number is bounded, every wait has an end, messages and rings have
//! a largest size, a file is read only if the user of this server allows it, and datagrams go to
//! no address but the client's own. What a client does wrong ends its connection with a
//! sentence; it never ends the server.

use super::control;
use super::job::{Done, Job, Opened};
use super::message::{
    Body, Calibration, ConnectResponse, ConnectResults, Empty, Message, OmniRequest, OmniResponse,
    OmniResults, StreamResponse, StreamResults, UNKNOWN_TEST, flag, kind,
};
use super::meter::{self, METHOD_PROC_STAT};
use super::socket::{Tuning, accept, is_tick, listen};
use crate::sys;
use fulmar::{Stack, TcpListener, TcpStream};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a control connection may be without a request. netperf asks at once.
const IDLE: Duration = Duration::from_secs(120);

/// Receives the messages of the server, one sentence each.
pub type Say = dyn Fn(&str) + Send + Sync;

/// Settings of the server.
#[derive(Clone)]
pub struct Rules {
    /// Clients at once; more are turned away.
    pub max_clients: usize,
    /// Clients may name files to fill the buffers from, which they then receive.
    pub may_read_files: bool,
    /// Where sentences go.
    pub say: Arc<Say>,
}

/// A server that listens.
pub struct Server {
    stack: Stack,
    listener: TcpListener,
    rules: Rules,
}

impl Server {
    /// Listens for clients at `at`.
    ///
    /// # Errors
    /// The port is taken.
    pub fn bind(stack: Stack, at: SocketAddr, rules: Rules) -> io::Result<Server> {
        let listener = listen(&stack, at)?;
        Ok(Server { stack, listener, rules })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop`; running tests are then ended, and no thread is left.
    ///
    /// # Errors
    /// The listener failed.
    pub fn run(&self, stop: &Arc<AtomicBool>) -> io::Result<()> {
        let mut clients: Vec<JoinHandle<()>> = Vec::new();
        let outcome = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(());
            }
            clients.retain(|c| !c.is_finished());
            match accept(&self.listener, &Tuning::default()) {
                Ok((control, peer)) => {
                    clients.extend(self.welcome(control, peer, clients.len(), stop))
                }
                Err(e) if is_tick(&e) => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => break Err(e),
            }
        };
        for client in clients {
            let _ = client.join();
        }
        outcome
    }

    fn welcome(
        &self,
        control: TcpStream,
        peer: SocketAddr,
        clients: usize,
        stop: &Arc<AtomicBool>,
    ) -> Option<JoinHandle<()>> {
        let say = self.rules.say.clone();
        if clients >= self.rules.max_clients {
            say(&format!("rejected {peer}: {clients} clients are connected"));
            return None;
        }
        let client = Client {
            control,
            peer: peer.ip().to_canonical(),
            stack: self.stack.clone(),
            rules: self.rules.clone(),
            stop: stop.clone(),
        };
        let serve = move || {
            if let Err(e) = client.serve() {
                (client.rules.say)(&format!("the test with {peer} ended: {e}"));
            }
        };
        let thread = std::thread::Builder::new().name("netserver".into()).spawn(serve);
        thread.map_err(|e| say(&format!("rejected {peer}: cannot start a thread: {e}"))).ok()
    }
}

/// One client and its control connection.
struct Client {
    control: TcpStream,
    peer: IpAddr,
    stack: Stack,
    rules: Rules,
    stop: Arc<AtomicBool>,
}

impl Client {
    fn serve(&self) -> io::Result<()> {
        while let Some(request) = control::receive(&self.control, IDLE, &self.stop)? {
            self.pin(request.second());
            match request.kind() {
                kind::OMNI => self.omni(&request)?,
                kind::STREAM => self.stream(&request)?,
                kind::CONNECT => self.connect(&request)?,
                kind::DEBUG_ON | kind::DEBUG_OFF => self.answer(kind::DEBUG_OK, &Empty)?,
                kind::CPU_CALIBRATE => {
                    let cpus = meter::cpus();
                    self.answer(kind::CPU_CALIBRATE, &Calibration { rate: meter::rate(), cpus })?;
                }
                kind::PASSPHRASE => {}
                other => {
                    (self.rules.say)(&format!(
                        "{} sent an unsupported request ({other})",
                        self.peer
                    ));
                    self.fail(other, UNKNOWN_TEST)?;
                }
            }
        }
        Ok(())
    }

    /// A test runs unpinned if the CPU does not exist.
    fn pin(&self, cpu: u32) {
        if cpu != u32::MAX && sys::pin_to(cpu as usize).is_err() {
            (self.rules.say)(&format!("{} requested CPU {cpu}, which is not available", self.peer));
        }
    }

    fn answer(&self, kind: u32, body: &impl Body) -> io::Result<()> {
        control::send(&self.control, &Message::new(kind, 0, body))
    }

    fn fail(&self, kind: u32, errno: u32) -> io::Result<()> {
        control::send(&self.control, &Message::new(kind, errno, &Empty))
    }

    /// Runs a step of a test; if it fails, the client gets the errno.
    fn step<T>(&self, kind: u32, step: io::Result<T>) -> io::Result<T> {
        step.inspect_err(|e| {
            let errno = e.raw_os_error().and_then(|n| u32::try_from(n).ok());
            // The caller reports this failure already; an error of the report itself is ignored.
            let _ = self.fail(kind, errno.unwrap_or(errno_of(e.kind())));
        })
    }

    fn open(&self, kind: u32, job: io::Result<Job>) -> io::Result<(Job, Opened, u16)> {
        let mut job = self.step(kind, job)?;
        if job.fill.is_some() && !self.rules.may_read_files {
            job.fill = None;
        }
        let opened = self.step(kind, job.open(&self.stack))?;
        let port = self.step(kind, opened.port())?;
        Ok((job, opened, port))
    }

    fn run(&self, kind: u32, job: &Job, opened: Opened) -> io::Result<Done> {
        self.step(kind, opened.run(job, self.peer, &self.stop))
    }

    fn omni(&self, request: &Message) -> io::Result<()> {
        let asked: OmniRequest = request.body();
        let (job, opened, port) = self.open(kind::OMNI_RESPONSE, Job::from_omni(&asked))?;
        let granted = flag::NODELAY | flag::PER_CONNECTION | flag::MEASURE_CPU;
        self.answer(
            kind::OMNI_RESPONSE,
            &OmniResponse {
                recv_buffer: signed(opened.buffers.recv),
                recv_bytes: if job.receives.is_some() {
                    word(opened.receiving.bytes())
                } else {
                    asked.recv_bytes
                },
                recv_width: signed(opened.receiving.width()),
                send_buffer: signed(opened.buffers.send),
                send_bytes: if job.sends.is_some() {
                    word(opened.sending.bytes())
                } else {
                    asked.send_bytes
                },
                send_width: signed(opened.sending.width()),
                flags: asked.flags & granted,
                cpu_rate: if job.measures_cpu { meter::rate() } else { 0.0 },
                length: asked.length,
                data_port: port.into(),
                priority: asked.priority,
                tos: asked.tos,
                ..OmniResponse::default()
            },
        )?;
        let done = self.run(kind::OMNI_RESULTS, &job, opened)?;
        self.answer(kind::OMNI_RESULTS, &omni_results(&done))
    }

    fn stream(&self, request: &Message) -> io::Result<()> {
        let job = Job::from_stream(&request.body());
        let (job, opened, port) = self.open(kind::STREAM_RESPONSE, job)?;
        self.answer(
            kind::STREAM_RESPONSE,
            &StreamResponse {
                recv_buffer: signed(opened.buffers.recv),
                recv_bytes: word(opened.receiving.bytes()),
                nodelay: job.tuning.nodelay.into(),
                measure_cpu: job.measures_cpu.into(),
                send_buffer: signed(opened.buffers.send),
                data_port: port.into(),
                cpu_rate: if job.measures_cpu { meter::rate() } else { 0.0 },
                ..StreamResponse::default()
            },
        )?;
        let done = self.run(kind::STREAM_RESULTS, &job, opened)?;
        self.answer(
            kind::STREAM_RESULTS,
            &StreamResults {
                bytes_received: done.tally.bytes_received as f64,
                recv_calls: word(done.tally.recv_calls),
                elapsed: done.usage.elapsed.as_secs_f32(),
                cpu_percent: done.usage.cpu_percent as f32,
                service_demand: 0.0,
                cpu_method: METHOD_PROC_STAT,
                cpus: meter::cpus(),
                recv_buffer: signed(done.buffers.recv),
                send_buffer: signed(done.buffers.send),
            },
        )
    }

    fn connect(&self, request: &Message) -> io::Result<()> {
        let job = Job::from_connect(&request.body());
        let (job, opened, port) = self.open(kind::CONNECT_RESPONSE, job)?;
        self.answer(
            kind::CONNECT_RESPONSE,
            &ConnectResponse {
                recv_buffer: signed(opened.buffers.recv),
                nodelay: job.tuning.nodelay.into(),
                measure_cpu: job.measures_cpu.into(),
                send_buffer: signed(opened.buffers.send),
                data_port: port.into(),
                cpu_rate: if job.measures_cpu { meter::rate() } else { 0.0 },
                ..ConnectResponse::default()
            },
        )?;
        let done = self.run(kind::CONNECT_RESULTS, &job, opened)?;
        self.answer(
            kind::CONNECT_RESULTS,
            &ConnectResults {
                transactions: word(done.tally.transactions),
                elapsed: done.usage.elapsed.as_secs_f32(),
                cpu_percent: done.usage.cpu_percent as f32,
                cpu_method: METHOD_PROC_STAT,
                cpus: meter::cpus(),
                ..ConnectResults::default()
            },
        )
    }
}

fn omni_results(done: &Done) -> OmniResults {
    let (tally, usage) = (&done.tally, &done.usage);
    OmniResults {
        bytes_received: tally.bytes_received,
        recv_calls: word(tally.recv_calls),
        recv_buffer: signed(done.buffers.recv),
        bytes_sent: tally.bytes_sent,
        send_calls: word(tally.send_calls),
        send_buffer: signed(done.buffers.send),
        failed_sends: word(tally.failed_sends),
        transactions: word(tally.transactions),
        elapsed: usage.elapsed.as_secs_f32(),
        cpu_percent: usage.cpu_percent as f32,
        user_percent: usage.user_percent as f32,
        system_percent: usage.system_percent as f32,
        iowait_percent: usage.iowait_percent as f32,
        irq_percent: usage.irq_percent as f32,
        softirq_percent: usage.softirq_percent as f32,
        service_demand: 0.0,
        cpu_method: METHOD_PROC_STAT,
        cpus: meter::cpus(),
        peak_cpu: signed(usage.peak.0),
        peak_percent: usage.peak.1 as f32,
        retransmits: done.retransmits.map_or(-1, signed),
        ..OmniResults::default()
    }
}

/// A count for a word of 32 bits, at most the largest.
fn word(n: impl TryInto<u32>) -> u32 {
    n.try_into().unwrap_or(u32::MAX)
}

fn signed(n: impl TryInto<i32>) -> i32 {
    n.try_into().unwrap_or(i32::MAX)
}

/// The errno for errors that are not from the system.
fn errno_of(error: io::ErrorKind) -> u32 {
    (match error {
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        io::ErrorKind::AddrInUse => libc::EADDRINUSE,
        io::ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
        io::ErrorKind::ConnectionReset => libc::ECONNRESET,
        io::ErrorKind::BrokenPipe => libc::EPIPE,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    })
    .unsigned_abs()
}
