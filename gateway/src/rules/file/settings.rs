//! The settings file of sandbox-runtime, of which `network` matters here.
//!
//! Its denied domains come before its allowed ones, however specific they are; what no allowed domain names is refused.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::{PolicyError, PolicyFile, Reader};

/// The parts of an object, each as it is written.
type Parts<'a> = BTreeMap<String, &'a RawValue>;

/// What the other keys of `network` mean, and why they have no effect.
const WITHOUT_EFFECT: [(&str, &str); 12] = [
    ("deniedDomainReasons", "a refusal names the rule"),
    ("strictAllowlist", "the list is always strict"),
    ("allowUnixSockets", "rules do not apply to Unix sockets"),
    ("allowAllUnixSockets", "rules do not apply to Unix sockets"),
    (
        "allowLocalBinding",
        "the program has a loopback interface of its own, on which it binds any port",
    ),
    ("allowMachLookup", "it is for macOS"),
    ("httpProxyPort", "the program needs no proxy"),
    ("socksProxyPort", "the program needs no proxy"),
    ("mitmProxy", "no connection is decrypted"),
    ("tlsTerminate", "no connection is decrypted"),
    ("filterRequest", "no connection is decrypted"),
    ("injectHosts", "no connection is decrypted"),
];

pub(super) fn read(reader: &Reader<'_>) -> Result<PolicyFile, PolicyError> {
    let all: Parts<'_> = reader.parts(reader.text)?;
    let mut policy = PolicyFile::default();
    for (key, value) in all.iter().filter(|(key, _)| *key != "network") {
        let what = format!("`{key}` is not about the network and has no effect");
        policy.notes.push(reader.said(reader.offset(value), what));
    }
    let Some(network) = all.get("network") else {
        return Err(reader.error(0, "`network` is missing; with a brace at its begin the file is read as settings of sandbox-runtime"));
    };
    read_network(reader, &mut policy, network)?;
    policy.notes.sort_by_key(|note| note.line);
    Ok(policy)
}

fn read_network(
    reader: &Reader<'_>,
    policy: &mut PolicyFile,
    network: &RawValue,
) -> Result<(), PolicyError> {
    let parts: Parts<'_> = reader.parts(network.get())?;
    let at = reader.offset(network);
    for (key, value) in &parts {
        let at = reader.offset(value);
        match key.as_str() {
            "allowedDomains" | "deniedDomains" => {}
            "parentProxy" => read_proxy(reader, policy, value)?,
            key => {
                let known = WITHOUT_EFFECT.iter().find(|(known, _)| *known == key);
                let why = known.map_or("it is not known", |(_, why)| why);
                policy.notes.push(reader.said(at, format!("`network.{key}` has no effect: {why}")));
            }
        }
    }
    let Some(allowed) = parts.get("allowedDomains") else {
        return Err(reader.error(at, "`network.allowedDomains` is missing"));
    };
    policy.rules.close_as("allowedDomains", reader.source(reader.offset(allowed)));
    for (text, at) in domains(reader, allowed)? {
        policy.rules.allow(reader.rule(&text, &(at..at))?, reader.source(at));
    }
    let denied = parts.get("deniedDomains").map(|list| domains(reader, list)).transpose()?;
    for (text, at) in denied.into_iter().flatten() {
        policy.rules.deny_strictly(reader.rule(&text, &(at..at))?, reader.source(at));
    }
    Ok(())
}

fn read_proxy(
    reader: &Reader<'_>,
    policy: &mut PolicyFile,
    value: &RawValue,
) -> Result<(), PolicyError> {
    let parts: Parts<'_> = reader.parts(value.get())?;
    if let Some(list) = parts.get("noProxy") {
        let what = "`network.parentProxy.noProxy` has no effect: all connections take the proxy";
        policy.notes.push(reader.said(reader.offset(list), what.to_owned()));
    }
    let Some(proxy) = parts.get("https").or(parts.get("http")) else { return Ok(()) };
    let at = reader.offset(proxy);
    let text: String = reader.json(proxy.get())?;
    let proxy = text.parse().map_err(|e: String| reader.error(at, e))?;
    policy.proxy = Some(reader.said(at, proxy));
    Ok(())
}

/// The texts of a list, with where they are.
fn domains(reader: &Reader<'_>, list: &RawValue) -> Result<Vec<(String, usize)>, PolicyError> {
    let all: Vec<&RawValue> = reader.json(list.get())?;
    all.into_iter().map(|text| Ok((reader.json(text.get())?, reader.offset(text)))).collect()
}

impl<'a> Reader<'a> {
    /// Where a part of the text begins.
    fn offset(&self, part: &RawValue) -> usize {
        self.offset_of(part.get())
    }

    fn offset_of(&self, part: &str) -> usize {
        (part.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize).min(self.text.len())
    }

    fn json<'p, T: serde::Deserialize<'p>>(&self, part: &'p str) -> Result<T, PolicyError> {
        serde_json::from_str(part).map_err(|e| {
            // The column counts bytes.
            let lines = part.split_inclusive('\n').take(e.line().saturating_sub(1));
            let at = lines.map(str::len).sum::<usize>() + e.column().saturating_sub(1);
            let message = e.to_string();
            let what = message.split(" at line ").next().unwrap_or_default();
            self.error(self.offset_of(part) + at, what)
        })
    }

    fn parts<'p>(&self, part: &'p str) -> Result<Parts<'p>, PolicyError> {
        self.json(part)
    }
}
