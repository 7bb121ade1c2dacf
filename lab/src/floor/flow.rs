//! The do-nothing TCP: as much of the protocol as a faultless wire and a correct peer leave over.
//!
//! A segment out of order is counted, dropped and answered by an acknowledgement, so that the kernel
//! sends it again; a frame of ours that is lost ends in an error after two seconds of silence.

use super::device::FrameDevice;
use super::segment::{
    ACK, Addresses, Arrival, FIN, MSS, PSH, RST, SYN, Segment, Template, WINDOW_SCALE, arp_reply,
    parse, syn,
};
use crate::cpu;
use crate::peer::Report;
use std::io;
use std::time::{Duration, Instant};

/// Packets per super-frame: 45 x 1,448 bytes and headers stay below 65,536, which AF_PACKET without
/// queueing discipline needs, and leave most room under the 16-bit IP length.
const PACKETS_PER_FRAME: usize = 45;
/// Payload bytes of a super-frame.
pub const FRAME_PAYLOAD_BYTES: usize = PACKETS_PER_FRAME * MSS;
const ISS: u32 = 1;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The most in flight when sending; the advertised window when receiving. Also the size of the ring through which a
    /// copying sender goes.
    pub window_bytes: usize,
    /// The user's buffer if its bytes are copied once, as a real stack must; 0: no copy.
    pub copy_bytes: usize,
    /// Receiving: acknowledge at the latest after this many frames, and whenever there are no more.
    pub frames_per_ack: usize,
    /// Bytes before measuring starts.
    pub warm_bytes: u64,
    /// How long to send after that.
    pub time: Duration,
}

/// The counts of a run, for the table of counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Super-frames and smaller ones with payload.
    pub data_frames: u64,
    /// Acknowledgements without payload, sent or received.
    pub ack_frames: u64,
    /// Times that the thread had nothing to do but to wait for a frame.
    pub waits: u64,
    /// Segments out of order: some device or buffer lost a frame.
    pub out_of_order: u64,
}

/// The state of a connection; names and sequence numbers as in RFC 9293 section 3.3.1.
#[derive(Clone, Copy, Debug, Default)]
struct Tcb {
    /// `snd_una <= snd_nxt`.
    snd_una: u32,
    snd_nxt: u32,
    rcv_nxt: u32,
    /// Scaled, in bytes.
    snd_wnd: usize,
    snd_wnd_scale: u8,
    ts_recent: u32,
    peer_closed: bool,
}

impl Tcb {
    /// Takes a segment in. False: it is out of order and was not taken.
    ///
    /// # Errors
    /// A segment that no correct peer sends on a live connection.
    fn input(&mut self, s: &Segment<'_>) -> io::Result<bool> {
        if s.flags & RST != 0 {
            return Err(io::Error::other("the kernel peer reset the connection"));
        }
        if s.flags & SYN != 0 {
            self.snd_wnd_scale = s.option(3).and_then(|o| o.first()).map_or(0, |n| *n);
            self.rcv_nxt = s.seq;
        }
        if s.seq != self.rcv_nxt {
            return Ok(false);
        }
        self.on_ack(s)?;
        let syn_or_fin = u32::from(s.flags & (SYN | FIN) != 0);
        self.peer_closed |= s.flags & FIN != 0;
        self.rcv_nxt = self.rcv_nxt.wrapping_add(s.payload.len() as u32 + syn_or_fin);
        Ok(true)
    }

    /// The acknowledgement and what comes with it. An older one than the last is passed over: the
    /// kernel acknowledges from two CPUs, and the later may overtake.
    fn on_ack(&mut self, s: &Segment<'_>) -> io::Result<()> {
        if (s.ack.wrapping_sub(self.snd_una) as i32) < 0 {
            return Ok(());
        }
        if s.ack.wrapping_sub(self.snd_una) > self.in_flight() as u32 {
            return Err(io::Error::other("the kernel peer acknowledged unsent data"));
        }
        self.snd_una = s.ack;
        self.ts_recent = s.ts_value();
        // The window of a SYN is not scaled (RFC 7323 section 2.2).
        let scale = if s.flags & SYN != 0 { 0 } else { self.snd_wnd_scale };
        self.snd_wnd = usize::from(s.window) << scale;
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.snd_nxt.wrapping_sub(self.snd_una) as usize
    }
}

/// One connection to a kernel peer, opened by us.
pub struct Flow<'d> {
    device: &'d mut dyn FrameDevice,
    addresses: Addresses,
    tcb: Tcb,
    /// The advertised window in bytes; constant, since no bytes are kept.
    rcv_wnd_bytes: usize,
    start: Instant,
    counts: Counts,
}

/// The parts of a segment that outlive its frame.
struct Seen {
    payload_bytes: usize,
}

/// A frame came that brought the stream no further.
const NOTHING: Option<Seen> = Some(Seen { payload_bytes: 0 });

impl<'d> Flow<'d> {
    /// Opens the connection, advertising `window_bytes`.
    pub fn connect(
        device: &'d mut dyn FrameDevice,
        addresses: Addresses,
        window_bytes: usize,
    ) -> io::Result<Flow<'d>> {
        let tcb = Tcb { snd_una: ISS, snd_nxt: ISS.wrapping_add(1), ..Tcb::default() };
        let mut flow = Flow {
            device,
            addresses,
            tcb,
            rcv_wnd_bytes: window_bytes,
            start: Instant::now(),
            counts: Counts::default(),
        };
        flow.drain_stale_frames()?;
        flow.device.send(&syn(&flow.addresses, ISS, u16::MAX), &[])?;
        while flow.tcb.snd_una == ISS {
            flow.input(true, |_| ())?;
        }
        flow.acknowledge()?;
        Ok(flow)
    }

    /// Frames that an earlier connection left in the device are not ours.
    fn drain_stale_frames(&mut self) -> io::Result<()> {
        while self.input(false, |_| ())?.is_some() {}
        Ok(())
    }

    /// Takes one frame. `Ok(None)`: there is none (only without `wait`).
    fn input(&mut self, wait: bool, sink: impl FnOnce(&[u8])) -> io::Result<Option<Seen>> {
        self.counts.waits += u64::from(wait);
        let Some(frame) = self.device.receive(wait)? else { return Ok(None) };
        let reply = match parse(&self.addresses, frame) {
            Arrival::Tcp(s) if self.tcb.input(&s)? => {
                sink(s.payload);
                return Ok(Some(Seen { payload_bytes: s.payload.len() }));
            }
            Arrival::Tcp(_) => {
                self.counts.out_of_order += 1;
                return self.acknowledge().map(|()| NOTHING);
            }
            Arrival::ArpRequest { mac, ip } => arp_reply(&self.addresses, mac, ip),
            Arrival::Other => return Ok(NOTHING),
        };
        self.device.send(&reply, &[])?;
        Ok(NOTHING)
    }

    fn ts_now(&self) -> u32 {
        self.start.elapsed().as_millis() as u32 + 2
    }

    /// Sends a segment without payload.
    fn control(&mut self, flags: u8) -> io::Result<()> {
        let window = u16::try_from(self.rcv_wnd_bytes >> WINDOW_SCALE).unwrap_or(u16::MAX);
        let mut header = Template::new(&self.addresses, flags, window, 0);
        let now = self.ts_now();
        self.device
            .send(header.patch(self.tcb.snd_nxt, self.tcb.rcv_nxt, now, self.tcb.ts_recent), &[])
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        self.control(ACK)
    }

    /// Sends until the time is over, then closes. Returns this thread's account.
    pub fn send(mut self, load: &Load) -> io::Result<(Report, Counts)> {
        let mut out = Outgoing::new(&self.addresses, load);
        let mut meter = Meter::default();
        let mut sent = 0u64;
        loop {
            let now = self.ts_now();
            while self.has_space(load.window_bytes) {
                let payload = out.ring.next_frame();
                let header =
                    out.header.patch(self.tcb.snd_nxt, self.tcb.rcv_nxt, now, self.tcb.ts_recent);
                self.device.send(header, payload)?;
                self.tcb.snd_nxt = self.tcb.snd_nxt.wrapping_add(FRAME_PAYLOAD_BYTES as u32);
                self.counts.data_frames += 1;
                sent += FRAME_PAYLOAD_BYTES as u64;
            }
            if meter.is_over(sent, load)? {
                break;
            }
            self.input(true, |_| ())?;
            self.counts.ack_frames += 1;
        }
        self.close()?;
        Ok((meter.finish(sent)?, self.counts))
    }

    fn has_space(&self, window_bytes: usize) -> bool {
        self.tcb.in_flight() + FRAME_PAYLOAD_BYTES <= self.tcb.snd_wnd.min(window_bytes)
    }

    /// Our FIN, until it is acknowledged and the peer's has come.
    fn close(&mut self) -> io::Result<()> {
        self.control(FIN | ACK)?;
        self.tcb.snd_nxt = self.tcb.snd_nxt.wrapping_add(1);
        while self.tcb.snd_una != self.tcb.snd_nxt || !self.tcb.peer_closed {
            self.input(true, |_| ())?;
        }
        self.acknowledge()
    }

    /// Receives until the peer closes. Returns this thread's account.
    pub fn receive(mut self, load: &Load) -> io::Result<(Report, Counts)> {
        let window = u16::try_from(self.rcv_wnd_bytes >> WINDOW_SCALE).unwrap_or(u16::MAX);
        let mut header = Template::new(&self.addresses, ACK, window, 0);
        let mut user = CopyRing::new(load.copy_bytes);
        let mut meter = Meter::default();
        let mut received = 0u64;
        let mut unacknowledged = 0;
        while !self.tcb.peer_closed {
            match self.input(unacknowledged == 0, |payload| user.put(payload))? {
                Some(Seen { payload_bytes: 0 }) => continue,
                Some(Seen { payload_bytes }) => {
                    received += payload_bytes as u64;
                    unacknowledged += 1;
                    self.counts.data_frames += 1;
                    if unacknowledged < load.frames_per_ack {
                        continue;
                    }
                }
                None => {}
            }
            let now = self.ts_now();
            self.device.send(
                header.patch(self.tcb.snd_nxt, self.tcb.rcv_nxt, now, self.tcb.ts_recent),
                &[],
            )?;
            self.counts.ack_frames += 1;
            unacknowledged = 0;
            meter.is_over(received, load)?;
        }
        self.acknowledge()?;
        self.close()?;
        Ok((meter.finish(received)?, self.counts))
    }
}

/// The state that a sender prepares before the first frame.
struct Outgoing {
    header: Template,
    ring: FrameRing,
}

impl Outgoing {
    fn new(addresses: &Addresses, load: &Load) -> Outgoing {
        let header = Template::new(addresses, ACK | PSH, u16::MAX, FRAME_PAYLOAD_BYTES);
        Outgoing { header, ring: FrameRing::new(load) }
    }
}

/// The payloads of the frames in flight.
///
/// Without copying it is one frame that is sent repeatedly. With copying it has one frame for each segment of the
/// window. Each frame is filled from the user's buffer just before it is sent, so that the copy's destination is as
/// cold as a send buffer's.
struct FrameRing {
    frames: Vec<u8>,
    user: Vec<u8>,
    frame: usize,
    user_at: usize,
}

impl FrameRing {
    /// Whole pages, so that every payload is aligned alike.
    const STRIDE_BYTES: usize = 64 << 10;

    fn new(load: &Load) -> FrameRing {
        let copying = load.copy_bytes > 0;
        let frames = if copying { load.window_bytes.div_ceil(Self::STRIDE_BYTES) } else { 1 };
        FrameRing {
            frames: vec![0x5a; frames.max(1) * Self::STRIDE_BYTES],
            user: vec![0x5a; if copying { load.copy_bytes.max(FRAME_PAYLOAD_BYTES) } else { 0 }],
            frame: 0,
            user_at: 0,
        }
    }

    fn next_frame(&mut self) -> &[u8] {
        let at = self.frame * Self::STRIDE_BYTES;
        self.frame = (self.frame + 1) % (self.frames.len() / Self::STRIDE_BYTES);
        let frame = &mut self.frames[at..at + FRAME_PAYLOAD_BYTES];
        if !self.user.is_empty() {
            let first = FRAME_PAYLOAD_BYTES.min(self.user.len() - self.user_at);
            let (head, tail) = frame.split_at_mut(first);
            head.copy_from_slice(&self.user[self.user_at..self.user_at + first]);
            tail.copy_from_slice(&self.user[..tail.len()]);
            self.user_at = (self.user_at + FRAME_PAYLOAD_BYTES) % self.user.len();
        }
        frame
    }
}

/// The user's receive buffer, filled round and round.
struct CopyRing {
    buffer: Vec<u8>,
    at: usize,
}

impl CopyRing {
    fn new(bytes: usize) -> CopyRing {
        CopyRing { buffer: vec![0; bytes], at: 0 }
    }

    fn put(&mut self, mut payload: &[u8]) {
        if self.buffer.is_empty() {
            return;
        }
        while !payload.is_empty() {
            let n = payload.len().min(self.buffer.len() - self.at);
            self.buffer[self.at..self.at + n].copy_from_slice(&payload[..n]);
            payload = &payload[n..];
            self.at = (self.at + n) % self.buffer.len();
        }
        std::hint::black_box(&self.buffer);
    }
}

/// Clocks from the end of the warm-up on.
#[derive(Default)]
struct Meter {
    started: Option<(Instant, Duration, u64)>,
}

impl Meter {
    fn is_over(&mut self, bytes: u64, load: &Load) -> io::Result<bool> {
        if let Some((at, _, _)) = self.started {
            return Ok(at.elapsed() >= load.time);
        }
        if bytes >= load.warm_bytes {
            self.started = Some((Instant::now(), cpu::thread_cpu()?, bytes));
        }
        Ok(false)
    }

    fn finish(self, bytes: u64) -> io::Result<Report> {
        let Some((at, cpu, warm)) = self.started else { return Ok(Report::default()) };
        let cpu = cpu::thread_cpu()?.saturating_sub(cpu);
        let elapsed = at.elapsed();
        Ok(Report { bytes: bytes - warm, elapsed, cpu, thread: cpu, ..Report::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(copy_bytes: usize) -> Load {
        Load {
            window_bytes: 1 << 20,
            copy_bytes,
            frames_per_ack: 1,
            warm_bytes: 0,
            time: Duration::ZERO,
        }
    }

    #[test]
    fn a_copying_sender_goes_round_a_ring_as_large_as_the_window() {
        let mut ring = FrameRing::new(&load(128 << 10));
        let first = ring.next_frame().as_ptr();
        let others = (1..16).filter(|_| ring.next_frame().as_ptr() != first).count();
        assert_eq!(others, 15);
        assert_eq!(ring.next_frame().as_ptr(), first);
    }

    #[test]
    fn the_copied_stream_is_the_users_buffer_repeated() {
        let mut ring = FrameRing::new(&load(100_000));
        for (i, b) in ring.user.iter_mut().enumerate() {
            *b = i as u8 ^ (i >> 8) as u8;
        }
        let user = ring.user.clone();
        let sent: Vec<u8> = (0..4).flat_map(|_| ring.next_frame().to_vec()).collect();
        assert!(sent.iter().zip(user.iter().cycle()).all(|(a, b)| a == b));
    }

    #[test]
    fn the_received_stream_fills_the_users_buffer_round_and_round() {
        let mut user = CopyRing::new(10);
        user.put(&[1, 2, 3, 4, 5, 6, 7]);
        user.put(&[8, 9, 10, 11, 12]);
        assert_eq!(user.buffer, [11, 12, 3, 4, 5, 6, 7, 8, 9, 10]);
        CopyRing::new(0).put(&[1]);
    }

    fn tcb() -> Tcb {
        Tcb { snd_una: 10, snd_nxt: 12, rcv_nxt: 100, snd_wnd_scale: 3, ..Tcb::default() }
    }

    const SEGMENT: Segment<'static> =
        Segment { seq: 100, ack: 11, flags: ACK, window: 2, options: &[], payload: b"abc" };

    #[test]
    fn a_segment_in_order_moves_both_directions_on() {
        let mut t = tcb();
        assert!(t.input(&SEGMENT).expect("sound"));
        assert_eq!((t.snd_una, t.rcv_nxt, t.snd_wnd), (11, 103, 16));
        assert!(t.input(&Segment { seq: 103, flags: ACK | FIN, ..SEGMENT }).expect("sound"));
        assert!(t.peer_closed && t.rcv_nxt == 107);
    }

    #[test]
    fn an_acknowledgement_that_was_overtaken_changes_nothing() {
        let mut t = tcb();
        assert!(t.input(&Segment { ack: 9, payload: &[], ..SEGMENT }).expect("sound"));
        assert_eq!((t.snd_una, t.snd_wnd), (10, 0));
    }

    #[test]
    fn segments_that_a_correct_peer_never_sends_are_refused() {
        assert!(tcb().input(&Segment { flags: ACK | RST, ..SEGMENT }).is_err());
        assert!(tcb().input(&Segment { ack: 13, ..SEGMENT }).is_err());
    }

    /// A peer in memory: delivers prepared frames and keeps the frames that are sent to it.
    #[derive(Default)]
    struct Script {
        frames: std::collections::VecDeque<Vec<u8>>,
        current: Vec<u8>,
        sent: Vec<Vec<u8>>,
    }

    impl FrameDevice for Script {
        fn send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
            self.sent.push([header, payload].concat());
            Ok(())
        }

        fn receive(&mut self, wait: bool) -> io::Result<Option<&[u8]>> {
            match self.frames.pop_front() {
                Some(f) => self.current = f,
                None if wait => return Err(io::ErrorKind::TimedOut.into()),
                None => return Ok(None),
            }
            Ok(Some(&self.current))
        }
    }

    fn established(device: &mut Script) -> Flow<'_> {
        let ip = std::net::Ipv4Addr::LOCALHOST;
        let addresses = Addresses {
            our_mac: [2; 6],
            peer_mac: [2; 6],
            our_ip: ip,
            peer_ip: ip,
            our_port: 7,
            peer_port: 7,
        };
        Flow {
            device,
            addresses,
            tcb: tcb(),
            rcv_wnd_bytes: 1 << 20,
            start: Instant::now(),
            counts: Counts::default(),
        }
    }

    #[test]
    fn a_segment_out_of_order_is_dropped_counted_and_answered() {
        let mut device = Script::default();
        for seq in [103, 100] {
            let addresses = established(&mut Script::default()).addresses;
            let mut frame = Template::new(&addresses, ACK, 1, 3).patch(seq, 10, 1, 1).to_vec();
            frame.extend_from_slice(b"abc");
            device.frames.push_back(frame);
        }
        let mut flow = established(&mut device);
        flow.input(true, |_| panic!("not in order")).expect("the first frame");
        assert_eq!((flow.tcb.rcv_nxt, flow.counts.out_of_order), (100, 1));
        flow.input(true, |payload| assert_eq!(payload, b"abc")).expect("the second frame");
        assert_eq!((flow.tcb.rcv_nxt, flow.counts.out_of_order), (103, 1));
        assert_eq!(device.sent.len(), 1);
    }
}
