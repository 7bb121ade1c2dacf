use std::process::Command;
use std::sync::{Arc, Mutex};

use super::*;
use crate::device::testing::{Mirror, frame, packet, place, pool};

/// A file in memory that a test can look into while the device owns it.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(b);
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The blocks of a capture: type and body.
fn blocks(bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = 0;
    let mut all = Vec::new();
    while at < bytes.len() {
        let length = word(at + 4) as usize;
        assert_eq!(length % 4, 0);
        assert_eq!(word(at + length - 4) as usize, length);
        all.push((word(at), bytes[at + 8..at + length - 4].to_vec()));
        at += length;
    }
    all
}

fn word(body: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(body[4 * at..4 * at + 4].try_into().unwrap())
}

/// Sends one frame through a capture and receives it back.
fn there_and_back<W: Write + Send>(device: &mut PcapWriter<Mirror, W>, p: Packet, ns: u64) {
    let mut pool = pool();
    let mut burst = Burst::with_capacity(4);
    let mut counters = Counters::default();
    burst.push(p).unwrap();
    device.tx_burst(Instant::from_nanos(ns), &mut pool, &mut burst, &mut counters);
    device.rx_burst(Instant::from_nanos(ns + 7), &mut pool, &mut burst, 4, &mut counters);
}

#[test]
fn frames_are_written_with_time_length_and_direction() {
    let mut pool = pool();
    let file = Shared::default();
    let mut device = PcapWriter::new(Mirror::new(), file.clone(), Duration::from_secs(1 << 30));
    let bytes: Vec<u8> = (0..61).collect();
    there_and_back(&mut device, packet(&mut pool, &bytes), 123_456_789);
    assert!(file.0.lock().unwrap().is_empty(), "nothing is written before it must be");
    drop(device);
    let all = blocks(&file.0.lock().unwrap());
    let kinds: Vec<u32> = all.iter().map(|b| b.0).collect();
    assert_eq!(kinds, [SECTION_HEADER, INTERFACE_DESCRIPTION, 6, 6]);
    for (i, direction, ns) in [(2, 2, 123_456_789), (3, 1, 123_456_796)] {
        let body = &all[i].1;
        let time = u64::from(word(body, 1)) << 32 | u64::from(word(body, 2));
        assert_eq!(time, (1u64 << 30) * 1_000_000_000 + ns);
        assert_eq!((word(body, 3), word(body, 4)), (61, 61));
        assert_eq!(body[20..81], bytes);
        assert_eq!(word(&body[84..], 1), direction);
    }
}

#[test]
fn without_a_link_layer_packets_are_written_from_their_ip_header() {
    let mut pool = pool();
    let file = Shared::default();
    let mut device = PcapWriter::new(Mirror::plain_ip(), file.clone(), Duration::ZERO);
    let bytes: Vec<u8> = (0..60).collect();
    there_and_back(&mut device, packet(&mut pool, &bytes), 0);
    drop(device);
    let all = blocks(&file.0.lock().unwrap());
    assert_eq!(all[1].1[..2], LINKTYPE_RAW.to_ne_bytes());
    for (_, body) in &all[2..] {
        assert_eq!((word(body, 3), word(body, 4)), (46, 46));
        assert_eq!(body[20..66], bytes[14..]);
    }
}

#[test]
fn long_frames_are_truncated_but_their_length_is_recorded() {
    let mut pool = pool();
    let file = Shared::default();
    let mut device = PcapWriter::with_snap(Mirror::new(), file.clone(), Duration::ZERO, 30);
    there_and_back(&mut device, packet(&mut pool, &[3; 500]), 0);
    device.flush();
    let all = blocks(&file.0.lock().unwrap());
    assert_eq!((word(&all[2].1, 3), word(&all[2].1, 4)), (30, 500));
}

#[test]
fn a_frame_that_the_device_refused_is_written_only_when_it_is_taken() {
    let mut pool = pool();
    let file = Shared::default();
    let mut inner = Mirror::new();
    inner.limit = 1;
    let mut device = PcapWriter::new(inner, file.clone(), Duration::ZERO);
    let mut burst = Burst::with_capacity(4);
    let mut counters = Counters::default();
    for i in 0..3u8 {
        burst.push(packet(&mut pool, &[i; 20])).unwrap();
    }
    for _ in 0..3 {
        device.tx_burst(Instant::ZERO, &mut pool, &mut burst, &mut counters);
    }
    device.flush();
    let all = blocks(&file.0.lock().unwrap());
    let firsts: Vec<u8> = all[2..].iter().map(|b| b.1[20]).collect();
    assert_eq!(firsts, [0, 1, 2]);
}

#[test]
fn a_full_disk_ends_the_capture_and_not_the_traffic() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut pool = pool();
    let mut device = PcapWriter::new(Mirror::new(), Full, Duration::ZERO);
    device.flush();
    assert_eq!(device.error().map(io::Error::kind), Some(io::ErrorKind::StorageFull));
    let (mut burst, mut counters) = (Burst::with_capacity(4), Counters::default());
    burst.push(packet(&mut pool, &[1; 20])).unwrap();
    assert_eq!(device.tx_burst(Instant::ZERO, &mut pool, &mut burst, &mut counters), 1);
    assert_eq!(device.rx_burst(Instant::ZERO, &mut pool, &mut burst, 4, &mut counters), 1);
    assert!(device.encoder.buffer.is_empty(), "nothing gathers that is never written");
}

#[test]
fn tshark_reads_a_capture_without_complaint() {
    if Command::new("tshark").arg("--version").output().is_err() {
        let is_set = |name| std::env::var_os(name).is_some();
        let may_lack = is_set("FULMAR_WITHOUT_TSHARK") || !is_set("FULMAR_REQUIRE_KERNEL_TESTS");
        assert!(may_lack, "tshark is missing");
        // Not `eprintln`: the test harness hides what a passing test prints by it.
        let test = "tshark_reads_a_capture_without_complaint";
        let _ = writeln!(io::stderr(), "SKIPPED {test}: no tshark (apt: tshark)");
        return;
    }
    let mut pool = pool();
    let path = std::env::temp_dir().join(format!("fulmar-{}.pcapng", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    let mut device = PcapWriter::new(Mirror::new(), file, Duration::from_secs(1_700_000_000));
    for (v6, udp, bytes) in
        [(false, true, 100), (false, false, 60_000), (true, false, 30_000), (true, true, 33)]
    {
        let p = frame(&mut pool, v6, udp, &vec![7; bytes], 1400);
        there_and_back(&mut device, p, 5);
    }
    drop(device);
    let fields = "-T fields -e frame.time_epoch -e frame.len -e frame.packet_flags_direction \
                  -e _ws.malformed -e _ws.expert.group";
    let output =
        Command::new("tshark").arg("-r").arg(&path).args(fields.split_whitespace()).output();
    std::fs::remove_file(&path).unwrap();
    let output = output.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
    assert_eq!(rows.len(), 8, "{text}");
    assert_eq!(rows[0][..2], ["1700000000.000000005", "142"]);
    assert_eq!((rows[2][1], rows[4][1]), ("60066", "30086"));
    assert!(rows.iter().all(|r| r[3].is_empty()), "malformed: {text}");
    assert!(rows[0][2].ends_with('2') && rows[1][2].ends_with('1'), "{text}");
}

#[test]
fn placement_passes_and_placed_payload_is_in_the_capture() {
    let mut pool = pool();
    let file = Shared::default();
    let mut device = PcapWriter::new(Mirror::new(), file.clone(), Duration::ZERO);
    assert_eq!(place(&mut device, 10), Some(Ok(())));
    let mut room = crate::mbuf::RecvBuf::with_capacity(100).post().writable_range(0).unwrap();
    room.bytes()[..40].fill(0x5a);
    let mut p = packet(&mut pool, &[1; 20]);
    p.chain.push_back(room.split(40, &mut pool).unwrap());
    there_and_back(&mut device, p, 0);
    device.flush();
    let all = blocks(&file.0.lock().unwrap());
    assert_eq!(all[3].1[20..80], [[1; 20], [0x5a; 20], [0x5a; 20]].concat());
}
