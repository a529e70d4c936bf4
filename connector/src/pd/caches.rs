//! A worker's KV cache as the connector sees it: layout, place in the model, guards, and the two passes over its bytes.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_kernels::copy::{self, RegionTable};
use kvferry_kernels::device::DeviceKvCache;
use kvferry_kernels::{HostKvCache, PageGuards};
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{self, CacheView, CopyPlan, KvLayout, Selection, Shard};

use crate::raw::RawKvCache;

/// A worker's KV cache: kvferry's own, or the engine's memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum KvCache {
    /// Memory that kvferry allocated: every page is guarded, and a use that would race is a typed error.
    Host(HostKvCache),
    /// Memory that the engine allocated and vouches for.
    Raw(RawKvCache),
    /// Memory of a device, kvferry's own or the engine's. Bytes go through pinned host memory.
    Device(DeviceKvCache),
}

impl From<HostKvCache> for KvCache {
    fn from(cache: HostKvCache) -> Self {
        Self::Host(cache)
    }
}

impl From<RawKvCache> for KvCache {
    fn from(cache: RawKvCache) -> Self {
        Self::Raw(cache)
    }
}

impl From<DeviceKvCache> for KvCache {
    fn from(cache: DeviceKvCache) -> Self {
        Self::Device(cache)
    }
}

impl KvCache {
    /// Where each byte lies.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        match self {
            Self::Host(cache) => cache.layout(),
            Self::Raw(cache) => cache.layout(),
            Self::Device(cache) => cache.layout(),
        }
    }

    /// The cache, if it is on a device.
    pub(crate) const fn device(&self) -> Option<&DeviceKvCache> {
        match self {
            Self::Device(cache) => Some(cache),
            Self::Host(_) | Self::Raw(_) => None,
        }
    }

    /// The file behind each region of host memory, where other processes may map it.
    pub(crate) fn files(&self) -> Vec<Option<Arc<OwnedFd>>> {
        match self {
            Self::Host(cache) => cache.regions().iter().map(|region| region.file().cloned()).collect(),
            Self::Raw(cache) => cache.regions().iter().map(|_| None).collect(),
            Self::Device(_) => Vec::new(),
        }
    }

    /// Start and length in bytes of each region of host memory, in their order.
    pub(crate) fn regions(&self) -> Vec<(NonNull<u8>, usize)> {
        match self {
            Self::Host(cache) => cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect(),
            Self::Raw(cache) => cache.regions().to_vec(),
            Self::Device(_) => Vec::new(),
        }
    }
}

/// A registered cache and its place in the model; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Caches {
    cache: KvCache,
    shard: Shard,
}

impl Caches {
    pub(crate) const fn new(cache: KvCache, shard: Shard) -> Self {
        Self { cache, shard }
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        self.cache.layout()
    }

    /// The cache, if it is on a device: its bytes are reached through a lane, and by none of the passes below.
    pub(crate) const fn device(&self) -> Option<&DeviceKvCache> {
        self.cache.device()
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

    /// Bytes of one token in one layer, of some heads.
    pub(crate) fn bytes_per_cell(&self, heads: &Range<u16>) -> u64 {
        let shape = self.layout().shape();
        heads.len() as u64 * shape.run_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>()
    }

    /// Takes the pages of the blocks in some of the model's layers for reading. The engine's own memory, and a device's, have no guards.
    pub(crate) fn guard_read(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<Option<PageGuards>, String> {
        let layers = self.local(layers);
        self.guard(blocks, |cache| cache.guard_read(blocks, layers).map_err(|error| error.to_string()))
    }

    /// Takes the pages of the blocks in some of the model's layers for writing, alone.
    pub(crate) fn guard_write(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<Option<PageGuards>, String> {
        let layers = self.local(layers);
        self.guard(blocks, |cache| cache.guard_write(blocks, layers).map_err(|error| error.to_string()))
    }

    fn guard(
        &self,
        blocks: &[BlockId],
        take: impl FnOnce(&HostKvCache) -> Result<PageGuards, String>,
    ) -> Result<Option<PageGuards>, String> {
        match &self.cache {
            KvCache::Host(cache) => take(cache).map(Some),
            KvCache::Raw(_) | KvCache::Device(_) => {
                let pool = self.layout().shape().blocks;
                match blocks.iter().find(|block| block.get() >= pool) {
                    Some(block) => Err(format!("block {block} is outside the cache's {pool} blocks")),
                    None => Ok(None),
                }
            }
        }
    }

    /// Packs a plan's source bytes into `out`, in the order of its extents, and digests them.
    ///
    /// The caller holds the source pages: by guards, or by the engine's word.
    pub(crate) fn gather(&self, plan: &CopyPlan, out: &mut [u8]) -> Result<Digest, String> {
        copy::pack_with_digest(plan, &self.table(), out).map_err(|error| error.to_string())
    }

    /// Digests the selected bytes of a request's blocks where they lie; `first_token` is that of `blocks[0]`.
    ///
    /// The caller holds the pages: by guards, or by the engine's word.
    pub(crate) fn digest(&self, blocks: &[BlockId], first_token: u32, selection: &Selection) -> Result<Digest, String> {
        let view = CacheView { layout: self.layout(), shard: self.shard, blocks, first_token };
        copy::digest(&view, selection, &self.table()).map_err(|error| error.to_string())
    }

    /// A pass over the selected bytes of one block, for [`Caches::digest_of`].
    pub(crate) fn plan_in_place(&self, block: BlockId, first: u32, selection: &Selection) -> Result<CopyPlan, String> {
        let view = CacheView { layout: self.layout(), shard: self.shard, blocks: &[block], first_token: first };
        layout::plan_in_place(&view, selection).map_err(|error| error.to_string())
    }

    /// Digests a plan's source bytes where they lie.
    ///
    /// The caller holds the pages: by guards, or by the engine's word.
    pub(crate) fn digest_of(&self, plan: &CopyPlan) -> Result<Digest, String> {
        copy::digest_side(plan, layout::Side::Source, &self.table()).map_err(|error| error.to_string())
    }

    /// Whether other processes may map its memory.
    pub(crate) fn is_mappable(&self) -> bool {
        self.cache.files().iter().all(Option::is_some)
    }

    /// Whether attention can be told to read a page from elsewhere.
    pub(crate) const fn can_alias(&self) -> bool {
        matches!(self.cache, KvCache::Host(_))
    }

    /// How many regions it has.
    pub(crate) fn regions(&self) -> u32 {
        self.cache.regions().len() as u32
    }

    /// Follows a plan from this cache to another and digests what arrived.
    ///
    /// The caller holds the pages of both: by guards, or by the engine's word.
    pub(crate) fn copy_to(&self, other: &Self, plan: &CopyPlan) -> Result<Digest, String> {
        copy::gather_with_digest(plan, &self.table(), &other.table()).map_err(|error| error.to_string())
    }

    /// Where the regions lie, for who holds the pages: by guards, or by the engine's word.
    pub(crate) fn table(&self) -> RegionTable {
        crate::raw::table(&self.cache)
    }

    fn local(&self, layers: Range<u16>) -> Range<u16> {
        let first = self.shard.first_layer.get();
        layers.start - first..layers.end - first
    }
}
