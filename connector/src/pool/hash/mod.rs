//! The identity of a block's content: a chain of hashes over the parent, the tokens, and what else decides the bytes.
//!
//! A collision would hand one tenant the K/V of another, so kvferry's own hash is a cryptographic one: in wide use, reviewed, and
//! with the CPU's SHA instructions about as fast as any. With 16 tokens a block costs two compressions: 32 bytes of parent, 64 of
//! tokens, and the padding fill 128 bytes exactly.
//!
//! An engine beside vLLM or SGLang names blocks as they do, to the bit ([`BlockHasher::vllm`], [`BlockHasher::sglang`]), so that
//! stores, routers and events of one are understood by the other.

mod encode;
mod extra;
mod sglang;
mod vllm;

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PoolError;

pub use extra::{ExtraForm, Extras, Lora, Media};
pub use sglang::SglangScope;
pub use vllm::{NoneHash, VllmAlgorithm, VllmScope};

/// Says which tokens a block holds, after which tokens, for which model and tenant.
///
/// Of a scheme whose digests are shorter than 32 bytes the rest is zero: [`BlockHasher::digest`] has the digest alone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Wraps bytes, from a peer or a store.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub const fn get(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for BlockHash {
    /// Writes the first 8 bytes, enough to find it in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// All that decides a block's bytes besides its tokens, for kvferry's own hash. Blocks of different scopes never match.
#[derive(Clone, Copy, Debug)]
pub struct HashScope<'a> {
    /// The model, with all that changes K/V bytes: revision, KV dtype.
    pub model: &'a str,
    /// Tokens in a block; the hash of a chain says nothing about a chain of another size.
    pub tokens_per_block: usize,
    /// The adapter (LoRA), if one is used.
    pub adapter: Option<&'a str>,
    /// What separates tenants: requests with different salts never share a block. Empty: shared by all who leave it empty.
    pub salt: &'a [u8],
}

/// Hashes the blocks of one scope.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    root: BlockHash,
    /// As many bytes of the root are hashed with a first block.
    root_bytes: usize,
    tokens_per_block: usize,
    scheme: Scheme,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scheme {
    /// SHA-256 over parent and tokens, little-endian. SGLang's pages are the same behind another root.
    Plain(EventForm),
    /// SHA-256 over parent and pairs of neighbouring tokens.
    Bigrams,
    Vllm(VllmAlgorithm, ExtraForm),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EventForm {
    Unsigned,
    Signed,
}

/// The integer by which KV events name a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EventId {
    /// vLLM's: the digest's last 8 bytes, big-endian. Source: `maybe_convert_block_hash` in `v1/core/kv_cache_utils.py`.
    Unsigned(u64),
    /// SGLang's: its first 8 bytes. Source: `hash_str_to_int64` in `srt/mem_cache`.
    Signed(i64),
}

impl BlockHasher {
    /// Prepares to hash blocks of a scope with kvferry's own hash.
    ///
    /// # Errors
    /// [`PoolError::NoTokens`] if a block would have no tokens.
    pub fn new(scope: &HashScope<'_>) -> Result<Self, PoolError> {
        let mut hash = Sha256::new();
        hash.update(ROOT_TAG);
        hash.update((scope.tokens_per_block as u64).to_le_bytes());
        // Lengths go before the bytes, so that no two scopes give the same input.
        for field in [Some(scope.model.as_bytes()), scope.adapter.map(str::as_bytes), Some(scope.salt)] {
            hash.update(field.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
            hash.update(field.unwrap_or_default());
        }
        let root = BlockHash(hash.finalize().into());
        Self::with(root, DIGEST_BYTES, scope.tokens_per_block, Scheme::Plain(EventForm::Unsigned))
    }

    fn with(root: BlockHash, root_bytes: usize, tokens_per_block: usize, scheme: Scheme) -> Result<Self, PoolError> {
        match tokens_per_block {
            0 => Err(PoolError::NoTokens),
            _ => Ok(Self { root, root_bytes, tokens_per_block, scheme }),
        }
    }

    /// The parent of a sequence's first block.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Tokens in a block.
    #[must_use]
    pub fn tokens_per_block(&self) -> usize {
        self.tokens_per_block
    }

    /// Hashes one complete block after its parent. Bigrams need the token behind the block, too.
    ///
    /// # Errors
    /// [`PoolError::IncompleteBlock`] unless `tokens` fill a block.
    pub fn next(&self, parent: BlockHash, tokens: &[u32]) -> Result<BlockHash, PoolError> {
        let wanted = self.tokens_per_block + self.lookahead();
        if tokens.len() != wanted {
            return Err(PoolError::IncompleteBlock { found: tokens.len(), tokens_per_block: wanted });
        }
        // A position of its own does not matter without extra keys.
        self.chain_after(parent, 0, tokens, &Extras::default())?.pop().ok_or(PoolError::NoTokens)
    }

    /// Hashes all complete blocks of a sequence from its start; tokens of a last, incomplete block are left out.
    #[must_use]
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockHash> {
        // Only extra keys can be refused.
        self.chain_after(self.root, 0, tokens, &Extras::default()).unwrap_or_default()
    }

    /// As [`chain`](Self::chain), of a sequence whose blocks are named by more than their tokens.
    ///
    /// # Errors
    /// [`PoolError::NoExtras`] unless the scheme is vLLM's; [`PoolError::SameText`] and [`PoolError::LongExtras`] for keys of which
    /// not even vLLM could tell the hash.
    pub fn chain_with(&self, tokens: &[u32], extras: &Extras<'_>) -> Result<Vec<BlockHash>, PoolError> {
        self.chain_after(self.root, 0, tokens, extras)
    }

    /// Hashes all complete blocks of `tokens`, which come after `known` blocks of the sequence, the last one of which is `parent`
    /// (the [`root`](Self::root) for none). `extras` are the whole sequence's.
    ///
    /// # Errors
    /// As [`chain_with`](Self::chain_with).
    pub fn chain_after(
        &self,
        parent: BlockHash,
        known: usize,
        tokens: &[u32],
        extras: &Extras<'_>,
    ) -> Result<Vec<BlockHash>, PoolError> {
        if let Scheme::Vllm(algorithm, form) = self.scheme {
            return vllm::chain(self, algorithm, form, vllm::Sequence { parent, known, tokens, extras });
        }
        if !extras.is_none() {
            return Err(PoolError::NoExtras);
        }
        let blocks = tokens.len().saturating_sub(self.lookahead()) / self.tokens_per_block;
        let mut hashes = Vec::with_capacity(blocks);
        let (mut parent, mut buffer) = (parent, Vec::new());
        for block in 0..blocks {
            let start = block * self.tokens_per_block;
            let words = &tokens[start..start + self.tokens_per_block + self.lookahead()];
            buffer.clear();
            buffer.extend_from_slice(self.parent_bytes(&parent));
            match self.scheme {
                Scheme::Bigrams => {
                    buffer.extend(words.windows(2).flatten().flat_map(|token| token.to_le_bytes()));
                }
                _ => buffer.extend(words.iter().flat_map(|token| token.to_le_bytes())),
            }
            parent = BlockHash(Sha256::digest(&buffer).into());
            hashes.push(parent);
        }
        Ok(hashes)
    }

    /// The digest itself, as the engine whose scheme it is writes it: 32 bytes, or 16 of XXH3-128.
    #[must_use]
    pub fn digest<'h>(&self, hash: &'h BlockHash) -> &'h [u8] {
        &hash.0[..self.digest_bytes()]
    }

    /// The digest with the number of a cache group, by which an engine with several groups finds blocks.
    ///
    /// Source: `make_block_hash_with_group_id` in vLLM's `v1/core/kv_cache_utils.py`, and its offload keys.
    #[must_use]
    pub fn with_group(&self, hash: &BlockHash, group: u32) -> Vec<u8> {
        [self.digest(hash), &group.to_be_bytes()].concat()
    }

    /// The integer by which KV events name the block. Blocks that kvferry named go by vLLM's form.
    #[must_use]
    pub fn event_id(&self, hash: &BlockHash) -> EventId {
        let eight = |bytes: &[u8]| bytes.iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        let digest = self.digest(hash);
        match self.scheme {
            Scheme::Plain(EventForm::Signed) | Scheme::Bigrams => EventId::Signed(eight(&digest[..8]) as i64),
            _ => EventId::Unsigned(eight(&digest[digest.len() - 8..])),
        }
    }

    fn digest_bytes(&self) -> usize {
        match self.scheme {
            Scheme::Vllm(algorithm, _) => algorithm.digest_bytes(),
            _ => DIGEST_BYTES,
        }
    }

    /// What is hashed of a parent.
    fn parent_bytes<'h>(&self, parent: &'h BlockHash) -> &'h [u8] {
        let len = if *parent == self.root { self.root_bytes } else { self.digest_bytes() };
        &parent.0[..len]
    }

    /// Tokens behind a block that its hash depends on.
    fn lookahead(&self) -> usize {
        usize::from(self.scheme == Scheme::Bigrams)
    }
}

/// Keeps roots apart from blocks, and this way of hashing from later ones.
const ROOT_TAG: &[u8] = b"kvferry block chain 1\0";

/// Of SHA-256.
const DIGEST_BYTES: usize = 32;

#[cfg(test)]
mod tests;
