//! Messages of DNS (RFC 1035 section 4.1): questions of the guest, answers to them, and refusals.
//!
//! Everything here reads bytes of the guest or of a server: a message that ends early or points nowhere reads as
//! `None`, and no loop is longer than the message or its bound.

use std::net::IpAddr;

use smallvec::SmallVec;

pub(crate) const HEADER_BYTES: usize = 12;
/// Longest name (RFC 1035 section 2.3.4).
const MOST_NAME_BYTES: usize = 255;
/// Most records of one answer that are read.
pub(crate) const MOST_RECORDS: usize = 128;
/// Most aliases of one name that are followed.
const MOST_ALIASES: usize = 16;
/// Most labels and pointers of one name: a name has 127 labels.
const MOST_LABELS: usize = 192;

pub(crate) const TYPE_A: u16 = 1;
pub(crate) const TYPE_CNAME: u16 = 5;
pub(crate) const TYPE_PTR: u16 = 12;
pub(crate) const TYPE_MX: u16 = 15;
pub(crate) const TYPE_AAAA: u16 = 28;
pub(crate) const TYPE_SRV: u16 = 33;
pub(crate) const TYPE_SVCB: u16 = 64;
pub(crate) const TYPE_HTTPS: u16 = 65;
pub(crate) const CLASS_IN: u16 = 1;

/// The bits of the second header word: a response, its operation, recursion desired and available, the code.
const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;
const RCODE: u16 = 0x000f;

/// A response code (RFC 1035 section 4.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Code(u16);

impl Code {
    pub(crate) const FORMAT_ERROR: Code = Code(1);
    pub(crate) const SERVER_FAILURE: Code = Code(2);
    pub(crate) const NOT_IMPLEMENTED: Code = Code(4);
    pub(crate) const REFUSED: Code = Code(5);

    /// Whether another server is asked, as glibc does (resolv/res_send.c, `next_ns`).
    pub(crate) fn is_failure_of_server(self) -> bool {
        matches!(self, Code::SERVER_FAILURE | Code::NOT_IMPLEMENTED | Code::REFUSED)
    }
}

/// A question: one, of the usual operation, without records that would be an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Question {
    /// In lower case, without the dot at its end. A dot or backslash within a label has a backslash before it.
    pub name: String,
    pub kind: u16,
    pub class: u16,
    /// Where it ends in its message.
    pub end: usize,
}

/// Why a message is not a plain question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unusual {
    /// It is a response, or too short to be answered.
    Unanswerable,
    /// The code that answers it.
    Wrong(Code),
}

fn word(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(message.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

/// The identifier of a message.
pub(crate) fn id(message: &[u8]) -> Option<u16> {
    word(message, 0)
}

/// Whether a message is a response.
pub(crate) fn is_response(message: &[u8]) -> bool {
    word(message, 2).is_some_and(|flags| flags & RESPONSE != 0)
}

/// Whether a message says that it has one question.
pub(crate) fn has_one_question(message: &[u8]) -> bool {
    word(message, 4) == Some(1)
}

/// The code of a response.
pub(crate) fn code(message: &[u8]) -> Option<Code> {
    word(message, 2).map(|flags| Code(flags & RCODE))
}

/// Reads a message of the guest as a question.
pub(crate) fn parse_question(message: &[u8]) -> Result<Question, Unusual> {
    let header = |at| word(message, at).ok_or(Unusual::Unanswerable);
    let (flags, counts) = (header(2)?, [header(4)?, header(6)?, header(8)?]);
    header(10)?;
    match counts {
        _ if flags & RESPONSE != 0 => Err(Unusual::Unanswerable),
        _ if flags & OPCODE != 0 => Err(Unusual::Wrong(Code::NOT_IMPLEMENTED)),
        [1, 0, 0] => question(message).ok_or(Unusual::Wrong(Code::FORMAT_ERROR)),
        _ => Err(Unusual::Wrong(Code::FORMAT_ERROR)),
    }
}

/// The question of a message that has one.
pub(crate) fn question(message: &[u8]) -> Option<Question> {
    if word(message, 4)? != 1 {
        return None;
    }
    let (mut name, mut at) = (String::new(), HEADER_BYTES);
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        match length {
            0 => break,
            // A question comes first, so there is nothing that it could point to.
            64.. => return None,
            _ => {}
        }
        let label = message.get(at..at + length)?;
        at += length;
        if at - HEADER_BYTES >= MOST_NAME_BYTES {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        for b in label {
            if matches!(b, b'.' | b'\\') {
                name.push('\\');
            }
            // Rules have host names only: other bytes match none.
            name.push(char::from(b.to_ascii_lowercase()));
        }
    }
    Some(Question { name, kind: word(message, at)?, class: word(message, at + 2)?, end: at + 4 })
}

/// Whether the last label of a name is a number, which resolvers and proxies take for an address (inet_aton(3)). A rule with
/// such a name is a mistyped address.
pub(crate) fn ends_in_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_decimal = !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit());
    let digits = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    is_decimal || digits.is_some_and(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Whether a name has letters, digits, hyphens and underscores only, and does not end in a number. A dot or a NUL within a
/// label would make another name of it for programs that write it as text.
pub(crate) fn is_host_name(name: &str) -> bool {
    !ends_in_number(name) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// A name in lower case, its labels with their lengths, as it is on the wire without pointers.
type WireName = SmallVec<[u8; 64]>;

/// Reads a name that may end in a pointer (RFC 1035 section 4.1.4), and where it ends.
fn wire_name(message: &[u8], from: usize) -> Option<(WireName, usize)> {
    let (mut name, mut at, mut end) = (WireName::new(), from, None);
    // Pointers lead backwards.
    let mut limit = from;
    for _ in 0..MOST_LABELS {
        let length = usize::from(*message.get(at)?);
        match length {
            0 => return Some((name, end.unwrap_or(at + 1))),
            192.. => {
                let to = usize::from(word(message, at)? & 0x3fff);
                if to >= limit {
                    return None;
                }
                end.get_or_insert(at + 2);
                (at, limit) = (to, to);
            }
            64.. => return None,
            _ => {
                let label = message.get(at..at + 1 + length)?;
                name.extend(label.iter().map(u8::to_ascii_lowercase));
                at += 1 + length;
                if name.len() >= MOST_NAME_BYTES {
                    return None;
                }
            }
        }
    }
    None
}

enum Datum {
    Address(IpAddr),
    Alias(WireName),
}

/// One record of class IN with an address or an alias, and its owner; and where any record ends.
fn record(message: &[u8], at: usize) -> Option<(Option<(WireName, Datum)>, usize)> {
    let (owner, at) = wire_name(message, at)?;
    let (kind, class) = (word(message, at)?, word(message, at + 2)?);
    let (from, length) = (at + 10, usize::from(word(message, at + 8)?));
    let data = message.get(from..from + length)?;
    let datum = match kind {
        _ if class != CLASS_IN => None,
        TYPE_A => <[u8; 4]>::try_from(data).ok().map(|a| Datum::Address(a.into())),
        TYPE_AAAA => <[u8; 16]>::try_from(data).ok().map(|a| Datum::Address(a.into())),
        TYPE_CNAME => match wire_name(message, from)? {
            (alias, end) if end == from + length => Some(Datum::Alias(alias)),
            _ => None,
        },
        _ => None,
    };
    Some((datum.map(|datum| (owner, datum)), from + length))
}

/// The addresses that a response without an error has for the name of its question: the addresses of the name, and of
/// the names that its aliases lead to. A message whose answers cannot be parsed completely has none.
pub(crate) fn addresses(message: &[u8], question: &Question) -> Vec<IpAddr> {
    let is_wanted =
        is_response(message) && code(message) == Some(Code(0)) && question.class == CLASS_IN;
    let read = || {
        let count = usize::from(word(message, 6)?).min(MOST_RECORDS);
        let mut at = question.end;
        let mut records = Vec::new();
        for _ in 0..count {
            let (record, end) = record(message, at)?;
            records.extend(record);
            at = end;
        }
        let (asked, _) = wire_name(message, HEADER_BYTES)?;
        Some(of_chain(asked, &records))
    };
    if is_wanted { read().unwrap_or_default() } else { Vec::new() }
}

/// The addresses of a name and of its aliases.
fn of_chain(asked: WireName, records: &[(WireName, Datum)]) -> Vec<IpAddr> {
    let mut chain = vec![asked];
    while chain.len() <= MOST_ALIASES {
        let next = records.iter().find_map(|(owner, datum)| match datum {
            Datum::Alias(to) if chain.last() == Some(owner) && !chain.contains(to) => Some(to),
            _ => None,
        });
        let Some(next) = next else { break };
        chain.push(next.clone());
    }
    let of_chain = records.iter().filter(|(owner, _)| chain.contains(owner));
    let addresses = of_chain.filter_map(|(_, datum)| match datum {
        Datum::Address(address) => Some(address.to_canonical()),
        Datum::Alias(_) => None,
    });
    addresses.collect()
}

/// An answer that says no more than a code; without the question where it cannot be read. `None`: the message cannot be
/// answered.
pub(crate) fn answer_with(code: Code, message: &[u8]) -> Option<Vec<u8>> {
    if is_response(message) {
        return None;
    }
    let end = question(message).map_or(HEADER_BYTES, |question| question.end);
    let mut answer = message.get(..end)?.to_vec();
    let asked = word(message, 2)? & (RECURSION_DESIRED | OPCODE);
    let flags = RESPONSE | asked | RECURSION_AVAILABLE | code.0;
    answer[2..4].copy_from_slice(&flags.to_be_bytes());
    // No answers, no authorities, nothing beside.
    answer[6..HEADER_BYTES].fill(0);
    if end == HEADER_BYTES {
        answer[4..6].fill(0);
    }
    Some(answer)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A question for the addresses of a name.
    pub(crate) fn asked(name: &str) -> Vec<u8> {
        let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        message.extend(wire(name));
        message.extend([0, 1, 0, 1]);
        message
    }

    fn wire(name: &str) -> Vec<u8> {
        let labels = name
            .split('.')
            .flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()));
        labels.chain([0]).collect()
    }

    /// One record.
    fn record_of(owner: &str, kind: u16, data: &[u8]) -> Vec<u8> {
        let mut record = wire(owner);
        record.extend(kind.to_be_bytes());
        record.extend([0, 1, 0, 0, 0, 9]);
        record.extend((data.len() as u16).to_be_bytes());
        record.extend(data);
        record
    }

    fn with_records(name: &str, records: &[Vec<u8>]) -> Vec<u8> {
        let mut message = asked(name);
        (message[2], message[7]) = (0x81, records.len() as u8);
        message.extend(records.concat());
        message
    }

    /// An answer: the name is an alias of `x`, which has the addresses.
    pub(crate) fn answered(name: &str, addresses: &[[u8; 4]]) -> Vec<u8> {
        let mut message = asked(name);
        (message[2], message[7]) = (0x81, 1 + addresses.len() as u8);
        message.extend([192, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 3, 1, b'x', 0]);
        for a in addresses {
            message.extend([1, b'x', 0, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
            message.extend(a);
        }
        message
    }

    fn read(message: &[u8]) -> Vec<IpAddr> {
        question(message).map_or_else(Vec::new, |q| addresses(message, &q))
    }

    #[test]
    fn an_answer_has_the_addresses_of_the_name_and_of_its_aliases_in_any_order() {
        let (a, b) = ([192, 0, 2, 1], [192, 0, 2, 2]);
        assert_eq!(read(&answered("Example.ORG", &[a, b])), [IpAddr::from(a), b.into()]);
        let (alias, more) = (wire("Alias.example"), wire("deep.example"));
        let records = [
            record_of("deep.example", TYPE_A, &a),
            record_of("alias.EXAMPLE", TYPE_CNAME, &more),
            record_of("example.org", TYPE_CNAME, &alias),
        ];
        assert_eq!(read(&with_records("example.org", &records)), [IpAddr::from(a)]);
        let mapped =
            record_of("x.example", TYPE_AAAA, &[[0; 10].as_slice(), &[255, 255], &b].concat());
        assert_eq!(read(&with_records("x.example", &[mapped])), [IpAddr::from(b)]);
    }

    #[test]
    fn records_of_other_names_and_classes_and_of_errors_are_ignored() {
        let a = [192, 0, 2, 1];
        let of_other = with_records("example.org", &[record_of("example.net", TYPE_A, &a)]);
        assert!(read(&of_other).is_empty());
        let whole = answered("example.org", &[a]);
        let with = |at: usize, byte: u8| {
            let mut changed = whole.clone();
            changed[at] = byte;
            read(&changed)
        };
        let question_class = HEADER_BYTES + wire("example.org").len() + 3;
        let record_class = whole.len() - 4 - 7;
        assert_eq!(read(&whole).len(), 1);
        assert!(with(2, 0x01).is_empty(), "a question");
        assert!(with(3, 1).is_empty(), "FORMERR, with the records of the question");
        assert!(with(3, 5).is_empty(), "REFUSED");
        assert!(with(question_class, 3).is_empty(), "of class CHAOS");
        assert!(with(record_class, 3).is_empty(), "of class CHAOS");
        // In the sections of authority and beside.
        let mut beside = whole.clone();
        (beside[7], beside[9]) = (0, 2);
        assert!(read(&beside).is_empty());
    }

    #[test]
    fn aliases_that_lead_in_a_circle_end() {
        let records = [
            record_of("a.example", TYPE_CNAME, &wire("b.example")),
            record_of("b.example", TYPE_CNAME, &wire("a.example")),
            record_of("b.example", TYPE_A, &[192, 0, 2, 1]),
        ];
        assert_eq!(read(&with_records("a.example", &records)).len(), 1);
        let mut itself = answered("example.org", &[[192, 0, 2, 1]]);
        let owner = itself.len() - 17;
        itself[owner] = 0xc0;
        itself[owner + 1] = owner as u8;
        assert!(read(&itself).is_empty());
    }

    #[test]
    fn only_one_plain_question_is_one() {
        let plain = asked("example.org");
        let with = |at: usize, byte: u8| {
            let mut changed = plain.clone();
            changed[at] = byte;
            parse_question(&changed).map(|q| q.name)
        };
        let found = parse_question(&plain).unwrap();
        assert_eq!((found.name.as_str(), found.kind, found.class), ("example.org", 1, 1));
        assert_eq!(found.end, plain.len());
        assert_eq!(with(2, 0x81), Err(Unusual::Unanswerable), "a response");
        assert_eq!(with(2, 0x29), Err(Unusual::Wrong(Code::NOT_IMPLEMENTED)), "an update");
        for (at, what) in [(5, "two questions"), (7, "an answer"), (9, "an authority")] {
            assert_eq!(with(at, 2), Err(Unusual::Wrong(Code::FORMAT_ERROR)), "{what}");
        }
        assert_eq!(with(5, 0), Err(Unusual::Wrong(Code::FORMAT_ERROR)), "no question");
        assert_eq!(with(11, 1), Ok("example.org".into()), "EDNS");
        for n in 0..plain.len() {
            assert!(parse_question(&plain[..n]).is_err(), "{n}");
        }
        let pointer = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 192, 12, 0, 1, 0, 1];
        assert_eq!(parse_question(&pointer), Err(Unusual::Wrong(Code::FORMAT_ERROR)));
    }

    #[test]
    fn a_dot_within_a_label_is_none_between_labels() {
        let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        message.extend(b"\x0bexample.org\0\0\x01\0\x01");
        assert_eq!(parse_question(&message).unwrap().name, "example\\.org");
    }

    #[test]
    fn messages_that_end_early_have_no_addresses() {
        let whole = answered("example.org", &[[192, 0, 2, 1]]);
        for n in 0..whole.len() {
            assert!(read(&whole[..n]).is_empty(), "{n}");
        }
    }

    #[test]
    fn a_refusal_repeats_the_question() {
        let question = asked("example.org");
        let answer = answer_with(Code::REFUSED, &question).unwrap();
        assert_eq!((answer[..2].to_vec(), answer[2], answer[3] & 15), (vec![0, 7], 0x81, 5));
        assert_eq!(answer[HEADER_BYTES..], question[HEADER_BYTES..]);
        assert_eq!(answer_with(Code::REFUSED, &answer), None, "answers are not answered");
    }

    proptest! {
        /// A guest and a server may send anything.
        #[test]
        fn arbitrary_messages_do_not_panic_and_reading_is_bounded(
            tail in proptest::collection::vec(any::<u8>(), 0..300),
            at in any::<prop::sample::Index>(),
            value in any::<u8>(),
        ) {
            let whole = answered("a.example.org", &[[192, 0, 2, 1], [192, 0, 2, 2]]);
            let mut changed = whole.clone();
            changed[at.index(whole.len())] = value;
            let mut longer = changed.clone();
            longer.extend(&tail);
            let behind = [&whole[..HEADER_BYTES], &tail].concat();
            for message in [changed, longer, behind, tail] {
                prop_assert!(read(&message).len() <= MOST_RECORDS);
                let _ = parse_question(&message);
                if let Some(q) = question(&message) {
                    prop_assert!(q.end <= message.len() && q.name.chars().count() <= 2 * MOST_NAME_BYTES);
                }
                if let Some(answer) = answer_with(Code::REFUSED, &message) {
                    prop_assert!(answer.len() <= message.len());
                    prop_assert_eq!(&answer[..2], &message[..2]);
                    prop_assert!(answer[2] & 0x80 != 0 && answer[6..HEADER_BYTES] == [0; 6]);
                }
            }
        }
    }
}
