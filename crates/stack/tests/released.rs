//! The machine code of the released path has no trace of the probe: from its entry points, no call
//! leads to the account. That the search would find one is shown by the form that keeps one.
//!
//! The test reads the functions of its own program: where they begin and end is in the symbol table,
//! and a call is an opcode with a distance, or with the place of an address in the table of addresses.
#![cfg(target_arch = "x86_64")]

use std::collections::{BTreeMap, HashSet};

use fulmar_base::{Instant, NoProbe, Probe, SlotId};
use fulmar_stack::{Account, Shard};

/// The running program.
struct Program {
    file: Vec<u8>,
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
        Program { file, functions, bias }
    }

    /// What the running program holds at an address, if it is an address.
    fn word_in_memory(&self, address: u64) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; 8];
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        match memory.read_exact_at(&mut bytes, address.wrapping_add(self.bias)) {
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

/// Where the paths begin: sending and receiving, both transports.
fn entries<P: Probe>() -> [usize; 5] {
    let step: fn(&mut Shard<P>, Instant, usize) -> usize = Shard::<P>::step;
    let reserve =
        Shard::<P>::tcp_reserve as fn(&mut Shard<P>, Instant, SlotId, &[u8], usize, bool) -> _;
    let commit = Shard::<P>::tcp_commit as fn(&mut Shard<P>, Instant, SlotId, _);
    let read = Shard::<P>::tcp_read_done as fn(&mut Shard<P>, Instant, SlotId, _);
    let datagram = Shard::<P>::udp_send as fn(&mut Shard<P>, Instant, SlotId, &[&[u8]], _) -> _;
    [step as usize, reserve as usize, commit as usize, read as usize, datagram as usize]
}

fn is_account(name: &&&str) -> bool {
    name.contains("account") && name.contains("note")
}

#[test]
fn no_call_of_the_released_path_leads_to_the_account() {
    let program = Program::read();
    let released = program.reached(&entries::<NoProbe>());
    let accounted = program.reached(&entries::<Account>());
    assert!(released.len() > 50, "the search found only {} functions", released.len());
    assert_eq!(released.iter().find(is_account), None);
    // The same search, where there is something to be found.
    assert!(accounted.iter().any(|name| is_account(&name)), "the search finds nothing anywhere");
}
