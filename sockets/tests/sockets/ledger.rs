//! The account of a stack.

use std::io::{Read, Write};

use fulmar::stat::ledger::Stage;

use crate::support::{connection, pattern, stacks, stacks_with, within};

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
        let sent = a.account().unwrap().expect("an account");
        let passed =
            |l: &fulmar::stat::ledger::Account, stage| l.stages.iter().any(|c| c.stage == stage);
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
        let received = b.account().unwrap().expect("an account");
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
        let ledger = a.stat().unwrap().document().ledger.expect("an account");
        assert!(ledger.stages.iter().any(|s| s.stage == "send_copied" && s.layer == "copy"));
        let before = a.account().unwrap().expect("an account");
        assert!(before.packets >= before.frames && before.bytes > 100_000);
        a.clear_account();
        c.write_all(&bytes[..1000]).unwrap();
        s.read_exact(&mut [0; 1000]).unwrap();
        let since = a.account().unwrap().expect("an account").since(&before);
        assert!(since.packets > 0 && since.bytes < 5000, "{since:?}");
        assert!(since.visits < sent.visits && since.busy_ns() > 0.0);
    });
}

#[test]
fn a_stack_keeps_no_account_by_default() {
    within(|| {
        let (a, _b) = stacks();
        assert!(a.account().unwrap().is_none());
        assert_eq!(a.stat().unwrap().document().ledger, None);
    });
}

#[test]
fn the_account_of_a_running_stack_is_switched_on_and_off() {
    within(|| {
        let (a, b) = stacks();
        let (mut c, mut s) = connection(&a, &b, 80);
        let mut talk = || {
            c.write_all(&[1; 1000]).unwrap();
            s.read_exact(&mut [0; 1000]).unwrap();
        };
        talk();
        a.set_account(Some(1));
        assert_eq!(a.account().unwrap().expect("it is on").measured, 0);
        talk();
        // The visits of this thread that lasted from before are not in it.
        let kept = a.account().unwrap().expect("it is on");
        assert!(kept.measured > 0 && kept.ns_of(Stage::SendCommitted) > 0.0, "{kept:?}");
        a.set_account(None);
        assert!(a.account().unwrap().is_none());
        talk();
        a.set_account(Some(1));
        let measured = a.account().unwrap().expect("it is on").measured;
        assert!(measured >= kept.measured);
    });
}
