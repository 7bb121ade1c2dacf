//! A middlebox that lowers the MSS option of SYNs, so that a station sends small segments.

use fulmar_stack::device::Packet;
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::dissect::Network;
use fulmar_stack::wire::protocol;
use fulmar_stack::wire::tcp::{Flags, Header};

use super::moves::{correct, rewritten};

const TCP_BYTES: usize = 20;
const CHECKSUM: usize = 16;
/// Kind and length of the option (RFC 9293 section 3.2).
const MSS_OPTION: [u8; 2] = [2, 4];

/// The frame with an MSS option of at most `most`; `None` without memory for one that may not be written
/// to.
pub fn clamp(p: Packet, most: u16, pool: &mut Pool) -> Option<Packet> {
    let needs_sum = !p.offload.needs_csum;
    let frame_bytes = p.chain.len();
    rewritten(p, pool, |head| {
        let Some(at) = syn_at(head, frame_bytes) else { return };
        let Some(tcp) = head.get_mut(at..) else { return };
        // The stack writes the option first.
        let Some(&[k, n, a, b]) = tcp.get(TCP_BYTES..TCP_BYTES + 4) else { return };
        if [k, n] != MSS_OPTION || u16::from_be_bytes([a, b]) <= most {
            return;
        }
        let new = most.to_be_bytes();
        tcp[TCP_BYTES + 2..TCP_BYTES + 4].copy_from_slice(&new);
        if needs_sum {
            correct(tcp, CHECKSUM, &[a, b], &new);
        }
    })
}

/// Where TCP begins in a SYN.
fn syn_at(head: &[u8], frame_bytes: usize) -> Option<usize> {
    let network = Network::parse(head, frame_bytes).filter(|n| n.protocol == protocol::TCP)?;
    let (_, flags, _) = Header::peek(head.get(network.l4..)?)?;
    flags.contains(Flags::SYN).then_some(network.l4)
}
