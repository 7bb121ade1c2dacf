//! The program of the README, word for word, where the README says to run it.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use crate::namespace::ip;

mod program {
    include!("readme_program.rs");

    pub fn run() -> Result<(), Box<dyn std::error::Error>> {
        main()
    }
}

#[test]
fn the_readme_has_the_program_that_is_tested_here() {
    let readme = include_str!("../../../README.md");
    assert!(readme.contains(&format!("```rust\n{}```\n", include_str!("readme_program.rs"))));
}

#[test]
fn the_program_of_the_readme_fetches_a_page_over_the_interface_of_a_sandbox() {
    crate::in_namespace!(|| {
        // As `fulmar sandbox` has it: an Ethernet interface that is no TAP.
        ip("link add fulmar0 type veth peer name kernel0");
        ip("addr add 10.77.0.1/24 dev kernel0");
        ip("link set kernel0 up");
        ip("link set fulmar0 up");
        let listener = TcpListener::bind("10.77.0.1:8000").unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; b"GET / HTTP/1.0\r\n\r\n".len()];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhello").unwrap();
            request
        });
        program::run().unwrap();
        assert!(server.join().unwrap().starts_with(b"GET / "));
    });
}
