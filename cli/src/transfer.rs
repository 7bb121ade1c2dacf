//! `fulmar send` and `fulmar recv`: a file as plain bytes over one connection. The end of the stream is the end of the
//! file, so that the other side can be any program that reads or writes a socket. Both print the SHA-256 of the bytes.
//!
//! The end of the stream means that the file is whole. An earlier failure resets the connection (RFC 9293 section
//! 3.10.5: ABORT), so that the other side fails as well: the file cannot be read or written, its size has changed since
//! the start, or the user ends the command.

use crate::device::{Role, Session, StackArgs, TcpArgs};
use crate::failure::{During, Failure, Outcome};
use crate::format;
use crate::interrupt::end_in_order;
use crate::nc::{connect_any, is_timeout};
use crate::resolve::{Family, host_and_port, resolve};
use fulmar::stat::Counter;
use fulmar::zero_copy::{RecvBuf, ZeroCopy};
use fulmar::{Stack, TcpListener, TcpStream};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

/// Bytes per read and write: large enough that the cost per call does not show.
const CHUNK_BYTES: usize = 128 * 1024;
/// Bytes of a file per call: half the send buffer, so that one half is in flight while the other is summed.
const SLICE_BYTES: u64 = 512 * 1024;
/// Buffers of a receiver: one is filled while the other is written to the file.
const POSTED_BUFFERS: usize = 2;
/// Bytes of each buffer: large, to spread the fixed cost of a buffer.
const POSTED_BYTES: usize = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a peer that has acknowledged everything may still reset the connection.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);

/// Send a file over TCP, with progress, rate and SHA-256
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  on a Linux peer:   nc -l 5001 > copy
                     (or `socat -u TCP-LISTEN:5001 - > copy`)
  here:              fulmar send FILE 10.77.0.1:5001")]
pub struct SendArgs {
    /// The file to send; - is standard input
    file: PathBuf,
    /// Address of the listening receiver
    #[arg(value_name = "HOST:PORT", value_parser = host_and_port)]
    to: (String, u16),
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    tcp: TcpArgs,
    #[command(flatten)]
    stack: StackArgs,
}

/// Receive a file over TCP, with progress, rate and SHA-256
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar recv [OPTIONS] <FILE> -l <PORT>
       fulmar recv [OPTIONS] <FILE> <HOST:PORT>",
    after_help = "Examples:
  here:              fulmar recv copy -l 5001
  on a Linux peer:   nc -N 10.77.0.2 5001 < FILE"
)]
pub struct RecvArgs {
    /// The file to write; - is standard output
    file: PathBuf,
    /// Address of the listening sender; or use -l
    #[arg(value_name = "HOST:PORT", value_parser = host_and_port)]
    from: Option<(String, u16)>,
    /// Listen for the sender on this port
    #[arg(short, long, value_name = "PORT", conflicts_with = "from")]
    listen: Option<u16>,
    /// Fail unless the received data has this SHA-256
    #[arg(long, value_name = "HEX", value_parser = sha256)]
    sha256: Option<String>,
    /// For comparison: read by copy instead of into posted buffers
    #[arg(long)]
    no_posted: bool,
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    tcp: TcpArgs,
    #[command(flatten)]
    stack: StackArgs,
}

/// Bytes, time and digest of a transfer.
struct Tally {
    bytes: u64,
    started: Instant,
    hash: Sha256,
    bar: ProgressBar,
}

impl Tally {
    /// `expected` bytes, if that is known. The bar draws only on a terminal.
    fn new(expected: Option<u64>) -> Tally {
        let (bar, template) = match expected {
            Some(n) => {
                (ProgressBar::new(n), "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")
            }
            None => (ProgressBar::new_spinner(), "{spinner} {bytes} {binary_bytes_per_sec}"),
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Tally { bytes: 0, started: Instant::now(), hash: Sha256::new(), bar }
    }

    fn add(&mut self, chunk: &[u8]) {
        self.bytes += chunk.len() as u64;
        self.hash.update(chunk);
        self.bar.set_position(self.bytes);
    }

    fn digest(&self) -> String {
        format::hex(&self.hash.clone().finalize())
    }

    /// The closing lines on standard error; standard output may carry the bytes.
    fn report(&self, verb: &str) {
        self.bar.finish_and_clear();
        let elapsed = self.started.elapsed();
        eprintln!(
            "{verb} {} bytes ({}) in {:.3} s, {}\nsha256 {}",
            self.bytes,
            format::bytes(self.bytes),
            elapsed.as_secs_f64(),
            format::rate(self.bytes, elapsed),
            self.digest()
        );
    }
}

/// Copies until the end of `from`.
fn copy(from: &mut dyn Read, to: &mut dyn Write, tally: &mut Tally) -> Result<(), CopyError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = match from.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(CopyError::Read(e)),
        };
        to.write_all(&chunk[..n]).map_err(CopyError::Write)?;
        tally.add(&chunk[..n]);
    }
}

/// Receives into buffers that are posted ahead and writes them to the file in place: while one is written the other is
/// filled.
fn receive(from: &TcpStream, to: &mut dyn Write, tally: &mut Tally) -> Result<(), CopyError> {
    let post = |buffer| from.recv_posted(buffer).map_err(|e| CopyError::Read(e.error));
    let mut under_way = VecDeque::new();
    for _ in 0..POSTED_BUFFERS {
        let buffer = RecvBuf::try_with_capacity(POSTED_BYTES);
        under_way.push_back(post(buffer.map_err(|e| CopyError::Read(io::Error::other(e)))?)?);
    }
    while let Some(first) = under_way.pop_front() {
        let buffer = first.wait().map_err(|e| CopyError::Read(e.error))?;
        if buffer.is_empty() {
            break;
        }
        to.write_all(&buffer).map_err(CopyError::Write)?;
        tally.add(&buffer);
        under_way.push_back(post(buffer)?);
    }
    Ok(())
}

/// Sends the `expected` bytes of a file from its own pages and sums the sent bytes, which are in memory by then.
fn send_file(
    file: &File,
    expected: u64,
    to: &TcpStream,
    tally: &mut Tally,
) -> Result<(), CopyError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    while tally.bytes < expected {
        let at = tally.bytes;
        let end = at.saturating_add(SLICE_BYTES).min(expected);
        let n = match to.send_file(file, at..end, &[], &[]) {
            Ok(0) => return Err(resized(file, expected)),
            Ok(n) => n,
            Err(e) => {
                tally.bytes += e.sent;
                return Err(CopyError::Write(e.error));
            }
        };
        while tally.bytes < at + n {
            let left = (at + n - tally.bytes).min(CHUNK_BYTES as u64) as usize;
            let part = &mut chunk[..left];
            if let Err(e) = file.read_exact_at(part, tally.bytes) {
                // These were sent, though not all of them are in the sum.
                tally.bytes = at + n;
                return Err(match e.kind() {
                    io::ErrorKind::UnexpectedEof => resized(file, expected),
                    _ => CopyError::Read(e),
                });
            }
            tally.add(part);
        }
    }
    check_size(file, expected)
}

/// A file that is longer (or shorter) now was not sent whole.
fn check_size(file: &File, expected: u64) -> Result<(), CopyError> {
    match file.metadata().map_err(CopyError::Read)?.len() {
        found if found == expected => Ok(()),
        found => Err(CopyError::Resized { expected, found }),
    }
}

/// The file has ended before its size.
fn resized(file: &File, expected: u64) -> CopyError {
    let found = file.metadata().map(|m| m.len());
    found.map_or_else(CopyError::Read, |found| CopyError::Resized { expected, found })
}

/// Which side of a copy failed.
#[derive(Debug)]
enum CopyError {
    Read(io::Error),
    Write(io::Error),
    /// The file to be read had this number of bytes at the start, and has another number now.
    Resized {
        expected: u64,
        found: u64,
    },
}

impl CopyError {
    fn failure(&self, read: &str, write: &str, tally: &Tally) -> Failure {
        tally.bar.abandon();
        let (what, error) = match self {
            CopyError::Read(e) => (read, e),
            CopyError::Write(e) => (write, e),
            CopyError::Resized { expected, found } => {
                return Failure::new(format!(
                    "{read} after {} bytes: its size changed from {expected} to {found} bytes; send it again when \
                     it no longer changes",
                    tally.bytes
                ));
            }
        };
        Failure::io(format_args!("{what} after {} bytes", tally.bytes), error)
    }

    /// The same for a receiver, which also says what is left in `file`.
    fn failure_of_receiver(&self, file: &Path, tally: &Tally) -> Failure {
        let failure =
            self.failure("cannot receive", &format!("cannot write {}", file.display()), tally);
        let place =
            if is_standard(file) { "the output".into() } else { file.display().to_string() };
        Failure::new(format!("{failure}; {place} is incomplete; do not use it"))
    }
}

fn is_standard(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Where the bytes come from.
enum Source {
    /// A file that has a size: it, and when it was last written to.
    File(File, u64, Option<SystemTime>),
    /// Standard input, a pipe, a device.
    Stream(Box<dyn Read>),
}

fn open_source(file: &Path) -> Outcome<(Source, Option<u64>)> {
    if is_standard(file) {
        return Ok((Source::Stream(Box::new(io::stdin())), None));
    }
    let failed = |e| Failure::file("cannot read", file, &e);
    let open = File::open(file).map_err(failed)?;
    let about = open.metadata().map_err(failed)?;
    if about.is_dir() {
        return Err(failed(io::Error::from_raw_os_error(libc::EISDIR)));
    }
    // Those of /proc have no size, but bytes.
    if about.is_file() && about.len() > 0 {
        let bytes = about.len();
        return Ok((Source::File(open, bytes, about.modified().ok()), Some(bytes)));
    }
    Ok((Source::Stream(Box::new(open)), None))
}

impl Source {
    fn send(&mut self, to: &mut TcpStream, tally: &mut Tally) -> Result<(), CopyError> {
        match self {
            Source::File(file, expected, _) => send_file(file, *expected, to, tally),
            Source::Stream(from) => copy(from, to, tally),
        }
    }

    /// A file is read once to be sent and once for its sum.
    fn has_changed(&self) -> bool {
        match self {
            Source::File(file, _, before) => {
                file.metadata().and_then(|m| m.modified()).ok() != *before
            }
            Source::Stream(_) => false,
        }
    }
}

fn open_sink(file: &Path) -> Outcome<Box<dyn Write>> {
    if is_standard(file) {
        return Ok(Box::new(io::stdout()));
    }
    let open = File::create(file).map_err(|e| Failure::file("cannot write", file, &e))?;
    Ok(Box::new(open))
}

/// Runs `fulmar send`.
pub fn send(args: &SendArgs) -> Outcome<ExitCode> {
    let (mut source, expected) = open_source(&args.file)?;
    let (host, port) = &args.to;
    let addresses = resolve(host, *port, args.family)?;
    end_in_order()?;
    let session = args.stack.open_with(Role::Connects, &args.tcp)?;
    let mut stream = connect_any(&session, &addresses, None, CONNECT_TIMEOUT)?;
    let mut tally = Tally::new(expected);
    // Until all of it is accepted, an end of any kind is a reset, Ctrl-C included.
    stream.set_linger(Some(Duration::ZERO)).during("cannot set the linger time")?;
    source.send(&mut stream, &mut tally).map_err(|e| {
        let failure =
            e.failure(&format!("cannot send {}", args.file.display()), "cannot send", &tally);
        Failure::new(format!("{failure}; the connection was reset"))
    })?;
    stream.set_linger(None).during("cannot set the linger time")?;
    finish(&stream).during("the receiver did not confirm the end of the file")?;
    tally.report("sent");
    if source.has_changed() {
        eprintln!(
            "{} changed during the transfer, so the SHA-256 may differ from that of the received data; send it again",
            args.file.display()
        );
    }
    drop(stream);
    session.close();
    Ok(ExitCode::SUCCESS)
}

/// Ends sending and waits until the peer has everything, which the peer's FIN shows. A peer that keeps its side open
/// has everything once all is acknowledged, and has [`RESET_TIMEOUT`] to reset the connection.
fn finish(mut stream: &TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(RESET_TIMEOUT))?;
    let mut rest = [0; 4096];
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(e) if !is_timeout(&e) => return Err(e),
            Err(_) => {
                let tcp = stream.info()?;
                if tcp.send_queue_bytes == 0 && tcp.in_flight_bytes == 0 {
                    return Ok(());
                }
            }
        }
    }
}

/// Runs `fulmar recv`.
pub fn recv(args: &RecvArgs) -> Outcome<ExitCode> {
    if args.from.is_none() && args.listen.is_none() {
        return Err(Failure::new(
            "missing sender: give -l PORT to listen for it, or HOST:PORT to connect to it",
        ));
    }
    let mut sink = open_sink(&args.file)?;
    end_in_order()?;
    let role = if args.listen.is_some() { Role::Listens } else { Role::Connects };
    let session = args.stack.open_with(role, &args.tcp)?;
    let mut stream = reach_sender(args, &session)?;
    // A receiver that fails must not look like one that has everything.
    stream.set_linger(Some(Duration::ZERO)).during("cannot set the linger time")?;
    let mut tally = Tally::new(None);
    let copied = match args.no_posted {
        true => copy(&mut stream, &mut sink, &mut tally),
        false => receive(&stream, &mut sink, &mut tally),
    };
    let copied = copied.and_then(|()| sink.flush().map_err(CopyError::Write));
    copied.map_err(|e| e.failure_of_receiver(&args.file, &tally))?;
    stream.set_linger(None).during("cannot set the linger time")?;
    drop(stream);
    tally.report("received");
    print_method(session.stack(), args);
    session.close();
    check_digest(args.sha256.as_deref(), &tally.digest())
}

/// Prints the calls that received the bytes, and the number of bytes that the device placed in the buffers.
fn print_method(stack: &Stack, args: &RecvArgs) {
    let Ok(stat) = stack.stat() else { return };
    // The device moves other bytes, or the stack copies them.
    let copied = stat.count(Counter::CopiedBytes) + stat.count(Counter::PlaceMissBytes);
    let [placed, copied] = [stat.count(Counter::PlacedBytes), copied].map(format::bytes);
    if args.no_posted {
        eprintln!("read by copy: {copied} copied");
    } else {
        eprintln!("into posted buffers: {placed} placed by the device, {copied} copied");
    }
}

fn reach_sender(args: &RecvArgs, session: &Session) -> Outcome<TcpStream> {
    if let Some((host, port)) = &args.from {
        let addresses = resolve(host, *port, args.family)?;
        return connect_any(session, &addresses, None, CONNECT_TIMEOUT);
    }
    let local = SocketAddr::new(args.family.unspecified(), args.listen.unwrap_or_default());
    let listener = TcpListener::bind(session.stack(), local)
        .during(format_args!("cannot listen on {local}"))?;
    let (stream, _) = listener.accept().during("cannot accept a connection")?;
    Ok(stream)
}

/// A SHA-256 as sha256sum(1) prints it.
fn sha256(text: &str) -> Result<String, String> {
    let is_sum = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if is_sum { Ok(text.to_owned()) } else { Err("expected 64 hexadecimal digits".into()) }
}

fn check_digest(expected: Option<&str>, found: &str) -> Outcome<ExitCode> {
    match expected {
        Some(hex) if !hex.eq_ignore_ascii_case(found) => Err(Failure::new(format!(
            "the received data has the SHA-256 {found}, expected {hex}; receive it again"
        ))),
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_counts_and_hashes_every_byte() {
        let source = vec![7u8; 3 * CHUNK_BYTES + 1];
        let (mut sink, mut tally) = (Vec::new(), Tally::new(None));
        copy(&mut source.as_slice(), &mut sink, &mut tally).unwrap();
        assert_eq!((sink.len(), tally.bytes), (source.len(), source.len() as u64));
        assert_eq!(tally.digest(), format::hex(&Sha256::digest(&source)));
    }

    #[test]
    fn the_digest_of_abc_is_the_published_one() {
        let mut tally = Tally::new(Some(3));
        tally.add(b"abc");
        let published = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(tally.digest(), published);
        assert!(check_digest(Some(&published.to_uppercase()), &tally.digest()).is_ok());
        assert!(check_digest(Some("00"), &tally.digest()).is_err());
        assert!(check_digest(None, &tally.digest()).is_ok());
    }

    #[test]
    fn a_sum_has_64_hexadecimal_digits() {
        assert!(sha256(&"aB".repeat(32)).is_ok());
        for text in ["abcd", &"g".repeat(64), &"a".repeat(65), ""] {
            assert!(sha256(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_full_sink_is_the_writers_failure_with_the_byte_count() {
        let mut tally = Tally::new(None);
        let error = copy(&mut &[1u8; 10][..], &mut &mut [0u8; 4][..], &mut tally).unwrap_err();
        assert!(matches!(error, CopyError::Write(_)));
        let text = error.failure("cannot read", "cannot send", &tally).to_string();
        assert!(text.starts_with("cannot send after 0 bytes: "), "{text}");
    }

    #[test]
    fn a_changed_file_size_is_reported_with_both_sizes() {
        let tally = Tally::new(Some(9));
        let error = CopyError::Resized { expected: 9, found: 4 };
        let text = error.failure("cannot send f", "cannot send", &tally).to_string();
        assert!(text.contains("changed from 9 to 4 bytes"), "{text}");
        let text = CopyError::Read(io::Error::from_raw_os_error(libc::ECONNRESET))
            .failure_of_receiver(Path::new("copy"), &tally)
            .to_string();
        assert!(text.ends_with("copy is incomplete; do not use it"), "{text}");
    }

    #[test]
    fn a_file_without_a_size_is_read_as_a_stream() {
        let (source, expected) = open_source(Path::new("/proc/self/status")).unwrap();
        assert!(matches!(source, Source::Stream(_)) && expected.is_none());
    }

    #[test]
    fn a_missing_file_is_named() {
        let text = open_source(Path::new("/nonexistent/file")).err().unwrap().to_string();
        assert!(text.contains("/nonexistent/file") && text.contains("ENOENT"), "{text}");
    }
}
