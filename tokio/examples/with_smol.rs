//! fulmar with another runtime, here smol, by the driver and the poll functions of `fulmar` alone:
//! `cargo run -p fulmar-tokio --example with_smol`. The same few lines serve any runtime that waits for a descriptor.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;

use fulmar::{ConnectOptions, Driver, Stack, TcpListener, TcpStream, devices};
use smol::{Async, LocalExecutor, future};

/// Runs a stack in this thread.
async fn drive(mut driver: Driver) -> io::Result<()> {
    let descriptor = Async::new_nonblocking(driver.as_fd().try_clone_to_owned()?)?;
    loop {
        if driver.turn()? || !driver.rest()? {
            // The tasks that were woken come first.
            future::yield_now().await;
        } else {
            descriptor.readable().await?;
        }
    }
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = poll_fn(|cx| stream.poll_write(cx, bytes)).await?;
        bytes = &bytes[n..];
    }
    Ok(())
}

/// Sends back what comes.
async fn echo(stream: TcpStream) -> io::Result<()> {
    let mut buf = vec![0; 64 << 10];
    loop {
        match poll_fn(|cx| stream.poll_read(cx, &mut buf)).await? {
            0 => return stream.shutdown(Shutdown::Write),
            n => write_all(&stream, &buf[..n]).await?,
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (a, b) = devices::link_pair()?;
    let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?;
    let client = Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?;
    let tasks = LocalExecutor::new();
    for stack in [&server, &client] {
        tasks.spawn(drive(stack.driver()?)).detach();
    }
    let listener = TcpListener::bind(&server, "10.0.0.1:7")?;
    future::block_on(tasks.run(async {
        let (to, options) = (listener.local_addr()?, ConnectOptions::default());
        let stream = TcpStream::connect_nonblocking(&client, &to, &options)?;
        poll_fn(|cx| stream.poll_connected(cx)).await?;
        let (accepted, _) = poll_fn(|cx| listener.poll_accept(cx)).await?;
        tasks.spawn(echo(accepted)).detach();
        let (mut buf, mut came) = ([0; 16], Vec::new());
        write_all(&stream, b"hello by way of smol").await?;
        stream.shutdown(Shutdown::Write)?;
        while let n @ 1.. = poll_fn(|cx| stream.poll_read(cx, &mut buf)).await? {
            came.extend_from_slice(&buf[..n]);
        }
        println!("came back: {}", String::from_utf8_lossy(&came));
        assert_eq!(came, b"hello by way of smol");
        Ok(())
    }))
}
