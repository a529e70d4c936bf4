//! What vLLM's tests say of blocks, by the numbers of the list of its behaviours: 5.1 consumer, 5.2 producer, 5.5 load failure, 5.8 blocks of
//! groups.

use super::*;

/// A pool of a full and a window group with blocks of 4 tokens.
fn two_groups(blocks: usize) -> GroupPool {
    pool(&[(FULL, 4), (window(9), 4)], blocks)
}

fn load(pool: &mut GroupPool, tokens: usize) -> (GroupTable, Slots) {
    let mut table = pool.open();
    let slots = pool.allocate_slots(&mut table, &Ask { external_tokens: tokens, ..Ask::default() }).unwrap();
    (table, slots)
}

#[test]
fn facts_1_and_6_blocks_of_a_load_have_no_hash_and_nobody_finds_them() {
    let mut pool = two_groups(20);
    let tokens = prompt(10);
    let (table, slots) = load(&mut pool, 10);
    assert_eq!((slots, table.ids(0).len(), pool.counts().registered), (Slots::Given, 3, 0));
    assert_eq!(pool.computed_blocks(&hashes(&pool, &tokens), 10).tokens(), 0);
}

#[test]
fn fact_4_a_load_of_two_and_a_half_blocks_registers_two() {
    let mut pool = pool(&[(FULL, 4)], 20);
    let (mut table, _) = load(&mut pool, 10);
    fill(&mut pool, &mut table, &prompt(10), 10);
    assert_eq!(pool.counts().registered, 2);
}

#[test]
fn fact_5_the_last_token_of_whole_blocks_is_computed_again_in_the_slot_that_it_has() {
    let mut pool = two_groups(20);
    let (mut table, _) = load(&mut pool, 8);
    fill(&mut pool, &mut table, &prompt(8), 8);
    let (free, before) = (pool.counts().free, raw(&table, 0));
    let ask = Ask { computed_tokens: 7, new_tokens: 1, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Given));
    assert_eq!((pool.counts().free, raw(&table, 0)), (free, before));
}

#[test]
fn fact_8_a_load_that_does_not_fit_waits_without_blocks() {
    let mut pool = two_groups(5);
    let (mut table, slots) = load(&mut pool, 16);
    assert_eq!((slots, table.ids(0).len(), pool.counts().free), (Slots::Short { wanted: 6, free: 5 }, 0, 5));
    let ask = Ask { external_tokens: 8, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Given), "and can ask again");
    let more = Ask { computed_tokens: 8, new_tokens: 8, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut table, &more), Ok(Slots::Short { wanted: 4, free: 1 }));
    assert_eq!(table.ids(0).len(), 2, "it keeps what it has");
}

#[test]
fn fact_9_a_second_load_leaves_what_the_first_still_needs() {
    for (blocks, fits) in [(9, false), (10, true)] {
        let mut pool = two_groups(blocks);
        let (first, slots) = load(&mut pool, 8);
        let mut second = pool.open();
        // The first has 4 blocks and will need 2 more.
        let ask = Ask { external_tokens: 8, reserved_blocks: 2, ..Ask::default() };
        let given = pool.allocate_slots(&mut second, &ask).unwrap() == Slots::Given;
        assert_eq!((slots, given), (Slots::Given, fits), "{blocks} blocks");
        drop(first);
    }
}

#[test]
fn facts_13_14_and_17_blocks_stay_until_the_transfer_ends_whatever_becomes_of_the_request() {
    let mut pool = pool(&[(FULL, 4)], 20);
    let table = compute(&mut pool, &prompt(10));
    let shipped = pool.ship(&table, 10).unwrap();
    pool.free(table);
    assert_eq!((pool.counts().free, pool.counts().leased), (17, 3));
    drop(shipped);
    assert_eq!((pool.counts().free, pool.counts().leased), (20, 0));
}

#[test]
fn facts_15_and_16_partial_and_found_blocks_are_shipped_too() {
    let mut pool = pool(&[(FULL, 4)], 20);
    let short = compute(&mut pool, &prompt(3));
    assert_eq!(pool.ship(&short, 3).unwrap()[0].lease.ids(), short.ids(0));
    let tokens = prompt(10);
    let first = compute(&mut pool, &tokens);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 10);
    let mut second = pool.open();
    let ask = Ask { hit: Some(&hit), new_tokens: 2, ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut second, &ask), Ok(Slots::Given));
    let shipped = pool.ship(&second, 10).unwrap();
    assert_eq!((shipped[0].first, shipped[0].lease.len()), (0, 3));
    assert_eq!(shipped[0].lease.ids()[..2], first.ids(0)[..2]);
}

#[test]
fn fact_32_of_a_load_that_failed_the_good_prefix_is_found() {
    let tokens = prompt(20);
    for (good, want) in [(20, 16), (12, 12), (8, 8), (0, 0)] {
        let mut pool = pool(&[(FULL, 4)], 20);
        let (mut table, _) = load(&mut pool, 20);
        fill(&mut pool, &mut table, &tokens, good);
        assert_eq!(pool.computed_blocks(&hashes(&pool, &tokens), 20).tokens(), want, "{good} good");
        assert_eq!(pool.counts().free, 15, "its blocks stay, to be computed");
    }
}

#[test]
fn fact_33_what_turned_out_wrong_is_not_found_again() {
    let mut pool = two_groups(20);
    let tokens = prompt(20);
    let mut table = compute(&mut pool, &tokens);
    assert_eq!(pool.evict_from(&mut table, 8), Ok(6), "3 blocks of each group");
    assert_eq!(pool.computed_blocks(&hashes(&pool, &tokens), 20).tokens(), 8);
    pool.free(table);
    assert_eq!(pool.computed_blocks(&hashes(&pool, &tokens), 20).tokens(), 8);
}

#[test]
fn fact_54_each_layer_has_one_table() {
    let layers: Vec<LayerSpec> =
        [FULL, window(9), window(9), window(9)].repeat(5).into_iter().map(|kind| layer(kind, 4)).collect();
    let plan = GroupPlan::new(&layers, crate::sizing::Placement::PerLayer).unwrap();
    let mut all: Vec<usize> = plan.groups.iter().flat_map(|group| group.layers.clone()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..20).collect::<Vec<_>>());
    assert!(plan.groups.iter().all(|group| group.layers.iter().all(|at| layers[*at].kind == group.spec.kind)));
}

#[test]
fn fact_55_groups_of_other_block_sizes_cover_the_same_tokens() {
    let pool = pool(&[(FULL, 8), (window(200), 4)], 40);
    for (local, total) in [(0, 21), (8, 21), (16, 24), (24, 24)] {
        for (places, size) in pool.to_fill(local, total).into_iter().zip([8, 4]) {
            let tokens = places.start * size..places.end * size;
            let covered = local == total && places.is_empty() || tokens.start <= local && tokens.end >= total;
            assert!(covered && tokens.end < total + size, "{local} to {total}: {places:?} of {size}");
        }
    }
}

#[test]
fn fact_57_a_hit_at_the_receiver_wants_the_last_blocks_windows_their_tail_and_states_one() {
    let kinds = [(FULL, 4), (window(9), 4), (state(StateKeeping::EachBlock), 4)];
    for (local, total, want) in [
        (0, 40, [0..10, 8..10, 9..10]),
        (24, 40, [6..10, 8..10, 9..10]),
        (36, 40, [9..10, 9..10, 9..10]),
        (40, 40, [0..0, 0..0, 0..0]),
        (0, 6, [0..2, 0..2, 1..2]),
    ] {
        let mut sender = pool(&kinds, 60);
        let table = compute(&mut sender, &prompt(total));
        assert_eq!(sender.to_fill(local as usize, total as usize), want, "{local} of {total}");
        for (group, Shipment { first, lease, .. }) in sender.ship(&table, total as usize).unwrap().iter().enumerate() {
            assert!(lease.ids().iter().all(|id| id.get() != 0), "placeholders do not travel");
            let sent = *first..first + lease.len();
            let suffix = want[group].is_empty() || sent.start <= want[group].start && sent.end == want[group].end;
            assert!(suffix, "{local} of {total}: group {group} sends {sent:?}");
        }
        // The receiver has blocks exactly there.
        let mut receiver = pool(&kinds, 60);
        let mut table = receiver.open();
        let ask = Ask { external_tokens: total as usize, ..Ask::default() };
        assert_eq!(receiver.allocate_slots(&mut table, &ask), Ok(Slots::Given));
        for (group, places) in receiver.to_fill(0, total as usize).into_iter().enumerate() {
            let kept: Vec<usize> = (0..table.ids(group).len()).filter(|at| table.ids(group)[*at].get() != 0).collect();
            assert_eq!(kept, places.collect::<Vec<_>>(), "{total}: group {group}");
        }
    }
}

#[test]
fn a_preempted_request_finds_what_it_had_computed() {
    let mut pool = two_groups(20);
    let tokens = prompt(18);
    let table = compute(&mut pool, &tokens);
    pool.free(table);
    let hit = pool.computed_blocks(&hashes(&pool, &tokens), 18);
    let mut table = pool.open();
    let ask = Ask { hit: Some(&hit), new_tokens: 2, keep_watermark: true, ..Ask::default() };
    assert_eq!((hit.tokens(), pool.allocate_slots(&mut table, &ask)), (16, Ok(Slots::Given)));
    let counts = pool.counts();
    assert_eq!((counts.free, counts.evicted_total), (20 - 5 - 3, 0));
}

#[test]
fn the_watermark_is_left_by_who_is_admitted_and_not_by_who_runs() {
    let config = GroupsConfig { watermark_blocks: 2, ..config(&[(FULL, 4)], 4) };
    let mut pool = GroupPool::new(&config).unwrap();
    let ask = Ask { new_tokens: 12, keep_watermark: true, ..Ask::default() };
    let mut table = pool.open();
    assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Short { wanted: 5, free: 4 }));
    let ask = Ask { keep_watermark: false, ..ask };
    assert_eq!(pool.allocate_slots(&mut table, &ask), Ok(Slots::Given));
    let whole = Ask { new_tokens: 1, whole_tokens: Some(8), ..Ask::default() };
    assert_eq!(pool.allocate_slots(&mut pool.open(), &whole), Ok(Slots::Short { wanted: 2, free: 1 }));
}
