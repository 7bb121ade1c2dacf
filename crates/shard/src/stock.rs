//! Small buffers that a socket keeps for itself: the remedy that was proposed in 2012 for the cost of
//! allocation on a send path, as a variation to be measured ([`StepAblation::CachePerSocket`]).
//!
//! The released path takes buffers from the shard's pool, which keeps them ready-made. A stock is
//! filled from there, many at a time; what is sent goes back to the pool, since a device that is done
//! with a frame does not know whose it was.
//!
//! [`StepAblation::CachePerSocket`]: fulmar_base::StepAblation::CachePerSocket

use alloc::vec::Vec;

use fulmar_base::SlotId;
use fulmar_mbuf::{Chain, Mbuf, NoBuffer, Pool, Purpose};

/// Buffers that a stock gets at once.
const REFILL: usize = 32;
/// Bytes of payload that every buffer of a stock has room for; more comes from the pool.
const ROOM_BYTES: usize = 128;

/// The stocks of all sockets, by slot. Empty unless the variation is asked for.
#[derive(Debug, Default)]
pub struct Stocks(Vec<Vec<Mbuf>>);

impl Stocks {
    /// A buffer with `headroom` in front for `bytes`, out of the socket's stock.
    ///
    /// # Errors
    /// Neither stock nor pool has one.
    pub fn take(
        &mut self,
        id: SlotId,
        bytes: usize,
        headroom: usize,
        pool: &mut Pool,
    ) -> Result<Chain, NoBuffer> {
        if bytes > ROOM_BYTES {
            return pool.alloc_chain(bytes, headroom, Purpose::Send);
        }
        let at = id.index as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Vec::new);
        }
        let Some(stock) = self.0.get_mut(at) else { return Err(NoBuffer) };
        if stock.is_empty() {
            let more =
                (0..REFILL).map_while(|_| pool.alloc(ROOM_BYTES, headroom, Purpose::Send).ok());
            stock.extend(more);
        }
        let mut m = stock.pop().ok_or(NoBuffer)?;
        m.set_len(bytes);
        Ok(Chain::from(m))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_is_filled_many_at_a_time_and_large_payloads_pass_it_by() {
        let mut pool = Pool::new(fulmar_mbuf::PoolConfig::default()).unwrap();
        let (mut stocks, id) = (Stocks::default(), SlotId { index: 3, generation: 0 });
        let chain = stocks.take(id, 18, 80, &mut pool).unwrap();
        assert_eq!(stocks.0[3].len(), REFILL - 1);
        assert!(chain.front().unwrap().headroom() >= 80);
        pool.free(chain);
        let large = stocks.take(id, ROOM_BYTES + 1, 80, &mut pool).unwrap();
        assert_eq!(stocks.0[3].len(), REFILL - 1);
        pool.free(large);
    }
}
