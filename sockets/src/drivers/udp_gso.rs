//! Writes datagrams of one flow as one UDP super-frame (`fulmar_stack::device::uso`) with a gathering write. The frames are
//! only read. `docs/bursts.md` has the cost per datagram.

use fulmar_stack::device::Burst;
use fulmar_stack::device::uso::{self, Joined};

use crate::drivers::{sys, vnet};

/// Mbufs that are gathered at most: two for each datagram.
pub(super) const MOST_SEGS: usize = 2 * uso::MOST;
/// The virtio-net header, the headers of the super-frame, the payloads.
const PARTS: usize = 2 + MOST_SEGS;

/// Whether datagrams of one flow are sent as one super-frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UdpGso {
    /// The device has no UDP GSO, or it was disabled.
    Off,
    On,
    /// The kernel refused to segment a super-datagram.
    Refused,
}

impl UdpGso {
    pub(super) fn is_on(self) -> bool {
        self == UdpGso::On
    }

    /// Continues [`DeviceStats::path`](fulmar_stack::device::DeviceStats::path).
    pub(super) fn describe(self) -> &'static str {
        match self {
            UdpGso::Off => "",
            UdpGso::On => "; datagrams of one flow coalesced (UDP GSO)",
            UdpGso::Refused => "; datagrams one by one (the kernel does not support UDP GSO here)",
        }
    }
}

/// Writes the datagrams at the front of `burst` as one frame. `header_bytes`: of the virtio-net header.
///
/// # Errors
/// As [`sys::write_parts`]; EINVAL: the kernel does not segment datagrams (before Linux 6.2).
pub(super) fn write(
    fd: std::os::fd::BorrowedFd<'_>,
    joined: &Joined,
    burst: &Burst,
    header_bytes: usize,
) -> std::io::Result<usize> {
    let header = vnet::request(&joined.offload);
    let mut parts = [sys::Part::EMPTY; PARTS];
    parts[0] = sys::Part::bytes(&header[..header_bytes]);
    parts[1] = sys::Part::bytes(joined.headers());
    let payload = burst.iter().take(joined.count).flat_map(|p| {
        let mut mbufs = p.chain.iter();
        let front = mbufs.next().map_or(&[][..], |m| m.as_slice());
        let rest = front.get(joined.headers().len()..).unwrap_or_default();
        let others = mbufs.filter(|m| !m.is_empty()).map(sys::Part::mbuf);
        (!rest.is_empty()).then(|| sys::Part::bytes(rest)).into_iter().chain(others)
    });
    let used = sys::gather(&mut parts[2..], payload);
    sys::write_parts(fd, &parts[..2 + used])
}
