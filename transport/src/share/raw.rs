//! Mappings of files that another process may have mapped, too, and reads of another process's memory.
//!
//! Nothing here makes a reference to such memory but to its atomic words: others write it at the same time.
#![expect(unsafe_code, reason = "maps memory, copies between raw addresses, reads another process")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
#[cfg(any(test, feature = "testing"))]
use rustix::mm::{MprotectFlags, mprotect};

use crate::raw::RawRun;

/// The most runs of one read of another process.
pub(super) const MAX_PROCESS_RUNS: usize = 64;

/// A part of a file, mapped until dropped. The file cannot become shorter.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, and nothing here refers to the thread that made it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` reads by raw copies and by atomics only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes from `offset` on. A file that is shorter, or that may become so, is refused: reading past its end would kill
    /// the process.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, bytes: u64, is_written: bool) -> io::Result<Self> {
        let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
        let seals =
            fcntl_get_seals(file).map_err(|_| invalid("the descriptor is no memory file that can be sealed"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid("the memory file is not sealed against shrinking"));
        }
        let size = u64::try_from(fstat(file)?.st_size).unwrap_or(0);
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= size) && bytes > 0;
        let length = usize::try_from(bytes).ok().filter(|length| *length <= isize::MAX as usize);
        let (true, Some(length)) = (fits, length) else {
            return Err(invalid("the memory file is shorter than what is said to be in it"));
        };
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, is_written);
        // SAFETY: a new mapping at an address that the system picks touches no existing memory.
        let start = unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| invalid("it was mapped at address 0"))?;
        Ok(Self { start, bytes: length })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it is mapped in this process.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// Copies bytes from `offset` on into `to`, as many as that has. `false` if they are not inside.
    pub(super) fn copy(&self, offset: u64, to: RawRun) -> bool {
        let inside =
            usize::try_from(offset).ok().filter(|at| at.checked_add(to.bytes()).is_some_and(|end| end <= self.bytes));
        let Some(at) = inside else { return false };
        // SAFETY: `at` is inside the mapping.
        let from = unsafe { self.start.add(at) };
        // SAFETY: the bytes are inside the mapping, which lives as long as `self` and cannot be cut; `to` is guarded memory of this
        // process (see `crate::raw`), which no file of a peer is. What the peer writes meanwhile is found out afterwards (the board).
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.start(), to.bytes()) };
        true
    }

    /// Where bytes `offset..offset + bytes` are. `None` if they are not inside.
    pub(super) fn place(&self, offset: u64, bytes: usize) -> Option<Place> {
        let at =
            usize::try_from(offset).ok().filter(|at| at.checked_add(bytes).is_some_and(|end| end <= self.bytes))?;
        // SAFETY: `at` is inside the mapping, or one past its end.
        let start = unsafe { self.start.add(at) };
        Some(Place(start))
    }

    /// All bytes, for a test that looks at what transports write meanwhile.
    #[cfg(feature = "testing")]
    pub(crate) fn atomics(&self) -> &[std::sync::atomic::AtomicU8] {
        // SAFETY: the mapping is as long as that and lives as long as `self`; atomics may be shared with whoever writes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes) }
    }

    /// Takes the processors' access away: whoever touches it from here on dies, and a device that has it registered does not.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn forbid(&self) -> io::Result<()> {
        // SAFETY: the whole mapping, which is this; nobody holds a reference into it (`atomics` is for who did not forbid it).
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, MprotectFlags::empty()) }.map_err(io::Error::from)
    }

    /// The first byte's address.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Word `index` of the mapping.
    pub(super) fn word(&self, index: usize) -> Option<&AtomicU64> {
        let fits = index.checked_add(1).and_then(|end| end.checked_mul(8)).is_some_and(|end| end <= self.bytes);
        fits.then(|| {
            // SAFETY: the word is inside the mapping.
            let word = unsafe { self.start.cast::<u64>().add(index) };
            // SAFETY: a mapping begins at a page, so the word is aligned; it lives as long as `self`, and all processes use atomics.
            unsafe { AtomicU64::from_ptr(word.as_ptr()) }
        })
    }
}

/// An address in a mapping, which whoever has it keeps mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place(NonNull<u8>);

// SAFETY: an address may be known to any thread; who reads there keeps the mapping (`Adopted`), and makes no reference.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    pub(super) fn address(self) -> NonNull<u8> {
        self.0
    }

    /// Whether `next` begins `bytes` behind this.
    pub(super) fn ends_at(self, bytes: usize, next: Self) -> bool {
        self.0.as_ptr().wrapping_add(bytes) == next.0.as_ptr()
    }

    /// Copies as many bytes as `to` has from `skip` bytes behind this on. Those are bytes of a piece that was found by
    /// [`Mapping::place`], which the caller holds.
    pub(super) fn copy(self, skip: usize, to: RawRun) {
        let from = self.0.as_ptr().wrapping_add(skip);
        // SAFETY: the caller says that the bytes are inside a mapping that it holds, which cannot be cut; `to` is memory of this process,
        // which no file of a peer is. What the peer writes meanwhile is found out afterwards (the board).
        unsafe { std::ptr::copy_nonoverlapping(from, to.start(), to.bytes()) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and unmapped only here. A failure would leak, which is harmless.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Bytes of another process.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemoteRun {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// Copies from a process's memory into `to`; both have as many bytes, in at most [`MAX_PROCESS_RUNS`] runs. Returns how many were copied.
pub(super) fn read_process(pid: i32, to: &[RawRun], from: &[RemoteRun]) -> io::Result<usize> {
    let remote: Vec<libc::iovec> = from
        .iter()
        .map(|run| libc::iovec { iov_base: std::ptr::without_provenance_mut(run.address as usize), iov_len: run.bytes })
        .collect();
    let (to, remote) = (&to[..to.len().min(MAX_PROCESS_RUNS)], &remote[..remote.len().min(MAX_PROCESS_RUNS)]);
    // SAFETY: `RawRun` is laid out as `iovec`; `to` is guarded memory of this process (see `crate::raw`); the other process's addresses
    // are checked by the kernel.
    let read = unsafe {
        libc::process_vm_readv(pid, to.as_ptr().cast(), to.len() as _, remote.as_ptr(), remote.len() as _, 0)
    };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// A memory file of `bytes` zero bytes that can neither shrink nor grow.
pub(crate) fn memory_file(name: &str, bytes: u64) -> io::Result<std::os::fd::OwnedFd> {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(file.as_fd(), SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
