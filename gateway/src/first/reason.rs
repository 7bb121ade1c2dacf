//! Why a connection or a datagram is refused.

use std::fmt;

/// Most characters of a name that is reported.
const MOST_SEEN: usize = 100;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident $name:literal $sentence:literal;)*) => {
        /// Why the guest's first bytes are refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason {
            $(#[doc = $sentence] $variant,)*
        }

        impl Reason {
            /// Every reason, in the order of the declaration.
            pub const ALL: &[Reason] = &[$(Reason::$variant,)*];

            /// The stable name, for counters and logs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Reason::$variant => $name,)*
                }
            }

            /// A sentence without its full stop.
            pub fn sentence(self) -> &'static str {
                match self {
                    $(Reason::$variant => $sentence,)*
                }
            }
        }
    };
}

reasons! {
    TlsOtherName "tls_other_name" "the TLS ClientHello names another host";
    TlsNoName "tls_no_name" "the TLS ClientHello has no server name";
    TlsEncryptedHello "tls_encrypted_hello" "the TLS ClientHello has an encrypted part, which may name another host";
    TlsUnreadable "tls_unreadable" "the TLS handshake cannot be read";
    TlsTooLong "tls_too_long" "the TLS ClientHello is too long";
    TlsSsl2 "tls_ssl2" "the ClientHello has the format of SSL 2, which has no server name";
    HttpOtherHost "http_other_host" "the HTTP request is for another host";
    HttpNoHost "http_no_host" "the HTTP request has no Host header";
    HttpManyHosts "http_many_hosts" "the HTTP request has more than one Host header";
    HttpConnect "http_connect" "the HTTP request asks for a tunnel to another host";
    HttpFraming "http_framing" "the length of the HTTP request is ambiguous";
    HttpUnreadable "http_unreadable" "the HTTP request cannot be read";
    HttpTooLong "http_too_long" "the head of the HTTP request is too long";
    HttpBeforeAnswer "http_before_answer" "the guest sent too much before the answer to its HTTP Upgrade";
    Http2OtherHost "http2_other_host" "the HTTP/2 request is for another host";
    Http2NoHost "http2_no_host" "the HTTP/2 request names no host";
    Http2Connect "http2_connect" "the HTTP/2 request asks for a tunnel to another host";
    Http2Unreadable "http2_unreadable" "the HTTP/2 frames cannot be read";
    Http2TooLong "http2_too_long" "the header list of the HTTP/2 request is too long";
    ProxyProtocol "proxy_protocol" "the connection begins with a header of the PROXY protocol";
    TextTooLong "text_too_long" "the first line has no end";
    NoName "no_name" "other names have the address, and the protocol carries no name";
    TooMuch "too_much" "too much is kept of all connections together";
    Cut "cut" "the guest closed the connection within a request";
    QuicVersion "quic_version" "the QUIC version is unknown";
    QuicUnreadable "quic_unreadable" "the QUIC packet cannot be read";
    QuicConflict "quic_conflict" "the QUIC packet conflicts with an earlier one of the connection";
    QuicNotBegun "quic_not_begun" "the QUIC packet belongs to no connection whose ClientHello was seen";
    QuicTooMuch "quic_too_much" "too much was held before the QUIC ClientHello was complete";
    QuicTooMany "quic_too_many" "too many QUIC connections used this port";
}

/// A reason, and the name that was seen in place of the allowed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    seen: Box<str>,
}

impl Refusal {
    /// With the name that the guest sent.
    pub(super) fn with_name(reason: Reason, seen: &[u8]) -> Self {
        let mut text = String::new();
        for byte in seen.iter().take(MOST_SEEN) {
            text.extend(std::ascii::escape_default(*byte).map(char::from));
        }
        if seen.len() > MOST_SEEN {
            text.push('…');
        }
        Refusal { reason, seen: text.into() }
    }

    /// The name that the guest sent; escaped, and cut after 100 bytes.
    pub fn seen(&self) -> Option<&str> {
        (!self.seen.is_empty()).then_some(&*self.seen)
    }
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Refusal { reason, seen: Box::default() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason.sentence())?;
        match self.seen() {
            Some(seen) => write!(f, ": `{seen}`"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_reasons_are_distinct_words() {
        let names: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|r| r.name()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(names.iter().all(|n| n.chars().all(is_word)));
        assert!(Reason::ALL.iter().all(|r| !r.sentence().ends_with('.')));
    }

    #[test]
    fn a_seen_name_is_escaped_and_cut() {
        let seen = Refusal::with_name(Reason::TlsOtherName, b"evil\0\x1b[2J\xff.test");
        assert_eq!(seen.seen(), Some(r"evil\x00\x1b[2J\xff.test"));
        assert!(seen.to_string().ends_with(r"another host: `evil\x00\x1b[2J\xff.test`"));
        let long = Refusal::with_name(Reason::TlsOtherName, &[0; 5000]);
        assert!(long.seen().is_some_and(|s| s.len() < 500 && s.ends_with('…')));
        assert_eq!(Refusal::from(Reason::TlsNoName).seen(), None);
    }
}
