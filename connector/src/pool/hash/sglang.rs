//! Page hashes of SGLang, to the bit: SHA-256 over the last page's digest, if there is one, and the tokens.
//!
//! Source: `get_hash_str`, `compute_node_event_hash_values` and `hash_str_to_int64` in SGLang's `srt/mem_cache`.

use sha2::{Digest, Sha256};

use super::{BlockHash, BlockHasher, DIGEST_BYTES, EventForm, PoolError, Scheme};

/// What decides SGLang's hashes besides tokens. Neither the model nor an extra key is a part of those that events carry.
#[derive(Clone, Copy, Debug)]
pub struct SglangScope<'a> {
    /// `--page-size`.
    pub tokens_per_block: usize,
    /// A request's `cache_salt`, which SGLang takes for none if it is empty; PR 30827.
    pub salt: Option<&'a str>,
    /// Whether a page's items are pairs of neighbouring tokens, as with EAGLE: the token behind a page is a part of its hash.
    pub bigrams: bool,
}

impl BlockHasher {
    /// Prepares to hash pages as an SGLang does for its KV events.
    ///
    /// # Errors
    /// [`PoolError::NoTokens`].
    pub fn sglang(scope: &SglangScope<'_>) -> Result<Self, PoolError> {
        let scheme = if scope.bigrams { Scheme::Bigrams } else { Scheme::Plain(EventForm::Signed) };
        let (root, root_bytes) = match scope.salt.filter(|salt| !salt.is_empty()) {
            Some(salt) => (Sha256::new().chain_update(SALT_TAG).chain_update(salt).finalize().into(), DIGEST_BYTES),
            // No page has this digest, and nothing of it is hashed.
            None => ([0; DIGEST_BYTES], 0),
        };
        Self::with(BlockHash(root), root_bytes, scope.tokens_per_block, scheme)
    }
}

const SALT_TAG: &[u8] = b"sglang-cache-salt-v1\0";
