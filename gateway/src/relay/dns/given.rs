//! Answers to the guest where names have addresses of their own: each is made here, and questions for addresses never
//! leave as the guest wrote them.
//!
//! ```text
//!   A, AAAA of an allowed name ──► pinned? ──► the name's own address
//!                                    └─ no ──► A and AAAA to the host's resolvers ──► pin ──► the name's own address
//!   PTR of an address of a name ──► the name          HTTPS, SVCB ──► nothing: their hints are addresses
//! ```
//!
//! Other questions for allowed names are asked as before.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;

use super::flow::Flow;
use super::lookups::{Begun, Finished, Waiting};
use super::message::{self, CLASS_IN, Code, Question};
use super::message::{TYPE_A, TYPE_AAAA, TYPE_HTTPS, TYPE_PTR, TYPE_SVCB};
use super::{Dns, Key};
use crate::names::messages::{self, Reply, half_of, reply};
use crate::names::pins::{Half, Known};
use crate::relay::Context;
use crate::relay::shared_names::Meaning;
use crate::stat::Refusal;

/// The lifetime of the answer for a name that is not resolved here.
const UNRESOLVED_SECONDS: u32 = 60;

const NOWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));

/// The flow of the gateway's own questions: no guest has these ends.
pub(super) const OWN: Key = (NOWHERE, NOWHERE);

/// Whether a question for a name is answered here, whatever resolvers say.
pub(super) fn is_for_addresses(question: &Question) -> bool {
    let is_own = matches!(question.kind, TYPE_A | TYPE_AAAA | TYPE_HTTPS | TYPE_SVCB);
    is_own && question.class == CLASS_IN
}

impl Dns {
    /// Answers a question of the guest that concerns addresses, now or when the name was looked up. False: it is asked
    /// as the guest wrote it. `may_ask`: the resolvers may be asked.
    pub(super) fn answer_by_name(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        bytes: &[u8],
        question: Option<&Question>,
        may_ask: bool,
    ) -> bool {
        let Some(question) = question else {
            // What is not one plain question could ask for addresses.
            cx.refuse(Refusal::Policy);
            let refused = message::answer_with(Code::REFUSED, bytes);
            refused.into_iter().for_each(|answer| self.deliver(cx, key, &answer));
            return true;
        };
        let is_v4 = match question.kind {
            TYPE_A => true,
            TYPE_AAAA => false,
            TYPE_HTTPS | TYPE_SVCB => {
                self.reply_to(cx, key, bytes, Reply::Nothing);
                return true;
            }
            _ => return false,
        };
        if question.class != CLASS_IN {
            self.reply_to(cx, key, bytes, Reply::Blocked);
            return true;
        }
        let name = Arc::<str>::from(question.name.as_str());
        let waiting = Waiting { key, message: bytes.into(), is_v4 };
        if cx.settings.upstream.is_some() || !may_ask {
            // The proxy resolves it, or a connection does that is allowed.
            let reply = given_to_guest(cx, &name, UNRESOLVED_SECONDS, is_v4);
            self.reply_to(cx, key, bytes, reply);
            return true;
        }
        match cx.settings.names.known(&name, cx.now) {
            Some((known, left)) => {
                let seconds = u32::try_from(left.as_secs()).unwrap_or(u32::MAX);
                self.answer_waiting(cx, &name, &known, seconds, &waiting);
            }
            None => self.look_up_for(cx, &name, Some(waiting)),
        }
        true
    }

    /// Answers a question for the name of an address that stands for one. False: it does not ask for one.
    pub(super) fn answer_pointer(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        bytes: &[u8],
        question: &Question,
    ) -> bool {
        if question.kind != TYPE_PTR || question.class != CLASS_IN {
            return false;
        }
        let Some(address) = messages::reversed(&question.name) else { return false };
        let reply = match cx.settings.names.meaning(address) {
            Meaning::Address => return false,
            Meaning::Name(name) => Reply::Name(name, UNRESOLVED_SECONDS),
            Meaning::Nothing => Reply::NoName,
        };
        self.reply_to(cx, key, bytes, reply);
        true
    }

    /// Looks a name up for a connection.
    pub(crate) fn look_up(&mut self, cx: &mut Context<'_>, name: &Arc<str>) {
        self.look_up_for(cx, name, None);
    }

    fn look_up_for(&mut self, cx: &mut Context<'_>, name: &Arc<str>, waiting: Option<Waiting>) {
        let begun = self.lookups.begin(name, cx.now);
        if begun == Begun::Refused && waiting.is_none() {
            cx.refuse(Refusal::LookupLimit);
            // The connections that wait for it end.
            self.known.push(Arc::clone(name));
        }
        let refused = match (begun, waiting) {
            (Begun::Refused, waiting) => waiting,
            (_, Some(waiting)) => self.lookups.wait(name, waiting).err(),
            (_, None) => None,
        };
        if let Some(waiting) = refused {
            cx.refuse(Refusal::LookupLimit);
            self.reply_to(cx, waiting.key, &waiting.message, Reply::Failed);
        }
        if begun == Begun::Now {
            self.ask_both(cx, name);
        }
    }

    /// Asks the host's resolvers for the addresses of both IP versions.
    fn ask_both(&mut self, cx: &mut Context<'_>, name: &Arc<str>) {
        let mapping = &cx.settings.mapping;
        // No one repeats these questions as a guest repeats its own.
        let attempts = usize::from(mapping.attempts.max(1));
        let all = mapping.resolvers.iter().copied();
        let servers = std::iter::repeat_n(all, attempts).flatten().collect();
        let id = self.by_key.get(&OWN).copied().unwrap_or_else(|| {
            let id = self.flows.insert(Flow::new(OWN.0, OWN.1, OWN.1, cx.now));
            self.by_key.insert(OWN, id);
            self.order.push_back((cx.now, id));
            id
        });
        for is_v4 in [true, false] {
            let asked = messages::question(name, is_v4);
            let asked = asked.and_then(|bytes| Some((message::question(&bytes)?, bytes)));
            let is_asked = match asked {
                Some((question, bytes)) => self.ask(cx, id, &bytes, question, &servers).is_ok(),
                None => false,
            };
            if !is_asked {
                self.enter(cx, name, is_v4, Half::Failed);
            }
        }
        self.set_timer(id);
    }

    /// A resolver has answered a question of the gateway's own; `None`: all have failed.
    pub(super) fn on_own_answer(
        &mut self,
        cx: &mut Context<'_>,
        question: &Question,
        answer: Option<&[u8]>,
    ) {
        let is_v4 = question.kind == TYPE_A;
        let half = answer.map_or(Half::Failed, |bytes| half_of(bytes, is_v4));
        self.enter(cx, &question.name, is_v4, half);
    }

    fn enter(&mut self, cx: &mut Context<'_>, name: &str, is_v4: bool, half: Half) {
        if let Some(finished) = self.lookups.enter(name, is_v4, half) {
            self.finish(cx, finished);
        }
    }

    /// Pins what a look-up has found, and answers those who wait.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>, finished: Finished) {
        let Finished { name, known, lifetime, waiting } = finished;
        cx.settings.names.pin(&name, known.clone(), lifetime, cx.now);
        let seconds = u32::try_from(lifetime.as_secs()).unwrap_or(u32::MAX);
        for waiting in &waiting {
            self.answer_waiting(cx, &name, &known, seconds, waiting);
        }
        self.known.push(name);
    }

    /// Names whose look-up has ended since the last call.
    pub(crate) fn take_known(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.known)
    }

    fn answer_waiting(
        &mut self,
        cx: &mut Context<'_>,
        name: &str,
        known: &Known,
        seconds: u32,
        waiting: &Waiting,
    ) {
        let reply = match known {
            Known::Addresses(_) => given_to_guest(cx, name, seconds, waiting.is_v4),
            Known::NoAddress => Reply::Nothing,
            Known::NoName => Reply::NoName,
            Known::Failed => Reply::Failed,
        };
        self.reply_to(cx, waiting.key, &waiting.message, reply);
    }

    fn reply_to(&mut self, cx: &mut Context<'_>, key: Key, asked: &[u8], with: Reply) {
        if let Some(answer) = reply(asked, with) {
            self.deliver(cx, key, &answer);
        }
    }
}

/// The name's own address of an IP version that the guest has.
fn given_to_guest(cx: &mut Context<'_>, name: &str, seconds: u32, is_v4: bool) -> Reply {
    if cx.settings.guest_address(is_v4).is_none() {
        return Reply::Nothing;
    }
    let Some(own) = cx.settings.names.give(name) else {
        cx.refuse(Refusal::NameLimit);
        return Reply::Failed;
    };
    let address = if is_v4 { IpAddr::V4(own.v4) } else { own.v6.into() };
    Reply::Address(address, seconds)
}
