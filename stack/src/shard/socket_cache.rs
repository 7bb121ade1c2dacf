//! A cache of small buffers per socket: the remedy that was proposed in 2012 for the cost of allocation on a send
//! path, as an ablation to be measured ([`StepAblation::CachePerSocket`]).
//!
//! The product allocates from the shard's pool, whose magazines hold initialised buffers. A cache is refilled from
//! the pool, many buffers at a time. Sent buffers are freed to the pool, since a transmit completion does not name
//! the socket.
//!
//! [`StepAblation::CachePerSocket`]: crate::base::StepAblation::CachePerSocket

use alloc::vec::Vec;

use crate::base::SlotId;
use crate::mbuf::{Chain, Mbuf, NoBuffer, Pool, Purpose};

/// Buffers per refill.
const REFILL: usize = 32;
/// Payload bytes that a cached buffer holds; larger payloads are allocated from the pool.
const SPACE_BYTES: usize = 128;

/// The caches of all sockets, by slot. Empty unless the ablation is measured.
#[derive(Debug, Default)]
pub struct SocketCaches(Vec<Vec<Mbuf>>);

impl SocketCaches {
    /// A buffer with `headroom` in front for `bytes`, out of the socket's cache.
    ///
    /// # Errors
    /// Neither the cache nor the pool has one.
    pub fn take(
        &mut self,
        id: SlotId,
        bytes: usize,
        headroom: usize,
        pool: &mut Pool,
    ) -> Result<Chain, NoBuffer> {
        if bytes > SPACE_BYTES {
            return pool.alloc_chain(bytes, headroom, Purpose::Send);
        }
        let at = id.index as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Vec::new);
        }
        let Some(cache) = self.0.get_mut(at) else { return Err(NoBuffer) };
        if cache.is_empty() {
            let more =
                (0..REFILL).map_while(|_| pool.alloc(SPACE_BYTES, headroom, Purpose::Send).ok());
            cache.extend(more);
        }
        let mut m = cache.pop().ok_or(NoBuffer)?;
        m.set_len(bytes);
        Ok(Chain::from(m))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_refilled_in_batches_and_large_payloads_bypass_it() {
        let mut pool = Pool::new(crate::mbuf::PoolConfig::default()).unwrap();
        let (mut socket_caches, id) = (SocketCaches::default(), SlotId { index: 3, generation: 0 });
        let chain = socket_caches.take(id, 18, 80, &mut pool).unwrap();
        assert_eq!(socket_caches.0[3].len(), REFILL - 1);
        assert!(chain.front().unwrap().headroom() >= 80);
        pool.free(chain);
        let large = socket_caches.take(id, SPACE_BYTES + 1, 80, &mut pool).unwrap();
        assert_eq!(socket_caches.0[3].len(), REFILL - 1);
        pool.free(large);
    }
}
