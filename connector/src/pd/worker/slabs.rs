//! A fixed pool of packed slabs. Full means wait: [`SlabPool::take`] says no, and the driver asks again when one came back.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_transport::{Slab, Transport};

use crate::config::Limits;
use crate::error::ConnectorError;
use crate::raw::SlabMemory;

/// Slabs of one size in one region of memory, which peers of this host and devices can read: what is packed is lent or put from
/// there as pages are.
#[derive(Debug)]
pub(super) struct SlabPool {
    slab_bytes: usize,
    limit: usize,
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
    pub(super) fn of(limits: &Limits, transport: &dyn Transport) -> Result<Arc<Self>, ConnectorError> {
        let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let pool = Self::new(bytes(limits.chunk_bytes), bytes(limits.slab_pool_bytes / limits.chunk_bytes))?;
        pool.lock().fresh.register(transport)?;
        Ok(pool)
    }

    /// A pool of at most `limit` slabs of `slab_bytes`.
    fn new(slab_bytes: usize, limit: usize) -> Result<Arc<Self>, ConnectorError> {
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
        Ok(Arc::new(Self { slab_bytes: each, limit, state }))
    }

    /// A slab of `bytes`, or `None` while all are in use. A write larger than a slab (one block of all layers may be) gets memory
    /// of its own size in place of a slab, since it must be possible to send it at all.
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
        let pool = SlabPool::new(60, 2).unwrap();
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
