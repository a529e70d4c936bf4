//! The only place of this crate that vouches for raw memory: pages that are handed to a transport, to the copy kernels and to
//! devices, and slabs.
#![allow(unsafe_code, reason = "a cache's pages are handed to a transport and to the copy kernels by address")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_kernels::copy::RegionTable;
use kvferry_kernels::device::{DeviceError, DeviceKvCache, Event, Lane, StagedRun};
use kvferry_kernels::{AliasOwner, HostRegion, KernelError, KvCacheView, KvDtype, PageGuards};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CopyPlan, KvLayout};
use kvferry_protocol::{BlockId, RegionId};
use kvferry_transport::{Adopted, Memory, MemoryFile, MemoryKind, Transport};

use crate::error::ConnectorError;
use crate::pd::KvCache;

/// A KV cache in memory that the engine allocated; clones share nothing but the addresses.
#[derive(Clone, Debug)]
pub struct RawKvCache {
    layout: Arc<KvLayout>,
    regions: Arc<[(NonNull<u8>, usize)]>,
}

// SAFETY: whoever made it promised that its regions may be used from any thread.
unsafe impl Send for RawKvCache {}
// SAFETY: as above; it only reads its own addresses.
unsafe impl Sync for RawKvCache {}

impl RawKvCache {
    /// Describes an engine's memory: `regions[i]` is where region `i` of the layout begins, and its length in bytes.
    ///
    /// # Errors
    /// [`ConnectorError::Caches`] if the layout reaches past a region, or a run is no whole number of elements.
    ///
    /// # Safety
    /// - Each region stays mapped, readable and writable from any thread, until the worker that it is given to was shut down or
    ///   dropped.
    /// - From the load's [`allocated`](crate::contract::Scheduler::allocated) until the load has ended, nobody else reads or
    ///   writes the pages of its blocks, except pages of a layer that `wait_layer` returned for.
    /// - From `save_layer` or `wait_saved` until the request's blocks are released, nobody writes the saved tokens' pages.
    pub unsafe fn new(
        layout: KvLayout,
        dtype: KvDtype,
        regions: &[(NonNull<u8>, usize)],
    ) -> Result<Self, ConnectorError> {
        // SAFETY: the caller promises what a view asks for; this one is dropped here, it only checks the bounds.
        let checked = unsafe { KvCacheView::new(layout.clone(), dtype, regions) };
        checked.map_err(|error| ConnectorError::Caches { problem: error.to_string() })?;
        Ok(Self { layout: Arc::new(layout), regions: regions.into() })
    }

    /// Where each byte lies.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub(crate) fn regions(&self) -> &[(NonNull<u8>, usize)] {
        &self.regions
    }

    /// A cache in one region of kvferry's own, for who keeps that mapped; `None` if the layout reaches past it.
    pub(crate) fn over(layout: KvLayout, region: &HostRegion) -> Option<Self> {
        let shape = layout.shape();
        let (last_layer, last_block) = (shape.layers - 1, BlockId::new(shape.blocks - 1));
        let fits = layout.planes().iter().enumerate().all(|(plane, strides)| {
            let last = layout.place(last_layer, last_block, plane, shape.heads - 1, shape.tokens_per_block - 1);
            last.region == RegionId::new(0) && last.offset + u64::from(strides.run_bytes) <= region.len() as u64
        });
        let regions = [(region.as_ptr(), region.len())];
        (fits && layout.bases().len() == 1).then(|| Self { layout: Arc::new(layout), regions: regions.into() })
    }
}

/// Registers all regions of a cache, in their order, as number `first` on; returns the next number.
///
/// The driver's thread holds a clone of the cache until the transport was shut down. What the transport reads or writes is
/// guarded (a grant's pages until it was revoked, a post's until it ended), or the engine vouched for it.
pub(crate) fn register(transport: &dyn Transport, cache: &KvCache, first: u32) -> Result<u32, ConnectorError> {
    let regions = cache.regions();
    let next = first + regions.len() as u32;
    for (index, ((address, bytes), file)) in (first..).zip(regions.into_iter().zip(cache.files())) {
        let file = file.map(|file| MemoryFile { file, offset: 0 });
        let memory = Memory { address, bytes, kind: MemoryKind::Host, file };
        // SAFETY: the region stays mapped until `shutdown` returned: the driver holds kvferry's own, and the engine promised it
        // for its own. Page guards, or the engine's promise, keep others off the pages while a grant or a post uses them.
        let registered = unsafe { transport.register(memory) };
        let what = || format!("region {index} of the KV cache, {bytes} bytes, was not registered");
        let id = registered.map_err(|source| ConnectorError::Transport { what: what(), source })?;
        if id != RegionId::new(index) {
            let problem = format!("the transport has regions already: ours got number {id}; give each worker its own");
            return Err(ConnectorError::Caches { problem });
        }
    }
    Ok(next)
}

/// Memory of kvferry's own for what is packed, in parts that do not overlap.
///
/// Each part is one owner's: who has it `&mut` is alone with its bytes, as with a boxed slice. Other processes can read it, by
/// the region's file, but not write it.
#[derive(Debug)]
pub(crate) struct SlabMemory {
    region: Arc<HostRegion>,
    start: usize,
    bytes: usize,
}

impl SlabMemory {
    /// Memory that other processes can map; its pages come with [`prefault`](Self::prefault), or when they are touched.
    pub(crate) fn new(bytes: usize) -> Result<Self, KernelError> {
        Ok(Self { region: Arc::new(HostRegion::sparse(bytes)?), start: 0, bytes })
    }

    /// Its first bytes as a part of its own; `None` if there are not so many left.
    pub(crate) fn split_front(&mut self, bytes: usize) -> Option<Self> {
        let left = self.bytes.checked_sub(bytes)?;
        let front = Self { region: Arc::clone(&self.region), start: self.start, bytes };
        (self.start, self.bytes) = (self.start + bytes, left);
        Some(front)
    }

    /// Has the system give its pages now. A lack of memory shows when they are written.
    pub(crate) fn prefault(&self) {
        if let Err(error) = self.region.prefault(self.start..self.start + self.bytes) {
            tracing::debug!(%error, "pages of a slab come when they are touched");
        }
    }

    /// The whole region, and where this part begins in it.
    pub(crate) const fn place(&self) -> (&Arc<HostRegion>, usize) {
        (&self.region, self.start)
    }

    /// Gathers pages of a device's cache into its first `bytes`, by way of a lane; see [`Lane::gather`].
    ///
    /// The caller holds the pages: by the engine's word, from `after` on.
    pub(crate) fn gather(
        &mut self,
        lane: &mut Lane,
        plan: &CopyPlan,
        cache: &DeviceKvCache,
        after: Option<&dyn Event>,
        bytes: usize,
    ) -> Result<Digest, DeviceError> {
        if bytes > self.bytes {
            return Err(DeviceError::Room { what: "a write's bytes", needed: bytes as u64, bytes: self.bytes as u64 });
        }
        // SAFETY: so many bytes are this part's own, and it is borrowed alone; the pool that it is of has pinned the region. The
        // engine promised not to write the pages before the transfer lets go of them, which waits for this.
        unsafe { lane.gather(plan, cache, after, self.first(), bytes) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: inside the region, zeroed by the system. Parts do not overlap, so only this one's owner writes here, and has
        // `&mut` then.
        unsafe { std::slice::from_raw_parts(self.first().as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.first().as_ptr(), self.bytes) }
    }

    /// Registers all that is left of it, so that peers, or a device, may read what is packed there.
    ///
    /// The driver's thread holds it until the transport was shut down, as it does the cache.
    pub(crate) fn register(&self, transport: &dyn Transport) -> Result<RegionId, ConnectorError> {
        let file = self.region.file().map(|file| MemoryFile { file: Arc::clone(file), offset: self.start as u64 });
        let memory = Memory { address: self.first(), bytes: self.bytes, kind: MemoryKind::Host, file };
        // SAFETY: the region stays mapped until the transport was shut down. No grant names it; a post of a slab owns the slab until
        // it ended, so nobody writes there while the transport reads.
        let registered = unsafe { transport.register(memory) };
        let what = || format!("memory of {} bytes for slabs was not registered", self.bytes);
        registered.map_err(|source| ConnectorError::Transport { what: what(), source })
    }

    fn first(&self) -> NonNull<u8> {
        // SAFETY: `start` is inside the region, or at its end.
        unsafe { self.region.as_ptr().add(self.start) }
    }
}

/// Copies what landed in pinned memory to pages of a device's cache, by way of a lane; see [`Lane::scatter`].
///
/// The caller keeps the runs' memory pinned and unwritten until the event is passed: the frames of a load, sealed and verified. It
/// holds the pages from `after` until then: by the engine's word.
pub(crate) fn scatter(
    lane: &mut Lane,
    plan: &CopyPlan,
    cache: &DeviceKvCache,
    after: Option<&dyn Event>,
    runs: &[StagedRun],
) -> Result<Arc<dyn Event>, DeviceError> {
    // SAFETY: the caller's word, as above; who calls is of this crate.
    unsafe { lane.scatter(plan, cache, after, runs) }
}

/// Registers a region of kvferry's own in which peers' writes land.
///
/// The driver's thread holds it until the transport was shut down.
pub(crate) fn register_region(transport: &dyn Transport, region: &HostRegion) -> Result<RegionId, ConnectorError> {
    let (address, bytes) = (region.as_ptr(), region.len());
    let memory = Memory { address, bytes, kind: MemoryKind::Host, file: None };
    // SAFETY: the region stays mapped until the transport was shut down. A frame of it is in one grant at a time, and read only
    // where it is sealed.
    let registered = unsafe { transport.register(memory) };
    let what = || format!("{bytes} bytes of staging memory were not registered");
    registered.map_err(|source| ConnectorError::Transport { what: what(), source })
}

/// Where a cache's regions lie. The caller holds the pages that it copies or digests, and a clone of the cache.
pub(crate) fn table(cache: &KvCache) -> RegionTable {
    // SAFETY: the caller's clone keeps kvferry's own regions mapped while it uses the table, and its guards keep others from
    // writing the pages meanwhile; for its own memory the engine promised both.
    unsafe { RegionTable::new(cache.regions()) }
}

/// A page in a peer's memory that is mapped here: where each plane's first run lies.
#[derive(Clone, Debug)]
pub(crate) struct ForeignPage {
    /// The layer, counted within this worker.
    pub(crate) layer: u16,
    /// Which block of this worker's it stands for.
    pub(crate) block: BlockId,
    planes: Box<[NonNull<u8>]>,
}

// SAFETY: it only knows addresses; whoever follows one holds what keeps them mapped.
unsafe impl Send for ForeignPage {}

impl ForeignPage {
    pub(crate) fn new(layer: u16, block: BlockId, planes: Vec<NonNull<u8>>) -> Self {
        Self { layer, block, planes: planes.into() }
    }

    /// Has attention read the page where it lies, until it is settled; see [`PageGuards::alias`].
    ///
    /// Each address was found in what `owner` lends, with all runs of the page behind it, and what was read there was verified.
    pub(crate) fn alias(&self, guards: &mut PageGuards, owner: &AliasOwner) -> Result<(), KernelError> {
        // SAFETY: the runs were found inside pieces of what the owner, an `Adopted`, lends: mapped until it is dropped, and unchanged, or else it
        // says so, which is asked after every use.
        unsafe { guards.alias(self.layer, self.block, &self.planes, owner) }
    }
}

/// Where pages lie in a peer's memory, a region for each plane of each; `span` says how many bytes one has from its first run to the end of its
/// last.
///
/// The pages were found in what is lent, each run of them; only runs are read, while `lent` is borrowed by who digests.
pub(crate) fn foreign_table(lent: &Adopted, pages: &[ForeignPage], span: impl Fn(usize) -> u64) -> RegionTable {
    let _ = lent;
    let planes = pages.iter().flat_map(|page| page.planes.iter().enumerate());
    let regions =
        planes.map(|(plane, &address)| (address, usize::try_from(span(plane)).unwrap_or(usize::MAX))).collect();
    // SAFETY: each run lies in a piece of `lent`, which the caller keeps while it uses the table: mapped and readable from any thread. The
    // sender writes nothing there meanwhile, or gives up the post first, which the caller looks for afterwards.
    unsafe { RegionTable::new(regions) }
}

/// A table of one region, a buffer that the caller does not touch while it uses the table.
pub(crate) fn buffer_table(buffer: &mut [u8]) -> RegionTable {
    // SAFETY: the caller owns the buffer, keeps it, and leaves it alone meanwhile.
    unsafe { RegionTable::new(vec![(NonNull::from(&mut *buffer).cast(), buffer.len())]) }
}
