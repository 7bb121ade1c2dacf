//! Leader and followers, the sleep on the device, the service thread.

use std::sync::Arc;

use fulmar_stack::models::{Model, model, spawn};
use fulmar_stack::socket::SocketError;

use super::wire::PORTS;
use super::{World, read};
use crate::runtime::service_thread;

pub const MODELS: &[Model] = fulmar_stack::models![
    a_frame_wakes_the_reader_that_sleeps_or_is_about_to,
    of_two_readers_each_gets_its_frame_whichever_leads,
    the_service_thread_takes_what_comes_when_the_last_caller_has_left,
    a_stack_that_fails_wakes_threads_that_sleep_or_are_about_to,
];

fn a_frame_wakes_the_reader_that_sleeps_or_is_about_to() {
    for is_level_triggered in [false, true] {
        model(3, move || {
            let w = World::new(is_level_triggered);
            let wire = w.wire.clone();
            let kernel = spawn(move || wire.deliver(PORTS[0]));
            read(&w.host, w.sockets[0]).unwrap();
            kernel.join().unwrap();
        });
    }
}

fn of_two_readers_each_gets_its_frame_whichever_leads() {
    for is_level_triggered in [false, true] {
        model(2, move || {
            let w = World::new(is_level_triggered);
            let other = w.clone();
            let reader = spawn(move || read(&other.host, other.sockets[1]).unwrap());
            let wire = w.wire.clone();
            let kernel = spawn(move || PORTS.iter().for_each(|port| wire.deliver(*port)));
            read(&w.host, w.sockets[0]).unwrap();
            reader.join().unwrap();
            kernel.join().unwrap();
        });
    }
}

fn the_service_thread_takes_what_comes_when_the_last_caller_has_left() {
    // With a poll set it sleeps on the device until a caller takes the lead; without one it is awake while callers
    // run the stack, and parks while one leads.
    for (has_set, is_level_triggered) in [(true, false), (false, true)] {
        model(2, move || {
            let w = World::new(is_level_triggered);
            if has_set {
                w.host.poll_for_sets();
            }
            let weak = Arc::downgrade(&w.host);
            let service = spawn(move || service_thread::run(&weak));
            let (host, socket) = (w.host.clone(), w.sockets[0]);
            let reader = spawn(move || read(&host, socket).unwrap());
            w.wire.deliver(PORTS[0]);
            reader.join().unwrap();
            w.wire.deliver(PORTS[1]);
            w.wire.wait_until_taken();
            w.host.stop();
            service.join().unwrap();
        });
    }
}

fn a_stack_that_fails_wakes_threads_that_sleep_or_are_about_to() {
    model(2, || {
        let w = World::new(true);
        let readers = w.sockets.map(|socket| {
            let host = w.host.clone();
            spawn(move || read(&host, socket))
        });
        w.host.fail();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), Err(SocketError::NetworkDown));
        }
    });
}
