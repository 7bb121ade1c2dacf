//! Sending: how many frames one system call writes, and from which memory.

use std::io;
use std::os::fd::AsFd;

use fulmar_stack::base::{Counter, DropReason, Medium};
use fulmar_stack::device::{Burst, Packet, offload, plain_ip, uso};

use super::{ALONE, MAX_SEGS, Tap};
use crate::drivers::batch::Completing;
use crate::drivers::udp_gso::{self, UdpGso};
use crate::drivers::{sys, vnet};

impl Tap {
    /// See [`fulmar_stack::device::Device::tx_burst`].
    pub(super) fn send_burst(&mut self, burst: &mut Burst, mut done: Completing<'_>) {
        self.is_blocked = false;
        while !burst.is_empty() && !self.is_blocked {
            if self.send_joined(burst, &mut done) {
                continue;
            }
            let run = match (&self.vector, self.health.lost) {
                (Some(vector), None) => vector.run(burst, &self.caps, self.joins),
                _ => 0,
            };
            match run {
                0 => self.send_one(burst, &mut done),
                _ => self.send_run(run, burst, &mut done),
            }
        }
        // An accepted frame shows that the interface is up again.
        self.health.is_down &= done.tally.frames == 0;
        self.tally(done.tally).sent(done.counters, &mut self.stats);
    }

    /// Sends the first frame of the burst with one call, drops it, or leaves it there: the queue is full then.
    fn send_one(&mut self, burst: &mut Burst, done: &mut Completing<'_>) {
        let Some(p) = burst.pop_front() else { return };
        if let Err(reason) = self.check(&p) {
            return done.discard(p, reason);
        }
        self.stats.tx_crossings += 1;
        let written = self.write(&p).map(drop).map_err(|e| e.raw_os_error().unwrap_or(0));
        if let Some(p) = self.health.complete(p, written, done) {
            self.note_refusal();
            // Never full: the frame was just taken from it.
            let _ = burst.push_front(p);
        }
    }

    fn check(&self, p: &Packet) -> Result<(), DropReason> {
        if self.health.lost.is_some() {
            return Err(DropReason::DeviceGone);
        }
        offload::check(p, &self.caps)?;
        match self.caps.medium {
            Medium::Ethernet => Ok(()),
            Medium::Ip => plain_ip::check_sent(p),
        }
    }

    /// Writes one frame with `writev`: virtio-net header and mbufs.
    fn write(&self, p: &Packet) -> io::Result<usize> {
        let link_bytes = self.link_bytes();
        let front = p.chain.front().and_then(|m| m.as_slice().get(link_bytes..)).unwrap_or(&[]);
        let header = vnet::request_before(&p.offload.unshift(link_bytes as u16), front);
        let mut mbufs = p.chain.iter().filter(|m| !m.is_empty()).map(sys::Part::mbuf);
        let first = mbufs.next().map_or(sys::Part::EMPTY, |part| part.behind(link_bytes));
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        (parts[0], parts[1]) = (sys::Part::bytes(&header), first);
        let used = sys::gather(&mut parts[2..], mbufs);
        sys::write_parts(self.file.as_fd(), &parts[..2 + used])
    }

    /// Sends the first `run` frames with one call of io_uring.
    fn send_run(&mut self, run: usize, burst: &mut Burst, done: &mut Completing<'_>) {
        let Tap { health, stats, vector: Some(vector), .. } = self else { return };
        stats.tx_crossings += 1;
        let kept = vector.send(run, burst, |p, written| health.complete(p, written, done));
        if !vector.sends() {
            stats.path = format!("{ALONE} (the interface accepted a burst in part)");
        }
        if kept > 0 {
            self.note_refusal();
        }
    }

    /// Sends datagrams of one flow at the front as one super-datagram. False: not possible; no effect.
    fn send_joined(&mut self, burst: &mut Burst, done: &mut Completing<'_>) -> bool {
        if !self.joins.is_on() || burst.len() < uso::LEAST || self.health.lost.is_some() {
            return false;
        }
        let Some(joined) = uso::join(&*burst, &self.caps, udp_gso::MOST_SEGS) else {
            return false;
        };
        self.stats.tx_crossings += 1;
        let written = udp_gso::write(self.file.as_fd(), &joined, burst, vnet::HEADER_BYTES);
        match written.map_err(|e| e.raw_os_error().unwrap_or(0)) {
            Ok(_) => {
                done.counters.add(Counter::UsoJoined, joined.count as u64 - 1);
                done.sent_front(joined.count, burst);
            }
            Err(libc::EAGAIN | libc::EINTR) => self.note_refusal(),
            Err(libc::EINVAL) => {
                self.joins = UdpGso::Refused;
                return false;
            }
            Err(errno) => {
                for p in (0..joined.count).map_while(|_| burst.pop_front()) {
                    // Never kept: EAGAIN and EINTR were handled above.
                    let _ = self.health.complete(p, Err(errno), done);
                }
            }
        }
        true
    }

    /// The device refused a frame, which stays queued.
    fn note_refusal(&mut self) {
        self.is_blocked = true;
        self.stats.tx_refusals += 1;
    }
}
