//! Raw memory: where registered bytes are read and written.
//!
//! Nothing here makes a reference to registered memory: others write it at the same time. A [`RawRun`] is made only out of a
//! [`Region`], whose memory stays mapped until its transport is dropped (the promise of `Transport::register`), out of a slab
//! that its post keeps alive, or out of a buffer that outlives the call. Whoever uses a run of a grant or of a source holds the
//! grant's or the source's guard, so that nobody reuses the bytes meanwhile.
#![expect(unsafe_code, reason = "copies between raw addresses")]

use std::ptr::NonNull;

use crate::api::{Memory, MemoryKind};

/// A contiguous piece of memory, laid out as `struct iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct RawRun(libc::iovec);

// SAFETY: an address and a length; every use is guarded as the module says.
unsafe impl Send for RawRun {}
// SAFETY: as above.
unsafe impl Sync for RawRun {}

impl RawRun {
    /// A buffer that is only read.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
    }

    /// A buffer that is written.
    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() })
    }

    pub(crate) fn bytes(self) -> usize {
        self.0.iov_len
    }

    /// The first byte's address.
    pub(crate) fn start(self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// The run without its first `skip` bytes.
    pub(crate) fn skip(self, skip: usize) -> Self {
        let skip = skip.min(self.bytes());
        Self(libc::iovec { iov_base: self.start().wrapping_add(skip).cast(), iov_len: self.bytes() - skip })
    }

    /// The first `keep` bytes of the run.
    pub(crate) fn keep(self, keep: usize) -> Self {
        Self(libc::iovec { iov_len: keep.min(self.bytes()), ..self.0 })
    }

    /// Whether `next` begins where this run ends; then this run grows over it.
    pub(crate) fn join(&mut self, next: Self) -> bool {
        let adjacent = self.start().wrapping_add(self.bytes()) == next.start();
        if adjacent {
            self.0.iov_len += next.bytes();
        }
        adjacent
    }
}

/// Registered memory of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    address: NonNull<u8>,
    bytes: u64,
}

// SAFETY: an address and a length; every use is guarded as the module says.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Takes over what the caller of `Transport::register` promised. `None` if it is memory of a device: nothing here may touch that.
    pub(crate) fn of(memory: &Memory) -> Option<Self> {
        match memory.kind {
            MemoryKind::Host => Some(Self { address: memory.address, bytes: memory.bytes as u64 }),
            MemoryKind::Device(_) => None,
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// Its address as a number.
    pub(crate) fn start(self) -> usize {
        self.address.as_ptr().addr()
    }

    /// Bytes `offset..offset + bytes`, if they are inside.
    pub(crate) fn run(self, offset: u64, bytes: u64) -> Option<RawRun> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        // Both fit `usize`: they are at most the region's length, which was one.
        inside.then(|| {
            let start = self.address.as_ptr().wrapping_add(offset as usize);
            RawRun(libc::iovec { iov_base: start.cast(), iov_len: bytes as usize })
        })
    }
}

/// Copies as many bytes as both runs have.
pub(crate) fn copy(from: RawRun, to: RawRun) {
    let bytes = from.bytes().min(to.bytes());
    // SAFETY: both runs are mapped and guarded, as the module says; `copy` allows that they overlap.
    unsafe { std::ptr::copy(from.start(), to.start(), bytes) }
}

/// The bytes of all runs, one after the other.
pub(crate) fn gather(runs: &[RawRun]) -> Vec<u8> {
    let mut gathered = Vec::with_capacity(runs.iter().map(|run| run.bytes()).sum());
    for run in runs {
        let at = gathered.len();
        let room =
            RawRun(libc::iovec { iov_base: gathered.spare_capacity_mut().as_mut_ptr().cast(), iov_len: run.bytes() });
        copy(*run, room);
        // SAFETY: the capacity holds all runs, and these bytes were just written.
        unsafe { gathered.set_len(at + run.bytes()) }
    }
    gathered
}

/// Flips the bits of `mask` in byte `at` of a run; nothing if there is no such byte.
pub(crate) fn flip(run: RawRun, at: usize, mask: u8) {
    if at < run.bytes() {
        let byte = run.start().wrapping_add(at);
        // SAFETY: inside the run, which is mapped and guarded, as the module says.
        let old = unsafe { byte.read_volatile() };
        // SAFETY: as above.
        unsafe { byte.write_volatile(old ^ mask) }
    }
}

/// Walks `runs` from byte `done` on: drops what lies before it. Returns how many runs are over.
pub(crate) fn advance(runs: &mut [RawRun], mut done: usize) -> usize {
    for (at, run) in runs.iter_mut().enumerate() {
        if done < run.bytes() {
            *run = run.skip(done);
            return at;
        }
        done -= run.bytes();
    }
    runs.len()
}
