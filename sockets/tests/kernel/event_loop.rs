//! What an event loop over a poll set costs the device; a driver's loop over each device.

use std::io::{Read, Write};
use std::net;
use std::time::Duration;

use fulmar::device::Device;
use fulmar::stat::Counter;
use fulmar::{PollSet, Ready, Stack, TcpListener, TcpStream, devices};

use crate::namespace::ip;
use crate::support::tasks::a_loop_serves;
use crate::{KERNEL, OURS, in_namespace, stack, stack_on};

const CONNECTIONS: usize = 64;
/// The best round counts: in the others a loaded machine may have kept a turn waiting for longer than its limit.
const ROUNDS: usize = 50;

/// Opens connections of the kernel's to a poll set.
fn connect(stack: &Stack) -> (PollSet, Vec<TcpStream>, Vec<net::TcpStream>) {
    let listener = TcpListener::bind(stack, (OURS, 80)).unwrap();
    let set = stack.poll_set().unwrap();
    let connected = (0..CONNECTIONS).map(|token| {
        let c = net::TcpStream::connect((OURS, 80)).unwrap();
        c.set_nodelay(true).unwrap();
        let (s, _) = listener.accept().unwrap();
        s.set_nonblocking(true).unwrap();
        s.set_nodelay(true).unwrap();
        set.add(&s, token, Ready::READABLE).unwrap();
        (s, c)
    });
    let (ours, theirs) = connected.unzip();
    (set, ours, theirs)
}

/// Crossings to send, crossings to receive, and frames sent, so far.
fn crossings(stack: &Stack) -> [u64; 3] {
    let stat = stack.stat().unwrap();
    let device = &stat.shard.device;
    [device.tx_crossings, device.rx_crossings, stat.count(Counter::TxFrames)]
}

#[test]
fn sixty_four_answers_between_two_waits_cross_together_and_carry_the_acks() {
    in_namespace!(|| {
        let stack = stack();
        let (set, mut ours, mut theirs) = connect(&stack);
        let mut best = [u64::MAX; 3];
        for _ in 0..ROUNDS {
            theirs.iter_mut().for_each(|c| c.write_all(b"question").unwrap());
            let before = crossings(&stack);
            let (mut events, mut answered) = (Vec::new(), 0);
            while answered < CONNECTIONS {
                set.wait(&mut events, None).unwrap();
                for event in &events {
                    let s = &mut ours[event.token];
                    assert_eq!(s.read(&mut [0; 100]).unwrap(), 8);
                    s.write_all(b"answer").unwrap();
                    answered += 1;
                }
            }
            assert_eq!(set.wait(&mut events, Some(Duration::from_nanos(1))).unwrap(), 0);
            let after = crossings(&stack);
            for (best, (after, before)) in best.iter_mut().zip(after.into_iter().zip(before)) {
                *best = (after - before).min(*best);
            }
            for c in &mut theirs {
                let mut answer = [0; 6];
                c.read_exact(&mut answer).unwrap();
                assert_eq!(&answer, b"answer");
            }
        }
        let [sent, received, frames] = best;
        assert_eq!(frames, CONNECTIONS as u64, "an ACK of its own");
        // Without io_uring each frame crosses for itself; with it questions come in runs of 16.
        let many = stack.stat().unwrap().shard.device.path.starts_with("io_uring");
        let [most_sent, most_received] = if many { [2, 12] } else { [66, 70] };
        assert!(sent <= most_sent, "{sent} crossings for {CONNECTIONS} answers");
        assert!(received <= most_received, "{received} crossings for {CONNECTIONS} questions");
    });
}

/// A driver serves the kernel over a device, whose kernel end is the interface.
fn drives(device: Box<dyn Device>, kernel_end: &str) {
    ip(&format!("addr add {KERNEL}/24 dev {kernel_end}"));
    ip(&format!("link set {kernel_end} up"));
    a_loop_serves(&stack_on(device), (OURS, 80), || {
        let client = net::TcpStream::connect((OURS, 80)).unwrap();
        client.set_nodelay(true).unwrap();
        client
    });
}

#[test]
fn a_driver_serves_the_kernel_over_a_tap() {
    in_namespace!(|| drives(devices::tap("fulmar0").unwrap(), "fulmar0"));
}

#[test]
fn a_driver_serves_the_kernel_over_a_tun() {
    in_namespace!(|| drives(devices::tun("fulmar0").unwrap(), "fulmar0"));
}

#[test]
fn a_driver_serves_the_kernel_over_a_packet_socket() {
    in_namespace!(|| {
        ip("link add v0 type veth peer name v1");
        ip("link set v1 up");
        drives(devices::packet("v1").unwrap(), "v0");
    });
}
