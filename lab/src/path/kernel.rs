//! The machine's own kernel, as far as it can be asked without tracing it.
//!
//! A call that fails does so at a depth that is known from the source: a descriptor that is none
//! fails after the look-up of the file, a datagram that is too long at the beginning of the
//! protocol, a destination without a route behind the look-up of the route. So errors are exit points
//! that every kernel has. Unlike real ones they undo nothing that was never built, and the way back
//! of an error may differ from that of a success by a few nanoseconds.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use super::Spread;
use super::measured::{bare_syscall, timed_calls};
use crate::kernel::Pair;
use crate::topology::MTU;

/// RFC 863; the port is closed, so the far end drops the datagrams and answers some of them by ICMP. An unconnected
/// socket does not get these errors.
const PORT: u16 = 9;
/// Calls between two readings of the clock.
const BATCH: u64 = 64;

/// How deep a call goes.
#[derive(Clone, Debug)]
pub struct Depth {
    /// Its name, stable in JSON.
    pub name: &'static str,
    /// The work between the previous depth and this one.
    pub sentence: &'static str,
    /// ns per call.
    pub ns: Spread,
}

/// One way of calling, again and again.
type Call<'a> = Box<dyn FnMut() -> io::Result<()> + Send + 'a>;

/// Measures every depth in turn, `runs` times; `bytes` of payload, connected and not.
///
/// # Errors
/// No namespaces.
pub fn run(bytes: usize, runs: usize, slice: Duration) -> io::Result<Vec<Depth>> {
    let pair = Pair::new(MTU, true)?;
    let sink = pair.far().run(|| UdpSocket::bind((Pair::FAR, PORT)))?;
    let depths = pair.near().run(|| depths(bytes, runs, slice));
    drop(sink);
    depths
}

fn depths(bytes: usize, runs: usize, slice: Duration) -> io::Result<Vec<Depth>> {
    let payload = vec![0x5a; bytes];
    // Longer than a datagram's length field can say: refused before anything is looked up. What fits
    // the field and no packet is refused behind the look-up of the route.
    let too_long = vec![0; 65_536];
    let to = SocketAddr::from((Pair::FAR, PORT));
    let nowhere = SocketAddr::from(([192, 0, 2, 1], PORT));
    let (open, bound) = (UdpSocket::bind((Pair::NEAR, 0))?, UdpSocket::bind((Pair::NEAR, 0))?);
    bound.connect(to)?;
    let mut calls: Vec<(&'static str, &'static str, Call<'_>)> = vec![
        (
            "socket_found",
            "File to socket, arguments checked; a datagram without destination (EDESTADDRREQ).",
            Box::new(|| fails(open.send(&payload))),
        ),
        (
            "length_checked",
            "The address is copied in, the protocol begins; a datagram too long (EMSGSIZE).",
            Box::new(|| fails(open.send_to(&too_long, to))),
        ),
        (
            "route_looked_up",
            "The route is looked up, not found (ENETUNREACH).",
            Box::new(|| fails(open.send_to(&payload, nowhere))),
        ),
        (
            "whole_connected",
            "All of a connected `send` over veth: buffer, copy, headers, device, and the receiving \
             half, which runs in the same call.",
            Box::new(|| bound.send(&payload).map(drop)),
        ),
        (
            "whole_unconnected",
            "All of a `sendto` to the same place.",
            Box::new(|| open.send_to(&payload, to).map(drop)),
        ),
    ];
    let first = ("bare_syscall", "Into the kernel and back (getppid).");
    let mut found = vec![Depth { name: first.0, sentence: first.1, ns: Spread::default() }];
    for (name, sentence, _) in &calls {
        found.push(Depth { name, sentence, ns: Spread::default() });
    }
    for _ in 0..runs {
        found[0].ns.runs.push(bare_syscall(slice)?);
        for (depth, (_, _, call)) in found[1..].iter_mut().zip(&mut calls) {
            depth.ns.runs.push(timed_calls(slice, BATCH, call)?);
        }
    }
    Ok(found)
}

/// A call whose failure is the point of it.
fn fails(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(_) => Ok(()),
        Ok(_) => Err(io::Error::other("a call that should fail succeeded")),
    }
}
