//! A BPF program that steers the packets of some TCP flows to queues of their own, and all others to
//! queue 0.
//!
//! A BPF map has the queue number of each such flow. Its key is nine words, built by [`flow_key`] and by the program:
//! sender's address, receiver's address (IPv4 mapped to IPv6), and both ports.
//!
//! Registers: r6 is the packet, r7 the end of the IP header, r10 the end of the stack, on which the key is built; r0 to
//! r2 are scratch.

use std::net::IpAddr;
use std::os::fd::RawFd;

use fulmar_stack::base::FlowKey;
use fulmar_stack::wire::protocol;

use super::{
    AND_CONSTANT, ETHER, EXIT, JUMP_IF_EQUAL, JUMP_IF_SET, LOAD_BYTE, LOAD_CONSTANT, LOAD_HALF,
    LOAD_WORD, MOVE, MOVE_CONSTANT, SHIFT_LEFT, by_version, jump, leave_if, op,
};
use crate::drivers::sys::{Ebpf, FlowWords};

/// A word at an offset from a register.
pub(super) const LOAD_WORD_AT: u8 = 0x40;
/// A word of memory, not of the packet.
pub(super) const READ_WORD: u8 = 0x61;
pub(super) const STORE_WORD: u8 = 0x63;
pub(super) const STORE_CONSTANT: u8 = 0x62;
pub(super) const ADD_CONSTANT: u8 = 0x07;
pub(super) const CALL: u8 = 0x85;
/// What [`CALL`] calls: `bpf_map_lookup_elem`.
pub(super) const LOOK_UP: i32 = 1;
/// Marks a constant as the descriptor of a map (BPF_PSEUDO_MAP_FD).
const IS_MAP: u8 = 1;
/// The end of the stack.
const STACK: u8 = 10;
const KEY_BYTES: i16 = size_of::<FlowWords>() as i16;

/// The key of a flow in the map.
pub fn flow_key(flow: &FlowKey) -> FlowWords {
    let [a, b, c, d] = words(flow.remote_ip());
    let [e, f, g, h] = words(flow.local_ip());
    let ports = u32::from(flow.remote_port) << 16 | u32::from(flow.local_port);
    [a, b, c, d, e, f, g, h, ports]
}

fn words(ip: IpAddr) -> [u32; 4] {
    let bits = match ip {
        IpAddr::V4(a) => a.to_ipv6_mapped().to_bits(),
        IpAddr::V6(a) => a.to_bits(),
    };
    [96, 64, 32, 0].map(|shift| (bits >> shift) as u32)
}

/// The program that looks flows up in this map.
pub fn flow_program(map: RawFd) -> Vec<Ebpf> {
    let mut p = vec![op(MOVE, 6, 1, 0), op(LOAD_HALF, 0, 0, 12)];
    p.extend(by_version(&ipv4(), &ipv6()));
    p.extend(look_up(map));
    p
}

/// Puts the key of an IPv4 packet onto the stack; exits with queue 0 if it is no whole TCP segment.
fn ipv4() -> Vec<Ebpf> {
    const MORE_OR_OFFSET: i32 = 0x3fff;
    const MAPPED: i32 = 0xffff;
    let mut p = vec![op(LOAD_HALF, 0, 0, ETHER + 6)];
    p.extend(leave_if(JUMP_IF_SET, MORE_OR_OFFSET));
    p.push(op(LOAD_BYTE, 0, 0, ETHER + 9));
    p.extend(leave_unless_tcp());
    for (word, address) in [(0, 12), (4, 16)] {
        p.extend([
            put_constant(word, 0),
            put_constant(word + 1, 0),
            put_constant(word + 2, MAPPED),
            op(LOAD_WORD, 0, 0, ETHER + address),
            put(word + 3),
        ]);
    }
    p.extend([
        op(LOAD_BYTE, 0, 0, ETHER),
        op(AND_CONSTANT, 0, 0, 0x0f),
        op(SHIFT_LEFT, 0, 0, 2),
        op(MOVE, 7, 0, 0),
        op(LOAD_WORD_AT, 0, 7, ETHER),
        put(8),
    ]);
    p
}

/// As [`ipv4`], for IPv6.
fn ipv6() -> Vec<Ebpf> {
    let mut p = vec![op(LOAD_BYTE, 0, 0, ETHER + 6)];
    p.extend(leave_unless_tcp());
    // Both addresses and the ports follow each other.
    for word in 0..9 {
        p.extend([op(LOAD_WORD, 0, 0, ETHER + 8 + 4 * i32::from(word)), put(word)]);
    }
    p
}

/// The queue of the key on the stack; 0 if the map does not have it.
fn look_up(map: RawFd) -> [Ebpf; 8] {
    [
        op(MOVE, 2, STACK, 0),
        op(ADD_CONSTANT, 2, 0, -i32::from(KEY_BYTES)),
        op(LOAD_CONSTANT, 1, IS_MAP, map),
        op(0, 0, 0, 0),
        op(CALL, 0, 0, LOOK_UP),
        jump(JUMP_IF_EQUAL, 0, 1),
        op(READ_WORD, 0, 0, 0),
        op(EXIT, 0, 0, 0),
    ]
}

/// Ends with queue 0 unless r0 is TCP.
fn leave_unless_tcp() -> [Ebpf; 3] {
    [
        jump(JUMP_IF_EQUAL, i32::from(protocol::TCP), 2),
        op(MOVE_CONSTANT, 0, 0, 0),
        op(EXIT, 0, 0, 0),
    ]
}

/// Puts r0 into a word of the key.
fn put(word: i16) -> Ebpf {
    Ebpf { jump: word * 4 - KEY_BYTES, ..op(STORE_WORD, STACK, 0, 0) }
}

/// Puts a constant there.
fn put_constant(word: i16, constant: i32) -> Ebpf {
    Ebpf { jump: word * 4 - KEY_BYTES, ..op(STORE_CONSTANT, STACK, 0, constant) }
}
