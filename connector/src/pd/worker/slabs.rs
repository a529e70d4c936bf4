//! A fixed pool of packed slabs. Full means wait: [`SlabPool::take`] says no, and the driver asks again when one came back.
//!
//! A device copies into slabs: then the whole pool is pinned, and a slab is never smaller than a write.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_kernels::device::PinnedRegion;
use kvferry_protocol::RegionId;
use kvferry_protocol::layout::LayerBase;
use kvferry_transport::{Slab, Transport};

use super::device::refused_by_device;
use crate::config::Limits;
use crate::error::ConnectorError;
use crate::pd::caches::KvCache;
use crate::raw::SlabMemory;

/// Slabs of one size in one region of memory, which peers of this host and devices can read: what is packed is lent or put from
/// there as pages are.
#[derive(Debug)]
pub(super) struct SlabPool {
    slab_bytes: usize,
    limit: usize,
    /// What the transport calls the pool's memory.
    region: RegionId,
    /// For a device's copies.
    pinned: Option<PinnedRegion>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<SlabMemory>,
    /// What was never used, and has no pages yet.
    fresh: SlabMemory,
    out: usize,
}

impl SlabPool {
    /// The pool that a configuration asks for, in memory that its transport knows.
    /// With a device's cache its slabs are pinned.
    pub(super) fn of(limits: &Limits, cache: &KvCache, transport: &dyn Transport) -> Result<Arc<Self>, ConnectorError> {
        let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let each = match cache.device() {
            None => limits.chunk_bytes,
            // A write is a chunk, or one block of all layers where that is more.
            Some(cache) => limits.chunk_bytes.max(cache.layout().shape().block_bytes()),
        };
        let mut pool = Self::new(bytes(each), bytes(limits.slab_pool_bytes / each))?;
        let registered = pool.lock().fresh.register(transport)?;
        pool.region = registered;
        if let Some(cache) = cache.device() {
            let region = Arc::clone(pool.lock().fresh.place().0);
            let pinned = cache.device().pin(region).map_err(|error| refused_by_device(&error))?;
            pool.pinned = Some(pinned);
        }
        Ok(Arc::new(pool))
    }

    /// A pool of at most `limit` slabs of `slab_bytes`.
    fn new(slab_bytes: usize, limit: usize) -> Result<Self, ConnectorError> {
        let limit = limit.max(1);
        let refuse = |error: &dyn fmt::Display| ConnectorError::Caches {
            problem: format!(
                "there is no memory for {limit} slabs of {slab_bytes} bytes, {error}: lower slab_pool_bytes"
            ),
        };
        // Each begins at a cache line.
        let each = slab_bytes.checked_next_multiple_of(64);
        let each = each.filter(|each| each.checked_mul(limit).is_some()).ok_or_else(|| refuse(&"too many"))?;
        let fresh = SlabMemory::new(each * limit).map_err(|error| refuse(&error))?;
        let state = Mutex::new(State { free: Vec::new(), fresh, out: 0 });
        Ok(Self { slab_bytes: each, limit, region: RegionId::new(0), pinned: None, state })
    }

    /// A slab of `bytes`, or `None` while all are in use. A write larger than a slab (one block of all layers may be) gets memory
    /// of its own size in place of a slab, since it must be possible to send it at all; where slabs are pinned there is no such write.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Option<PooledSlab> {
        let mut state = self.lock();
        if state.out >= self.limit {
            return None;
        }
        let buffer = if bytes > self.slab_bytes {
            Buffer::Own(vec![0; bytes].into_boxed_slice())
        } else if let Some(used) = state.free.pop() {
            Buffer::Slab(used)
        } else {
            let fresh = state.fresh.split_front(self.slab_bytes)?;
            fresh.prefault();
            Buffer::Slab(fresh)
        };
        state.out += 1;
        Some(PooledSlab { buffer, used: bytes, pool: Arc::clone(self) })
    }

    /// Whether one can be taken.
    pub(super) fn has_free(&self) -> bool {
        self.lock().out < self.limit
    }

    /// Slabs that are out, the most that can be, and the bytes of each.
    pub(super) fn usage(&self) -> (usize, usize, usize) {
        (self.lock().out, self.limit, self.slab_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One slab on its way; goes back to its pool when the last holder lets go.
pub(super) struct PooledSlab {
    buffer: Buffer,
    used: usize,
    pool: Arc<SlabPool>,
}

enum Buffer {
    Slab(SlabMemory),
    /// Larger than a slab; not kept, so that the pool's memory stays what was configured.
    Own(Box<[u8]>),
}

impl PooledSlab {
    /// The slab's memory, and how much it holds, for a device's copy; `None` for what is not pinned.
    pub(super) fn pinned(&mut self) -> Option<(&mut SlabMemory, usize)> {
        match &mut self.buffer {
            Buffer::Slab(slab) if self.pool.pinned.is_some() => Some((slab, self.pool.slab_bytes)),
            Buffer::Slab(_) | Buffer::Own(_) => None,
        }
    }

    /// Where it begins, in the transport's words; `None` for memory that the transport does not know.
    pub(super) fn place(&self) -> Option<LayerBase> {
        match &self.buffer {
            Buffer::Slab(slab) => Some(LayerBase { region: self.pool.region, offset: slab.place().1 as u64 }),
            Buffer::Own(_) => None,
        }
    }

    /// The bytes to fill.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.buffer {
            Buffer::Slab(slab) => slab.bytes_mut(),
            Buffer::Own(bytes) => bytes,
        };
        &mut bytes[..self.used]
    }
}

impl Slab for PooledSlab {
    fn bytes(&self) -> &[u8] {
        let bytes = match &self.buffer {
            Buffer::Slab(slab) => slab.bytes(),
            Buffer::Own(bytes) => bytes,
        };
        &bytes[..self.used]
    }
}

impl fmt::Debug for PooledSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PooledSlab({} bytes)", self.used)
    }
}

impl Drop for PooledSlab {
    fn drop(&mut self) {
        let buffer = std::mem::replace(&mut self.buffer, Buffer::Own(Box::default()));
        let mut state = self.pool.lock();
        state.out -= 1;
        if let Buffer::Slab(slab) = buffer {
            state.free.push(slab);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_says_no_until_a_slab_comes_back() {
        let pool = Arc::new(SlabPool::new(60, 2).unwrap());
        let (mut a, b) = (pool.take(10).unwrap(), pool.take(64).unwrap());
        assert_eq!((a.bytes().len(), b.bytes().len(), pool.usage()), (10, 64, (2, 2, 64)));
        assert!(pool.take(1).is_none() && !pool.has_free());
        a.bytes_mut().fill(1);
        assert_eq!((a.bytes(), b.bytes()), (&[1; 10][..], &[0; 64][..]), "each has bytes of its own");
        drop(a);
        assert!(pool.has_free());
        let big = pool.take(1000).unwrap();
        assert!(pool.take(1).is_none(), "an oversized slab counts too");
        drop((b, big));
        assert_eq!(pool.usage(), (0, 2, 64));
        let again: Vec<_> = (0..2).map(|_| pool.take(64).unwrap()).collect();
        assert_eq!(again.len(), 2, "an oversized one took no slab");
    }

    #[test]
    fn a_pool_that_no_memory_holds_is_refused_with_the_key_to_change() {
        let error = SlabPool::new(usize::MAX, 2).unwrap_err().to_string();
        assert!(error.contains("slab_pool_bytes"), "{error}");
    }
}
