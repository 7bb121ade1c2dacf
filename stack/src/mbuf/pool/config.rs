//! The memory limits of a pool, and why it cannot be created.

#![forbid(unsafe_code)]

/// The memory limits of a pool. The two shares and the reserve must not exceed the budget together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Maximum bytes of storage in use.
    pub budget_bytes: usize,
    /// Maximum of [`Purpose::Send`](crate::mbuf::Purpose::Send).
    pub send_share_bytes: usize,
    /// Maximum of [`Purpose::Receive`](crate::mbuf::Purpose::Receive).
    pub receive_share_bytes: usize,
    /// Bytes reserved for [`Purpose::Control`](crate::mbuf::Purpose::Control), which may use free bytes of the shares
    /// as well.
    pub control_reserve_bytes: usize,
    /// Request huge pages (`MADV_HUGEPAGE`).
    pub huge_pages: bool,
}

impl PoolConfig {
    /// The default shares of a budget: a sixteenth is reserved for control, and half of the rest each is
    /// the send and the receive share.
    pub fn with_budget(bytes: usize) -> PoolConfig {
        let control_reserve_bytes = bytes / 16;
        let share = (bytes - control_reserve_bytes) / 2;
        PoolConfig {
            budget_bytes: bytes,
            send_share_bytes: share,
            receive_share_bytes: share,
            control_reserve_bytes,
            huge_pages: true,
        }
    }
}

impl Default for PoolConfig {
    /// 256 MiB: 120 MiB to send, 120 MiB to receive, 16 MiB reserved for control.
    fn default() -> Self {
        PoolConfig::with_budget(256 << 20)
    }
}

/// Why a pool cannot be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// The shares and the reserve together exceed the budget.
    SharesExceedBudget,
    /// The budget is larger than 128 GiB.
    BudgetTooLarge,
    /// The system has no memory for the first slab.
    NoMemory,
}

impl core::fmt::Display for PoolError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            PoolError::SharesExceedBudget => {
                "the send share, the receive share and the control reserve exceed the pool budget"
            }
            PoolError::BudgetTooLarge => "the pool budget is larger than 128 GiB",
            PoolError::NoMemory => "the system has no memory for the buffer pool",
        })
    }
}

impl core::error::Error for PoolError {}
