//! netperf's columns, as the published tables have them, computed from a bench's row.
//!
//! Definitions as netperf has them: utilisation is 0 to 100 % of a whole machine; service demand is
//! CPU time per KB (1024 bytes). The published runs had a machine per end, each measured whole. Here
//! both ends share one machine, so each end's CPU is that of its own process, and the whole machine
//! is a column of its own.

use crate::harness::report::{Column, number};
use crate::harness::{MACHINE, Row};
use crate::transfer::{GBPS, HARDWARE, PEER, THIS_END, THREAD};
use serde_json::{Value, json};

/// One row. What was not measured is not a number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Netperf {
    /// 10^6 bits per second.
    pub mbit_per_s: f64,
    /// CPU of the sending end, % of the machine.
    pub util_local_pct: f64,
    /// CPU of the receiving end, % of the machine.
    pub util_remote_pct: f64,
    /// Service demand of the sending end, µs per KB.
    pub sd_local_us_per_kb: f64,
    /// Service demand of the receiving end, µs per KB.
    pub sd_remote_us_per_kb: f64,
    /// The sending process in user mode, seconds in a run of [`Netperf::real_s`].
    pub user_s: f64,
    /// The sending process in the kernel, seconds.
    pub sys_s: f64,
    /// How long the run is taken to be, seconds.
    pub real_s: f64,
    /// `user_s + sys_s` in percent of `real_s`, as time(1) prints it.
    pub time_pct: f64,
    /// CPU of the sending process alone, ns per KB: what time(1) sees.
    pub process_ns_per_kb: f64,
    /// CPU of the whole machine, ns per KB.
    pub machine_ns_per_kb: f64,
    /// Time of a simulated device, ns per KB; in no other column.
    pub hardware_ns_per_kb: f64,
}

/// The published runs took ten seconds; ours are scaled to that.
const REAL_S: f64 = 10.0;

impl Netperf {
    /// A published row: the ten columns, in their order.
    pub const fn published(
        [mbit_per_s, util_local_pct, util_remote_pct, sd_local_us_per_kb, sd_remote_us_per_kb]: [f64; 5],
        [user_s, sys_s, real_s, time_pct]: [f64; 4],
    ) -> Netperf {
        let kb = mbit_per_s * 1e6 / 8.0 / 1024.0 * real_s;
        Netperf {
            mbit_per_s,
            util_local_pct,
            util_remote_pct,
            sd_local_us_per_kb,
            sd_remote_us_per_kb,
            user_s,
            sys_s,
            real_s,
            time_pct,
            process_ns_per_kb: (user_s + sys_s) * 1e9 / kb,
            machine_ns_per_kb: sd_local_us_per_kb * 1e3,
            hardware_ns_per_kb: f64::NAN,
        }
    }

    /// The columns of a measured row on a machine of `cpus` CPUs; `None` if it has no figures.
    pub fn of(row: &Row, cpus: usize) -> Option<Netperf> {
        let gbps = row.median(GBPS)?;
        let near = row.median(THIS_END)?;
        let of = |key| row.median(key).unwrap_or(f64::NAN);
        // An end without an account (the modelled peer's is in the hardware's) is not idle.
        let far = of(PEER);
        let process = row.median(THREAD).unwrap_or(near);
        let count = |name| row.counts.iter().find(|(n, _)| *n == name).map(|(_, n)| *n as f64);
        let share = count("user_cpu_ns").zip(count("cpu_ns")).map(|(user, all)| user / all);
        let user = share.map_or(f64::NAN, |share| share.min(1.0));
        let kb_per_s = gbps * 1e9 / 8.0 / 1024.0;
        let util = |ns_per_kb: f64| ns_per_kb * kb_per_s / 1e9 / cpus.max(1) as f64 * 100.0;
        let busy_s = process * kb_per_s / 1e9 * REAL_S;
        Some(Netperf {
            mbit_per_s: gbps * 1e3,
            util_local_pct: util(near),
            util_remote_pct: util(far),
            sd_local_us_per_kb: near / 1e3,
            sd_remote_us_per_kb: far / 1e3,
            user_s: busy_s * user,
            sys_s: busy_s * (1.0 - user),
            real_s: REAL_S,
            time_pct: busy_s / REAL_S * 100.0,
            process_ns_per_kb: process,
            machine_ns_per_kb: of(MACHINE),
            hardware_ns_per_kb: of(HARDWARE),
        })
    }

    /// The columns by their keys.
    pub fn json(&self) -> Value {
        json!({
            "mbit_per_s": self.mbit_per_s,
            "util_local_pct": self.util_local_pct,
            "util_remote_pct": self.util_remote_pct,
            "sd_local_us_per_kb": self.sd_local_us_per_kb,
            "sd_remote_us_per_kb": self.sd_remote_us_per_kb,
            "user_s": self.user_s,
            "sys_s": self.sys_s,
            "time_pct": self.time_pct,
            "process_ns_per_kb": self.process_ns_per_kb,
            "machine_ns_per_kb": self.machine_ns_per_kb,
            "hardware_ns_per_kb": self.hardware_ns_per_kb,
        })
    }
}

/// netperf's and time(1)'s columns as printed then, and what is known besides.
pub const COLUMNS: [Column; 11] = [
    number("mbit_per_s", "Mbit/s", 1, "10^6 bits per second"),
    number("util_local_pct", "util\nloc %", 1, "CPU of the sending end"),
    number("util_remote_pct", "util\nrem %", 1, "CPU of the receiving end"),
    number(
        "sd_local_us_per_kb",
        "SD loc\nµs/KB",
        3,
        "service demand of the sending end: netperf's account",
    ),
    number("sd_remote_us_per_kb", "SD rem\nµs/KB", 3, "service demand of the receiving end"),
    number("user_s", "user\ns", 2, "sending process in user mode, in ten seconds"),
    number("sys_s", "sys\ns", 2, "sending process in the kernel, in ten seconds"),
    number("time_pct", "time\n%", 1, "user + sys: time(1)'s account"),
    number(
        "process_ns_per_kb",
        "process\nns/KB",
        0,
        "CPU of the sending process (here: its sending thread) per KB",
    ),
    number(
        "machine_ns_per_kb",
        "machine\nns/KB",
        0,
        "CPU of the whole machine per KB: then the sender's, here both ends'",
    ),
    number(
        "hardware_ns_per_kb",
        "hardware\nns/KB",
        0,
        "time of the simulated device, in no other column",
    ),
];
