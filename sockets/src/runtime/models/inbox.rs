//! Requests that are queued while the lock is released.

use fulmar_stack::models::{Model, model, spawn};

use super::World;
use crate::runtime::inbox::Request;

pub const MODELS: &[Model] = fulmar_stack::models![
    a_request_left_beside_a_release_is_done_by_one_of_the_two,
    requests_of_two_threads_and_of_a_signal_handler_are_all_done,
];

fn a_request_left_beside_a_release_is_done_by_one_of_the_two() {
    model(3, || {
        let w = World::new(true);
        let other = w.clone();
        let poster = spawn(move || other.host.post(Request::Close(other.sockets[0])));
        w.host.call(|_, _| Ok(())).unwrap();
        poster.join().unwrap();
        assert!(w.host.inbox.is_empty());
        assert!(w.host.lock().unwrap().ready(w.sockets[0]).is_err());
    });
}

fn requests_of_two_threads_and_of_a_signal_handler_are_all_done() {
    model(2, || {
        let w = World::new(true);
        let (host, socket) = (w.host.clone(), w.sockets[0]);
        let poster = spawn(move || host.post(Request::Close(socket)));
        let (host, socket) = (w.host.clone(), w.sockets[1]);
        let interrupted = spawn(move || {
            // The steps of a signal handler that interrupts a call.
            let handler = || host.post(Request::Close(socket));
            host.call(|_, _| Ok(handler())).unwrap();
        });
        w.host.call(|_, _| Ok(())).unwrap();
        poster.join().unwrap();
        interrupted.join().unwrap();
        assert!(w.host.inbox.is_empty());
        let guard = w.host.lock().unwrap();
        assert!(w.sockets.iter().all(|socket| guard.ready(*socket).is_err()));
    });
}
