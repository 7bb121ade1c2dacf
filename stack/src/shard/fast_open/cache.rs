//! The client's cache of servers (RFC 7413 sections 4.1.3 and 4.1.3.1): the cookie and the MSS, or that Fast Open does
//! not work there.
//!
//! The key is the addresses of both ends and the server's port, since negative entries depend on the port. The
//! table is set-associative, with a keyed hash: a set keeps the four that were used last. It is allocated when
//! the first entry is made. Each shard has its own.

use alloc::vec::Vec;
use core::hash::BuildHasher;

use crate::base::{Duration, FlowKey, Instant};
use crate::tcp::{FastOpenReport, FastOpenSyn, FastOpenVerdict};
use crate::wire::tcp::FastOpenCookie;

use crate::shard::secret::Keyed;

/// Sets of the table; with [`WAYS`] 1,024 servers, about 100 KiB.
const SETS: usize = 256;
const WAYS: usize = 4;

/// How long Fast Open is not tried after a first failure; doubled by each further one (Linux doubles, too, from
/// an hour; FreeBSD waits for 15 minutes).
const FIRST_BLOCK: Duration = Duration::from_secs(15 * 60);
/// Doublings at most: 16 hours.
const MAX_DOUBLINGS: u32 = 6;
/// SYNs with the option that have to be lost in a row before it is taken for their reason: one may be lost by chance.
const LOSSES: u8 = 2;

#[derive(Clone, Debug)]
struct Entry {
    server: FlowKey,
    /// With the MSS of the SYN,ACK that it came with.
    cookie: Option<(FastOpenCookie, u16)>,
    /// SYNs lost in a row.
    losses: u8,
    /// Failures in a row.
    failures: u32,
    /// Until when Fast Open is not tried.
    blocked_until: Instant,
    used_at: Instant,
}

/// The table.
pub(crate) struct FastOpenCache {
    hasher: Keyed,
    sets: Vec<[Option<Entry>; WAYS]>,
}

/// The key of the server of a flow: any port of ours.
fn server_of(flow: &FlowKey) -> FlowKey {
    let mut server = *flow;
    server.local_port = 0;
    server
}

impl FastOpenCache {
    /// An empty table.
    pub(crate) fn new(hasher: Keyed) -> FastOpenCache {
        FastOpenCache { hasher, sets: Vec::new() }
    }

    fn set_of(&mut self, server: &FlowKey) -> Option<&mut [Option<Entry>; WAYS]> {
        let at = self.hasher.hash_one(server) as usize % SETS;
        self.sets.get_mut(at)
    }

    fn find(&mut self, server: &FlowKey) -> Option<&mut Entry> {
        self.set_of(server)?.iter_mut().flatten().find(|e| e.server == *server)
    }

    /// The option in the SYN of a flow; `None`: no option.
    pub(crate) fn syn_for(&mut self, now: Instant, flow: &FlowKey) -> Option<FastOpenSyn> {
        let Some(entry) = self.find(&server_of(flow)) else { return Some(FastOpenSyn::Request) };
        entry.used_at = now;
        match entry.cookie {
            _ if now < entry.blocked_until => None,
            Some((cookie, mss)) => Some(FastOpenSyn::Cookie { cookie, mss }),
            None => Some(FastOpenSyn::Request),
        }
    }

    /// Remembers how the server of a flow took a SYN.
    pub(crate) fn learn(&mut self, now: Instant, flow: &FlowKey, report: &FastOpenReport) {
        let Some(entry) = self.entry(now, &server_of(flow)) else { return };
        match report.verdict {
            FastOpenVerdict::Taken => {
                let cookie = report.cookie.or(entry.cookie.map(|(cookie, _)| cookie));
                entry.cookie = cookie.map(|cookie| (cookie, report.mss));
                (entry.losses, entry.failures) = (0, 0);
                entry.blocked_until = now;
            }
            FastOpenVerdict::Refused => {
                entry.cookie = None;
                entry.block(now);
            }
            FastOpenVerdict::Lost => {
                entry.losses = entry.losses.saturating_add(1);
                if entry.losses >= LOSSES {
                    entry.block(now);
                }
            }
        }
    }

    /// The entry of a server, made anew in the place of the one of its set that was not used for longest.
    fn entry(&mut self, now: Instant, server: &FlowKey) -> Option<&mut Entry> {
        if self.sets.is_empty() {
            self.sets.resize_with(SETS, || [const { None }; WAYS]);
        }
        let set = self.set_of(server)?;
        let has_it = |e: &Option<Entry>| e.as_ref().is_some_and(|e| e.server == *server);
        let oldest = |(_, e): &(usize, &Option<Entry>)| e.as_ref().map(|e| e.used_at);
        let at = set
            .iter()
            .position(has_it)
            .or_else(|| set.iter().enumerate().min_by_key(oldest).map(|(at, _)| at))?;
        let slot = set.get_mut(at)?;
        if slot.as_ref().is_none_or(|e| e.server != *server) {
            *slot = Some(Entry {
                server: *server,
                cookie: None,
                losses: 0,
                failures: 0,
                blocked_until: now,
                used_at: now,
            });
        }
        slot.as_mut()
    }
}

impl Entry {
    fn block(&mut self, now: Instant) {
        let doublings = self.failures.min(MAX_DOUBLINGS);
        self.blocked_until = now + FIRST_BLOCK.saturating_mul(1 << doublings);
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::secret::Secret;

    fn cache() -> FastOpenCache {
        let secrets = crate::base::Secrets::for_simulation(1);
        FastOpenCache::new(Secret::new(&secrets).table_hasher())
    }

    fn flow(host: u32, own_port: u16) -> FlowKey {
        let remote = std::net::SocketAddr::new(std::net::Ipv4Addr::from_bits(host).into(), 80);
        FlowKey::new(std::net::SocketAddr::new([10, 0, 0, 1].into(), own_port), remote)
    }

    fn cookie(n: u8) -> Option<FastOpenCookie> {
        FastOpenCookie::new(&[n; 8])
    }

    fn report(verdict: FastOpenVerdict, cookie: Option<FastOpenCookie>) -> FastOpenReport {
        FastOpenReport { verdict, cookie, mss: 1460 }
    }

    fn at(secs: u64) -> Instant {
        Instant::from_millis(1000 * secs)
    }

    fn known(n: u8) -> Option<FastOpenSyn> {
        cookie(n).map(|cookie| FastOpenSyn::Cookie { cookie, mss: 1460 })
    }

    #[test]
    fn a_cookie_serves_every_port_of_ours_and_a_newer_one_replaces_it() {
        let mut c = cache();
        assert_eq!(c.syn_for(at(0), &flow(1, 9)), Some(FastOpenSyn::Request));
        c.learn(at(0), &flow(1, 9), &report(FastOpenVerdict::Taken, cookie(1)));
        assert_eq!(c.syn_for(at(1), &flow(1, 10)), known(1));
        c.learn(at(1), &flow(1, 10), &report(FastOpenVerdict::Taken, None));
        assert_eq!(c.syn_for(at(2), &flow(1, 11)), known(1));
        c.learn(at(2), &flow(1, 11), &report(FastOpenVerdict::Taken, cookie(2)));
        assert_eq!(c.syn_for(at(3), &flow(1, 12)), known(2));
        assert_eq!(c.syn_for(at(3), &flow(2, 12)), Some(FastOpenSyn::Request));
    }

    #[test]
    fn a_server_that_refuses_is_not_asked_again_for_times_that_double() {
        let mut c = cache();
        let mut now = at(0);
        for doublings in [0, 1, 2, 3, 4, 5, 6, 6] {
            c.learn(now, &flow(1, 9), &report(FastOpenVerdict::Refused, None));
            let wait = FIRST_BLOCK.saturating_mul(1 << doublings);
            let before = now + (wait - Duration::from_nanos(1));
            assert_eq!(c.syn_for(before, &flow(1, 9)), None);
            now = now + wait;
            assert_eq!(c.syn_for(now, &flow(1, 9)), Some(FastOpenSyn::Request));
        }
        c.learn(now, &flow(1, 9), &report(FastOpenVerdict::Taken, cookie(1)));
        assert_eq!(c.syn_for(now, &flow(1, 9)), known(1));
        c.learn(now, &flow(1, 9), &report(FastOpenVerdict::Refused, None));
        assert_eq!(c.syn_for(now + FIRST_BLOCK, &flow(1, 9)), Some(FastOpenSyn::Request));
    }

    #[test]
    fn one_lost_syn_is_chance_and_two_in_a_row_are_a_black_hole() {
        let mut c = cache();
        c.learn(at(0), &flow(1, 9), &report(FastOpenVerdict::Taken, cookie(1)));
        c.learn(at(1), &flow(1, 9), &report(FastOpenVerdict::Lost, None));
        assert_eq!(c.syn_for(at(2), &flow(1, 9)), known(1));
        c.learn(at(2), &flow(1, 9), &report(FastOpenVerdict::Taken, None));
        c.learn(at(3), &flow(1, 9), &report(FastOpenVerdict::Lost, None));
        assert_eq!(c.syn_for(at(4), &flow(1, 9)), known(1));
        c.learn(at(4), &flow(1, 9), &report(FastOpenVerdict::Lost, None));
        assert_eq!(c.syn_for(at(5), &flow(1, 9)), None);
        assert_eq!(c.syn_for(at(4) + FIRST_BLOCK, &flow(1, 9)), known(1));
    }

    #[test]
    fn the_table_is_bounded_and_keeps_those_that_are_used() {
        let mut c = cache();
        for host in 1..20_000 {
            let now = at(u64::from(host));
            c.learn(now, &flow(host, 9), &report(FastOpenVerdict::Taken, cookie(1)));
            assert_eq!(c.syn_for(now, &flow(1, 9)), known(1), "{host}");
        }
        let held = c.sets.iter().flatten().flatten().count();
        assert_eq!((c.sets.len(), held), (SETS, SETS * WAYS));
        let bytes = SETS * size_of::<[Option<Entry>; WAYS]>();
        assert!(bytes <= 160 << 10, "{bytes} bytes");
    }
}
