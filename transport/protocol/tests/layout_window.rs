//! Windows: what crosses the wire between two layouts that do not know each other.

mod layout_model;

use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{
    CacheView, KvLayout, KvShape, LayoutOrder, Selection, Shard, WindowError, WindowShape, plan, window_pages,
};
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::check_extents;
use layout_model::{
    Allocation, Memory, ORDERS, OneSide, any_allocation, any_selection, any_side, bytes_of, layout, naive_copy,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// The window is granted for all that the receiver holds, or for the selection; then the selection is sent.
fn check(src: &OneSide, dst: &OneSide, selection: &Selection, all: bool) {
    let (layers, heads) = if all {
        let held = Selection::common(&dst.view(), &dst.view());
        (held.layers, held.heads)
    } else {
        (selection.layers.clone(), selection.heads.clone())
    };
    let granted = window_pages(&dst.layout, dst.shard, &dst.blocks, dst.first_token, layers, heads);
    let (window, pages) = granted.unwrap();
    assert_eq!(pages.bytes(), window.bytes());
    let places = bytes_of(std::slice::from_ref(&pages));
    assert_eq!(places.len() as u64, window.bytes());

    // The sender knows the window by its shape only.
    let wire = serde_json::to_string(&window).unwrap();
    let window: WindowShape = serde_json::from_str(&wire).unwrap();
    let (window_layout, blocks) = (window.layout(), window.block_ids());
    let plan = plan(&src.view(), &window.view(&window_layout, &blocks), selection).unwrap();
    let from = Memory::telling(&src.layout);
    let sent = bytes_of(&plan.source_pages());
    let extents = plan.window_extents().unwrap();
    assert_eq!(check_extents(&extents, window.bytes(), plan.bytes()), Ok(()), "a receiver refuses {extents:?}");

    // The receiver places what comes, in order, by its pages.
    let mut to = Memory::untouched(&dst.layout);
    let mut sent = sent.into_iter();
    for extent in &extents {
        assert!(extent.loops.len() <= Extent::MAX_LOOPS, "{extent:?}");
        assert!(extent.end().is_some_and(|end| end <= window.bytes()), "{extent:?} of {}", window.bytes());
        extent.for_each_run(|offset| {
            for at in offset..offset + extent.run_bytes {
                let byte = from.read(sent.next().expect("as many bytes as places"), 1);
                to.write_once(places[at as usize], byte);
            }
        });
    }
    assert_eq!(sent.next(), None, "more bytes than places");
    assert!(to == naive_copy(src, dst, selection, &from), "other bytes arrive than the model's");
}

#[test]
fn a_copy_through_a_window_is_the_direct_copy() {
    let orders = (prop::sample::select(ORDERS.to_vec()), prop::sample::select(ORDERS.to_vec()));
    let runs = prop_oneof![
        2 => (1..5_u32).prop_map(|bytes| vec![bytes, bytes]),
        1 => (1..5_u32, 1..5_u32).prop_map(|(k, v)| vec![k, v]),
        1 => (1..5_u32).prop_map(|bytes| vec![bytes]),
    ];
    let cases = (orders, any_selection(), runs, any_allocation(), any_allocation()).prop_flat_map(
        |((src, dst), selection, runs, from, to)| {
            let src = any_side(src.into(), from, runs.clone(), selection.clone());
            let dst = any_side(dst.into(), to, runs, selection.clone());
            (src, dst, Just(selection), any::<bool>())
        },
    );
    let mut runner = TestRunner::new(Config { cases: 4000, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |(src, dst, selection, all)| {
            check(&src, &dst, &selection, all);
            Ok(())
        })
        .unwrap();
}

fn llama(blocks: u32) -> KvShape {
    KvShape { layers: 32, blocks, heads: 8, tokens_per_block: 16, run_bytes: vec![256, 256] }
}

/// Inside a block the window's order is the memory's: a cross-layer block is one run, a layer-by-layer one a run a page. (Two
/// layers are always at an even distance, so uneven ones pair up.)
#[test]
fn a_window_follows_the_receivers_memory() {
    let blocks = [3, 1, 2].map(BlockId::new);
    for (order, allocation, pieces, runs, run_bytes) in [
        ("BLPNHC", Allocation::Packed, 1, 1, 2 << 20),
        ("BHLPNC", Allocation::Packed, 1, 1, 2 << 20),
        ("BPHLNC", Allocation::Packed, 1, 1, 2 << 20),
        ("LBNHPC", Allocation::Packed, 1, 32, 64 << 10),
        ("LPBNHC", Allocation::Packed, 1, 64, 32 << 10),
        ("PLBNHC", Allocation::Packed, 1, 64, 32 << 10),
        ("LBNHPC", Allocation::LayerRegions, 32, 32, 64 << 10),
        ("LPBNHC", Allocation::UnevenLayers, 16, 64, 32 << 10),
    ] {
        let local = layout(llama(4), order, allocation);
        let (window, pages) = window_pages(&local, Shard::default(), &blocks, 0, 0..32, 0..8).unwrap();
        let found: u64 = pages.pieces.iter().map(|piece| piece.bytes() / piece.run_bytes).sum();
        assert_eq!((pages.pieces.len(), found), (pieces, runs), "{order} {allocation:?}: {:?}", pages.pieces);
        assert!(pages.pieces.iter().all(|piece| piece.run_bytes == run_bytes), "{order}: {:?}", pages.pieces);
        assert_eq!(window.bytes(), 3 * (2 << 20));
    }
}

/// One extent names what a sender with the same layout writes, however its blocks are scattered.
#[test]
fn equal_layouts_send_one_extent() {
    let local = layout(llama(8), "BLPNHC", Allocation::Packed);
    let remote = [0, 5, 3, 6].map(BlockId::new);
    let (window, _) = window_pages(&local, Shard::default(), &[1, 7, 2, 4].map(BlockId::new), 0, 0..32, 0..8).unwrap();
    let src = OneSide { layout: local, shard: Shard::default(), blocks: remote.to_vec(), first_token: 0 };
    let (window_layout, blocks) = (window.layout(), window.block_ids());
    let plan = plan(&src.view(), &window.view(&window_layout, &blocks), &window.selection()).unwrap();
    assert_eq!(plan.window_extents().unwrap(), [Extent::contiguous(0, 4 * (2 << 20))]);
    let pages = plan.source_pages();
    assert_eq!(pages.len(), 1);
    assert_eq!(pages[0].bases, remote.map(|block| u64::from(block.get()) * (2 << 20)));
}

#[test]
fn a_window_from_a_peer_is_checked_before_use() {
    let good = r#"{"order":"BLPNHC","tokens_per_block":16,"blocks":4,"run_bytes":[256,256],"layers":{"start":0,"end":32},"heads":{"start":0,"end":8},"first_token":0}"#;
    assert!(serde_json::from_str::<WindowShape>(good).is_ok());
    for (from, to, why) in [
        ("\"blocks\":4", "\"blocks\":4294967295", "at most"),
        ("\"blocks\":4", "\"blocks\":0", "no layout"),
        ("\"first_token\":0", "\"first_token\":4294967295", "do not fit 32 bits"),
        ("\"tokens_per_block\":16", "\"tokens_per_block\":0", "no layout"),
        ("\"tokens_per_block\":16", "\"tokens_per_block\":1073741824", "do not fit 32 bits"),
        ("[256,256]", "[256,256,256]", "no layout"),
        ("[256,256]", "[0,256]", "no layout"),
        ("\"start\":0,\"end\":32", "\"start\":32,\"end\":0", "no layout"),
        ("[256,256]", "[4294967295,4294967295]", "ok"),
        ("\"order\":\"BLPNHC\"", "\"order\":\"BLXNHC\"", "no axis"),
        ("\"first_token\":0", "\"first_token\":0,\"more\":1", "unknown field"),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        match serde_json::from_str::<WindowShape>(&text) {
            Ok(window) => assert!(why == "ok" && window.bytes() > 0, "{text} was taken"),
            Err(error) => assert!(error.to_string().contains(why), "{text}: {error}"),
        }
    }
}

#[test]
fn a_receiver_grants_only_what_it_holds() {
    let local = layout(llama(4), "BLPNHC", Allocation::Packed);
    let grant = |blocks: &[u32], layers, heads| {
        let blocks: Vec<BlockId> = blocks.iter().copied().map(BlockId::new).collect();
        window_pages(&local, Shard::default(), &blocks, 0, layers, heads)
    };
    for (blocks, layers, heads) in
        [(vec![4], 0..32, 0..8), (vec![1, 1], 0..32, 0..8), (vec![0], 0..33, 0..8), (vec![0], 0..32, 4..9)]
    {
        let error = grant(&blocks, layers.clone(), heads.clone()).unwrap_err();
        assert!(matches!(error, WindowError::Plan { .. }), "{blocks:?} {layers:?} {heads:?}: {error}");
    }
    assert!(grant(&[0, 3], 8..16, 2..4).is_ok());
}

/// Blocks of 24 tokens into blocks of 16, and their like: the pairs of blocks fold into nests that interleave.
#[test]
fn extents_of_odd_block_sizes_nest_so_that_a_receiver_takes_them() {
    for (from, to) in [(24, 16), (12, 8), (12, 16), (3, 5), (24, 48), (7, 16), (16, 24)] {
        for order in LayoutOrder::LISTED {
            for first in [0, 40] {
                let side = |tokens_per_block: u32, order: &str| {
                    let shape = KvShape { blocks: 400, tokens_per_block, layers: 2, heads: 2, run_bytes: vec![16, 16] };
                    KvLayout::packed(shape, order.parse().unwrap()).unwrap()
                };
                let (src, dst) = (side(from, "LPBNHC"), side(to, order));
                let ids = |per_block: u32| (0..500_u32.div_ceil(per_block)).map(BlockId::new).collect::<Vec<_>>();
                let (window, _) = window_pages(&dst, Shard::default(), &ids(to), 0, 0..2, 0..2).unwrap();
                let (layout, blocks) = (window.layout(), window.block_ids());
                let held = ids(from);
                let view = CacheView { layout: &src, shard: Shard::default(), blocks: &held, first_token: 0 };
                let selection = Selection { layers: 0..2, heads: 0..2, tokens: first..500 };
                let plan = plan(&view, &window.view(&layout, &blocks), &selection).unwrap();
                let extents = plan.window_extents().unwrap();
                let checked = check_extents(&extents, window.bytes(), plan.bytes());
                assert_eq!(checked, Ok(()), "{from} to {to}, {order}, from token {first}");
            }
        }
    }
}
