//! The ways of sending do what they are said to do: counted, never timed.

use super::file::FileMethod;
use super::*;
use crate::file::{BenchFile, CacheState};
use fulmar::stat::Counter;
use fulmar::{Cidr, SocketOptions, TcpListener, devices};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;

const NEAR: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const CALLS: u64 = 12;
const WRITE_BYTES: usize = 64 << 10;

fn stack(device: Box<dyn fulmar::device::Device>, ip: Ipv4Addr) -> Stack {
    let address = Cidr { address: IpAddr::V4(ip), prefix_len: 24 };
    Stack::builder().device(device).address(address).unlisted().build().expect("a stack")
}

/// What a few calls counted, of writes that always find space.
struct Counted {
    outputs: u64,
    mbufs: u64,
    copied_bytes: u64,
    bytes: Vec<u8>,
}

/// Sends over `link` with a buffer that holds everything, so that no write is split by want of space.
fn count(mut caller: Box<dyn Caller>) -> Counted {
    let (near, far) = devices::link_pair().expect("a link");
    let (near, far) = (stack(near, NEAR), stack(far, FAR));
    let listener = TcpListener::bind(&far, SocketAddr::from((FAR, 7))).expect("a port");
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        listener.accept().expect("a connection").0.read_to_end(&mut bytes).expect("all of it");
        bytes
    });
    let stream = TcpStream::connect(&near, SocketAddr::from((FAR, 7))).expect("it listens");
    let room = 2 * CALLS as usize * WRITE_BYTES;
    let options = stream.options().expect("open");
    stream.set_options(SocketOptions { send_buffer: Some(room), ..options }).expect("open");
    assert!(stream.options().expect("open").send_buffer >= Some(room));
    let before = near.stat().expect("ours");
    let to = Target { stack: &near, stream: &stream };
    let sent: u64 = (0..CALLS).map(|_| caller.call(&to).expect("it is open")).sum();
    let after = near.stat().expect("ours");
    let copies_per_byte = caller.copies_per_byte();
    drop(stream);
    let bytes = reader.join().expect("no panic");
    assert_eq!(bytes.len() as u64, sent);
    let of = |c| after.count(c) - before.count(c);
    Counted {
        outputs: of(Counter::SendOutputs),
        mbufs: of(Counter::SendMbufs),
        copied_bytes: of(Counter::CopiedBytes) + sent * copies_per_byte,
        bytes,
    }
}

fn count_method(method: Method) -> Counted {
    let counted = count(method.caller(&Load::of_writes(WRITE_BYTES)));
    assert!(counted.bytes.iter().all(|b| *b == 0x5a), "{method:?}");
    counted
}

#[test]
fn the_old_way_makes_32_outputs_of_a_64_kib_write_and_the_new_ones_make_one() {
    for (method, outputs, mbufs) in [
        (Method::Old, 32, 32),
        (Method::Published, 1, 16),
        (Method::Ours, 1, 1),
        (Method::Owned, 1, 1),
        (Method::Variant(sosend::VARIANTS[0]), 16, 16),
        (Method::Variant(sosend::VARIANTS[1]), 1, 1),
        (Method::Variant(sosend::VARIANTS[2]), 1, 32),
        (Method::Variant(sosend::VARIANTS[3]), 1, 1),
    ] {
        let counted = count_method(method);
        assert_eq!(
            (counted.outputs, counted.mbufs),
            (outputs * CALLS, mbufs * CALLS),
            "{method:?}"
        );
        let copies = u64::from(method != Method::Owned);
        assert_eq!(counted.copied_bytes, copies * counted.bytes.len() as u64, "{method:?}");
    }
}

#[test]
fn every_way_of_sending_a_file_sends_its_bytes_and_the_old_one_page_by_page() {
    let file = BenchFile::with_bytes(1 << 20).expect("a temporary file");
    for method in FileMethod::ALL {
        let load = Load::of_writes(WRITE_BYTES);
        let caller = method.caller(&load, &file, CacheState::Cold).expect("a descriptor");
        let counted = count(caller);
        let expected = (0..counted.bytes.len()).map(|i| ((i % (1 << 20)) % 251) as u8);
        assert!(expected.eq(counted.bytes.iter().copied()), "{method:?}");
        if method == FileMethod::Old {
            assert_eq!((counted.outputs, counted.mbufs), (16 * CALLS, 16 * CALLS));
        }
    }
}

#[test]
fn the_simulated_peer_acknowledges_by_bytes_whatever_the_bursts_are() {
    let mut rig = sim::Simulated::new(true, None).expect("a device");
    let load = Load { warm_bytes: 1 << 20, ..Load::of_writes(WRITE_BYTES) };
    for method in [Method::Old, Method::Ours] {
        let mut caller = method.caller(&load);
        let time = Duration::from_millis(20);
        let sample = rig.stream(&load, caller.as_mut(), time).expect("it runs");
        // One per burst would be 2 KiB the old way. A few more come where this thread lost its CPU
        // and the peer stopped waiting.
        let bytes_per_ack = sample.quotient("peer_bytes", "peer_acks");
        assert!(bytes_per_ack > 8192.0, "{method:?}: {bytes_per_ack}");
        assert!(sample.hardware > Duration::ZERO);
    }
    // A buffer smaller than what an ACK stands for: the peer does not wait for more for ever.
    let load = Load { buffer_bytes: Some(8 << 10), warm_bytes: 16 << 10, ..load };
    let mut caller = Method::Old.caller(&load);
    let sample = rig.stream(&load, caller.as_mut(), Duration::from_millis(5));
    assert!(sample.expect("it runs").near.bytes > 0);
}

#[test]
fn a_way_is_named_by_its_cell() {
    let cell = Cell {
        side: Side::Sends,
        device: "tap",
        method: "old",
        write_bytes: 64 << 10,
        super_segments: false,
        source: "hot",
    };
    assert_eq!(scenario_name(&cell, Placement::SameCpu), "old.tap.64k.no_tso.same_cpu");
    let cold = Cell { source: "cold", super_segments: true, ..cell };
    assert_eq!(scenario_name(&cold, Placement::TwoCpus), "old.tap.64k.tso.cold.two_cpus");
}
