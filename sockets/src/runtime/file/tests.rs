use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;

use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};

use super::*;

fn pool() -> Pool {
    Pool::new(PoolConfig { huge_pages: false, ..PoolConfig::with_budget(8 << 20) }).expect("a pool")
}

/// Bytes that tell their place.
fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

/// A file without a name.
fn file_of(bytes: &[u8]) -> File {
    let path = std::env::temp_dir().join(format!(
        "fulmar-file-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let mut f =
        File::options().read(true).write(true).create(true).truncate(true).open(&path).expect("f");
    std::fs::remove_file(path).expect("it was just made");
    f.write_all(bytes).expect("room");
    f.seek(SeekFrom::Start(0)).expect("a file");
    f
}

#[test]
fn a_chain_of_many_mbufs_is_filled_from_any_place_to_any_place() {
    let mut pool = pool();
    let bytes = pattern(0, 300_000);
    let f = file_of(&bytes);
    for (skip, len, at) in [(0, 1, 0), (0, 200_000, 5), (70_000, 3, 0), (65_535, 70_000, 1000)] {
        let mut c = pool.alloc_chain(200_000, 0, Purpose::Send).expect("room");
        let before = c.to_vec();
        let (n, end) = read_into(f.as_fd(), at, &mut c, skip, len, Patience::Wait);
        assert!(n == len && matches!(end, End::Full), "{n} {end:?}");
        let after = c.to_vec();
        assert!(after[skip..skip + len] == bytes[at as usize..at as usize + len]);
        assert!(after[..skip] == before[..skip] && after[skip + len..] == before[skip + len..]);
        pool.free(c);
    }
}

#[test]
fn more_mbufs_than_one_call_takes_are_filled_by_several() {
    let mut pool = pool();
    let bytes = pattern(9, 150 * 256);
    let f = file_of(&bytes);
    let small = |pool: &mut Pool| {
        let mut m = pool.alloc(256, 0, Purpose::Send).expect("room");
        m.set_len(256);
        m
    };
    let mut c: Chain = (0..150).map(|_| small(&mut pool)).collect();
    let len = c.len();
    let (n, end) = read_into(f.as_fd(), 0, &mut c, 0, len, Patience::Wait);
    assert!(n == len && matches!(end, End::Full));
    assert!(c.to_vec() == bytes);
    pool.free(c);
}

#[test]
fn the_end_of_the_file_and_a_hole_are_distinguished() {
    let mut pool = pool();
    let f = file_of(b"12345");
    let mut c = pool.alloc_chain(100_000, 0, Purpose::Send).expect("room");
    let (n, end) = read_into(f.as_fd(), 2, &mut c, 0, 10, Patience::Wait);
    assert!(n == 3 && matches!(end, End::OfFile));
    let (n, end) = read_into(f.as_fd(), 1 << 40, &mut c, 0, 10, Patience::Wait);
    assert!(n == 0 && matches!(end, End::OfFile), "{end:?}");
    f.set_len(200_000).expect("room");
    let (n, end) = read_into(f.as_fd(), 5, &mut c, 0, 100_000, Patience::Wait);
    assert!(n == 100_000 && matches!(end, End::Full));
    assert!(c.to_vec().iter().all(|b| *b == 0), "a hole reads as zeroes");
    pool.free(c);
}

#[test]
fn cached_pages_are_read_without_waiting_and_errors_are_reported() {
    let mut pool = pool();
    let bytes = pattern(0, 100_000);
    let f = file_of(&bytes);
    let mut c = pool.alloc_chain(100_000, 0, Purpose::Send).expect("room");
    read_ahead(f.as_fd(), 0, 100_000);
    match read_into(f.as_fd(), 0, &mut c, 0, 100_000, Patience::InMemory) {
        (100_000, End::Full) => assert!(c.to_vec() == bytes),
        // The file system knows no such reads, or has written it out meanwhile.
        (n, End::MustWait | End::NotInMemory) => assert!(c.to_vec()[..n] == bytes[..n]),
        (n, end) => panic!("{n} {end:?}"),
    }
    let directory = File::open("/").expect("the root");
    let (n, end) = read_into(directory.as_fd(), 0, &mut c, 0, 10, Patience::Wait);
    assert!(n == 0 && matches!(&end, End::Failed(e) if e.raw_os_error() == Some(libc::EISDIR)));
    let memory = File::open("/proc/self/mem").expect("procfs");
    let (n, end) = read_into(memory.as_fd(), 0, &mut c, 0, 10, Patience::Wait);
    assert!(n == 0 && matches!(&end, End::Failed(e) if e.raw_os_error() == Some(libc::EIO)));
    pool.free(c);
}
