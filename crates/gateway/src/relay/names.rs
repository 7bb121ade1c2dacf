//! Names of addresses, as DNS answers that passed have told them to the guest; for the policy.
//!
//! Read are questions and answers over UDP, one question each (RFC 1035 section 4.1, RFC 9619). An address has
//! the names that were asked for when it was the answer, aliases (CNAME) included. Bounds: [`MOST_ADDRESSES`], of
//! which the oldest is forgotten, and [`MOST_NAMES`] of each.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// Addresses at most.
const MOST_ADDRESSES: usize = 4096;
/// Names of one address at most.
const MOST_NAMES: usize = 8;
/// Records of one answer that are read at most.
const MOST_RECORDS: usize = 64;
const HEADER_BYTES: usize = 12;
/// Longest name (RFC 1035 section 2.3.4).
const MOST_NAME_BYTES: usize = 255;
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;
/// The bits of the second header word: a response, recursion desired and available, the code REFUSED.
const RESPONSE: u16 = 0x8000;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;
const REFUSED: u16 = 5;

/// What addresses are called.
#[derive(Default)]
pub struct Names {
    by_address: HashMap<IpAddr, Vec<String>>,
    /// In the order in which they became known.
    order: VecDeque<IpAddr>,
}

impl Names {
    /// The names of an address, the latest first.
    pub fn of(&self, address: IpAddr) -> &[String] {
        self.by_address.get(&address).map_or(&[], Vec::as_slice)
    }

    /// Reads an answer.
    pub fn learn(&mut self, message: &[u8]) {
        let Some((name, mut at)) = question(message) else { return };
        let is_response = word(message, 2).is_some_and(|flags| flags & RESPONSE != 0);
        let count = word(message, 6).map_or(0, usize::from).min(MOST_RECORDS);
        for _ in 0..if is_response { count } else { 0 } {
            let Some((address, next)) = record(message, at) else { return };
            at = next;
            if let Some(address) = address {
                self.add(address, &name);
            }
        }
    }

    fn add(&mut self, address: IpAddr, name: &str) {
        if !self.by_address.contains_key(&address) {
            if self.order.len() >= MOST_ADDRESSES
                && let Some(oldest) = self.order.pop_front()
            {
                self.by_address.remove(&oldest);
            }
            self.order.push_back(address);
        }
        let names = self.by_address.entry(address).or_default();
        names.retain(|n| n != name);
        names.insert(0, name.to_owned());
        names.truncate(MOST_NAMES);
    }
}

fn word(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(message.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

/// The name that a message asks for, in lower case, and where its question ends.
pub fn question(message: &[u8]) -> Option<(String, usize)> {
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
        if !name.is_empty() {
            name.push('.');
        }
        // Bytes that are no letters of host names are of no rule either.
        name.extend(label.iter().map(|b| char::from(b.to_ascii_lowercase())));
        if name.len() > 2 * MOST_NAME_BYTES {
            return None;
        }
    }
    // Type and class.
    message.get(at..at + 4)?;
    Some((name, at + 4))
}

/// One record: its address, if it has one, and where it ends.
fn record(message: &[u8], at: usize) -> Option<(Option<IpAddr>, usize)> {
    let mut at = at;
    loop {
        let length = usize::from(*message.get(at)?);
        match length {
            0 => at += 1,
            // A pointer ends a name (RFC 1035 section 4.1.4).
            192.. => at += 2,
            64.. => return None,
            _ => {
                at += 1 + length;
                continue;
            }
        }
        break;
    }
    let (kind, length) = (word(message, at)?, usize::from(word(message, at + 8)?));
    let data = message.get(at + 10..at + 10 + length)?;
    let address = match kind {
        TYPE_A => <[u8; 4]>::try_from(data).ok().map(IpAddr::from),
        TYPE_AAAA => <[u8; 16]>::try_from(data).ok().map(IpAddr::from),
        _ => None,
    };
    Some((address, at + 10 + length))
}

/// The answer REFUSED to a question (RFC 1035 section 4.1.1); without the question where it cannot be read.
pub fn refusal(message: &[u8]) -> Option<Vec<u8>> {
    let end = question(message).map_or(HEADER_BYTES, |(_, end)| end);
    let mut answer = message.get(..end)?.to_vec();
    let flags = RESPONSE | word(message, 2)? & RECURSION_DESIRED | RECURSION_AVAILABLE | REFUSED;
    answer[2..4].copy_from_slice(&flags.to_be_bytes());
    // No answers, no authorities, nothing beside.
    answer[6..HEADER_BYTES].fill(0);
    if end == HEADER_BYTES {
        answer[4..6].fill(0);
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asked(name: &str) -> Vec<u8> {
        let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            message.push(label.len() as u8);
            message.extend(label.as_bytes());
        }
        message.extend([0, 0, 1, 0, 1]);
        message
    }

    fn answered(name: &str, addresses: &[[u8; 4]]) -> Vec<u8> {
        let mut message = asked(name);
        (message[2], message[7]) = (0x81, 1 + addresses.len() as u8);
        // An alias first.
        message.extend([192, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 2, 1, b'x']);
        for a in addresses {
            message.extend([1, b'x', 192, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
            message.extend(a);
        }
        message
    }

    #[test]
    fn an_address_has_the_names_that_were_asked_for_the_latest_first() {
        let mut names = Names::default();
        names.learn(&answered("Example.ORG", &[[192, 0, 2, 1], [192, 0, 2, 2]]));
        names.learn(&answered("www.example.net", &[[192, 0, 2, 1]]));
        assert_eq!(names.of([192, 0, 2, 1].into()), ["www.example.net", "example.org"]);
        assert_eq!(names.of([192, 0, 2, 2].into()), ["example.org"]);
        names.learn(&asked("example.com"));
        assert!(names.of([192, 0, 2, 3].into()).is_empty());
    }

    #[test]
    fn what_is_known_is_bounded() {
        let mut names = Names::default();
        for n in 0..=MOST_ADDRESSES as u16 {
            let [a, b] = n.to_be_bytes();
            names.learn(&answered("example.org", &[[10, 0, a, b]]));
        }
        assert_eq!((names.by_address.len(), names.order.len()), (MOST_ADDRESSES, MOST_ADDRESSES));
        assert!(names.of([10, 0, 0, 0].into()).is_empty());
        for n in 0..20 {
            names.learn(&answered(&format!("n{n}.example"), &[[10, 0, 0, 9]]));
        }
        assert_eq!(names.of([10, 0, 0, 9].into()).len(), MOST_NAMES);
    }

    #[test]
    fn messages_that_end_early_or_point_nowhere_are_passed_over() {
        let whole = answered("example.org", &[[192, 0, 2, 1]]);
        for n in 0..whole.len() {
            let mut names = Names::default();
            names.learn(&whole[..n]);
            assert!(names.order.is_empty(), "{n}");
        }
        assert_eq!(question(&[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 192, 12, 0, 1, 0, 1]), None);
    }

    proptest! {
        /// A guest and a server may send anything.
        #[test]
        fn no_message_panics_and_what_is_read_of_it_is_bounded(
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
                let mut names = Names::default();
                names.learn(&message);
                prop_assert!(names.order.len() <= MOST_RECORDS);
                let is_short = |name: &String| name.chars().count() <= message.len().min(2 * MOST_NAME_BYTES);
                prop_assert!(names.by_address.values().flatten().all(is_short));
                if let Some(answer) = refusal(&message) {
                    prop_assert!(answer.len() <= message.len());
                    prop_assert_eq!(&answer[..2], &message[..2]);
                    prop_assert!(answer[2] & 0x80 != 0 && answer[6..HEADER_BYTES] == [0; 6]);
                }
            }
        }
    }

    #[test]
    fn a_refusal_repeats_the_question() {
        let question = asked("example.org");
        let answer = refusal(&question).unwrap();
        assert_eq!((answer[..2].to_vec(), answer[2], answer[3] & 15), (vec![0, 7], 0x81, 5));
        assert_eq!(answer[HEADER_BYTES..], question[HEADER_BYTES..]);
    }
}
