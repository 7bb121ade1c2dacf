//! probe
use cpu::Placement;
use floor::*;
use fulmar_lab::*;
use std::time::Duration;
fn show(name: &str, s: std::io::Result<bench::Sample>) {
    match s {
        Err(e) => println!("{name:44} failed: {e}"),
        Ok(s) => {
            let kb = |r: &peer::Report| r.cpu.as_nanos() as f64 * 1024.0 / r.bytes.max(1) as f64;
            let gbps = s.far.bytes as f64 * 8.0 / s.far.elapsed.as_nanos().max(1) as f64;
            println!(
                "{name:44} {gbps:6.1} Gb/s near {:6.1} far {:6.1} sum {:6.1}  {:?}",
                kb(&s.near),
                kb(&s.far),
                kb(&s.near) + kb(&s.far),
                s.counts
            );
        }
    }
}
fn main() {
    child::dispatch();
    netns::enter().expect("enter");
    let fpa: usize = std::env::var("FPA").ok().and_then(|s| s.parse().ok()).unwrap_or(8);
    let win: usize = std::env::var("WIN").ok().and_then(|s| s.parse().ok()).unwrap_or(1 << 20);
    let ms: u64 = std::env::var("MS").ok().and_then(|s| s.parse().ok()).unwrap_or(300);
    let b = Bulk { frames_per_ack: fpa, window_bytes: win, ..Bulk::default() };
    let t = Duration::from_millis(ms);
    let only = std::env::args().nth(1).unwrap_or_default();
    let pair = kernel::Pair::new(1500, true).expect("pair");
    let mut sites: Vec<_> = [Kind::Tap, Kind::Packet, Kind::PacketRing]
        .into_iter()
        .map(|k| (k, Site::new(k).expect("site")))
        .collect();
    for p in [Placement::SameCpu, Placement::TwoCpus] {
        let n = format!("kernel {}", p.title());
        if n.contains(&only) {
            show(&n, pair.stream(&b, p, t));
        }
        for (k, s) in &mut sites {
            for d in [Direction::Send, Direction::Receive] {
                for copy in [false, true] {
                    let n =
                        format!("{k:?} {d:?} {}{}", p.title(), if copy { " +memcpy" } else { "" });
                    if n.contains(&only) {
                        show(&n, s.stream(&b, d, copy, p, t));
                    }
                }
            }
        }
    }
}
