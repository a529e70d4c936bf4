//! A write out of a device's cache.

use kvferry_kernels::device::Lane;
use kvferry_protocol::BlockId;
use kvferry_protocol::LayerId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, CopyPlan, KvLayout, KvShape, Selection, Shard, WindowShape, plan};

use super::{After, in_full};
use crate::pd::caches::Caches;
use crate::pd::worker::jobs::WriteKey;
use crate::pd::worker::slabs::PooledSlab;

/// A write that a mover is to gather.
#[derive(Debug)]
pub(in crate::pd::worker) struct Shipment {
    pub(in crate::pd::worker) write: WriteKey,
    /// From the leased pages to the window.
    pub(in crate::pd::worker) plan: CopyPlan,
    pub(in crate::pd::worker) slab: PooledSlab,
    /// The request's blocks, from token 0.
    pub(in crate::pd::worker) blocks: Vec<BlockId>,
    pub(in crate::pd::worker) window: WindowShape,
    /// The pages are as they are to be sent once this is passed.
    pub(in crate::pd::worker) after: After,
}

/// The layout of a slab that holds a write's bytes, and the place in the sequence of its first token.
struct SlabLayout {
    layout: KvLayout,
    first_token: u32,
}

impl Shipment {
    /// Gathers the bytes into the slab and waits until they are there. Returns the plan from the slab to the window, and the digest.
    pub(in crate::pd::worker) fn gather(
        &mut self,
        lane: &mut Lane,
        caches: &Caches,
    ) -> Result<(CopyPlan, Digest), String> {
        let cache = caches.device().ok_or("the cache is not on a device")?;
        let selection = self.plan.selection().clone();
        let place = self.slab.place().ok_or("the slab is not pinned")?;
        let (slab, room) = self.slab.pinned().ok_or("the slab is not pinned")?;
        let packed = SlabLayout::of(&self.window, &selection, room.min(lane.slab_bytes()))?;
        let ids = packed.blocks();
        let shard = Shard { first_layer: LayerId::new(selection.layers.start), first_head: selection.heads.start };
        let source = CacheView { layout: caches.layout(), shard: caches.shard(), blocks: &self.blocks, first_token: 0 };
        let target = CacheView { layout: &packed.layout, shard, blocks: &ids, first_token: packed.first_token };
        let out = plan(&source, &target, &selection).map_err(|error| error.to_string())?;
        let bytes = packed.bytes();
        let digest = slab.gather(lane, &out, cache, self.after.as_deref(), bytes).map_err(|error| in_full(&error))?;
        // The same slab as the transport knows it.
        let (shape, planes) = (packed.layout.shape().clone(), packed.layout.planes().to_vec());
        let there = KvLayout::new(shape, planes, vec![place]).map_err(|error| error.to_string())?;
        let source = CacheView { layout: &there, shard, blocks: &ids, first_token: packed.first_token };
        let (window, window_blocks) = (self.window.layout(), self.window.block_ids());
        let target = self.window.view(&window, &window_blocks);
        Ok((plan(&source, &target, &selection).map_err(|error| error.to_string())?, digest))
    }
}

impl SlabLayout {
    /// As the window has them, so that a whole block of it is one run; or, where that does not fit, without the tokens of its blocks
    /// that are not sent.
    fn of(window: &WindowShape, selection: &Selection, room: usize) -> Result<Self, String> {
        let (target, first) = (window.layout(), window.selection().tokens.start);
        let per_block = target.shape().tokens_per_block;
        let (from, until) = (selection.tokens.start - first, selection.tokens.end - first);
        let (begin, end) = (from / per_block, until.div_ceil(per_block));
        let shape = |blocks, tokens_per_block| KvShape {
            layers: selection.layers.len() as u16,
            blocks,
            heads: selection.heads.len() as u16,
            tokens_per_block,
            run_bytes: target.shape().run_bytes.clone(),
        };
        let (blocks, tight) = (shape(end - begin, per_block), shape(1, selection.tokens.len() as u32));
        let fits = blocks.block_bytes() * u64::from(blocks.blocks) <= room as u64;
        let (shape, first_token) =
            if fits { (blocks, first + begin * per_block) } else { (tight, selection.tokens.start) };
        let layout = KvLayout::packed(shape, target.order()).map_err(|error| error.to_string())?;
        Ok(Self { layout, first_token })
    }

    fn blocks(&self) -> Vec<BlockId> {
        (0..self.layout.shape().blocks).map(BlockId::new).collect()
    }

    fn bytes(&self) -> usize {
        let shape = self.layout.shape();
        shape.block_bytes() as usize * shape.blocks as usize
    }
}
