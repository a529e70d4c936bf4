//! Memory that is either lent to the transport or looked at here, never both.
#![expect(unsafe_code, reason = "registers memory with a transport, and makes slices of it between transfers")]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_kernels::HostRegion;
use kvferry_kernels::copy::RegionTable;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::{BlockId, RegionId};
use kvferry_transport::{Adopted, Memory, MemoryFile, MemoryKind, Transport};

use crate::error::CliError;

/// Registered blocks: prefaulted, with huge pages where the system gives them, as the connector's caches have.
#[derive(Debug)]
pub(crate) struct Arena {
    region: HostRegion,
    id: RegionId,
    in_use: AtomicBool,
}

/// The arena is the transport's: a grant covers it, or posts and digests read it.
#[derive(Debug)]
pub(crate) struct Lent(Arc<Arena>);

/// The arena is this thread's.
pub(crate) struct Owned<'a>(&'a Arena);

impl Arena {
    /// Maps and registers `bytes` bytes; `shareable`: so that another process may map them. The caller drops `transport`, or shuts it
    /// down, before the arena.
    pub(crate) fn new(transport: &dyn Transport, bytes: u64, shareable: bool) -> Result<Self, CliError> {
        let region = map(bytes, shareable)?;
        let file = region.file().map(|file| MemoryFile { file: Arc::clone(file), offset: 0 });
        let memory = Memory { address: region.as_ptr(), bytes: region.len(), kind: MemoryKind::Host, file };
        // SAFETY: the region outlives the transport (`Shared` drops its transport first), and what a grant or a post covers is
        // `Lent`, which excludes `Owned`, the only other way to its bytes.
        let id = unsafe { transport.register(memory) }.map_err(CliError::transport("memory cannot be registered"))?;
        Ok(Self { region, id, in_use: AtomicBool::new(false) })
    }

    /// The same memory, for nobody but this process.
    pub(crate) fn unregistered(bytes: u64, shareable: bool) -> Result<Self, CliError> {
        Ok(Self { region: map(bytes, shareable)?, id: RegionId::new(0), in_use: AtomicBool::new(false) })
    }

    /// Gives it to the transport until the returned value is dropped.
    ///
    /// # Panics
    /// If it is in use: a transfer begins only after the last one was closed.
    pub(crate) fn lend(self: &Arc<Self>) -> Lent {
        self.take();
        Lent(Arc::clone(self))
    }

    /// Its bytes, between transfers.
    ///
    /// # Panics
    /// If it is in use: contents are looked at only after a transfer was closed.
    pub(crate) fn own(&self) -> Owned<'_> {
        self.take();
        Owned(self)
    }

    fn take(&self) {
        let was_in_use = self.in_use.swap(true, Ordering::Acquire);
        assert!(!was_in_use, "the arena is lent to a transfer, or looked at");
    }
}

fn map(bytes: u64, shareable: bool) -> Result<HostRegion, CliError> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let region = if shareable { HostRegion::shareable(bytes) } else { HostRegion::new(bytes) };
    region.map_err(|source| CliError::Memory { source })
}

impl Lent {
    /// The arena's id.
    pub(crate) fn id(&self) -> RegionId {
        self.0.id
    }

    /// For digests of what is not being written: sources, and extents that were sealed.
    pub(crate) fn table(&self) -> RegionTable {
        // SAFETY: the region is mapped for as long as `self` lives, and users of the table do not outlive `self`: a mover's job
        // holds the flow that holds it. What a digest reads is a source, which nobody writes, or sealed.
        unsafe { RegionTable::new(vec![(self.0.region.as_ptr(), self.0.region.len())]) }
    }

    /// Turns the bits of one byte of a sealed extent: the negative control of digests.
    pub(crate) fn spoil(&self, offset: u64) {
        assert!(offset < self.0.region.len() as u64, "only bytes of the arena can be spoilt");
        // SAFETY: inside the region, by the check above.
        let byte = unsafe { self.0.region.as_ptr().add(offset as usize) };
        // SAFETY: mapped, and sealed, so that nobody else reads or writes it.
        let old = unsafe { byte.read_volatile() };
        // SAFETY: as above.
        unsafe { byte.write_volatile(!old) }
    }
}

/// Blocks of a write in the sender's memory, numbered from the lowest of them.
pub(crate) struct ForeignBlocks<'a> {
    pub(crate) blocks: Vec<BlockId>,
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps them mapped.
    _adopted: &'a Adopted,
}

impl<'a> ForeignBlocks<'a> {
    /// The blocks of `extent`, one after the other in the window.
    pub(crate) fn new(adopted: &'a Adopted, extent: Extent, block_bytes: u64) -> Result<Self, CliError> {
        let torn = || CliError::Word { found: "a write whose blocks do not lie in whole ones".to_owned() };
        let runs: Vec<_> = adopted.runs().collect();
        let (size, end) = (block_bytes as usize, extent.offset + extent.run_bytes);
        let mut addresses = Vec::new();
        for offset in (extent.offset..end).step_by(size) {
            let at = runs.partition_point(|run| run.offset <= offset).checked_sub(1).ok_or_else(torn)?;
            let skip = (offset - runs[at].offset) as usize;
            if skip + size > runs[at].bytes {
                return Err(torn());
            }
            // SAFETY: the block is inside the run, by the check above.
            addresses.push(unsafe { runs[at].address.add(skip) });
        }
        let start = addresses.iter().copied().min().ok_or_else(torn)?;
        let steps = addresses.iter().map(|address| (address.addr().get() - start.addr().get()) / size);
        let blocks: Vec<_> = steps.map(|step| BlockId::new(step as u32)).collect();
        let is_whole = |(address, block): (&NonNull<u8>, &BlockId)| {
            address.addr().get() == start.addr().get() + block.get() as usize * size
        };
        if !addresses.iter().zip(&blocks).all(is_whole) {
            return Err(torn());
        }
        let bytes = blocks.iter().max().map_or(0, |last| (last.get() as usize + 1) * size);
        Ok(Self { blocks, start, bytes, _adopted: adopted })
    }

    /// For digests of them.
    pub(crate) fn table(&self) -> RegionTable {
        // SAFETY: only the blocks are read, and those are mapped while the write is held, which `self` borrows, as who digests does. The
        // sender keeps their bytes as they are, and its board tells if not.
        unsafe { RegionTable::new(vec![(self.start, self.bytes)]) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.in_use.store(false, Ordering::Release);
    }
}

impl Deref for Owned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped and initialised for the arena's life; `Owned` excludes `Lent` and other `Owned`.
        unsafe { std::slice::from_raw_parts(self.0.region.as_ptr().as_ptr(), self.0.region.len()) }
    }
}

impl DerefMut for Owned<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; `&mut self` is the only borrow of the only `Owned`.
        unsafe { std::slice::from_raw_parts_mut(self.0.region.as_ptr().as_ptr(), self.0.region.len()) }
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        self.0.in_use.store(false, Ordering::Release);
    }
}
