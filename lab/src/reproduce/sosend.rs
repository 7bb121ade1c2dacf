//! The table of the sosend rewrite: all twelve rows, as printed.

use super::netperf::Netperf;
use super::{Method, Pair, Published};
use crate::send::bench::What;

/// The published table.
pub const TABLE: Published = Published {
    name: "sosend",
    what: What::Send,
    title: "a write that takes all its mbufs first and is sent once, against one mbuf at a time",
    source: "the rewrite of sosend for FreeBSD, September 2006: sosend_copyin (a) against m_getm \
             and m_uiotombuf (b); netperf 2.4.2, TCP_STREAM, \u{b1}2.5 % at 95 % confidence",
    setup: "sender: Opteron 852 (2.6 GHz), em(4), PCI-X; receiver: P4 Xeon (3.2 GHz); back to back \
            over gigabit Ethernet; socket buffers of both ends and the size of a write as given; \
            user, sys and time % are time(1)'s of the netperf process alone",
    differs: "Then the wire was the limit (941 Mbit/s) and CPU was what was left; here nothing \
              limits the rate, so a cheaper way also moves more bytes: compare CPU per KB, not \
              utilisation. Then each end had a machine; here both share one. One copy, which \
              every way makes, is measured in the same run and stands with the tables.",
    methods: [
        Method { name: "old", title: "old: 2 KiB at a time" },
        Method { name: "published", title: "new: 4 KiB mbufs, one send" },
        Method { name: "ours", title: "fulmar's write" },
    ],
    pairs: &[
        pair(
            (1, 32, false),
            Netperf::published([921.28, 28.42, 32.48, 2.527, 2.888], [0.007, 1.747, 10.00, 17.4]),
            Netperf::published([921.39, 24.51, 31.50, 2.179, 2.801], [0.028, 0.768, 10.00, 7.8]),
        ),
        pair(
            (2, 32, true),
            Netperf::published([897.63, 24.29, 37.74, 2.216, 3.445], [0.000, 1.359, 10.02, 13.4]),
            Netperf::published([919.71, 15.64, 33.01, 1.393, 2.940], [0.008, 0.528, 10.00, 5.2]),
        ),
        pair(
            (3, 64, false),
            Netperf::published([941.60, 30.90, 32.01, 2.689, 2.785], [0.000, 1.827, 10.00, 18.2]),
            Netperf::published([941.59, 26.39, 32.03, 2.296, 2.787], [0.014, 0.617, 10.00, 6.2]),
        ),
        pair(
            (4, 64, true),
            Netperf::published([921.98, 26.09, 39.47, 2.318, 3.507], [0.000, 1.467, 10.02, 14.5]),
            Netperf::published([938.44, 16.24, 34.29, 1.418, 2.993], [0.000, 0.511, 10.00, 5.1]),
        ),
        pair(
            (5, 128, false),
            Netperf::published([941.62, 33.81, 33.68, 2.941, 2.930], [0.000, 2.158, 10.00, 21.5]),
            Netperf::published([941.60, 28.55, 31.65, 2.484, 2.754], [0.000, 0.676, 10.00, 6.7]),
        ),
        pair(
            (6, 128, true),
            Netperf::published([922.92, 28.72, 40.80, 2.549, 3.621], [0.000, 1.713, 10.00, 17.1]),
            Netperf::published([939.14, 18.20, 34.44, 1.587, 3.004], [0.000, 0.587, 10.00, 5.8]),
        ),
    ],
    kernel: "kernel_write",
};

const fn pair((number, kib, tso): (u32, usize, bool), old: Netperf, new: Netperf) -> Pair {
    Pair {
        number,
        bytes: kib << 10,
        tso,
        cpu_ratio: old.process_ns_per_kb / new.process_ns_per_kb,
        machine_ratio: Some(old.machine_ns_per_kb / new.machine_ns_per_kb),
        rows: Some([old, new]),
    }
}
