//! A fixed pool of packed slabs. Full means wait: [`SlabPool::take`] says no, and the driver asks again when one came back.

use std::fmt;
use std::sync::{Arc, Mutex};

use kvferry_transport::Slab;

/// Slabs of one size, made once and used again.
#[derive(Debug)]
pub(super) struct SlabPool {
    slab_bytes: usize,
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Box<[u8]>>,
    made: usize,
}

impl SlabPool {
    /// A pool of at most `limit` slabs of `slab_bytes`; each is allocated when it is first needed.
    pub(super) fn new(slab_bytes: usize, limit: usize) -> Arc<Self> {
        Arc::new(Self { slab_bytes, limit: limit.max(1), state: Mutex::default() })
    }

    /// A slab of `bytes`, or `None` while all are in use. A write larger than a slab (one block of all layers may be) gets memory
    /// of its own size in place of a slab, since it must be possible to send it at all.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Option<PooledSlab> {
        let mut state = self.state.lock().expect("no panic happens under this lock");
        let buffer = match state.free.pop() {
            Some(buffer) => buffer,
            None if state.made < self.limit => {
                state.made += 1;
                vec![0; self.slab_bytes].into_boxed_slice()
            }
            None => return None,
        };
        let buffer = if buffer.len() < bytes { vec![0; bytes].into_boxed_slice() } else { buffer };
        Some(PooledSlab { buffer, used: bytes, pool: Arc::clone(self) })
    }

    /// Whether one can be taken.
    pub(super) fn has_free(&self) -> bool {
        let state = self.state.lock().expect("no panic happens under this lock");
        !state.free.is_empty() || state.made < self.limit
    }

    /// Slabs that are out, the most that can be, and the bytes of each.
    pub(super) fn usage(&self) -> (usize, usize, usize) {
        let state = self.state.lock().expect("no panic happens under this lock");
        (state.made - state.free.len(), self.limit, self.slab_bytes)
    }
}

/// One slab on its way; goes back to its pool when the last holder lets go.
pub(super) struct PooledSlab {
    buffer: Box<[u8]>,
    used: usize,
    pool: Arc<SlabPool>,
}

impl PooledSlab {
    /// The bytes to fill.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.used]
    }
}

impl Slab for PooledSlab {
    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.used]
    }
}

impl fmt::Debug for PooledSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PooledSlab({} of {} bytes)", self.used, self.buffer.len())
    }
}

impl Drop for PooledSlab {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let Ok(mut state) = self.pool.state.lock() else { return };
        if buffer.len() == self.pool.slab_bytes {
            state.free.push(buffer);
        } else {
            state.made -= 1; // An oversized one is not kept: the pool's memory stays what was configured.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_says_no_until_a_slab_comes_back() {
        let pool = SlabPool::new(64, 2);
        let (a, b) = (pool.take(10).unwrap(), pool.take(64).unwrap());
        assert_eq!((a.bytes().len(), b.bytes().len(), pool.usage().0), (10, 64, 2));
        assert!(pool.take(1).is_none() && !pool.has_free());
        drop(a);
        assert!(pool.has_free());
        let big = pool.take(1000).unwrap();
        assert!(pool.take(1).is_none(), "an oversized slab counts too");
        drop((b, big));
        assert_eq!(pool.usage(), (0, 2, 64));
        assert!(pool.take(64).is_some());
    }
}
