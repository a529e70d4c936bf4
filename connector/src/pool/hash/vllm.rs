//! Block hashes of vLLM, to the bit.
//!
//! Source: `hash_block_tokens`, `init_none_hash` and `resolve_none_hash_seed` in `vllm/v1/core/kv_cache_utils.py`, and
//! `vllm/utils/hashing.py`; read in 0.32.0.

use sha2::{Digest, Sha256};
use twox_hash::XxHash3_128;

use super::encode::{Cbor, Encode, PICKLE_FRAME_BYTES, Pickle};
use super::extra::{ExtraForm, Extras};
use super::{BlockHash, BlockHasher, DIGEST_BYTES, PoolError, Scheme};

/// vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VllmAlgorithm {
    /// `sha256`, the default: SHA-256 of the pickle.
    #[default]
    Sha256,
    /// `sha256_cbor`: SHA-256 of canonical CBOR.
    Sha256Cbor,
    /// `xxhash`: XXH3-128 of the pickle. Not cryptographic: who can choose prompts and knows the seed can forge a prefix.
    Xxhash,
    /// `xxhash_cbor`: XXH3-128 of canonical CBOR. Not cryptographic either.
    XxhashCbor,
}

/// What decides vLLM's hashes besides tokens and extra keys. The model is no part of them.
#[derive(Clone, Copy, Debug)]
pub struct VllmScope<'a> {
    /// `--prefix-caching-hash-algo`.
    pub algorithm: VllmAlgorithm,
    /// `hash_block_size`: the block size, or with several cache groups what divides all their sizes.
    pub tokens_per_block: usize,
    /// The parent of first blocks.
    pub none_hash: NoneHash<'a>,
    /// How the engine's version writes extra keys.
    pub extra_form: ExtraForm,
}

/// Where vLLM's `NONE_HASH`, the parent of first blocks, comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NoneHash<'a> {
    /// `PYTHONHASHSEED` is not set and the algorithm is cryptographic: a seed that all engines share (PR 51875, August 2026).
    #[default]
    Shared,
    /// `PYTHONHASHSEED`, or the seed that an engine drew and told.
    Seed(&'a str),
    /// The bytes themselves, 1 to 32: engines before that PR drew them at random unless `PYTHONHASHSEED` was set.
    Bytes(&'a [u8]),
}

impl VllmAlgorithm {
    /// Parses vLLM's name of it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "sha256" => Self::Sha256,
            "sha256_cbor" => Self::Sha256Cbor,
            "xxhash" => Self::Xxhash,
            "xxhash_cbor" => Self::XxhashCbor,
            _ => return None,
        })
    }

    pub(super) const fn digest_bytes(self) -> usize {
        if self.is_cryptographic() { DIGEST_BYTES } else { 16 }
    }

    const fn is_cryptographic(self) -> bool {
        matches!(self, Self::Sha256 | Self::Sha256Cbor)
    }

    const fn is_pickle(self) -> bool {
        matches!(self, Self::Sha256 | Self::Xxhash)
    }

    fn hash(self, bytes: &[u8]) -> BlockHash {
        let mut hash = [0; DIGEST_BYTES];
        match self.is_cryptographic() {
            true => hash = Sha256::digest(bytes).into(),
            false => hash[..16].copy_from_slice(&XxHash3_128::oneshot(bytes).to_be_bytes()),
        }
        BlockHash(hash)
    }
}

impl BlockHasher {
    /// Prepares to hash blocks as a vLLM does.
    ///
    /// # Errors
    /// [`PoolError::NoTokens`]; [`PoolError::LongBlock`] for blocks whose pickle might not fit a frame; [`PoolError::SecretSeed`] if
    /// the algorithm is not cryptographic and no seed is given: each engine draws one then, and only it can tell; [`PoolError::Seed`]
    /// for bytes of another length, or a seed that fills a frame.
    pub fn vllm(scope: &VllmScope<'_>) -> Result<Self, PoolError> {
        let VllmScope { algorithm, tokens_per_block, none_hash, extra_form } = *scope;
        if algorithm.is_pickle() && tokens_per_block > MAX_PICKLED_TOKENS {
            return Err(PoolError::LongBlock { tokens_per_block, limit: MAX_PICKLED_TOKENS });
        }
        let seeded = |seed: &str| match seed.len() <= MAX_SEED_BYTES {
            true => Ok((algorithm.hash_text(seed), algorithm.digest_bytes())),
            false => Err(PoolError::Seed { bytes: seed.len() }),
        };
        let (root, root_bytes) = match none_hash {
            NoneHash::Seed(seed) => seeded(seed)?,
            NoneHash::Shared if algorithm.is_cryptographic() => seeded(SHARED_SEED)?,
            NoneHash::Shared => return Err(PoolError::SecretSeed),
            NoneHash::Bytes(bytes) => {
                let mut root = [0; DIGEST_BYTES];
                let room = root.get_mut(..bytes.len()).filter(|room| !room.is_empty());
                room.ok_or(PoolError::Seed { bytes: bytes.len() })?.copy_from_slice(bytes);
                (BlockHash(root), bytes.len())
            }
        };
        Self::with(root, root_bytes, tokens_per_block, Scheme::Vllm(algorithm, extra_form))
    }
}

impl VllmAlgorithm {
    fn hash_text(self, text: &str) -> BlockHash {
        fn encoded<E: Encode>(algorithm: VllmAlgorithm, text: &str) -> BlockHash {
            let mut to = E::default();
            to.begin();
            to.text(text);
            algorithm.hash(to.finish())
        }
        if self.is_pickle() { encoded::<Pickle>(self, text) } else { encoded::<Cbor>(self, text) }
    }
}

/// A part of a sequence that is hashed: `tokens` after `known` blocks.
pub(super) struct Sequence<'a> {
    pub(super) parent: BlockHash,
    pub(super) known: usize,
    pub(super) tokens: &'a [u32],
    pub(super) extras: &'a Extras<'a>,
}

pub(super) fn chain(
    hasher: &BlockHasher,
    algorithm: VllmAlgorithm,
    form: ExtraForm,
    sequence: Sequence<'_>,
) -> Result<Vec<BlockHash>, PoolError> {
    match algorithm.is_pickle() {
        true => chain_encoded::<Pickle>(hasher, algorithm, form, sequence),
        false => chain_encoded::<Cbor>(hasher, algorithm, form, sequence),
    }
}

fn chain_encoded<E: Encode>(
    hasher: &BlockHasher,
    algorithm: VllmAlgorithm,
    form: ExtraForm,
    sequence: Sequence<'_>,
) -> Result<Vec<BlockHash>, PoolError> {
    let Sequence { mut parent, known, tokens, extras } = sequence;
    let tokens_per_block = hasher.tokens_per_block;
    let mut hashes = Vec::with_capacity(tokens.len() / tokens_per_block);
    let (mut to, plain) = (E::default(), extras.is_none());
    for (block, tokens) in (known..).zip(tokens.chunks_exact(tokens_per_block)) {
        to.begin();
        to.tuple(3);
        to.bytes(hasher.parent_bytes(&parent));
        to.tuple(tokens.len());
        to.tokens(tokens);
        to.end_tuple(tokens.len());
        if plain {
            to.none();
        } else {
            let extras = extras.of_block(block, block * tokens_per_block, tokens_per_block);
            if algorithm.is_pickle() {
                extras.check_texts(form, block)?;
            }
            extras.write(form, &mut to);
        }
        to.end_tuple(3);
        let bytes = to.finish();
        if algorithm.is_pickle() && bytes.len() > PICKLE_FRAME_BYTES {
            return Err(PoolError::LongExtras { block, bytes: bytes.len() });
        }
        parent = algorithm.hash(bytes);
        hashes.push(parent);
    }
    Ok(hashes)
}

/// `DEFAULT_NONE_HASH_SEED`.
const SHARED_SEED: &str = "vllm-none-hash";

/// A token takes 7 bytes of pickle at most, so these leave 8 KiB of a frame for parent and extra keys.
const MAX_PICKLED_TOKENS: usize = 8 << 10;

/// Far below a frame.
const MAX_SEED_BYTES: usize = 4 << 10;
