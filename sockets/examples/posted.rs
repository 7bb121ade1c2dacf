//! Receives into two posted buffers alternately: one is filled while the other is being used.
//!
//! ```text
//! cargo run --release --example posted -- link            # a sender in the same process
//! cargo run --release --example posted -- tap:fulmar0     # as root; the kernel's end, in another terminal:
//!     ip addr add 10.77.0.1/24 dev fulmar0 && ip link set fulmar0 up
//!     head -c 2G /dev/zero | nc -N 10.77.0.2 5001
//! ```

mod common;

use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use common::{Outcome, Place};
use fulmar::stat::Counter;
use fulmar::zero_copy::{RecvBuf, ZeroCopy};
use fulmar::{Stack, TcpListener, TcpStream};

const PORT: u16 = 5001;
const BUFFER_BYTES: usize = 256 << 10;
const DEMO_BYTES: usize = 1 << 30;

fn main() -> ExitCode {
    common::run(example)
}

fn example(arguments: &[String]) -> Outcome {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (device, address) = match words[..] {
        [device] => (device, None),
        [device, address] => (device, Some(address)),
        _ => {
            let usage = "usage: posted DEVICE [ADDRESS/PREFIX]";
            return Err(format!("{usage}\n\n{}", common::DEVICE_HELP).into());
        }
    };
    let (stack, peer) = match common::open(device, address)? {
        Place::Network(stack) => (stack, None),
        Place::Demo(stack, peer) => (stack, Some(peer)),
    };
    let listener = TcpListener::bind(&stack, ("::", PORT))?;
    eprintln!("listening on port {PORT}");
    let sender = peer.map(|peer| thread::spawn(move || send(&peer).is_ok()));
    let (stream, from) = listener.accept()?;
    eprintln!("{from} is connected");
    receive(&stack, &stream)?;
    if let Some(sender) = sender {
        drop(stream);
        sender.join().map_err(|_| "the sender failed")?;
    }
    Ok(())
}

fn receive(stack: &Stack, stream: &TcpStream) -> Outcome {
    let start = Instant::now();
    // Both buffers are posted before their bytes arrive.
    let mut filling = stream.recv_posted(RecvBuf::with_capacity(BUFFER_BYTES))?;
    let mut behind = stream.recv_posted(RecvBuf::with_capacity(BUFFER_BYTES))?;
    let (mut total, mut sum) = (0u64, 0u64);
    loop {
        let buffer = filling.wait()?;
        if buffer.is_empty() {
            break;
        }
        total += buffer.len() as u64;
        // The device fills the other buffer while this one is used.
        sum = buffer.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)));
        // Post it again after the other: the same memory, which the device has already registered.
        filling = std::mem::replace(&mut behind, stream.recv_posted(buffer)?);
    }
    let seconds = start.elapsed().as_secs_f64();
    let stat = stack.stat()?;
    let (placed, copied) = (stat.count(Counter::PlacedBytes), stat.count(Counter::CopiedBytes));
    println!("{total} bytes in {seconds:.2} s, sum {sum}");
    println!("{placed} placed in the buffers by the device, {copied} copied");
    Ok(())
}

/// The sender for `link`.
fn send(stack: &Stack) -> Outcome {
    let to = common::OURS.split('/').next().unwrap_or(common::OURS);
    let mut stream = TcpStream::connect(stack, (to, PORT))?;
    let block = vec![1; 128 << 10];
    for _ in 0..DEMO_BYTES / block.len() {
        stream.write_all(&block)?;
    }
    Ok(())
}
