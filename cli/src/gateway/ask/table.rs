//! The questions to the user, and the answers: no clock, no I/O.
//!
//! A question is about a transport, a host and a port, and all flows to it share it. Its answer holds for [`HOLDS`] or
//! for the run. Bounds: [`MOST_OPEN`] questions at a time, each for [`LONGEST`], and [`MOST_KNOWN`] answers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fulmar_gateway::policy::{NewFlow, Protocol};
use serde::{Deserialize, Serialize};

/// Most questions that wait for an answer. What else is asked meanwhile is refused.
pub(super) const MOST_OPEN: usize = 16;
/// How long a question waits. Then it is refused.
pub(super) const LONGEST: Duration = Duration::from_secs(60);
/// How long an answer holds that is not for the run. A program that was refused may try again and again, and one that
/// was allowed may begin with the lookup of a name, or send its datagram once more.
pub(super) const HOLDS: Duration = Duration::from_secs(30);
/// Most destinations whose answers are remembered. What else is asked then is refused.
const MOST_KNOWN: usize = 1024;

/// The destination of a question.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Key {
    pub protocol: Protocol,
    pub host: Host,
    /// 0: that of an echo request.
    pub port: u16,
}

/// A host as the program knows it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Host {
    Name(String),
    Address(IpAddr),
}

impl Key {
    pub(super) fn of(flow: &NewFlow<'_>) -> Key {
        let host = flow
            .name
            .map_or(Host::Address(flow.to.ip().to_canonical()), |name| Host::Name(name.to_owned()));
        Key { protocol: flow.protocol, host, port: flow.to.port() }
    }
}

/// The user's answer.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum Answer {
    Once,
    Always,
    No,
    Never,
}

/// What is known of a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Known {
    Allowed,
    Refused(Why),
    /// There is an open question. `Some`: it is new, and has this number.
    Open(Option<u64>),
}

/// Why a destination is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    ByUser,
    TimedOut,
    MostOpen,
    MostKnown,
    Unread,
    Ended,
}

impl Why {
    pub(super) fn sentence(self) -> &'static str {
        match self {
            Why::ByUser => "--ask: refused by the user",
            Why::TimedOut => "--ask: no answer in time",
            Why::MostOpen => "--ask: too many questions are open",
            Why::MostKnown => "--ask: too many destinations were asked about",
            Why::Unread => "--ask: the questions are not read",
            Why::Ended => "--ask: the questions have ended",
        }
    }
}

struct Open {
    id: u64,
    key: Key,
    until: Instant,
}

struct Answered {
    /// `None`: it is allowed.
    refused: Option<Why>,
    /// `None`: to the end of the run.
    until: Option<Instant>,
}

impl Answered {
    fn holds(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// The questions and answers of a run.
#[derive(Default)]
pub(super) struct Table {
    open: Vec<Open>,
    answered: HashMap<Key, Answered>,
    last_id: u64,
    has_ended: bool,
}

impl Table {
    /// Asks about a destination, unless that is answered or asked.
    pub(super) fn ask(&mut self, key: &Key, now: Instant) -> Known {
        self.expire(now);
        if let Some(answered) = self.answered.get(key).filter(|answered| answered.holds(now)) {
            return answered.refused.map_or(Known::Allowed, Known::Refused);
        }
        if self.has_ended {
            return Known::Refused(Why::Ended);
        }
        if self.open.iter().any(|open| open.key == *key) {
            return Known::Open(None);
        }
        if self.open.len() >= MOST_OPEN {
            return Known::Refused(Why::MostOpen);
        }
        let has_place = |table: &Table| table.answered.len() + table.open.len() < MOST_KNOWN;
        if !has_place(self) {
            self.answered.retain(|_, answered| answered.holds(now));
        }
        if !has_place(self) {
            return Known::Refused(Why::MostKnown);
        }
        self.last_id += 1;
        self.open.push(Open { id: self.last_id, key: key.clone(), until: now + LONGEST });
        Known::Open(Some(self.last_id))
    }

    /// A question has its answer. False: it is not open.
    pub(super) fn answer(&mut self, id: u64, answer: Answer, now: Instant) -> bool {
        self.expire(now);
        let (refused, until) = match answer {
            Answer::Once => (None, Some(now + HOLDS)),
            Answer::Always => (None, None),
            Answer::No => (Some(Why::ByUser), Some(now + HOLDS)),
            Answer::Never => (Some(Why::ByUser), None),
        };
        self.settle(|open| (open.id == id).then_some(Answered { refused, until }))
    }

    /// A question could not be asked.
    pub(super) fn withdraw(&mut self, id: u64) {
        self.open.retain(|open| open.id != id);
    }

    /// There are no more answers.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
        self.open.clear();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether the user has allowed a destination at some time.
    pub(super) fn was_allowed(&self, key: &Key) -> bool {
        self.answered.get(key).is_some_and(|answered| answered.refused.is_none())
    }

    fn expire(&mut self, now: Instant) {
        let late = |until| Answered { refused: Some(Why::TimedOut), until: Some(until + HOLDS) };
        self.settle(|open| (open.until <= now).then(|| late(open.until)));
    }

    /// Takes the answers of open questions. False: there is none.
    fn settle(&mut self, answer_of: impl Fn(&Open) -> Option<Answered>) -> bool {
        let Table { open, answered, .. } = self;
        let before = open.len();
        open.retain(|open| match answer_of(open) {
            Some(answer) => {
                answered.insert(open.key.clone(), answer);
                false
            }
            None => true,
        });
        open.len() < before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: usize) -> Key {
        Key { protocol: Protocol::Tcp, host: Host::Name(format!("n{number}.example")), port: 443 }
    }

    fn after(seconds: u64, since: Instant) -> Instant {
        since + Duration::from_secs(seconds)
    }

    #[test]
    fn flows_to_one_destination_share_a_question_and_its_answer_for_a_time_or_the_run() {
        let (mut table, now) = (Table::default(), Instant::now());
        assert_eq!(table.ask(&key(1), now), Known::Open(Some(1)));
        assert_eq!(table.ask(&key(1), now), Known::Open(None));
        let other = Key { port: 80, ..key(1) };
        assert_eq!(table.ask(&other, now), Known::Open(Some(2)), "another port");
        assert!(table.answer(1, Answer::Once, now) && table.answer(2, Answer::Never, now));
        assert_eq!(table.ask(&key(1), after(29, now)), Known::Allowed);
        assert_eq!(table.ask(&key(1), after(30, now)), Known::Open(Some(3)));
        assert!(table.answer(3, Answer::Always, after(31, now)));
        assert_eq!(table.ask(&key(1), after(9999, now)), Known::Allowed);
        assert_eq!(table.ask(&other, after(9999, now)), Known::Refused(Why::ByUser));
    }

    #[test]
    fn an_answer_to_no_open_question_changes_nothing() {
        let (mut table, now) = (Table::default(), Instant::now());
        assert!(!table.answer(1, Answer::Always, now), "it was not asked");
        table.ask(&key(1), now);
        assert!(table.answer(1, Answer::No, now));
        assert!(!table.answer(1, Answer::Always, now), "the second answer");
        assert_eq!(table.ask(&key(1), now), Known::Refused(Why::ByUser));
        table.ask(&key(2), now);
        assert!(!table.answer(2, Answer::Always, now + LONGEST), "too late");
        assert_eq!(table.ask(&key(2), now + LONGEST), Known::Refused(Why::TimedOut));
        assert_eq!(table.ask(&key(2), now + LONGEST + HOLDS), Known::Open(Some(3)));
    }

    #[test]
    fn questions_and_answers_are_bounded() {
        let (mut table, now) = (Table::default(), Instant::now());
        for n in 0..MOST_OPEN {
            assert_eq!(table.ask(&key(n), now), Known::Open(Some(n as u64 + 1)));
        }
        assert_eq!(table.ask(&key(MOST_OPEN), now), Known::Refused(Why::MostOpen));
        table.withdraw(1);
        assert_eq!(table.ask(&key(MOST_OPEN), now), Known::Open(Some(17)));
        for id in 2..=17 {
            table.answer(id, Answer::Never, now);
        }
        for n in 100.. {
            match table.ask(&key(n), now) {
                Known::Open(Some(id)) => assert!(table.answer(id, Answer::No, now)),
                full => {
                    assert_eq!((full, n), (Known::Refused(Why::MostKnown), 100 + MOST_KNOWN - 16));
                    break;
                }
            }
        }
        let later = now + HOLDS;
        assert!(matches!(table.ask(&key(9), later), Known::Refused(Why::ByUser)), "it is kept");
        assert!(matches!(table.ask(&key(50), later), Known::Open(Some(_))), "others gave way");
    }

    #[test]
    fn after_the_end_answers_hold_and_nothing_is_asked() {
        let (mut table, now) = (Table::default(), Instant::now());
        table.ask(&key(1), now);
        table.ask(&key(2), now);
        table.answer(1, Answer::Always, now);
        table.end();
        assert_eq!(table.ask(&key(1), now), Known::Allowed);
        assert_eq!(table.ask(&key(2), now), Known::Refused(Why::Ended));
        assert!(!table.answer(2, Answer::Always, now));
    }

    /// What a user would say that remembers each destination apart.
    #[derive(Clone, Copy, Default)]
    struct Model {
        asked: Option<(u64, Instant)>,
        answered: Option<(bool, Option<Instant>)>,
    }

    proptest! {
        #[test]
        fn each_destination_is_as_its_last_answer(
            steps in proptest::collection::vec((0usize..4, 0u64..20, 0usize..6), 1..200)
        ) {
            let answers = [Answer::Once, Answer::Always, Answer::No, Answer::Never];
            let (mut table, mut now, mut models) = (Table::default(), Instant::now(), [Model::default(); 4]);
            for (n, seconds, what) in steps {
                now = after(seconds, now);
                for model in &mut models {
                    if let Some((_, until)) = model.asked.take_if(|(_, until)| *until <= now) {
                        model.answered = Some((false, Some(until + HOLDS)));
                    }
                    model.answered.take_if(|(_, until)| until.is_some_and(|until| until <= now));
                }
                let model = &mut models[n];
                if let (Some(answer), Some((id, _))) = (answers.get(what), model.asked) {
                    prop_assert!(table.answer(id, *answer, now));
                    model.asked = None;
                    let is_allowed = matches!(answer, Answer::Once | Answer::Always);
                    let is_for_run = matches!(answer, Answer::Always | Answer::Never);
                    model.answered = Some((is_allowed, (!is_for_run).then(|| now + HOLDS)));
                }
                match (table.ask(&key(n), now), model.answered, model.asked) {
                    (Known::Allowed, Some((true, _)), _) => {}
                    (Known::Refused(_), Some((false, _)), _) => {}
                    (Known::Open(None), None, Some(_)) => {}
                    (Known::Open(Some(id)), None, None) => model.asked = Some((id, now + LONGEST)),
                    (said, ..) => prop_assert!(false, "{said:?}"),
                }
            }
        }
    }
}
