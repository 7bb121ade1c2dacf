//! The DHCP and DHCPv6 server of a guest: one lease, always the same, for every client on the guest's link.
//!
//! Requests and answers are payloads of datagrams; the server keeps no state. A client that got the lease before, from
//! this or an earlier gateway, gets it again.
//!
//! Sources: RFC 2131, 2132, 3397, 4039 (DHCP); RFC 8415, 3646 (DHCPv6).

use std::net::{Ipv4Addr, Ipv6Addr};

use dhcproto::{Encodable, Encoder, Name, v4, v6};

use crate::rules::covers;

/// UDP ports of the DHCP server and client (RFC 2131 section 4.1).
pub const SERVER_PORT: u16 = 67;
/// See [`SERVER_PORT`].
pub(crate) const CLIENT_PORT: u16 = 68;
/// UDP ports of the DHCPv6 server and client (RFC 8415 section 7.2).
pub(crate) const SERVER_PORT_V6: u16 = 547;
/// See [`SERVER_PORT_V6`].
pub(crate) const CLIENT_PORT_V6: u16 = 546;

/// All ones: the lease does not end (RFC 2131 section 3.3, RFC 8415 section 7.7).
const FOREVER: u32 = u32::MAX;

/// The lease of an IPv4 guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Its address.
    pub address: Ipv4Addr,
    /// Length of its prefix.
    pub prefix_len: u8,
    /// The server: an address of the gateway's.
    pub server: Ipv4Addr,
    /// Its router.
    pub router: Option<Ipv4Addr>,
    /// Its MTU in bytes.
    pub mtu: Option<u16>,
    /// Its resolvers.
    pub nameservers: Vec<Ipv4Addr>,
    /// The domains that it searches.
    pub search: Vec<String>,
}

/// The lease of an IPv6 guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseV6 {
    /// Its address.
    pub address: Ipv6Addr,
    /// The server's identifier (DUID, RFC 8415 section 11).
    pub duid: Vec<u8>,
    /// Its resolvers.
    pub nameservers: Vec<Ipv6Addr>,
    /// The domains that it searches.
    pub search: Vec<String>,
}

/// The fields of a client's message that this server reads. The message is parsed here: the library asserts lengths
/// that a guest can get wrong.
struct Request<'a> {
    kind: v4::MessageType,
    xid: u32,
    htype: u8,
    flags: u16,
    ciaddr: Ipv4Addr,
    giaddr: Ipv4Addr,
    chaddr: &'a [u8],
    /// The server that the client has chosen.
    server: Option<Ipv4Addr>,
    /// The address that it asks for.
    address: Option<Ipv4Addr>,
    client_id: Option<&'a [u8]>,
    is_rapid: bool,
}

/// Fixed part of a message, with the magic cookie (RFC 2131 section 2, RFC 2132 section 2).
const HEADER_BYTES: usize = 240;
const MAGIC: [u8; 4] = [99, 130, 83, 99];
/// Options (RFC 2132, RFC 4039).
const PAD: u8 = 0;
const REQUESTED_ADDRESS: u8 = 50;
const MESSAGE_TYPE: u8 = 53;
const SERVER_ID: u8 = 54;
const CLIENT_ID: u8 = 61;
const RAPID_COMMIT: u8 = 80;
const END: u8 = 255;

impl<'a> Request<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Request<'a>> {
        let (header, mut options) = bytes.split_at_checked(HEADER_BYTES)?;
        let word = |at: usize| <[u8; 4]>::try_from(header.get(at..at + 4)?).ok();
        let is_request = header.first() == Some(&1);
        if !is_request || word(236)? != MAGIC {
            return None;
        }
        let [htype, hlen] = [*header.get(1)?, *header.get(2)?];
        let mut request = Request {
            kind: v4::MessageType::Unknown(0),
            xid: u32::from_be_bytes(word(4)?),
            htype,
            flags: u16::from_be_bytes(header.get(10..12)?.try_into().ok()?),
            ciaddr: word(12)?.into(),
            giaddr: word(24)?.into(),
            chaddr: header.get(28..44)?.get(..usize::from(hlen))?,
            server: None,
            address: None,
            client_id: None,
            is_rapid: false,
        };
        while let [code, rest @ ..] = options {
            match *code {
                PAD => options = rest,
                END => break,
                code => {
                    let (length, rest) = rest.split_first()?;
                    let (value, rest) = rest.split_at_checked(usize::from(*length))?;
                    request.take(code, value)?;
                    options = rest;
                }
            }
        }
        Some(request)
    }

    /// Takes an option; `None` if its length is wrong.
    fn take(&mut self, code: u8, value: &'a [u8]) -> Option<()> {
        let address = || <[u8; 4]>::try_from(value).ok().map(Ipv4Addr::from);
        match code {
            MESSAGE_TYPE => self.kind = v4::MessageType::from(*value.first()?),
            REQUESTED_ADDRESS => self.address = Some(address()?),
            SERVER_ID => self.server = Some(address()?),
            CLIENT_ID => self.client_id = Some(value),
            RAPID_COMMIT => self.is_rapid = true,
            _ => {}
        }
        Some(())
    }
}

/// The answer to a DHCP message, if it has one. It is to be broadcast, or sent to the Ethernet address of the
/// client and to [`Lease::address`].
pub fn answer(request: &[u8], lease: &Lease) -> Option<Vec<u8>> {
    let request = Request::parse(request)?;
    let kind = match request.kind {
        v4::MessageType::Discover if request.is_rapid => v4::MessageType::Ack,
        v4::MessageType::Discover => v4::MessageType::Offer,
        v4::MessageType::Inform => v4::MessageType::Ack,
        // The client has chosen another server (RFC 2131 section 4.3.2).
        v4::MessageType::Request if request.server.is_some_and(|s| s != lease.server) => {
            return None;
        }
        v4::MessageType::Request if request.address.unwrap_or(request.ciaddr) == lease.address => {
            v4::MessageType::Ack
        }
        v4::MessageType::Request => v4::MessageType::Nak,
        _ => return None,
    };
    let is_nak = kind == v4::MessageType::Nak;
    let gives_address = !is_nak && request.kind != v4::MessageType::Inform;
    let none = Ipv4Addr::UNSPECIFIED;
    let mut reply = v4::Message::new_with_id(
        request.xid,
        if is_nak { none } else { request.ciaddr },
        if gives_address { lease.address } else { none },
        lease.server,
        request.giaddr,
        request.chaddr,
    );
    reply.set_opcode(v4::Opcode::BootReply).set_flags(request.flags.into());
    reply.set_htype(request.htype.into());
    let options = reply.opts_mut();
    options.insert(v4::DhcpOption::MessageType(kind));
    options.insert(v4::DhcpOption::ServerIdentifier(lease.server));
    if let Some(id) = request.client_id {
        // RFC 6842 section 3.
        options.insert(v4::DhcpOption::ClientIdentifier(id.to_vec()));
    }
    if !is_nak {
        lease.add_options(options);
    }
    if gives_address {
        options.insert(v4::DhcpOption::AddressLeaseTime(FOREVER));
    }
    if gives_address && request.kind == v4::MessageType::Discover && request.is_rapid {
        options.insert(v4::DhcpOption::RapidCommit);
    }
    encoded(&reply)
}

impl Lease {
    fn add_options(&self, options: &mut v4::DhcpOptions) {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix_len.min(32))).unwrap_or(0);
        options.insert(v4::DhcpOption::SubnetMask(Ipv4Addr::from_bits(mask)));
        if let Some(router) = self.router {
            options.insert(v4::DhcpOption::Router(vec![router]));
            if let Some(routes) = self.routes_to(router) {
                options.insert(routes);
            }
        }
        if let Some(mtu) = self.mtu {
            options.insert(v4::DhcpOption::InterfaceMtu(mtu));
        }
        if !self.nameservers.is_empty() {
            options.insert(v4::DhcpOption::DomainNameServer(self.nameservers.clone()));
        }
        let search = names(&self.search);
        if !search.is_empty() {
            options.insert(v4::DhcpOption::DomainSearch(search));
        }
    }
}

impl Lease {
    /// A route to the router and one through it where the prefix does not cover the router (RFC 3442).
    fn routes_to(&self, router: Ipv4Addr) -> Option<v4::DhcpOption> {
        if covers(self.address.into(), self.prefix_len, router.into()) {
            return None;
        }
        let (router, none) = (router.octets(), [0; 4]);
        let routes = [&[32], &router[..], &none[..], &[0], &router[..]].concat();
        let code = v4::OptionCode::ClasslessStaticRoute;
        Some(v4::DhcpOption::Unknown(v4::UnknownOption::new(code, routes)))
    }
}

/// The fields of a DHCPv6 client's message that this server reads (RFC 8415 section 8). It is parsed here for the same
/// reason.
#[derive(Default)]
struct RequestV6<'a> {
    xid: [u8; 3],
    client: Option<&'a [u8]>,
    server: Option<&'a [u8]>,
    is_rapid: bool,
    /// The identifiers of its associations (IA_NA).
    associations: Vec<u32>,
    /// The addresses in them.
    addresses: Vec<Ipv6Addr>,
}

/// Options (RFC 8415 section 21).
const CLIENT_ID_V6: u16 = 1;
const SERVER_ID_V6: u16 = 2;
const IA_NA: u16 = 3;
const IA_ADDRESS: u16 = 5;
const RAPID_COMMIT_V6: u16 = 14;
/// At most this many associations of a message, and addresses in them, count: a guest has one interface.
const MAX_ASSOCIATIONS: usize = 8;

impl<'a> RequestV6<'a> {
    /// The message and its type.
    fn parse(bytes: &'a [u8]) -> Option<(v6::MessageType, RequestV6<'a>)> {
        let [kind, a, b, c, options @ ..] = bytes else { return None };
        let mut request = RequestV6 { xid: [*a, *b, *c], ..RequestV6::default() };
        each_option(options, &mut |code, value| request.take(code, value))?;
        Some((v6::MessageType::from(*kind), request))
    }

    /// Takes an option; `None` if its length is wrong.
    fn take(&mut self, code: u16, value: &'a [u8]) -> Option<()> {
        match code {
            CLIENT_ID_V6 => self.client = Some(value),
            SERVER_ID_V6 => self.server = Some(value),
            RAPID_COMMIT_V6 => self.is_rapid = true,
            IA_NA if self.associations.len() < MAX_ASSOCIATIONS => {
                let (id, options) = value.split_at_checked(12)?;
                self.associations.push(u32::from_be_bytes(id.get(..4)?.try_into().ok()?));
                each_option(options, &mut |code, value| {
                    if code == IA_ADDRESS && self.addresses.len() < MAX_ASSOCIATIONS {
                        let address: [u8; 16] = value.get(..16)?.try_into().ok()?;
                        self.addresses.push(address.into());
                    }
                    Some(())
                })?;
            }
            _ => {}
        }
        Some(())
    }
}

/// Calls `take` with each option; `None` if one is longer than the message, or as `take` says.
fn each_option<'a>(
    mut options: &'a [u8],
    take: &mut dyn FnMut(u16, &'a [u8]) -> Option<()>,
) -> Option<()> {
    while !options.is_empty() {
        let (header, rest) = options.split_at_checked(4)?;
        let [code, length] = [[header[0], header[1]], [header[2], header[3]]];
        let (value, rest) = rest.split_at_checked(u16::from_be_bytes(length).into())?;
        take(u16::from_be_bytes(code), value)?;
        options = rest;
    }
    Some(())
}

/// The answer to a DHCPv6 message, if it has one.
pub(crate) fn answer_v6(request: &[u8], lease: &LeaseV6) -> Option<Vec<u8>> {
    let (asked, request) = RequestV6::parse(request)?;
    let (kind, needs_server) = match asked {
        v6::MessageType::Solicit if request.is_rapid => (v6::MessageType::Reply, false),
        v6::MessageType::Solicit => (v6::MessageType::Advertise, false),
        v6::MessageType::Request | v6::MessageType::Renew | v6::MessageType::Release => {
            (v6::MessageType::Reply, true)
        }
        v6::MessageType::Rebind
        | v6::MessageType::Confirm
        | v6::MessageType::InformationRequest => (v6::MessageType::Reply, false),
        _ => return None,
    };
    // RFC 8415 section 16: a message for another server, and one that names none where it must, is discarded.
    if request.server.is_some_and(|id| id != lease.duid)
        || (needs_server && request.server.is_none())
    {
        return None;
    }
    if request.client.is_none() && asked != v6::MessageType::InformationRequest {
        return None;
    }
    let mut reply = v6::Message::new_with_id(kind, request.xid);
    let options = reply.opts_mut();
    if let Some(id) = request.client {
        options.insert(v6::DhcpOption::ClientId(id.to_vec()));
    }
    options.insert(v6::DhcpOption::ServerId(lease.duid.clone()));
    if request.is_rapid && asked == v6::MessageType::Solicit {
        options.insert(v6::DhcpOption::RapidCommit);
    }
    match asked {
        v6::MessageType::InformationRequest => {}
        v6::MessageType::Release => options.insert(status(v6::Status::Success)),
        v6::MessageType::Confirm if request.addresses.iter().all(|a| *a == lease.address) => {
            options.insert(status(v6::Status::Success));
        }
        v6::MessageType::Confirm => options.insert(status(v6::Status::NotOnLink)),
        _ => request.associations.iter().for_each(|id| options.insert(lease.association(*id))),
    }
    if !lease.nameservers.is_empty() {
        options.insert(v6::DhcpOption::DomainNameServers(lease.nameservers.clone()));
    }
    let search = names(&lease.search);
    if !search.is_empty() {
        options.insert(v6::DhcpOption::DomainSearchList(search));
    }
    encoded(&reply)
}

impl LeaseV6 {
    fn association(&self, id: u32) -> v6::DhcpOption {
        let mut opts = v6::DhcpOptions::new();
        opts.insert(v6::DhcpOption::IAAddr(v6::IAAddr {
            addr: self.address,
            preferred_life: FOREVER,
            valid_life: FOREVER,
            opts: v6::DhcpOptions::new(),
        }));
        v6::DhcpOption::IANA(v6::IANA { id, t1: FOREVER, t2: FOREVER, opts })
    }
}

fn status(status: v6::Status) -> v6::DhcpOption {
    v6::DhcpOption::StatusCode(v6::StatusCode { status, msg: String::new() })
}

/// Domains that are not valid names are left out.
fn names(domains: &[String]) -> Vec<Name> {
    domains.iter().filter_map(|domain| Name::from_ascii(domain).ok()).collect()
}

fn encoded(message: &impl Encodable) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    message.encode(&mut Encoder::new(&mut bytes)).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dhcproto::{Decodable, Decoder};
    use proptest::prelude::*;

    fn lease() -> Lease {
        Lease {
            address: Ipv4Addr::new(192, 0, 2, 5),
            prefix_len: 24,
            server: Ipv4Addr::new(192, 0, 2, 1),
            router: Some(Ipv4Addr::new(192, 0, 2, 1)),
            mtu: Some(65520),
            nameservers: vec![Ipv4Addr::new(192, 0, 2, 53)],
            search: vec!["example.org".into(), "not a name..".into()],
        }
    }

    fn lease_v6() -> LeaseV6 {
        LeaseV6 {
            address: "fd05::5".parse().unwrap(),
            duid: vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 1],
            nameservers: vec!["fd05::53".parse().unwrap()],
            search: vec!["example.org".into()],
        }
    }

    fn message(kind: v4::MessageType, more: &[v4::DhcpOption]) -> v4::Message {
        let mut m = v4::Message::default();
        m.set_xid(7).set_chaddr(&[2, 0, 0, 0, 0, 9]);
        m.opts_mut().insert(v4::DhcpOption::MessageType(kind));
        more.iter().for_each(|option| drop(m.opts_mut().insert(option.clone())));
        m
    }

    fn reply(request: &v4::Message) -> Option<v4::Message> {
        let bytes = answer(&encoded(request).unwrap(), &lease())?;
        Some(v4::Message::decode(&mut Decoder::new(&bytes)).unwrap())
    }

    #[test]
    fn a_client_is_offered_and_given_the_lease() {
        let offer = reply(&message(v4::MessageType::Discover, &[])).unwrap();
        assert_eq!(offer.opts().msg_type(), Some(v4::MessageType::Offer));
        assert_eq!((offer.yiaddr(), offer.xid()), (lease().address, 7));
        assert_eq!(&offer.chaddr()[..6], [2, 0, 0, 0, 0, 9]);
        let request = message(
            v4::MessageType::Request,
            &[
                v4::DhcpOption::RequestedIpAddress(lease().address),
                v4::DhcpOption::ServerIdentifier(lease().server),
            ],
        );
        let ack = reply(&request).unwrap();
        assert_eq!(ack.opts().msg_type(), Some(v4::MessageType::Ack));
        for option in [
            v4::DhcpOption::SubnetMask(Ipv4Addr::new(255, 255, 255, 0)),
            v4::DhcpOption::Router(vec![lease().server]),
            v4::DhcpOption::InterfaceMtu(65520),
            v4::DhcpOption::DomainNameServer(lease().nameservers),
            v4::DhcpOption::AddressLeaseTime(FOREVER),
        ] {
            assert!(ack.opts().iter().any(|(_, o)| *o == option), "{option:?}");
        }
        assert!(ack.opts().contains(v4::OptionCode::DomainSearch));
    }

    #[test]
    fn a_router_outside_of_the_prefix_comes_with_a_route_to_itself() {
        let alone = Lease { prefix_len: 32, ..lease() };
        let request = encoded(&message(v4::MessageType::Discover, &[])).unwrap();
        let offer = answer(&request, &alone).unwrap();
        let routes = [121, 14, 32, 192, 0, 2, 1, 0, 0, 0, 0, 0, 192, 0, 2, 1];
        let has = |bytes: &[u8]| bytes.windows(routes.len()).any(|window| window == routes);
        assert!(has(&offer) && !has(&answer(&request, &lease()).unwrap()));
    }

    #[test]
    fn rapid_commit_saves_a_round_trip() {
        let ack =
            reply(&message(v4::MessageType::Discover, &[v4::DhcpOption::RapidCommit])).unwrap();
        assert_eq!(ack.opts().msg_type(), Some(v4::MessageType::Ack));
        assert!(ack.opts().contains(v4::OptionCode::RapidCommit));
    }

    #[test]
    fn another_address_is_refused_and_another_server_left_alone() {
        let other = v4::DhcpOption::RequestedIpAddress(Ipv4Addr::new(10, 0, 0, 9));
        let nak = reply(&message(v4::MessageType::Request, &[other])).unwrap();
        assert_eq!(nak.opts().msg_type(), Some(v4::MessageType::Nak));
        assert_eq!(nak.yiaddr(), Ipv4Addr::UNSPECIFIED);
        let elsewhere = v4::DhcpOption::ServerIdentifier(Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(reply(&message(v4::MessageType::Request, &[elsewhere])), None);
        for silent in [v4::MessageType::Release, v4::MessageType::Decline, v4::MessageType::Offer] {
            assert_eq!(reply(&message(silent, &[])), None);
        }
    }

    #[test]
    fn a_client_with_an_address_gets_the_options_alone() {
        let ack = reply(&message(v4::MessageType::Inform, &[])).unwrap();
        assert_eq!(
            (ack.opts().msg_type(), ack.yiaddr()),
            (Some(v4::MessageType::Ack), Ipv4Addr::UNSPECIFIED)
        );
        assert!(!ack.opts().contains(v4::OptionCode::AddressLeaseTime));
        assert!(ack.opts().contains(v4::OptionCode::Router));
    }

    fn message_v6(kind: v6::MessageType, more: Vec<v6::DhcpOption>) -> v6::Message {
        let mut m = v6::Message::new_with_id(kind, [1, 2, 3]);
        m.opts_mut().insert(v6::DhcpOption::ClientId(vec![9; 10]));
        more.into_iter().for_each(|option| m.opts_mut().insert(option));
        m
    }

    fn reply_v6(request: &v6::Message) -> Option<v6::Message> {
        let bytes = answer_v6(&encoded(request).unwrap(), &lease_v6())?;
        Some(v6::Message::decode(&mut Decoder::new(&bytes)).unwrap())
    }

    fn association(id: u32) -> v6::DhcpOption {
        v6::DhcpOption::IANA(v6::IANA { id, t1: 0, t2: 0, opts: v6::DhcpOptions::new() })
    }

    #[test]
    fn a_dhcpv6_client_is_advertised_and_given_the_lease() {
        let advert = reply_v6(&message_v6(v6::MessageType::Solicit, vec![association(5)])).unwrap();
        assert_eq!((advert.msg_type(), advert.xid()), (v6::MessageType::Advertise, [1, 2, 3]));
        assert!(advert.opts().iter().any(|o| *o == lease_v6().association(5)));
        let server = v6::DhcpOption::ServerId(lease_v6().duid);
        let request = message_v6(v6::MessageType::Request, vec![server, association(5)]);
        let given = reply_v6(&request).unwrap();
        assert_eq!(given.msg_type(), v6::MessageType::Reply);
        assert!(given.opts().get(v6::OptionCode::DomainNameServers).is_some());
        let rapid = vec![v6::DhcpOption::RapidCommit, association(5)];
        let at_once = reply_v6(&message_v6(v6::MessageType::Solicit, rapid)).unwrap();
        assert_eq!(at_once.msg_type(), v6::MessageType::Reply);
    }

    #[test]
    fn dhcpv6_messages_for_others_and_without_their_identifiers_are_discarded() {
        let other = v6::DhcpOption::ServerId(vec![1, 2, 3]);
        assert_eq!(
            reply_v6(&message_v6(v6::MessageType::Request, vec![other, association(1)])),
            None
        );
        assert_eq!(reply_v6(&message_v6(v6::MessageType::Request, vec![association(1)])), None);
        let anonymous = v6::Message::new(v6::MessageType::Solicit);
        assert_eq!(reply_v6(&anonymous), None);
        let information = v6::Message::new(v6::MessageType::InformationRequest);
        assert!(reply_v6(&information).is_some());
        assert_eq!(reply_v6(&message_v6(v6::MessageType::Advertise, vec![])), None);
    }

    #[test]
    fn an_address_of_another_link_is_not_confirmed() {
        let held = |address: &str| {
            let mut opts = v6::DhcpOptions::new();
            opts.insert(v6::DhcpOption::IAAddr(v6::IAAddr {
                addr: address.parse().unwrap(),
                preferred_life: 0,
                valid_life: 0,
                opts: v6::DhcpOptions::new(),
            }));
            vec![v6::DhcpOption::IANA(v6::IANA { id: 1, t1: 0, t2: 0, opts })]
        };
        for (address, expected) in
            [("fd05::5", v6::Status::Success), ("fd99::1", v6::Status::NotOnLink)]
        {
            let given = reply_v6(&message_v6(v6::MessageType::Confirm, held(address))).unwrap();
            assert!(given.opts().iter().any(|o| *o == status(expected)), "{address}");
        }
    }

    proptest! {
        /// A guest may send anything.
        #[test]
        fn arbitrary_messages_do_not_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
            at in any::<prop::sample::Index>(),
            value in any::<u8>(),
        ) {
            let _ = (answer(&bytes, &lease()), answer_v6(&bytes, &lease_v6()));
            let mut valid = encoded(&message(v4::MessageType::Discover, &[])).unwrap();
            let n = at.index(valid.len());
            valid[n] = value;
            bytes.splice(0..0, valid);
            let _ = answer(&bytes, &lease());
            let solicit = message_v6(v6::MessageType::Solicit, vec![association(1), association(2)]);
            let mut valid = encoded(&solicit).unwrap();
            let n = at.index(valid.len());
            valid[n] = value;
            let _ = answer_v6(&valid, &lease_v6());
        }
    }
}
