//! What is done to a single packet.

use crate::mbuf::{NoBuffer, Pool, Purpose};
use crate::wire::eth;

use crate::device::offload;
use crate::device::{Packet, Rng};

const ETHER_BYTES: usize = eth::HEADER_BYTES;
/// The two bits of ECN (RFC 3168 section 5): both are set for Congestion Experienced.
const CE: u8 = 3;

/// A second frame that refers to the same bytes.
///
/// # Errors
/// [`NoBuffer`]: the pool has no references left.
pub fn duplicate(p: &Packet, pool: &mut Pool) -> Result<Packet, NoBuffer> {
    let chain = pool.clone_range(&p.chain, 0, p.chain.len())?;
    Ok(Packet { chain, offload: p.offload })
}

/// Flips one bit of an IP packet, after completing its checksum and copying it. The Ethernet header
/// and frames other than IP stay whole: on a wire their check sequence would have caught the flip,
/// and nothing else can. Not for super-frames. Returns whether a bit was flipped.
///
/// # Errors
/// [`NoBuffer`]: no memory for the copy; the frame is as it was.
pub fn corrupt(p: &mut Packet, rng: &mut Rng, pool: &mut Pool) -> Result<bool, NoBuffer> {
    let mut front = [0; ETHER_BYTES];
    p.chain.copy_to(0, &mut front);
    let is_ip = eth::Header::parse(&front)
        .is_ok_and(|h| h.ethertype == eth::IPV4 || h.ethertype == eth::IPV6);
    if !is_ip {
        return Ok(false);
    }
    offload::finish_checksum(p, pool)?;
    offload::make_unique(&mut p.chain, pool, Purpose::Control)?;
    p.offload.csum_valid = false;
    let bits = p.chain.len().saturating_sub(ETHER_BYTES) as u64 * 8;
    let bit = rng.below(bits);
    let at = ETHER_BYTES + (bit / 8) as usize;
    let mut byte = [0];
    if p.chain.copy_to(at, &mut byte) == 1 {
        byte[0] ^= 1 << (bit % 8);
        p.chain.copy_from(at, &byte);
    }
    Ok(true)
}

/// Sets Congestion Experienced in an ECN-capable IP packet (RFC 3168 section 5). False if it is not capable, or if
/// there is no memory for a header of its own.
pub fn mark_congestion(p: &mut Packet, pool: &mut Pool) -> bool {
    let mut front = [0; ETHER_BYTES + 2];
    if p.chain.copy_to(0, &mut front) < front.len() {
        return false;
    }
    let word = u16::from_be_bytes([front[ETHER_BYTES], front[ETHER_BYTES + 1]]);
    let (ecn, shift) = match eth::Header::parse(&front).map(|h| h.ethertype) {
        Ok(eth::IPV4) => (word as u8 & CE, 0),
        // The traffic class begins four bits into the header.
        Ok(eth::IPV6) => ((word >> 4) as u8 & CE, 4),
        _ => return false,
    };
    if ecn == 0 {
        return false;
    }
    if ecn == CE {
        return true;
    }
    // Ethernet and IP header: the rest may be shared.
    if offload::own_front(&mut p.chain, ETHER_BYTES + 20, pool).is_err() {
        return false;
    }
    let marked = word | u16::from(CE) << shift;
    p.chain.copy_from(ETHER_BYTES, &marked.to_be_bytes());
    if shift == 0 {
        amend_ipv4_checksum(p, word, marked);
    }
    true
}

/// RFC 1624 equation 3.
fn amend_ipv4_checksum(p: &mut Packet, old: u16, new: u16) {
    const AT: usize = ETHER_BYTES + 10;
    let mut field = [0; 2];
    p.chain.copy_to(AT, &mut field);
    let sum = u32::from(!u16::from_be_bytes(field)) + u32::from(!old) + u32::from(new);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    p.chain.copy_from(AT, &(!(sum as u16)).to_be_bytes());
}
