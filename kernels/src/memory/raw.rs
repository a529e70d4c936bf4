//! Memory from the operating system, and the promise that raw page pointers may cross threads.
#![expect(unsafe_code, reason = "maps memory and hands out raw pointers to it")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::KernelError;

/// Page-aligned, zeroed, prefaulted host memory; freed on drop.
///
/// Handed out as a raw pointer, never as a slice: transports and other threads write it while it is shared.
#[derive(Debug)]
pub struct HostRegion {
    mapping: NonNull<u8>,
    mapped_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
    file: Option<Arc<OwnedFd>>,
}

// SAFETY: a mapping belongs to the process, not to a thread, and nothing in the type refers to the thread that made it.
unsafe impl Send for HostRegion {}
// SAFETY: `&HostRegion` gives out addresses only; whoever dereferences one keeps the page rules (`PageGuards`).
unsafe impl Sync for HostRegion {}

/// A transparent huge page on x86-64 and on arm64 with 4 KiB pages; a region of this size or more begins at a multiple of it.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl HostRegion {
    /// Maps `bytes` bytes, asks for huge pages, and touches every page so that no later access faults.
    ///
    /// # Errors
    /// [`KernelError::Map`] if `bytes` is 0 or the system has not enough memory.
    pub fn new(bytes: usize) -> Result<Self, KernelError> {
        let region = Self::map(bytes, None)?;
        region.prefault(0..bytes)?;
        Ok(region)
    }

    /// The same in a memory file that other processes of this host may map, sealed so that it keeps its size. A process that is handed
    /// [`file`](Self::file) sees what this one writes. Huge pages are asked for, but only kernels that allow them for shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`) give them.
    ///
    /// # Errors
    /// [`KernelError::Map`] as for [`new`](Self::new), or if the system makes no memory files.
    pub fn shareable(bytes: usize) -> Result<Self, KernelError> {
        let region = Self::sparse(bytes)?;
        region.prefault(0..bytes)?;
        Ok(region)
    }

    /// A shareable region whose pages the system gives when they are first touched, or when [`prefault`](Self::prefault) asks for them.
    ///
    /// # Errors
    /// As [`shareable`](Self::shareable), but for a lack of memory, which shows when a page is touched.
    pub fn sparse(bytes: usize) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Map { bytes, source };
        let file = Arc::new(memory_file(bytes).map_err(failed)?);
        let region = Self::map(bytes, Some(Arc::clone(&file)))?;
        seal(&file).map_err(failed)?;
        Ok(region)
    }

    fn map(bytes: usize, file: Option<Arc<OwnedFd>>) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Map { bytes, source };
        if bytes == 0 {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let slack = if bytes >= HUGE_PAGE_BYTES && !cfg!(miri) { HUGE_PAGE_BYTES } else { 0 };
        let mapped_bytes = bytes.checked_add(slack).ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address that the system picks touches no existing memory.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let mapping = NonNull::new(mapping.cast::<u8>()).expect("the system maps nothing at address 0");
        let skip = if slack == 0 { 0 } else { mapping.as_ptr().align_offset(HUGE_PAGE_BYTES) };
        // SAFETY: `skip <= slack`, so the result is inside the mapping.
        let start = unsafe { mapping.add(skip) };
        let region = Self { mapping, mapped_bytes, start, bytes, file };
        if let Some(file) = &region.file {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let (at, fd) = (region.start.as_ptr().cast(), file.as_raw_fd());
            // SAFETY: it replaces a part of this region's own mapping, which nobody knows yet.
            let placed = unsafe { libc::mmap(at, bytes, protection, flags, fd, 0) };
            if placed == libc::MAP_FAILED {
                return Err(failed(io::Error::last_os_error()));
            }
        }
        Ok(region)
    }

    /// The first byte.
    #[must_use]
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// The length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region of 0 bytes cannot be made")]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// The file behind a [`shareable`](Self::shareable) region; the region begins at its first byte.
    #[must_use]
    pub const fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.file.as_ref()
    }

    /// Has the system give the pages of a part now, so that no later access to it faults.
    ///
    /// # Errors
    /// [`KernelError::Map`] if the part lies outside the region, or the system has not enough memory.
    pub fn prefault(&self, part: Range<usize>) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { bytes: part.len(), source };
        if part.start > part.end || part.end > self.bytes {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        // From the page in which it begins: the region begins at a page, too.
        let first = part.start - part.start % page_bytes();
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            let (start, bytes) = (self.start.as_ptr().wrapping_add(first).cast(), part.end - first);
            // Only advice: a kernel without huge pages refuses it and nothing is lost but speed.
            // SAFETY: the range is this region's own mapping.
            unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
            // SAFETY: the range is this region's own mapping, and populating it changes no byte.
            let code = unsafe { libc::madvise(start, bytes, libc::MADV_POPULATE_WRITE) };
            if code == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(failed(error));
            }
            // Linux before 5.14 does not know the advice: touch the pages by hand.
        }
        for offset in (first..part.end).step_by(page_bytes()) {
            let byte = self.start.as_ptr().wrapping_add(offset);
            // SAFETY: `offset < bytes`; an atomic that adds nothing changes no byte, whoever uses the memory meanwhile.
            let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(byte) };
            byte.fetch_add(0, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with these values, and unmapped only here. A failure would leak, which is harmless.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped_bytes) };
    }
}

fn page_bytes() -> usize {
    // SAFETY: it reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|&bytes| bytes > 0).unwrap_or(4096)
}

fn memory_file(bytes: usize) -> io::Result<OwnedFd> {
    let checked = |code: libc::c_int| if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) };
    let length = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    // SAFETY: the name is a C string, and the flags are the call's own.
    let fd =
        checked(unsafe { libc::memfd_create(c"kvferry-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: the call just made it, and nobody else owns it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: it changes the length of a file of our own.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
    Ok(file)
}

/// Fixes the size of a file that is mapped, and, where the system can (Linux 5.1), forbids everybody to map it for writing anew: who is
/// handed the file may only read.
fn seal(file: &OwnedFd) -> io::Result<()> {
    let size = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    for seals in [size | libc::F_SEAL_FUTURE_WRITE, size] {
        // SAFETY: it seals a file of our own.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } >= 0 {
            return Ok(());
        }
    }
    Err(io::Error::last_os_error())
}

/// Where a plane of a layer begins. Only an address: whoever dereferences it keeps the page rules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageBase(pub(super) *mut u8);

// SAFETY: an address may be known to any thread; each dereference states why no other thread writes there.
unsafe impl Send for PageBase {}
// SAFETY: as above.
unsafe impl Sync for PageBase {}
