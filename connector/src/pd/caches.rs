//! A worker's KV cache as the connector sees it: layout, place in the model, guards, and the two passes over its bytes.

use std::ops::Range;

use kvferry_kernels::copy;
use kvferry_kernels::{HostKvCache, PageGuards};
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, CopyPlan, KvLayout, Selection, Shard};

/// A registered cache; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Caches {
    cache: HostKvCache,
    shard: Shard,
}

impl Caches {
    pub(crate) fn new(cache: HostKvCache, shard: Shard) -> Self {
        Self { cache, shard }
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        self.cache.layout()
    }

    pub(crate) const fn shard(&self) -> Shard {
        self.shard
    }

    pub(crate) fn tokens_per_block(&self) -> u32 {
        self.layout().shape().tokens_per_block
    }

    /// This worker's layers in the model's numbers.
    pub(crate) fn layers(&self) -> Range<u16> {
        let first = self.shard.first_layer.get();
        first..first + self.layout().shape().layers
    }

    /// This worker's KV heads in the model's numbers.
    pub(crate) fn heads(&self) -> Range<u16> {
        let first = self.shard.first_head;
        first..first + self.layout().shape().heads
    }

    /// Bytes of one token in one layer.
    pub(crate) fn bytes_per_cell(&self) -> u64 {
        let shape = self.layout().shape();
        u64::from(shape.heads) * shape.run_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>()
    }

    /// Takes the pages of the blocks in some of the model's layers for reading.
    pub(crate) fn guard_read(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<PageGuards, String> {
        self.cache.guard_read(blocks, self.local(layers)).map_err(|error| error.to_string())
    }

    /// Takes the pages of the blocks in some of the model's layers for writing, alone.
    pub(crate) fn guard_write(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<PageGuards, String> {
        self.cache.guard_write(blocks, self.local(layers)).map_err(|error| error.to_string())
    }

    /// Packs a plan's source bytes into `out`, in the order of its extents, and digests them.
    ///
    /// The caller holds the source pages' guards.
    pub(crate) fn gather(&self, plan: &CopyPlan, out: &mut [u8]) -> Result<Digest, String> {
        copy::pack_with_digest(plan, &crate::raw::regions(&self.cache), out).map_err(|error| error.to_string())
    }

    /// Digests the selected bytes of a request's blocks where they lie; `first_token` is that of `blocks[0]`.
    ///
    /// The caller holds the pages' guards.
    pub(crate) fn digest(&self, blocks: &[BlockId], first_token: u32, selection: &Selection) -> Result<Digest, String> {
        let view = CacheView { layout: self.layout(), shard: self.shard, blocks, first_token };
        copy::digest(&view, selection, &crate::raw::regions(&self.cache)).map_err(|error| error.to_string())
    }

    fn local(&self, layers: Range<u16>) -> Range<u16> {
        let first = self.shard.first_layer.get();
        layers.start - first..layers.end - first
    }
}
