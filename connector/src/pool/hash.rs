//! The identity of a block's content: a chained SHA-256 over the parent, the tokens, and what else decides the bytes.
//!
//! A collision would hand one tenant the K/V of another, so the hash is a cryptographic one: in wide use, reviewed, and with
//! the CPU's SHA instructions about as fast as any. With 16 tokens a block costs two compressions: 32 bytes of parent, 64 of
//! tokens, and the padding fill 128 bytes exactly.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PoolError;

/// Says which tokens a block holds, after which tokens, for which model and tenant.
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

/// All that decides a block's bytes besides its tokens. Blocks of different scopes never match.
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
    tokens_per_block: usize,
}

impl BlockHasher {
    /// Prepares to hash blocks of a scope.
    ///
    /// # Errors
    /// [`PoolError::NoTokens`] if a block would have no tokens.
    pub fn new(scope: &HashScope<'_>) -> Result<Self, PoolError> {
        if scope.tokens_per_block == 0 {
            return Err(PoolError::NoTokens);
        }
        let mut hash = Sha256::new();
        hash.update(ROOT_TAG);
        hash.update((scope.tokens_per_block as u64).to_le_bytes());
        // Lengths go before the bytes, so that no two scopes give the same input.
        for field in [Some(scope.model.as_bytes()), scope.adapter.map(str::as_bytes), Some(scope.salt)] {
            hash.update(field.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
            hash.update(field.unwrap_or_default());
        }
        Ok(Self { root: BlockHash(hash.finalize().into()), tokens_per_block: scope.tokens_per_block })
    }

    /// The parent of a sequence's first block.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Hashes one complete block after its parent.
    ///
    /// # Errors
    /// [`PoolError::IncompleteBlock`] unless `tokens` fill a block.
    pub fn next(&self, parent: BlockHash, tokens: &[u32]) -> Result<BlockHash, PoolError> {
        if tokens.len() != self.tokens_per_block {
            let (found, tokens_per_block) = (tokens.len(), self.tokens_per_block);
            return Err(PoolError::IncompleteBlock { found, tokens_per_block });
        }
        Ok(hash_block(parent, tokens))
    }

    /// Hashes all complete blocks of a sequence from its start; tokens of a last, incomplete block are left out.
    #[must_use]
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let blocks = tokens.chunks_exact(self.tokens_per_block);
        blocks
            .scan(self.root, |parent, block| {
                *parent = hash_block(*parent, block);
                Some(*parent)
            })
            .collect()
    }
}

fn hash_block(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hash = Sha256::new();
    hash.update(parent.0);
    let mut buffer = [0_u8; 4 * TOKENS_AT_ONCE];
    for tokens in tokens.chunks(TOKENS_AT_ONCE) {
        let bytes = &mut buffer[..4 * tokens.len()];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(bytes);
    }
    BlockHash(hash.finalize().into())
}

/// Keeps roots apart from blocks, and this way of hashing from later ones.
const ROOT_TAG: &[u8] = b"kvferry block chain 1\0";

const TOKENS_AT_ONCE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn scope() -> HashScope<'static> {
        HashScope { model: "llama", tokens_per_block: 4, adapter: None, salt: b"" }
    }

    fn hex(hash: BlockHash) -> String {
        hash.get().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_chain_has_the_bytes_that_an_independent_sha256_gives() {
        let hasher = BlockHasher::new(&scope()).unwrap();
        let tokens: Vec<u32> = (0..9).map(|i| i * 70_000).collect();
        let got: Vec<_> = std::iter::once(hasher.root()).chain(hasher.chain(&tokens)).map(hex).collect();
        assert_eq!(got, GOLDEN);
    }

    #[test]
    fn a_chain_is_its_blocks_one_by_one() {
        let hasher = BlockHasher::new(&HashScope { tokens_per_block: 40, ..scope() }).unwrap();
        let tokens: Vec<u32> = (0..99).collect();
        let first = hasher.next(hasher.root(), &tokens[..40]).unwrap();
        let second = hasher.next(first, &tokens[40..80]).unwrap();
        assert_eq!(hasher.chain(&tokens), [first, second]);
    }

    #[test]
    fn only_a_complete_block_has_a_hash() {
        let hasher = BlockHasher::new(&scope()).unwrap();
        for found in [0, 3, 5] {
            let want = PoolError::IncompleteBlock { found, tokens_per_block: 4 };
            assert_eq!(hasher.next(hasher.root(), &vec![1; found]), Err(want));
        }
        assert!(hasher.chain(&[1, 2, 3]).is_empty());
        let none = BlockHasher::new(&HashScope { tokens_per_block: 0, ..scope() });
        assert_eq!(none.unwrap_err(), PoolError::NoTokens);
    }

    #[test]
    fn whatever_decides_the_bytes_decides_the_hash() {
        let tokens = [1, 2, 3, 4];
        let scopes = [
            scope(),
            HashScope { model: "llamb", ..scope() },
            HashScope { tokens_per_block: 2, ..scope() },
            HashScope { adapter: Some(""), ..scope() },
            HashScope { adapter: Some("a"), ..scope() },
            HashScope { adapter: Some("b"), ..scope() },
            HashScope { salt: b"a", ..scope() },
            HashScope { model: "llam", salt: b"a", ..scope() },
        ];
        let mut seen = std::collections::BTreeSet::new();
        for scope in scopes {
            let hasher = BlockHasher::new(&scope).unwrap();
            let first = hasher.chain(&tokens)[0];
            assert!(seen.insert(first), "{scope:?}");
            let again = hash_block(first, &tokens[..scope.tokens_per_block]);
            assert!(seen.insert(again), "the parent counts: {scope:?}");
        }
    }

    /// The root and two blocks: `python3 -c` with hashlib and struct, from the documentation above alone.
    const GOLDEN: [&str; 3] = [
        "df7847e0a35b90390ae5d5ab8bee66e4e3c099ba5a4487e425904a3072286d84",
        "1585f2cbc0b7cebce223e6ee6d31ca44d7351ae38ad3b44e61d4b37c87ea4e1e",
        "febcc6b345e1c9c966dc2734404741a383354d64ed5befad7d0f03ca2303303f",
    ];
}
