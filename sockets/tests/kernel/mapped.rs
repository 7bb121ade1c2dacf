//! Pages of files by reference to the kernel's own TCP.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::Duration;

use fulmar::base::{Counter, DropReason};
use fulmar::{MappedFile, SendFile, Stack, TcpStream, devices};

use crate::support::file::{evict, file_of};
use crate::support::{buffers_come_home_but, eventually, pattern};
use crate::{KERNEL, KERNEL6, POSTED, in_namespace, stack, stack_on, tap};

const LEN: usize = (3 << 20) + 4711;

fn count(stack: &Stack, c: Counter) -> u64 {
    stack.stat().unwrap().shard.counters.value(c)
}

fn connect(stack: &Stack, address: &str) -> (TcpStream, net::TcpStream) {
    let listener = net::TcpListener::bind((address, 80)).unwrap();
    let c = TcpStream::connect(stack, (address, 80)).unwrap();
    (c, listener.accept().unwrap().0)
}

/// Sends through a new connection; what was accepted, and what the peer got.
fn send(
    stack: &Stack,
    address: &str,
    how: &SendFile,
    file: &MappedFile,
    from: u64,
) -> (u64, Vec<u8>) {
    let (c, mut s) = connect(stack, address);
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        s.read_to_end(&mut got).unwrap();
        got
    });
    let ends = [IoSlice::new(b"<<"), IoSlice::new(b">>")];
    let sent = c.send_mapped(how, file, from.., &ends[..1], &ends[1..]).unwrap();
    drop(c);
    (sent, reader.join().unwrap())
}

/// Whether the file lies in the address space of this process.
fn is_in_address_space(f: &File) -> bool {
    let inode = format!(" {} ", f.metadata().unwrap().ino());
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|l| l.contains(&inode))
}

#[test]
fn pages_go_by_reference_and_arrive_whole_also_when_the_file_has_grown() {
    in_namespace!(|| {
        let stack = stack();
        let bytes = pattern(0, 4 * LEN);
        let f = file_of(&bytes[..LEN]);
        let mapped = MappedFile::new(&f).unwrap();
        let mut by_reference = 0;
        for (turn, address) in [KERNEL, KERNEL6, KERNEL, KERNEL6].into_iter().enumerate() {
            let len = (turn + 1) * LEN;
            f.write_all_at(&bytes[..len], 0).unwrap();
            if turn == 3 {
                evict(&f);
            }
            let from = 777 * turn;
            let (sent, got) = send(&stack, address, &SendFile::new(), &mapped, from as u64);
            assert_eq!(sent, (len - from) as u64 + 4);
            assert!(got == [b"<<", &bytes[from..len], b">>"].concat(), "bytes differ to {address}");
            by_reference += (len - from) as u64;
        }
        let of = count(&stack, Counter::SendFileMappedBytes);
        assert!(of > by_reference - 4 * (16 << 10) && of <= by_reference, "{of} of {by_reference}");
        assert_eq!(
            count(&stack, Counter::SendOutputs),
            count(&stack, Counter::SendFilePieces),
            "one output per piece"
        );
        buffers_come_home_but(POSTED, &[&stack]);
        assert!(is_in_address_space(&f));
        drop(mapped);
        eventually("the mapping goes", || !is_in_address_space(&f));
    });
}

#[test]
fn a_stable_send_and_a_wrapped_device_read() {
    in_namespace!(|| {
        let bytes = pattern(0, LEN);
        let mapped = MappedFile::new(&file_of(&bytes)).unwrap();
        let plain = stack();
        let (sent, got) = send(&plain, KERNEL, &SendFile::new().stable(true), &mapped, 0);
        assert_eq!((sent, got.len()), (LEN as u64 + 4, LEN + 4));
        assert_eq!(count(&plain, Counter::SendFileMappedBytes), 0);
        drop(plain);
        let device = tap("fulmar0", KERNEL, KERNEL6);
        let captured = stack_on(devices::capture(device, std::io::sink()));
        let (_, got) = send(&captured, KERNEL, &SendFile::new(), &mapped, 0);
        assert!(got == [b"<<", &bytes[..], b">>"].concat());
        assert_eq!(count(&captured, Counter::SendFileMappedBytes), 0);
    });
}

#[test]
fn a_file_that_is_cut_under_unsent_bytes_resets_its_connection_and_no_other() {
    in_namespace!(|| {
        let stack = stack();
        let bytes = pattern(0, 24 << 20);
        let (f, other) = (file_of(&bytes), file_of(&bytes));
        let mapped = MappedFile::new(&f).unwrap();
        let kept = MappedFile::new(&other).unwrap();
        let (c, mut s) = connect(&stack, KERNEL);
        let (c2, mut s2) = connect(&stack, KERNEL6);
        // Nobody reads, so what is accepted last is not sent.
        let accept = |c: &TcpStream, file| {
            c.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut sent = 0;
            eventually("the peer's window is closed and the buffer full", || {
                let e = c.send_mapped(&SendFile::new(), file, sent.., &[], &[]).unwrap_err();
                assert_eq!(e.error.kind(), ErrorKind::WouldBlock);
                sent += e.sent;
                let info = c.info().unwrap();
                e.sent == 0 && info.in_flight_bytes == 0 && info.unsent_bytes > 0
            });
            sent as usize
        };
        let (sent, sent2) = (accept(&c, &mapped), accept(&c2, &kept));
        f.set_len(0).unwrap();
        let mut got = Vec::new();
        let e = s.read_to_end(&mut got).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ConnectionReset);
        assert!(got.len() < sent && got == bytes[..got.len()], "{} of {sent}", got.len());
        let e = c.send_mapped(&SendFile::new(), &kept, .., &[], &[]).unwrap_err();
        assert_eq!((e.error.raw_os_error(), e.sent), (Some(libc::EIO), 0));
        assert_eq!((&c).write(b"x").unwrap_err().raw_os_error(), Some(libc::EIO));
        let drops = stack.stat().unwrap().shard.counters.drops(DropReason::PageVanished);
        assert!(drops > 0);
        drop(c2);
        let mut got = Vec::new();
        s2.read_to_end(&mut got).unwrap();
        assert!(got.len() == sent2 && got == bytes[..sent2], "{} of {sent2}", got.len());
        drop(c);
        buffers_come_home_but(POSTED, &[&stack]);
        drop(mapped);
        eventually("the mapping goes", || !is_in_address_space(&f));
    });
}

#[test]
fn a_call_that_waits_while_its_file_is_cut_ends_and_the_user_is_told_once_at_the_least() {
    in_namespace!(|| {
        let stack = stack();
        let bytes = pattern(0, 48 << 20);
        let f = file_of(&bytes);
        let mapped = MappedFile::new(&f).unwrap();
        let (c, mut s) = connect(&stack, KERNEL);
        let (got, result) = thread::scope(|scope| {
            let call = scope.spawn(|| c.send_mapped(&SendFile::new(), &mapped, .., &[], &[]));
            let mut got = vec![0; 4 << 20];
            s.read_exact(&mut got).unwrap();
            f.set_len(0).unwrap();
            let e = s.read_to_end(&mut got).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::ConnectionReset);
            (got, call.join().unwrap())
        });
        assert!(got == bytes[..got.len()]);
        let sent = match result {
            Ok(sent) => sent,
            Err(e) => {
                assert_eq!(e.error.raw_os_error(), Some(libc::EIO));
                e.sent
            }
        };
        assert!(got.len() as u64 <= sent && sent < bytes.len() as u64);
        assert_eq!((&c).write(b"x").unwrap_err().raw_os_error(), Some(libc::EIO));
        drop(c);
        buffers_come_home_but(POSTED, &[&stack]);
    });
}
