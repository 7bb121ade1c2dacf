//! Fetches a file by HTTP, with a progress bar.
//!
//! ```text
//! cargo run --example download -- link                     # a server in the same process
//! cargo run --example download -- tap:fulmar0 http://10.77.0.1:8000/file out.bin
//!     # as root; the kernel's end, in another terminal:
//!     ip addr add 10.77.0.1/24 dev fulmar0 && ip link set fulmar0 up
//!     python3 -m http.server 8000
//! cargo run --example download -- packet:eth0 http://example.org/ - 192.168.1.77/24
//! ```
//!
//! `-` as the file is standard output. Names are resolved by the system's resolver.

mod common;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use common::{Outcome, Place};
use fulmar::{Stack, TcpListener, TcpStream};
use indicatif::{ProgressBar, ProgressStyle};

/// Time without data after which the server counts as lost.
const PATIENCE: Duration = Duration::from_secs(30);
const DEMO_URL: &str = "http://10.77.0.1/demo";
const DEMO_BYTES: u64 = 64 << 20;
/// Longest header that is read; a longer one is an error.
const HEADER_BYTES: u64 = 64 << 10;

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (device, url, file, address) = match words[..] {
        ["link"] => ("link", DEMO_URL, "/dev/null", None),
        [device, url] => (device, url, "-", None),
        [device, url, file] => (device, url, file, None),
        [device, url, file, address] => (device, url, file, Some(address)),
        _ => {
            let usage = "usage: download link, or download DEVICE URL [FILE [ADDRESS/PREFIX]]";
            return Err(format!("{usage}\n\n{}", common::DEVICE_HELP).into());
        }
    };
    let url = Url::parse(url)?;
    let stack = match common::open(device, address)? {
        Place::Network(stack) => stack,
        Place::Demo(stack, peer) => {
            let listener = TcpListener::bind(&peer, ("::", url.port))?;
            // The thread ends with the link, when the client has closed.
            thread::spawn(move || serve(&listener).is_ok());
            stack
        }
    };
    let mut out: Box<dyn Write> = match file {
        "-" => Box::new(io::stdout().lock()),
        name => Box::new(File::create(name).map_err(|e| format!("cannot write {name}: {e}"))?),
    };
    download(&stack, &url, &mut *out)
}

/// The parts of `http://HOST[:PORT]/PATH`.
struct Url<'a> {
    host: &'a str,
    port: u16,
    path: &'a str,
}

impl<'a> Url<'a> {
    fn parse(text: &'a str) -> Outcome<Url<'a>> {
        let wrong = || format!("invalid URL `{text}`: expected http://HOST[:PORT]/PATH");
        let rest = text.strip_prefix("http://").ok_or_else(wrong)?;
        let at = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(at);
        let (host, port) = match authority.rsplit_once(':') {
            // The colons inside `[fd77::1]` do not separate a port.
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong())?)
            }
            _ => (authority, 80),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong().into());
        }
        Ok(Url { host, port, path: if path.is_empty() { "/" } else { path } })
    }
}

fn download(stack: &Stack, url: &Url, out: &mut dyn Write) -> Outcome {
    let mut stream = TcpStream::connect(stack, (url.host, url.port))
        .map_err(|e| format!("cannot connect to {} port {}: {e}", url.host, url.port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request = format!("GET {} HTTP/1.0\r\nHost: {}\r\n\r\n", url.path, url.host);
    stream.write_all(request.as_bytes())?;
    let mut reader = BufReader::with_capacity(256 << 10, stream);
    let expected = read_header(&mut reader)?;
    let bar = progress(expected);
    let start = Instant::now();
    let mut total = 0;
    loop {
        let bytes = reader.fill_buf().map_err(|e| format!("after {total} bytes: {e}"))?;
        if bytes.is_empty() {
            break;
        }
        out.write_all(bytes)?;
        let n = bytes.len();
        total += n as u64;
        bar.inc(n as u64);
        reader.consume(n);
    }
    out.flush()?;
    bar.finish();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{total} bytes in {seconds:.2} s: {:.0} MB/s", total as f64 / seconds / 1e6);
    match expected {
        Some(expected) if expected != total => {
            Err(format!("the server announced {expected} bytes and sent {total}").into())
        }
        _ => Ok(()),
    }
}

/// Reads up to the empty line; returns the content length if the header has it.
fn read_header(reader: &mut impl BufRead) -> Outcome<Option<u64>> {
    let mut lines = reader.take(HEADER_BYTES).lines();
    let status = lines.next().ok_or("the server closed without an answer")??;
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!("the server answered: {status}").into());
    }
    let mut length = None;
    for line in lines {
        let line = line?;
        match line.split_once(':') {
            None if line.is_empty() => return Ok(length),
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.trim().parse().ok();
            }
            _ => {}
        }
    }
    Err("the header of the answer is too long or incomplete".into())
}

fn progress(expected: Option<u64>) -> ProgressBar {
    let Some(bytes) = expected else { return ProgressBar::new_spinner() };
    let template = "{bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// The server for `link`: the same bytes for every path.
fn serve(listener: &TcpListener) -> Outcome {
    loop {
        let (stream, _) = listener.accept()?;
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        while reader.by_ref().take(HEADER_BYTES).read_line(&mut line)? > 2 {
            line.clear();
        }
        let mut stream = reader.into_inner();
        write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {DEMO_BYTES}\r\n\r\n")?;
        let block = vec![b'.'; 128 << 10];
        for _ in 0..DEMO_BYTES / block.len() as u64 {
            stream.write_all(&block)?;
        }
    }
}
