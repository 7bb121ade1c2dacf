//! The document about a stack or a gateway: what `fulmar stat`, `fulmar top` and `--metrics` read (`docs/stat.md`).
//!
//! A part of the document is declared once, in a table of fields: name, type, value, meaning. The struct, its JSON and
//! the schema come from that table. Sizes are in bytes and times in microseconds, unless the name has another unit.
//!
//! A reader ignores fields that it does not know and has the default for fields that are missing.

mod device;
mod gateway;
mod socket;

use std::borrow::Cow;
use std::collections::BTreeMap;

use fulmar_stack::base::{Counter, DropReason};

use crate::api::stat::Stat;
pub use device::{Device, Ledger, Neighbour, Pool, Route, StageCost, Waiting};
pub use gateway::{Flow, Gateway, Guest, Port, Refusal, Spliced};
pub use socket::{Connection, Details, Listener, Model, Socket};

/// The version that this crate writes.
pub const VERSION: u32 = 1;

/// A name that a writer has in its code and a reader in its memory.
type Name = Cow<'static, str>;

/// Declares a part of the document: its meaning, an example that reads it from a `document`, and its fields. `X of s: T`
/// also makes it of a `&T`, whose field of the same name is the value where none is given. With `whole` each field of
/// `T` must be in the table.
macro_rules! part {
    ($about:literal $example:literal $part:ident { $($(#[$serde:meta])* $field:ident: $type:ty, $doc:literal;)* }) => {
        #[doc = $about]
        // The descriptions of the schema have no examples.
        #[cfg_attr(not(test), doc = concat!(
            "\n```\n# use fulmar::{Stack, devices};\n# use fulmar::stat::Counter;\n",
            "# fn main() -> Result<(), Box<dyn std::error::Error>> {\n",
            "# let (device, _peer) = devices::link_pair()?;\n",
            "# let builder = Stack::builder().device(device).address(\"10.0.0.1/24\".parse()?);\n",
            "# let stack = builder.unlisted().build()?;\n",
            "let document = stack.stat()?.document();\n",
            $example,
            "\n# Ok(())\n# }\n```",
        ))]
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(default)]
        #[non_exhaustive]
        pub struct $part { $($(#[$serde])* #[doc = $doc] pub $field: $type,)* }
    };
    ($about:literal $example:literal $part:ident of $from:ident: $source:ident $($whole:ident)? {
        $($(#[$serde:meta])* $field:ident: $type:ty $(= $value:expr)?, $doc:literal;)*
    }) => {
        part! { $about $example $part { $($(#[$serde])* $field: $type, $doc;)* } }

        // Of types that only packages released together with this one can name.
        #[doc(hidden)]
        impl From<&$source> for $part {
            fn from($from: &$source) -> $part {
                $crate::stat::document::part!(@check $($whole)? $from $source $($field)*);
                $part { $($field: $crate::stat::document::part!(@value $from $field $($value)?),)* }
            }
        }
    };
    (@check whole $from:ident $source:ident $($field:ident)*) => {
        let $source { $($field: _,)* } = $from;
    };
    (@check $from:ident $source:ident $($field:ident)*) => {};
    (@value $from:ident $field:ident $value:expr) => { $value };
    (@value $from:ident $field:ident) => { $from.$field };
}
use part;

part! { "The state of a stack or a gateway."
r#"println!("{}: process {}, {} sockets", document.name, document.pid, document.sockets.len());
println!("{} segments received", document.count(Counter::TcpSegmentsIn));"#
Document of s: Stat {
    version: u32 = VERSION, "The version of the document. Within a version fields are added and never renamed.";
    name: String = s.name.clone(), "Name of the stack; of a gateway that of its guest's program or namespace.";
    pid: u32 = std::process::id(), "Process id.";
    network_namespace: Option<u64> = s.network_namespace, "Inode of the network namespace of its sockets.";
    shards: usize = s.shards, "Shards: one per queue of the device.";
    addresses: Vec<String> = s.shard.addresses.iter().map(|a| format!("{}/{}", a.addr, a.prefix_len)).collect(),
        "Addresses, each with the length of its prefix.";
    sockets: Vec<Socket> = s.shard.sockets.iter().map(Socket::from).collect(),
        "Sockets; of a gateway those that belong to no flow.";
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flows: Vec<Flow> = Vec::new(), "Flows of a gateway.";
    time_wait: usize = s.shard.time_wait, "Connections in TIME-WAIT.";
    drops: Vec<DropCount> = DropReason::ALL.iter().map(|r| DropCount::new(*r, s.drops(*r))).collect(),
        "Packets dropped, by reason.";
    counters: BTreeMap<Name, u64> = Counter::ALL.iter().map(|c| (c.name().into(), s.count(*c))).collect(),
        "Counters by their names.";
    pool: Pool = Pool::from(&s.shard), "Buffers.";
    device: Device = Device::from(&s.shard.device), "The device.";
    waiting: Waiting = Waiting::from(&s.shard.counters), "Waiting of threads for the device.";
    neighbours: Vec<Neighbour> = s.shard.neighbours.iter().map(Neighbour::from).collect(), "Neighbours.";
    routes: Vec<Route> = s.shard.routes.iter().map(Route::from).collect(), "Routes.";
    ledger: Option<Ledger> = s.account.as_ref().map(Ledger::from), "CPU time by stage, if it is measured.";
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<Gateway> = None, "The figures of a gateway in addition to those of its stack.";
} }

impl Document {
    /// How often something happened.
    pub fn count(&self, counter: Counter) -> u64 {
        self.counters.get(counter.name()).copied().unwrap_or(0)
    }
}

part! { "Packets that were dropped for one reason."
r#"for drop in document.drops.iter().filter(|drop| drop.packets > 0) {
    println!("{} packets dropped: {}", drop.packets, drop.sentence);
}"#
DropCount {
    reason: Name, "Name of the reason.";
    layer: Name, "The layer that dropped them.";
    packets: u64, "Packets.";
    sentence: Name, "The reason in a sentence.";
} }

impl DropCount {
    fn new(reason: DropReason, packets: u64) -> DropCount {
        let sentence = reason.sentence().trim().into();
        DropCount { reason: reason.name().into(), layer: reason.layer().into(), packets, sentence }
    }
}

#[cfg(test)]
mod tests;
