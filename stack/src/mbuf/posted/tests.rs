use super::*;
use crate::mbuf::{Chain, Pool, PoolConfig, Purpose};
use alloc::vec;

fn pool() -> Pool {
    Pool::new(PoolConfig::with_budget(4 << 20)).unwrap()
}

#[test]
fn split_bytes_are_readable_while_the_rest_is_written_and_the_buffer_completes() {
    let mut pool = pool();
    let buf = RecvBuf::with_capacity(10_000);
    assert!(buf.id().address.is_multiple_of(4096) && buf.is_empty());
    let mut hold = buf.post();
    let mut room = hold.writable_range(0).expect("the only writable range");
    assert!(hold.writable_range(0).is_none(), "one writable range at a time");
    room.bytes()[..3].copy_from_slice(b"one");
    let a = room.split(3, &mut pool).unwrap();
    room.bytes()[..3].copy_from_slice(b"two");
    assert_eq!((a.as_slice(), a.placed().map(|p| p.offset)), (&b"one"[..], Some(0)));
    let b = room.split(3, &mut pool).unwrap();
    assert_eq!(b.placed(), Some(Placed { buffer: hold.id(), offset: 3 }));
    assert_eq!((room.offset(), room.len(), b.truesize()), (6, 9_994, 0));
    assert_eq!(room.write(b"!"), 1);
    drop(room);
    assert!(hold.writable_range(2).is_none(), "an mbuf covers bytes behind it");
    let hold = hold.release(7).expect_err("mbufs are out");
    pool.free(Chain::from(a));
    pool.free(Chain::from(b));
    let buf = hold.release(7).expect("no references are left");
    assert_eq!(&buf[..], b"onetwo!");
    assert_eq!(pool.stats().used_bytes, [0; 3]);
}

#[test]
fn a_new_writable_range_starts_behind_the_mbufs_or_anywhere_after_their_drop() {
    let mut pool = pool();
    let mut hold = RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(10).unwrap();
    let m = room.split(20, &mut pool).unwrap();
    drop(room);
    assert!(hold.writable_range(29).is_none() && hold.writable_range(101).is_none());
    assert_eq!(hold.writable_range(30).expect("behind the mbuf").offset(), 30);
    assert_eq!(hold.writable_range(100).expect("the end").len(), 0);
    pool.free_mbuf(m);
    assert_eq!(hold.writable_range(0).expect("all of it").len(), 100);
}

#[test]
fn a_writable_range_converted_to_an_mbuf_leaves_no_other_reference() {
    let mut pool = pool();
    let mut hold = RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(40).unwrap();
    room.bytes()[0] = 7;
    let m = room.into_mbuf(&mut pool).unwrap();
    assert_eq!((m.len(), m.as_slice()[0], m.placed().map(|p| p.offset)), (60, 7, Some(40)));
    assert!(hold.writable_range(99).is_none(), "an mbuf covers it");
    assert_eq!(
        hold.writable_range(100).expect("behind it").into_mbuf(&mut pool).map(|m| m.len()),
        Ok(0)
    );
    pool.free_mbuf(m);
    pool.drain_remote();
    assert!(!hold.is_shared());
    assert_eq!(hold.writable_range(0).expect("all of it").len(), 100);
}

#[test]
fn parts_and_clones_of_a_placed_mbuf_have_a_position_and_keep_the_buffer() {
    let mut pool = pool();
    let mut hold = RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(0).unwrap();
    room.write(&[7; 5]);
    let mut m = room.split(50, &mut pool).unwrap();
    drop(room);
    let part = pool.clone_ref(&m, 10, 5).unwrap();
    m.trim_front(3);
    assert_eq!(m.placed().map(|p| p.offset), Some(8));
    assert_eq!(part.placed().map(|p| p.offset), Some(15));
    assert!(m.as_mut_slice().is_none(), "immutable");
    pool.free_mbuf(m);
    let hold = hold.release(0).expect_err("a clone is out");
    drop(part);
    let hold = hold.release(0).expect_err("an mbuf still exists");
    pool.drain_remote();
    assert!(hold.release(0).is_ok());
    let ordinary = pool.alloc(10, 0, Purpose::Receive).unwrap();
    assert_eq!(ordinary.placed(), None);
}

#[test]
fn a_buffer_made_from_a_vector_is_converted_back_without_a_copy() {
    let v = vec![1u8; 64];
    let at = v.as_ptr();
    let mut hold = RecvBuf::from(v).post();
    hold.writable_range(0).unwrap().write(b"abc");
    let v = hold.release(3).unwrap().into_vec();
    assert_eq!((&v[..], v.as_ptr(), v.capacity()), (&b"abc"[..], at, 64));
    drop(RecvBuf::from(Vec::new()));
    assert_eq!(RecvBuf::with_capacity(3).into_vec(), b"");
}

#[test]
fn memory_outlives_the_pool_and_the_hold_while_an_mbuf_exists() {
    let mut pool = pool();
    let mut hold = RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(0).unwrap();
    room.bytes()[..4].copy_from_slice(b"last");
    let m = room.split(4, &mut pool).unwrap();
    drop((hold, room, pool));
    assert_eq!(m.as_slice(), b"last");
}

#[test]
fn a_scrubbed_range_is_zeroed() {
    let mut hold = RecvBuf::with_capacity(8).post();
    let mut room = hold.writable_range(0).unwrap();
    room.bytes().fill(9);
    room.scrub(3);
    assert_eq!(room.bytes(), [0, 0, 0, 9, 9, 9, 9, 9]);
    room.scrub(usize::MAX);
    drop(room);
    let mut buf = hold.release(0).unwrap();
    assert_eq!(buf.memory_mut(), [0; 8]);
    assert_ne!(buf.id(), RecvBuf::with_capacity(8).id());
}

#[test]
fn empty_and_impossible_capacities_are_handled() {
    let mut hold = RecvBuf::with_capacity(0).post();
    let mut room = hold.writable_range(0).unwrap();
    assert_eq!((room.len(), room.write(b"x")), (0, 0));
    drop(room);
    assert!(hold.release(9).unwrap().is_empty());
    assert_eq!(RecvBuf::try_with_capacity(usize::MAX).err(), Some(NoMemory));
}

#[test]
fn filled_bytes_become_an_mbuf_after_the_drop_of_the_writable_range() {
    let mut pool = pool();
    let mut hold = RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(0).unwrap();
    room.bytes()[..4].copy_from_slice(b"here");
    let filled = room.fill(4);
    let lost = room.fill(6);
    assert_eq!((filled.len(), lost.is_empty(), room.offset()), (4, false, 10));
    drop((room, lost));
    assert!(
        hold.writable_range(3).is_none() && hold.writable_range(10).is_some(),
        "filled bytes are not writable"
    );
    let m = filled.into_mbuf(&mut pool).unwrap();
    assert_eq!((m.as_slice(), m.placed().map(|p| p.offset)), (&b"here"[..], Some(0)));
    pool.free_mbuf(m);
    assert!(hold.release(4).is_ok());
}
