//! Memory that a test registers and looks at while a transport writes it.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::api::{Memory, MemoryFile, MemoryKind};
use crate::share::{Mapping, memory_file};

/// Bytes behind atomics: a test may look at what a transport writes meanwhile. Other processes may map them.
#[derive(Clone, Debug)]
pub struct Arena {
    mapping: Arc<Mapping>,
    file: Arc<OwnedFd>,
}

impl Arena {
    /// `bytes` bytes, all `value`.
    ///
    /// # Panics
    /// If the system has no memory, or `bytes` is 0.
    #[must_use]
    pub fn new(bytes: usize, value: u8) -> Self {
        let file = memory_file("kvferry-arena", bytes as u64).expect("the system makes memory files");
        let mapping = Mapping::new(file.as_fd(), 0, bytes as u64, true).expect("the system maps them");
        let arena = Self { mapping: Arc::new(mapping), file: Arc::new(file) };
        arena.fill(0, bytes, value);
        arena
    }

    fn bytes(&self) -> &[AtomicU8] {
        self.mapping.atomics()
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// What to register.
    ///
    /// # Panics
    /// Never: an arena is not empty.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let address = NonNull::new(self.bytes().as_ptr().cast::<u8>().cast_mut()).expect("an arena has an address");
        let file = Some(MemoryFile { file: Arc::clone(&self.file), offset: 0 });
        Memory { address, bytes: self.len(), kind: MemoryKind::Host, file }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// A copy of `bytes` bytes from `offset` on.
    #[must_use]
    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        self.bytes()[offset..offset + bytes].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Stores bytes from `offset` on.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in self.bytes()[offset..offset + bytes.len()].iter().zip(bytes) {
            at.store(*byte, Ordering::Relaxed);
        }
    }

    /// Stores `value` in `bytes` bytes from `offset` on.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) {
        for at in &self.bytes()[offset..offset + bytes] {
            at.store(value, Ordering::Relaxed);
        }
    }

    /// Whether `bytes` bytes from `offset` on are all `value`.
    #[must_use]
    pub fn is_all(&self, offset: usize, bytes: usize, value: u8) -> bool {
        self.bytes()[offset..offset + bytes].iter().all(|at| at.load(Ordering::Relaxed) == value)
    }
}
