//! The machine code of the released path has no trace of a probe: from its entry points, no call leads
//! to the account or to the exit points. That the search would find one is shown by the forms that have
//! them, from each entry on its own.
//!
//! The test reads the functions of its own program: where they begin and end is in the symbol table,
//! and a call is an opcode with a distance, or with the place of an address in the table of addresses.
//!
//! What it cannot see: what a probe does without a call (a counter that is read in place; the two kinds
//! of probe ask through functions that a build with debug assertions, as this one, does not inline);
//! what is called through a register (devices, wakers); what happens outside of a shard (a copy, the
//! lock, the sleep, all in `Host`); and builds other than its own, of which that for release is
//! optimised across crates. There nothing can come back: that the calls of the released form are empty
//! is decided before, by the type of its probe.
#![cfg(target_arch = "x86_64")]

use std::collections::{BTreeMap, HashSet};

use fulmar_base::{Instant, NoProbe, Probe, SlotId};
use fulmar_mbuf::Chain;
use fulmar_runtime::{Account, Exit};
use fulmar_shard::{RecvMessage, SendMessage, Shard};

/// The running program.
struct Program {
    file: Vec<u8>,
    memory: std::fs::File,
    /// Address: file offset, length, name.
    functions: BTreeMap<u64, (usize, usize, String)>,
    /// What is added to addresses when it is loaded.
    bias: u64,
}

fn word(file: &[u8], at: u64, bytes: usize) -> u64 {
    let at = at as usize;
    file[at..at + bytes].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

impl Program {
    /// Reads sections and symbols (gABI, 64-bit).
    fn read() -> Program {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let own = |l: &&str| l.ends_with(exe.to_str().unwrap());
        let first = maps.lines().find(own).expect("the program is mapped");
        let bias = u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap();
        let (at, size) = (word(&file, 0x28, 8), word(&file, 0x3a, 2));
        let section = |i: u64| {
            let head = at + i * size;
            let field = |offset, bytes| word(&file, head + offset, bytes);
            // Type, address, offset, length, linked section.
            (field(4, 4), field(16, 8), field(24, 8), field(32, 8), field(40, 4))
        };
        let count = word(&file, 0x3c, 2);
        let sections: Vec<_> = (0..count).map(section).collect();
        let symbols = *sections.iter().find(|s| s.0 == 2).expect("a symbol table");
        let names = sections[symbols.4 as usize].2;
        let mut functions = BTreeMap::new();
        for i in 0..symbols.3 / 24 {
            let s = symbols.2 + i * 24;
            let (kind, home) = (word(&file, s + 4, 1) & 15, word(&file, s + 6, 2));
            let (address, length) = (word(&file, s + 8, 8), word(&file, s + 16, 8) as usize);
            if kind != 2 || length == 0 || home == 0 || home >= count {
                continue;
            }
            let code = sections[home as usize];
            let from = (address - code.1 + code.2) as usize;
            let start = (names + word(&file, s, 4)) as usize;
            let end = start + file[start..].iter().position(|b| *b == 0).unwrap();
            let name = String::from_utf8_lossy(&file[start..end]).into_owned();
            functions.insert(address, (from, length, name));
        }
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        Program { file, memory, functions, bias }
    }

    /// What the running program holds at an address, if it is an address.
    fn word_in_memory(&self, address: u64) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; 8];
        match self.memory.read_exact_at(&mut bytes, address.wrapping_add(self.bias)) {
            Ok(()) => u64::from_le_bytes(bytes).wrapping_sub(self.bias),
            Err(_) => 0,
        }
    }

    /// The names of all functions that calls lead to from these.
    fn reached(&self, from: &[usize]) -> HashSet<&str> {
        let mut open: Vec<u64> = from.iter().map(|f| *f as u64 - self.bias).collect();
        let mut seen = HashSet::new();
        while let Some(address) = open.pop() {
            let Some((from, length, _)) = self.functions.get(&address) else { continue };
            if !seen.insert(address) {
                continue;
            }
            let code = &self.file[*from..*from + *length];
            for at in 0..code.len().saturating_sub(4) {
                let distance = i32::from_le_bytes(code[at + 1..at + 5].try_into().unwrap());
                let next = address + at as u64 + 5;
                let to = next.wrapping_add_signed(i64::from(distance));
                // A call, or a jump to what is called last: straight, or by the table of addresses.
                let to = match (code[at], at.checked_sub(1).map(|b| code[b])) {
                    (0xe8 | 0xe9, _) => to,
                    (0x15 | 0x25, Some(0xff)) => self.word_in_memory(to),
                    _ => continue,
                };
                open.extend(self.functions.contains_key(&to).then_some(to));
            }
        }
        seen.iter().map(|a| self.functions[a].2.as_str()).collect()
    }
}

/// Where the paths begin, by name: sending and receiving, both transports.
fn entries<P: Probe>() -> Vec<(&'static str, usize)> {
    type S<P> = Shard<P>;
    let step: fn(&mut S<P>, Instant, usize) -> usize = S::<P>::step;
    let look: fn(&mut S<P>, Instant) -> usize = S::<P>::step_for_reader;
    let reserve = S::<P>::tcp_reserve as fn(&mut S<P>, Instant, SlotId, &[u8], usize, bool) -> _;
    let commit = S::<P>::tcp_commit as fn(&mut S<P>, Instant, SlotId, _);
    let append = S::<P>::tcp_append as fn(&mut S<P>, Instant, SlotId, &mut Chain, bool) -> _;
    let take = S::<P>::tcp_take as fn(&mut S<P>, SlotId, usize) -> _;
    let read = S::<P>::tcp_read_done as fn(&mut S<P>, Instant, SlotId, Chain);
    let datagram = S::<P>::udp_send as fn(&mut S<P>, Instant, SlotId, &[&[u8]], _) -> _;
    let connected = S::<P>::udp_send_connected as fn(&mut S<P>, Instant, SlotId, &[u8]) -> _;
    let many = S::<P>::udp_send_many as fn(&mut S<P>, Instant, SlotId, &[SendMessage], bool) -> _;
    let receive = S::<P>::udp_receive as fn(&mut S<P>, SlotId) -> _;
    let into = S::<P>::udp_receive_into as fn(&mut S<P>, SlotId, &mut [u8]) -> _;
    let into_many = S::<P>::udp_receive_many as fn(&mut S<P>, SlotId, &mut [RecvMessage]) -> _;
    vec![
        ("step", step as usize),
        ("step_for_reader", look as usize),
        ("tcp_reserve", reserve as usize),
        ("tcp_commit", commit as usize),
        ("tcp_append", append as usize),
        ("tcp_take", take as usize),
        ("tcp_read_done", read as usize),
        ("udp_send", datagram as usize),
        ("udp_send_connected", connected as usize),
        ("udp_send_many", many as usize),
        ("udp_receive", receive as usize),
        ("udp_receive_into", into as usize),
        ("udp_receive_many", into_many as usize),
    ]
}

fn is_account(name: &str) -> bool {
    name.contains("account") && name.contains("note")
}

fn is_exit(name: &str) -> bool {
    name.contains("exit") && (name.contains("is_at") || name.contains("is_varied"))
}

/// What is found from every entry on its own.
fn each<P: Probe>(program: &Program, is_probe: fn(&str) -> bool) {
    for (entry, address) in entries::<P>() {
        let found = program.reached(&[address]).into_iter().any(is_probe);
        assert!(found, "from {entry} no call leads to the probe that is there");
    }
}

#[test]
fn no_call_of_the_released_path_leads_to_a_probe() {
    let program = Program::read();
    let addresses: Vec<usize> = entries::<NoProbe>().into_iter().map(|e| e.1).collect();
    let released = program.reached(&addresses);
    assert!(released.len() > 50, "the search found only {} functions", released.len());
    assert_eq!(released.iter().find(|name| is_account(name) || is_exit(name)), None);
}

#[test]
fn the_same_search_finds_the_probe_from_every_entry_of_the_forms_that_have_one() {
    let program = Program::read();
    each::<Account>(&program, is_account);
    each::<Exit>(&program, is_exit);
}
