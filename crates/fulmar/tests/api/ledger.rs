//! The account of a stack, and paths that end early.

use std::io::{Read, Write};

use fulmar::UdpSocket;
use fulmar::ledger::Stage;
use fulmar::runtime::{ExitPoint, Probing};

use crate::support::{
    B, buffers_come_home, connection, meet, pattern, stacks, stacks_with, within,
};

#[test]
fn a_stack_that_keeps_an_account_says_what_its_stages_cost() {
    within(|| {
        let (a, b) = stacks_with(|s| s.account(1));
        let (mut c, mut s) = connection(&a, &b, 80);
        let bytes = pattern(0, 100_000);
        for chunk in bytes.chunks(50_000) {
            c.write_all(chunk).unwrap();
            let mut room = vec![0; chunk.len()];
            s.read_exact(&mut room).unwrap();
            assert_eq!(room, chunk);
        }
        let sent = a.ledger().expect("an account");
        let passed = |l: &fulmar::ledger::Balance, stage| l.stages.iter().any(|c| c.stage == stage);
        use Stage as S;
        for stage in [
            S::Locked,
            S::SendChecked,
            S::SendReserved,
            S::SendCopied,
            S::SendCommitted,
            S::TransportOutput,
            S::RouteFound,
            S::EtherOutput,
            S::BurstQueued,
            S::DeviceTaken,
            S::Completed,
            S::Released,
        ] {
            assert!(passed(&sent, stage), "sending passes {stage:?}");
        }
        let received = b.ledger().expect("an account");
        for stage in [
            S::DeviceReceived,
            S::EtherInput,
            S::IpInput,
            S::Demultiplexed,
            S::TransportInput,
            S::ReceiveTaken,
            S::ReceiveCopied,
            S::ReceiveFreed,
        ] {
            assert!(passed(&received, stage), "receiving passes {stage:?}");
        }
        assert!(sent.stages.iter().all(|c| c.ns >= 0.0 && c.passes > 0.0));
        let document = a.stat().unwrap().to_json();
        assert!(document.contains("\"ledger\":{") && document.contains("send_copied"));
        let before = a.account().unwrap().expect("an account");
        assert!(before.packets >= before.frames && before.bytes > 100_000);
        a.clear_ledger();
        c.write_all(&bytes[..1000]).unwrap();
        s.read_exact(&mut [0; 1000]).unwrap();
        let since = a.account().unwrap().expect("an account").since(&before);
        assert!(since.packets > 0 && since.bytes < 5000, "{since:?}");
        assert!(since.balance.visits < sent.visits && since.balance.busy_ns() > 0.0);
    });
}

#[test]
fn a_stack_keeps_no_account_unless_it_is_told_to() {
    within(|| {
        let (a, _b) = stacks();
        assert!(a.ledger().is_none());
        assert!(a.stat().unwrap().to_json().contains("\"ledger\":null"));
    });
}

#[test]
fn a_path_that_ends_early_sends_nothing_and_keeps_no_buffer() {
    within(|| {
        let at = ExitPoint::default();
        let exit = at.clone();
        let (a, b) = stacks_with(move |s| s.probing(Probing::Exit(exit.clone())));
        meet(&a);
        let socket = UdpSocket::bind(&a, "10.1.0.1:0").unwrap();
        socket.connect((B, 9)).unwrap();
        let frames = || a.stat().unwrap().shard.device.tx_frames;
        let before = frames();
        use Stage as S;
        for stage in [
            S::SendCall,
            S::Locked,
            S::SendChecked,
            S::PathChosen,
            S::SendReserved,
            S::SendCopied,
            S::TransportOutput,
            S::RouteFound,
            S::IpOutput,
            S::EtherOutput,
            S::BurstQueued,
        ] {
            at.set(Some(stage));
            for _ in 0..10 {
                assert_eq!(socket.send(b"18 bytes of payload").unwrap(), 19);
            }
            assert_eq!(frames(), before, "{stage:?}");
        }
        at.set(Some(S::DeviceTaken));
        assert_eq!(socket.send(b"x").unwrap(), 1);
        assert_eq!(frames(), before + 1);
        at.set(None);
        buffers_come_home(&[&a, &b]);
    });
}

#[test]
fn a_frame_that_ends_at_any_stage_on_its_way_up_keeps_no_buffer() {
    within(|| {
        let at = ExitPoint::default();
        let exit = at.clone();
        let (a, b) = stacks_with(move |s| s.probing(Probing::Exit(exit.clone())));
        meet(&a);
        let from = UdpSocket::bind(&a, "10.1.0.1:0").unwrap();
        let to = UdpSocket::bind(&b, (B, 9)).unwrap();
        to.set_nonblocking(true).unwrap();
        use Stage as S;
        for stage in [S::DeviceReceived, S::EtherInput, S::IpInput, S::Demultiplexed] {
            at.set(Some(stage));
            from.send_to(b"lost", (B, 9)).unwrap();
            while b.host().poll().unwrap() > 0 {}
            assert!(to.recv(&mut [0; 8]).is_err(), "{stage:?}");
        }
        at.set(None);
        from.send_to(b"comes", (B, 9)).unwrap();
        let mut room = [0; 8];
        to.set_nonblocking(false).unwrap();
        assert_eq!(to.recv(&mut room).unwrap(), 5);
        buffers_come_home(&[&a, &b]);
    });
}
