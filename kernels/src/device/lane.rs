//! One way between pages in device memory and pinned host memory: a stream, a slab on the device, and room for a job's tables.
//!
//! Out: gather into the slab, one copy to the host. In: copies into the slab, scatter. A lane does one thing at a time; who wants
//! them side by side has several.
#![expect(unsafe_code, reason = "queues copies and launches, and fills pinned memory by address")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::CopyPlan;

use super::{CopyEnd, Device, DeviceError, DeviceKvCache, DeviceMemory, Event, PinnedRegion, Stream};
use crate::cuda::{CopyJob, DevicePtr, DeviceRegions};
use crate::memory::HostRegion;

/// A stream with a slab of device memory of its own; nothing is allocated after it was made.
#[derive(Debug)]
pub struct Lane {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    slab: DeviceMemory,
    /// A `u64` for the digest, then a job's tables.
    tables: DeviceMemory,
    /// The same on the host.
    staged: PinnedRegion,
    /// Until this is passed the device reads `staged`.
    last: Option<Arc<dyn Event>>,
}

/// Bytes of pinned host memory that go to one place of a lane's slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagedRun {
    /// The first byte on the host.
    pub start: NonNull<u8>,
    /// Where in the slab.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

/// Bytes before a job's tables, which want an address that is a multiple of 8: the digest.
const DIGEST_BYTES: usize = 8;

impl Lane {
    /// Sets aside device memory for `slab_bytes` and a job's tables of at most `table_bytes`, and as much host memory for the
    /// latter.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &Arc<dyn Device>, slab_bytes: usize, table_bytes: usize) -> Result<Self, DeviceError> {
        let room = DIGEST_BYTES + table_bytes;
        let region = Arc::new(HostRegion::new(room).map_err(DeviceError::Host)?);
        Ok(Self {
            device: Arc::clone(device),
            stream: device.stream("kvferry-lane")?,
            slab: device.allocate(slab_bytes)?,
            tables: device.allocate(room)?,
            staged: device.pin(region)?,
            last: None,
        })
    }

    /// The slab's length in bytes.
    #[must_use]
    pub const fn slab_bytes(&self) -> usize {
        self.slab.bytes()
    }

    /// Gathers a plan's bytes into the slab, where its destination says, copies the slab's first `bytes` to pinned host memory and
    /// waits. Returns the digest of what was read from the pages.
    ///
    /// The pages are read once `after` is passed.
    ///
    /// # Errors
    /// [`DeviceError::Copy`] or [`DeviceError::Room`], and nothing was queued; or the device's. What is at `to` is undefined then.
    ///
    /// # Safety
    /// From `after` on and until this returns nobody writes the pages. So many bytes at `to` are pinned, and nobody else uses
    /// them meanwhile.
    pub unsafe fn gather(
        &mut self,
        plan: &CopyPlan,
        cache: &DeviceKvCache,
        after: Option<&dyn Event>,
        to: NonNull<u8>,
        bytes: usize,
    ) -> Result<Digest, DeviceError> {
        let job = CopyJob::copy(plan, cache.regions(), &self.slab_regions()).map_err(DeviceError::Copy)?;
        room("a write's bytes", bytes as u64, self.slab.bytes())?;
        if let Some(event) = after {
            self.stream.wait(event)?;
        }
        self.put_tables(&job)?;
        let (digest, tables) = self.places();
        // SAFETY: the tables were queued before it; the slab is this lane's, whose work is in one stream, and the caller vouches
        // for the pages.
        unsafe { job.launch(&*self.stream, tables, Some(digest)) }?;
        // SAFETY: the slab is as long, as was checked, and the caller vouches for the host's end.
        unsafe { self.stream.copy(CopyEnd::Device(self.slab.ptr()), CopyEnd::Host(to), bytes) }?;
        let sum = self.staged.region().as_ptr();
        // SAFETY: both are the lane's own and so long; nobody reads the host's until the event is passed.
        unsafe { self.stream.copy(CopyEnd::Device(digest), CopyEnd::Host(sum), DIGEST_BYTES) }?;
        let done = self.stream.record()?;
        self.last = Some(Arc::clone(&done));
        done.wait()?;
        self.device.host_reads(to, bytes);
        self.device.host_reads(sum, DIGEST_BYTES);
        // SAFETY: the lane's own memory, aligned to a page, and the copy to it has run.
        Ok(Digest::new(u64::from_le_bytes(unsafe { sum.cast::<[u8; DIGEST_BYTES]>().read() })))
    }

    /// Queues copies of pinned host memory into the slab, and a plan's bytes from there to the pages; returns an event that is passed
    /// when they are there. Pages are written once `after` is passed.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather). What was queued then may still run: [`settle`](Self::settle) waits for that.
    ///
    /// # Safety
    /// From `after` on and until the event is passed nobody else uses the pages. The runs are pinned, and nobody writes them
    /// until then.
    pub unsafe fn scatter(
        &mut self,
        plan: &CopyPlan,
        cache: &DeviceKvCache,
        after: Option<&dyn Event>,
        runs: &[StagedRun],
    ) -> Result<Arc<dyn Event>, DeviceError> {
        let job = CopyJob::copy(plan, &self.slab_regions(), cache.regions()).map_err(DeviceError::Copy)?;
        for run in runs {
            room("what landed", run.offset as u64 + run.bytes as u64, self.slab.bytes())?;
        }
        self.put_tables(&job)?;
        for run in runs {
            let to = CopyEnd::Device(self.slab.ptr().offset(run.offset as u64));
            // SAFETY: inside the slab, as was checked; the caller vouches for the host's end.
            unsafe { self.stream.copy(CopyEnd::Host(run.start), to, run.bytes) }?;
        }
        if let Some(event) = after {
            self.stream.wait(event)?;
        }
        let (_, tables) = self.places();
        // SAFETY: as in `gather`.
        unsafe { job.launch(&*self.stream, tables, None) }?;
        let done = self.stream.record()?;
        self.last = Some(Arc::clone(&done));
        Ok(done)
    }

    /// Waits until all that this lane queued has run.
    ///
    /// # Errors
    /// The device's.
    pub fn settle(&self) -> Result<(), DeviceError> {
        self.stream.record()?.wait()
    }

    fn slab_regions(&self) -> DeviceRegions {
        DeviceRegions::new(vec![(self.slab.ptr(), self.slab.bytes() as u64)])
    }

    /// Where the digest is added to, and where a job's tables are.
    fn places(&self) -> (DevicePtr, DevicePtr) {
        (self.tables.ptr(), self.tables.ptr().offset(DIGEST_BYTES as u64))
    }

    /// Queues the copy of a job's tables, behind a digest of nothing.
    fn put_tables(&mut self, job: &CopyJob) -> Result<(), DeviceError> {
        let tables = job.tables();
        room("a job's tables", tables.len() as u64, self.tables.bytes() - DIGEST_BYTES)?;
        if let Some(last) = self.last.take() {
            last.wait()?;
        }
        let (start, bytes) = (self.staged.region().as_ptr(), DIGEST_BYTES + tables.len());
        self.device.host_writes(start, bytes);
        // SAFETY: the lane's own memory, so long and aligned to a page; what read it is over.
        unsafe { start.cast::<[u8; DIGEST_BYTES]>().write([0; DIGEST_BYTES]) };
        // SAFETY: as above; inside the region.
        let rest = unsafe { start.add(DIGEST_BYTES) };
        // SAFETY: as above, and the two are different memory.
        unsafe { rest.copy_from_nonoverlapping(NonNull::from(tables).cast(), tables.len()) };
        // SAFETY: both are the lane's own and so long; the host's is not written before `last` is passed.
        unsafe { self.stream.copy(CopyEnd::Host(start), CopyEnd::Device(self.tables.ptr()), bytes) }
    }
}

// SAFETY: the lane's addresses are of its own memory, which belongs to the process, and of none of a thread's.
unsafe impl Send for StagedRun {}

impl Drop for Lane {
    fn drop(&mut self) {
        // Its memory goes after what uses it. A device that fails has stopped using it.
        let _ = self.settle();
    }
}

fn room(what: &'static str, needed: u64, bytes: usize) -> Result<(), DeviceError> {
    let bytes = bytes as u64;
    if needed <= bytes { Ok(()) } else { Err(DeviceError::Room { what, needed, bytes }) }
}
