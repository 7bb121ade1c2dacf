//! The laboratory against the real kernel: namespaces, peers, the floor. A program of its own
//! rather than `#[test]`s, because it enters namespaces before it has threads and because its
//! children are itself. Times are not judged; bytes, counts and what is left behind are.

use fulmar_lab::Bulk;
use fulmar_lab::bench::Sample;
use fulmar_lab::child;
use fulmar_lab::cpu::Placement;
use fulmar_lab::floor::{Direction, Ground, Kind};
use fulmar_lab::kernel::Pair;
use fulmar_lab::kernel_calls::Sending;
use fulmar_lab::netns::{self, Netns};
use fulmar_lab::peer::{Endpoint, Peer, Role, Spec};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

const TIME: Duration = Duration::from_millis(30);

fn main() {
    child::dispatch();
    if let Err(e) = netns::enter() {
        return skip("all of it", &format!("namespaces are not allowed here: {e}"));
    }
    a_fresh_namespace_has_loopback_and_nothing_else();
    kernel_to_kernel_moves_bytes_with_and_without_offloads();
    for kind in [Kind::Tap, Kind::Packet, Kind::PacketRing] {
        the_floor_moves_bytes_both_ways(kind);
    }
    a_dropped_peer_is_dead();
    println!("real_kernel: ok");
}

/// Says aloud what did not run, or fails where it must run.
fn skip(what: &str, why: &str) {
    let required = std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_some();
    assert!(!required, "{what} must not be skipped: {why}");
    println!("SKIPPED {what}: {why}");
}

fn a_fresh_namespace_has_loopback_and_nothing_else() {
    let netns = Netns::new().expect("a namespace");
    assert!(netns.if_index("lo").is_ok());
    assert!(netns.if_index("veth0").is_err());
}

fn assert_moved(what: &str, sample: io::Result<Sample>) -> Sample {
    let sample = sample.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(sample.near.bytes > 1 << 20, "{what}: {sample:?}");
    assert!(sample.far.cpu > Duration::ZERO && sample.near.cpu > Duration::ZERO, "{what}");
    sample
}

fn kernel_to_kernel_moves_bytes_with_and_without_offloads() {
    for offloads in [true, false] {
        let pair = Pair::new(1500, offloads).expect("two namespaces and a veth pair");
        let sample = pair.stream(&Bulk::default(), Placement::SameCpu, TIME);
        assert_moved(&format!("kernel, offloads {offloads}"), sample);
    }
}

fn the_floor_moves_bytes_both_ways(kind: Kind) {
    if kind == Kind::Tap && !Path::new("/dev/net/tun").exists() {
        return skip("TAP", "there is no /dev/net/tun");
    }
    let mut ground = match Ground::new(kind) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && kind == Kind::Tap => {
            return skip("TAP", &format!("it may not be opened: {e}"));
        }
        ground => ground.expect("a device"),
    };
    for direction in [Direction::Send, Direction::Receive] {
        for copy in [false, true] {
            let what = format!("{kind:?} {direction:?} copy {copy}");
            let run = ground.stream(&Bulk::default(), direction, copy, Placement::SameCpu, TIME);
            let sample = assert_moved(&what, run);
            // Super-frames, not packets: this is what makes it the floor.
            let frames =
                sample.counts.iter().find(|(n, _)| *n == "data_frames").expect("counted").1;
            assert!(sample.all_bytes() / frames > 16 * 1024, "{what}: {sample:?}");
        }
    }
}

fn a_dropped_peer_is_dead() {
    let spec = Spec {
        role: Role::Sink,
        endpoint: Endpoint::Listen(SocketAddr::from(([127, 0, 0, 1], 0))),
        cpu: None,
        buffer_bytes: 1,
        warm_bytes: 0,
        time: TIME,
        sending: Sending::default(),
    };
    let peer = Peer::spawn(&spec, &Netns::current().expect("here")).expect("a peer");
    let proc = format!("/proc/{}", peer.id());
    assert!(Path::new(&proc).exists());
    drop(peer);
    let patience = Instant::now() + Duration::from_secs(2);
    while Path::new(&proc).exists() {
        assert!(Instant::now() < patience, "the peer outlives its handle");
    }
}
