//! A tier in host memory: a KV cache whose blocks lie one after another, a run each.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry_kernels::{HostKvCache, KernelError, KvDtype, Placement};
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{KvLayout, KvShape};

use super::{Tier, TierError};

/// Blocks in host memory; frame `n` is block `n` of the memory.
#[derive(Debug)]
pub struct HostTier {
    memory: HostKvCache,
    /// Of each frame that holds something. A leaf lock, held for one look.
    digests: Mutex<Vec<Option<Digest>>>,
}

impl HostTier {
    /// How many blocks of a cache fit into a budget.
    #[must_use]
    pub fn frames(cache: &KvLayout, bytes: u64) -> u32 {
        u32::try_from(bytes / cache.shape().block_bytes().max(1)).unwrap_or(u32::MAX)
    }

    /// Maps memory for the blocks of a cache, at most `bytes`.
    ///
    /// # Errors
    /// [`KernelError`] if not one block fits, or the system has not the memory.
    pub fn new(cache: &KvLayout, bytes: u64) -> Result<Self, KernelError> {
        let shape = KvShape { blocks: Self::frames(cache, bytes), ..cache.shape().clone() };
        let frames = shape.blocks as usize;
        // The tier never looks at elements: any type whose size divides a run will do.
        let even = shape.run_bytes.iter().all(|bytes| bytes % 4 == 0);
        let dtype = if even { KvDtype::F32 } else { KvDtype::F16 };
        let memory = HostKvCache::new(shape, dtype, cache.order().block_outermost(), Placement::OneRegion)?;
        Ok(Self { memory, digests: Mutex::new(vec![None; frames]) })
    }

    fn digests(&self) -> MutexGuard<'_, Vec<Option<Digest>>> {
        self.digests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, frame: BlockId, digest: Option<Digest>) -> Result<(), TierError> {
        match self.digests().get_mut(frame.get() as usize) {
            Some(kept) => {
                *kept = digest;
                Ok(())
            }
            None => Err(TierError::Full { tier: self.name(), frame }),
        }
    }
}

impl Tier for HostTier {
    fn name(&self) -> &'static str {
        "host memory"
    }

    fn memory(&self) -> &HostKvCache {
        &self.memory
    }

    fn enter(&self, frame: BlockId) -> Result<BlockId, TierError> {
        self.set(frame, None).map(|()| frame)
    }

    fn store(&self, frame: BlockId, _berth: BlockId, digest: Digest) -> Result<(), TierError> {
        self.set(frame, Some(digest))
    }

    fn fetch(&self, frame: BlockId) -> Result<(BlockId, Digest), TierError> {
        let kept = self.digests().get(frame.get() as usize).copied().flatten();
        kept.map(|digest| (frame, digest)).ok_or(TierError::Empty { tier: self.name(), frame })
    }

    fn leave(&self, _berth: BlockId) {}

    fn forget(&self, frame: BlockId) {
        // A frame that does not exist holds nothing already.
        let _ = self.set(frame, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(bytes: u64) -> Result<HostTier, KernelError> {
        let shape = KvShape { layers: 2, blocks: 3, heads: 2, tokens_per_block: 4, run_bytes: vec![8, 8] };
        HostTier::new(&KvLayout::packed(shape, "LPBNHC".parse().unwrap()).unwrap(), bytes)
    }

    #[test]
    fn a_budget_is_whole_blocks_each_in_one_run() {
        let tier = tier(1000).unwrap();
        let layout = tier.memory().layout();
        assert_eq!(layout.shape().blocks, 3, "256 bytes each");
        assert_eq!(layout.order().to_string(), "BLPNHC");
        assert!(super::tests::tier(255).is_err(), "not one block");
    }

    #[test]
    fn a_frame_gives_back_only_what_was_stored_in_it() {
        let tier = tier(512).unwrap();
        let (frame, digest) = (BlockId::new(1), Digest::new(7));
        let empty = Err(TierError::Empty { tier: "host memory", frame });
        assert_eq!(tier.fetch(frame), empty);
        let berth = tier.enter(frame).unwrap();
        assert_eq!(tier.fetch(frame), empty, "entered, not stored");
        tier.store(frame, berth, digest).unwrap();
        assert_eq!(tier.fetch(frame), Ok((frame, digest)));
        tier.forget(frame);
        assert_eq!(tier.fetch(frame), empty);
        tier.store(frame, berth, digest).unwrap();
        tier.enter(frame).unwrap();
        assert_eq!(tier.fetch(frame), empty, "given up for a new one");
        assert!(tier.enter(BlockId::new(2)).is_err(), "no such frame");
    }
}
