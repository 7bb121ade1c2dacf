//! The two ratios of the sendfile rewrite; its table was not kept.

use super::{Method, Pair, Published};
use crate::send::bench::What;

/// The published ratios.
pub const TABLE: Published = Published {
    name: "sendfile",
    what: What::SendFile,
    title: "sendfile in two loops, a chain of pages per send, against a page at a time",
    source: "the rewrite of sendfile for FreeBSD, September 2006: 45 % less CPU without TSO, 83 % \
             less with it; the table behind these figures is not in any archive",
    setup: "the machines of the sosend table: Opteron 852 (2.6 GHz), em(4), gigabit Ethernet; a file \
            in the page cache",
    differs: "Then a page was mapped into the kernel and handed to the card by reference, so that \
              no byte was touched. fulmar reads the page cache into its own buffers: one copy, no \
              faults; both ways here have the same page source, so the copy is in both. Then the \
              wire was the limit; here nothing limits the rate.",
    methods: [
        Method { name: "old", title: "old: a page at a time" },
        Method { name: "ours_read", title: "new: two loops, pread" },
        Method { name: "read_write", title: "read + write" },
    ],
    pairs: &[
        Pair {
            number: 1,
            bytes: 64 << 10,
            tso: false,
            rows: None,
            cpu_ratio: 1.81,
            machine_ratio: None,
        },
        Pair {
            number: 2,
            bytes: 64 << 10,
            tso: true,
            rows: None,
            cpu_ratio: 5.7,
            machine_ratio: None,
        },
    ],
    kernel: "kernel_sendfile",
};
