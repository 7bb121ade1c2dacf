//! Packets of protocols other than TCP and UDP.

use std::io;
use std::net::IpAddr::{self, V4, V6};

use etherparse::{IpNumber, Ipv4Header, Ipv6Header, PacketBuilder};

/// Hops of an answer.
const TTL: u8 = 64;

/// Builds the packets of at most `mtu` bytes that carry a payload.
pub(crate) fn build(
    (src, dst): (IpAddr, IpAddr),
    protocol: IpNumber,
    mtu: usize,
    payload: &[u8],
    mut put: impl FnMut(Vec<u8>),
) -> io::Result<()> {
    let header_bytes = if src.is_ipv4() { Ipv4Header::MIN_LEN } else { Ipv6Header::LEN };
    let most = mtu.saturating_sub(header_bytes).max(1);
    // One without a payload, too.
    let count = payload.len().div_ceil(most).max(1);
    for piece in (0..count).map(|i| &payload[i * most..payload.len().min((i + 1) * most)]) {
        let builder = match (src, dst) {
            (V4(src), V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), TTL),
            (V6(src), V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), TTL),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let mut packet = Vec::with_capacity(header_bytes + piece.len());
        builder.write(&mut packet, protocol, piece).map_err(io::Error::other)?;
        put(packet);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use etherparse::IpSlice;
    use proptest::prelude::*;

    use super::*;

    const ENDS4: (IpAddr, IpAddr) =
        (V4(Ipv4Addr::new(10, 0, 0, 2)), V4(Ipv4Addr::new(192, 0, 2, 7)));
    const ENDS6: (IpAddr, IpAddr) = (V6(Ipv6Addr::LOCALHOST), V6(Ipv6Addr::UNSPECIFIED));

    proptest! {
        #[test]
        fn any_payload_is_what_its_packets_carry(
            is_v6: bool,
            mtu in 0usize..300,
            payload in prop::collection::vec(any::<u8>(), 0..700),
        ) {
            let ends = if is_v6 { ENDS6 } else { ENDS4 };
            let (mut carried, mut count) = (Vec::new(), 0);
            let built = build(ends, IpNumber(99), mtu, &payload, |packet| {
                count += 1;
                assert!(packet.len() <= mtu.max(41), "{} bytes", packet.len());
                let ip = IpSlice::from_slice(&packet).expect("a packet");
                assert_eq!((ip.source_addr(), ip.destination_addr()), ends);
                assert_eq!(ip.payload_ip_number(), IpNumber(99));
                carried.extend_from_slice(ip.payload().payload);
            });
            prop_assert!(built.is_ok() && count > 0);
            prop_assert_eq!(carried, payload);
        }
    }

    #[test]
    fn no_packet_has_ends_of_two_versions() {
        assert!(build((ENDS4.0, ENDS6.0), IpNumber(99), 1300, &[], |_| {}).is_err());
    }
}
