use std::vec::Vec;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, mbuf, pool};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose, SendQueue};

/// Bytes that only the kernel may read.
struct Pages(Vec<u8>);

impl SharedBytes for Pages {
    fn piece(&self, _at: usize) -> &[u8] {
        &[]
    }
    fn kernel_part(&self, at: usize) -> Option<(*const u8, usize)> {
        let rest = self.0.get(at..).unwrap_or_default();
        Some((rest.as_ptr(), rest.len()))
    }
    fn on_undelivered(&self, _why: u8) {}
}

fn pages(len: usize) -> (Arc<Pages>, Arc<dyn SharedBytes>) {
    let pages = Arc::new(Pages(std::vec![7; len]));
    (Arc::clone(&pages), pages)
}

fn share(pool: &mut Pool, len: usize) -> (Arc<Pages>, Mbuf) {
    let (pages, owner) = pages(len);
    let m = pool.share(&owner, 0, len, Purpose::Send).expect("an mbuf");
    (pages, m)
}

#[test]
fn kernel_only_bytes_read_as_zeroes_in_pieces_of_64_kib() {
    let mut pool = pool(1 << 20);
    let (pages, owner) = pages(100_000);
    let m = pool.share(&owner, 10, 90_000, Purpose::Send).expect("an mbuf");
    assert!(m.is_kernel_only() && m.is_external() && m.len() == 64 << 10);
    assert!(m.as_slice().iter().all(|&b| b == 0));
    assert_eq!(m.kernel_part(), (pages.0[10..].as_ptr(), 64 << 10));
    let mut part = pool.clone_ref(&m, 100, 50).expect("a descriptor");
    part.trim_front(5);
    assert_eq!(part.kernel_part(), (pages.0[115..].as_ptr(), 45));
    let plain = mbuf(&mut pool, b"abc");
    assert_eq!(plain.kernel_part(), (plain.as_slice().as_ptr(), 3));
    assert_eq!((pool.kernel_only_storages(), plain.is_kernel_only()), (1, false));
    [m, part, plain].into_iter().for_each(|m| pool.free_mbuf(m));
    assert_all_freed(&mut pool);
    assert_eq!(pool.kernel_only_storages(), 0);
    drop((owner, pool.pop_returned()));
    assert_eq!(Arc::strong_count(&pages), 1);
}

#[test]
fn kernel_only_storage_is_not_writable() {
    let mut pool = pool(1 << 20);
    let (_, mut m) = share(&mut pool, 1000);
    m.trim_back(100);
    m.trim_front(100);
    assert!(m.as_mut_slice().is_none() && m.prepend(1).is_none() && m.append(1).is_none());
    assert_eq!(pool.append_tail(&mut m, b"x"), 0);
    let mut chain = Chain::from(m);
    assert_eq!(chain.copy_from(0, b"x"), None);
    pool.free(chain);
    assert_all_freed(&mut pool);
}

#[test]
fn kernel_only_bytes_are_not_copied_as_zeroes() {
    let (mut pool, mut other) = (pool(1 << 20), pool(1 << 20));
    let (_, m) = share(&mut pool, 1000);
    assert_eq!(other.clone_ref(&m, 0, 10).err(), Some(NoBuffer));
    let mut chain = Chain::from(mbuf(&mut pool, b"header"));
    chain.push_back(m);
    assert!(chain.is_kernel_only());
    assert_eq!(chain.pullup(7, &mut pool), Err(NoBuffer));
    assert_eq!(chain.pullup(6, &mut pool), Ok(()));
    let mut queue = SendQueue::new(4096);
    queue.append(chain, &mut pool).expect("space");
    assert_eq!(queue.copy_range(0, 7, &mut pool).err(), Some(NoBuffer));
    let copy = queue.copy_range(0, 6, &mut pool).expect("storage");
    assert_eq!(copy.to_vec(), b"header");
    pool.free(copy);
    queue.clear(&mut pool);
    assert_all_freed(&mut pool);
}

#[test]
fn a_send_queue_reports_the_offset_of_a_frame_that_failed_with_efault() {
    let mut pool = pool(1 << 20);
    let (_, first) = share(&mut pool, 1000);
    let (_, second) = share(&mut pool, 1000);
    let mut queue = SendQueue::new(4096);
    let mut chain = Chain::from(mbuf(&mut pool, &[1; 600]));
    chain.push_back(first);
    chain.push_back(second);
    queue.append(chain, &mut pool).expect("space");
    queue.ack_to(700, &mut pool);
    assert_eq!((queue.faulted_at(), pool.has_fault()), (None, false));
    let frame = queue.range(1500, 300, &mut pool).expect("descriptors");
    pool.note_fault(&frame);
    pool.free(frame);
    assert_eq!(queue.faulted_at(), Some(1500));
    assert!(pool.take_fault() && !pool.has_fault());
    let earlier = queue.range(700, 100, &mut pool).expect("descriptors");
    pool.note_fault(&earlier);
    pool.free(earlier);
    assert_eq!(queue.faulted_at(), Some(700));
    queue.ack_to(2600, &mut pool);
    assert_eq!(queue.faulted_at(), None, "acknowledged bytes are not reported");
    assert_all_freed(&mut pool);
    let (_, again) = share(&mut pool, 1000);
    assert_eq!(again.faulted_at(), None, "a reused record is cleared");
    pool.free_mbuf(again);
}
