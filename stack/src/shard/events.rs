//! Readiness events of watched sockets.

use alloc::vec::Vec;

use crate::base::SlotId;
use crate::socket::{Ready, SocketError};

use crate::shard::outcome::{Event, Watched};
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;

/// Readiness of every socket when the device is gone: each call fails.
const DOWN: Ready = Ready::ERROR.with(Ready::READABLE).with(Ready::WRITABLE);

/// Events not taken yet. One socket has at most one event for each kind of readiness and one for its close; the loss of
/// the device adds one.
#[derive(Default)]
pub(crate) struct Events {
    list: Vec<Event>,
    /// The error of every call once the device is lost.
    pub down: Option<SocketError>,
}

impl Events {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The readiness of a socket. When the device is gone every call fails at once.
    pub(crate) fn ready(&self, socket: &Socket) -> Ready {
        self.ready_now(socket.ready())
    }

    /// Reports the present readiness of a socket, if it is watched.
    pub(crate) fn notify(&mut self, sockets: &mut Slab<Socket>, id: SlotId) {
        let Some(socket) = sockets.get_mut(id) else { return };
        if socket.watch().is_watched() {
            let ready = socket.ready();
            self.report(id, socket.watch(), ready);
        }
    }

    /// Reports the present readiness of a watched socket.
    pub(crate) fn report(&mut self, id: SlotId, watch: &mut Watched, ready: Ready) {
        let unreported = watch.unreported(self.ready_now(ready));
        if !unreported.is_empty() {
            self.list.push(Event::Ready(id, unreported));
        }
    }

    fn ready_now(&self, ready: Ready) -> Ready {
        if self.down.is_some() { ready | DOWN } else { ready }
    }

    /// The application closes a socket.
    pub(crate) fn closed(&mut self, sockets: &mut Slab<Socket>, id: SlotId) {
        if sockets.get_mut(id).is_some_and(|s| s.watch().interest.is_some()) {
            self.list.push(Event::Closed(id));
        }
    }

    /// The device is lost.
    pub(crate) fn set_down(&mut self, error: SocketError) {
        self.down = Some(error);
        self.list.push(Event::Down);
    }

    /// Moves them to `into`, which is empty; the storage of both is kept.
    pub(crate) fn take(&mut self, sockets: &mut Slab<Socket>, into: &mut Vec<Event>) {
        core::mem::swap(&mut self.list, into);
        for event in into {
            if let Event::Ready(id, _) = *event
                && let Some(s) = sockets.get_mut(id)
            {
                s.watch().rearm();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::sockets::PingEntry;

    #[test]
    fn a_socket_is_listed_once_for_each_kind_however_often_it_becomes_ready() {
        let (mut events, mut sockets, mut taken) = (Events::default(), Slab::default(), Vec::new());
        let id = sockets.insert(Socket::Ping(Box::new(PingEntry::new(1))));
        events.down = Some(SocketError::NetworkDown);
        events.notify(&mut sockets, id);
        assert!(events.is_empty(), "it is not watched");
        sockets.get_mut(id).unwrap().watch().interest = Some(Ready::READABLE);
        (0..10).for_each(|_| events.notify(&mut sockets, id));
        sockets.get_mut(id).unwrap().watch().interest = Some(Ready::WRITABLE);
        (0..10).for_each(|_| events.notify(&mut sockets, id));
        events.closed(&mut sockets, id);
        events.take(&mut sockets, &mut taken);
        let first = Event::Ready(id, Ready::READABLE | Ready::ERROR);
        assert_eq!(taken, [first, Event::Ready(id, Ready::WRITABLE), Event::Closed(id)]);
        taken.clear();
        events.notify(&mut sockets, id);
        events.take(&mut sockets, &mut taken);
        assert_eq!(taken.len(), 1, "after a take the same readiness is reported again");
    }
}
