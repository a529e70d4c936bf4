//! Which prefix is there, kind by kind: what each needs of a prefix to go on behind it.
//!
//! | kind | a prefix can be used if |
//! |---|---|
//! | full, latent, sink | all its blocks are there |
//! | window | the blocks of its last `window - 1` tokens are |
//! | chunked | the blocks since the last chunk began are |
//! | state | the state at its end is |
//!
//! Where a drafter reads along, the last block that was found is computed again, since its KV depends on what followed.
//!
//! Source: `find_longest_cache_hit` of the classes in vLLM's `v1/core/single_type_kv_cache_manager.py`, 0.32.0.

use kvferry_protocol::BlockId;

use super::super::{BlockHash, BlockPool};
use super::{LayerKind, LayerSpec};

/// Groups of one spec, which are looked up together.
pub(super) struct SpecSet {
    pub(super) spec: LayerSpec,
    pub(super) groups: Vec<usize>,
    /// Whether one of them is read by a drafter.
    pub(super) draft: bool,
}

/// What one set found: blocks of each of its groups, null where nothing is needed, and how many tokens they are good for.
#[derive(Clone, Default)]
pub(super) struct Found {
    pub(super) blocks: Vec<Vec<BlockId>>,
    pub(super) tokens: usize,
}

/// A sequence's hashes beside the pool.
#[derive(Clone, Copy)]
pub(super) struct Lookup<'a> {
    pub(super) pool: &'a BlockPool,
    pub(super) null: BlockId,
    pub(super) hashes: &'a [BlockHash],
    pub(super) hash_tokens: usize,
    /// What each hit is a multiple of.
    pub(super) hit_tokens: usize,
}

impl Lookup<'_> {
    /// The longest prefix of at most `most` tokens that a set of groups can go on behind; without its last block if `draft`.
    pub(super) fn longest(&self, set: &SpecSet, most: usize, draft: bool) -> Found {
        let size = set.spec.tokens_per_block as usize;
        match set.spec.kind {
            LayerKind::Window { window_tokens, .. } => self.window(set, size, window_tokens as usize, most, draft),
            LayerKind::Chunked { chunk_tokens } => self.chunked(set, size, chunk_tokens as usize, most),
            LayerKind::State { .. } => self.state(set, size, most),
            _ => self.full(set, size, most, draft),
        }
    }

    fn full(&self, set: &SpecSet, size: usize, most: usize, draft: bool) -> Found {
        let mut blocks = vec![vec![]; set.groups.len()];
        let whole = (0..most / size).take_while(|at| self.push(set, *at, &mut blocks)).count();
        let mut tokens = whole * size;
        if draft && tokens > 0 {
            tokens -= self.hit_tokens.min(size);
        }
        tokens -= tokens % self.hit_tokens;
        blocks.iter_mut().for_each(|blocks| blocks.truncate(tokens.div_ceil(size)));
        Found { blocks, tokens }
    }

    fn window(&self, set: &SpecSet, size: usize, window: usize, most: usize, draft: bool) -> Found {
        let (limit, needed) = (most / size, needed_blocks(window, size, draft));
        let mut blocks = vec![vec![self.null; limit]; set.groups.len()];
        let aligned = |len: usize| (len * size).is_multiple_of(self.hit_tokens);
        // From the right: the run of blocks that are there, and end where a hit may end.
        let mut run = 0;
        let mut len = None;
        for at in (0..limit).rev() {
            let Some(found) = self.all(set, at) else {
                run = 0;
                continue;
            };
            if run == 0 && !aligned(if draft { at } else { at + 1 }) {
                continue;
            }
            blocks.iter_mut().zip(found).for_each(|(blocks, id)| blocks[at] = id);
            run += 1;
            if run >= needed {
                len = Some(at + run);
                break;
            }
        }
        // A run that begins with the sequence needs nothing before it.
        let whole = len.is_some();
        let mut len = len.unwrap_or(run);
        while !whole && !aligned(len) {
            len -= 1;
        }
        if draft && len > 0 {
            len -= 1;
            while !aligned(len) {
                len -= 1;
            }
        }
        blocks.iter_mut().for_each(|blocks| blocks.truncate(len));
        Found { blocks, tokens: len * size }
    }

    fn chunked(&self, set: &SpecSet, size: usize, chunk: usize, most: usize) -> Found {
        let start = most / chunk * chunk / size;
        let mut blocks = vec![vec![self.null; start]; set.groups.len()];
        let found = (start..most / size).take_while(|at| self.push(set, *at, &mut blocks)).count();
        Found { blocks, tokens: (start + found) * size }
    }

    fn state(&self, set: &SpecSet, size: usize, most: usize) -> Found {
        for at in (0..most / size).rev() {
            if ((at + 1) * size).is_multiple_of(self.hit_tokens)
                && let Some(found) = self.all(set, at)
            {
                let blocks = found.into_iter().map(|id| [vec![self.null; at], vec![id]].concat()).collect();
                return Found { blocks, tokens: (at + 1) * size };
            }
        }
        Found { blocks: vec![vec![]; set.groups.len()], tokens: 0 }
    }

    /// Appends a block of each group, if all have it.
    fn push(&self, set: &SpecSet, at: usize, blocks: &mut [Vec<BlockId>]) -> bool {
        let Some(found) = self.all(set, at) else { return false };
        blocks.iter_mut().zip(found).for_each(|(blocks, id)| blocks.push(id));
        true
    }

    fn all(&self, set: &SpecSet, at: usize) -> Option<Vec<BlockId>> {
        let hash = block_hash(self.hashes, set.spec.tokens_per_block as usize / self.hash_tokens, at)?;
        set.groups.iter().map(|group| self.pool.cached(&group_hash(hash, *group))).collect()
    }
}

/// Whole blocks that a window needs before the next token, and one more if the last of them is computed again.
pub(super) fn needed_blocks(window: usize, size: usize, draft: bool) -> usize {
    (window - 1).div_ceil(size) + usize::from(draft)
}

/// What names a block of `hashes_per_block` hashes: the last of them, which says all before it.
pub(super) fn block_hash(hashes: &[BlockHash], hashes_per_block: usize, at: usize) -> Option<BlockHash> {
    hashes.get((at + 1) * hashes_per_block - 1).copied()
}

/// The name of a block in one group: its hash, with the group's number in the last 4 bytes, big-endian, by exclusive or. Group 0 keeps the
/// hash. It is its own inverse.
///
/// vLLM appends the 4 bytes. Here two names are the same only for hashes that differ in nothing but these, which of a digest of 256 bits
/// nobody finds, and which shorter digests leave zero.
pub(super) fn group_hash(hash: BlockHash, group: usize) -> BlockHash {
    let mut bytes = *hash.get();
    bytes[28..].iter_mut().zip((group as u32).to_be_bytes()).for_each(|(byte, of_group)| *byte ^= of_group);
    BlockHash::new(bytes)
}
