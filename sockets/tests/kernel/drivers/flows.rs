//! Two connections of the kernel's that send at once, each with a posted buffer at our end.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;

use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar_stack::base::{FlowKey, SeqNum};
use fulmar_stack::device::{Device, DeviceStats, WritableRanges};
use fulmar_stack::mbuf::{PostedBuf, RecvBuf};
use fulmar_stack::wire::tcp::{self, Flags};
use fulmar_testbed::namespace;

use crate::drivers::host::{Host, KERNEL, OURS, Segment, header};
use crate::drivers::{TUN, give_addresses};

const FLOWS: usize = 2;
const TOTAL: usize = 32 << 20;
const BUFFER: usize = 4 << 20;
const OUR_FIRST: SeqNum = SeqNum(1000);
/// What one word of a window means, as a shift.
const SCALE: u8 = 7;

/// Byte `at` of stream `n`; the streams agree nowhere for long.
fn byte(n: usize, at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761 + 2 * n as u32).to_be_bytes()[0] ^ (at >> 9) as u8
}

/// Sends all streams in pieces whose order and lengths have no pattern; leaves the connections open.
fn send() -> JoinHandle<[TcpStream; FLOWS]> {
    std::thread::spawn(move || {
        let bytes: [Vec<u8>; FLOWS] =
            std::array::from_fn(|n| (0..TOTAL).map(|at| byte(n, at)).collect());
        let mut streams =
            std::array::from_fn(|n| TcpStream::connect((OURS, 80 + n as u16)).unwrap());
        let mut sent = [0; FLOWS];
        let mut x = 0x2545_f491u32;
        while sent != [TOTAL; FLOWS] {
            // Xorshift.
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            let n = x as usize % FLOWS;
            let piece = (1 + (x >> 8) as usize % 60_000).min(TOTAL - sent[n]);
            streams[n].write_all(&bytes[n][sent[n]..][..piece]).unwrap();
            sent[n] += piece;
        }
        streams
    })
}

/// Our end of a connection.
struct End {
    syn: tcp::Header,
    key: FlowKey,
    received: usize,
    hold: Option<PostedBuf>,
    /// What the device knows to come next, and where the buffer ends, as `received` counts.
    known: usize,
    full_at: usize,
}

impl End {
    fn next(&self) -> SeqNum {
        self.syn.seq + 1 + self.received as u32
    }

    /// Posts a buffer.
    fn post(&mut self, device: &mut impl Device) {
        let mut hold = RecvBuf::with_capacity(BUFFER).post();
        (self.known, self.full_at) = (self.received, self.received + BUFFER);
        let mut ranges = WritableRanges::default();
        ranges.push(hold.writable_range(0).unwrap()).unwrap();
        let (flow, next_seq) = (self.key, self.next());
        device.placement().unwrap().place(flow, next_seq, ranges).unwrap();
        self.hold = Some(hold);
    }

    /// Posts another buffer if this one is full, or the device no longer knows what comes next.
    fn keep_posted(&mut self, device: &mut impl Device) {
        if self.known != self.received || self.received >= self.full_at {
            self.post(device);
        }
    }

    /// Takes the buffer back, and frees it when no mbuf references its bytes.
    fn withdraw(&mut self, device: &mut impl Device) {
        drop(device.placement().unwrap().revoke(&self.key));
        self.hold = None;
    }

    /// Looks at every byte of a segment and acknowledges it, if it is the next one.
    fn take(&mut self, n: usize, s: Segment, host: &mut Host<Tap>) {
        if s.header.seq == self.next() {
            let is_sent = |(i, b): (usize, &u8)| *b == byte(n, self.received + i);
            assert!(s.payload.iter().enumerate().all(is_sent), "other bytes than were sent");
            if s.packet.chain.iter().any(|m| m.placed().is_some()) {
                self.known = self.received + s.payload.len();
            }
            self.received += s.payload.len();
        }
        host.pool.free(s.packet.chain);
        if !s.payload.is_empty() {
            let ack = header(&self.syn, Flags::ACK, OUR_FIRST + 1, self.next());
            let p = host.segment(&ack, &[]);
            host.send(p);
        }
    }
}

/// Answers a SYN.
fn accept(syn: tcp::Header, host: &mut Host<Tap>) -> End {
    let mut answer = header(&syn, Flags::SYN.with(Flags::ACK), OUR_FIRST, syn.seq + 1);
    answer.options.mss = Some(1460);
    answer.options.window_scale = Some(SCALE);
    let p = host.segment(&answer, &[]);
    host.send(p);
    let local = SocketAddr::from((OURS, syn.dst_port));
    let key = FlowKey::new(local, (KERNEL, syn.src_port).into());
    End { syn, key, received: 0, hold: None, known: usize::MAX, full_at: 0 }
}

/// Receives all of both streams; `meanwhile` is called after each segment with data.
fn receive(
    host: &mut Host<Tap>,
    mut meanwhile: impl FnMut(usize, &mut End, &mut Host<Tap>),
) -> DeviceStats {
    let sender = send();
    let mut ends: [Option<End>; FLOWS] = [None, None];
    while !ends.iter().all(|e| e.as_ref().is_some_and(|e| e.received == TOTAL)) {
        let s = host.segment_in();
        let n = usize::from(s.header.dst_port) - 80;
        if s.header.flags.contains(Flags::SYN) {
            host.pool.free(s.packet.chain);
            let mut end = accept(s.header, host);
            meanwhile(n, &mut end, host);
            ends[n] = Some(end);
            continue;
        }
        let Some(end) = &mut ends[n] else { continue };
        end.take(n, s, host);
        meanwhile(n, end, host);
    }
    drop(sender.join().unwrap());
    for end in ends.iter_mut().flatten() {
        end.withdraw(&mut host.device);
    }
    let stats = host.device.stats();
    println!(
        "{} frames placed, {} not, {} of {} bytes placed",
        stats.place_hits,
        stats.place_misses,
        stats.placed_bytes,
        FLOWS * TOTAL,
    );
    stats
}

fn tap() -> Host<Tap> {
    let tap = Tap::open(&TapConfig { name: "tap0".into(), ..TapConfig::default() }).unwrap();
    give_addresses("tap0", &tap);
    Host::new(tap, "tap0")
}

#[test]
fn tap_places_bytes_of_two_streams_that_come_mixed() {
    namespace::run("flows::tap_places_bytes_of_two_streams_that_come_mixed", TUN, || {
        // Each stream has a buffer posted all the time.
        let stats = receive(&mut tap(), |_, end, host| end.keep_posted(&mut host.device));
        let placed = stats.placed_bytes as f64 / (FLOWS * TOTAL) as f64;
        assert!(placed > 0.1, "{placed} of the bytes were placed");
    });
}

#[test]
fn tap_delivers_streams_that_post_and_withdraw_buffers() {
    namespace::run("flows::tap_delivers_streams_that_post_and_withdraw_buffers", TUN, || {
        let mut phases = [0; FLOWS];
        receive(&mut tap(), |n, end, host| {
            let phase = end.received / (2 << 20);
            if phase % 2 == 0 {
                end.keep_posted(&mut host.device);
            } else if phases[n] != phase {
                end.withdraw(&mut host.device);
            }
            phases[n] = phase;
        });
    });
}
