//! Where blocks are kept outside the engine's own cache, so that a prompt that begins like an earlier one need not be computed.
//!
//! A tier has two halves, as the connector has. The *index*, beside the scheduler, says which block is in which frame
//! ([`TierIndex`]; [`FrameIndex`] is one over a block pool). The *bytes* lie beside each worker ([`Tier`]; [`HostTier`] keeps
//! them in host memory). The two meet through the step's metadata and results, so that a frame counts as filled only when every
//! rank has reported it.
//!
//! ```text
//! scheduler                    worker
//! reserve ──▶ Store ────────▶  enter, copy the pages (a mover, when no transfer waits), store
//! commit or cancel  ◀────────  kept: copied, stored, dropped, late
//! pin ──────▶ Restore ──────▶  fetch, copy to the request's pages, compare digests, leave
//! unpin  ◀───────────────────  restored, or missed with the good prefix
//! ```
//!
//! What enters is complete blocks only, computed here or verified. Each keeps its digest, in the protocol's algebra, and what
//! comes back with another one is a miss. A tier that is full, slow, stuck or broken costs hits, and nothing else: its two
//! calls that may wait have a thread each, and the queues before them are short and drop.

mod host;
mod index;

use std::fmt;

use kvferry_kernels::HostKvCache;
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;

pub use host::HostTier;
pub use index::{FrameIndex, PinId, TierCounts, TierIndex};

/// The worker's half of a tier: the bytes.
///
/// A *frame* is one block's place in the tier, numbered from 0 by the index; a *berth* is a block of [`memory`](Self::memory),
/// through which bytes come and go. A tier in host memory uses frame `n` as berth `n`; one on a disk has few berths and many
/// frames.
///
/// What an implementor holds:
///
/// 1. [`enter`](Self::enter), [`leave`](Self::leave) and [`forget`](Self::forget) never wait; they are called by the connector's
///    driver.
/// 2. [`store`](Self::store) and [`fetch`](Self::fetch) may wait, each on its own thread. While one does, later ones queue, and
///    are dropped when the short queue is full.
/// 3. From `enter` until `store` returned (or `leave`, if nothing is stored) a berth is the connector's to write and then the
///    tier's to read. From a `fetch` that succeeded until `leave` the tier does not change it.
/// 4. A frame is never given out half filled: `fetch` succeeds only after a `store` of the same frame did, and returns the digest
///    that was stored. Bytes are compared with it before anybody uses them, so bit rot costs a hit, not a wrong token.
/// 5. `enter` on a frame gives its old content up.
/// 6. [`memory`](Self::memory) stays mapped until the tier is dropped, also while a call waits; the connector registers it with
///    the transport, so that a peer's blocks land in berths directly.
pub trait Tier: Send + Sync + fmt::Debug {
    /// A word for logs.
    fn name(&self) -> &'static str;

    /// The memory of the berths: the engine's shape but for the number of blocks, and any layout.
    fn memory(&self) -> &HostKvCache;

    /// Makes room for what `frame` will keep, and gives its old content up.
    ///
    /// # Errors
    /// [`TierError::Full`] if no berth is free: the block is not stored.
    fn enter(&self, frame: BlockId) -> Result<BlockId, TierError>;

    /// Keeps what lies in `berth`, whose digest is `digest`; takes the berth over, also when it fails.
    ///
    /// # Errors
    /// [`TierError`]; the frame holds nothing then.
    fn store(&self, frame: BlockId, berth: BlockId, digest: Digest) -> Result<(), TierError>;

    /// Brings a frame's bytes into a berth, and says what their digest was when they were stored.
    ///
    /// # Errors
    /// [`TierError`]; no berth is taken then.
    fn fetch(&self, frame: BlockId) -> Result<(BlockId, Digest), TierError>;

    /// Gives a berth back that `enter` or `fetch` gave.
    fn leave(&self, berth: BlockId);

    /// The frame's content turned out wrong.
    fn forget(&self, frame: BlockId);
}

/// Why a tier did not keep or bring a block: a miss, never more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// No berth is free.
    #[error("tier {tier}: no room for frame {frame}; give the tier more memory, or store less")]
    Full {
        /// The tier's name.
        tier: &'static str,
        /// The frame.
        frame: BlockId,
    },
    /// The frame was never filled, or its content was given up.
    #[error("tier {tier}: frame {frame} holds nothing")]
    Empty {
        /// The tier's name.
        tier: &'static str,
        /// The frame.
        frame: BlockId,
    },
    /// The medium failed.
    #[error("tier {tier}: frame {frame}: {problem}")]
    Medium {
        /// The tier's name.
        tier: &'static str,
        /// The frame.
        frame: BlockId,
        /// What happened, and how to mend it.
        problem: String,
    },
}
