//! Byte strides of a KV cache.

use serde::{Deserialize, Serialize};

use super::order::{Axis, LayoutOrder};
use super::overlap;
use crate::ids::{BlockId, RegionId};

/// The sizes of one worker's KV cache: what it holds of the model, not of the sequence.
///
/// K and V may differ in run length (`run_bytes`); MLA has one plane and one head.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers that this worker holds.
    pub layers: u16,
    /// Blocks in the pool.
    pub blocks: u32,
    /// KV heads that this worker holds.
    pub heads: u16,
    /// Tokens in one block.
    pub tokens_per_block: u32,
    /// Bytes of one token of one head, a plane each: `[K, V]`, or one entry for MLA.
    pub run_bytes: Vec<u32>,
}

impl KvShape {
    /// Bytes of one block over all layers, heads and planes, without padding.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        let runs = u64::from(self.layers) * u64::from(self.heads) * u64::from(self.tokens_per_block);
        runs * self.run_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>()
    }
}

/// One plane's byte strides. The run of (layer, block, head, token) begins at
/// `base(layer) + offset + block * block + head * head + token * token`, where `base(layer)` is `layer * layer` in region 0 of
/// the layout, or the layer's own [`LayerBase`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PlaneStrides {
    /// Where the plane's first run begins.
    pub offset: u64,
    /// From one layer to the next; 0 where layers have a base each.
    pub layer: u64,
    /// From one block to the next.
    pub block: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one token to the next.
    pub token: u64,
    /// Bytes of one run.
    pub run_bytes: u32,
}

/// Where a layer that was allocated by itself begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerBase {
    /// The registered region.
    pub region: RegionId,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// A byte address: a region and an offset into it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Place {
    /// The registered region.
    pub region: RegionId,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// Where each byte of a KV cache lies: a shape, strides a plane, and where layers begin.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "RawLayout")]
pub struct KvLayout {
    shape: KvShape,
    planes: Vec<PlaneStrides>,
    /// One entry if layers follow each other by `PlaneStrides::layer`; else one for each layer.
    bases: Vec<LayerBase>,
}

/// A layout as it was read: not checked yet.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLayout {
    shape: KvShape,
    planes: Vec<PlaneStrides>,
    bases: Vec<LayerBase>,
}

impl TryFrom<RawLayout> for KvLayout {
    type Error = LayoutError;

    fn try_from(raw: RawLayout) -> Result<Self, Self::Error> {
        Self::new(raw.shape, raw.planes, raw.bases)
    }
}

/// Why strides do not make a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A size of the shape is zero.
    #[error("layout: {axis} is 0; every size must be at least 1")]
    Empty {
        /// The size's name.
        axis: &'static str,
    },
    /// There must be one or two planes.
    #[error("layout: {found} planes; a KV cache has K and V, or one plane for MLA")]
    Planes {
        /// How many were given.
        found: usize,
    },
    /// The shape's run lengths and the planes' differ.
    #[error("layout: plane {plane} has runs of {found} bytes, but the shape says {expected}")]
    RunBytes {
        /// The plane's index.
        plane: usize,
        /// What the plane says.
        found: u32,
        /// What the shape says.
        expected: u32,
    },
    /// Neither one base nor one a layer.
    #[error("layout: {found} layer bases for {layers} layers; give one, or one a layer")]
    Bases {
        /// How many were given.
        found: usize,
        /// How many layers there are.
        layers: u16,
    },
    /// Two runs share bytes.
    #[error("layout: runs overlap: {a} and {b} share bytes; check the strides of plane {plane}")]
    Overlap {
        /// One axis.
        a: &'static str,
        /// The other axis.
        b: &'static str,
        /// The plane's index.
        plane: usize,
    },
    /// An address does not fit 62 bits.
    #[error("layout: strides times sizes exceed 2^62 bytes")]
    TooLarge,
}

impl KvLayout {
    /// Packs a shape in one region (number 0, from its first byte) without padding, in the given order of axes.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is zero, there are not one or two planes, or the bytes do not fit 62 bits.
    pub fn packed(shape: KvShape, order: LayoutOrder) -> Result<Self, LayoutError> {
        let bases = vec![LayerBase { region: RegionId::new(0), offset: 0 }];
        check_shape(&shape)?;
        let mut planes: Vec<PlaneStrides> = shape
            .run_bytes
            .iter()
            .map(|&run_bytes| PlaneStrides { offset: 0, layer: 0, block: 0, head: 0, token: 0, run_bytes })
            .collect();
        // Walk outwards from C. Inside P each plane steps over its own runs; outside it, over both planes' together.
        let mut step: Vec<u64> = shape.run_bytes.iter().map(|&bytes| u64::from(bytes)).collect();
        for axis in order.axes().into_iter().rev() {
            if axis == Axis::Plane {
                let inner: Vec<u64> = step.clone();
                let mut offset = 0;
                for (plane, size) in planes.iter_mut().zip(&inner) {
                    plane.offset = offset;
                    offset += size;
                }
                step.fill(inner.iter().sum());
                continue;
            }
            let count = shape.count(axis);
            for (plane, step) in planes.iter_mut().zip(&mut step) {
                *plane.stride_mut(axis) = *step;
                *step = step.checked_mul(count).filter(|&bytes| bytes < 1 << 62).ok_or(LayoutError::TooLarge)?;
            }
        }
        Ok(Self { shape, planes, bases })
    }

    /// Takes strides and bases as an engine gives them; pages may be padded.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is zero, planes or bases do not match the shape, runs overlap, or an address exceeds 62 bits.
    /// Runs count as overlapping unless the axes nest: sorted by stride, each steps over all that those inside it cover.
    pub fn new(shape: KvShape, planes: Vec<PlaneStrides>, bases: Vec<LayerBase>) -> Result<Self, LayoutError> {
        check_shape(&shape)?;
        if planes.len() != shape.run_bytes.len() {
            return Err(LayoutError::Planes { found: planes.len() });
        }
        for (index, plane) in planes.iter().enumerate() {
            let expected = shape.run_bytes[index];
            if plane.run_bytes != expected {
                return Err(LayoutError::RunBytes { plane: index, found: plane.run_bytes, expected });
            }
        }
        if bases.len() != 1 && bases.len() != usize::from(shape.layers) {
            return Err(LayoutError::Bases { found: bases.len(), layers: shape.layers });
        }
        overlap::check(&shape, &planes, &bases)?;
        Ok(Self { shape, planes, bases })
    }

    /// The sizes.
    #[must_use]
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The strides, a plane each.
    #[must_use]
    pub fn planes(&self) -> &[PlaneStrides] {
        &self.planes
    }

    /// Where layers begin: one entry, or one a layer.
    #[must_use]
    pub fn bases(&self) -> &[LayerBase] {
        &self.bases
    }

    /// The order of the axes in memory, outermost first, read off the strides; layers with a base each that do not follow each
    /// other evenly count as outermost.
    #[must_use]
    pub fn order(&self) -> LayoutOrder {
        let first = self.planes.iter().min_by_key(|plane| plane.offset).expect("checked: one or two planes");
        let last = self.planes.iter().map(|plane| plane.offset).max().unwrap_or(first.offset);
        let mut axes = [
            (self.layer_stride().unwrap_or(u64::MAX), Axis::Layer),
            (first.block, Axis::Block),
            (if self.planes.len() == 2 { last - first.offset } else { 0 }, Axis::Plane),
            (first.head, Axis::Head),
            (first.token, Axis::Token),
        ];
        axes.sort_by_key(|&(stride, _)| std::cmp::Reverse(stride));
        LayoutOrder::from_axes(axes.map(|(_, axis)| axis))
    }

    /// From one layer to the next, if layers follow each other evenly in one region.
    fn layer_stride(&self) -> Option<u64> {
        let [first, second, ..] = self.bases.as_slice() else {
            return Some(self.planes.iter().map(|plane| plane.layer).min().unwrap_or(0));
        };
        let stride = second.offset.checked_sub(first.offset)?;
        let even = |pair: &[LayerBase]| {
            pair[0].region == pair[1].region && pair[1].offset.checked_sub(pair[0].offset) == Some(stride)
        };
        self.bases.windows(2).all(even).then_some(stride)
    }

    /// Where the run of (layer, block, plane, head, token) begins. `layer` and `head` count from 0 within this worker.
    ///
    /// # Panics
    /// If `layer` or `plane` is out of range; the other coordinates are not checked here.
    #[must_use]
    pub fn place(&self, layer: u16, block: BlockId, plane: usize, head: u16, token: u32) -> Place {
        let strides = &self.planes[plane];
        let (base, layer_offset) = match self.bases.as_slice() {
            [base] => (*base, u64::from(layer) * strides.layer),
            bases => (bases[usize::from(layer)], 0),
        };
        let offset = base.offset
            + layer_offset
            + strides.offset
            + u64::from(block.get()) * strides.block
            + u64::from(head) * strides.head
            + u64::from(token) * strides.token;
        Place { region: base.region, offset }
    }
}

impl KvShape {
    pub(super) fn count(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Layer => self.layers.into(),
            Axis::Block => self.blocks.into(),
            Axis::Plane => self.run_bytes.len() as u64,
            Axis::Head => self.heads.into(),
            Axis::Token => self.tokens_per_block.into(),
        }
    }
}

impl PlaneStrides {
    fn stride_mut(&mut self, axis: Axis) -> &mut u64 {
        match axis {
            Axis::Layer => &mut self.layer,
            Axis::Block => &mut self.block,
            Axis::Head => &mut self.head,
            Axis::Token => &mut self.token,
            Axis::Plane => unreachable!("a plane is an offset, not a stride"),
        }
    }
}

fn check_shape(shape: &KvShape) -> Result<(), LayoutError> {
    let sizes = [
        ("layers", u64::from(shape.layers)),
        ("blocks", shape.blocks.into()),
        ("heads", shape.heads.into()),
        ("tokens_per_block", shape.tokens_per_block.into()),
        ("run_bytes", shape.run_bytes.iter().copied().min().unwrap_or(1).into()),
    ];
    if let Some((axis, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
        return Err(LayoutError::Empty { axis });
    }
    if !(1..=2).contains(&shape.run_bytes.len()) {
        return Err(LayoutError::Planes { found: shape.run_bytes.len() });
    }
    Ok(())
}
