//! One bench at a time on a machine: a name that the kernel frees when its holder dies.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Held while a bench runs.
#[derive(Debug)]
pub struct BenchLock(#[allow(dead_code, reason = "held, never read")] UnixListener);

impl BenchLock {
    /// Takes the lock. Abstract names belong to a network namespace: call it before
    /// [`fulmar_gateway::netns::enter`], or two benches do not see each other.
    ///
    /// # Errors
    /// AddrInUse: another bench runs.
    pub fn take() -> io::Result<BenchLock> {
        Self::named(b"fulmar-bench")
    }

    fn named(name: &[u8]) -> io::Result<BenchLock> {
        let busy = |e: io::Error| match e.kind() {
            io::ErrorKind::AddrInUse => {
                io::Error::new(e.kind(), "another fulmar-lab bench is running; wait until it ends")
            }
            _ => e,
        };
        let address = SocketAddr::from_abstract_name(name)?;
        UnixListener::bind_addr(&address).map(BenchLock).map_err(busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_bench_is_refused_until_the_first_is_done() {
        let name = format!("fulmar-bench-test-{}", std::process::id());
        let first = BenchLock::named(name.as_bytes()).expect("free");
        let second = BenchLock::named(name.as_bytes()).expect_err("taken");
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        BenchLock::named(name.as_bytes()).expect("free again");
    }
}
