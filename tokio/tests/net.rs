//! The sockets over two stacks that are joined in the process, in each flavour of the runtime.

// A fork.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, Instant};

use fulmar::{Stack, devices};
use fulmar_tokio::{Net, TcpListener, TcpStream, UdpSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// Two stacks.
fn stacks() -> [Stack; 2] {
    let (a, b) = devices::link_pair().unwrap();
    [(a, "10.0.0.1/24"), (b, "10.0.0.2/24")].map(|(device, address)| {
        Stack::builder().device(device).address(address.parse().unwrap()).build().unwrap()
    })
}

fn runtimes() -> [Runtime; 2] {
    let two = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    [Builder::new_current_thread().enable_all().build().unwrap(), two.unwrap()]
}

/// Runs a test in each flavour, in tasks.
fn in_each<F: Future<Output = ()> + Send + 'static>(test: impl Fn(Net, Net) -> F) {
    for runtime in runtimes() {
        runtime.block_on(async {
            let [a, b] = stacks().map(|stack| Net::new(stack).unwrap());
            timeout(PATIENCE, tokio::spawn(test(a, b))).await.expect("it hangs").unwrap();
        });
    }
}

async fn connection(a: &Net, b: &Net) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(a, "10.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let (client, server) = tokio::join!(TcpStream::connect(b, to), listener.accept());
    (client.unwrap(), server.unwrap().0)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

#[test]
fn bytes_pass_both_ways_at_once_and_the_ends_are_seen() {
    in_each(|a, b| async move {
        let (client, server) = connection(&a, &b).await;
        let bytes = pattern(5 << 20);
        let echo = tokio::spawn(async move {
            let (mut read, mut write) = server.into_split();
            tokio::io::copy(&mut read, &mut write).await.unwrap()
        });
        let (mut read, mut write) = client.into_split();
        let sent = bytes.clone();
        let sender = tokio::spawn(async move {
            write.write_all(&sent).await.unwrap();
            // Its drop ends the direction.
        });
        let mut got = Vec::new();
        read.read_to_end(&mut got).await.unwrap();
        sender.await.unwrap();
        assert!(got == bytes);
        assert_eq!(echo.await.unwrap(), bytes.len() as u64);
    });
}

#[test]
fn a_future_that_is_dropped_at_any_point_loses_no_byte() {
    in_each(|a, b| async move {
        let (mut client, mut server) = connection(&a, &b).await;
        let bytes = pattern(300_000);
        let sent = bytes.clone();
        let sender = tokio::spawn(async move {
            let mut at = 0;
            while at < sent.len() {
                // Dropped when it has waited, and tried again.
                let write = client.write(&sent[at..sent.len().min(at + 9000)]);
                if let Ok(n) = timeout(Duration::ZERO, write).await {
                    at += n.unwrap();
                }
                tokio::task::yield_now().await;
            }
        });
        let mut got = Vec::new();
        let mut buf = [0; 5000];
        loop {
            match timeout(Duration::ZERO, server.read(&mut buf)).await {
                Ok(Ok(0)) => break,
                Ok(n) => got.extend_from_slice(&buf[..n.unwrap()]),
                Err(_) => tokio::task::yield_now().await,
            }
        }
        sender.await.unwrap();
        assert!(got == bytes);
        let (a, b) = (a, b);
        let listener = TcpListener::bind(&a, "10.0.0.1:99").await.unwrap();
        for _ in 0..20 {
            let _ = timeout(Duration::from_micros(50), listener.accept()).await;
            let _ = timeout(Duration::from_micros(50), TcpStream::connect(&b, "10.0.0.1:99")).await;
        }
        let connected = TcpStream::connect(&b, "10.0.0.1:99").await.unwrap();
        let local = connected.local_addr().unwrap();
        // Abandoned ones may come first.
        while listener.accept().await.unwrap().1 != local {}
    });
}

#[test]
fn refusals_and_ends_are_errors_as_they_are_of_the_kernel() {
    in_each(|a, b| async move {
        let refused = TcpStream::connect(&b, "10.0.0.1:7").await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let taken = TcpListener::bind(&a, "10.0.0.1:80").await.unwrap();
        let again = TcpListener::bind(&a, "10.0.0.1:80").await.unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        drop(taken);
        let elsewhere = TcpListener::bind(&a, "10.9.9.9:80").await.unwrap_err();
        assert_eq!(elsewhere.kind(), io::ErrorKind::AddrNotAvailable);
        let second = Net::new(a.stack().clone()).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::ResourceBusy);
        let (mut client, server) = connection(&a, &b).await;
        server.get_ref().set_linger(Some(Duration::ZERO)).unwrap();
        drop(server);
        let reset = client.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(reset.kind(), io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn readiness_loans_and_peeks() {
    in_each(|a, b| async move {
        let (mut client, mut server) = connection(&a, &b).await;
        assert_eq!(server.try_read(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        client.writable().await.unwrap();
        assert_eq!(client.try_write(b"hello").unwrap(), 5);
        server.readable().await.unwrap();
        let mut word = [0; 5];
        assert_eq!(server.peek(&mut word).await.unwrap(), 5);
        assert_eq!(server.recv_owned(3).await.unwrap().to_vec(), b"hel");
        assert_eq!(server.try_read(&mut word).unwrap(), 2);
        let (mut read, mut write) = client.split();
        let both = async {
            write.write_all(b"question").await.unwrap();
            let mut answer = [0; 6];
            read.read_exact(&mut answer).await.unwrap();
            answer
        };
        let serve = async {
            let mut question = [0; 8];
            server.read_exact(&mut question).await.unwrap();
            server.write_all(b"answer").await.unwrap();
        };
        let (answer, ()) = tokio::join!(both, serve);
        assert_eq!(&answer, b"answer");
        let (read, write) = client.into_split();
        let mut client = read.reunite(write).unwrap();
        client.write_all(b"x").await.unwrap();
        server.read_exact(&mut [0; 1]).await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0);
    });
}

#[test]
fn datagrams_pass_alone_and_in_numbers() {
    in_each(|a, b| async move {
        let server = UdpSocket::bind(&a, "10.0.0.1:53").await.unwrap();
        let client = UdpSocket::bind(&b, "10.0.0.2:0").await.unwrap();
        client.connect("10.0.0.1:53").await.unwrap();
        let asked = async {
            client.send(b"question").await.unwrap();
            let mut buf = [0; 64];
            let n = client.recv(&mut buf).await.unwrap();
            assert_eq!(&buf[..n], b"answer");
        };
        let answered = async {
            let mut buf = [0; 64];
            let (n, from) = server.recv_from(&mut buf).await.unwrap();
            assert_eq!(&buf[..n], b"question");
            server.send_to(b"answer", from).await.unwrap();
        };
        tokio::join!(asked, answered);
        let many: Vec<_> = (0..10).map(|_| fulmar::udp::SendMessage::new(b"one of many")).collect();
        assert_eq!(client.send_many(&many).await.unwrap(), 10);
        let mut got = 0;
        while got < 10 {
            let mut space = [[0; 64]; 16];
            let mut messages: Vec<_> =
                space.iter_mut().map(|buf| fulmar::udp::RecvMessage::new(buf)).collect();
            got += server.recv_many(&mut messages).await.unwrap();
        }
    });
}

#[test]
fn what_was_accepted_is_delivered_after_all_handles_are_dropped() {
    for runtime in runtimes() {
        let begun = Instant::now();
        let bytes = runtime.block_on(async {
            let [a, b] = stacks().map(|stack| Net::new(stack).unwrap());
            let (mut client, mut server) = connection(&a, &b).await;
            let accepted = client.write(&pattern(1 << 20)).await.unwrap();
            drop((client, b));
            let mut got = Vec::new();
            server.read_to_end(&mut got).await.unwrap();
            assert!(got == pattern(accepted));
            accepted
        });
        assert!(bytes > 0);
        drop(runtime);
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    }
}

#[test]
fn a_stack_that_has_other_handles_outlives_its_net() {
    use std::io::{Read, Write};
    let [a, b] = stacks();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let nets = runtime.block_on(async { [&a, &b].map(|stack| Net::new(stack.clone()).unwrap()) });
    let listener = fulmar::TcpListener::bind(&a, "10.0.0.1:80").unwrap();
    let mut client = fulmar::TcpStream::connect(&b, "10.0.0.1:80").unwrap();
    let (mut server, _) = listener.accept().unwrap();
    drop(nets);
    runtime.block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
    client.write_all(b"still open").unwrap();
    server.read_exact(&mut [0; 10]).unwrap();
    runtime.block_on(async { drop(Net::new(a.clone()).expect("the driver is gone")) });
}

#[test]
fn a_peer_that_is_gone_holds_up_no_runtime() {
    let [a, b] = stacks();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let begun = Instant::now();
    runtime.block_on(async {
        let nets = [a, b].map(|stack| Net::new(stack).unwrap());
        let (mut client, server) = connection(&nets[0], &nets[1]).await;
        // More than the peer takes, which never reads.
        let sent = timeout(Duration::from_millis(100), client.write_all(&pattern(8 << 20))).await;
        assert!(sent.is_err());
        let other = nets[1].clone();
        drop((client, nets));
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop((server, other));
        let slept = Instant::now();
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(slept.elapsed() < Duration::from_secs(1), "the runtime goes on");
    });
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[test]
fn a_runtime_that_is_shut_down_leaves_the_stack_to_its_own_thread() {
    use std::io::{Read, Write};
    let [a, b] = stacks();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (client, server) = runtime.block_on(async {
        let nets = [a.clone(), b.clone()].map(|stack| Net::new(stack).unwrap());
        let (client, server) = connection(&nets[0], &nets[1]).await;
        let both = [client.get_ref(), server.get_ref()].map(|s| s.try_clone().unwrap());
        for stream in &both {
            stream.set_nonblocking(false).unwrap();
        }
        let [client, server] = both;
        (client, server)
    });
    drop(runtime);
    let (mut client, mut server) = (client, server);
    client.write_all(b"still there").unwrap();
    server.read_exact(&mut [0; 11]).unwrap();
    // Another runtime may drive it.
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let nets = [a, b].map(|stack| Net::new(stack).unwrap());
        let (mut client, mut server) = connection(&nets[0], &nets[1]).await;
        client.write_all(b"x").await.unwrap();
        server.read_exact(&mut [0; 1]).await.unwrap();
    });
}

#[test]
fn an_idle_stack_does_not_wake_the_runtime() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let [a, b] = stacks().map(|stack| Net::new(stack).unwrap());
        let mut idle = Vec::new();
        for _ in 0..50 {
            idle.push(connection(&a, &b).await);
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let sleeps =
            || a.stack().stat().unwrap().shard.counters.value(fulmar::stat::Counter::Sleeps);
        let before = sleeps();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(sleeps() - before < 10, "{} sleeps", sleeps() - before);
    });
}

#[test]
fn each_shard_has_a_driver_and_connections_cross_shards() {
    use fulmar::device::EtherAddr;
    use fulmar::stat::Counter;
    const CONNECTIONS: usize = 12;
    let config =
        |n| fulmar_nic::SimConfig { ether: EtherAddr([2, 0, 0, 0, 0, n]), ..Default::default() };
    // The queues are joined crosswise, so that every packet is handed to the shard of its flow.
    let wires = [(); 2].map(|()| fulmar_nic::pair(config(1), config(2)).unwrap());
    let [[(a0, _), (b1, _)], [(a1, _), (b0, _)]] = wires;
    let build = |n: u8, queues: [Box<dyn fulmar::device::Device>; 2]| {
        let builder = Stack::builder().devices(queues.into()).deterministic_for_simulation(1);
        builder.address(format!("10.0.0.{n}/24").parse().unwrap()).build().unwrap()
    };
    let stacks = [build(1, [Box::new(a0), Box::new(a1)]), build(2, [Box::new(b0), Box::new(b1)])];
    assert_eq!(Net::new(stacks[0].clone()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let nets = stacks
            .each_ref()
            .map(|stack| [0, 1].map(|shard| Net::new(stack.on_shard(shard).unwrap()).unwrap()));
        for net in &nets[0] {
            let listener = TcpListener::bind(net, "10.0.0.1:80").await.unwrap();
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let (mut read, mut write) = stream.into_split();
                    tokio::spawn(async move { tokio::io::copy(&mut read, &mut write).await });
                }
            });
        }
        let ask = |n: usize| {
            let net = nets[1][n % 2].clone();
            tokio::spawn(async move {
                let stream = TcpStream::connect(&net, "10.0.0.1:80").await.unwrap();
                let (mut read, mut write) = stream.into_split();
                let bytes = pattern(300_000 + n);
                let (sent, mut got) = (bytes.clone(), Vec::new());
                let sender = tokio::spawn(async move { write.write_all(&sent).await.unwrap() });
                read.read_to_end(&mut got).await.unwrap();
                sender.await.unwrap();
                assert!(got == bytes);
            })
        };
        for asked in (0..CONNECTIONS).map(ask).collect::<Vec<_>>() {
            timeout(PATIENCE, asked).await.expect("it hangs").unwrap();
        }
    });
    let wrong = |stack: &Stack| stack.stat().unwrap().count(Counter::WrongQueue);
    assert!(stacks.iter().all(|stack| wrong(stack) > 100), "all were on the wrong queue");
}

#[test]
fn a_forked_child_gets_clean_errors_and_the_runtime_of_its_parent_goes_on() {
    use std::task::{Context, Poll, Waker};
    in_each(|a, b| async move {
        let (mut client, mut server) = connection(&a, &b).await;
        let listener = TcpListener::bind(&a, "10.0.0.1:80").await.unwrap();
        for _ in 0..3 {
            // SAFETY: the child makes the calls under test on its copy of memory, and ends without cleaning up.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let mut cx = Context::from_waker(Waker::noop());
                let is_bad = |e: &io::Error| e.raw_os_error() == Some(libc::EBADF);
                let read = client.get_ref().poll_read(&mut cx, &mut [0; 1]);
                let written = client.get_ref().poll_write(&mut cx, b"x");
                let ok = matches!(read, Poll::Ready(Err(e)) if is_bad(&e))
                    && matches!(written, Poll::Ready(Err(e)) if is_bad(&e))
                    && matches!(listener.poll_accept(&mut cx), Poll::Ready(Err(e)) if is_bad(&e));
                // SAFETY: nothing of the parent's runs.
                unsafe { libc::_exit(if ok { 42 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: `status` is a local that outlives the call.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 42));
            server.write_all(b"still here").await.unwrap();
            let mut word = [0; 10];
            client.read_exact(&mut word).await.unwrap();
            assert_eq!(&word, b"still here");
        }
    });
}
