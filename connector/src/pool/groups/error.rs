//! What cache groups refuse, and how to mend it.

use super::super::PoolError;

/// Why groups could not be made, or did not do what they were asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// A layer without anything to keep.
    #[error(
        "layer {layer} cannot be cached: blocks, windows, chunks and pages hold at least 1 token or byte, sinks whole blocks"
    )]
    Layer {
        /// Its place among the layers that were given.
        layer: usize,
    },
    /// Pages cannot be made equally large.
    #[error(
        "layer {layer} has pages of {bytes} bytes, which cannot become {wanted}: latent pages are not padded, so use other blocks"
    )]
    Page {
        /// Its place among the layers that were given.
        layer: usize,
        /// What it has.
        bytes: u64,
        /// What the largest has.
        wanted: u64,
    },
    /// No group would keep anything.
    #[error("no layer keeps anything: a model without a cache has no groups")]
    Empty,
    /// Prefixes of this model are not shared.
    #[error("group {group} keeps an encoder's tokens, which are not shared: make the groups without prefix caching")]
    Unshared {
        /// The group.
        group: usize,
    },
    /// A chunk's hit cannot leave its last block out.
    #[error(
        "group {group} keeps chunks, which a drafter cannot read along: put the drafter's layers into another group"
    )]
    Draft {
        /// The group.
        group: usize,
    },
    /// Block sizes that do not fit each other.
    #[error(
        "blocks of {tokens_per_block} tokens in group {group} do not fit hashes of {hash_tokens} tokens and hits of {hit_tokens}"
    )]
    Sizes {
        /// The group.
        group: usize,
        /// Its blocks.
        tokens_per_block: usize,
        /// Tokens of one hash.
        hash_tokens: usize,
        /// What every hit is a multiple of.
        hit_tokens: usize,
    },
    /// How far apart kept ends are must fit where hits can end.
    #[error("kept ends {every_tokens} tokens apart fall beside hits, which are multiples of {hit_tokens} tokens")]
    Retention {
        /// As it was given.
        every_tokens: usize,
        /// What every hit is a multiple of.
        hit_tokens: usize,
    },
    /// The table has blocks already.
    #[error("a hit or loaded tokens can only begin a table: this one has begun, open another one")]
    Begun,
    /// What was found is not there any more.
    #[error("the prefix that was found has been evicted since: look it up again")]
    StaleHit,
    /// Fewer hashes than complete tokens.
    #[error("{tokens} tokens have {wanted} complete hashes of {hash_tokens} tokens, and {found} were given")]
    Hashes {
        /// The tokens.
        tokens: usize,
        /// Tokens of one hash.
        hash_tokens: usize,
        /// How many they have.
        wanted: usize,
        /// How many were given.
        found: usize,
    },
    /// A table of other groups.
    #[error(
        "the table has {found} groups and belongs to another pool than this of {groups} groups: use the pool that made it"
    )]
    ForeignTable {
        /// Its groups.
        found: usize,
        /// This pool's.
        groups: usize,
    },
    /// The pool under the groups refused.
    #[error("the blocks of group {group} were refused")]
    Pool {
        /// The group.
        group: usize,
        /// Why.
        #[source]
        source: PoolError,
    },
    /// The pool could not be made.
    #[error("the pool of the groups could not be made")]
    NoPool(#[source] PoolError),
}
