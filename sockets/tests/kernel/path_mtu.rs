//! A path whose packets become smaller, with the kernel as the router that says so.

use std::io::{Read, Write};
use std::thread;

use fulmar::{Stack, TcpListener, TcpStream};

use crate::namespace::ip;
use crate::support::{PATIENCE, pattern};
use crate::{KERNEL, KERNEL6, in_namespace, tap};

const LEN: usize = 2 << 20;

fn routed_stack(tap_name: &str, net: u8) -> Stack {
    let device = tap(tap_name, &format!("10.{net}.0.1"), &format!("fd{net}::1"));
    Stack::builder()
        .device(device)
        .address(format!("10.{net}.0.2/24").parse().unwrap())
        .address(format!("fd{net}::2/64").parse().unwrap())
        .gateway(format!("10.{net}.0.1").parse().unwrap())
        .gateway(format!("fd{net}::1").parse().unwrap())
        .exit_drain(PATIENCE)
        .unlisted()
        .build()
        .unwrap()
}

#[test]
fn a_connection_goes_on_when_its_path_becomes_narrower() {
    in_namespace!(|| {
        assert_eq!((KERNEL, KERNEL6), ("10.77.0.1", "fd77::1"));
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        let near = routed_stack("fulmar0", 77);
        let far = routed_stack("fulmar1", 78);
        for to in ["10.78.0.2:80", "[fd78::2]:80"] {
            ip("link set fulmar1 mtu 1500");
            let listener = TcpListener::bind(&far, to).unwrap();
            let mut c = TcpStream::connect(&near, to).unwrap();
            let (mut s, _) = listener.accept().unwrap();
            let reader = thread::spawn(move || {
                let mut got = Vec::new();
                s.read_to_end(&mut got).unwrap();
                got
            });
            c.write_all(&pattern(0, LEN)).unwrap();
            let wide = c.info().unwrap().mss_bytes;
            ip("link set fulmar1 mtu 1300");
            c.write_all(&pattern(LEN, LEN)).unwrap();
            let info = c.try_clone().unwrap();
            c.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(reader.join().unwrap() == pattern(0, 2 * LEN), "the bytes differ");
            let narrow = info.info().unwrap().mss_bytes;
            assert!(wide > 1300 && narrow < 1300, "{wide} became {narrow}");
        }
    });
}
