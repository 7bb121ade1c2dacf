//! The whole configuration of a stack, for programs that keep one: [`Builder::from`](crate::Builder::from). Most
//! programs set what they need by the methods of [`Builder`](crate::Builder).

/// How threads wait for the device: [`Builder::moderation`](crate::Builder::moderation).
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::config::ModerationConfig;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let builder = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted();
/// let stack = builder.moderation(ModerationConfig::LATENCY).build()?;
/// // Later, when answers are not urgent:
/// stack.set_moderation(ModerationConfig::THROUGHPUT)?;
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::moderation::ModerationConfig;
/// The memory of a stack and its shares: [`StackConfig::pool`].
///
/// ```
/// use fulmar::config::{PoolConfig, StackConfig};
///
/// let pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(64 << 20) };
/// assert_eq!(pool.send_share_bytes + pool.receive_share_bytes, 60 << 20);
/// let config = StackConfig { pool, ..StackConfig::default() };
/// # assert_eq!(config.pool, pool);
/// ```
pub use fulmar_stack::mbuf::PoolConfig;
pub use fulmar_stack::shard::MIN_BUDGET_BYTES;
/// Limits for each source address: [`StackConfig::source_limits`].
///
/// ```
/// use fulmar::config::{SourceLimits, StackConfig};
///
/// let source_limits = SourceLimits { embryos: Some(64), connections: Some(1000) };
/// let config = StackConfig { source_limits, ..StackConfig::default() };
/// # assert_eq!(config.source_limits, source_limits);
/// ```
pub use fulmar_stack::shard::SourceLimits;
/// Every setting of a stack.
///
/// ```
/// # use fulmar::devices;
/// use fulmar::Builder;
/// use fulmar::config::StackConfig;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// let config = StackConfig { max_sockets: 1000, max_orphans: 100, ..StackConfig::default() };
/// let stack = Builder::from(config).device(device).address("10.0.0.1/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::shard::StackConfig;
