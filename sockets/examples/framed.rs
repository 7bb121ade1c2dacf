//! Replies in any order, each body in the buffer that waits for it: how a client of NFS or iSCSI reads.
//!
//! ```text
//! cargo run --release --example framed -- link          # both sides here: 10,000 blocks of 64 KiB
//! cargo run --release --example framed -- link 1000 4   # 1,000 blocks of 4 KiB
//! ```
//!
//! The client keeps many requests under way. The server answers them in an order of its own, so that
//! only the header of a reply tells which block follows. A request without a buffer gets its block as
//! a loan: the stack's own memory.

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use common::{Outcome, Place};
use fulmar::mbuf::RecvBuf;
use fulmar::{Body, FrameParser, Stack, TcpListener, TcpStream};

const PORT: u16 = 2049;
/// Requests under way at once.
const UNDER_WAY: u32 = 16;
/// One block in so many is asked for without a buffer.
const WITHOUT_BUFFER: u32 = 8;

/// A reply: the number of the block, its length, both 32 bits, big-endian; then the block.
struct Reply;

const REPLY_HEADER: usize = 8;

impl FrameParser for Reply {
    fn header_bytes(&self) -> usize {
        REPLY_HEADER
    }

    fn body(&self, header: &[u8]) -> Option<(usize, u64)> {
        let (block, rest) = header.split_first_chunk::<4>()?;
        let bytes = u32::from_be_bytes(*rest.first_chunk::<4>()?);
        Some((bytes as usize, u32::from_be_bytes(*block).into()))
    }
}

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number"));
    let (blocks, kib): (u32, u32) = match words[..] {
        ["link"] => (10_000, 64),
        ["link", blocks] => (number(blocks)?, 64),
        ["link", blocks, kib] => (number(blocks)?, number(kib)?),
        _ => return Err("usage: framed link [BLOCKS [KIB]]".into()),
    };
    if !(1..=16 << 10).contains(&kib) {
        return Err("a block has 1 to 16384 KiB".into());
    }
    let Place::Demo(ours, peer) = common::open("link", None)? else {
        return Err("`link` is a demonstration".into());
    };
    demo(&ours, &peer, blocks, (kib as usize) << 10)
}

fn demo(ours: &Stack, peer: &Stack, blocks: u32, bytes: usize) -> Outcome {
    let listener = TcpListener::bind(peer, ("::", PORT))?;
    let server = thread::spawn(move || listener.accept().and_then(|(s, _)| serve(s, bytes)));
    let start = Instant::now();
    let (placed, lent) = client(ours, blocks, bytes)?;
    let took = start.elapsed().as_secs_f64();
    server.join().map_err(|_| "the server has failed")??;
    let mib = f64::from(blocks) * bytes as f64 / f64::from(1 << 20);
    println!("{blocks} blocks of {bytes} bytes in any order, {:.0} MiB/s", mib / took);
    println!("{placed} in the buffers that waited for them, {lent} as loans");
    Ok(())
}

/// Keeps requests under way and checks every block; how many came in their buffers, and as loans.
fn client(stack: &Stack, blocks: u32, bytes: usize) -> Outcome<(u32, u32)> {
    let stream = TcpStream::connect(stack, ("10.77.0.1", PORT))?;
    let mut replies = stream.framed(Reply, HashMap::new())?;
    let mut free: Vec<RecvBuf> = Vec::new();
    let (mut asked, mut placed, mut lent) = (0, 0, 0);
    while placed + lent < blocks {
        while asked < blocks && asked - placed - lent < UNDER_WAY {
            if asked % WITHOUT_BUFFER > 0 {
                let buffer = free.pop().unwrap_or_else(|| RecvBuf::with_capacity(bytes));
                replies.buffers().insert(asked.into(), buffer);
            }
            let mut stream = replies.stream();
            stream.write_all(&asked.to_be_bytes())?;
            asked += 1;
        }
        let Some(reply) = replies.next()? else { return Err("the server has gone".into()) };
        let block = reply.tag as u32;
        match reply.body {
            Body::Placed(buffer) => {
                check(block, [&buffer[..]].into_iter())?;
                free.push(buffer);
                placed += 1;
            }
            Body::Loan(loan) => {
                check(block, loan.slices())?;
                lent += 1;
            }
            Body::Copied(block_bytes) => {
                check(block, [&block_bytes[..]].into_iter())?;
                lent += 1;
            }
        }
    }
    Ok((placed, lent))
}

/// Every byte of a block is the low byte of its number.
fn check<'a>(block: u32, mut slices: impl Iterator<Item = &'a [u8]>) -> Outcome {
    if slices.all(|s| s.iter().all(|b| *b == block as u8)) {
        return Ok(());
    }
    Err(format!("block {block} holds the bytes of another one").into())
}

/// Answers what has been asked, the last request first.
fn serve(mut stream: TcpStream, bytes: usize) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut requests = [0; 4 * UNDER_WAY as usize];
    let mut have = 0;
    let mut block = vec![0; REPLY_HEADER + bytes];
    loop {
        let n = stream.read(&mut requests[have..])?;
        if n == 0 {
            return Ok(());
        }
        have += n;
        let whole = have / 4 * 4;
        for number in requests[..whole].chunks_exact(4).rev() {
            let (head, body) = block.split_at_mut(REPLY_HEADER);
            head[..4].copy_from_slice(number);
            head[4..].copy_from_slice(&(bytes as u32).to_be_bytes());
            body.fill(number[3]);
            stream.write_all(&block)?;
        }
        requests.copy_within(whole..have, 0);
        have -= whole;
    }
}
