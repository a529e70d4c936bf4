//! Which block a request uses, which prefix it shares, what is reused next.
//!
//! A [`BlockPool`] knows physical blocks as numbers and never touches their bytes. What a request holds is a [`BlockTable`],
//! what a transfer holds is a [`Lease`]: both can only be made by the pool, cannot be copied, and give their blocks back when
//! they are dropped, so that no block can be freed twice, leaked, or freed by who does not hold it. A block that is filled on its own
//! goes from [`MutableBlock`] to [`CompleteBlock`] to [`RegisteredBlock`], and can be appended to a table.
//!
//! Over it: [`groups`] for models whose layers keep different things, [`RadixCache`] for prefixes by tokens, and [`WindowRadixCache`] for these
//! where some layers keep a window.
//!
//! ```
//! use kvferry::pool::{BlockHasher, BlockPool, HashScope};
//!
//! let hasher = BlockHasher::new(&HashScope { model: "llama", tokens_per_block: 4, adapter: None, salt: b"tenant 7" })?;
//! let mut pool = BlockPool::new(16)?;
//! let prompt: Vec<u32> = (0..10).collect();
//!
//! let first = pool.open(&[], 3)?; // 10 tokens need 3 blocks of 4
//! let hashes = hasher.chain(&prompt); // of the 2 complete ones
//! for (position, hash) in hashes.iter().enumerate() {
//!     pool.register(&first, position, *hash)?; // once their bytes are there, and verified
//! }
//! let lease = pool.lease(&first, 0..3)?; // the transfer holds them on its own
//! pool.release(first);
//!
//! let second = pool.open(&hashes, 1)?; // the same prompt again: 2 blocks are shared, 1 is new
//! assert_eq!(second.ids()[..2], lease.ids()[..2]);
//! # Ok::<(), kvferry::pool::PoolError>(())
//! ```

mod block_pool;
mod error;
mod free_list;
pub mod groups;
mod hash;
mod index;
mod prefix;
mod radix;
mod returns;
mod state;
mod table;
mod window_radix;

pub use block_pool::{BlockPool, PoolCounts, Registered};
pub use error::PoolError;
pub use hash::{
    BlockHash, BlockHasher, EventId, ExtraForm, Extras, HashScope, Lora, Media, NoneHash, SglangScope, VllmAlgorithm,
    VllmScope,
};
pub use index::PrefixChange;
pub use prefix::{PrefixCache, PrefixKind, PrefixLease, RequestTable, Text, UnknownPrefixKind};
pub use radix::{Kept, RadixCache, RadixCounts, Sequence, Sharing};
pub use state::{CompleteBlock, MutableBlock, OneBlock, RegisteredBlock};
pub use table::{BlockTable, Lease, Pin};
pub use window_radix::{WindowRadixCache, WindowRadixCounts, WindowSequence};

/// The primitives of `returns.rs`, for which `tests/loom.rs` has others.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::sync::{Mutex, PoisonError};
}

#[cfg(test)]
mod tests;
