//! The requests of the API of slirp4netns, and the ports that they have published.
//!
//! ```text
//!   {"execute": "add_hostfwd", "arguments": {"proto": "tcp", "host_addr": "0.0.0.0", "host_port": 8080,
//!                                            "guest_addr": "10.0.2.100", "guest_port": 80}}
//!                                        ──► {"return": {"id": 1}}
//!   {"execute": "list_hostfwd"}          ──► {"return": {"entries": [...]}, "entries": [...]}
//!   {"execute": "remove_hostfwd", "arguments": {"id": 1}}
//!                                        ──► {"return": {}}
//!   anything else                        ──► {"error": {"desc": "bad request: ..."}}
//! ```
//!
//! slirp4netns(1) documents the entries in `return`, slirp4netns 1.3 answers without it: here they are in both places.
//! A message about an error begins with the words of slirp4netns.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::{Bind, Forward};
use serde_json::{Map, Value, json};

use crate::gateway::publish::why_refused;

/// Ports that the API publishes at most.
const MOST_FORWARDS: usize = 4096;

/// The guest's addresses, to which ports lead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Guest {
    pub v4: IpAddr,
    pub v6: Option<IpAddr>,
}

/// Publishes ports of the host.
pub trait Publisher {
    /// Publishes one.
    fn publish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()>;
    /// Withdraws one that was published.
    fn unpublish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()>;
}

/// A port that a request has published.
struct Entry {
    /// As the request has it.
    proto: String,
    protocol: Protocol,
    host_addr: IpAddr,
    guest_addr: IpAddr,
    forward: Forward,
}

/// The ports that requests have published, by their ids.
pub struct Forwards {
    guest: Guest,
    entries: BTreeMap<u64, Entry>,
    next_id: u64,
}

impl Forwards {
    pub fn new(guest: Guest) -> Forwards {
        Forwards { guest, entries: BTreeMap::new(), next_id: 1 }
    }

    /// The answer to a request.
    pub fn answer(&mut self, request: &Value, publisher: &mut impl Publisher) -> Value {
        let done = self.execute(request, publisher);
        done.unwrap_or_else(|what| refused(&what))
    }

    fn execute(
        &mut self,
        request: &Value,
        publisher: &mut impl Publisher,
    ) -> Result<Value, String> {
        let request = request.as_object().ok_or("json_object() failed")?;
        let execute = request.get("execute").and_then(Value::as_str).ok_or("no execute found")?;
        let none = Map::new();
        let arguments = request.get("arguments").and_then(Value::as_object).unwrap_or(&none);
        match execute {
            "add_hostfwd" => {
                let added = self.add(arguments, publisher);
                added.map_err(|what| format!("add_hostfwd: {what}"))
            }
            "list_hostfwd" => Ok(self.list()),
            "remove_hostfwd" => {
                let removed = self.remove(arguments, publisher);
                removed.map_err(|what| format!("remove_hostfwd: {what}"))
            }
            _ => Err("unknown execute".to_owned()),
        }
    }

    fn add(
        &mut self,
        arguments: &Map<String, Value>,
        publisher: &mut impl Publisher,
    ) -> Result<Value, String> {
        let entry = self.entry(arguments)?;
        let failed = |why: String| format!("slirp_add_hostfwd failed: {why}");
        if self.entries.len() >= MOST_FORWARDS {
            return Err(failed(format!("{MOST_FORWARDS} ports are published; remove some")));
        }
        let published = publisher.publish(entry.protocol, &entry.forward);
        published.map_err(|e| failed(why_refused(&e, entry.forward.from)))?;
        let id = self.next_id;
        self.next_id += 1;
        self.entries.insert(id, entry);
        Ok(json!({ "return": { "id": id } }))
    }

    fn entry(&self, arguments: &Map<String, Value>) -> Result<Entry, String> {
        let bad = |name: &str, why: &str| format!("bad arguments.{name}: {why}");
        let proto = arguments.get("proto").and_then(Value::as_str).unwrap_or_default();
        let (protocol, is_v4) = transport(proto)
            .ok_or_else(|| bad("proto", "expected tcp, udp, tcp4, udp4, tcp6 or udp6"))?;
        let any = if is_v4 == Some(false) { "::" } else { "0.0.0.0" };
        let host_addr = address(arguments, "host_addr").unwrap_or(any).parse::<IpAddr>();
        let host_addr = host_addr.ok().filter(|a| is_v4.is_none_or(|v4| a.is_ipv4() == v4));
        let host_addr = host_addr.ok_or_else(|| bad("host_addr", "expected an IP address"))?;
        let from = port(arguments, "host_port")
            .ok_or_else(|| bad("host_port", "expected a number from 1 to 65535"))?;
        let guests = if host_addr.is_ipv4() { Some(self.guest.v4) } else { self.guest.v6 };
        let own =
            guests.ok_or_else(|| bad("host_addr", "an IPv6 address requires --enable-ipv6"))?;
        let named = address(arguments, "guest_addr").map_or(Ok(own), str::parse);
        let guest_addr = named.ok().filter(|a: &IpAddr| a.is_ipv4() == own.is_ipv4());
        let guest_addr = guest_addr
            .ok_or_else(|| bad("guest_addr", "expected an IP address of host_addr's version"))?;
        let to = port(arguments, "guest_port")
            .ok_or_else(|| bad("guest_port", "expected a number from 1 to 65535"))?;
        let bind = Bind { address: Some(host_addr), interface: None };
        let to_address = Some(guest_addr).filter(|a| *a != own);
        let forward = Forward { to_address, ..Forward::new(bind, from, to) };
        Ok(Entry { proto: proto.to_owned(), protocol, host_addr, guest_addr, forward })
    }

    fn list(&self) -> Value {
        let entries: Vec<Value> = self.entries.iter().map(|(id, entry)| entry.json(*id)).collect();
        json!({ "return": { "entries": &entries }, "entries": &entries })
    }

    fn remove(
        &mut self,
        arguments: &Map<String, Value>,
        publisher: &mut impl Publisher,
    ) -> Result<Value, String> {
        let id = arguments.get("id").and_then(whole);
        let entry = id.and_then(|id| self.entries.remove(&id));
        let entry = entry.ok_or("bad arguments.id: no port is published under it")?;
        let removed = publisher.unpublish(entry.protocol, &entry.forward);
        removed.map_err(|e| format!("slirp_remove_hostfwd failed: {e}"))?;
        Ok(json!({ "return": {} }))
    }
}

impl Entry {
    fn json(&self, id: u64) -> Value {
        json!({
            "id": id,
            "proto": self.proto,
            "host_addr": self.host_addr,
            "host_port": self.forward.from,
            "guest_addr": self.guest_addr,
            "guest_port": self.forward.to,
        })
    }
}

/// The answer to a request that is refused.
pub fn refused(what: &str) -> Value {
    json!({ "error": { "desc": format!("bad request: {what}") } })
}

/// A transport and, where the name has one, the IP version.
fn transport(proto: &str) -> Option<(Protocol, Option<bool>)> {
    let (name, is_v4) = match proto.as_bytes().last()? {
        b'4' => (proto.strip_suffix('4')?, Some(true)),
        b'6' => (proto.strip_suffix('6')?, Some(false)),
        _ => (proto, None),
    };
    match name {
        "tcp" => Some((Protocol::Tcp, is_v4)),
        "udp" => Some((Protocol::Udp, is_v4)),
        _ => None,
    }
}

/// An argument that is an address: one that is empty is not given.
fn address<'a>(arguments: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    let text = arguments.get(name).filter(|value| !value.is_null())?;
    // A number is refused as an invalid address.
    Some(text.as_str().unwrap_or("?")).filter(|text| !text.is_empty())
}

fn port(arguments: &Map<String, Value>, name: &str) -> Option<u16> {
    let number = whole(arguments.get(name)?)?;
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// A number without a fraction: JSON has no integers, and some writers print `80.0`.
fn whole(number: &Value) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let is_whole = |f: &f64| f.fract() == 0.0 && (0.0..EXACT).contains(f);
    number.as_u64().or_else(|| number.as_f64().filter(is_whole).map(|f| f as u64))
}
