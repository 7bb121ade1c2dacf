use fulmar_stack::mbuf::PoolConfig;

use super::*;

fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(16 << 20)).unwrap()
}

/// Lets a frame land as a scattering read does.
fn land(pair: &mut BufferPair, scratch: &mut Scratch, frame: &[u8]) {
    let mut rest = frame;
    for part in pair.parts(scratch) {
        let n = rest.len().min(part.len());
        part[..n].copy_from_slice(&rest[..n]);
        rest = &rest[n..];
    }
    assert!(rest.is_empty());
}

fn frame(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 256) as u8).collect()
}

#[test]
fn frames_of_every_length_come_out_as_they_landed() {
    let mut pool = pool();
    let mut scratch = Scratch::new();
    let mut pair = BufferPair::default();
    for bytes in [14, 60, 255, 256, 257, 1514, 2048, 16_384, 16_385, 65_549] {
        assert!(pair.prepare(&mut pool));
        land(&mut pair, &mut scratch, &frame(bytes));
        let chain = pair.take(bytes, &mut scratch, &mut pool).unwrap();
        assert!(chain.to_vec() == frame(bytes), "{bytes}");
        pool.free(chain);
    }
}

#[test]
fn a_frame_pins_memory_in_proportion_to_its_length() {
    let mut pool = pool();
    let mut scratch = Scratch::new();
    let mut pair = BufferPair::default();
    for (bytes, pinned) in
        [(60, 256), (256, 256), (1514, 2048), (9014, 16_384), (60_000, 65_536 + 256)]
    {
        pair.prepare(&mut pool);
        land(&mut pair, &mut scratch, &frame(bytes));
        let chain = pair.take(bytes, &mut scratch, &mut pool).unwrap();
        assert_eq!(chain.storage_bytes(), pinned, "{bytes}");
        pool.free(chain);
    }
}

/// A pool whose receive share is used up; the rest is for control only.
fn starved() -> (Pool, Vec<Mbuf>) {
    let mut pool = pool();
    let mut held = Vec::new();
    for bytes in [LARGE_BYTES, COPY_BYTES, 2048, SMALL_BYTES] {
        while let Ok(m) = pool.alloc(bytes, 0, Purpose::Receive) {
            held.push(m);
        }
    }
    (pool, held)
}

#[test]
fn a_starved_pool_still_receives_acknowledgements_and_drops_the_rest() {
    let (mut pool, held) = starved();
    let mut scratch = Scratch::new();
    let mut pair = BufferPair::default();
    assert!(!pair.prepare(&mut pool));
    land(&mut pair, &mut scratch, &frame(1514));
    let dropped = pair.take(1514, &mut scratch, &mut pool);
    assert_eq!(dropped.map(|c| c.len()), Err(DropReason::NoBuffer));
    pair.prepare(&mut pool);
    land(&mut pair, &mut scratch, &frame(66));
    let ack = pair.take(66, &mut scratch, &mut pool).unwrap();
    assert_eq!(ack.to_vec(), frame(66));
    drop(held);
}

#[test]
fn buffers_come_back_when_the_pool_recovers() {
    let (mut pool, held) = starved();
    let mut scratch = Scratch::new();
    let mut pair = BufferPair::default();
    pair.prepare(&mut pool);
    held.into_iter().for_each(|m| pool.free_mbuf(m));
    assert!(pair.prepare(&mut pool));
    land(&mut pair, &mut scratch, &frame(40_000));
    assert!(pair.take(40_000, &mut scratch, &mut pool).unwrap().to_vec() == frame(40_000));
}
