//! A stack on a simulated NIC with the modelled peer behind it, through the public API.

use std::io::{Read, Write};

use fulmar::devices::sim::{FarEnd, Service, SimConfig, SimHandle, pattern};
use fulmar::{Stack, TcpStream, devices};

fn stack(config: SimConfig) -> (Stack, SimHandle) {
    let (device, handle) = devices::sim_nic(config).unwrap();
    let stack = Stack::builder()
        .device(device)
        .address("10.9.0.1/24".parse().unwrap())
        .address("fd09::1/64".parse().unwrap())
        .unlisted()
        .build()
        .unwrap();
    (stack, handle)
}

fn verifying() -> SimConfig {
    SimConfig { far_end: FarEnd { verify: true, ..FarEnd::default() }, ..SimConfig::default() }
}

fn send(config: SimConfig, to: &str, total: usize) -> SimHandle {
    let (stack, handle) = stack(config);
    let mut c = TcpStream::connect(&stack, to).unwrap();
    let mut buf = vec![0; 128 << 10];
    let mut at = 0;
    while at < total {
        let n = buf.len().min(total - at);
        pattern::fill(at as u64, &mut buf[..n]);
        c.write_all(&buf[..n]).unwrap();
        at += n;
    }
    c.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(c.read(&mut [0; 1]).unwrap(), 0);
    handle
}

#[test]
fn the_peer_takes_a_hundred_megabytes_and_every_byte_is_right() {
    const TOTAL: usize = 100 << 20;
    for to in ["10.9.0.2:9", "[fd09::2]:9"] {
        let counts = send(verifying(), to, TOTAL).counts();
        println!("{counts:?}");
        assert_eq!(counts.peer_bytes_in, TOTAL as u64);
        assert_eq!(counts.peer_wrong_bytes, 0);
        assert_eq!(counts.peer_repeated_bytes_in, 0);
        assert_eq!(counts.peer_odd_frames, 0, "{to}");
    }
}

#[test]
fn the_peer_generates_a_stream_that_arrives_whole() {
    const TOTAL: usize = 100 << 20;
    let mut config = verifying();
    config.far_end.services = vec![(0..=65535, Service::Generate { bytes: TOTAL as u64 })];
    for to in ["10.9.0.2:19", "[fd09::2]:19"] {
        let (stack, handle) = stack(config.clone());
        let mut c = TcpStream::connect(&stack, to).unwrap();
        let mut buf = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            let n = c.read(&mut buf).unwrap();
            if n == 0 {
                break;
            }
            assert_eq!(pattern::wrong_bytes(at as u64, &buf[..n]), 0, "after {at}");
            at += n;
        }
        assert_eq!(at, TOTAL);
        println!("{:?}", handle.counts());
        assert_eq!(handle.counts().peer_resent_bytes, 0);
    }
}
