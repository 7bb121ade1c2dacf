//! A BPF program that steers each packet to the queue of the shard that owns its flow.
//!
//! Computes [`OwnerKey::hash`] of TCP and UDP over IPv4 and IPv6, modulo the number of queues. The key of the stack is
//! among its constants, which only a process with the privilege to read BPF programs can see. All other packets (ARP,
//! ICMP, fragments, IPv6 with extension headers) go to queue 0, and shards hand them over. Runs where the kernel
//! chooses the queue of a TAP, on frames that start at the Ethernet header (TUNSETSTEERINGEBPF, a program of type
//! socket filter), and of a group of packet sockets, on frames that start at the IP header ([`group_program`]). Loading
//! it needs CAP_BPF in the first user namespace, unless `kernel.unprivileged_bpf_disabled` is 0.
//!
//! Registers: r6 is the packet (BPF_ABS and BPF_IND use it), r7 where the IP header ends, r8 the destination's
//! port, r9 the sum; r0 and r1 are scratch, since such a load clobbers r1 to r5. A load beyond the end of
//! the packet ends the program with 0. Source: Documentation/bpf/standardization/instruction-set.rst.

use fulmar_stack::base::OwnerKey;
use fulmar_stack::wire::{eth, protocol};

use crate::drivers::sys::Ebpf;

const LOAD_WORD: u8 = 0x20;
const LOAD_HALF: u8 = 0x28;
const LOAD_BYTE: u8 = 0x30;
/// A half at an offset from a register.
const LOAD_HALF_AT: u8 = 0x48;
const LOAD_CONSTANT: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_CONSTANT: u8 = 0xb7;
const ADD: u8 = 0x0f;
const MULTIPLY: u8 = 0x2f;
const AND_CONSTANT: u8 = 0x57;
const SHIFT_LEFT: u8 = 0x67;
const SHIFT_RIGHT: u8 = 0x77;
const MODULO_CONSTANT: u8 = 0x97;
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const JUMP_IF_SET: u8 = 0x45;
const EXIT: u8 = 0x95;

const ETHER: i32 = eth::HEADER_BYTES as i32;

/// The program for `queues` queues.
pub(super) fn program(queues: u16, key: &OwnerKey) -> Vec<Ebpf> {
    let [first, ..] = *key.words();
    let mut p = vec![op(MOVE, 6, 1, 0)];
    p.extend(constant(9, first));
    p.push(op(LOAD_HALF, 0, 0, 12));
    p.extend(by_version(&ipv4(key), &ipv6(key)));
    p.extend(finish(queues));
    p
}

/// Runs the code of the IP version whose EtherType is in r0, and continues after it; any other exits with queue 0.
fn by_version(v4: &[Ebpf], v6: &[Ebpf]) -> Vec<Ebpf> {
    let mut p = vec![jump(JUMP_UNLESS_EQUAL, i32::from(eth::IPV4), v4.len() + 1)];
    p.extend(v4);
    p.push(jump(JUMP_IF_EQUAL, 0, 0).always(v6.len() + 4));
    p.push(jump(JUMP_UNLESS_EQUAL, i32::from(eth::IPV6), v6.len() + 1));
    p.extend(v6);
    p.extend([jump(JUMP_IF_EQUAL, 0, 0).always(2), op(MOVE_CONSTANT, 0, 0, 0), op(EXIT, 0, 0, 0)]);
    p
}

/// As [`program`] for a group of packet sockets, where offsets count from the IP header
/// (PACKET_FANOUT_EBPF).
pub(super) fn group_program(queues: u16, key: &OwnerKey) -> Vec<Ebpf> {
    /// Base of offsets that count from the Ethernet header (SKF_LL_OFF of linux/filter.h).
    const LINK_LAYER: i32 = -0x20_0000;
    const ETHER_TYPE: i32 = 12;
    let mut p = program(queues, key);
    for i in &mut p {
        match i.code {
            LOAD_HALF if i.constant == ETHER_TYPE => i.constant += LINK_LAYER,
            LOAD_WORD | LOAD_HALF | LOAD_BYTE | LOAD_HALF_AT => i.constant -= ETHER,
            _ => {}
        }
    }
    p
}

/// Adds addresses and ports of an IPv4 packet to r9; exits with queue 0 if the packet has no ports.
fn ipv4(key: &OwnerKey) -> Vec<Ebpf> {
    const MORE_OR_OFFSET: i32 = 0x3fff;
    let [_, _, _, _, address, ports] = *key.words();
    let mut p = vec![op(LOAD_HALF, 0, 0, ETHER + 6)];
    p.extend(leave_if(JUMP_IF_SET, MORE_OR_OFFSET));
    p.push(op(LOAD_BYTE, 0, 0, ETHER + 9));
    p.extend(leave_unless_transport());
    p.extend([
        op(LOAD_BYTE, 0, 0, ETHER),
        op(AND_CONSTANT, 0, 0, 0x0f),
        op(SHIFT_LEFT, 0, 0, 2),
        op(MOVE, 7, 0, 0),
    ]);
    p.extend(add_word(16, address));
    p.extend(add_word(12, address));
    p.extend(add_ports(ports));
    p
}

/// As [`ipv4`], for IPv6.
fn ipv6(key: &OwnerKey) -> Vec<Ebpf> {
    let [_, a, b, c, d, ports] = *key.words();
    let mut p = vec![op(LOAD_BYTE, 0, 0, ETHER + 6)];
    p.extend(leave_unless_transport());
    p.push(op(MOVE_CONSTANT, 7, 0, 40));
    let words = [(24, a), (28, b), (32, c), (36, d), (8, a), (12, b), (16, c), (20, d)];
    p.extend(words.into_iter().flat_map(|(at, k)| add_word(at, k)));
    p.extend(add_ports(ports));
    p
}

/// Adds a word of the IP header, times a word of the key, to r9.
fn add_word(at: i32, key: u64) -> Vec<Ebpf> {
    let mut p = vec![op(LOAD_WORD, 0, 0, ETHER + at)];
    p.extend(add_product(key));
    p
}

/// As [`add_word`], for the sum of both ports.
fn add_ports(key: u64) -> Vec<Ebpf> {
    let mut p = vec![
        op(LOAD_HALF_AT, 0, 7, ETHER + 2),
        op(MOVE, 8, 0, 0),
        op(LOAD_HALF_AT, 0, 7, ETHER),
        op(ADD, 0, 8, 0),
    ];
    p.extend(add_product(key));
    p
}

/// Adds r0, times a word of the key, to r9.
fn add_product(key: u64) -> [Ebpf; 4] {
    let [low, high] = constant(1, key);
    [low, high, op(MULTIPLY, 0, 1, 0), op(ADD, 9, 0, 0)]
}

/// The queue, from the sum.
fn finish(queues: u16) -> [Ebpf; 4] {
    [
        op(SHIFT_RIGHT, 9, 0, 32),
        op(MODULO_CONSTANT, 9, 0, i32::from(queues.max(1))),
        op(MOVE, 0, 9, 0),
        op(EXIT, 0, 0, 0),
    ]
}

/// Exits with queue 0 unless r0 is a transport protocol with ports.
fn leave_unless_transport() -> [Ebpf; 4] {
    [
        jump(JUMP_IF_EQUAL, i32::from(protocol::TCP), 3),
        jump(JUMP_IF_EQUAL, i32::from(protocol::UDP), 2),
        op(MOVE_CONSTANT, 0, 0, 0),
        op(EXIT, 0, 0, 0),
    ]
}

/// Exits with queue 0 if a comparison of r0 holds.
fn leave_if(comparison: u8, with: i32) -> [Ebpf; 4] {
    [
        jump(comparison, with, 1),
        jump(JUMP_IF_EQUAL, 0, 0).always(2),
        op(MOVE_CONSTANT, 0, 0, 0),
        op(EXIT, 0, 0, 0),
    ]
}

fn op(code: u8, to: u8, from: u8, constant: i32) -> Ebpf {
    Ebpf { code, registers: from << 4 | to, jump: 0, constant }
}

/// Compares r0 with a constant and jumps over `over` instructions.
fn jump(code: u8, with: i32, over: usize) -> Ebpf {
    Ebpf { code, registers: 0, jump: over as i16, constant: with }
}

/// A constant of 64 bits takes the place of two instructions.
fn constant(to: u8, value: u64) -> [Ebpf; 2] {
    let low = op(LOAD_CONSTANT, to, 0, value as u32 as i32);
    [low, op(0, 0, 0, (value >> 32) as u32 as i32)]
}

impl Ebpf {
    /// The same jump without a condition.
    fn always(self, over: usize) -> Ebpf {
        const JUMP: u8 = 0x05;
        Ebpf { code: JUMP, jump: over as i16, constant: 0, ..self }
    }
}

#[cfg(test)]
mod tests;
