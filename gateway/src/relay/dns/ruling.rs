//! The policy's ruling on what the guest asks.

use fulmar_stack::udp::Datagram;

use super::super::{Context, canonical};
use super::given::is_for_addresses;
use super::message::{self, Code, Question, Unusual};
use crate::names::messages::{Reply, reply};
use crate::policy::Decision;

/// Messages of one run that are taken.
const MOST_MESSAGES: usize = 128;

/// The messages of a datagram or run.
pub(super) fn messages_of(d: &Datagram) -> impl Iterator<Item = Vec<u8>> + '_ {
    let each = d.segment_bytes.map_or(usize::MAX, |each| usize::from(each.max(1)));
    (0..d.payload.len().max(1)).step_by(each).take(MOST_MESSAGES).map(move |at| {
        let length = d.payload.len().saturating_sub(at).min(each);
        let mut bytes = vec![0; length];
        let n = d.payload.copy_to(at, &mut bytes);
        bytes.truncate(n);
        bytes
    })
}

/// What the policy decides about a message of the guest.
pub(crate) enum Ruling {
    /// It may pass. `None`: it is not one plain question.
    Pass(Option<Question>),
    /// It asks for addresses of a name that must not be looked up yet.
    Unasked(Question),
    /// It may not; the guest gets this answer.
    Answer(Vec<u8>),
    /// It may not, and it has no answer.
    Drop,
}

/// The policy's ruling on a message that was read so.
pub(super) fn rule(cx: &Context<'_>, bytes: &[u8], read: Result<Question, Unusual>) -> Ruling {
    let is_odd = |question: &Question| !message::is_host_name(&question.name);
    let read = match read {
        Ok(question) if cx.settings.policy.reads_names() && is_odd(&question) => {
            Err(Unusual::Wrong(Code::REFUSED))
        }
        read => read,
    };
    let asked = read.as_ref().ok().map(|q| (q.name.as_str(), q.kind));
    let decision = cx.settings.policy.decide_name(asked);
    let answer = match read {
        read if decision == Decision::Allow => return Ruling::Pass(read.ok()),
        Ok(question)
            if decision == Decision::Wait
                && cx.settings.names.are_given()
                && is_for_addresses(&question) =>
        {
            return Ruling::Unasked(question);
        }
        Ok(_) => {
            reply(bytes, Reply::Blocked).or_else(|| message::answer_with(Code::REFUSED, bytes))
        }
        Err(Unusual::Wrong(code)) => message::answer_with(code, bytes),
        Err(Unusual::Unanswerable) => None,
    };
    answer.map_or(Ruling::Drop, Ruling::Answer)
}

/// The ruling on a datagram, or a run of them, to a DNS server of the guest's choice: that on the first message that may
/// not pass.
pub(crate) fn ruling_on_run(cx: &Context<'_>, d: &Datagram) -> Ruling {
    if !cx.settings.policy.reads_names() || !cx.settings.mapping.is_dns(canonical(d.dst)) {
        return Ruling::Pass(None);
    }
    let mut rulings = messages_of(d).map(|bytes| rule(cx, &bytes, message::parse_question(&bytes)));
    rulings.find(|r| !matches!(r, Ruling::Pass(_))).unwrap_or(Ruling::Pass(None))
}

/// Reads an answer of a DNS server of the guest's choice, which is not trusted.
pub(crate) fn learn_claim(cx: &Context<'_>, bytes: &[u8]) {
    if let Some(question) = message::question(bytes) {
        let addresses = message::addresses(bytes, &question);
        cx.settings.policy.learn_claim(&question.name, &addresses);
    }
}
