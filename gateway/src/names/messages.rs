//! DNS messages of the names: the gateway's questions to the host's resolvers, what their answers say, and the answers
//! that the guest gets.
//!
//! `hickory-proto` reads and writes the messages. An answer that it cannot read as a whole is a failure of the resolver.

use std::net::{IpAddr, Ipv6Addr};

use std::sync::Arc;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::pins::{Candidates, Half};

/// Aliases that are followed from a name to its addresses.
const MOST_ALIASES: usize = 16;
/// Addresses of one answer that are taken.
const MOST_ADDRESSES: usize = 32;
/// Bytes of a datagram that every path carries (RFC 9715 recommends at most 1,400).
const UDP_PAYLOAD: u16 = 1232;
/// The option Extended DNS Error and its code Blocked (RFC 8914 sections 2 and 4.16).
const EXTENDED_ERROR: u16 = 15;
const BLOCKED: [u8; 2] = [0, 15];

/// A question for the addresses of a name. The identifier is set when it is sent. `None`: the name is not one of DNS.
pub(crate) fn question(name: &str, is_v4: bool) -> Option<Vec<u8>> {
    let mut message = Message::new(0, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    let kind = if is_v4 { RecordType::A } else { RecordType::AAAA };
    let mut absolute = Name::from_ascii(name).ok()?;
    absolute.set_fqdn(true);
    message.add_query(Query::query(absolute, kind));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_PAYLOAD);
    message.set_edns(edns);
    message.to_vec().ok()
}

/// A question of the guest as a server gets it: without options, flags and whatever follows, which could carry a message.
/// `None`: it is not one question of class IN.
pub(crate) fn plain(asked: &[u8]) -> Option<Vec<u8>> {
    let guest = Message::from_vec(asked).ok()?;
    let [query] = guest.queries.as_slice() else { return None };
    if query.query_class() != DNSClass::IN {
        return None;
    }
    let mut message = Message::new(guest.metadata.id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(query.clone());
    if let Some(of_guest) = &guest.edns {
        let mut edns = Edns::new();
        edns.set_max_payload(of_guest.max_payload().clamp(512, UDP_PAYLOAD));
        edns.set_dnssec_ok(of_guest.flags().dnssec_ok);
        message.set_edns(edns);
    }
    message.to_vec().ok()
}

/// What an answer says about the addresses of one IP version.
pub(crate) fn half_of(answer: &[u8], is_v4: bool) -> Half {
    let Ok(message) = Message::from_vec(answer) else { return Half::Failed };
    let [query] = message.queries.as_slice() else { return Half::Failed };
    if message.metadata.message_type != MessageType::Response {
        return Half::Failed;
    }
    if message.metadata.truncation {
        // The addresses that had space are enough.
        return match addresses_of(query.name(), &message.answers, is_v4) {
            Half::NoAddress => Half::Failed,
            some => some,
        };
    }
    match message.metadata.response_code {
        ResponseCode::NoError => addresses_of(query.name(), &message.answers, is_v4),
        ResponseCode::NXDomain => Half::NoName,
        _ => Half::Failed,
    }
}

/// The addresses of a name and of the names that its aliases lead to. Records of other names do not count.
fn addresses_of(asked: &Name, answers: &[Record], is_v4: bool) -> Half {
    let of = |owner: &Name| {
        let owner = owner.clone();
        answers.iter().filter(move |r| r.name == owner && r.dns_class == DNSClass::IN)
    };
    let (mut owner, mut lifetime) = (asked.clone(), u32::MAX);
    for _ in 0..=MOST_ALIASES {
        let mut list = Candidates::new();
        for record in of(&owner) {
            let Some(address) = address_of(&record.data, is_v4) else { continue };
            if list.len() < MOST_ADDRESSES {
                list.push(address);
                lifetime = lifetime.min(record.ttl);
            }
        }
        if !list.is_empty() {
            return Half::Addresses(list, lifetime);
        }
        let alias = of(&owner).find_map(|record| match &record.data {
            RData::CNAME(to) => Some((to.0.clone(), record.ttl)),
            _ => None,
        });
        let Some((to, ttl)) = alias else { return Half::NoAddress };
        (owner, lifetime) = (to, lifetime.min(ttl));
    }
    Half::Failed
}

fn address_of(data: &RData, is_v4: bool) -> Option<IpAddr> {
    match data {
        RData::A(a) if is_v4 => Some(a.0.into()),
        // An IPv4-mapped address is one of IPv4.
        RData::AAAA(aaaa) if !is_v4 => Some(IpAddr::V6(aaaa.0).to_canonical()),
        _ => None,
    }
}

/// The address that a name for a reverse look-up stands for (RFC 1035 section 3.5, RFC 3596 section 2.5).
pub(crate) fn reversed(name: &str) -> Option<IpAddr> {
    let labels = |end| name.strip_suffix(end).map(|front| front.split('.').rev());
    if let Some(labels) = labels(".in-addr.arpa") {
        let octets: Vec<u8> = labels.map(|l| l.parse().ok()).collect::<Option<_>>()?;
        return <[u8; 4]>::try_from(octets).ok().map(IpAddr::from);
    }
    let digit = |label: &str| match label.as_bytes() {
        [digit] => char::from(*digit).to_digit(16),
        _ => None,
    };
    let digits: Vec<u32> = labels(".ip6.arpa")?.map(digit).collect::<Option<_>>()?;
    let bits = |bits: u128, digit: &u32| bits << 4 | u128::from(*digit);
    (digits.len() == 32).then(|| Ipv6Addr::from_bits(digits.iter().fold(0, bits)).into())
}

/// What the guest is answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Reply {
    /// The name of an address, for this number of seconds.
    Name(Arc<str>, u32),
    /// An address, for this number of seconds.
    Address(IpAddr, u32),
    /// The name exists and has nothing of what was asked for.
    Nothing,
    /// The name does not exist.
    NoName,
    /// The resolvers have failed, or the table of names is full.
    Failed,
    /// The policy refuses the name.
    Blocked,
}

/// The answer to a question of the guest. `None`: the message is not a question.
pub(crate) fn reply(asked: &[u8], reply: Reply) -> Option<Vec<u8>> {
    let question = Message::from_vec(asked).ok()?;
    let [query] = question.queries.as_slice() else { return None };
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.metadata.response_code = match &reply {
        Reply::Name(..) | Reply::Address(..) | Reply::Nothing => ResponseCode::NoError,
        Reply::NoName => ResponseCode::NXDomain,
        Reply::Failed => ResponseCode::ServFail,
        Reply::Blocked => ResponseCode::Refused,
    };
    answer.add_query(query.clone());
    let data = match &reply {
        Reply::Address(IpAddr::V4(v4), seconds) => Some((RData::A((*v4).into()), *seconds)),
        Reply::Address(IpAddr::V6(v6), seconds) => Some((RData::AAAA((*v6).into()), *seconds)),
        Reply::Name(name, seconds) => {
            let mut name = Name::from_ascii(name).ok()?;
            name.set_fqdn(true);
            Some((RData::PTR(PTR(name)), *seconds))
        }
        _ => None,
    };
    if let Some((data, seconds)) = data {
        answer.add_answer(Record::from_rdata(query.name().clone(), seconds, data));
    }
    if question.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_PAYLOAD);
        if reply == Reply::Blocked {
            edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, BLOCKED.to_vec()));
        }
        answer.set_edns(edns);
    }
    answer.to_vec().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn alias(owner: &str, to: &str, ttl: u32) -> Record {
        let data = RData::CNAME(hickory_proto::rr::rdata::CNAME(name(to)));
        Record::from_rdata(name(owner), ttl, data)
    }

    fn address(owner: &str, text: &str, ttl: u32) -> Record {
        let data = match text.parse().unwrap() {
            IpAddr::V4(v4) => RData::A(v4.into()),
            IpAddr::V6(v6) => RData::AAAA(v6.into()),
        };
        Record::from_rdata(name(owner), ttl, data)
    }

    fn answered(asked: &str, code: ResponseCode, records: Vec<Record>) -> Vec<u8> {
        let mut message =
            Message::from_vec(&question(asked, true).unwrap()).unwrap().into_response();
        message.metadata.response_code = code;
        message.add_answers(records);
        message.to_vec().unwrap()
    }

    fn addresses(all: &[&str], seconds: u32) -> Half {
        Half::Addresses(all.iter().map(|text| text.parse().unwrap()).collect(), seconds)
    }

    #[test]
    fn addresses_are_found_through_aliases_in_any_order_with_the_least_lifetime() {
        let records = vec![
            address("edge.cdn.example.", "192.0.2.1", 300),
            address("EDGE.cdn.example.", "192.0.2.2", 200),
            alias("www.example.org.", "edge.cdn.example.", 60),
        ];
        let answer = answered("www.example.org", ResponseCode::NoError, records);
        assert_eq!(half_of(&answer, true), addresses(&["192.0.2.1", "192.0.2.2"], 60));
        assert_eq!(half_of(&answer, false), Half::NoAddress);
    }

    #[test]
    fn records_of_other_names_do_not_count() {
        let records = vec![
            address("evil.example.", "203.0.113.9", 60),
            alias("other.example.", "evil.example.", 60),
        ];
        let answer = answered("www.example.org", ResponseCode::NoError, records);
        assert_eq!(half_of(&answer, true), Half::NoAddress);
    }

    #[test]
    fn a_loop_of_aliases_and_a_long_chain_are_failures() {
        let looped =
            vec![alias("a.example.", "b.example.", 1), alias("b.example.", "a.example.", 1)];
        assert_eq!(
            half_of(&answered("a.example", ResponseCode::NoError, looped), true),
            Half::Failed
        );
        let chain = |length: usize| {
            let mut records: Vec<_> = (0..length)
                .map(|n| alias(&format!("n{n}.example."), &format!("n{}.example.", n + 1), 9))
                .collect();
            records.push(address(&format!("n{length}.example."), "192.0.2.1", 9));
            half_of(&answered("n0.example", ResponseCode::NoError, records), true)
        };
        assert_eq!(chain(MOST_ALIASES), addresses(&["192.0.2.1"], 9));
        assert_eq!(chain(MOST_ALIASES + 1), Half::Failed);
    }

    #[test]
    fn hundreds_of_addresses_are_cut_to_the_bound() {
        let records = (0..300u32)
            .map(|n| address("many.example.", &std::net::Ipv4Addr::from_bits(n + 1).to_string(), 9))
            .collect();
        let Half::Addresses(list, 9) =
            half_of(&answered("many.example", ResponseCode::NoError, records), true)
        else {
            panic!("no addresses");
        };
        assert_eq!(list.len(), MOST_ADDRESSES);
    }

    #[test]
    fn codes_truncation_and_torn_messages_are_told_apart() {
        let of = |code| half_of(&answered("a.example", code, Vec::new()), true);
        assert_eq!(of(ResponseCode::NXDomain), Half::NoName);
        assert_eq!(of(ResponseCode::NoError), Half::NoAddress);
        for code in [ResponseCode::ServFail, ResponseCode::Refused, ResponseCode::FormErr] {
            assert_eq!(of(code), Half::Failed, "{code}");
        }
        let records = vec![address("a.example.", "192.0.2.1", 9)];
        let whole = answered("a.example", ResponseCode::NoError, records);
        let mut truncated = whole.clone();
        truncated[2] |= 2;
        assert_eq!(half_of(&truncated, true), addresses(&["192.0.2.1"], 9));
        assert_eq!(half_of(&truncated, false), Half::Failed, "they may be missing");
        for n in 0..whole.len() {
            assert_eq!(half_of(&whole[..n], true), Half::Failed, "{n} bytes");
        }
        assert_eq!(
            half_of(&question("a.example", true).unwrap(), true),
            Half::Failed,
            "a question"
        );
    }

    #[test]
    fn the_guest_gets_an_address_with_its_own_letters_and_identifier() {
        let mut asked = question("Www.Example.org", true).unwrap();
        asked[..2].copy_from_slice(&[7, 9]);
        let given: IpAddr = "198.18.0.2".parse().unwrap();
        let answer = Message::from_vec(&reply(&asked, Reply::Address(given, 60)).unwrap()).unwrap();
        assert_eq!(answer.metadata.id, 0x0709);
        assert!(answer.queries[0].name().eq_case(&name("Www.Example.org.")));
        assert_eq!(answer.answers, [address("Www.Example.org.", "198.18.0.2", 60)]);
    }

    #[test]
    fn a_server_gets_no_more_than_the_question() {
        let mut asked = question("Www.Example.org", true).unwrap();
        asked[..2].copy_from_slice(&[7, 9]);
        // An option, a flag, another record's place, and bytes behind the end.
        let mut with_more = asked.clone();
        (with_more[3], *with_more.last_mut().unwrap()) = (0x10, 8);
        with_more.extend([0xff, 0xfe, 0, 4, 1, 2, 3, 4, 9, 9]);
        let sent = plain(&with_more).unwrap();
        assert_eq!(sent, asked);
        let mut of_chaos = asked.clone();
        let class = asked.len() - 12;
        assert_eq!(of_chaos[class], 1);
        of_chaos[class] = 3;
        assert_eq!(plain(&of_chaos), None);
    }

    #[test]
    fn the_names_of_reverse_lookups_are_addresses_and_the_answer_is_a_name() {
        assert_eq!(reversed("2.0.18.198.in-addr.arpa"), Some([198, 18, 0, 2].into()));
        let v6 = format!("{}.0.d.f.ip6.arpa", ["1"; 29].join("."));
        assert_eq!(reversed(&v6), Some("fd01:1111:1111:1111:1111:1111:1111:1111".parse().unwrap()));
        for wrong in ["18.198.in-addr.arpa", "256.0.18.198.in-addr.arpa", "1.ip6.arpa", "a.b", ""] {
            assert_eq!(reversed(wrong), None, "{wrong}");
        }
        let mut asked =
            Message::from_vec(&question("2.0.18.198.in-addr.arpa", true).unwrap()).unwrap();
        asked.queries[0].query_type = RecordType::PTR;
        let named = Reply::Name("www.example.org".into(), 60);
        let answer = reply(&asked.to_vec().unwrap(), named).unwrap();
        let answer = Message::from_vec(&answer).unwrap();
        let RData::PTR(PTR(found)) = &answer.answers[0].data else { panic!("{answer:?}") };
        assert_eq!(*found, name("www.example.org."));
    }

    #[test]
    fn a_blocked_name_is_refused_with_an_extended_error_where_the_guest_knows_edns() {
        let asked = question("evil.example", true).unwrap();
        let refused = Message::from_vec(&reply(&asked, Reply::Blocked).unwrap()).unwrap();
        assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
        let edns = refused.edns.expect("the guest sent EDNS");
        let error = edns.option(EXTENDED_ERROR.into());
        assert_eq!(error, Some(&EdnsOption::Unknown(EXTENDED_ERROR, BLOCKED.to_vec())));
        let mut plain = Message::from_vec(&asked).unwrap();
        plain.edns = None;
        let refused = reply(&plain.to_vec().unwrap(), Reply::Blocked).unwrap();
        assert!(Message::from_vec(&refused).unwrap().edns.is_none());
    }
}
