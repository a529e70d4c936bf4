//! The scheduler's half of a tier: which block is in which frame, who needs it, and what is given up next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use kvferry_protocol::BlockId;

use crate::pool::{BlockHash, BlockPool, BlockTable, MutableBlock, PoolCounts, PoolError};

/// The scheduler's half of a tier: bookkeeping, no bytes, no waiting.
///
/// What an implementor holds: a hash is found only between its commit and its eviction; a frame that is reserved or pinned is
/// given to nobody else; a budget that is full evicts what was used longest ago and never what is pinned.
pub trait TierIndex: Send + fmt::Debug {
    /// How many of a sequence's first blocks are there. Pure.
    fn lookup(&self, hashes: &[BlockHash]) -> usize;

    /// Takes a frame for a block. `None` if the block is there already or on its way, or nothing can be evicted.
    fn reserve(&mut self, hash: BlockHash) -> Option<BlockId>;

    /// The frame is filled, on every rank: the block is found from now on.
    fn commit(&mut self, frame: BlockId);

    /// The frame will not be filled.
    fn cancel(&mut self, frame: BlockId);

    /// Pins the longest prefix of `hashes` that is there; the frames in order.
    fn pin(&mut self, hashes: &[BlockHash]) -> (PinId, Vec<BlockId>);

    /// Lets a pin go, and forgets those of its frames whose content turned out wrong.
    fn unpin(&mut self, pin: PinId, spoiled: &[BlockId]);

    /// How the frames are used.
    fn counts(&mut self) -> TierCounts;
}

/// Frames that one restore holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PinId(u64);

/// How a tier's frames are used, and what happened to them since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierCounts {
    /// All frames.
    pub frames: usize,
    /// Frames that hold a block that can be found.
    pub filled: usize,
    /// Since the start: blocks that were given up for others.
    pub evicted_total: u64,
}

/// An index over a block pool: least recently used first.
pub struct FrameIndex {
    pool: BlockPool,
    reserved: BTreeMap<BlockId, (MutableBlock, BlockHash)>,
    coming: BTreeSet<BlockHash>,
    pins: BTreeMap<PinId, BlockTable>,
    next_pin: u64,
}

impl FrameIndex {
    /// An index of empty frames.
    ///
    /// # Errors
    /// [`PoolError::Size`].
    pub fn new(frames: u32) -> Result<Self, PoolError> {
        let pool = BlockPool::new(frames as usize)?;
        let (reserved, coming, pins) = Default::default();
        Ok(Self { pool, reserved, coming, pins, next_pin: 0 })
    }
}

impl TierIndex for FrameIndex {
    fn lookup(&self, hashes: &[BlockHash]) -> usize {
        self.pool.lookup(hashes)
    }

    fn reserve(&mut self, hash: BlockHash) -> Option<BlockId> {
        if self.coming.contains(&hash) || self.pool.touch(&[hash]) == 1 {
            return None;
        }
        let block = self.pool.mutable().ok()?;
        let frame = block.id();
        self.coming.insert(hash);
        self.reserved.insert(frame, (block, hash));
        Some(frame)
    }

    fn commit(&mut self, frame: BlockId) {
        let Some((block, hash)) = self.reserved.remove(&frame) else { return };
        self.coming.remove(&hash);
        // The block is this pool's; dropped, it is cached.
        let published = self.pool.publish(block.complete(hash));
        debug_assert!(published.is_ok(), "{published:?}");
    }

    fn cancel(&mut self, frame: BlockId) {
        if let Some((_, hash)) = self.reserved.remove(&frame) {
            self.coming.remove(&hash);
        }
    }

    fn pin(&mut self, hashes: &[BlockHash]) -> (PinId, Vec<BlockId>) {
        let pin = PinId(self.next_pin);
        self.next_pin += 1;
        // Only cached blocks are taken, so the pool is never short of them.
        let Ok(table) = self.pool.open(hashes, 0) else { return (pin, Vec::new()) };
        let frames = table.ids().to_vec();
        self.pins.insert(pin, table);
        (pin, frames)
    }

    fn unpin(&mut self, pin: PinId, spoiled: &[BlockId]) {
        let Some(table) = self.pins.remove(&pin) else { return };
        for position in 0..table.len() {
            if spoiled.contains(&table.ids()[position]) {
                // Both the table and the position are its own.
                let _ = self.pool.unregister(&table, position);
            }
        }
        self.pool.release(table);
    }

    fn counts(&mut self) -> TierCounts {
        let PoolCounts { total, registered, evicted_total, .. } = self.pool.counts();
        TierCounts { frames: total, filled: registered, evicted_total }
    }
}

impl fmt::Debug for FrameIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameIndex({} reserved, {} pins)", self.reserved.len(), self.pins.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash::new([n; 32])
    }

    fn keep(index: &mut FrameIndex, n: u8) -> BlockId {
        let frame = index.reserve(hash(n)).unwrap();
        index.commit(frame);
        frame
    }

    #[test]
    fn a_block_is_found_once_it_is_committed_and_is_kept_once() {
        let mut index = FrameIndex::new(4).unwrap();
        let frame = index.reserve(hash(1)).unwrap();
        assert_eq!((index.lookup(&[hash(1)]), index.reserve(hash(1))), (0, None), "on its way");
        index.commit(frame);
        assert_eq!((index.lookup(&[hash(1), hash(2)]), index.reserve(hash(1))), (1, None), "there");
        let frame = index.reserve(hash(2)).unwrap();
        index.cancel(frame);
        assert_eq!(index.lookup(&[hash(2)]), 0);
        assert!(index.reserve(hash(2)).is_some(), "a cancelled one may come again");
    }

    #[test]
    fn the_least_recently_used_goes_first_and_never_a_pinned_or_reserved_one() {
        let mut index = FrameIndex::new(3).unwrap();
        let frames = [1, 2, 3].map(|n| keep(&mut index, n));
        assert_eq!(index.reserve(hash(1)), None, "a block that is offered again was used again");
        let (pin, pinned) = index.pin(&[hash(2)]);
        assert_eq!(pinned, [frames[1]]);
        assert_eq!(index.reserve(hash(4)), Some(frames[2]), "3 is the oldest that is free");
        assert_eq!(index.reserve(hash(5)), Some(frames[0]));
        assert_eq!(index.reserve(hash(6)), None, "the rest is pinned or reserved");
        index.unpin(pin, &[]);
        assert_eq!(index.reserve(hash(6)), Some(frames[1]));
        assert_eq!(index.counts(), TierCounts { frames: 3, filled: 0, evicted_total: 3 });
    }

    #[test]
    fn a_spoiled_frame_is_not_found_again() {
        let mut index = FrameIndex::new(3).unwrap();
        keep(&mut index, 1);
        let second = keep(&mut index, 2);
        let (pin, frames) = index.pin(&[hash(1), hash(2), hash(3)]);
        assert_eq!(frames.len(), 2);
        index.unpin(pin, &[second]);
        index.unpin(pin, &[frames[0]]);
        assert_eq!(index.lookup(&[hash(1), hash(2)]), 1, "a pin that is gone spoils nothing");
    }
}
