//! What engines agree on about addresses and hand-over, as tables in our words. "Fact n" is a number of the vLLM contract.

mod layout_model;

use kvferry_protocol::layout::{
    CacheView, KvLayout, KvShape, LayerBase, LayoutError, LayoutOrder, Place, PlanError, PlaneStrides, Selection,
    Shard, Side, plan,
};
use kvferry_protocol::{BlockId, LayerId, RegionId};
use layout_model::{Allocation, Memory, OneSide, layout, naive_copy, planned_copy};

fn shape(layers: u16, blocks: u32, heads: u16, tokens_per_block: u32) -> KvShape {
    KvShape { layers, blocks, heads, tokens_per_block, run_bytes: vec![4, 4] }
}

fn ids(raw: &[u32]) -> Vec<BlockId> {
    raw.iter().copied().map(BlockId::new).collect()
}

fn side(layout: KvLayout, first_head: u16, blocks: &[u32], first_token: u32) -> OneSide {
    OneSide { layout, shard: Shard { first_head, ..Shard::default() }, blocks: ids(blocks), first_token }
}

/// Fact 51: a head slice between different block sizes must not be garbled. We copy it; what does not fit is named.
#[test]
fn a_head_slice_between_block_sizes_is_exact_or_refused_by_name() {
    let src = side(layout(shape(2, 4, 8, 16), "BLPNHC", Allocation::Packed), 0, &[2, 0], 0);
    let dst = side(layout(shape(2, 9, 2, 8), "BHLPNC", Allocation::Packed), 4, &[7, 1, 3, 8], 0);
    let selection = Selection::common(&src.view(), &dst.view());
    assert_eq!((selection.heads.clone(), selection.tokens.clone()), (4..6, 0..32));
    let from = Memory::telling(&src.layout);
    let made = plan(&src.view(), &dst.view(), &selection).unwrap();
    assert!(planned_copy(&made, &dst, &from) == naive_copy(&src, &dst, &selection, &from));
    let all_heads = Selection { heads: 0..8, ..selection };
    let refused = plan(&src.view(), &dst.view(), &all_heads).unwrap_err();
    assert_eq!(refused, PlanError::Outside { axis: "heads", side: Side::Destination, wanted: 0..8, held: 4..6 });
}

/// Fact 52: an address is base + block * block length; consecutive ids coalesce, and no run crosses a gap or a row's start.
#[test]
fn consecutive_blocks_coalesce_and_nothing_crosses_a_gap() {
    // (order, allocation, source blocks, destination blocks, runs)
    for (order, allocation, from, to, runs) in [
        ("BLPNHC", Allocation::Packed, [0, 1, 2, 3], [4, 5, 6, 7], 1),
        ("BLPNHC", Allocation::Packed, [0, 1, 5, 6], [4, 5, 6, 7], 2),
        ("BLPNHC", Allocation::Packed, [0, 1, 2, 3], [4, 5, 0, 1], 2),
        ("BLPNHC", Allocation::Packed, [3, 2, 1, 0], [7, 6, 5, 4], 4),
        ("LBNHPC", Allocation::Packed, [0, 1, 2, 3], [4, 5, 6, 7], 3),
        ("LPBNHC", Allocation::Packed, [0, 1, 2, 3], [4, 5, 6, 7], 6),
        ("LPBNHC", Allocation::LayerRegions, [0, 1, 2, 3], [4, 5, 6, 7], 6),
        // Padding after each token's head, and so after everything else.
        ("BLPNHC", Allocation::Padded(4), [0, 1, 2, 3], [4, 5, 6, 7], 4 * 3 * 2 * 2 * 2),
    ] {
        let cache = layout(shape(3, 8, 2, 2), order, allocation);
        let (src, dst) = (side(cache.clone(), 0, &from, 0), side(cache, 0, &to, 0));
        let made = plan(&src.view(), &dst.view(), &Selection::common(&src.view(), &dst.view())).unwrap();
        assert_eq!(made.runs(), runs, "{order} {allocation:?} {from:?} -> {to:?}");
        assert_eq!(made.bytes(), 4 * src.layout.shape().block_bytes(), "padding is not carried");
    }
    let padded = PlaneStrides { offset: 64, layer: 0, block: 1000, head: 4, token: 8, run_bytes: 4 };
    let shape = KvShape { run_bytes: vec![4], ..shape(1, 8, 2, 2) };
    let cache = KvLayout::new(shape, vec![padded], vec![LayerBase { region: RegionId::new(3), offset: 5 }]).unwrap();
    let place = cache.place(0, BlockId::new(6), 0, 1, 1);
    assert_eq!(place, Place { region: RegionId::new(3), offset: 5 + 64 + 6 * 1000 + 4 + 8 });
    let (src, dst) = (side(cache.clone(), 0, &[0, 1, 2], 0), side(cache, 0, &[3, 4, 5], 0));
    let made = plan(&src.view(), &dst.view(), &Selection::common(&src.view(), &dst.view())).unwrap();
    assert_eq!((made.runs(), made.run_bytes_min()), (3, 16), "a run a page: padding is not carried");
}

/// Fact 53: bytes past the last whole block are nobody's; regions of different lengths count from their own starts.
#[test]
fn padding_moves_nothing_and_each_region_counts_for_itself() {
    let bases = (0..3).map(|layer| LayerBase { region: RegionId::new(layer), offset: u64::from(layer) * 100 });
    let one = layout(shape(1, 4, 2, 2), "LPBNHC", Allocation::Packed);
    let cache = KvLayout::new(shape(3, 4, 2, 2), one.planes().to_vec(), bases.collect()).unwrap();
    let (src, dst) = (side(cache.clone(), 0, &[3], 0), side(cache, 0, &[0], 0));
    let made = plan(&src.view(), &dst.view(), &Selection::common(&src.view(), &dst.view())).unwrap();
    let page = 2 * 2 * 4;
    for layer in 0..3_u64 {
        // V's last page is the highest byte of the source.
        assert!(made.ends(Side::Source).contains(&(RegionId::new(layer as u32), layer * 100 + 8 * page)));
        assert!(made.ends(Side::Destination).contains(&(RegionId::new(layer as u32), layer * 100 + 5 * page)));
    }
    let beyond = CacheView { blocks: &ids(&[4]), ..src.view() };
    let refused = plan(&beyond, &dst.view(), &Selection { layers: 0..3, heads: 0..2, tokens: 0..2 }).unwrap_err();
    assert_eq!(refused, PlanError::Block { side: Side::Source, block: BlockId::new(4), blocks: 4 });
}

/// Fact 57: where the destination has a prefix already, the source's last blocks go to its blocks; blocks outside the
/// selection (placeholders of a sliding window) are not touched, whatever their ids.
#[test]
fn a_prefix_hit_aligns_the_suffixes() {
    let cache = layout(shape(1, 8, 1, 16), "BLPNHC", Allocation::Packed);
    let src = side(cache.clone(), 0, &[0, 1, 2, 3, 4, 5, 6, 7], 0);
    let dst = side(cache.clone(), 0, &[5, 1, 3, 0, 2], 48);
    let made = plan(&src.view(), &dst.view(), &Selection::common(&src.view(), &dst.view())).unwrap();
    let pairs: Vec<_> =
        made.groups()[0].pairs.iter().map(|pair| (pair.src_block.get(), pair.dst_block.get())).collect();
    assert_eq!(pairs, [(3, 5), (4, 1), (5, 3), (6, 0), (7, 2)]);
    assert_eq!(made.groups().len(), 1);

    let windowed = side(cache, 0, &[0, 0, u32::MAX, 0, 6, 7, 3, 4], 0);
    let last = Selection { layers: 0..1, heads: 0..1, tokens: 64..128 };
    let made = plan(&windowed.view(), &src.view(), &last).unwrap();
    let pairs: Vec<_> =
        made.groups()[0].pairs.iter().map(|pair| (pair.src_block.get(), pair.dst_block.get())).collect();
    assert_eq!(pairs, [(6, 4), (7, 5), (3, 6), (4, 7)]);
}

/// The reason for cross-layer layouts: a block is one run, and with heads outside the layers so is a head slice.
#[test]
fn plans_have_the_fewest_runs_and_do_not_grow_with_layers_or_heads() {
    // (source, destination, heads of the destination, pieces, runs of a block of 32 layers, 8 heads and 16 tokens)
    for (from, to, heads, pieces, runs) in [
        ("BLPNHC", "BLPNHC", 8, 1, 1),
        ("LBNHPC", "LBNHPC", 8, 1, 32),
        ("LPBNHC", "LPBNHC", 8, 1, 64),
        ("LPBNHC", "BLPNHC", 8, 1, 64),
        ("PLBNHC", "BLPNHC", 8, 1, 64),
        ("BHLPNC", "BHLPNC", 2, 1, 1),
        ("BLHNPC", "BLHNPC", 2, 1, 32),
        ("BPHLNC", "BPHLNC", 2, 1, 2),
        ("BLPNHC", "BLPNHC", 2, 1, 32 * 2 * 16),
        ("BLPNHC", "BHLPNC", 8, 1, 32 * 2 * 16 * 8),
        ("BLNHPC", "BLNHPC", 2, 1, 32 * 16),
        ("BLNHPC", "BHLNPC", 8, 1, 32 * 16 * 8),
    ] {
        for grown in [1, 2] {
            let of = |heads| shape(32 * grown, 9, heads, 16);
            let src = side(layout(of(8 * grown), from, Allocation::Packed), 0, &[7, 2], 0);
            let dst = side(layout(of(heads * grown), to, Allocation::Packed), 0, &[1, 4], 0);
            let made = plan(&src.view(), &dst.view(), &Selection::common(&src.view(), &dst.view())).unwrap();
            assert_eq!(made.groups()[0].pieces.len(), pieces, "{from} -> {to}");
            if grown == 1 {
                assert_eq!(made.runs(), 2 * runs, "{from} -> {to}, {heads} heads: {:?}", made.groups()[0].pieces);
            }
        }
    }
}

#[test]
fn layers_at_even_distances_are_one_loop_and_others_a_piece_each() {
    let one = layout(shape(1, 4, 2, 2), "LBNHPC", Allocation::Packed);
    let target = side(layout(shape(8, 4, 2, 2), "BLNHPC", Allocation::Packed), 0, &[1], 0);
    for (bases, pieces) in [
        (vec![0, 500, 1000, 1500, 2000, 2500, 3000, 3500], 1),
        (vec![0, 500, 1000, 1500, 2003, 2503, 3003, 3503], 2),
        (vec![0, 500, 1001, 1503, 2006, 2510, 3015, 3521], 4),
    ] {
        let bases = bases.into_iter().map(|offset| LayerBase { region: RegionId::new(0), offset }).collect();
        let cache = KvLayout::new(shape(8, 4, 2, 2), one.planes().to_vec(), bases).unwrap();
        let src = side(cache, 0, &[2], 0);
        let made = plan(&src.view(), &target.view(), &Selection::common(&src.view(), &target.view())).unwrap();
        assert_eq!(made.groups()[0].pieces.len(), pieces);
    }
}

#[test]
fn what_does_not_fit_is_named_with_both_values() {
    let cache = layout(shape(4, 8, 4, 16), "BLPNHC", Allocation::Packed);
    let of = |runs: Vec<u32>| layout(KvShape { run_bytes: runs, ..shape(4, 8, 4, 16) }, "BLPNHC", Allocation::Packed);
    let src = side(cache.clone(), 0, &[0, 1], 0);
    let all = Selection { layers: 0..4, heads: 0..4, tokens: 0..32 };
    let mla = side(of(vec![4]), 0, &[0, 1], 0);
    assert_eq!(plan(&src.view(), &mla.view(), &all).unwrap_err(), PlanError::Planes { src: 2, dst: 1 });
    let wide = side(of(vec![4, 8]), 0, &[0, 1], 0);
    assert_eq!(plan(&src.view(), &wide.view(), &all).unwrap_err(), PlanError::RunBytes { plane: 1, src: 4, dst: 8 });
    let twice = side(cache.clone(), 0, &[3, 3], 0);
    assert_eq!(plan(&src.view(), &twice.view(), &all).unwrap_err(), PlanError::Twice { block: BlockId::new(3) });
    assert!(plan(&twice.view(), &src.view(), &all).is_ok(), "a shared block may be read twice");
    #[expect(clippy::reversed_empty_ranges, reason = "the range is the test")]
    let backwards = Selection { tokens: 9..3, ..all.clone() };
    let refused = plan(&src.view(), &src.view(), &backwards).unwrap_err();
    assert_eq!(refused, PlanError::Backwards { axis: "tokens", start: 9, end: 3 });
    let stage = OneSide { shard: Shard { first_layer: LayerId::new(4), first_head: 0 }, ..side(cache, 0, &[0, 1], 0) };
    let refused = plan(&src.view(), &stage.view(), &all).unwrap_err();
    assert_eq!(refused, PlanError::Outside { axis: "layers", side: Side::Destination, wanted: 0..4, held: 4..8 });
    assert!(Selection::common(&src.view(), &stage.view()).is_empty());
    let nothing = plan(&src.view(), &src.view(), &Selection { tokens: 5..5, ..all }).unwrap();
    assert_eq!((nothing.bytes(), nothing.runs(), nothing.run_bytes_min()), (0, 0, 0));
    assert_eq!(nothing.window_extents().unwrap(), []);
}

#[test]
fn an_order_is_read_back_from_strides() {
    for name in LayoutOrder::LISTED {
        let order: LayoutOrder = name.parse().unwrap();
        for allocation in [Allocation::Packed, Allocation::Padded(3)] {
            assert_eq!(layout(shape(3, 5, 2, 7), name, allocation).order(), order, "{allocation:?}");
        }
    }
}

#[test]
fn runs_that_share_bytes_make_no_layout() {
    let good = PlaneStrides { offset: 0, layer: 2048, block: 512, head: 4, token: 16, run_bytes: 4 };
    let at = |offset| PlaneStrides { offset, ..good.clone() };
    let shape = shape(2, 4, 4, 16);
    let base = |offset| LayerBase { region: RegionId::new(0), offset };
    let make = |k: PlaneStrides, v: PlaneStrides, bases: &[LayerBase]| {
        KvLayout::new(shape.clone(), vec![k, v], bases.to_vec())
    };
    for (name, k, v, bases, want) in [
        ("V after K in a block", at(0), at(256), vec![base(0)], None),
        ("K after V in a block", at(256), at(0), vec![base(0)], None),
        ("V far away", at(0), at(1 << 20), vec![base(0)], None),
        (
            "layers woven into the rows",
            PlaneStrides { block: 1024, ..at(0) },
            PlaneStrides { block: 1024, ..at(256) },
            vec![base(0), base(512)],
            None,
        ),
        ("V on K", at(0), at(0), vec![base(0)], Some(("plane", "run"))),
        ("V in K's page", at(0), at(200), vec![base(0)], Some(("plane", "token"))),
        ("V over the next block", at(0), at(300), vec![base(0)], Some(("block", "plane"))),
        ("heads too near", PlaneStrides { head: 3, ..at(0) }, at(256), vec![base(0)], Some(("head", "run"))),
        ("tokens on heads", PlaneStrides { token: 12, ..at(0) }, at(256), vec![base(0)], Some(("token", "head"))),
        (
            "a stride of 0",
            PlaneStrides { block: 0, ..at(0) },
            PlaneStrides { block: 0, ..at(256) },
            vec![base(0)],
            Some(("block", "run")),
        ),
        ("layers on each other", at(0), at(256), vec![base(0), base(0)], Some(("layer", "run"))),
        ("layers too near", at(0), at(256), vec![base(0), base(1000)], Some(("layer", "block"))),
        (
            "other strides outside the planes",
            at(0),
            PlaneStrides { block: 520, ..at(256) },
            vec![base(0)],
            Some(("block", "plane")),
        ),
    ] {
        match (make(k, v, &bases), want) {
            (Ok(_), None) => {}
            (Err(LayoutError::Overlap { a, b, .. }), Some(want)) => assert_eq!((a, b), want, "{name}"),
            (got, _) => panic!("{name}: {got:?}"),
        }
    }
    let huge = PlaneStrides { layer: 1 << 62, ..at(0) };
    assert_eq!(make(huge.clone(), huge, &[base(0)]), Err(LayoutError::TooLarge));
}

#[test]
fn a_layout_that_was_read_is_checked_like_one_that_was_made() {
    let cache = layout(shape(2, 4, 4, 16), "LBNHPC", Allocation::LayerRegions);
    let text = serde_json::to_string(&cache).unwrap();
    assert_eq!(serde_json::from_str::<KvLayout>(&text).unwrap(), cache);
    let bad = text.replace("\"run_bytes\":[4,4]", "\"run_bytes\":[4,5]");
    assert!(serde_json::from_str::<KvLayout>(&bad).unwrap_err().to_string().contains("plane 1"), "{bad}");
}
