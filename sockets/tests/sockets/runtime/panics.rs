//! A panic at any stage of a shard's paths: the host is closed, every call says so, and no thread sleeps on.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::internals::drivers::link::{Link, LinkConfig, pair};
use fulmar::internals::runtime::{Host, Ledger, Limit, Request, WatchedShard, now, start_service};
use fulmar_stack::base::{Observer, Secrets, Stage};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::{Attempt, Ready, SocketError};

/// Panics the n-th time that a path passes a stage.
#[derive(Clone, Default)]
struct Trap(Arc<[AtomicU32; 2]>);

const NOWHERE: u32 = u32::MAX;

impl Trap {
    fn set(&self, stage: Stage, n: u32) {
        self.0[1].store(n, Ordering::SeqCst);
        self.0[0].store(stage as u32, Ordering::SeqCst);
    }

    fn has_sprung(&self) -> bool {
        self.0[0].load(Ordering::SeqCst) == NOWHERE
    }
}

impl Observer for Trap {
    fn pass(&self, stage: Stage) {
        if self.0[0].load(Ordering::SeqCst) == stage as u32
            && self.0[1].fetch_sub(1, Ordering::SeqCst) == 1
        {
            self.0[0].store(NOWHERE, Ordering::SeqCst);
            std::panic::resume_unwind(Box::new("a trap"));
        }
    }
}

/// A host whose stages all go to `trap`: every visit is measured.
fn host(side: u8, device: Link, trap: &Trap) -> Arc<Host> {
    let config = StackConfig {
        addresses: vec![IfAddr { addr: [10, 0, 0, side].into(), prefix_len: 24 }],
        secrets: Some(Secrets::for_simulation(side.into())),
        ..StackConfig::default()
    };
    let shard = Shard::new(config, Box::new(device), now()).unwrap();
    let host = Arc::new(Host::new(WatchedShard::new(shard), Ledger::new(1)).unwrap());
    host.lock().unwrap().stages().set_observer(Arc::new(trap.clone()));
    start_service(&host, "trapped").unwrap();
    host
}

fn at(side: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, side], port))
}

const PATIENCE: Limit = Limit::For(fulmar_stack::base::Duration::from_secs(60));

/// No stage takes so long unless it hangs, on any machine.
const GIVE_UP: Duration = Duration::from_secs(120);

/// Uses both hosts as two programs would, until one of their calls fails.
fn talk(a: &Host, b: &Host) -> Result<(), SocketError> {
    let listener = b.call(|s, _| s.tcp_listen(at(2, 80), ListenOptions::default()))?;
    let c = a.call(|s, now| s.tcp_connect(now, at(2, 80), None))?;
    a.wait(c, Ready::WRITABLE, PATIENCE, |s, _| s.tcp_connected(c))?;
    let (peer, _) = b.wait(listener, Ready::READABLE, PATIENCE, |s, _| s.tcp_accept(listener))?;
    let here = a.call(|s, _| s.udp().bind(at(1, 53), Default::default()))?;
    let there = b.call(|s, _| s.udp().bind(at(2, 53), Default::default()))?;
    for _ in 0..20 {
        let len = 3000;
        let space = a.wait(c, Ready::WRITABLE, PATIENCE, |s, now| {
            s.sosend(c).reserve(now, &[7; 3000], len, Attempt::First)
        })?;
        if let Reserved::Space(mut r) = space {
            r.chain.copy_from(0, &vec![7; r.len()]);
            a.post(Request::CommitLast(c, r));
        }
        let chain = b.wait(peer, Ready::READER, PATIENCE, |s, _| s.tcp_take(peer, 1 << 16))?;
        b.post(Request::ReadDone(peer, chain));
        b.call(|s, now| s.udp().send(now, there, &[&[1; 100]], Some(at(1, 53))))?;
        let d = a.wait(here, Ready::READER, PATIENCE, |s, _| s.udp().receive(here))?;
        a.post(Request::Free(d.payload));
        a.call(|s, now| s.udp().send(now, here, &[&[1; 100]], Some(at(2, 53))))?;
        let d = b.wait(there, Ready::READER, PATIENCE, |s, _| s.udp().receive(there))?;
        b.post(Request::Free(d.payload));
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether the path came by the stage so often.
fn springs(stage: Stage, n: u32) -> bool {
    let (p, q) = pair(&LinkConfig::default()).unwrap();
    let trap = Trap::default();
    trap.0[1].store(0, Ordering::SeqCst);
    let (a, b) = (host(1, p, &trap), host(2, q, &Trap::default()));
    let sleeper = {
        let a = Arc::clone(&a);
        let l = a.call(|s, _| s.tcp_listen(at(1, 81), ListenOptions::default())).unwrap();
        let accept = move || a.wait(l, Ready::READABLE, Limit::Forever, |s, _| s.tcp_accept(l));
        thread::spawn(move || accept().map(drop))
    };
    trap.set(stage, n);
    let talked = {
        let (a, b, trap) = (Arc::clone(&a), Arc::clone(&b), trap.clone());
        thread::spawn(move || {
            let talked = catch_unwind(AssertUnwindSafe(|| talk(&a, &b)));
            (trap.has_sprung(), talked.is_err() || talked.is_ok_and(|t| t.is_err()))
        })
    };
    let start = Instant::now();
    while !(talked.is_finished() || trap.has_sprung() && a.failure().is_some()) {
        assert!(start.elapsed() < GIVE_UP, "{stage:?}: it hangs");
        thread::sleep(Duration::from_millis(1));
    }
    if !trap.has_sprung() {
        // The sleeper or the service thread may spring it at this very moment.
        let works = a.call(|_, _| Ok(()));
        assert!(works.is_ok() || trap.has_sprung(), "{stage:?}: {works:?}");
        // The sleeper would sleep for ever otherwise.
        trap.set(Stage::Locked, 1);
        let _ = catch_unwind(AssertUnwindSafe(|| a.call(|_, _| Ok(()))));
    }
    while a.failure().is_none() {
        assert!(start.elapsed() < GIVE_UP, "{stage:?}: the failure is not reported");
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(a.call(|_, _| Ok(())), Err(SocketError::NetworkDown), "{stage:?}");
    assert_eq!(a.poll(), Err(SocketError::NetworkDown));
    assert!(!a.drain(None, fulmar_stack::base::Duration::from_secs(1000)));
    // The panic may have been its own.
    if let Ok(said) = sleeper.join() {
        assert_eq!(said, Err(SocketError::NetworkDown), "{stage:?}");
    }
    a.stop();
    b.stop();
    talked.join().unwrap().0
}

#[test]
fn a_panic_at_any_stage_closes_the_host_and_wakes_its_sleepers() {
    let mut passed = Vec::new();
    for stage in Stage::ALL {
        let sprung = [1, 5].into_iter().filter(|n| springs(*stage, *n)).count();
        if sprung > 0 {
            passed.push(stage.name());
        }
    }
    for stage in [Stage::Locked, Stage::DeviceTaken, Stage::TimersRun, Stage::IpInput] {
        assert!(passed.contains(&stage.name()), "{stage:?} is not among {passed:?}");
    }
    assert!(passed.len() >= 12, "{passed:?}");
}
