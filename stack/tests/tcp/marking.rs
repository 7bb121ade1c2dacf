//! Two stacks with ECN over a network that marks, and over paths that falsify marks and feedback.

use std::sync::{Arc, Mutex};

use fulmar::internals::drivers::link::{Impairments, LinkConfig};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::device::impair::Aqm;
use fulmar_stack::device::{Chance, Device, Rng};
use fulmar_stack::tcp::*;
use fulmar_stack::wire::checksum::checksum;
use fulmar_stack::wire::ipv4;
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations;
use fulmar_testbed::tamper::Tampered;

const MS: Duration = Duration::from_millis(1);

/// How a path falsifies ECN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mangles {
    Nothing,
    /// The IP field of everything becomes Not-ECT, or any value.
    ClearsField,
    ForgesField,
    /// The flags of everything are cleared, or one packet in ten has any.
    ClearsFlags,
    ForgesFlags,
    /// AccECN options become padding, or one in ten has any counters.
    StripsOptions,
    ForgesOptions,
}

const MANGLES: [Mangles; 7] = [
    Mangles::Nothing,
    Mangles::ClearsField,
    Mangles::ForgesField,
    Mangles::ClearsFlags,
    Mangles::ForgesFlags,
    Mangles::StripsOptions,
    Mangles::ForgesOptions,
];

/// Where the headers of IPv4 and TCP begin.
const IP: usize = 14;
const TCP: usize = IP + 20;

/// What the network does to ECN.
#[derive(Clone, Copy)]
struct Marks {
    /// The share of the ECN-capable packets that are marked.
    share: f64,
    mangles: Mangles,
}

impl Marks {
    /// Changes a frame with TCP over IPv4; whether it did.
    fn change(self, frame: &mut [u8], rng: &mut Rng) -> bool {
        if frame[12..14] != [8, 0] || frame[IP + 9] != 6 {
            return false;
        }
        let is_marked = rng.happens(Chance::new(self.share));
        let (is_hit, any) = (rng.below(10) == 0, rng.number());
        match self.mangles {
            Mangles::ClearsFlags => set_flags(frame, 0),
            Mangles::ForgesFlags if is_hit => set_flags(frame, any as u8),
            Mangles::StripsOptions => change_options(frame, |option| option.fill(1)),
            Mangles::ForgesOptions if is_hit => change_options(frame, |option| {
                let noise = any.to_le_bytes();
                option[2..].iter_mut().zip(noise).for_each(|(b, n)| *b = n);
            }),
            _ => {}
        }
        let field = frame[IP + 1] & 3;
        let field = match self.mangles {
            Mangles::ClearsField => 0,
            Mangles::ForgesField => any as u8 & 3,
            _ if field != 0 && is_marked => 3,
            _ => field,
        };
        frame[IP + 1] = frame[IP + 1] & !3 | field;
        let sum = IP + ipv4::CHECKSUM_OFFSET;
        frame[sum..sum + 2].fill(0);
        let right = checksum(&frame[IP..TCP]).to_be_bytes();
        frame[sum..sum + 2].copy_from_slice(&right);
        true
    }
}

fn set_flags(frame: &mut [u8], ace: u8) {
    frame[TCP + 12] = frame[TCP + 12] & !1 | ace >> 2 & 1;
    frame[TCP + 13] = frame[TCP + 13] & 0x3f | ace << 6;
}

fn change_options(frame: &mut [u8], change: impl Fn(&mut [u8])) {
    let end = TCP + usize::from(frame[TCP + 12] >> 4) * 4;
    let mut at = TCP + 20;
    while at < end {
        let length = if frame[at] < 2 { 1 } else { usize::from(frame[at + 1]) };
        if matches!(frame[at], 172 | 174) {
            change(&mut frame[at..at + length]);
        }
        at += length;
    }
}

/// A bottleneck with its queue, and the delay of each direction.
fn link(mbps: u64, queue_bytes: usize, delay: Duration) -> Impairments {
    Impairments { rate_bps: Some(mbps * 1_000_000), queue_bytes, delay, ..Impairments::default() }
}

/// A connection whose ends use ECN, and the marks of its network.
fn connection(
    congestion: CongestionControl,
    how: &Impairments,
    marks: Marks,
) -> (Connection, Arc<Mutex<Marks>>) {
    let marks = Arc::new(Mutex::new(marks));
    let device = |link| -> Box<dyn Device> {
        let (marks, mut rng) = (Arc::clone(&marks), Rng::new(0x5eed));
        let change = move |frame: &mut [u8]| marks.lock().unwrap().change(frame, &mut rng);
        Box::new(Tampered::new(link).changes(change))
    };
    let config = |station| {
        let mut config = stations::config(station, 256 << 20);
        (config.tcp.congestion, config.tcp.ecn) = (congestion, EcnPolicy::Ask);
        config
    };
    let link = LinkConfig::default();
    (Connection::over(3, how, &link, config, device), marks)
}

#[test]
fn a_stream_goes_on_whatever_is_falsified() {
    for mangles in MANGLES {
        for congestion in CongestionControl::ALL {
            for (loss, share) in [(0.0, 0.02), (0.01, 0.02), (0.0, 1.0)] {
                let how = Impairments { loss, reorder: 0.01, ..link(10, 100_000, MS) };
                let (mut c, _) = connection(*congestion, &how, Marks { share, mangles });
                let mbps = c.stream(Duration::from_secs(3)).mbps;
                assert!(mbps > 0.2, "{mangles:?} {congestion} {loss} {share}: {mbps}");
            }
        }
    }
}

#[test]
fn what_is_reported_is_what_was_marked() {
    for (mangles, slack_percent) in [(Mangles::Nothing, 3), (Mangles::StripsOptions, 12)] {
        let how = link(20, 200_000, 5 * MS);
        let marks = Marks { share: 0.1, mangles };
        let (mut c, _) = connection(CongestionControl::Dctcp, &how, marks);
        c.stream(Duration::from_secs(10));
        let reported = c.tcb(0).info().delivered_ce_bytes;
        let received = c.tcb(1).info().ce_received * 1448;
        assert!(received > 100_000, "{received}");
        assert!(
            reported.abs_diff(received) * 100 < received * slack_percent,
            "{mangles:?}: {reported} of {received}"
        );
        assert!(c.tcb(0).info().accurate_ecn);
    }
}

#[test]
fn a_path_that_clears_the_flags_is_detected() {
    // The SYN loses its flags: no ECN. Set in the middle of a connection: feedback that is cleared.
    let marks = Marks { share: 0.0, mangles: Mangles::Nothing };
    let (mut c, network) = connection(CongestionControl::Cubic, &link(10, 100_000, MS), marks);
    assert!(c.tcb(0).info().accurate_ecn);
    *network.lock().unwrap() = Marks { share: 0.1, mangles: Mangles::ClearsFlags };
    c.stream(Duration::from_secs(1));
    assert_eq!(c.world.shards[0].counters().value(Counter::TcpEcnDistrusted), 1);
}

#[test]
fn dctcp_and_bbr_keep_the_queue_of_a_step_short_and_the_link_busy() {
    for congestion in [CongestionControl::Dctcp, CongestionControl::Bbr] {
        // The queue of 2 ms marks at 2 ms.
        let aqm = Aqm::Step { above: 2 * MS };
        let how = Impairments { aqm, ecn: true, ..link(100, 500_000, MS) };
        let marks = Marks { share: 0.0, mangles: Mangles::Nothing };
        let (mut c, _) = connection(congestion, &how, marks);
        c.stream(Duration::from_secs(2));
        let seen = c.stream(Duration::from_secs(8));
        println!("{congestion}: {seen:?}");
        assert!(seen.mbps > 75.0, "{congestion}: {seen:?}");
        // 60,000 bytes.
        assert!(seen.queue < Duration::from_micros(4800) && seen.dropped == 0, "{seen:?}");
    }
}
