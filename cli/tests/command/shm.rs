//! Two processes of the command, joined by shared memory: no kernel network, no rights.

use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;

const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of the large transfer: FULMAR_SHM_BYTES, or what a slow machine moves in a second.
fn transfer_bytes() -> u64 {
    let asked = std::env::var("FULMAR_SHM_BYTES").ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(64 << 20)
}

/// A process that is ended with the test, however the test ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn start(device: &str, arguments: &str) -> Process {
        let mut command = Command::new(FULMAR);
        command.args(arguments.split_whitespace()).args(["--device", device]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process(command.spawn().expect("it starts"))
    }

    /// Waits until it has written a line to standard error that contains `words`, and takes it.
    fn says(&mut self, words: &str) {
        let stderr = self.0.stderr.as_mut().expect("a pipe");
        let (mut said, mut byte) = (Vec::new(), [0]);
        while !(said.ends_with(b"\n") && String::from_utf8_lossy(&said).contains(words)) {
            assert_eq!(stderr.read(&mut byte).expect("readable"), 1, "it ended without a word");
            said.push(byte[0]);
        }
    }

    /// Waits for its end; whether it ended well, and the rest of standard error.
    fn end(mut self) -> (bool, String) {
        let start = Instant::now();
        while self.0.try_wait().expect("a child").is_none() {
            assert!(start.elapsed() < PATIENCE, "it hangs");
            thread::sleep(Duration::from_millis(5));
        }
        let status = self.0.wait().expect("a child");
        let mut text = String::new();
        let mut stderr = self.0.stderr.take().expect("a pipe");
        stderr.read_to_string(&mut text).expect("text");
        (status.success(), text)
    }
}

/// A device that no other test has.
fn device(test: &str) -> String {
    format!("shm:fulmar-test-{test}-{}", std::process::id())
}

/// Who waits for a connection, ready for one.
fn listener(device: &str, arguments: &str) -> Process {
    let mut first = Process::start(device, arguments);
    first.says("waiting for another fulmar");
    first
}

/// Bytes that do not repeat within any buffer.
fn fill(chunk: &mut [u8], seed: &mut u64) {
    for word in chunk.chunks_mut(8) {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        word.copy_from_slice(&seed.to_le_bytes()[..word.len()]);
    }
}

#[test]
fn every_byte_of_a_large_transfer_between_two_processes_arrives() {
    let device = device("large");
    let mut receiver = listener(&device, "nc -l 8000");
    let mut sender = Process::start(&device, "nc 10.77.0.1 8000");
    drop(receiver.0.stdin.take());
    let mut input = sender.0.stdin.take().expect("a pipe");
    let writer = thread::spawn(move || {
        let (mut sum, mut seed, mut left) = (Sha256::new(), 1, transfer_bytes());
        let mut chunk = vec![0; 1 << 20];
        while left > 0 {
            let n = left.min(chunk.len() as u64) as usize;
            fill(&mut chunk[..n], &mut seed);
            sum.update(&chunk[..n]);
            input.write_all(&chunk[..n]).expect("the sender reads");
            left -= n as u64;
        }
        sum.finalize()
    });
    let mut output = receiver.0.stdout.take().expect("a pipe");
    let mut sum = Sha256::new();
    let bytes = io::copy(&mut output, &mut sum).expect("the receiver writes");
    assert_eq!(bytes, transfer_bytes());
    assert_eq!(sum.finalize(), writer.join().expect("the writer ends"));
    assert_eq!((sender.end(), receiver.end()), ((true, String::new()), (true, String::new())));
}

#[test]
fn a_file_arrives_with_its_checksum_over_a_path_and_ipv6() {
    let path = std::env::temp_dir().join(format!("fulmar-test-{}.shm", std::process::id()));
    let device = format!("shm:{}", path.display());
    let mut receiver = listener(&device, "recv - -6 -l 5001");
    let mut sender = Process::start(&device, "send - [fd77::1]:5001");
    let mut bytes = vec![0; 3_000_001];
    fill(&mut bytes, &mut 7);
    let (sent, mut input) = (bytes.clone(), sender.0.stdin.take().expect("a pipe"));
    let writer = thread::spawn(move || input.write_all(&sent));
    let mut got = Vec::new();
    receiver.0.stdout.take().expect("a pipe").read_to_end(&mut got).expect("readable");
    writer.join().expect("the writer ends").expect("the sender reads");
    assert!(got == bytes, "{} bytes of {}", got.len(), bytes.len());
    let (sender, receiver) = (sender.end(), receiver.end());
    assert!(sender.0 && receiver.0, "{} {}", sender.1, receiver.1);
    assert!(!path.exists(), "the path stays behind");
}

#[test]
fn echoes_come_back_while_the_other_end_waits_for_a_connection() {
    let device = device("echo");
    let _other = listener(&device, "nc -l 8000");
    let ping = Process::start(&device, "ping -c 3 -i 0.01 -W 60 10.77.0.1");
    assert_eq!(ping.end(), (true, String::new()));
}

/// Kills one end in the middle of a transfer; the other must say so and end.
fn kill_one(test: &str, kill_receiver: bool) {
    let device = device(test);
    let mut receiver = listener(&device, "nc -l 8000");
    let mut sender = Process::start(&device, "nc 10.77.0.1 8000");
    let mut input = sender.0.stdin.take().expect("a pipe");
    let writer = thread::spawn(move || while input.write_all(&[7; 65_536]).is_ok() {});
    let mut output = receiver.0.stdout.take().expect("a pipe");
    let mut seen = vec![0; 8 << 20];
    output.read_exact(&mut seen).expect("the transfer runs");
    let reader = thread::spawn(move || io::copy(&mut output, &mut io::sink()));
    let (mut dead, other) = if kill_receiver { (receiver, sender) } else { (sender, receiver) };
    dead.0.kill().expect("it runs");
    let (well, text) = other.end();
    assert!(!well && text.contains("the other process has ended"), "{text}");
    drop(dead);
    writer.join().expect("the writer ends");
    reader.join().expect("the reader ends").expect("readable");
}

#[test]
fn a_receiver_that_is_killed_ends_the_sender_with_a_sentence() {
    kill_one("kill-receiver", true);
}

#[test]
fn a_sender_that_is_killed_ends_the_receiver_with_a_sentence() {
    kill_one("kill-sender", false);
}

/// Sends a file whose size `changes` while the receiver is slow. Both must fail and say why.
fn resize(test: &str, changes: impl FnOnce(&File)) -> String {
    let path = std::env::temp_dir().join(format!("fulmar-test-{test}-{}", std::process::id()));
    let file = File::create(&path).expect("a temporary file");
    file.set_len(256 << 20).expect("holes");
    let device = device(test);
    let mut receiver = listener(&device, "recv - -l 8000");
    let sender = Process::start(&device, &format!("send {} 10.77.0.1:8000", path.display()));
    let mut output = receiver.0.stdout.take().expect("a pipe");
    output.read_exact(&mut vec![0; 1 << 20]).expect("the transfer runs");
    changes(&file);
    let reader = thread::spawn(move || io::copy(&mut output, &mut io::sink()));
    let (sent, said) = sender.end();
    let (received, heard) = receiver.end();
    reader.join().expect("the reader ends").expect("readable");
    std::fs::remove_file(&path).expect("it is there");
    assert!(!sent && said.contains("the connection was reset"), "{said}");
    assert!(!received && heard.contains("is incomplete"), "{heard}");
    said
}

#[test]
fn a_file_that_shrinks_while_it_is_sent_fails_on_both_sides() {
    let said = resize("shrinks", |file| file.set_len(8 << 20).expect("shorter"));
    assert!(said.contains("changed from 268435456 to 8388608 bytes"), "{said}");
}

#[test]
fn a_file_that_grows_while_it_is_sent_fails_on_both_sides() {
    let said = resize("grows", |file| file.set_len((256 << 20) + 1).expect("longer"));
    assert!(said.contains("to 268435457 bytes"), "{said}");
}

#[test]
fn a_file_that_cannot_be_read_fails_on_both_sides() {
    let device = device("unreadable");
    let receiver = listener(&device, "recv - -l 8000");
    // No page is mapped at its beginning.
    let sender = Process::start(&device, "send /proc/self/mem 10.77.0.1:8000");
    let ((sent, said), (received, heard)) = (sender.end(), receiver.end());
    assert!(!sent && said.contains("the connection was reset"), "{said}");
    assert!(!received && heard.contains("is incomplete"), "{heard}");
}

#[test]
fn a_sender_that_is_interrupted_fails_on_both_sides() {
    let device = device("interrupted");
    let mut receiver = listener(&device, "recv - -l 8000");
    let mut sender = Process::start(&device, "send - 10.77.0.1:8000");
    let mut input = sender.0.stdin.take().expect("a pipe");
    input.write_all(&[7; 1 << 16]).expect("the sender reads");
    let mut output = receiver.0.stdout.take().expect("a pipe");
    output.read_exact(&mut [0; 1]).expect("the transfer runs");
    // A full pipe would keep the receiver in its write.
    let rest = thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    let id = sender.0.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let (received, heard) = receiver.end();
    assert!(!received && heard.contains("is incomplete"), "{heard}");
    assert!(!sender.end().0);
    rest.join().expect("no panic").expect("readable");
}
