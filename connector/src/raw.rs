//! The only place of this crate that vouches for raw memory: the pages of a cache that the worker's threads keep alive.
#![allow(unsafe_code, reason = "a cache's pages are handed to a transport and to the copy kernels by address")]

use kvferry_kernels::HostKvCache;
use kvferry_kernels::copy::RegionTable;
use kvferry_protocol::RegionId;
use kvferry_transport::{Memory, MemoryKind, Transport};

use crate::error::ConnectorError;

/// Registers all regions of a cache, in their order.
///
/// The driver's thread holds a clone of the cache until the transport was shut down, and what the transport reads or writes is
/// guarded: a grant's pages by write guards until it was revoked, a post's by read guards until it ended.
pub(crate) fn register(transport: &dyn Transport, cache: &HostKvCache) -> Result<(), ConnectorError> {
    for (index, region) in cache.regions().iter().enumerate() {
        let memory = Memory { address: region.as_ptr(), bytes: region.len(), kind: MemoryKind::Host };
        // SAFETY: the driver keeps the region mapped until `shutdown` returned, and page guards keep others off its pages while
        // a grant or a post uses them.
        let registered = unsafe { transport.register(memory) };
        let what = || format!("region {index} of the KV cache, {} bytes, was not registered", region.len());
        let id = registered.map_err(|source| ConnectorError::Transport { what: what(), source })?;
        if id != RegionId::new(index as u32) {
            let problem = format!("the transport has regions already: ours got number {id}; give each worker its own");
            return Err(ConnectorError::Caches { problem });
        }
    }
    Ok(())
}

/// Where a cache's regions lie. The caller holds the guards of the pages that it copies or digests, and a clone of the cache.
pub(crate) fn regions(cache: &HostKvCache) -> RegionTable {
    let regions = cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
    // SAFETY: the caller's clone of the cache keeps the regions mapped for as long as it uses the table, and its guards keep
    // others from writing the pages meanwhile.
    unsafe { RegionTable::new(regions) }
}
