//! The state of a tun descriptor, as the errors of its reads and writes show it.

use fulmar_stack::base::DropReason;

/// The state of the interface, as errors have shown it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Health {
    /// The errno with which the interface was lost.
    pub lost: Option<i32>,
    /// The interface was down at the last write.
    pub is_down: bool,
}

impl Health {
    /// Handles a failed write. `None`: the frame stays queued; otherwise it is to be dropped.
    pub(super) fn on_write_error(&mut self, errno: i32) -> Option<DropReason> {
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
