//! The window of a grant: what a receiver tells a sender about it, and how it maps onto the receiver's memory.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::nest::{PlanPiece, settle_in_order};
use super::order::LayoutOrder;
use super::plan::plan;
use super::strides::{KvLayout, KvShape, LayoutError};
use super::view::{CacheView, PlanError, Selection, Shard, Side};
use crate::ids::{BlockId, LayerId};
use crate::pages::{Loop, Pages, Piece};

/// How the bytes of a grant's window are laid out: blocks one after the other, packed, each in the receiver's own order of axes,
/// so that inside a block the window's order is the order of the receiver's memory.
///
/// Crosses the wire, so it is checked when it is read: sizes, ranges, and that the window's bytes fit 62 bits.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "RawWindow")]
pub struct WindowShape {
    order: LayoutOrder,
    tokens_per_block: u32,
    blocks: u32,
    run_bytes: Vec<u32>,
    layers: Range<u16>,
    heads: Range<u16>,
    first_token: u32,
}

/// A window's shape before it is checked; the fields of [`WindowShape`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawWindow {
    /// The receiver's order of axes.
    pub order: LayoutOrder,
    /// Tokens in one of the receiver's blocks.
    pub tokens_per_block: u32,
    /// Blocks that are granted.
    pub blocks: u32,
    /// Bytes of one token of one head, a plane each.
    pub run_bytes: Vec<u32>,
    /// Model layers.
    pub layers: Range<u16>,
    /// KV heads of the model.
    pub heads: Range<u16>,
    /// The place in the sequence of the window's first token.
    pub first_token: u32,
}

/// Why a window cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// More blocks than a list of them may have.
    #[error("window: {blocks} blocks; at most {max} may be granted at once", max = WindowShape::MAX_BLOCKS)]
    Blocks {
        /// How many.
        blocks: u32,
    },
    /// The sequence would be longer than a token's place can count.
    #[error("window: tokens from {first_token} over {blocks} blocks of {tokens_per_block} do not fit 32 bits")]
    Tokens {
        /// Where the window begins.
        first_token: u32,
        /// How many blocks.
        blocks: u32,
        /// Tokens in each.
        tokens_per_block: u32,
    },
    /// The sizes make no layout.
    #[error("window: it has no layout")]
    Layout {
        /// Why not.
        #[source]
        source: LayoutError,
    },
    /// The receiver's layout does not hold what is granted.
    #[error("window: it does not map onto the receiver's memory")]
    Plan {
        /// Why not.
        #[source]
        source: PlanError,
    },
}

impl WindowShape {
    /// The most blocks of one window: 4 Mi, 64 Mi tokens at 16 a block.
    pub const MAX_BLOCKS: u32 = 1 << 22;

    /// The packed layout of the window's bytes: region 0, from its first byte, blocks outermost.
    ///
    /// # Panics
    /// Never: the sizes were checked.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.try_layout().expect("checked when the shape was made")
    }

    /// Which part of the model the window holds.
    #[must_use]
    pub const fn shard(&self) -> Shard {
        Shard { first_layer: LayerId::new(self.layers.start), first_head: self.heads.start }
    }

    /// The window's blocks: 0, 1, 2, ...
    #[must_use]
    pub fn block_ids(&self) -> Vec<BlockId> {
        (0..self.blocks).map(BlockId::new).collect()
    }

    /// One side of a plan: the window in `layout`, which is [`WindowShape::layout`], with all of [`WindowShape::block_ids`].
    #[must_use]
    pub const fn view<'a>(&self, layout: &'a KvLayout, blocks: &'a [BlockId]) -> CacheView<'a> {
        CacheView { layout, shard: self.shard(), blocks, first_token: self.first_token }
    }

    /// All that the window holds.
    #[must_use]
    pub fn selection(&self) -> Selection {
        let end = self.first_token + self.blocks * self.tokens_per_block;
        Selection { layers: self.layers.clone(), heads: self.heads.clone(), tokens: self.first_token..end }
    }

    /// The window's length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shape().block_bytes() * u64::from(self.blocks)
    }

    fn shape(&self) -> KvShape {
        KvShape {
            layers: self.layers.len() as u16,
            blocks: self.blocks,
            heads: self.heads.len() as u16,
            tokens_per_block: self.tokens_per_block,
            run_bytes: self.run_bytes.clone(),
        }
    }

    fn try_layout(&self) -> Result<KvLayout, LayoutError> {
        KvLayout::packed(self.shape(), self.order.block_outermost())
    }
}

impl TryFrom<RawWindow> for WindowShape {
    type Error = WindowError;

    fn try_from(raw: RawWindow) -> Result<Self, Self::Error> {
        let RawWindow { order, tokens_per_block, blocks, run_bytes, layers, heads, first_token } = raw;
        if blocks > Self::MAX_BLOCKS {
            return Err(WindowError::Blocks { blocks });
        }
        let tokens = blocks.checked_mul(tokens_per_block).and_then(|tokens| tokens.checked_add(first_token));
        if tokens.is_none() {
            return Err(WindowError::Tokens { first_token, blocks, tokens_per_block });
        }
        let window = Self { order, tokens_per_block, blocks, run_bytes, layers, heads, first_token };
        window.try_layout().map_err(|source| WindowError::Layout { source })?;
        Ok(window)
    }
}

/// Makes a window onto a receiver's blocks: what to tell the sender, and where the window's bytes lie in the receiver's memory.
///
/// `first_token` is the place in the sequence of the first token of `blocks[0]`; `layers` and `heads` are the model's.
///
/// # Errors
/// [`WindowError`] if the layout does not hold the layers and heads, a block is outside its pool or stands twice, or a limit
/// is exceeded.
pub fn window_pages(
    layout: &KvLayout,
    shard: Shard,
    blocks: &[BlockId],
    first_token: u32,
    layers: Range<u16>,
    heads: Range<u16>,
) -> Result<(WindowShape, Pages), WindowError> {
    let shape = layout.shape();
    let window = WindowShape::try_from(RawWindow {
        order: layout.order().block_outermost(),
        tokens_per_block: shape.tokens_per_block,
        blocks: u32::try_from(blocks.len()).unwrap_or(u32::MAX),
        run_bytes: shape.run_bytes.clone(),
        layers,
        heads,
        first_token,
    })?;
    let (window_layout, window_blocks) = (window.layout(), window.block_ids());
    let local = CacheView { layout, shard, blocks, first_token };
    // Bytes flow the other way, but the loops come in the order of the destination, and that must be the window. What the
    // destination of a real copy is checked for, the local side must be checked for here.
    let forth = window.view(&window_layout, &window_blocks);
    plan(&forth, &local, &window.selection()).map_err(|source| WindowError::Plan { source })?;
    let plan = plan(&local, &forth, &window.selection()).map_err(|source| WindowError::Plan { source })?;
    let mut pieces = plan.groups().first().map(|group| in_window_order(&group.pieces)).unwrap_or_default();
    let strides = |piece: &PlanPiece| piece.src.block_stride;
    let base = |block: &BlockId, piece: &PlanPiece| u64::from(block.get()) * piece.src.block_stride;
    if let Some(first) = pieces.first().cloned()
        && pieces.iter().any(|piece| strides(piece) != strides(&first))
    {
        // Planes of different run lengths outside the blocks: no number is what a block adds to both, so each block's pieces
        // are named one by one.
        let each = blocks.iter().flat_map(|block| {
            pieces.iter().map(move |piece| {
                let mut piece = piece.clone();
                piece.src.offset += base(block, &piece);
                piece
            })
        });
        return Ok((window, Pages { bases: vec![0], pieces: merge(each) }));
    }
    let bases = pieces.first().map(|piece| blocks.iter().map(|block| base(block, piece)).collect());
    Ok((window, Pages { bases: bases.unwrap_or_default(), pieces: merge(pieces.drain(..)) }))
}

/// Cuts pieces until each covers an unbroken stretch of the window, and puts them in the window's order.
fn in_window_order(pieces: &[PlanPiece]) -> Vec<PlanPiece> {
    let mut todo = pieces.to_vec();
    let mut out = Vec::new();
    while let Some(piece) = todo.pop() {
        if unbroken(&piece) {
            out.push(piece);
            continue;
        }
        let outer = piece.loops[0];
        for step in 0..u64::from(outer.count) {
            let mut part = piece.clone();
            part.loops.remove(0);
            part.src.offset += step * outer.src_stride;
            part.dst.offset += step * outer.dst_stride;
            todo.push(part);
        }
    }
    out.sort_by_key(|piece| piece.end(Side::Destination).offset);
    out
}

fn unbroken(piece: &PlanPiece) -> bool {
    let mut bytes = piece.run_bytes;
    piece.loops.iter().rev().all(|l| {
        let abut = l.dst_stride == bytes;
        bytes *= u64::from(l.count);
        abut
    })
}

/// The receiver's side of pieces in window order; neighbours that abut in its memory become one.
fn merge(pieces: impl Iterator<Item = PlanPiece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        let mut loops: Vec<Loop> = piece.loops.iter().map(|l| Loop { count: l.count, stride: l.src_stride }).collect();
        let mut run_bytes = piece.run_bytes;
        settle_in_order(&mut loops, &mut run_bytes);
        let next = Piece { region: piece.src.region, offset: piece.src.offset, loops, run_bytes };
        match out.last_mut() {
            Some(last)
                if last.loops.is_empty()
                    && next.loops.is_empty()
                    && last.region == next.region
                    && last.offset + last.run_bytes == next.offset =>
            {
                last.run_bytes += next.run_bytes;
            }
            _ => out.push(next),
        }
    }
    out
}
