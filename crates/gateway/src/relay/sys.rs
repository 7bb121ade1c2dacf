//! What neither std nor nix has in safe form.

use std::os::fd::BorrowedFd;

use fulmar_netdev::WakeFd;

/// The descriptor of a device, for the length of one call.
pub fn with_descriptor<T>(wake: WakeFd, f: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    // SAFETY: the device says that its descriptor is open as long as the device exists, and the shard, which
    // the caller holds, owns the device.
    f(unsafe { BorrowedFd::borrow_raw(wake.fd) })
}
