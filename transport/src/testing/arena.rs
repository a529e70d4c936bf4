//! Memory that a test registers and looks at while a transport writes it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::api::{Memory, MemoryKind};

/// Bytes behind atomics: a test may look at what a transport writes meanwhile.
#[derive(Clone, Debug)]
pub struct Arena(Arc<[AtomicU8]>);

impl Arena {
    /// `bytes` bytes, all `value`.
    #[must_use]
    pub fn new(bytes: usize, value: u8) -> Self {
        Self((0..bytes).map(|_| AtomicU8::new(value)).collect())
    }

    /// What to register.
    ///
    /// # Panics
    /// If the arena is empty.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let address = NonNull::new(self.0.as_ptr().cast::<u8>().cast_mut()).expect("an arena has an address");
        Memory { address, bytes: self.0.len(), kind: MemoryKind::Host }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A copy of `bytes` bytes from `offset` on.
    #[must_use]
    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        self.0[offset..offset + bytes].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Stores bytes from `offset` on.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in self.0[offset..offset + bytes.len()].iter().zip(bytes) {
            at.store(*byte, Ordering::Relaxed);
        }
    }

    /// Stores `value` in `bytes` bytes from `offset` on.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) {
        for at in &self.0[offset..offset + bytes] {
            at.store(value, Ordering::Relaxed);
        }
    }

    /// Whether `bytes` bytes from `offset` on are all `value`.
    #[must_use]
    pub fn is_all(&self, offset: usize, bytes: usize, value: u8) -> bool {
        self.0[offset..offset + bytes].iter().all(|at| at.load(Ordering::Relaxed) == value)
    }
}
