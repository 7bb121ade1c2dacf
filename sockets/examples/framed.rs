//! Messages with a length prefix: each is read with two calls of `recv_with`, the body into the buffer of its tag.
//!
//! ```text
//! cargo run --release --example framed -- link          # both ends here: 10,000 blocks of 64 KiB
//! cargo run --release --example framed -- link 1000 4   # 1,000 blocks of 4 KiB
//! ```

mod common;

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSliceMut, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use common::{Outcome, Place};
use fulmar::tcp::RecvFlags;
use fulmar::{TcpListener, TcpStream};

const PORT: u16 = 2049;
/// Longest body that is accepted. The peer chooses the length: it is checked before memory is allocated.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Fills the buffer, or its start if the stream ends earlier.
fn fill(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        let rest = &mut [IoSliceMut::new(&mut buffer[got..])];
        match stream.recv_with(rest, RecvFlags::WAIT_ALL)? {
            0 => break,
            n => got += n,
        }
    }
    Ok(got)
}

/// Reads a message: tag and length of its body, both 32 bits, big-endian; then the body, into the buffer that
/// `buffer_of` returns for the tag. `None`: the stream has ended between two messages.
fn read_message(
    stream: &TcpStream,
    mut buffer_of: impl FnMut(u32) -> Option<Vec<u8>>,
) -> io::Result<Option<(u32, Vec<u8>)>> {
    let (mut tag, mut length) = ([0; 4], [0; 4]);
    match fill(stream, &mut tag)? {
        0 => return Ok(None),
        n if n + fill(stream, &mut length)? < 8 => return Err(ErrorKind::UnexpectedEof.into()),
        _ => {}
    }
    let (tag, bytes) = (u32::from_be_bytes(tag), u32::from_be_bytes(length) as usize);
    let buffer = buffer_of(tag).filter(|_| bytes <= MAX_BODY_BYTES);
    let mut body = buffer.ok_or(ErrorKind::InvalidData)?;
    body.resize(bytes, 0);
    if fill(stream, &mut body)? < bytes {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((tag, body)))
}

/// Header and body are sent in one write, so no segment contains only the header.
fn write_message(stream: &mut TcpStream, tag: u32, body: &[u8]) -> io::Result<()> {
    let length = body.len() as u32;
    stream.write_all(&[&tag.to_be_bytes()[..], &length.to_be_bytes(), body].concat())
}

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let Some((device, numbers)) = arguments.split_first().filter(|(d, _)| *d == "link") else {
        return Err("usage: framed link [BLOCKS [KIB]]".into());
    };
    let number = |at: usize, default| numbers.get(at).map_or(Ok(default), |text| text.parse());
    let (blocks, bytes) = (number(0, 10_000)?, (number(1, 64)? as usize) << 10);
    let Place::Demo(ours, peer) = common::open(device, None)? else {
        return Err("`link` is a demonstration".into());
    };
    let listener = TcpListener::bind(&peer, ("::", PORT))?;
    let server = thread::spawn(move || -> io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        (0..blocks)
            .rev()
            .try_for_each(|tag| write_message(&mut stream, tag, &vec![tag as u8; bytes]))
    });
    let stream = TcpStream::connect(&ours, ("10.77.0.1", PORT))?;
    let mut waiting: HashMap<u32, Vec<u8>> = (0..blocks).map(|tag| (tag, Vec::new())).collect();
    let start = Instant::now();
    while let Some((tag, body)) = read_message(&stream, |tag| waiting.remove(&tag))? {
        if body != vec![tag as u8; bytes] {
            return Err(format!("block {tag} has wrong bytes").into());
        }
    }
    let took = start.elapsed().as_secs_f64();
    server.join().map_err(|_| "the server failed")??;
    println!("{blocks} blocks of {bytes} bytes, {} missing, in {took:.2} s", waiting.len());
    Ok(())
}
