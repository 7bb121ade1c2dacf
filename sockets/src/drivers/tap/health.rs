//! The state of a tun descriptor, as the errors of its reads and writes show it.

use fulmar_stack::base::DropReason;
use fulmar_stack::device::Packet;

use crate::drivers::batch::Completing;

/// The state of the interface, as errors have shown it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Health {
    /// The errno with which the interface was lost.
    pub lost: Option<i32>,
    /// The interface was down at the last write.
    pub is_down: bool,
}

impl Health {
    /// Completes a frame: frees it if it was sent or dropped, returns it if it is to be sent again.
    pub(super) fn complete(
        &mut self,
        p: Packet,
        written: Result<(), i32>,
        done: &mut Completing<'_>,
    ) -> Option<Packet> {
        let Err(errno) = written else {
            done.sent(p);
            return None;
        };
        match self.on_write_error(errno) {
            Some(reason) => done.discard(p, reason),
            None => return Some(p),
        }
        None
    }

    /// Handles a failed write. `None`: the frame stays queued; otherwise it is to be dropped.
    fn on_write_error(&mut self, errno: i32) -> Option<DropReason> {
        match errno {
            libc::EAGAIN | libc::EINTR => return None,
            // The interface is down; it refuses frames until it is up again.
            libc::EIO => self.is_down = true,
            libc::EBADFD | libc::EBADF | libc::ENODEV | libc::ENXIO => {
                self.lost = Some(errno);
                return Some(DropReason::DeviceGone);
            }
            _ => {}
        }
        Some(DropReason::DeviceRefused)
    }

    /// Handles a failed read.
    pub(super) fn on_read_error(&mut self, errno: i32) {
        match errno {
            libc::EAGAIN | libc::EINTR => {}
            // On read EIO means that the interface is being removed; on write, that it is down.
            _ => self.lost = Some(errno),
        }
    }
}
