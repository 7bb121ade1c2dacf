//! Files to the kernel's own TCP.

use std::io::{IoSlice, Read};
use std::net;
use std::thread;

use fulmar::TcpStream;
use fulmar::stat::Counter;
use fulmar::zero_copy::ZeroCopy;

use crate::support::file::{evict, file_of};
use crate::support::{buffers_come_home_but, pattern};
use crate::{KERNEL, KERNEL6, POSTED, in_namespace, stack};

const LEN: usize = (16 << 20) + 4711;

#[test]
fn files_arrive_whole_from_memory_and_from_the_disk() {
    in_namespace!(|| {
        let stack = stack();
        let bytes = pattern(0, LEN);
        let f = file_of(&bytes);
        for (i, address) in [KERNEL, KERNEL6, KERNEL, KERNEL6].into_iter().enumerate() {
            let is_cold = i >= 2;
            let listener = net::TcpListener::bind((address, 80)).unwrap();
            let c = TcpStream::connect(&stack, (address, 80)).unwrap();
            let (mut s, _) = listener.accept().unwrap();
            let reader = thread::spawn(move || {
                let mut got = Vec::new();
                s.read_to_end(&mut got).unwrap();
                got
            });
            if is_cold {
                evict(&f);
            }
            let ends = [IoSlice::new(b"<<"), IoSlice::new(b">>")];
            let sent = c.send_file(&f, .., &ends[..1], &ends[1..]).unwrap();
            drop(c);
            let got = reader.join().unwrap();
            assert_eq!(sent, LEN as u64 + 4);
            assert!(got == [b"<<", &bytes[..], b">>"].concat(), "bytes differ to {address}");
        }
        let counters = stack.stat().unwrap().shard.counters;
        let of = |c| counters.value(c);
        assert_eq!(of(Counter::SendOutputs), of(Counter::SendFilePieces), "one output per piece");
        buffers_come_home_but(POSTED, &[&stack]);
    });
}
