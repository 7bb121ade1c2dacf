//! Takes every TCP connection that the kernel routes to `tun0`, and proxies it to its destination.
//!
//! The kernel's end of `tun0` belongs to the guest whose network this is: once the program runs,
//! `ip link set tun0 netns GUEST` moves it there.

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, forward};
use tokio::net::TcpStream;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let stack = Stack::builder().device(devices::tun("tun0")?).any_ip(true).build()?;
    forward(&Net::new(stack)?, |pending| async move {
        let server = pending.local_addr();
        pending.proxy(TcpStream::connect(server)).await
    })
    .await?;
    Ok(())
}
