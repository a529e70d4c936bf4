//! A layout that is taken has no two runs on one byte, whatever its strides.

use std::collections::BTreeSet;

use kvferry_protocol::layout::{KvLayout, KvShape, LayerBase, PlaneStrides};
use kvferry_protocol::{BlockId, RegionId};
use proptest::prelude::*;

/// Whether two runs share a byte, found by naming every byte.
fn overlaps(layout: &KvLayout) -> bool {
    let shape = layout.shape();
    let mut seen = BTreeSet::new();
    for layer in 0..shape.layers {
        for block in (0..shape.blocks).map(BlockId::new) {
            for (plane, &run_bytes) in shape.run_bytes.iter().enumerate() {
                for head in 0..shape.heads {
                    for token in 0..shape.tokens_per_block {
                        let at = layout.place(layer, block, plane, head, token);
                        let byte = |byte: u32| (at.region, at.offset + u64::from(byte));
                        if !(0..run_bytes).all(|at| seen.insert(byte(at))) {
                            return true;
                        }
                    }
                }
            }
        }
    }
    false
}

/// Strides out of few numbers, so that many of them nest and many do not.
fn any_plane(run_bytes: u32) -> impl Strategy<Value = PlaneStrides> {
    let stride = || prop::sample::select(vec![0_u64, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72]);
    (0..40_u64, stride(), stride(), stride(), stride()).prop_map(move |(offset, layer, block, head, token)| {
        PlaneStrides { offset, layer, block, head, token, run_bytes }
    })
}

fn any_planes() -> impl Strategy<Value = (Vec<u32>, Vec<PlaneStrides>)> {
    (1..4_u32, 1..4_u32, 0..3).prop_flat_map(|(k, v, kind)| {
        let runs = if kind == 0 { vec![k] } else { vec![k, v] };
        // Unrelated planes hardly ever fit, so half of the pairs share their strides.
        let planes = (any_plane(k), any_plane(v), any::<[bool; 4]>()).prop_map(move |(k, v, alike)| {
            let pick = |like: bool, k: u64, v: u64| if like { k } else { v };
            let v = PlaneStrides {
                layer: pick(kind == 1 || alike[0], k.layer, v.layer),
                block: pick(kind == 1 || alike[1], k.block, v.block),
                head: pick(kind == 1 || alike[2], k.head, v.head),
                token: pick(kind == 1 || alike[3], k.token, v.token),
                ..v
            };
            if kind == 0 { vec![k] } else { vec![k, v] }
        });
        (Just(runs), planes)
    })
}

#[test]
fn no_layout_that_is_taken_has_overlapping_runs() {
    let sizes = (1..4_u16, 1..4_u32, 1..4_u16, 1..4_u32);
    let bases = prop::collection::vec((0..2_u32, 0..90_u64), 3);
    let cases = (sizes, any_planes(), bases, any::<bool>());
    let config = ProptestConfig { cases: 30_000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let taken = std::cell::Cell::new(0);
    runner
        .run(&cases, |((layers, blocks, heads, tokens_per_block), (run_bytes, planes), bases, single)| {
            let shape = KvShape { layers, blocks, heads, tokens_per_block, run_bytes };
            let count = if single { 1 } else { usize::from(layers) };
            let base = |&(region, offset): &(u32, u64)| LayerBase { region: RegionId::new(region), offset };
            if let Ok(layout) = KvLayout::new(shape, planes, bases[..count].iter().map(base).collect()) {
                taken.set(taken.get() + 1);
                prop_assert!(!overlaps(&layout), "{layout:?}");
            }
            Ok(())
        })
        .unwrap();
    assert!(taken.get() > 1000, "only {} layouts were taken: the strategy finds too few", taken.get());
}
