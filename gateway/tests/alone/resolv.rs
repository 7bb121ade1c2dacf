//! resolv.conf is read as glibc reads it: generated files, each read by both. Runs in a mount namespace of its own,
//! with an /etc of its own, so it has no harness: a user namespace needs a process of one thread.

use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use fulmar_gateway::resolv::ResolvConf;
use nix::mount::{MsFlags, mount};

/// Prints what glibc has read: a line for each server with its zone, then one for each domain. On a host whose name
/// has no domain, so that none stands in for a missing search list.
const READER: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <resolv.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

int main(void) {
    char text[INET_ADDRSTRLEN];
    alarm(60);
    if (unshare(CLONE_NEWUTS) != 0 || sethostname("host", 4) != 0) return 77;
    if (res_init() != 0) return 1;
    for (int i = 0; i < _res.nscount; i++) {
        struct sockaddr_in6 *v6 = _res._u._ext.nsaddrs[i];
        if (v6 != NULL && v6->sin6_family == AF_INET6) {
            printf("server ");
            for (int n = 0; n < 16; n++) printf("%02x", v6->sin6_addr.s6_addr[n]);
            printf("%%%u:%d\n", v6->sin6_scope_id, ntohs(v6->sin6_port));
        } else {
            inet_ntop(AF_INET, &_res.nsaddr_list[i].sin_addr, text, sizeof text);
            printf("server %s:%d\n", text, ntohs(_res.nsaddr_list[i].sin_port));
        }
    }
    printf("attempts %d\n", _res.retry < 1 ? 1 : _res.retry);
    printf("rotates %d\n", (_res.options & RES_ROTATE) != 0);
    for (int i = 0; _res.dnsrch[i] != NULL && i < MAXDNSRCH; i++) printf("search %s\n", _res.dnsrch[i]);
    return 0;
}
"#;

/// Files that are generated.
const FILES: u64 = 600;

pub fn main() {
    match prepare() {
        Ok(reader) => {
            generated_files_are_read_as_glibc_reads_them(&reader);
            what_is_no_file_is_an_empty_one_as_for_glibc(&reader);
            println!("test result: ok. 2 passed; 0 failed");
        }
        Err(why) => {
            assert!(
                std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
                "must not be skipped: {why}"
            );
            let _ = writeln!(io::stderr(), "SKIPPED resolv: {why}");
        }
    }
}

/// Compiles the reader, and gives this process an empty /etc.
fn prepare() -> io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("fulmar-glibc-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let (source, reader) = (folder.join("reader.c"), folder.join("reader"));
    fs::write(&source, READER)?;
    let compiled =
        Command::new("cc").arg("-o").args([&reader, &source]).arg("-lresolv").output()?;
    let said = String::from_utf8_lossy(&compiled.stderr).into_owned();
    if !compiled.status.success() {
        return Err(io::Error::other(format!("no C library of glibc's: {said}")));
    }
    fulmar_gateway::netns::enter_with_mounts(fulmar_gateway::netns::User::Root)?;
    mount(Some("test"), "/etc", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
    // The folder is gone when the process ends, the mount with its namespace.
    let kept = Path::new("/etc/reader").to_owned();
    fs::copy(&reader, &kept)?;
    fs::remove_dir_all(&folder)?;
    let trial = Command::new(&kept).output()?.status;
    if trial.success() { Ok(kept) } else { Err(io::Error::other(format!("it fails: {trial}"))) }
}

/// glibc's reading of /etc/resolv.conf; `None`: it fails.
fn glibc(reader: &Path) -> Option<Vec<String>> {
    let output =
        Command::new(reader).env_remove("LOCALDOMAIN").env_remove("RES_OPTIONS").output().unwrap();
    let lines = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map(|line| String::from_utf8_lossy(line).into_owned());
    output.status.success().then(|| lines.collect())
}

fn own() -> Vec<String> {
    let ResolvConf { nameservers, search, attempts, rotates } =
        ResolvConf::read(Path::new("/etc/resolv.conf"));
    let server = |server: &SocketAddr| match server {
        SocketAddr::V6(v6) => {
            format!("server {:032x}%{}:{}", v6.ip().to_bits(), v6.scope_id(), v6.port())
        }
        SocketAddr::V4(v4) => format!("server {v4}"),
    };
    let servers: Vec<String> = nameservers.iter().map(server).collect();
    // glibc shows six of its domains.
    let search = search.iter().take(6).map(|domain| format!("search {domain}"));
    let options = [format!("attempts {attempts}"), format!("rotates {}", u8::from(rotates))];
    servers.into_iter().chain(options).chain(search).collect()
}

const KEYWORDS: [&str; 14] = [
    "options",
    "options",
    "nameserver",
    "nameserver",
    "nameserver",
    "nameserver",
    "nameserver",
    "search",
    "search",
    "domain",
    "options",
    "sortlist",
    "frobnicate",
    "Nameserver",
];
const BLANKS: [&str; 6] = [" ", " ", "\t", " \t  ", "", "\u{a0}"];
const STARTS: [&str; 9] = ["", "", "", "", "", " ", "\t", "#", ";"];
const VALUES: [&str; 70] = [
    "192.0.2.1",
    "192.0.2.2",
    "192.0.2.3",
    "10.0.0.1",
    "127.1",
    "10.258",
    "1.2.772",
    "0177.0.0.1",
    "0x7f.1",
    "0xc0000235",
    "3221226037",
    "4294967295",
    "4294967296",
    "08.1",
    "0x",
    "0x.1",
    "00",
    "0",
    "256.1",
    "1.2.3.256",
    "1.2.65535",
    "1.2.65536",
    "1.16777215",
    "1.16777216",
    "1.2.3.4.5",
    "1.",
    ".1",
    "1..2",
    "1.2.3.4x",
    "+1",
    "-1",
    "::1",
    "fd00::53",
    "fe80::1",
    "fe80::1%lo",
    "fe80::1%1",
    "fe80::1%no-such-if",
    "fe80::1%",
    "fe80::1%%lo",
    "fd00::1%lo",
    "fd00::1%7",
    "ff02::fb%lo",
    "ff12::1%lo",
    "::ffff:192.0.2.9",
    "::192.0.2.9",
    "::ffff:192.0.02.9",
    "1:2:3:4:5:6:7:8",
    "1:2:3:4:5:6:7::",
    "1::2::3",
    "12345::",
    "[::1]",
    "fe80::1%4294967296",
    "a.example",
    "b.example",
    "xn--bcher-kva.example",
    "*",
    "ndots:x",
    "timeout:-1",
    "attempts:3",
    "attempts:9",
    "attempts:0",
    "attempts:-1",
    "attempts:4x rotate",
    "attempts: 3",
    "attempts:1 attempts:",
    "attempts:+3",
    "ndots:2\trotate",
    "rotated",
    "xrotate",
    "rotate attempts:1",
];
/// No other white space: after it a server of IPv4 counted for glibc once, and does not any more.
const ENDS: [&str; 11] =
    ["", "", "", "", " ", "\t", " 192.0.2.9", " # x", ";x", "\0", " c.example\td.example"];
const LINE_ENDS: [&str; 5] = ["\n", "\n", "\n", "\n", "\n\n"];

/// A generator of numbers (Knuth's MMIX constants): the same files each time.
struct Dice(u64);

impl Dice {
    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        of[(self.0 >> 33) as usize % of.len()]
    }
}

fn file(number: u64) -> Vec<u8> {
    let mut dice = Dice(number);
    let mut text = String::new();
    let lines = 1 + number % 9;
    for line in 0..lines {
        let keyword = dice.pick(&KEYWORDS);
        text += dice.pick(&STARTS);
        text += keyword;
        text += dice.pick(&BLANKS);
        text += dice.pick(&VALUES);
        // glibc itself loops forever over a sort list with an invalid character.
        text += if keyword == "sortlist" { "" } else { dice.pick(&ENDS) };
        if line + 1 < lines || number.is_multiple_of(2) {
            text += dice.pick(&LINE_ENDS);
        }
    }
    let mut bytes = text.into_bytes();
    // Some with a byte that is not UTF-8, in a comment or anywhere.
    if number.is_multiple_of(7) {
        bytes.splice(0..0, *b"# \xff\xfe\n");
    }
    bytes
}

fn assert_same(reader: &Path, text: &[u8]) {
    fs::write("/etc/resolv.conf", text).unwrap();
    let glibc = glibc(reader).expect("glibc reads it");
    assert_eq!(own(), glibc, "{:?}", String::from_utf8_lossy(text));
}

fn generated_files_are_read_as_glibc_reads_them(reader: &Path) {
    (0..FILES).for_each(|number| assert_same(reader, &file(number)));
    let long =
        [b"search ".as_slice(), &b"a".repeat(100_000), b"\nsearch a.example\nnameserver 192.0.2.1"]
            .concat();
    let comments = [&b"# a comment\n".repeat(900_000), b"nameserver 192.0.2.1".as_slice()].concat();
    let many: String = (0..64).map(|n| format!("nameserver 192.0.2.{n}\n")).collect();
    for text in [b"".as_slice(), b"\n", b"nameserver", &long, &comments, many.as_bytes()] {
        assert_same(reader, text);
    }
}

fn what_is_no_file_is_an_empty_one_as_for_glibc(reader: &Path) {
    let path = "/etc/resolv.conf";
    fs::remove_file(path).unwrap();
    assert_eq!(Some(own()), glibc(reader), "missing");
    std::os::unix::fs::symlink("/etc/nothing", path).unwrap();
    assert_eq!(Some(own()), glibc(reader), "a symbolic link to nothing");
    fs::write("/etc/there", "nameserver 192.0.2.1\n").unwrap();
    fs::remove_file(path).unwrap();
    std::os::unix::fs::symlink("there", path).unwrap();
    assert_eq!(Some(own()), glibc(reader), "a symbolic link to a file");
    fs::remove_file(path).unwrap();
    fs::create_dir(path).unwrap();
    // glibc fails here; a gateway goes on.
    assert_eq!(own()[0], "server 127.0.0.1:53", "a directory");
}
