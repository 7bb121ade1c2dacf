//! Servers that have failed lately, and guesses at the answers of servers.

use std::net::SocketAddr;

use fulmar_stack::base::{Duration, Instant};

use super::Addresses;

/// How long a server that has failed is asked last.
const FAILED: Duration = Duration::from_secs(30);
/// Datagrams in one second that came for outstanding questions and answer none: more are taken for guesses at an answer.
const MOST_GUESSES: u32 = 32;
const GUESSES_WITHIN: Duration = Duration::from_secs(1);

/// Servers that are asked last, and until when.
#[derive(Default)]
pub(super) struct FailedServers(Vec<(SocketAddr, Instant)>);

impl FailedServers {
    pub(super) fn add(&mut self, server: SocketAddr, now: Instant) {
        self.0.retain(|(other, until)| *other != server && *until > now);
        self.0.push((server, now + FAILED));
    }

    pub(super) fn remove(&mut self, server: SocketAddr) {
        self.0.retain(|(other, _)| *other != server);
    }

    pub(super) fn last(&self, mut servers: Addresses, now: Instant) -> Addresses {
        let has_failed = |s: &SocketAddr| self.0.iter().any(|(f, until)| f == s && *until > now);
        servers.sort_by_key(has_failed);
        servers
    }
}

/// Counts datagrams that may be guesses at an answer.
#[derive(Default)]
pub(super) struct Guesses {
    since: Option<Instant>,
    count: u32,
}

impl Guesses {
    /// Counts one. True: there are too many.
    pub(super) fn count(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| since + GUESSES_WITHIN <= now) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count += 1;
        self.count > MOST_GUESSES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_has_failed_is_asked_last_for_a_while() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let servers: Addresses =
            ["192.0.2.1:53", "192.0.2.2:53", "[::1]:53"].map(at).into_iter().collect();
        let mut failed = FailedServers::default();
        failed.add(servers[0], Instant::ZERO);
        let later = Instant::ZERO + FAILED;
        let before = Instant::ZERO + Duration::from_secs(1);
        let last = failed.last(servers.clone(), before);
        assert_eq!(last[..], [servers[1], servers[2], servers[0]]);
        assert_eq!(failed.last(servers.clone(), later), servers);
        failed.remove(servers[0]);
        assert_eq!(failed.last(servers.clone(), before), servers);
        for n in 0..1000 {
            failed.add(servers[n % 3], before);
        }
        assert_eq!(failed.0.len(), 3);
    }

    #[test]
    fn guesses_are_too_many_within_a_second_only() {
        let mut guesses = Guesses::default();
        let count =
            |guesses: &mut Guesses, now| (0..MOST_GUESSES).filter(|_| guesses.count(now)).count();
        assert_eq!(count(&mut guesses, Instant::ZERO), 0);
        assert!(guesses.count(Instant::ZERO));
        assert_eq!(count(&mut guesses, Instant::ZERO + GUESSES_WITHIN), 0);
    }
}
