//! The program runs here in a machine of our own, beside the hash that it must agree with.

use std::net::SocketAddr;

use fulmar_stack::base::{FlowKey, OwnerKey};
use proptest::prelude::*;

use super::*;

fn run(program: &[Ebpf], frame: &[u8]) -> u64 {
    run_from(program, frame, 0)
}

/// The same where offsets count from the IP header, but those that say that they do not.
fn run_in_group(program: &[Ebpf], frame: &[u8]) -> u64 {
    run_from(program, frame, ETHER as u64)
}

/// A processor that behaves like the kernel's, and panics where the kernel would refuse the program.
struct Machine<'a> {
    program: &'a [Ebpf],
    frame: &'a [u8],
    /// Bytes of the frame before the part that the program sees.
    front: u64,
    r: [u64; 11],
    at: usize,
}

/// The result of an instruction.
enum Then {
    Next,
    End(u64),
}

impl Machine<'_> {
    /// Bytes of the frame, big-endian; `None` behind its end.
    fn bytes(&self, start: u64, len: usize) -> Option<u64> {
        const LINK_LAYER: u64 = 0x20_0000;
        let start = match start as i64 {
            0.. => start.checked_add(self.front)?,
            _ => start.wrapping_add(LINK_LAYER),
        };
        let bytes = self.frame.get(start as usize..)?.get(..len)?;
        Some(bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    fn step(&mut self) -> Then {
        let i = &self.program[self.at];
        self.at += 1;
        let (from, k) = (self.r[usize::from(i.registers >> 4)], i64::from(i.constant) as u64);
        match i.code {
            LOAD_WORD => self.load(k, 4),
            LOAD_HALF => self.load(k, 2),
            LOAD_BYTE => self.load(k, 1),
            LOAD_HALF_AT => self.load(from.wrapping_add(k), 2),
            EXIT => Then::End(self.r[0]),
            0x05 | JUMP_IF_EQUAL | JUMP_UNLESS_EQUAL | JUMP_IF_SET => self.jump(i, k),
            _ => self.calculate(i, from, k),
        }
    }

    /// A load behind the frame's end ends the program.
    fn load(&mut self, start: u64, len: usize) -> Then {
        let Some(value) = self.bytes(start, len) else { return Then::End(0) };
        // The kernel forgets the registers of arguments at each load of packet bytes.
        self.r[1..6].fill(0xdead_beef);
        self.r[0] = value;
        Then::Next
    }

    fn jump(&mut self, i: &Ebpf, k: u64) -> Then {
        let jumps = match i.code {
            JUMP_IF_EQUAL => self.r[0] == k,
            JUMP_UNLESS_EQUAL => self.r[0] != k,
            JUMP_IF_SET => self.r[0] & k != 0,
            _ => true,
        };
        self.at += if jumps { i.jump as usize } else { 0 };
        Then::Next
    }

    fn calculate(&mut self, i: &Ebpf, from: u64, k: u64) -> Then {
        let to = &mut self.r[usize::from(i.registers & 15)];
        match i.code {
            LOAD_CONSTANT => {
                let high = u64::from(self.program[self.at].constant as u32) << 32;
                *to = u64::from(i.constant as u32) | high;
                self.at += 1;
            }
            MOVE => *to = from,
            MOVE_CONSTANT => *to = k,
            ADD => *to = to.wrapping_add(from),
            MULTIPLY => *to = to.wrapping_mul(from),
            AND_CONSTANT => *to &= k,
            SHIFT_LEFT => *to <<= k,
            SHIFT_RIGHT => *to >>= k,
            MODULO_CONSTANT => *to %= k,
            code => panic!("no instruction {code:#x}"),
        }
        Then::Next
    }
}

/// Runs a program that sees a frame from offset `front` on.
fn run_from(program: &[Ebpf], frame: &[u8], front: u64) -> u64 {
    let mut machine = Machine { program, frame, front, r: [0; 11], at: 0 };
    for _ in 0..1000 {
        if let Then::End(result) = machine.step() {
            return result;
        }
    }
    panic!("it does not end");
}

/// A frame from `src` to `dst` with `options` words of IPv4 options.
fn frame(src: SocketAddr, dst: SocketAddr, protocol: u8, options: u8) -> Vec<u8> {
    let mut f = vec![0; 12];
    match (src, dst) {
        (SocketAddr::V4(s), SocketAddr::V4(d)) => {
            f.extend(eth::IPV4.to_be_bytes());
            f.extend([0x45 + options, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
            f.extend(s.ip().octets());
            f.extend(d.ip().octets());
            f.extend(vec![1; 4 * usize::from(options)]);
        }
        (SocketAddr::V6(s), SocketAddr::V6(d)) => {
            f.extend(eth::IPV6.to_be_bytes());
            f.extend([0x60, 0, 0, 0, 0, 20, protocol, 64]);
            f.extend(s.ip().octets());
            f.extend(d.ip().octets());
        }
        _ => panic!("one version"),
    }
    f.extend(src.port().to_be_bytes());
    f.extend(dst.port().to_be_bytes());
    f.extend([0; 16]);
    f
}

proptest! {
    #[test]
    fn the_program_and_the_stack_name_the_same_owner(
        a: [u8; 16], b: [u8; 16], ports: (u16, u16),
        is_v6: bool, is_udp: bool, options in 0u8..11, queues in 1u16..33, key: [u64; OwnerKey::WORDS],
    ) {
        let key = OwnerKey::new(key);
        let address = |bytes: [u8; 16], port| match is_v6 {
            true => SocketAddr::from((bytes, port)),
            false => SocketAddr::from((*bytes.first_chunk::<4>().unwrap(), port)),
        };
        let (src, dst) = (address(a, ports.0), address(b, ports.1));
        let kind = if is_udp { protocol::UDP } else { protocol::TCP };
        let frame = frame(src, dst, kind, options);
        let owner = key.owner(&FlowKey::new(dst, src), queues);
        prop_assert_eq!(run(&program(queues, &key), &frame), u64::from(owner));
        prop_assert_eq!(run_in_group(&group_program(queues, &key), &frame), u64::from(owner));
    }

    #[test]
    fn any_bytes_at_all_go_to_a_queue_that_exists(
        bytes in proptest::collection::vec(any::<u8>(), 0..100), queues in 1u16..33, key: [u64; OwnerKey::WORDS],
    ) {
        let key = OwnerKey::new(key);
        prop_assert!(run(&program(queues, &key), &bytes) < u64::from(queues));
        prop_assert!(run_in_group(&group_program(queues, &key), &bytes) < u64::from(queues));
    }
}

#[test]
fn packets_without_ports_go_to_the_first_queue() {
    let (a, b) = ("10.0.0.1:0".parse().unwrap(), "10.0.0.2:0".parse().unwrap());
    let p = program(7, &OwnerKey::new([1 << 40; OwnerKey::WORDS]));
    assert_eq!(run(&p, &frame(a, b, protocol::ICMP, 0)), 0);
    let mut fragment = frame(a, b, protocol::UDP, 0);
    for bits in [[0x20, 0], [0, 9]] {
        fragment[20..22].copy_from_slice(&bits);
        assert_eq!(run(&p, &fragment), 0);
    }
    let mut arp = vec![0; 60];
    arp[12..14].copy_from_slice(&eth::ARP.to_be_bytes());
    assert_eq!(run(&p, &arp), 0);
    assert_eq!(run(&p, &[]), 0);
}
