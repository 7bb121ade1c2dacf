//! A relay that copies nothing on receive: what a client sends goes on to a server, and back, in the stack's own buffers:
//! `cargo run -p fulmar-tokio --example relay`.

use std::io;

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes of one loan at most.
const LOAN: usize = 256 << 10;

/// One direction, to the end of its stream.
async fn pump(from: TcpStream, to: TcpStream) -> io::Result<()> {
    let ((from, back), (answer, to)) = (from.into_split(), to.into_split());
    tokio::try_join!(one_way(from, to), one_way(answer, back))?;
    Ok(())
}

async fn one_way(from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    loop {
        let mut loan = from.recv_owned(LOAN).await?;
        if loan.is_empty() {
            return to.shutdown().await;
        }
        while !loan.is_empty() {
            let slices: Vec<_> = loan.io_slices().collect();
            let n = to.write_vectored(&slices).await?;
            loan.advance(n);
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // client — relay — server: the relay has a stack at each side.
    let ((a, b), (c, d)) = (devices::link_pair()?, devices::link_pair()?);
    let net = |device, address: &str| -> Result<Net, Box<dyn std::error::Error>> {
        Ok(Net::new(Stack::builder().device(device).address(address.parse()?).build()?)?)
    };
    let (client, outside) = (net(a, "10.0.0.2/24")?, net(b, "10.0.0.1/24")?);
    let (inside, server) = (net(c, "10.0.1.1/24")?, net(d, "10.0.1.2/24")?);

    let echo = TcpListener::bind(&server, "10.0.1.2:7").await?;
    tokio::spawn(async move {
        let (stream, _) = echo.accept().await?;
        let (mut read, mut write) = stream.into_split();
        tokio::io::copy(&mut read, &mut write).await
    });
    let listener = TcpListener::bind(&outside, "10.0.0.1:7").await?;
    tokio::spawn(async move {
        let (from, _) = listener.accept().await?;
        pump(from, TcpStream::connect(&inside, "10.0.1.2:7").await?).await
    });

    let sent = vec![7; 8 << 20];
    let (mut read, mut write) = TcpStream::connect(&client, "10.0.0.1:7").await?.into_split();
    let sender = async {
        write.write_all(&sent).await?;
        write.shutdown().await
    };
    let mut got = Vec::new();
    tokio::try_join!(sender, read.read_to_end(&mut got))?;
    assert!(got == sent);
    println!("{} MiB went through the relay and came back", got.len() >> 20);
    Ok(())
}
