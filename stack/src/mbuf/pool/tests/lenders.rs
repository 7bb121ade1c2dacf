//! External memory: loans, and shared bytes.

use super::*;

/// Lends ranges of a vector and records the tags given back.
struct Library {
    bytes: Vec<u8>,
    back: std::sync::Mutex<Vec<u32>>,
}

impl crate::mbuf::Lender for Library {
    fn bytes(&self, offset: usize, len: usize) -> Option<crate::mbuf::VolatileSlice<'_>> {
        Some(self.bytes.get(offset..)?.get(..len)?.into())
    }
    fn give_back(&self, tag: u32) {
        self.back.lock().unwrap().push(tag);
    }
}

fn library() -> (std::sync::Arc<Library>, std::sync::Arc<dyn crate::mbuf::Lender>) {
    let bytes = (0..100_000).map(|i| i as u8).collect();
    let library = std::sync::Arc::new(Library { bytes, back: Default::default() });
    (std::sync::Arc::clone(&library), library)
}

#[test]
fn a_loan_ends_with_its_last_reference_and_is_not_charged() {
    let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
    let (library, lender) = library();
    let m = pool.lent(&lender, 3, 100, 7).unwrap();
    let part = pool.clone_ref(&m, 10, 20).unwrap();
    let mut copy = [0; 20];
    assert_eq!((part.copy_to(0, &mut copy), &copy[..]), (20, &library.bytes[13..33]));
    assert!(m.is_external() && m.truesize() == 0);
    assert_eq!(pool.stats().used_bytes, [0; 3]);
    pool.free_mbuf(m);
    assert!(library.back.lock().unwrap().is_empty());
    drop(part);
    pool.drain_remote();
    assert_eq!(*library.back.lock().unwrap(), [7]);
    assert_eq!((pool.outstanding(), pool.stats().used_bytes), (0, [0; 3]));
}

#[test]
fn a_range_outside_the_memory_of_the_lender_is_refused() {
    let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
    let (library, lender) = library();
    for (offset, len) in [(100_000, 1), (usize::MAX, 2), (99_990, 11), (0, 65_537)] {
        assert_eq!(pool.lent(&lender, offset, len, 1).err(), Some(NoBuffer));
    }
    assert!(library.back.lock().unwrap().is_empty() && pool.outstanding() == 0);
}

#[test]
fn a_loan_that_outlives_the_pool_ends_with_its_last_reference() {
    let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
    let (library, lender) = library();
    let m = pool.lent(&lender, 0, 4, 9).unwrap();
    drop((pool, lender));
    assert_eq!(Chain::from(m).to_vec(), [0, 1, 2, 3]);
    assert_eq!(*library.back.lock().unwrap(), [9]);
}

/// A chain with and without lent mbufs, and its bytes.
fn mixed(pool: &mut Pool) -> (Chain, Vec<u8>) {
    let (library, lender) = library();
    let mut own = pool.alloc_chain(700, 0, Purpose::Receive).unwrap();
    own.copy_from(0, &library.bytes[..700]);
    let (mut chain, mut bytes) = (own, library.bytes[..700].to_vec());
    for (offset, len) in [(3, 1001), (2000, 60_000), (7, 1)] {
        chain.push_back(pool.lent(&lender, offset, len as u32, 1).unwrap());
        bytes.extend_from_slice(&library.bytes[offset..][..len]);
    }
    (chain, bytes)
}

#[test]
fn lent_bytes_can_be_copied_and_summed_but_not_borrowed() {
    let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
    let (mut chain, bytes) = mixed(&mut pool);
    assert!(chain.is_volatile() && chain.to_vec() == bytes);
    let (mut part, mut rest) = ([0; 333], [0; 5000]);
    let mut reader = chain.reader();
    reader.skip(690);
    assert_eq!((reader.read(&mut part), reader.read(&mut rest)), (333, 5000));
    assert!(part == bytes[690..1023] && rest == bytes[1023..6023]);
    for range in [0..bytes.len(), 1..1703, 699..702, 700..61_702] {
        let mut sum = crate::wire::checksum::Sum::new();
        sum.add_bytes(&bytes[range.clone()]);
        assert_eq!(chain.sum(range).sum.finish(), sum.finish());
    }
    chain.pullup(1500, &mut pool).unwrap();
    assert_eq!(chain.front().unwrap().as_slice(), &bytes[..1500]);
    assert!(chain.to_vec() == bytes);
    chain.trim_front(1600, &mut pool);
    assert!(chain.iter().all(Mbuf::is_volatile) && chain.to_vec() == bytes[1600..]);
    let m = chain.pop_front().unwrap();
    assert_eq!(m.kernel_part().1, m.volatile().unwrap().len());
    assert_eq!(m.kernel_part().0, m.volatile().unwrap().as_ptr());
    let shown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| m.as_slice().len()));
    assert_eq!(shown.is_err(), cfg!(debug_assertions), "a borrow panics in debug builds");
    pool.free_mbuf(m);
    pool.free(chain);
    assert_all_freed(&mut pool);
}

/// Shares a vector and records the reasons of undelivered parts.
struct Shared {
    bytes: Vec<u8>,
    why: std::sync::Mutex<Vec<u8>>,
}

impl crate::mbuf::SharedBytes for Shared {
    fn piece(&self, at: usize) -> &[u8] {
        self.bytes.get(at..).unwrap_or_default()
    }
    fn on_undelivered(&self, why: u8) {
        self.why.lock().unwrap().push(why);
    }
}

fn shared(len: usize) -> (std::sync::Arc<Shared>, std::sync::Arc<dyn crate::mbuf::SharedBytes>) {
    let shared = Shared { bytes: pattern(0, len), why: Default::default() };
    let shared = std::sync::Arc::new(shared);
    (std::sync::Arc::clone(&shared), shared)
}

#[test]
fn parts_of_shared_bytes_are_charged_and_their_owner_is_returned_once_per_part() {
    let mut pool = pool(1 << 20);
    let (bytes, owner) = shared(1000);
    let head = pool.share(&owner, 0, 300, Purpose::Send).expect("an mbuf");
    let tail = pool.share(&owner, 900, 300, Purpose::Send).expect("an mbuf");
    assert_eq!((head.as_slice(), tail.as_slice()), (&bytes.bytes[..300], &bytes.bytes[900..]));
    assert_eq!((pool.stats().used_bytes, pool.shared_storages()), ([400, 0, 0], 2));
    let again = pool.clone_ref(&head, 100, 50).expect("a descriptor");
    pool.free_mbuf(head);
    assert!(pool.pop_returned().is_none(), "a reference is still in use");
    drop((again, tail));
    assert!(pool.pop_returned().is_none(), "the remote-free list is not drained yet");
    assert_all_freed(&mut pool);
    assert_eq!(pool.shared_storages(), 0);
    assert!(pool.pop_returned().is_some() && pool.pop_returned().is_some());
    assert!(pool.pop_returned().is_none());
    drop(owner);
    assert_eq!(std::sync::Arc::strong_count(&bytes), 1);
    assert!(bytes.why.lock().unwrap().is_empty());
}

#[test]
fn shared_bytes_beyond_the_share_are_refused() {
    let mut pool = pool(1 << 20);
    let (bytes, owner) = shared(2 << 20);
    assert!(pool.share(&owner, 0, 2 << 20, Purpose::Send).is_err());
    let share = pool.available(Purpose::Send);
    let m = pool.share(&owner, 0, share, Purpose::Send).expect("an mbuf");
    assert!(pool.share(&owner, share, 1, Purpose::Send).is_err());
    pool.free_mbuf(m);
    drop((pool, owner));
    assert_eq!(std::sync::Arc::strong_count(&bytes), 1);
}

#[test]
fn only_bytes_discarded_by_a_send_queue_are_undelivered() {
    let mut pool = pool(1 << 20);
    let (bytes, owner) = shared(3000);
    let mut queue = crate::mbuf::SendQueue::new(10_000);
    for at in [0, 1000, 2000] {
        let m = pool.share(&owner, at, 1000, Purpose::Send).expect("an mbuf");
        queue.append(Chain::from(m), &mut pool).expect("space");
    }
    queue.ack_to(1500, &mut pool);
    assert!(bytes.why.lock().unwrap().is_empty());
    queue.discard(7, &mut pool);
    assert_eq!(*bytes.why.lock().unwrap(), [7, 7]);
    let claim = queue.claim(1000).expect("space");
    queue.clear(&mut pool);
    let late = pool.share(&owner, 0, 1000, Purpose::Send).expect("an mbuf");
    queue.commit(claim, Chain::from(late), &mut pool);
    let kept = pool.share(&owner, 0, 10, Purpose::Send).expect("an mbuf");
    queue.append(Chain::from(kept), &mut pool).expect("space");
    drop(queue);
    assert_eq!(*bytes.why.lock().unwrap(), [7, 7, 0, 0]);
    assert_all_freed(&mut pool);
}

/// An owner whose drop panics.
struct Thorn;

impl External for Thorn {
    fn bytes(&self) -> &[u8] {
        &[9; 16]
    }
}

impl Drop for Thorn {
    fn drop(&mut self) {
        std::panic::resume_unwind(Box::new("a bug"));
    }
}

#[test]
fn mbufs_in_use_keep_their_memory_if_the_drop_of_an_owner_panics() {
    let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
    let mut out = pool.alloc(3, 0, Purpose::Send).unwrap();
    out.append(3).unwrap().copy_from_slice(b"abc");
    let (other, released) = owner(b"others");
    drop(pool.external(other, Purpose::Send).unwrap());
    // The remote-free list is last in, first out.
    drop(pool.external(Box::new(Thorn), Purpose::Send).unwrap());
    let ended = std::panic::AssertUnwindSafe(|| drop(pool));
    assert!(std::panic::catch_unwind(ended).is_err());
    assert_eq!((out.as_slice(), released.load(Ordering::SeqCst)), (&b"abc"[..], 0));
    drop(out);
    assert_eq!(released.load(Ordering::SeqCst), 1, "the other is dropped with the last mbuf");
}
