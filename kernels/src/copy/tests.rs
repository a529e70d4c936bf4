//! Copies and digests over real memory against the naive model.

#[path = "../../../transport/protocol/tests/layout_model/mod.rs"]
mod layout_model;

use std::ops::Range;

use kvferry_protocol::digest::run_hash;
use kvferry_protocol::layout::{KvShape, LayoutOrder, Place, WindowShape, plan, window_pages};
use kvferry_protocol::{BlockId, LayerId};
use layout_model::{
    Allocation, Memory, ORDERS, OneSide, any_allocation, any_selection, any_side, each_run, layout, naive_copy,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// The sum of the hashes of single runs, read from the source one by one.
fn naive_digest(src: &OneSide, selection: &Selection, memory: &Memory) -> Digest {
    let mut sum = Digest::ZERO;
    each_run(src, src, selection, |layer, plane, head, token, at, _, bytes| {
        sum.add_run(run_hash(LayerId::new(layer), plane as u8, head, token, memory.read(at, bytes)));
    });
    sum
}

/// A packed place for exactly a selection, in the order of a window onto the given layout.
fn packed_side(of: &OneSide, selection: &Selection, order: &str) -> OneSide {
    let size = of.layout.shape().tokens_per_block;
    let first_token = selection.tokens.start;
    let count = selection.tokens.len().div_ceil(size as usize) as u32;
    let shape = KvShape {
        layers: selection.layers.len() as u16,
        blocks: count,
        heads: selection.heads.len() as u16,
        ..of.layout.shape().clone()
    };
    let order = order.parse::<LayoutOrder>().unwrap().block_outermost().to_string();
    let shard = kvferry_protocol::layout::Shard {
        first_layer: LayerId::new(selection.layers.start),
        first_head: selection.heads.start,
    };
    let blocks = (0..count).map(BlockId::new).collect();
    OneSide { layout: layout(shape, &order, Allocation::Packed), shard, blocks, first_token }
}

/// A plan's source bytes in the order of [`CopyPlan::source_pages`].
fn in_wire_order(plan: &CopyPlan, memory: &Memory) -> Vec<u8> {
    let mut out = Vec::new();
    for pages in plan.source_pages() {
        for &base in &pages.bases {
            for piece in &pages.pieces {
                piece.for_each_run(base, |offset| {
                    out.extend_from_slice(memory.read(Place { region: piece.region, offset }, piece.run_bytes));
                });
            }
        }
    }
    out
}

fn check_case(src: &OneSide, dst: &OneSide, selection: &Selection, order: &str) {
    let mut from = Memory::telling(&src.layout);
    let want = naive_copy(src, dst, selection, &from);
    let digest_want = naive_digest(src, selection, &from);
    let packed_at = packed_side(dst, selection, order);
    let mut packed = Memory::untouched(&packed_at.layout);
    let mut to = Memory::untouched(&dst.layout);

    let gather = plan(&src.view(), &packed_at.view(), selection).unwrap();
    let scatter = plan(&packed_at.view(), &dst.view(), selection).unwrap();
    let (src_table, packed_table, dst_table) =
        (RegionTable::over(&mut from.0), RegionTable::over(&mut packed.0), RegionTable::over(&mut to.0));
    assert_eq!(gather_with_digest(&gather, &src_table, &packed_table), Ok(digest_want));
    let mut slab = vec![0xee; gather.bytes() as usize];
    assert_eq!(pack_with_digest(&gather, &src_table, &mut slab), Ok(digest_want));
    assert_eq!(copy(&scatter, &packed_table, &dst_table), Ok(()));
    assert_eq!(digest(&src.view(), selection, &src_table), Ok(digest_want));
    assert_eq!(digest_side(&scatter, Side::Source, &packed_table), Ok(digest_want));
    assert_eq!(digest_side(&scatter, Side::Destination, &dst_table), Ok(digest_want));
    assert!(to == want, "gather and scatter give other bytes than the model");
    assert!(slab == in_wire_order(&gather, &from), "a slab is not packed in the order of the wire");
}

#[test]
fn gather_and_scatter_through_a_packed_slab_copy_and_digest_as_the_model_does() {
    let orders = (0..3_usize).prop_flat_map(|_| [(); 3].map(|()| prop::sample::select(ORDERS.to_vec())));
    let run = prop_oneof![Just(16_u32), Just(32), Just(64), 1..70_u32, Just(128)];
    let runs = prop_oneof![
        2 => run.clone().prop_map(|bytes| vec![bytes, bytes]),
        1 => (run.clone(), run.clone()).prop_map(|(k, v)| vec![k, v]),
        1 => run.prop_map(|bytes| vec![bytes]),
    ];
    let cases = (orders, any_selection(), runs, any_allocation(), any_allocation()).prop_flat_map(
        |([src, dst, packed], selection, runs, from, to)| {
            let src = any_side(src.into(), from, runs.clone(), selection.clone());
            let dst = any_side(dst.into(), to, runs, selection.clone());
            (src, dst, Just(selection), Just(packed))
        },
    );
    let mut runner = TestRunner::new(Config { cases: 100, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |(src, dst, selection, packed)| {
            check_case(&src, &dst, &selection, packed);
            Ok(())
        })
        .unwrap();
}

fn small_side() -> (OneSide, Selection) {
    let shape = KvShape { layers: 2, blocks: 4, heads: 2, tokens_per_block: 4, run_bytes: vec![16, 16] };
    let side = OneSide {
        layout: layout(shape, "LPBNHC", Allocation::LayerRegions),
        shard: Default::default(),
        blocks: vec![BlockId::new(2), BlockId::new(3)],
        first_token: 0,
    };
    (side, Selection { layers: 0..2, heads: 0..2, tokens: 0..8 })
}

#[test]
fn a_plan_past_a_regions_end_moves_nothing() {
    let (src, selection) = small_side();
    let dst = packed_side(&src, &selection, "BLPNHC");
    let plan = plan(&src.view(), &dst.view(), &selection).unwrap();
    let (mut from, mut to) = (Memory::telling(&src.layout), Memory::untouched(&dst.layout));
    let before = to.clone();

    let last = from.0.values_mut().next_back().unwrap();
    let whole = last.len();
    last.pop();
    let tables = (RegionTable::over(&mut from.0), RegionTable::over(&mut to.0));
    let refused = copy(&plan, &tables.0, &tables.1).unwrap_err();
    let (region, bytes) = (RegionId::new(1), whole - 1);
    assert_eq!(refused, CopyError::Bounds { side: Side::Source, region, bytes, end: whole as u64 });
    assert_eq!(gather_with_digest(&plan, &tables.0, &tables.1), Err(refused.clone()));
    assert_eq!(digest(&src.view(), &selection, &tables.0), Err(refused));

    from.0.remove(&RegionId::new(1));
    let one = RegionTable::over(&mut from.0);
    let refused = copy(&plan, &one, &tables.1).unwrap_err();
    assert_eq!(refused, CopyError::Region { side: Side::Source, region: RegionId::new(1) });
    let none = RegionTable::over(&mut std::collections::BTreeMap::new());
    let refused = copy(&plan, &tables.0, &none).unwrap_err();
    assert!(matches!(refused, CopyError::Bounds { side: Side::Source, .. }), "the source is still short: {refused}");
    assert!(to == before, "a refused copy moved bytes");
}

#[test]
fn a_digest_sees_one_wrong_byte_and_a_swap_of_tokens() {
    let (src, selection) = small_side();
    let mut memory = Memory::telling(&src.layout);
    let of = |memory: &mut Memory| digest(&src.view(), &selection, &RegionTable::over(&mut memory.0)).unwrap();
    let good = of(&mut memory);
    let place = |token: u32| src.layout.place(1, src.blocks[(token / 4) as usize], 1, 1, token % 4);
    for token in 0..8 {
        let at = place(token);
        memory.0.get_mut(&at.region).unwrap()[at.offset as usize + 15] ^= 0x10;
        assert_ne!(of(&mut memory), good, "token {token}");
        memory.0.get_mut(&at.region).unwrap()[at.offset as usize + 15] ^= 0x10;
    }
    let (a, b) = (place(1).offset as usize, place(6).offset as usize);
    let region = memory.0.get_mut(&place(1).region).unwrap();
    for byte in 0..16 {
        region.swap(a + byte, b + byte);
    }
    assert_ne!(of(&mut memory), good, "tokens 1 and 6 changed places");
}

#[test]
fn a_block_that_stands_twice_may_be_digested_but_not_written() {
    let (mut src, selection) = small_side();
    src.blocks = vec![BlockId::new(2); 2];
    let mut memory = Memory::telling(&src.layout);
    let want = naive_digest(&src, &selection, &memory);
    assert_eq!(digest(&src.view(), &selection, &RegionTable::over(&mut memory.0)), Ok(want));
    assert!(plan(&src.view(), &src.view(), &selection).is_err());
}

#[test]
fn digests_of_parts_add_up_whatever_each_side_calls_a_block() {
    let (src, whole) = small_side();
    let mut memory = Memory::telling(&src.layout);
    let table = RegionTable::over(&mut memory.0);
    let of = |selection: &Selection| digest(&src.view(), selection, &table).unwrap();
    let mut parts = Digest::ZERO;
    for layer in 0..2 {
        for head in 0..2 {
            for tokens in [0..3, 3..5, 5..8] {
                parts += of(&Selection { layers: layer..layer + 1, heads: head..head + 1, tokens });
            }
        }
    }
    assert_eq!(parts, of(&whole));
}

/// What a receiver does with a packed message: scatter by the window's pages.
#[test]
fn a_packed_window_scatters_into_the_receivers_memory() {
    let (src, selection) = small_side();
    let (window, pages) = window_pages(&src.layout, src.shard, &src.blocks, 0, 0..2, 0..2).unwrap();
    let _: &WindowShape = &window;
    let (window_layout, ids) = (window.layout(), window.block_ids());
    let gather = plan(&src.view(), &window.view(&window_layout, &ids), &selection).unwrap();
    let (mut from, mut slab) = (Memory::telling(&src.layout), Memory::untouched(&window_layout));
    let tables = (RegionTable::over(&mut from.0), RegionTable::over(&mut slab.0));
    copy(&gather, &tables.0, &tables.1).unwrap();
    let packed = slab.read(Place { region: RegionId::new(0), offset: 0 }, window.bytes());
    let mut next = 0;
    for &base in &pages.bases {
        for piece in &pages.pieces {
            piece.for_each_run(base, |offset| {
                let run = &packed[next..next + piece.run_bytes as usize];
                assert_eq!(run, from.read(Place { region: piece.region, offset }, piece.run_bytes));
                next += run.len();
            });
        }
    }
    assert_eq!(next as u64, window.bytes());
}

/// Shows parts of a window in random pieces and a random order; parts are bands of tokens.
fn check_window(of: &OneSide, selection: &Selection, parts: u32, seed: u64) {
    let size = of.layout.shape().tokens_per_block;
    let first_token = of.first_token + (selection.tokens.start - of.first_token) / size * size;
    let blocks = &of.blocks[((first_token - of.first_token) / size) as usize..];
    let count = (selection.tokens.end - first_token).div_ceil(size) as usize;
    let blocks = &blocks[..count];
    let (layers, heads) = (selection.layers.clone(), selection.heads.clone());
    let (window, _) = window_pages(&of.layout, of.shard, blocks, first_token, layers.clone(), heads.clone()).unwrap();
    let mut memory = Memory::telling(&of.layout);
    let want = |tokens: &Range<u32>, memory: &Memory| {
        let selection = Selection { layers: layers.clone(), heads: heads.clone(), tokens: tokens.clone() };
        naive_digest(of, &selection, memory)
    };
    // The memory's blocks may be of another size than the window's: a sender's are.
    let view = CacheView { first_token: of.first_token, ..of.view() };
    let is_even = of.layout.shape().run_bytes.iter().all(|&bytes| bytes == of.layout.shape().run_bytes[0]);
    let digests = WindowDigests::new(&window, &view);
    assert_eq!(digests.is_some(), is_even);
    let Some(digests) = digests else { return };
    let (window_layout, ids) = (window.layout(), window.block_ids());
    let step = (selection.tokens.len() as u32).div_ceil(parts).max(1);
    let bands: Vec<Range<u32>> = (selection.tokens.start..selection.tokens.end)
        .step_by(step as usize)
        .map(|start| start..(start + step).min(selection.tokens.end))
        .collect();
    let extents = |tokens: &Range<u32>| {
        let selection = Selection { layers: layers.clone(), heads: heads.clone(), tokens: tokens.clone() };
        plan(&of.view(), &window.view(&window_layout, &ids), &selection).unwrap().window_extents().unwrap()
    };
    let mut random = seed | 1;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut pieces = Vec::new();
    for (part, tokens) in bands.iter().enumerate() {
        for extent in extents(tokens) {
            extent.for_each_run(|start| {
                let (mut at, end) = (start, start + extent.run_bytes);
                while at < end {
                    let bytes = (1 + next(3 * extent.run_bytes)).min(end - at);
                    pieces.push((part as u32, at..at + bytes));
                    at += bytes;
                }
            });
        }
    }
    for at in (1..pieces.len()).rev() {
        pieces.swap(at, next(at as u64 + 1) as usize);
    }
    let are_many = pieces.len() as u64 > WindowDigests::FEW_STRETCHES;
    let last = pieces.pop();
    for (part, stretch) in pieces {
        digests.passed(part, stretch, || RegionTable::over(&mut memory.0));
    }
    let Some((late, stretch)) = last else { return };
    assert_eq!(digests.take(late, &extents(&bands[late as usize])), None, "a byte is missing");
    digests.passed(late, stretch.clone(), || RegionTable::over(&mut memory.0));
    for (part, tokens) in bands.iter().enumerate().filter(|(part, _)| *part as u32 != late) {
        let other = bands.iter().find(|other| *other != tokens).unwrap();
        if part % 3 == 1 && other.len() == tokens.len() {
            assert_eq!(digests.take(part as u32, &extents(other)), None, "other bytes than those that passed");
        } else {
            let found = digests.take(part as u32, &extents(tokens));
            // Of very many short stretches nothing may be known.
            let is_known = !are_many || found.is_some();
            assert_eq!(found, is_known.then(|| want(tokens, &memory)), "{tokens:?}");
        }
    }
    digests.passed(99, stretch, || unreachable!("nothing is hashed twice"));
    digests.passed(100, 0..1, || unreachable!("nothing is known any more"));
}

#[test]
fn digests_of_a_windows_parts_are_those_of_their_runs_however_the_bytes_pass() {
    let run = prop_oneof![Just(16_u32), Just(64), 1..70_u32];
    let runs = prop_oneof![
        4 => run.clone().prop_map(|bytes| vec![bytes, bytes]),
        1 => (run.clone(), run.clone()).prop_map(|(k, v)| vec![k, v]),
        2 => run.prop_map(|bytes| vec![bytes]),
    ];
    let cases =
        (prop::sample::select(ORDERS.to_vec()), any_selection(), runs, any_allocation(), 1..5_u32, any::<u64>())
            .prop_flat_map(|(order, selection, runs, from, parts, seed)| {
                let side = any_side(order.into(), from, runs, selection.clone());
                (side, Just(selection), Just(parts), Just(seed))
            });
    let mut runner = TestRunner::new(Config { cases: 150, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |(side, selection, parts, seed)| {
            check_window(&side, &selection, parts, seed);
            Ok(())
        })
        .unwrap();
}

#[test]
fn bytes_that_pass_in_two_parts_are_known_in_none() {
    let (side, selection) = small_side();
    let (window, _) = window_pages(&side.layout, side.shard, &side.blocks, 0, 0..2, 0..2).unwrap();
    let mut memory = Memory::telling(&side.layout);
    let all = [kvferry_protocol::pages::Extent::contiguous(0, window.bytes())];
    for again in [0..1, 40..50, window.bytes() - 1..window.bytes()] {
        let digests = WindowDigests::new(&window, &side.view()).unwrap();
        digests.passed(0, 0..window.bytes(), || RegionTable::over(&mut memory.0));
        digests.passed(1, again, || RegionTable::over(&mut memory.0));
        assert_eq!(digests.take(0, &all), None);
    }
    let digests = WindowDigests::new(&window, &side.view()).unwrap();
    digests.passed(0, 0..window.bytes(), || RegionTable::over(&mut memory.0));
    assert_eq!(digests.take(0, &all), Some(naive_digest(&side, &selection, &memory)));
}
