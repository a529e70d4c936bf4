//! Groups in words, behaviours of vLLM that concern blocks, and histories beside a model that searches.

mod facts;
mod history;
mod plans;

use super::*;
use crate::pool::{BlockHash, BlockHasher, HashScope};

const SIZE: u32 = 4;
const FULL: LayerKind = LayerKind::Full { window_tokens: None, chunk_tokens: None };

fn window(window_tokens: u32) -> LayerKind {
    LayerKind::Window { window_tokens, retained_tokens: 0 }
}

fn state(keeping: StateKeeping) -> LayerKind {
    LayerKind::State { keeping, speculative_blocks: 0 }
}

fn layer(kind: LayerKind, tokens_per_block: u32) -> LayerSpec {
    let content = match kind {
        LayerKind::State { .. } => PageContent::State { bytes: 256 },
        _ => PageContent::Tokens { heads: 2, head_size: 16, head_size_v: 16, element_bytes: 2 },
    };
    LayerSpec { kind, tokens_per_block, content, padded_bytes: None }
}

fn pool(kinds: &[(LayerKind, u32)], blocks: usize) -> GroupPool {
    GroupPool::new(&config(kinds, blocks)).unwrap()
}

fn config(kinds: &[(LayerKind, u32)], blocks: usize) -> GroupsConfig {
    let rule = |(kind, size): &(LayerKind, u32)| GroupRule { spec: layer(*kind, *size), draft: false };
    GroupsConfig {
        groups: kinds.iter().map(rule).collect(),
        blocks: blocks + 1,
        sharing: Some(Retention::Dense),
        max_tokens: 200,
        in_flight_tokens: 200,
        watermark_blocks: 0,
        hash_tokens: None,
    }
}

fn hashes(pool: &GroupPool, tokens: &[u32]) -> Vec<BlockHash> {
    let scope = HashScope { model: "m", tokens_per_block: pool.hash_tokens(), adapter: None, salt: b"" };
    BlockHasher::new(&scope).unwrap().chain(tokens)
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).collect()
}

fn fill(pool: &mut GroupPool, table: &mut GroupTable, tokens: &[u32], filled: usize) {
    let hashes = hashes(pool, tokens);
    let filled = Filled { hashes: &hashes, tokens: filled, prompt_tokens: tokens.len(), junction: 0 };
    pool.cache_full_blocks(table, &filled).unwrap();
}

/// Computes a prompt in one step.
fn compute(pool: &mut GroupPool, tokens: &[u32]) -> GroupTable {
    let mut table = pool.open();
    let ask = Ask { new_tokens: tokens.len(), ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Given));
    fill(pool, &mut table, tokens, tokens.len());
    pool.begin_step();
    table
}

fn raw(table: &GroupTable, group: usize) -> Vec<u32> {
    table.ids(group).iter().map(|id| id.get()).collect()
}

#[test]
fn each_kind_needs_of_a_prefix_what_it_reads() {
    for (name, kinds, want) in [
        // The prompt has 40 tokens; blocks from token `from` to `to` are lost after it was computed.
        ("full", vec![(FULL, 4)], [36, 16, 0]),
        ("window", vec![(window(9), 4)], [36, 36, 36]),
        ("chunked", vec![(LayerKind::Chunked { chunk_tokens: 16 }, 4)], [36, 36, 36]),
        ("full and window", vec![(FULL, 4), (window(9), 4)], [36, 16, 0]),
        ("full of longer blocks and window", vec![(FULL, 8), (window(9), 4)], [32, 16, 0]),
        ("states", vec![(FULL, 4), (state(StateKeeping::EachBlock), 4)], [36, 16, 0]),
    ] {
        for (lost, want) in [40, 16, 0].into_iter().zip(want) {
            let mut pool = pool(&kinds, 40);
            let tokens = prompt(40);
            let mut table = compute(&mut pool, &tokens);
            if lost < 40 {
                // Of windows and chunks, what comes after 24 stays.
                let mut other = compute(&mut pool, &tokens[..24]);
                pool.evict_from(&mut table, lost).unwrap();
                pool.evict_from(&mut other, lost).unwrap();
                pool.free(other);
                if !kinds.iter().any(|(kind, _)| *kind == FULL) {
                    fill_from(&mut pool, &mut table, &tokens, 24);
                }
            }
            let hit = pool.computed_blocks(&hashes(&pool, &tokens), 40);
            assert_eq!(hit.tokens(), want, "{name}, lost from {lost}");
        }
    }
}

/// Registers a table's blocks again from that token on.
fn fill_from(pool: &mut GroupPool, table: &mut GroupTable, tokens: &[u32], from: usize) {
    for group in &mut table.groups {
        group.cached = from / SIZE as usize;
    }
    fill(pool, table, tokens, tokens.len());
}

#[test]
fn a_window_frees_what_it_has_passed_and_keeps_its_tail_findable() {
    let mut pool = pool(&[(FULL, 4), (window(8), 4)], 20);
    let tokens = prompt(24);
    let mut table = compute(&mut pool, &tokens);
    assert_eq!(pool.counts().free, 8);
    let more = Ask { computed_tokens: 24, new_tokens: 1, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &more), Ok(Slots::Given));
    assert_eq!(raw(&table, 1)[..4], [0; 4], "tokens 0 to 16 are passed: the next one reads 17 to 23");
    assert_eq!(pool.counts().free, 8 + 4 - 2);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 24);
    assert_eq!(hit.tokens(), 20, "what was passed is free, and can still be found");
    assert_eq!(hit.ids(1).iter().map(|id| id.get()).collect::<Vec<_>>()[..3], [0; 3]);
    let busy = Ask { computed_tokens: 25, new_tokens: 8, in_flight_tokens: 25, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &busy), Ok(Slots::Given));
    assert_ne!(raw(&table, 1)[4], 0, "steps under way still read");
}

#[test]
fn states_are_kept_where_steps_end_and_cost_two_blocks() {
    let mut pool = pool(&[(FULL, 4), (state(StateKeeping::StepEnds), 4)], 20);
    let tokens = prompt(25);
    let mut table = pool.open();
    for (computed, new) in [(0, 12), (12, 8), (20, 5)] {
        let ask = Ask { computed_tokens: computed, new_tokens: new, ..Ask::default() };
        assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Given));
        fill(&mut pool, &mut table, &tokens, computed + new);
        pool.begin_step();
    }
    let states = raw(&table, 1);
    assert_eq!(states.iter().map(|id| *id > 0).collect::<Vec<_>>(), [false, false, false, false, true, false, true]);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 25);
    assert_eq!(hit.tokens(), 20, "the last state that ended with a block");
    let shipped = pool.ship(&table, 25).unwrap();
    assert_eq!((shipped[1].first, shipped[1].lease.len()), (6, 1), "one state goes");
    pool.free(table);
    assert_eq!(pool.counts().free, 20 - 8, "leased blocks stay");
    drop(shipped);
    assert_eq!(pool.counts().free, 20);
}

#[test]
fn a_state_that_is_computed_in_this_step_is_not_begun_with() {
    let mut pool = pool(&[(FULL, 4), (state(StateKeeping::EachBlock), 4)], 20);
    let tokens = prompt(9);
    let mut first = pool.open();
    let ask = Ask { new_tokens: 9, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut first, &ask), Ok(Slots::Given));
    fill(&mut pool, &mut first, &tokens, 9);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 9);
    let mut second = pool.open();
    let ask = Ask { hit: Some(&hit), new_tokens: 1, ..Ask::default() };
    assert_eq!((hit.tokens(), pool.allocate_slots(&mut second, &ask)), (8, Ok(Slots::NextStep)));
    pool.begin_step();
    assert_eq!(pool.allocate_slots(&mut second, &ask), Ok(Slots::Given));
}

#[test]
fn what_was_found_is_refused_when_it_is_gone() {
    let mut pool = pool(&[(FULL, 4)], 4);
    let tokens = prompt(9);
    let table = compute(&mut pool, &tokens);
    pool.free(table);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 9);
    let other = compute(&mut pool, &[7; 16]);
    let mut table = pool.open();
    let ask = Ask { hit: Some(&hit), new_tokens: 1, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &ask), Err(GroupError::StaleHit));
    pool.free(other);
    let mut begun = compute(&mut pool, &tokens);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 9);
    let ask = Ask { hit: Some(&hit), ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut begun, &ask), Err(GroupError::Begun));
    let filled = Filled { hashes: &[], tokens: 8, prompt_tokens: 9, junction: 0 };
    let few = GroupError::Hashes { tokens: 8, hash_tokens: 4, wanted: 2, found: 0 };
    assert_eq!(pool.cache_full_blocks(&mut begun, &filled), Err(few));
    let mut stranger = super::GroupPool::new(&config(&[(FULL, 4)], 4)).unwrap();
    assert_eq!(stranger.pass(&mut begun, 0), Err(GroupError::ForeignTable { found: 1, groups: 1 }));
}

#[test]
fn groups_that_cannot_be_shared_are_refused() {
    let refused = |kinds: &[(LayerKind, u32)], change: fn(&mut GroupsConfig)| {
        let mut config = config(kinds, 8);
        change(&mut config);
        GroupPool::new(&config).err()
    };
    assert_eq!(refused(&[], |_| ()), Some(GroupError::Empty));
    assert_eq!(refused(&[(FULL, 4), (LayerKind::Cross, 4)], |_| ()), Some(GroupError::Unshared { group: 1 }));
    assert_eq!(refused(&[(FULL, 4), (LayerKind::Cross, 4)], |config| config.sharing = None), None);
    let chunked = LayerKind::Chunked { chunk_tokens: 16 };
    let sizes = GroupError::Sizes { group: 1, tokens_per_block: 4, hash_tokens: 4, hit_tokens: 8 };
    assert_eq!(refused(&[(FULL, 8), (chunked, 4)], |_| ()), Some(sizes));
    assert_eq!(refused(&[(chunked, 4)], |config| config.groups[0].draft = true), Some(GroupError::Draft { group: 0 }));
    let every = |config: &mut GroupsConfig| config.sharing = Some(Retention::Every { tokens: 6 });
    assert_eq!(refused(&[(FULL, 4)], every), Some(GroupError::Retention { every_tokens: 6, hit_tokens: 4 }));
}

#[test]
fn changes_are_told_by_group() {
    let mut pool = pool(&[(FULL, 4), (window(8), 4)], 6);
    pool.record_changes();
    let tokens = prompt(4);
    let hash = hashes(&pool, &tokens)[0];
    let table = compute(&mut pool, &tokens);
    assert_eq!(pool.take_changes(), [GroupChange::Stored(0, hash), GroupChange::Stored(1, hash)]);
    pool.free(table);
    let other = compute(&mut pool, &[9; 9]);
    let changes = pool.take_changes();
    assert_eq!(changes[..2], [GroupChange::Removed(0, hash), GroupChange::Removed(1, hash)]);
    assert_eq!((changes.len(), pool.clear_cache()), (6, 4));
    assert_eq!(pool.take_changes(), [GroupChange::Cleared]);
    drop(other);
}
