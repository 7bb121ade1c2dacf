//! The TCP layer of a shard: its connections, listeners and TIME-WAIT entries.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::base::{Instant, SlotId, TokenBucket};

use crate::shard::config::StackConfig;
use crate::shard::conn::flow_cache::FlowCache;
use crate::shard::conn::posted::PostedTable;
use crate::shard::conn::time_wait::TimeWaitTable;
use crate::shard::demux::Flows;
use crate::shard::fast_open::cache::FastOpenCache;
use crate::shard::link::templates::FlowTemplates;
use crate::shard::listen::pending::PendingTable;
use crate::shard::listen::sources::Sources;
use crate::shard::secret::Secret;
use crate::shard::wheel::TimerId;

/// Connections and listeners. Their sockets are in the table of the shard.
pub(crate) struct Tcp {
    pub flows: Flows,
    pub flow_cache: FlowCache,
    /// Listeners by port; several may share a port with different addresses. Port 0: those for every port.
    pub listeners: BTreeMap<u16, Vec<SlotId>>,
    /// SYNs of listeners with [`ConditionalAccept`](crate::shard::ConditionalAccept) that await a decision.
    pub pending: PendingTable,
    pub time_wait: TimeWaitTable,
    pub time_wait_timer: Option<TimerId>,
    /// Connections per source address, if that is limited.
    pub sources: Option<Sources>,
    /// Limits resets to segments without a connection.
    pub resets: TokenBucket,
    pub posted: PostedTable,
    /// What this side knows of Fast Open servers.
    pub fast_opens: FastOpenCache,
    /// Lower headers of connections.
    pub templates: FlowTemplates,
    /// Frames received since connections last had their turn of output.
    pub unacked_frames: usize,
    /// Since when ACKs or the tail of a write wait for the next call of the application.
    pub output_deferred_since: Option<Instant>,
}

impl Tcp {
    pub(crate) fn new(config: &StackConfig, secret: &Secret) -> Tcp {
        let table = secret.table_hasher();
        Tcp {
            flows: Flows::new(secret.flow_hasher()),
            flow_cache: FlowCache::default(),
            listeners: BTreeMap::new(),
            pending: PendingTable::new(table),
            time_wait: TimeWaitTable::new(config.max_time_wait, table),
            time_wait_timer: None,
            sources: Sources::new(config.source_limits, table),
            resets: TokenBucket::new(config.resets_per_s, config.resets_per_s),
            posted: PostedTable::default(),
            fast_opens: FastOpenCache::new(table),
            templates: FlowTemplates::default(),
            unacked_frames: 0,
            output_deferred_since: None,
        }
    }
}
