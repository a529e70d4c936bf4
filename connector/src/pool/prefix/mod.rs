//! One prefix cache for an engine, whichever way prefixes are found: by the hashes of blocks, by their tokens, or not at all.
//!
//! A request is a [`Text`], which grows, and while it runs a [`RequestTable`]: the blocks that it shares, then its own. Blocks are taken
//! as the text grows, and can be shared once their bytes are there, computed here or verified by digest; until then nobody finds them. Who
//! is short of blocks drops the youngest request's table: what was registered of it is found again when it comes back, as long as it is
//! not evicted.
//!
//! ```
//! use std::sync::Arc;
//! use kvferry::pool::{BlockHasher, HashScope, PrefixCache, PrefixKind, Text};
//!
//! let scope = HashScope { model: "llama", tokens_per_block: 4, adapter: None, salt: b"tenant 7" };
//! let names = Arc::new(BlockHasher::new(&scope)?);
//! for kind in [PrefixKind::Hash, PrefixKind::Radix] {
//!     let mut cache = PrefixCache::new(kind, 16, 4)?;
//!     let mut first = Text::new(Some(&names), (0..10).collect());
//!     let mut table = cache.open(&first, 10, 0)?; // 3 blocks
//!     cache.register(&mut table, &first, 10)?; // their K/V is there: the 2 that are complete can be shared
//!     (10..13).for_each(|token| drop(first.push(token)));
//!     cache.grow(&mut table, 13)?; // a fourth block
//!     let kept = cache.finish(table, &first, 12).map_err(|refused| refused.1)?; // the last token's K/V was not computed
//!     assert_eq!((kept.matched, kept.registered, kept.returned), (0, 3, 1));
//!
//!     let second = Text::new(Some(&names), (0..9).collect());
//!     assert_eq!(cache.lookup(&second), 8);
//! }
//! # Ok::<(), kvferry::pool::PoolError>(())
//! ```

mod journal;
mod kind;
mod table;
mod text;

use std::sync::Arc;

use super::hash::BlockHasher;
use super::{BlockPool, Kept, PoolCounts, PoolError, PrefixChange, RadixCache, Registered, Sharing};
use crate::events::{KvEvent, Medium};
use journal::Journal;
use table::Blocks;

pub use kind::{PrefixKind, UnknownPrefixKind};
pub use table::{PrefixLease, RequestTable};
pub use text::Text;

/// The blocks of one engine, and which of them hold a known prefix.
///
/// One thread owns it; tables and leases may be dropped on any thread. A block that nobody holds is *free*, whether or not it can
/// still be found: whoever takes it evicts what it held.
pub struct PrefixCache {
    kind: PrefixKind,
    store: Store,
    tokens_per_block: usize,
    /// Tables from before the last [`clear`](Self::clear) register nothing.
    epoch: u64,
    journal: Option<Journal>,
    queried: u64,
    hit: u64,
}

#[expect(clippy::large_enum_variant, reason = "an engine has one")]
enum Store {
    Hash(BlockPool),
    Radix(RadixCache),
}

impl PrefixCache {
    /// Makes a cache of `blocks` empty blocks.
    ///
    /// # Errors
    /// [`PoolError::Size`], or [`PoolError::NoTokens`] for blocks of no tokens.
    pub fn new(kind: PrefixKind, blocks: usize, tokens_per_block: usize) -> Result<Self, PoolError> {
        if tokens_per_block == 0 {
            return Err(PoolError::NoTokens);
        }
        let store = match kind {
            PrefixKind::Radix => Store::Radix(RadixCache::new(blocks, tokens_per_block, Sharing::Radix)?),
            PrefixKind::Hash | PrefixKind::Off => Store::Hash(BlockPool::new(blocks)?),
        };
        Ok(Self { kind, store, tokens_per_block, epoch: 0, journal: None, queried: 0, hit: 0 })
    }

    /// How prefixes are found.
    #[must_use]
    pub const fn kind(&self) -> PrefixKind {
        self.kind
    }

    /// Notes from now on what can be found, for [`take_events`](Self::take_events). Blocks go by the names that `hasher` gives them: that of
    /// the texts, or one of its kind. Blocks of texts without names are not told. `medium` is where the blocks are.
    pub fn record_events(&mut self, hasher: &Arc<BlockHasher>, medium: Option<Medium>) {
        self.journal.get_or_insert_with(|| Journal::new(Arc::clone(hasher), medium));
        match &mut self.store {
            Store::Hash(pool) => pool.record_changes(),
            Store::Radix(cache) => cache.record_changes(),
        }
    }

    /// What can be found since the last call, and what no longer can, in order; nothing if it is not recorded. Taken once a step: it grows
    /// until then.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.journal.as_mut().map(Journal::take).unwrap_or_default()
    }

    /// How many of a text's first tokens are there: whole blocks, and never the last token, which is computed for its logits. Changes
    /// nothing, not even the order of eviction.
    #[must_use]
    pub fn lookup(&self, text: &Text) -> usize {
        match &self.store {
            _ if self.kind == PrefixKind::Off => 0,
            Store::Hash(pool) => pool.lookup(self.wanted(text)) * self.tokens_per_block,
            Store::Radix(cache) => cache.lookup(text.namespace(), text.tokens()),
        }
    }

    /// Gives a request blocks for its first `tokens` tokens: those that [`lookup`](Self::lookup) finds are shared, the others its own. All or
    /// nothing. `spare` blocks must stay free behind it, for those that run already: a watermark, 0 for a request that is alone.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`]: `wanted` are the blocks that it would have taken from the free ones, and the spare ones.
    pub fn open(&mut self, text: &Text, tokens: usize, spare: usize) -> Result<RequestTable, PoolError> {
        let found = self.lookup(text) / self.tokens_per_block;
        let fresh = self.blocks_of(tokens).saturating_sub(found);
        let blocks = match &mut self.store {
            Store::Hash(pool) => {
                let names = &text.names()[..found];
                let wanted = pool.idle(names) + fresh + spare;
                let (free, total) = (pool.free_blocks(), pool.counts().total);
                if wanted > free {
                    return Err(PoolError::Exhausted { wanted, free, total });
                }
                Blocks::Hash(pool.open(names, fresh)?)
            }
            Store::Radix(cache) => {
                let (free, total) = (cache.available(), cache.counts().total);
                let mut sequence = cache.admit(text.namespace(), text.tokens());
                // Those that it shares are free no longer, if nobody else had them.
                let wanted = free - cache.available() + fresh + spare;
                if wanted > free {
                    return Err(PoolError::Exhausted { wanted, free, total });
                }
                cache.extend(&mut sequence, tokens)?;
                Blocks::Radix(sequence)
            }
        };
        self.queried += self.most_shared(text) as u64;
        self.hit += found as u64;
        self.note(None);
        Ok(RequestTable::new(blocks, found, self.epoch))
    }

    /// Gives a request blocks for its first `tokens` tokens; those that it has stay. All or nothing.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`]: put a request back then. [`PoolError::ForeignTable`].
    pub fn grow(&mut self, table: &mut RequestTable, tokens: usize) -> Result<(), PoolError> {
        let fresh = self.blocks_of(tokens).saturating_sub(table.len());
        match (&mut self.store, &mut table.blocks) {
            (Store::Hash(pool), Blocks::Hash(blocks)) => pool.extend(blocks, fresh)?,
            (Store::Radix(cache), Blocks::Radix(sequence)) => cache.extend(sequence, tokens)?,
            _ => return Err(PoolError::ForeignTable { len: table.len() }),
        }
        self.note(None);
        Ok(())
    }

    /// Lets others share the complete blocks of a request's first `tokens` tokens. The caller vouches that their K/V is in place, computed
    /// here or verified by digest, and that nobody writes it from now on. Those that were registered before cost nothing.
    ///
    /// Of two requests that compute the same block the first one's is shared. A radix cache puts it into the other's table as well, which
    /// must be read again; the block that it replaces stays the request's, since a transfer may still read it.
    ///
    /// # Errors
    /// [`PoolError::Position`] for more tokens than the text or the table has. Where there is something to register,
    /// [`PoolError::OtherTokens`] for another text than the table was opened with, and [`PoolError::ForeignTable`].
    pub fn register(&mut self, table: &mut RequestTable, text: &Text, tokens: usize) -> Result<(), PoolError> {
        let len = text.tokens().len().min(table.len() * self.tokens_per_block);
        if tokens > len {
            return Err(PoolError::Position { start: 0, end: tokens, len });
        }
        let whole = tokens / self.tokens_per_block;
        if table.epoch != self.epoch || self.kind == PrefixKind::Off || whole <= table.registered {
            // A step that completes no block costs nothing, however long the text is.
            return Ok(());
        }
        match (&mut self.store, &mut table.blocks) {
            (Store::Hash(pool), Blocks::Hash(blocks)) => {
                pool.own(&blocks.0)?;
                if let Some(last) = table.matched.checked_sub(1)
                    && text.names().get(last).is_none_or(|name| pool.register(blocks, last, *name).is_err())
                {
                    return Err(PoolError::OtherTokens { blocks: table.matched });
                }
                let whole = whole.min(text.names().len());
                for position in table.registered..whole {
                    let done = pool.register(blocks, position, text.names()[position])?;
                    table.kept += usize::from(done == Registered::New);
                }
                table.registered = whole.max(table.registered);
            }
            (Store::Radix(cache), Blocks::Radix(sequence)) => {
                let tokens = &text.tokens()[..whole * self.tokens_per_block];
                table.kept += cache.keep_named(sequence, tokens, text.names())?.registered;
                table.registered = whole;
            }
            _ => return Err(PoolError::ForeignTable { len: table.len() }),
        }
        self.note(Some(text));
        Ok(())
    }

    /// Ends a request: the complete blocks of its first `tokens` tokens are kept for others, the rest is free at once. Says what became of
    /// all of them: those that it had found, those of its own that were registered, now or before, and those that went back.
    ///
    /// A table that is dropped instead registers nothing more: so ends a request that is aborted, or put back for want of blocks.
    ///
    /// # Errors
    /// The table, with what [`register`](Self::register) refuses.
    pub fn finish(
        &mut self,
        table: RequestTable,
        text: &Text,
        tokens: usize,
    ) -> Result<Kept, Box<(RequestTable, PoolError)>> {
        let lease = self.lease(table, text, tokens)?;
        let kept = lease.0.kept();
        drop(lease);
        Ok(kept)
    }

    /// Ends a request whose blocks a transfer still reads: as [`finish`](Self::finish), but all its blocks are held until the lease is
    /// dropped. A lease has no clock: who holds it drops it on completion, or at its deadline once the last write has drained.
    ///
    /// # Errors
    /// The table, with what [`register`](Self::register) refuses.
    pub fn lease(
        &mut self,
        mut table: RequestTable,
        text: &Text,
        tokens: usize,
    ) -> Result<PrefixLease, Box<(RequestTable, PoolError)>> {
        match self.register(&mut table, text, tokens) {
            Ok(()) => Ok(PrefixLease(table)),
            Err(error) => Err(Box::new((table, error))),
        }
    }

    /// Forgets every prefix, because the weights changed: nothing that is there now is found again, nor what running requests have
    /// computed so far or compute until they end.
    pub fn clear(&mut self) {
        self.epoch += 1;
        match &mut self.store {
            Store::Hash(pool) => drop(pool.clear_cache()),
            Store::Radix(cache) => drop(cache.clear()),
        }
        self.note(None);
    }

    /// How the blocks are used, and what happened to them since the start. `leased`, `pinned` and `soft_pinned` are 0: leases count as held.
    /// What was dropped elsewhere is taken in first.
    pub fn counts(&mut self) -> PoolCounts {
        let counts = match &mut self.store {
            Store::Hash(pool) => pool.counts(),
            Store::Radix(cache) => {
                let counts = cache.counts();
                let cached = counts.cached - counts.locked;
                PoolCounts {
                    total: counts.total,
                    free: counts.free + cached,
                    cached,
                    registered: counts.cached,
                    evicted_total: counts.evicted_total,
                    ..PoolCounts::default()
                }
            }
        };
        PoolCounts { queried_total: self.queried, hit_total: self.hit, ..counts }
    }

    /// The names by which a text's blocks are looked up.
    fn wanted<'t>(&self, text: &'t Text) -> &'t [super::BlockHash] {
        &text.names()[..self.most_shared(text).min(text.names().len())]
    }

    /// Blocks that a text may find: the last token is computed.
    fn most_shared(&self, text: &Text) -> usize {
        text.tokens().len().saturating_sub(1) / self.tokens_per_block
    }

    fn blocks_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.tokens_per_block)
    }

    /// Writes down what changed. Blocks are stored by a registration alone, which has the text.
    fn note(&mut self, text: Option<&Text>) {
        let Some(journal) = &mut self.journal else { return };
        let changes: Vec<PrefixChange> = match &mut self.store {
            Store::Hash(pool) => pool.take_changes(),
            Store::Radix(cache) => cache.take_changes(),
        };
        journal.note(changes, text);
    }
}

#[cfg(test)]
mod tests;
