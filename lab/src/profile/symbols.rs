//! To which part of the work a sample belongs.
//!
//! What is in this program is asked of its debug information, which knows the functions that were
//! inlined and the source file of each: the file says the room. What is in the kernel goes by the
//! names of its functions, from the innermost outwards until one is known.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use addr2line::Loader;

use super::perf::{Frame, Sample};
use super::{Part, Shares};

/// A function, inlined or not.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Function {
    name: String,
    file: String,
}

/// Looks functions of this program up by their place in its file.
pub struct Symbols {
    loader: Option<Loader>,
    exe: String,
    /// Loaded segments: file offset, length, address.
    segments: Vec<(u64, u64, u64)>,
    known: HashMap<u64, Vec<Function>>,
}

impl Symbols {
    /// The symbols of the running program. Without debug information there are only the names that samples have.
    pub fn of_this_program() -> Symbols {
        let exe = fs::canonicalize("/proc/self/exe").unwrap_or_default();
        let head = fs::read(&exe).unwrap_or_default();
        Symbols {
            loader: Loader::new(&exe).ok(),
            exe: exe.to_string_lossy().into_owned(),
            segments: segments(&head),
            known: HashMap::new(),
        }
    }

    /// The functions at a place, innermost first: those that were inlined, then the one that was not.
    fn at(&mut self, frame: &Frame) -> Vec<Function> {
        let named = || vec![Function { name: frame.function.clone(), file: String::new() }];
        if frame.file != self.exe {
            return named();
        }
        if let Some(known) = self.known.get(&frame.address) {
            return known.clone();
        }
        let address = address_of(&self.segments, frame.address);
        let mut found = Vec::new();
        if let Some(Ok(mut frames)) = self.loader.as_ref().map(|l| l.find_frames(address)) {
            while let Ok(Some(f)) = frames.next() {
                let name = f.function.as_ref().and_then(|n| n.demangle().ok());
                let Some(name) = name else { continue };
                let file = f.location.as_ref().and_then(|l| l.file).unwrap_or_default();
                found.push(Function { name: name.into_owned(), file: file.to_owned() });
            }
        }
        let found = if found.is_empty() { named() } else { found };
        self.known.insert(frame.address, found.clone());
        found
    }

    /// The part that a sample belongs to.
    pub fn part_of(&mut self, sample: &Sample) -> Part {
        let kernel: Vec<&Frame> = sample.frames.iter().take_while(|f| f.is_kernel()).collect();
        if !kernel.is_empty() {
            return part_of_kernel(kernel.iter().map(|f| f.function.as_str()));
        }
        let Some(frame) = sample.frames.first() else { return Part::System };
        let mut functions = self.at(frame);
        // The name of a library function says little; its caller may say more.
        if !is_ours(&functions) && !is_copy(&frame.function) && sample.frames.len() > 1 {
            functions.extend(self.at(&sample.frames[1]));
        }
        part_of_program(&functions)
    }

    /// How the samples divide.
    pub fn shares<'a>(&mut self, samples: impl IntoIterator<Item = &'a Sample>) -> Shares {
        let mut shares = Shares::default();
        samples.into_iter().for_each(|s| shares.add(self.part_of(s), 1.0));
        shares
    }

    /// The samples as folded stacks, inlined functions as boxes of their own. Frames without a name
    /// are left out: a stack of code without frame pointers has a few that are none.
    pub fn folded<'a>(
        &mut self,
        samples: impl IntoIterator<Item = &'a Sample>,
    ) -> BTreeMap<String, u64> {
        let mut stacks = BTreeMap::new();
        for sample in samples {
            let mut stack = vec![clean(&sample.thread), self.part_of(sample).name().to_owned()];
            for frame in sample.frames.iter().rev().filter(|f| f.function != "[unknown]") {
                stack.extend(self.at(frame).iter().rev().map(|f| clean(&f.name)));
            }
            *stacks.entry(stack.join(";")).or_insert(0) += 1;
        }
        stacks
    }

    /// The kernel's and the program's innermost functions by how often they were met, most first.
    pub fn top<'a>(
        &mut self,
        samples: impl IntoIterator<Item = &'a Sample>,
        most: usize,
    ) -> Vec<(String, u64)> {
        let mut counts: HashMap<String, u64> = HashMap::new();
        for sample in samples {
            if let Some(frame) = sample.frames.first() {
                let name = self.at(frame).first().map(|f| f.name.clone());
                *counts.entry(name.unwrap_or_default()).or_insert(0) += 1;
            }
        }
        let mut all: Vec<(String, u64)> = counts.into_iter().collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        all.truncate(most);
        all
    }
}

/// Semicolons separate the boxes of a folded stack, and the last word of a line is its weight.
fn clean(name: &str) -> String {
    name.replace([';', '\n'], ",")
}

/// Loadable segments of a 64-bit ELF file: file offset, length in the file, address (gABI, program
/// headers). Nothing for anything else.
fn segments(file: &[u8]) -> Vec<(u64, u64, u64)> {
    let word = |at: usize, bytes: usize| -> Option<u64> {
        let piece = file.get(at..at.checked_add(bytes)?)?;
        Some(piece.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    };
    let read = || -> Option<Vec<(u64, u64, u64)>> {
        let is_elf64 = file.get(..6)? == b"\x7fELF\x02\x01";
        let (at, size, count) = (word(32, 8)?, word(54, 2)?, word(56, 2)?);
        let mut found = Vec::new();
        for i in (0..count).filter(|_| is_elf64) {
            let head = usize::try_from(at.checked_add(i * size)?).ok()?;
            if word(head, 4)? == 1 {
                found.push((word(head + 8, 8)?, word(head + 32, 8)?, word(head + 16, 8)?));
            }
        }
        Some(found)
    };
    read().unwrap_or_default()
}

/// The address at which a place in the file is loaded.
fn address_of(segments: &[(u64, u64, u64)], offset: u64) -> u64 {
    let holds = |(from, len, _): &&(u64, u64, u64)| offset >= *from && offset - from < *len;
    segments.iter().find(holds).map_or(offset, |(from, _, address)| offset - from + address)
}

fn is_ours(functions: &[Function]) -> bool {
    functions.iter().any(|f| room_of(&f.file).is_some())
}

/// `stack/src/tcp/output.rs` is in room `tcp`, file `output.rs`.
fn room_of(file: &str) -> Option<(&str, &str)> {
    let below = |folder: &str| file.rsplit_once(folder).map(|(_, rest)| rest);
    let room = below("stack/src/").or_else(|| below("sockets/src/"));
    room.and_then(|rest| rest.split_once('/'))
        .or_else(|| Some(("gateway", below("gateway/src/")?)))
        .or_else(|| Some(("cli", below("cli/src/")?)))
        .or_else(|| Some(("lab", below("lab/src/")?)))
}

fn is_copy(function: &str) -> bool {
    ["memcpy", "memmove", "copy_nonoverlapping", "memset"].iter().any(|c| function.contains(c))
}

/// Files of room `runtime` in which threads wait.
const WAITING: [&str; 12] = [
    "host.rs",
    "host/wait.rs",
    "host/wait_guard.rs",
    "leader.rs",
    "sleep.rs",
    "waiter.rs",
    "spin.rs",
    "service.rs",
    "service_thread.rs",
    "poll_set.rs",
    "watch.rs",
    "reentry.rs",
];

/// By the innermost function that has a room.
fn part_of_program(functions: &[Function]) -> Part {
    if functions.first().is_some_and(|f| is_copy(&f.name)) {
        return Part::Copy;
    }
    let Some((room, file)) = functions.iter().find_map(|f| room_of(&f.file)) else {
        let first = functions.first().map_or("", |f| f.name.as_str());
        let waits = ["futex", "poll", "sched", "yield", "pthread"];
        return match first {
            "[unknown]" | "" => Part::System,
            name if waits.iter().any(|w| name.contains(w)) => Part::WakeUps,
            _ => Part::System,
        };
    };
    match room {
        "wire" if file.starts_with("checksum") => Part::Copy,
        "mbuf" if file.starts_with("sums") => Part::Copy,
        "mbuf" => Part::Memory,
        "drivers" | "device" => Part::Device,
        "runtime" if WAITING.contains(&file) => Part::WakeUps,
        "runtime" if file == "sys.rs" => Part::Locks,
        "lab" | "cli" => Part::Program,
        _ => Part::Protocol,
    }
}

/// The kernel's functions by how their names begin, in the order in which they are asked.
const KERNEL: [(Part, &str); 5] = [
    (
        Part::Copy,
        "copy_ _copy_ __copy rep_movs memcpy memmove csum __csum skb_copy do_csum __memcpy memset \
         skb_do_copy",
    ),
    (
        Part::Memory,
        "kmem_cache kmalloc __kmalloc kfree __kfree skb_release __alloc_skb alloc_skb consume_skb \
         napi_consume page_frag alloc_pages __alloc_pages __alloc_frozen free_pages free_unref \
         free_frozen page_pool __slab ___slab slab_ skb_free napi_alloc napi_build build_skb \
         put_page get_page_from rmqueue sk_page_frag skb_page_frag tcp_stream_alloc \
         sk_stream_alloc __folio_put __netdev_alloc skb_attempt refill_ __refill sheaf __free_",
    ),
    (
        Part::WakeUps,
        "try_to_wake ttwu wake_ __wake schedule __schedule pick_ enqueue_task dequeue_ \
         enqueue_entity update_curr finish_task finish_wait prepare_to switch_ __switch futex \
         do_futex __x64_sys_futex poll_schedule ep_ do_poll do_sys_poll sock_def_readable \
         sock_poll hrtimer do_nanosleep resched select_task tick_ eventfd sched_ update_load \
         set_next put_prev native_smp smp_call available_idle yield do_sched add_wait remove_wait \
         sk_wait wait_woken __remove_hrtimer timerqueue",
    ),
    (
        Part::Device,
        "veth_ tun_ tap_ virtio virtqueue vring vp_ packet_ tpacket_ dev_hard_start napi_ __napi \
         net_rx __netif netif_ process_backlog dev_queue __dev_queue __dev_ sch_ qdisc __qdisc \
         pfifo validate_xmit gro_ dev_gro eth_ enqueue_to_backlog io_uring io_ skb_gso net_tx \
         ptr_ring sock_alloc_send",
    ),
    (
        Part::Protocol,
        "tcp_ __tcp ip_ __ip ipv4 ip6 inet __inet udp_ __udp nf_ sk_ __sk sock_ __sock bbr_ cubic \
         bictcp fib_ skb_ __skb lock_sock release_sock __release_sock __lock_sock dst_ neigh arp \
         raw_ __cookie siphash minmax",
    ),
];

fn part_of_kernel<'a>(functions: impl Iterator<Item = &'a str>) -> Part {
    for name in functions {
        for (part, prefixes) in &KERNEL {
            if prefixes.split_whitespace().any(|p| name.starts_with(p)) {
                return *part;
            }
        }
    }
    Part::System
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_kernel_function_that_is_known_decides() {
        let of = |names: &[&str]| part_of_kernel(names.iter().copied());
        assert_eq!(of(&["clear_bhb", "kmem_cache_free", "tcp_ack"]), Part::Memory);
        assert_eq!(of(&["rep_movs_alternative", "tun_get_user"]), Part::Copy);
        assert_eq!(of(&["tun_get_user", "vfs_write"]), Part::Device);
        assert_eq!(of(&["_raw_spin_lock", "tcp_v4_rcv"]), Part::Protocol);
        assert_eq!(of(&["entry_SYSCALL_64", "do_syscall_64"]), Part::System);
    }

    #[test]
    fn the_source_file_of_the_innermost_function_names_the_room() {
        let f = |name: &str, file: &str| Function { name: name.into(), file: file.into() };
        let core = f("core::slice::get", "/rustc/library/core/src/slice.rs");
        let part = |file: &str| part_of_program(&[core.clone(), f("f", file)]);
        assert_eq!(part("/x/stack/src/mbuf/pool.rs"), Part::Memory);
        assert_eq!(part("stack/src/mbuf/sums.rs"), Part::Copy);
        assert_eq!(part("stack/src/tcp/output.rs"), Part::Protocol);
        assert_eq!(part("sockets/src/runtime/waiter.rs"), Part::WakeUps);
        assert_eq!(part("sockets/src/drivers/tap.rs"), Part::Device);
        assert_eq!(part("lab/src/send/mod.rs"), Part::Program);
        assert_eq!(part_of_program(&[f("__memmove_avx", "")]), Part::Copy);
    }

    #[test]
    fn a_function_of_this_program_is_found_with_its_file() {
        let mut symbols = Symbols::of_this_program();
        assert!(!symbols.segments.is_empty(), "the running program is an ELF file");
        let exe = symbols.exe.clone();
        // Any place in the text will do: most have a name.
        let (offset, len, _) = *symbols.segments.iter().max_by_key(|s| s.1).unwrap();
        let named = (0..256).filter(|i| {
            let address = offset + len / 256 * i;
            let frame = Frame { address, function: "[unknown]".into(), file: exe.clone() };
            symbols.at(&frame).iter().any(|f| f.name != "[unknown]")
        });
        assert!(named.count() > 0);
    }

    #[test]
    fn a_file_other_than_elf_has_no_segments() {
        let mut head = fs::read("/proc/self/exe").unwrap();
        head.truncate(2000);
        for end in (0..head.len()).step_by(7) {
            segments(&head[..end]);
        }
        assert!(segments(b"#!/bin/sh").is_empty());
    }

    #[test]
    fn a_place_in_the_file_becomes_an_address() {
        let segments = [(0, 0x1000, 0), (0x1000, 0x500, 0x2000)];
        assert_eq!(address_of(&segments, 0x1010), 0x2010);
        assert_eq!(address_of(&segments, 0x10), 0x10);
        assert_eq!(address_of(&segments, 0x9999), 0x9999);
    }
}
