//! The naive model: memory as bytes by region, layouts of every kind, and a copy that knows only single runs.

#![allow(dead_code, reason = "each test file uses its own part of the model")]

use std::collections::BTreeMap;

use kvferry_protocol::layout::{
    CacheView, CopyPlan, KvLayout, KvShape, LayerBase, LayoutOrder, Place, PlaneStrides, Selection, Shard,
};
use kvferry_protocol::pages::Pages;
use kvferry_protocol::{BlockId, LayerId, RegionId};
use proptest::prelude::*;

pub(crate) const UNTOUCHED: u8 = 0xEE;
/// Any order of axes, the listed ones first.
pub(crate) const ORDERS: [&str; 15] = [
    "LPBNHC", "LBPNHC", "LBPHNC", "PLBNHC", "LBNHPC", "LBHNPC", "BLPNHC", "BHLPNC", "BPHLNC", "BLNHPC", "BHLNPC",
    "BLHNPC", "NHLPBC", "HPNLBC", "BNPLHC",
];

/// Bytes by region.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Memory(pub(crate) BTreeMap<RegionId, Vec<u8>>);

impl Memory {
    /// Memory that holds every run of a layout, filled by `fill(region, offset)`.
    pub(crate) fn of(layout: &KvLayout, fill: impl Fn(u64, u64) -> u8) -> Self {
        let mut ends: BTreeMap<RegionId, u64> = BTreeMap::new();
        let shape = layout.shape();
        for layer in 0..shape.layers {
            for (plane, run) in shape.run_bytes.iter().enumerate() {
                let last = layout.place(
                    layer,
                    BlockId::new(shape.blocks - 1),
                    plane,
                    shape.heads - 1,
                    shape.tokens_per_block - 1,
                );
                let end = ends.entry(last.region).or_default();
                *end = (*end).max(last.offset + u64::from(*run));
            }
        }
        let bytes = |(region, end): (RegionId, u64)| {
            (region, (0..end).map(|offset| fill(u64::from(region.get()), offset)).collect())
        };
        Self(ends.into_iter().map(bytes).collect())
    }

    /// Memory whose every byte tells where it stood.
    pub(crate) fn telling(layout: &KvLayout) -> Self {
        Self::of(layout, |region, offset| {
            let mixed = (region * 0x1_0001 + offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // Never the mark of untouched bytes, or a copy of it would not be seen.
            ((mixed >> 32) as u8).min(UNTOUCHED - 1)
        })
    }

    pub(crate) fn untouched(layout: &KvLayout) -> Self {
        Self::of(layout, |_, _| UNTOUCHED)
    }

    pub(crate) fn read(&self, at: Place, bytes: u64) -> &[u8] {
        &self.0[&at.region][at.offset as usize..(at.offset + bytes) as usize]
    }

    /// Writes bytes that must be untouched: a plan writes each byte once.
    pub(crate) fn write_once(&mut self, at: Place, bytes: &[u8]) {
        let region = self.0.get_mut(&at.region).unwrap();
        let target = &mut region[at.offset as usize..at.offset as usize + bytes.len()];
        assert!(target.iter().all(|&byte| byte == UNTOUCHED), "{at:?} is written twice");
        target.copy_from_slice(bytes);
    }
}

/// One side of a case: a layout, the request's blocks in it, and what part of the model it holds.
#[derive(Clone, Debug)]
pub(crate) struct OneSide {
    pub(crate) layout: KvLayout,
    pub(crate) shard: Shard,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) first_token: u32,
}

impl OneSide {
    pub(crate) fn view(&self) -> CacheView<'_> {
        CacheView { layout: &self.layout, shard: self.shard, blocks: &self.blocks, first_token: self.first_token }
    }
}

/// The places of a list of pages, byte by byte.
pub(crate) fn bytes_of(pages: &[Pages]) -> Vec<Place> {
    let mut out = Vec::new();
    for list in pages {
        for &base in &list.bases {
            for piece in &list.pieces {
                piece.for_each_run(base, |offset| {
                    let byte = |at| Place { region: piece.region, offset: offset + at };
                    out.extend((0..piece.run_bytes).map(byte));
                });
            }
        }
    }
    out
}

/// Calls `run(layer, plane, head, token, src, dst, bytes)` for every single run of a selection, found one by one.
pub(crate) fn each_run(
    src: &OneSide,
    dst: &OneSide,
    selection: &Selection,
    mut run: impl FnMut(u16, usize, u16, u32, Place, Place, u64),
) {
    for layer in selection.layers.clone() {
        for (plane, &bytes) in src.layout.shape().run_bytes.iter().enumerate() {
            for head in selection.heads.clone() {
                for token in selection.tokens.clone() {
                    let [from, to] = [src, dst].map(|side| {
                        let size = side.layout.shape().tokens_per_block;
                        let at = token - side.first_token;
                        let block = side.blocks[(at / size) as usize];
                        let layer = layer - side.shard.first_layer.get();
                        side.layout.place(layer, block, plane, head - side.shard.first_head, at % size)
                    });
                    run(layer, plane, head, token, from, to, bytes.into());
                }
            }
        }
    }
}

/// The destination's memory after a naive copy.
pub(crate) fn naive_copy(src: &OneSide, dst: &OneSide, selection: &Selection, from: &Memory) -> Memory {
    let mut to = Memory::untouched(&dst.layout);
    each_run(src, dst, selection, |_, _, _, _, src, dst, bytes| to.write_once(dst, from.read(src, bytes)));
    to
}

/// The destination's memory after a plan was followed run by run.
pub(crate) fn planned_copy(plan: &CopyPlan, dst: &OneSide, from: &Memory) -> Memory {
    let mut to = Memory::untouched(&dst.layout);
    plan.for_each_run(|src, dst, bytes| to.write_once(dst, from.read(src, bytes)));
    to
}

/// How a layout's bytes are allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Allocation {
    /// One region, no gaps.
    Packed,
    /// One region, with a gap after what each axis covers.
    Padded(u64),
    /// A region for each layer.
    LayerRegions,
    /// A region for each layer, and V lies before K in it.
    LayerRegionsValuesFirst,
    /// All layers in one region, at uneven distances.
    UnevenLayers,
    /// V lies before K.
    ValuesFirst,
    /// K packed and V with gaps on some axes: not every stride of one is the other's.
    UnlikePlanes { gap: u64, axes: u8 },
}

/// A layout of any allocation.
pub(crate) fn layout(shape: KvShape, order: &str, allocation: Allocation) -> KvLayout {
    let order: LayoutOrder = order.parse().unwrap();
    let one_layer = KvShape { layers: 1, ..shape.clone() };
    let layer_bytes = one_layer.block_bytes() * u64::from(one_layer.blocks);
    let per_layer = |one: KvLayout, base: &dyn Fn(u64) -> LayerBase| {
        let bases = (0..u64::from(shape.layers)).map(base).collect();
        KvLayout::new(shape.clone(), one.planes().to_vec(), bases).unwrap()
    };
    let region_each = |layer: u64| LayerBase { region: RegionId::new(layer as u32), offset: layer * 3 };
    let values_first = |shape: KvShape| {
        let mut flipped = shape.clone();
        flipped.run_bytes.reverse();
        let packed = KvLayout::packed(flipped, order).unwrap();
        let planes = packed.planes().iter().rev().cloned().collect();
        KvLayout::new(shape, planes, packed.bases().to_vec()).unwrap()
    };
    let packed = |shape: KvShape| KvLayout::packed(shape, order).unwrap();
    match allocation {
        Allocation::Packed => packed(shape),
        Allocation::Padded(gap) => padded(shape, order, [gap; 2], u8::MAX),
        Allocation::UnlikePlanes { gap, axes } => padded(shape, order, [0, gap], axes),
        Allocation::LayerRegions => per_layer(packed(one_layer), &region_each),
        Allocation::LayerRegionsValuesFirst => per_layer(values_first(one_layer), &region_each),
        Allocation::UnevenLayers => per_layer(packed(one_layer), &|layer| LayerBase {
            region: RegionId::new(0),
            offset: layer * layer_bytes + layer * layer * 5,
        }),
        Allocation::ValuesFirst => values_first(shape),
    }
}

/// As [`KvLayout::packed`], with more bytes after what each axis steps over: inside P each plane has its own gap, outside P both
/// have the larger one. Bit i of `axes` says whether the i-th axis, counted from the innermost, has gaps.
fn padded(shape: KvShape, order: LayoutOrder, gaps: [u64; 2], axes: u8) -> KvLayout {
    use kvferry_protocol::layout::Axis;
    let mut gaps = gaps;
    let mut planes: Vec<PlaneStrides> = shape
        .run_bytes
        .iter()
        .map(|&run_bytes| PlaneStrides { offset: 7, layer: 0, block: 0, head: 0, token: 0, run_bytes })
        .collect();
    let mut step: Vec<u64> = shape.run_bytes.iter().map(|&bytes| u64::from(bytes)).collect();
    for (at, axis) in order.axes().into_iter().rev().enumerate() {
        let gap = |plane: usize| if axes >> at & 1 == 1 { gaps[plane] } else { 0 };
        for (index, (plane, step)) in planes.iter_mut().zip(&mut step).enumerate() {
            let (stride, count) = match axis {
                Axis::Layer => (&mut plane.layer, u64::from(shape.layers)),
                Axis::Block => (&mut plane.block, shape.blocks.into()),
                Axis::Head => (&mut plane.head, shape.heads.into()),
                Axis::Token => (&mut plane.token, shape.tokens_per_block.into()),
                Axis::Plane => continue,
            };
            *stride = *step + gap(index);
            *step = *stride * count;
        }
        if axis == Axis::Plane {
            if let [_, value] = planes.as_mut_slice() {
                value.offset += step[0] + gap(0);
            }
            let both = step.iter().sum::<u64>() + 2 * gap(0);
            step.fill(both);
            gaps = [gaps[0].max(gaps[1]); 2];
        }
    }
    KvLayout::new(shape, planes, vec![LayerBase { region: RegionId::new(0), offset: 11 }]).unwrap()
}

/// Any allocation that suits the number of planes.
pub(crate) fn any_allocation() -> impl Strategy<Value = Allocation> {
    prop_oneof![
        3 => Just(Allocation::Packed),
        1 => (1..9_u64).prop_map(Allocation::Padded),
        1 => Just(Allocation::LayerRegions),
        1 => Just(Allocation::LayerRegionsValuesFirst),
        1 => Just(Allocation::UnevenLayers),
        1 => Just(Allocation::ValuesFirst),
        2 => (1..9_u64, 1..32_u8).prop_map(|(gap, axes)| Allocation::UnlikePlanes { gap, axes }),
    ]
}

/// A random side that holds at least the given layers, heads and tokens.
pub(crate) fn any_side(
    order: String,
    allocation: Allocation,
    run_bytes: Vec<u32>,
    need: Selection,
) -> impl Strategy<Value = OneSide> {
    let token_sizes = prop::sample::select(vec![1_u32, 2, 8, 16, 24, 32, 64]);
    (token_sizes, 0..3_u16, 0..3_u16, 0..3_u16, 0..3_u16, any::<u64>(), 0..3_u32, any::<bool>()).prop_map(
        move |(size, below, above, heads_below, heads_above, seed, spare, in_order)| {
            let first_layer = need.layers.start.saturating_sub(below);
            let first_head = need.heads.start.saturating_sub(heads_below);
            // Where the blocks begin in the sequence: somewhere at or before the first token that is needed.
            let first_token = need.tokens.start - (seed % u64::from(need.tokens.start.min(2 * size) + 1)) as u32;
            let count = (need.tokens.end - first_token).div_ceil(size);
            let shape = KvShape {
                layers: need.layers.end + above - first_layer,
                blocks: count + spare,
                heads: need.heads.end + heads_above - first_head,
                tokens_per_block: size,
                run_bytes: run_bytes.clone(),
            };
            let mut ids: Vec<u32> = (0..shape.blocks).collect();
            if !in_order {
                let mut state = seed;
                for at in (1..ids.len()).rev() {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ids.swap(at, (state >> 33) as usize % (at + 1));
                }
            }
            let blocks = ids.into_iter().take(count as usize).map(BlockId::new).collect();
            let shard = Shard { first_layer: LayerId::new(first_layer), first_head };
            OneSide { layout: layout(shape, &order, allocation), shard, blocks, first_token }
        },
    )
}

/// A small selection: layers, heads and tokens that need not begin at 0.
pub(crate) fn any_selection() -> impl Strategy<Value = Selection> {
    (0..3_u16, 1..4_u16, 0..3_u16, 1..4_u16, 0..70_u32, 1..90_u32).prop_map(
        |(layer, layers, head, heads, token, tokens)| Selection {
            layers: layer..layer + layers,
            heads: head..head + heads,
            tokens: token..token + tokens,
        },
    )
}
