//! One pool under all groups: what is there of a prompt, and what enters the prefix cache.

use std::collections::{HashMap, HashSet};

use kvferry_protocol::BlockId;

use super::super::{BlockHash, BlockPool, PoolCounts, PrefixChange, Registered};
use super::hits::{Found, Lookup, SpecSet, block_hash, group_hash};
use super::plan::needs_coarse_hashes;
use super::reach::{Reach, replay_ends};
use super::table::{GroupBlocks, StateBlocks};
use super::{Filled, GroupError, GroupPlan, GroupTable, Hit, LayerKind, LayerSpec, Retention};

/// One group, as far as its blocks are concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupRule {
    /// What it keeps.
    pub spec: LayerSpec,
    /// Whether a drafter (EAGLE, MTP) has layers in it: then the last block of a hit is computed again.
    pub draft: bool,
}

/// A pool for groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupsConfig {
    /// The groups, in the order of their numbers.
    pub groups: Vec<GroupRule>,
    /// Blocks, the null block among them.
    pub blocks: usize,
    /// Which windows and states are kept for later requests; none if nothing is shared.
    pub sharing: Option<Retention>,
    /// Tokens of the longest sequence.
    pub max_tokens: usize,
    /// The most tokens that are computed at a time.
    pub in_flight_tokens: usize,
    /// Blocks that stay free when a request is admitted beside others.
    pub watermark_blocks: usize,
    /// Tokens of one hash; if none, as many as divide every group's blocks.
    pub hash_tokens: Option<usize>,
}

impl GroupsConfig {
    /// Of a plan, with `blocks` blocks and sequences of at most `max_tokens`; all that can be shared is kept, without drafter or watermark.
    #[must_use]
    pub fn new(plan: &GroupPlan, blocks: usize, max_tokens: usize) -> Self {
        let groups = plan.groups.iter().map(|group| GroupRule { spec: group.spec, draft: false }).collect();
        let (sharing, in_flight_tokens) = (Some(Retention::Dense), max_tokens);
        Self { groups, blocks, sharing, max_tokens, in_flight_tokens, watermark_blocks: 0, hash_tokens: None }
    }
}

/// What happened to the prefix cache of one group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupChange {
    /// A block of a group can be found by this hash.
    Stored(usize, BlockHash),
    /// None can any more.
    Removed(usize, BlockHash),
    /// No block of any group can be found.
    Cleared,
}

/// Blocks of an engine whose layers are in groups.
///
/// One thread owns it; tables and leases may be dropped on any thread. Block 0 is the null block.
pub struct GroupPool {
    pub(super) pool: BlockPool,
    pub(super) null: BlockId,
    pub(super) config: GroupsConfig,
    sets: Vec<SpecSet>,
    hash_tokens: usize,
    hit_tokens: usize,
    /// States that were registered since the step began: they are computed in it.
    pub(super) this_step: HashSet<BlockHash>,
    /// Which group a name is of; only where changes are recorded.
    names: Option<HashMap<BlockHash, usize>>,
}

impl GroupPool {
    /// Makes a pool of empty blocks.
    ///
    /// # Errors
    /// [`GroupError`] for no groups, groups that cannot be shared though they should, sizes that do not fit each other, or a pool too small.
    pub fn new(config: &GroupsConfig) -> Result<Self, GroupError> {
        let sizes = || config.groups.iter().map(|rule| rule.spec.tokens_per_block as usize);
        if config.groups.is_empty() {
            return Err(GroupError::Empty);
        }
        if let Some(layer) = sizes().position(|size| size == 0) {
            return Err(GroupError::Layer { layer });
        }
        let hit_tokens = sizes().fold(1, lcm);
        let coarse = config.groups.iter().any(|rule| needs_coarse_hashes(&rule.spec));
        let finest = if coarse { hit_tokens } else { sizes().fold(0, gcd) };
        let hash_tokens = config.hash_tokens.unwrap_or(finest);
        if let Some(retention) = config.sharing {
            check_shared(&config.groups, hash_tokens, hit_tokens)?;
            if let Retention::Every { tokens } = retention
                && (tokens == 0 || !tokens.is_multiple_of(hit_tokens))
            {
                return Err(GroupError::Retention { every_tokens: tokens, hit_tokens });
            }
        }
        let pool = BlockPool::with_null(config.blocks).map_err(GroupError::NoPool)?;
        let null = pool.null().unwrap_or_else(|| BlockId::new(0));
        let (sets, config) = (sets_of(&config.groups), config.clone());
        let (this_step, names) = Default::default();
        Ok(Self { pool, null, config, sets, hash_tokens, hit_tokens, this_step, names })
    }

    /// Tokens of one hash: [`Filled::hashes`] and lookups have one for each.
    #[must_use]
    pub fn hash_tokens(&self) -> usize {
        self.hash_tokens
    }

    /// What each hit is a multiple of: the least that whole blocks of every group cover.
    #[must_use]
    pub fn hit_tokens(&self) -> usize {
        self.hit_tokens
    }

    /// Begins a step: what the step before computed can be used from now on.
    pub fn begin_step(&mut self) {
        self.this_step.clear();
    }

    /// A table without blocks.
    #[must_use]
    pub fn open(&self) -> GroupTable {
        let empty = |_: &GroupRule| GroupBlocks {
            table: self.pool.empty_table(),
            cached: 0,
            passed: 0,
            state: StateBlocks::default(),
        };
        GroupTable { groups: self.config.groups.iter().map(empty).collect(), begun: false }
    }

    /// Finds the longest prefix of a request of `tokens` tokens that every group can go on behind. The last token is always left to compute.
    /// Changes nothing.
    ///
    /// Each kind accepts a length or names a shorter one, until all accept.
    #[must_use]
    pub fn computed_blocks(&self, hashes: &[BlockHash], tokens: usize) -> Hit {
        let groups = self.config.groups.len();
        let nothing = || Hit { blocks: vec![vec![]; groups], hashes: vec![vec![]; groups], tokens: 0, junction: 0 };
        if self.config.sharing.is_none() {
            return nothing();
        }
        let Self { pool, null, hash_tokens, hit_tokens, .. } = self;
        let lookup = Lookup { pool, null: *null, hashes, hash_tokens: *hash_tokens, hit_tokens: *hit_tokens };
        let (found, tokens, longest) = self.agree(&lookup, tokens.saturating_sub(1));
        let mut hit = Hit { tokens, junction: if longest > tokens { longest } else { 0 }, ..nothing() };
        for (set, found) in self.sets.iter().zip(found) {
            for (group, blocks) in set.groups.iter().zip(found.blocks) {
                hit.hashes[*group] = blocks.iter().map(|id| self.pool.hash_of(*id)).collect();
                hit.blocks[*group] = blocks;
            }
        }
        hit
    }

    /// What every set found, up to where, and how far the first of them went.
    fn agree(&self, lookup: &Lookup<'_>, most: usize) -> (Vec<Found>, usize, usize) {
        let mut found: Vec<Option<Found>> = vec![None; self.sets.len()];
        let (mut tokens, mut longest) = (most, 0);
        // Sets whose last block was left out for the drafter at this length: once is enough.
        let mut left_out = HashSet::new();
        let alone = self.config.groups.len() == 1;
        let one_pass = alone || self.sets.len() == 2 && self.sets[0].spec.keeps_all();
        loop {
            let mut now = tokens;
            for (at, set) in self.sets.iter().enumerate() {
                if let (true, Some(full)) = (set.spec.keeps_all(), &found[at]) {
                    // Whoever keeps all accepts each shorter length.
                    now = now.min(full.tokens);
                    continue;
                }
                let leave_out = set.draft && !left_out.contains(&at);
                // It may find one block more, and leaves that out. A drafter has no states.
                let most = match leave_out && !alone && !matches!(set.spec.kind, LayerKind::State { .. }) {
                    true => (now + set.spec.tokens_per_block as usize).min(lookup.hashes.len() * self.hash_tokens),
                    false => now,
                };
                let answer = lookup.longest(set, most, leave_out);
                if leave_out {
                    left_out.insert(at);
                } else if answer.tokens < now {
                    left_out.clear();
                }
                now = answer.tokens;
                longest = longest.max(now);
                found[at] = Some(answer);
            }
            if now >= tokens {
                break;
            }
            tokens = now;
            if one_pass {
                break;
            }
        }
        let mut found: Vec<Found> = found.into_iter().map(Option::unwrap_or_default).collect();
        for (set, found) in self.sets.iter().zip(&mut found).filter(|(set, _)| set.spec.keeps_all()) {
            let blocks = tokens.div_ceil(set.spec.tokens_per_block as usize);
            found.blocks.iter_mut().for_each(|ids| ids.truncate(blocks));
        }
        (found, tokens, longest)
    }

    /// Offers the whole blocks of `filled.tokens` to the prefix cache, where a later request can reach them. The caller vouches that their
    /// KV is in place: computed, or loaded and verified.
    ///
    /// # Errors
    /// [`GroupError::Hashes`], [`GroupError::ForeignTable`] or [`GroupError::Pool`].
    pub fn cache_full_blocks(&mut self, table: &mut GroupTable, filled: &Filled<'_>) -> Result<(), GroupError> {
        self.own(table)?;
        let Some(retention) = self.config.sharing else { return Ok(()) };
        let (tokens, hash_tokens) = (filled.tokens, self.hash_tokens);
        let (wanted, found) = (tokens / hash_tokens, filled.hashes.len());
        if found < wanted {
            return Err(GroupError::Hashes { tokens, hash_tokens, wanted, found });
        }
        let draft = self.config.groups.iter().any(|rule| rule.draft);
        let mut ends = replay_ends(filled.prompt_tokens, self.hit_tokens, draft);
        ends.extend(Some(filled.junction).filter(|end| *end > 0));
        for at in 0..self.sets.len() {
            let SpecSet { spec, draft, .. } = self.sets[at];
            let size = spec.tokens_per_block as usize;
            let whole = tokens / self.hit_tokens * self.hit_tokens;
            // With a drafter a hit needs the block behind its end, too.
            let reached = if draft && whole > 0 { tokens.min(whole + size) } else { whole } / size;
            let reach = Reach { spec: &spec, hit_tokens: self.hit_tokens, draft, retention, ends: &ends };
            for member in 0..self.sets[at].groups.len() {
                let group = self.sets[at].groups[member];
                let blocks = &mut table.groups[group];
                let reached = reached.min(blocks.table.len());
                if blocks.cached >= reached {
                    continue;
                }
                for (at, kept) in (blocks.cached..reached).zip(reach.mask(blocks.cached..reached)) {
                    if !kept || blocks.table.ids()[at] == self.null {
                        continue;
                    }
                    let Some(hash) = block_hash(filled.hashes, size / hash_tokens, at) else { break };
                    let name = group_hash(hash, group);
                    let done = self.pool.register(&blocks.table, at, name);
                    let done = done.map_err(|source| GroupError::Pool { group, source })?;
                    if done == Registered::New && matches!(spec.kind, LayerKind::State { .. }) {
                        self.this_step.insert(name);
                    }
                    if let Some(names) = &mut self.names {
                        names.insert(name, group);
                    }
                }
                blocks.cached = reached;
            }
        }
        Ok(())
    }

    /// Takes blocks from that token on out of the prefix cache, because their content turned out wrong; the table keeps them. Returns how
    /// many were in it.
    ///
    /// # Errors
    /// [`GroupError::ForeignTable`] or [`GroupError::Pool`].
    pub fn evict_from(&mut self, table: &mut GroupTable, tokens: usize) -> Result<usize, GroupError> {
        self.own(table)?;
        let mut evicted = 0;
        for (group, blocks) in table.groups.iter_mut().enumerate() {
            let first = tokens / self.config.groups[group].spec.tokens_per_block as usize;
            for at in (first..blocks.table.len()).filter(|at| blocks.table.ids()[*at] != self.null) {
                let done = self.pool.unregister(&blocks.table, at);
                evicted += usize::from(done.map_err(|source| GroupError::Pool { group, source })?);
            }
            blocks.cached = blocks.cached.min(first);
        }
        Ok(evicted)
    }

    /// Frees a request's blocks at once: it ended, or is preempted and begins anew. Group after group, of each the last block first, so that
    /// prefixes outlive what follows them.
    pub fn free(&mut self, table: GroupTable) {
        for blocks in table.groups {
            self.pool.release(blocks.table);
        }
    }

    /// Empties the prefix cache, because the weights changed. Returns how many blocks were in it.
    pub fn clear_cache(&mut self) -> usize {
        self.pool.clear_cache()
    }

    /// How the blocks are used.
    pub fn counts(&mut self) -> PoolCounts {
        self.pool.counts()
    }

    /// Notes from now on what happens to the prefix cache, for [`take_changes`](Self::take_changes).
    pub fn record_changes(&mut self) {
        self.pool.record_changes();
        self.names.get_or_insert_default();
    }

    /// What happened to the prefix cache since the last call, in order; nothing if it is not recorded. Taken once a step: it grows until then.
    pub fn take_changes(&mut self) -> Vec<GroupChange> {
        let Some(names) = &mut self.names else { return Vec::new() };
        let told = self.pool.take_changes().into_iter().filter_map(|change| match change {
            PrefixChange::Stored(name) => {
                names.get(&name).map(|group| GroupChange::Stored(*group, group_hash(name, *group)))
            }
            PrefixChange::Removed(name) => {
                names.get(&name).map(|group| GroupChange::Removed(*group, group_hash(name, *group)))
            }
            PrefixChange::Cleared => Some(GroupChange::Cleared),
        });
        let told = told.collect();
        names.retain(|name, _| self.pool.cached(name).is_some());
        told
    }

    pub(super) fn own(&self, table: &GroupTable) -> Result<(), GroupError> {
        let (found, groups) = (table.groups.len(), self.config.groups.len());
        let ours = found == groups && table.groups.iter().all(|blocks| self.pool.own(&blocks.table.0).is_ok());
        if ours { Ok(()) } else { Err(GroupError::ForeignTable { found, groups }) }
    }
}

fn check_shared(groups: &[GroupRule], hash_tokens: usize, hit_tokens: usize) -> Result<(), GroupError> {
    for (group, GroupRule { spec, draft }) in groups.iter().enumerate() {
        let tokens_per_block = spec.tokens_per_block as usize;
        if !spec.is_cacheable() {
            return Err(GroupError::Unshared { group });
        }
        // A chunk's hit ends at any of its blocks, so other groups must be able to end there, too.
        let chunked = matches!(spec.kind, LayerKind::Chunked { .. });
        if chunked && *draft {
            return Err(GroupError::Draft { group });
        }
        if hash_tokens == 0
            || !tokens_per_block.is_multiple_of(hash_tokens)
            || !hit_tokens.is_multiple_of(tokens_per_block)
            || chunked && tokens_per_block != hit_tokens
        {
            return Err(GroupError::Sizes { group, tokens_per_block, hash_tokens, hit_tokens });
        }
    }
    Ok(())
}

/// Groups of one spec together; those that keep all first, since what they have bounds the others.
fn sets_of(groups: &[GroupRule]) -> Vec<SpecSet> {
    let mut sets: Vec<SpecSet> = vec![];
    for (group, rule) in groups.iter().enumerate() {
        match sets.iter_mut().find(|set| set.spec == rule.spec) {
            Some(set) => {
                set.groups.push(group);
                set.draft |= rule.draft;
            }
            None => sets.push(SpecSet { spec: rule.spec, groups: vec![group], draft: rule.draft }),
        }
    }
    sets.sort_by_key(|set| !set.spec.keeps_all());
    sets
}

fn gcd(left: usize, right: usize) -> usize {
    if right == 0 { left } else { gcd(right, left % right) }
}

fn lcm(left: usize, right: usize) -> usize {
    left / gcd(left, right) * right
}
