//! The only place of this crate that vouches for raw memory: pages that are handed to a transport and to the copy kernels.
#![allow(unsafe_code, reason = "a cache's pages are handed to a transport and to the copy kernels by address")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_kernels::copy::RegionTable;
use kvferry_kernels::{KvCacheView, KvDtype};
use kvferry_protocol::RegionId;
use kvferry_protocol::layout::KvLayout;
use kvferry_transport::{Memory, MemoryFile, MemoryKind, Transport};

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

/// Where a cache's regions lie. The caller holds the pages that it copies or digests, and a clone of the cache.
pub(crate) fn table(cache: &KvCache) -> RegionTable {
    // SAFETY: the caller's clone keeps kvferry's own regions mapped while it uses the table, and its guards keep others from
    // writing the pages meanwhile; for its own memory the engine promised both.
    unsafe { RegionTable::new(cache.regions()) }
}
