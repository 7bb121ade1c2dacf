//! sendfile: every byte once and in order, exact counts, and everything given back, whatever the
//! file, the peer and the pool do meanwhile.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fulmar::stat::Counter;
use fulmar::zero_copy::{SendFileError, ZeroCopy};
use fulmar::{Ready, Stack, TcpStream};

use crate::support::file::{evict, file_of};
use crate::support::{
    PATIENCE, buffers_come_home, change, connection, eventually, pattern, stacks, stacks_with,
    within,
};

const MIB: usize = 1 << 20;

fn read_all(mut s: TcpStream) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        got
    })
}

fn count(s: &Stack, c: Counter) -> u64 {
    s.stat().unwrap().shard.counters.value(c)
}

/// What arrives when `send` runs on a new connection, which it may not close; and its answer.
fn received<T: Send + 'static>(
    send: impl FnOnce(&TcpStream) -> T + Send + 'static,
) -> (T, Vec<u8>) {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let reader = read_all(s);
        let answer = send(&c);
        drop(c);
        let got = reader.join().unwrap();
        buffers_come_home(&[&a, &b]);
        (answer, got)
    })
}

fn send_all(f: &File, c: &TcpStream) -> u64 {
    c.send_file(f, .., &[], &[]).unwrap()
}

#[test]
fn a_file_of_any_size_arrives_with_headers_and_trailers() {
    for len in [0, 1, 4095, 4096, 4097, 65_536, 300_000, 5 * MIB + 13] {
        let bytes = pattern(0, len);
        let f = file_of(&bytes);
        let (sent, got) = received(move |c| {
            let headers = [IoSlice::new(b"head"), IoSlice::new(b""), IoSlice::new(b"er\n")];
            c.send_file(&f, .., &headers, &[IoSlice::new(b"trail"), IoSlice::new(b"er\n")]).unwrap()
        });
        let expected = [b"header\n", &bytes[..], b"trailer\n"].concat();
        assert_eq!(sent, expected.len() as u64);
        assert!(got == expected, "{len} bytes differ");
    }
}

#[test]
fn headers_and_trailers_larger_than_the_send_buffer_go_in_parts() {
    let (head, tail) = (pattern(3, 3 * MIB), pattern(5, 2 * MIB));
    let bytes = pattern(0, 100_001);
    let expected = [&head[..], &bytes, &tail].concat();
    let f = file_of(&bytes);
    let (sent, got) = received(move |c| {
        let heads: Vec<_> = head.chunks(1_777).map(IoSlice::new).collect();
        c.send_file(&f, .., &heads, &[IoSlice::new(&tail)]).unwrap()
    });
    assert_eq!(sent, expected.len() as u64);
    assert!(got == expected);
}

#[test]
fn a_range_is_sent_and_the_position_of_the_file_is_left_alone() {
    let f = file_of(&pattern(0, MIB));
    (&f).seek(SeekFrom::Start(77)).unwrap();
    let (sent, got) = received(move |c| {
        let mut sent = c.send_file(&f, 1000..3000, &[], &[]).unwrap();
        sent += c.send_file(&f, 3000..=4999, &[], &[]).unwrap();
        sent += c.send_file(&f, 500_000.., &[], &[]).unwrap();
        sent += c.send_file(&f, 5..5, &[], &[]).unwrap();
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = c.send_file(&f, 9..5, &[], &[]).unwrap_err();
        assert_eq!((backwards.error.kind(), backwards.sent), (ErrorKind::InvalidInput, 0));
        assert_eq!((&f).stream_position().unwrap(), 77);
        sent
    });
    let expected = [pattern(1000, 4000), pattern(500_000, MIB - 500_000)].concat();
    assert_eq!(sent, expected.len() as u64);
    assert!(got == expected);
}

#[test]
fn a_range_past_the_end_is_a_short_success_with_its_headers() {
    let f = file_of(&pattern(0, 1000));
    let (sent, got) = received(move |c| {
        let ends = [IoSlice::new(b"[")];
        let mut sent = c.send_file(&f, 2000..9000, &ends, &ends).unwrap();
        sent += c.send_file(&f, 2000.., &ends, &ends).unwrap();
        sent += c.send_file(&f, u64::MAX.., &ends, &ends).unwrap();
        sent += c.send_file(&f, u64::MAX - 5..u64::MAX, &ends, &ends).unwrap();
        sent + c.send_file(&f, 990..9000, &[], &[]).unwrap()
    });
    assert_eq!(sent, 18);
    assert!(got == [&b"[[[[[[[["[..], &pattern(990, 10)].concat());
}

#[test]
fn holes_are_sent_as_zeroes() {
    let f = file_of(&[]);
    f.set_len(3 * MIB as u64).unwrap();
    f.write_all_at(b"island", 1_500_000).unwrap();
    let (sent, got) = received(move |c| send_all(&f, c));
    let mut expected = vec![0; 3 * MIB];
    expected[1_500_000..1_500_006].copy_from_slice(b"island");
    assert_eq!(sent, 3 * MIB as u64);
    assert!(got == expected);
}

#[test]
fn a_descriptor_that_is_not_a_file_is_refused_with_a_reason() {
    let ((), got) = received(|c| {
        let refusal = |f: &File| {
            let e = c.send_file(f, .., &[IoSlice::new(b"header")], &[]).unwrap_err();
            assert_eq!(e.sent, 0, "{e}");
            e.error.kind()
        };
        assert_eq!(refusal(&File::open("/").unwrap()), ErrorKind::IsADirectory);
        let (socket, _other) = UnixStream::pair().unwrap();
        let socket = File::from(std::os::fd::OwnedFd::from(socket));
        assert_eq!(refusal(&socket), ErrorKind::NotSeekable);
        let (pipe, _writer) = std::io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(pipe));
        assert_eq!(refusal(&pipe), ErrorKind::NotSeekable);
        let path = std::env::temp_dir().join(format!("fulmar-write-only-{}", std::process::id()));
        let write_only = File::create(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        write_only.set_len(10).unwrap();
        let e = c.send_file(&write_only, .., &[], &[]).unwrap_err();
        assert_eq!((e.error.raw_os_error(), e.sent), (Some(libc::EBADF), 0));
    });
    assert!(got.is_empty());
}

#[test]
fn a_file_without_a_size_is_read_to_its_end() {
    let expected = std::fs::read("/proc/filesystems").unwrap();
    let (sent, got) = received(|c| {
        let f = File::open("/proc/filesystems").unwrap();
        c.send_file(&f, .., &[IoSlice::new(b"<")], &[IoSlice::new(b">")]).unwrap()
    });
    assert_eq!(sent, expected.len() as u64 + 2);
    assert!(got == [b"<", &expected[..], b">"].concat());
    let (sent, got) = received(|c| {
        let zeroes = File::open("/dev/zero").unwrap();
        c.send_file(&zeroes, 5..200_005, &[], &[IoSlice::new(b"!")]).unwrap()
    });
    assert_eq!(sent, 200_001);
    assert!(got[..200_000].iter().all(|b| *b == 0) && got[200_000..] == *b"!");
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_and_the_connection_lives() {
    let ((), got) = received(|c| {
        // Nothing is mapped at these addresses.
        let memory = File::open("/proc/self/mem").unwrap();
        let e = c.send_file(&memory, 0..10_000, &[], &[]).unwrap_err();
        assert_eq!((e.error.raw_os_error(), e.sent), (Some(libc::EIO), 0));
        let e = c.send_file(&memory, 0.., &[IoSlice::new(b"header")], &[]).unwrap_err();
        assert_eq!((e.error.raw_os_error(), e.sent), (Some(libc::EIO), 0));
        (&*c).write_all(b"alive").unwrap();
    });
    assert_eq!(got, b"alive");
}

/// The end of the highest mapping of this process: addresses after it can never be read.
fn highest_mapping() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ends = maps
        .lines()
        .filter(|l| !l.contains("[vsyscall]"))
        .filter_map(|l| u64::from_str_radix(l.split(['-', ' ']).nth(1)?, 16).ok());
    ends.max().unwrap()
}

#[test]
fn an_error_half_way_comes_with_what_was_read_before_it() {
    let end = highest_mapping();
    let memory = File::open("/proc/self/mem").unwrap();
    let mut expected = vec![0; 4096];
    memory.read_exact_at(&mut expected, end - 4096).unwrap();
    let (sent, got) = received(move |c| {
        let headers = [IoSlice::new(b"h")];
        let e = c.send_file(&memory, end - 4096..end + 9000, &headers, &headers).unwrap_err();
        assert_eq!(e.error.raw_os_error(), Some(libc::EIO));
        e.sent
    });
    assert_eq!(sent, 1 + 4096);
    assert!(got == [b"h", &expected[..]].concat());
}

#[test]
fn a_file_that_shrinks_while_it_is_sent_ends_where_it_ends() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        let bytes = pattern(0, 16 * MIB);
        let f = file_of(&bytes);
        let writer = {
            let (c, f) = (c.try_clone().unwrap(), f.try_clone().unwrap());
            thread::spawn(move || {
                c.send_file(&f, .., &[IoSlice::new(b"<")], &[IoSlice::new(b">")]).unwrap()
            })
        };
        let mut first = [0; 1];
        s.read_exact(&mut first).unwrap();
        // It waits for the reader by now, with at most the two buffers gone.
        f.set_len(4 * MIB as u64 + 5).unwrap();
        let reader = read_all(s);
        let sent = writer.join().unwrap();
        drop(c);
        let got = reader.join().unwrap();
        assert_eq!(sent, got.len() as u64 + 1);
        let file_part = got.len() - 1;
        assert!(file_part <= 4 * MIB + 5, "{file_part}");
        assert!(got[..file_part] == bytes[..file_part] && got[file_part..] == *b">");
        assert_eq!(file_part, 4 * MIB + 5);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_file_that_grows_is_followed_only_without_an_end() {
    for is_open in [true, false] {
        let (sent, got) = within(move || {
            let (a, b) = stacks();
            let (c, mut s) = connection(&a, &b, 80);
            let f = file_of(&pattern(0, 8 * MIB));
            let writer = {
                let (c, f) = (c.try_clone().unwrap(), f.try_clone().unwrap());
                thread::spawn(move || match is_open {
                    true => send_all(&f, &c),
                    false => c.send_file(&f, ..1 << 40, &[], &[]).unwrap(),
                })
            };
            let mut got = vec![0];
            s.read_exact(&mut got).unwrap();
            f.write_all_at(&pattern(8 * MIB, 100_000), 8 * MIB as u64).unwrap();
            let reader = read_all(s);
            let sent = writer.join().unwrap();
            drop(c);
            got.extend(reader.join().unwrap());
            (sent, got)
        });
        let len = 8 * MIB + if is_open { 100_000 } else { 0 };
        assert_eq!(sent, len as u64);
        assert!(got == pattern(0, len));
    }
}

#[test]
fn a_file_without_a_name_is_sent_and_its_descriptors_are_given_back() {
    let ours = || {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter(|fd| {
                let to = std::fs::read_link(fd.as_ref().unwrap().path()).unwrap_or_default();
                to.to_string_lossy().contains("fulmar-vanishing")
            })
            .count()
    };
    let path = std::env::temp_dir().join(format!("fulmar-vanishing-{}", std::process::id()));
    std::fs::write(&path, pattern(0, 4 * MIB)).unwrap();
    let f = File::open(&path).unwrap();
    evict(&f);
    let copy = f.try_clone().unwrap();
    let (sent, got) = within(move || {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        c.set_nonblocking(true).unwrap();
        let reader = read_all(s);
        std::fs::remove_file(&path).unwrap();
        let sent = send_patiently(&a, &c, &copy, 0);
        drop((c, copy));
        (sent, reader.join().unwrap())
    });
    assert_eq!(sent, 4 * MIB as u64);
    assert!(got == pattern(0, 4 * MIB));
    eventually("the thread that reads closes its copies", || ours() == 1);
    drop(f);
}

/// Sends a file over a non-blocking connection, waiting in a poll set in between.
fn send_patiently(a: &Stack, c: &TcpStream, f: &File, from: u64) -> u64 {
    let set = a.poll_set().unwrap();
    set.add(c, 0, Ready::WRITABLE).unwrap();
    let (mut sent, mut events) = (0, Vec::new());
    loop {
        match c.send_file(f, from + sent.., &[], &[]) {
            Ok(n) => return sent + n,
            Err(e) if e.error.kind() == ErrorKind::WouldBlock => sent += e.sent,
            Err(e) => panic!("{e}"),
        }
        set.wait(&mut events, Some(PATIENCE)).unwrap();
    }
}

#[test]
fn a_nonblocking_call_returns_its_progress_and_never_waits() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        c.set_nonblocking(true).unwrap();
        let f = file_of(&[]);
        // Nothing of a hole is in memory.
        f.set_len(3 * MIB as u64).unwrap();
        f.write_all_at(b"island", 1_500_000).unwrap();
        let first = c.send_file(&f, .., &[], &[]).unwrap_err();
        assert_eq!(first.error.kind(), ErrorKind::WouldBlock);
        // The peer reads nothing: the send buffer is full, and the window is closed.
        assert!((1 << 18..3 * MIB as u64).contains(&first.sent), "{first}");
        let reader = read_all(s);
        let sent = first.sent + send_patiently(&a, &c, &f, first.sent);
        drop(c);
        let mut expected = vec![0; 3 * MIB];
        expected[1_500_000..1_500_006].copy_from_slice(b"island");
        assert_eq!(sent, expected.len() as u64);
        assert!(reader.join().unwrap() == expected);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn bytes_written_after_a_piece_that_is_not_read_yet_follow_it() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        c.set_nonblocking(true).unwrap();
        let reader = read_all(s);
        let mut expected = Vec::new();
        for i in 0..50 {
            let f = file_of(&[]);
            f.set_len(10_000 + i).unwrap();
            let headers = [IoSlice::new(b"head")];
            let sent = c.send_file(&f, .., &headers, &[IoSlice::new(b"tail")]).unwrap();
            assert_eq!(sent, 10_008 + i);
            (&c).write_all(b"between").unwrap();
            expected.extend_from_slice(b"head");
            expected.resize(expected.len() + 10_000 + i as usize, 0);
            expected.extend_from_slice(b"tailbetween");
            eventually("the buffer is empty", || c.info().unwrap().send_queue_bytes == 0);
        }
        drop(c);
        assert!(reader.join().unwrap() == expected);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn later_writes_to_the_file_do_not_change_what_was_accepted() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let f = file_of(&pattern(0, 600_000));
        // Half of it waits in the buffers, the other half for the peer's window.
        assert_eq!(send_all(&f, &c), 600_000);
        f.write_all_at(&[0; 600_000], 0).unwrap();
        f.set_len(0).unwrap();
        let reader = read_all(s);
        drop(c);
        assert!(reader.join().unwrap() == pattern(0, 600_000));
    });
}

#[test]
fn the_low_water_mark_is_restored_however_the_call_ends() {
    within(|| {
        let (a, b) = stacks();
        let (c, mut s) = connection(&a, &b, 80);
        change(&c, |o| o.send_buffer = Some(MIB));
        let f = file_of(&pattern(0, 8 * MIB));
        c.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let SendFileError { error, sent, .. } = c.send_file(&f, .., &[], &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(sent > 0, "what fits the buffer goes");
        // Less than half of the buffer becomes free: enough for a write.
        let set = a.poll_set().unwrap();
        set.add(&c, 0, Ready::WRITABLE).unwrap();
        let (mut events, mut got) = (Vec::new(), Vec::new());
        let is_free = |c: &TcpStream| {
            let info = c.info().unwrap();
            info.send_buffer_bytes - info.send_queue_bytes
        };
        eventually("some of the buffer is free", || {
            if is_free(&c) >= 4096 {
                return true;
            }
            let mut more = [0; 32 << 10];
            let n = s.read(&mut more).unwrap();
            got.extend_from_slice(&more[..n]);
            false
        });
        if is_free(&c) < MIB / 2 {
            assert_eq!(set.wait(&mut events, Some(PATIENCE)).unwrap(), 1);
        }
        // The next writer is let in.
        c.set_write_timeout(None).unwrap();
        let rest = read_all(s);
        (&c).write_all(b"end").unwrap();
        drop(c);
        got.extend(rest.join().unwrap());
        assert!(got == [&pattern(0, sent as usize)[..], b"end"].concat());
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_turn_waits_until_half_of_the_buffer_is_free() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        change(&c, |o| o.send_buffer = Some(256 << 10));
        let reader = read_all(s);
        let f = file_of(&pattern(0, 32 * MIB));
        assert_eq!(send_all(&f, &c), 32 * MIB as u64);
        let pieces = count(&a, Counter::SendFilePieces);
        assert!(pieces <= 2 + (32 * MIB / (128 << 10)) as u64, "{pieces} pieces");
        drop(c);
        assert!(reader.join().unwrap() == pattern(0, 32 * MIB));
    });
}

#[test]
fn two_threads_send_files_one_after_the_other() {
    let (counts, got) = received(|c| {
        let threads: Vec<_> = (0..4usize)
            .map(|i| {
                let c = c.try_clone().unwrap();
                thread::spawn(move || {
                    let f = file_of(&pattern(i * MIB, 2 * MIB + i));
                    let head = [i as u8];
                    c.send_file(&f, .., &[IoSlice::new(&head)], &[IoSlice::new(b"end")]).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum::<u64>()
    });
    assert_eq!(counts, got.len() as u64);
    let mut rest = &got[..];
    for _ in 0..4 {
        let (head, tail) = rest.split_first().unwrap();
        let i = usize::from(*head);
        let expected = [&pattern(i * MIB, 2 * MIB + i)[..], b"end"].concat();
        assert!(tail.starts_with(&expected), "the file of thread {i} is not in one piece");
        rest = &tail[expected.len()..];
    }
    assert!(rest.is_empty());
}

#[test]
fn a_reset_by_the_peer_ends_the_call_with_its_count() {
    for nonblocking in [false, true] {
        within(move || {
            let (a, b) = stacks();
            let (c, mut s) = connection(&a, &b, 80);
            let f = file_of(&pattern(0, 64 * MIB));
            let writer = thread::spawn(move || {
                c.set_nonblocking(nonblocking).unwrap();
                let mut sent = 0;
                loop {
                    let e = c.send_file(&f, sent.., &[], &[]).unwrap_err();
                    sent += e.sent;
                    if e.error.kind() != ErrorKind::WouldBlock {
                        return (c, e.error, sent);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let mut first = vec![0; MIB];
            s.read_exact(&mut first).unwrap();
            s.set_linger(Some(Duration::ZERO)).unwrap();
            drop(s);
            let (c, error, sent) = writer.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            assert!((MIB as u64..64 * MIB as u64).contains(&sent), "{sent}");
            // The cause is reported once.
            let f = file_of(b"more");
            let e = c.send_file(&f, .., &[], &[]).unwrap_err();
            assert_eq!((e.error.kind(), e.sent), (ErrorKind::BrokenPipe, 0));
            drop(c);
            buffers_come_home(&[&a, &b]);
        });
    }
}

#[test]
fn a_dry_pool_slows_files_down_and_loses_nothing() {
    within(|| {
        let (a, b) = stacks_with(|s| s.budget_bytes(4 << 20));
        let pairs: Vec<_> = (0..8).map(|i| connection(&a, &b, 80 + i)).collect();
        let threads: Vec<_> = pairs
            .into_iter()
            .map(|(c, s)| {
                let reader = read_all(s);
                thread::spawn(move || {
                    let f = file_of(&pattern(0, 3 * MIB));
                    let head = pattern(1, 100_000);
                    let sent = c.send_file(&f, .., &[IoSlice::new(&head)], &[]).unwrap();
                    drop(c);
                    assert_eq!(sent, 3 * MIB as u64 + 100_000);
                    assert!(reader.join().unwrap() == [head, pattern(0, 3 * MIB)].concat());
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_closed_connection_takes_no_file() {
    let ((), got) = received(|c| {
        c.shutdown(std::net::Shutdown::Write).unwrap();
        let e = c.send_file(&file_of(b"late"), .., &[IoSlice::new(b"x")], &[]).unwrap_err();
        assert_eq!((e.error.kind(), e.sent), (ErrorKind::BrokenPipe, 0));
    });
    assert!(got.is_empty());
}

#[test]
fn one_output_per_piece_emits_frames_of_64_kib() {
    within(|| {
        let (a, b) = stacks();
        let (c, s) = connection(&a, &b, 80);
        let reader = read_all(s);
        let f = file_of(&pattern(0, 64 * MIB));
        // The window opens first.
        send_all(&f, &c);
        let before = [Counter::SendOutputs, Counter::SendFilePieces].map(|k| count(&a, k));
        send_all(&f, &c);
        let after = [Counter::SendOutputs, Counter::SendFilePieces].map(|k| count(&a, k));
        assert_eq!(after[0] - before[0], after[1] - before[1], "outputs and pieces");
        drop(c);
        assert!(reader.join().unwrap().len() == 128 * MIB);
    });
}
